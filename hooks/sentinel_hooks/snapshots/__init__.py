"""Snapshots: restorable in-run state, candidates until quiet steps confirm them."""

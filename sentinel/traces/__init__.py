"""Recorded runs: every observation, decision and outcome on disk, and what can be learned from it.

recorder writes, reader reads, replay computes the decisions again; segments is how the bytes lie
on disk, records what is in them, summary the extremes of closed segments.
"""

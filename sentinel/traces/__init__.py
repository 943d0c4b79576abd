"""The record of a run on disk: written, read, replayed."""

"""The service beside the trainer: HTTP, metrics, the decision on request; no torch."""

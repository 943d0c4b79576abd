"""Bytes to values and back, versioned; the only place that knows how non-finite numbers travel."""

"""What a sidecar keeps: series on disk in the trace format, everything else in a database."""

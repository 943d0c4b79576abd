"""Cost tables: printed, not asserted."""

"""Blocking client of the sidecar, on the standard library only (trainer images have no httpx)."""

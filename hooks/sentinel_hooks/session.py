"""One training process under watch: observe, decide, act."""

from __future__ import annotations

from typing import Any


class Session:
    """Lives from attach() to detach(); one for each rank."""


def attach(trainer: Any = None, **options: Any) -> Session:
    """Attach to `trainer` and return the running session."""
    raise NotImplementedError("sentinel_hooks.attach is not built yet")

"""Trainer side of sentinel: the only package that imports torch."""

from __future__ import annotations

from sentinel_hooks.session import Session, attach

__all__ = ["Session", "attach"]

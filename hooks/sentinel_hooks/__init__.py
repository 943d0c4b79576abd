"""Trainer side of sentinel: the only package that imports torch."""

from __future__ import annotations

from sentinel_hooks.attaching import attach
from sentinel_hooks.errors import AttachError, TrainingHalted
from sentinel_hooks.session import Session
from sentinel_hooks.signals import Signals
from sentinel_hooks.snapshots import Snapshots
from sentinel_hooks.status import BlindSpot, Status

__all__ = [
    "AttachError",
    "BlindSpot",
    "Session",
    "Signals",
    "Snapshots",
    "Status",
    "TrainingHalted",
    "attach",
]

"""Trainer side of sentinel: the only package that imports torch."""

from __future__ import annotations

from sentinel_hooks.adapters import register_adapter
from sentinel_hooks.attaching import attach
from sentinel_hooks.errors import AttachError, StillHalted, TrainingHalted
from sentinel_hooks.session import Session
from sentinel_hooks.signals import Signals
from sentinel_hooks.snapshots import Snapshots
from sentinel_hooks.status import BlindSpot, Status
from sentinel_hooks.waiting import Adapter, TrainerSession

__all__ = [
    "Adapter",
    "AttachError",
    "BlindSpot",
    "Session",
    "Signals",
    "Snapshots",
    "Status",
    "StillHalted",
    "TrainerSession",
    "TrainingHalted",
    "attach",
    "register_adapter",
]

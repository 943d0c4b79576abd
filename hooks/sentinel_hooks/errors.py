"""Errors raised by the trainer side.

* sentinel.core.errors.SentinelError
  - AttachError      attach() was given something it cannot watch
  - TrainingHalted   a policy that may halt stopped the run, on purpose
"""

from __future__ import annotations

from sentinel.core.errors import SentinelError


class AttachError(SentinelError, ValueError):
    """attach() cannot watch what it was given; the message says what and the way out."""


class TrainingHalted(SentinelError, RuntimeError):
    """A rule or a person halted the run; raised from optimizer.step(), the step skipped."""

"""Errors raised by the trainer side.

* sentinel.core.errors.SentinelError
  - AttachError      attach() was given something it cannot watch
    - StillHalted    ... a run that was halted and that nobody has cleared
  - TrainingHalted   a policy that may halt stopped the run, on purpose
"""

from __future__ import annotations

from sentinel.core.errors import SentinelError


class AttachError(SentinelError, ValueError):
    """attach() cannot watch what it was given; the message says what and the way out."""


class StillHalted(AttachError):
    """The run was halted and nobody has cleared that: it must not go on by accident."""


HALT_EXIT_CODE = 86


class TrainingHalted(SentinelError, RuntimeError, SystemExit):
    """A rule or a person halted the run; raised from optimizer.step(), the step skipped.

    Nobody catches it: the process ends with exit code 86, so that whoever restarts crashed jobs
    can leave this one alone. `except Exception` does catch it.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.code = HALT_EXIT_CODE

"""What happens between two steps, at the safe point: the second kind of record beside the step.

`engine.note(state, event, policy)` moves the state on it. `step` is the step that comes next.
"""

from __future__ import annotations

from dataclasses import dataclass

from sentinel.core.state import Stats


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """A candidate was copied at the safe point before step `step`."""

    step: int
    tier: str = "ram"


@dataclass(frozen=True, slots=True)
class Restored:
    """The snapshot of step `target` was copied back at the safe point before step `step`.

    `stats` are the statistics as they were when that snapshot was taken: they roll back with
    the weights.
    """

    step: int
    target: int
    stats: Stats


@dataclass(frozen=True, slots=True)
class RestoreFailed:
    """A rollback found no usable snapshot, or copying failed: nothing was changed."""

    step: int
    target: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class SnapshotLost:
    """A snapshot can no longer be restored (not enough memory, damaged, deleted)."""

    step: int
    target: int
    reason: str


@dataclass(frozen=True, slots=True)
class AutomationSet:
    """Automation was paused or resumed outside a step (the kill-switch file)."""

    step: int
    paused: bool
    by: str


Event = SnapshotTaken | Restored | RestoreFailed | SnapshotLost | AutomationSet

"""What belongs to a trainer that speaks JSON: it has no engine, so its state lives here alone.

    session.first                              the step at which it said that it begins, if it did
    event = session.with_stats(event, state)   a snapshot's statistics kept, or given back
    session.due(mirror)                        the step that comes next; None: any

Purity:  no clock, no I/O. Mutable, of one run.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from sentinel.core.events import Event, Restored, SnapshotTaken
from sentinel.core.state import State, Stats
from sentinel.sidecar.runs.mirror import Mirror


@dataclass(slots=True)
class Session:
    """See the module docstring.

    Attributes:
        unrevived: of an earlier start: its state was not computed again yet.
    """

    first: int | None = None
    unrevived: bool = False
    _stats: dict[int, Stats] = field(default_factory=dict)  # of its snapshots, by step

    def due(self, mirror: Mirror) -> int | None:
        """The step that it is expected to report; None: any."""
        return self.first if mirror.state is None else mirror.state.step + mirror.undecided

    def with_stats(self, event: Event, state: State) -> Event:
        """Keep and give back the statistics that belong to its snapshots."""
        kept = self._stats
        if isinstance(event, SnapshotTaken):
            kept[event.step] = state.stats
        elif isinstance(event, Restored):
            return replace(event, stats=kept.get(event.target, Stats()))
        known = {s.step for s in state.ledger.snapshots}
        for step in [s for s in kept if s not in known and s != event.step]:
            del kept[step]
        return event

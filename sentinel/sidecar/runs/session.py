"""What belongs to a trainer that speaks JSON: it has no engine, so its state lives here alone.

    session.id                                 what it carries, if it writes alone; else ""
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


@dataclass(frozen=True, slots=True)
class Claim:
    """How a trainer comes to write a run.

    Attributes:
        carried: the session that it was given before; "" if it carries none.
        exclusive: it is to be the only one, and will carry the session that it is given now.
        take_over: whoever writes the run is gone, alive as it looks.
    """

    carried: str = ""
    exclusive: bool = False
    take_over: bool = False

    @property
    def alone(self) -> bool:
        """Whether it will carry a session."""
        return self.exclusive or self.carried != ""


@dataclass(slots=True)
class Session:
    """See the module docstring.

    Attributes:
        unrevived: of an earlier start: its state was not computed again yet.
        strangers: what those carried who were refused here, so that each is told of once.
    """

    id: str = ""
    first: int | None = None
    unrevived: bool = False
    strangers: set[str] = field(default_factory=set)
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

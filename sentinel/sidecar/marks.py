"""What Grafana is to be told and how it is kept: what the sidecar needs of whoever talks to it.

    settings.grafana = Grafana(writer, keeper, every_s=600.0)     the command line puts it together
    marks = Marks(grafana, store)
    marks.decided("r7", "1a2b", row)          told at once, and written down until it is done
    await marks.bring()                       what is still written down, after a restart or a while

Each mark once, also over a restart and after Grafana was away for days: the row of a mark lies in
the database from its decision on, and goes when Grafana has it. Whoever brings one again says so,
and the writer looks first whether it is there. What waits for a database that fails goes with a
process that is killed: marks, nothing else.

Threads: the event loop's; the writer's thread only calls Store.marked.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from sentinel.core.errors import ConfigError
from sentinel.sidecar.store.store import Store


class Writer(Protocol):
    """What is needed of dashboards.annotate.AnnotationWriter."""

    written: int
    dropped: int
    trouble: str
    on_done: Callable[[Any], None]

    @property
    def waiting(self) -> int: ...
    @property
    def room(self) -> int: ...
    def decided(
        self, run: str, row: Mapping[str, Any], *, key: Hashable = None, again: bool = False
    ) -> None: ...
    def close(self) -> None: ...


class Keeper(Protocol):
    """What is needed of dashboards.reconcile.Reconciler."""

    @property
    def up(self) -> bool | None: ...
    @property
    def left_alone(self) -> Mapping[str, str]: ...
    @property
    def writes(self) -> int: ...
    @property
    def failures(self) -> Mapping[str, int]: ...
    def begin(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Grafana:
    """The Grafana that this sidecar talks to; nothing of it ever waits.

    Attributes:
        keeper: puts dashboards back; None: marks only.
        every_s: between two looks of the keeper.
    """

    writer: Writer
    keeper: Keeper | None = None
    every_s: float = 600.0

    def __post_init__(self) -> None:
        if not self.every_s >= 1.0:
            raise ConfigError(f"grafana every_s must be at least 1 s, got {self.every_s:g}")


class Marks:
    """See the module docstring."""

    def __init__(self, grafana: Grafana | None, store: Store) -> None:
        self._writer = None if grafana is None else grafana.writer
        self._store = store
        if self._writer is not None:
            self._writer.on_done = store.marked

    @property
    def wanted(self) -> bool:
        """Whether anybody is to be told."""
        return self._writer is not None

    def decided(self, run: str, incarnation: str, row: Mapping[str, Any]) -> None:
        """Tell of an executed action; its MarkRow is written with its decision."""
        if self._writer is not None:
            key = (run, incarnation, row["step"], row["attempt"])
            self._writer.decided(run, row, key=key)

    async def bring(self) -> None:
        """Hand the writer what it has not got, as far as it has room; raises StoreError."""
        writer = self._writer
        if writer is None or writer.room <= 0:
            return
        for mark in await self._store.marks(writer.room):
            row = {
                "step": mark.step,
                "action": mark.action,
                "rule": mark.rule,
                "reason": mark.reason,
                "at": mark.at,
            }
            key = (mark.run, mark.incarnation, mark.step, mark.attempt)
            writer.decided(mark.run, row, key=key, again=True)

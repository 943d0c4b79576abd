"""What Grafana is to be told.

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

from collections.abc import Mapping
from typing import Any

from sentinel.sidecar.grafana import Grafana
from sentinel.sidecar.store.store import Store


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

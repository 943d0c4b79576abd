"""The runs by name, and the open orders of those that have not come back yet.

    registry.get("r7")                         raises RefusedError, which says how to register it
    registry.writer("r7", incarnation, fence)  only for its present writer
    registry.make_room(), registry.forget("r7")

Errors:  RefusedError: unknown, written by another, or no room.
"""

from __future__ import annotations

from collections.abc import Callable

from sentinel.sidecar.runs.orders import Orders, Tell
from sentinel.sidecar.runs.refusal import RefusedError
from sentinel.sidecar.runs.run import Run
from sentinel.sidecar.settings import Settings
from sentinel.sidecar.store.store import Store


class Registry:
    """See the module docstring.

    Attributes:
        runs: by name.
        parked: the orders of an earlier start to runs that are not here.
    """

    def __init__(
        self, settings: Settings, store: Store, look: Callable[[Run], None], tell: Tell
    ) -> None:
        """Begin with none.

        Args:
            look: takes up what is on disk of a run of an earlier start; called once for each.
            tell: hears of every change of an order.
        """
        self._settings = settings
        self._store = store
        self._look = look
        self._tell = tell
        self.runs: dict[str, Run] = {}
        self.parked: dict[str, Orders] = {}

    def get(self, name: str) -> Run:
        """The run of that name; raises RefusedError."""
        run = self.runs.get(name)
        if run is None:
            raise RefusedError(
                "unknown_run", f"run {name!r} is not registered here: PUT /v1/runs/{name}", 404
            )
        if run.unread:
            self._look(run)
        return run

    def writer(self, name: str, incarnation: str, fence: int) -> Run:
        """The run, if that is who writes it; raises RefusedError."""
        run = self.get(name)
        if run.incarnation != incarnation or run.fence != fence:
            raise RefusedError(
                "fenced",
                f"run {name!r} is written by incarnation {run.incarnation} (fence {run.fence}), "
                f"not by {incarnation} (fence {fence})",
            )
        return run

    def make_room(self) -> None:
        """For one more; the run that was heard last of those that are over goes.

        Raises:
            RefusedError: all of them are running.
        """
        if len(self.runs) < self._settings.max_runs:
            return
        over = [r for r in self.runs.values() if r.run_state != "running"]
        if not over:
            raise RefusedError("full", f"{self._settings.max_runs} runs are running here", 429)
        oldest = min(over, key=lambda r: r.last_heard)
        self._store.close_record(oldest.name)
        del self.runs[oldest.name]

    def forget(self, name: str) -> None:
        """A run whose series are gone is not listed any more."""
        self.runs.pop(name, None)

    def orders_of(self, name: str) -> Orders:
        """The orders to the run of that name, whether it is here or not."""
        run = self.runs.get(name)
        if run is not None:
            return run.orders
        return self.parked.setdefault(name, self.new_orders(name))

    def claim_orders(self, name: str) -> Orders:
        """The same, for a run that is about to be here."""
        waiting = self.parked.pop(name, None)
        run = self.runs.get(name)
        if run is not None:
            return run.orders
        return self.new_orders(name) if waiting is None else waiting

    def new_orders(self, name: str) -> Orders:
        """None yet."""
        return Orders(name, self._tell)

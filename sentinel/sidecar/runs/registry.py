"""The runs by name, and the orders to those that are not in memory.

    registry.get("r7")                         raises RefusedError, which says how to register it
    registry.find("r7")                        the same; None: it is not known at all
    registry.peek("r7")                        for who only looks: nothing makes room for it
    registry.writer("r7", incarnation, fence)  only for its present writer
    registry.make_room(), registry.forget("r7")

At most `max_runs` are in memory. What makes room is stored: on disk as it was, its orders and
silences here; it is taken up again, as after a restart, when its trainer or an order comes. Runs
that have ended go first, then lost ones: those are watched for.

Errors:  RefusedError: unknown, written by another, or no room.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from sentinel.sidecar.runs.orders import Orders, Tell
from sentinel.sidecar.runs.refusal import RefusedError
from sentinel.sidecar.runs.run import ENDED, Run
from sentinel.sidecar.settings import Settings
from sentinel.sidecar.store.store import Store

logger = logging.getLogger(__name__)

MOST_PEEKED = 32  # stored runs that are kept at hand for who looks at them

Silences = dict[tuple[int, int], float]


class Registry:
    """See the module docstring.

    Attributes:
        runs: in memory, by name.
        stored: those that are only on disk: when each ended or was last heard, by name.
        parked: the orders to runs that are not in memory.
        silences: of incidents of such runs.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        *,
        look: Callable[[Run], None],
        read: Callable[[str], Run | None],
        save: Callable[[Run], None],
        tell: Tell,
    ) -> None:
        """Begin with none.

        Args:
            look: takes up what is on disk of a run of an earlier start; called once for each.
            read: a run that is only stored, as its own file tells of it.
            save: writes down what is known of a run.
            tell: hears of every change of an order.
        """
        self._settings = settings
        self._store = store
        self._look = look
        self._read = read
        self._save = save
        self._tell = tell
        self._peeked: dict[str, Run] = {}
        self.runs: dict[str, Run] = {}
        self.stored: dict[str, float] = {}
        self.parked: dict[str, Orders] = {}
        self.silences: dict[str, Silences] = {}

    def get(self, name: str) -> Run:
        """The run of that name; raises RefusedError."""
        run = self.find(name)
        if run is None:
            raise RefusedError(
                "unknown_run", f"run {name!r} is not registered here: PUT /v1/runs/{name}", 404
            )
        if run.unread:
            self._look(run)
        return run

    def find(self, name: str) -> Run | None:
        """The run of that name, in memory again if it was stored; raises RefusedError."""
        run = self.runs.get(name)
        if run is not None or name not in self.stored:
            return run
        run = self._from_disk(name)
        if run is None:
            return None
        self.make_room()
        self._peeked.pop(name, None)
        self.take_up(run)
        logger.info("run taken up from the store run=%s state=%s", name, run.run_state)
        return run

    def peek(self, name: str) -> Run | None:
        """The run of that name, for who only looks; a stored one stays so."""
        run = self.runs.get(name)
        if run is not None or name not in self.stored:
            if run is not None and run.unread:
                self._look(run)
            return run
        run = self._from_disk(name)
        if run is None:
            return None
        run.orders = self.parked.get(name) or run.orders
        run.silenced = self.silences.setdefault(name, run.silenced)
        self._peeked[name] = run
        while len(self._peeked) > MOST_PEEKED:
            del self._peeked[next(iter(self._peeked))]
        return run

    def _from_disk(self, name: str) -> Run | None:
        run = self._peeked.get(name) or self._read(name)
        if run is not None and run.unread:
            self._look(run)
        return run

    def take_up(self, run: Run) -> None:
        """One of the store is in memory now, with what people have asked for."""
        run.orders = self.claim_orders(run.name)
        run.silenced = {**self.silences.pop(run.name, {}), **run.silenced}
        self.runs[run.name] = run

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
        """For one more; what ended first goes into the store, else what was heard longest ago.

        Raises:
            RefusedError: all of them are running.
        """
        most = self._settings.max_runs
        if len(self.runs) < most:
            return
        over = [r for r in self.runs.values() if r.run_state != "running"]
        if not over:
            raise RefusedError("full", f"{most} runs are running here (--max-runs)", 429)
        ended = [run for run in over if run.run_state in ENDED]
        oldest = min(ended or over, key=lambda r: r.ended or r.last_heard)
        name = oldest.name
        self._save(oldest)
        self._store.close_record(name)
        self.stored[name] = oldest.ended or oldest.last_heard
        if len(oldest.orders):
            self.parked[name] = oldest.orders
        if oldest.silenced:
            self.silences[name] = oldest.silenced
        del self.runs[name]
        if ended:
            logger.info("run makes room, it is only stored now run=%s most=%s", name, most)
        else:
            logger.warning(
                "a lost run makes room, for want of one that has ended: it is only stored now, and "
                "no metric says that it is lost; raise --max-runs run=%s most=%s",
                name,
                most,
            )

    def forget(self, name: str) -> None:
        """A run whose series are gone is not listed any more."""
        self.runs.pop(name, None)
        self.stored.pop(name, None)
        self._peeked.pop(name, None)
        self.silences.pop(name, None)

    def orders_of(self, name: str) -> Orders:
        """The orders to the run of that name, whether it is here or not."""
        run = self.runs.get(name)
        if run is not None:
            return run.orders
        return self.parked.setdefault(name, self.new_orders(name))

    def claim_orders(self, name: str) -> Orders:
        """The same, for a run that is about to be here."""
        self.stored.pop(name, None)
        waiting = self.parked.pop(name, None)
        run = self.runs.get(name)
        if run is not None:
            return run.orders
        return self.new_orders(name) if waiting is None else waiting

    def new_orders(self, name: str) -> Orders:
        """None yet."""
        return Orders(name, self._tell)

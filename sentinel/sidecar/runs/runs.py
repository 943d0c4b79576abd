"""All runs of a sidecar, as its routes, jobs and people use them: the parts, put together.

    runs = Runs(settings, timer, store, hub)
    runs.load(now)                                     what an earlier start has left
    runs.register(message, now) -> Registered          runs.steps(message, now) -> Reply
    runs.hand_over(message, now), runs.close(message, now)
    runs.json.register(...), .step(...), .close(...)   the same for trainers that speak JSON
    runs.command(run, order, now), runs.expire(now)    people, and time

The trainer's state is the only truth. The copy here follows the moves that each frame carries and
is compared by hash before every decision; whatever does not fit is answered with `need_state`. A
sidecar of another engine version only records. The highest fence writes: a process that was
replaced is refused, and so is a second live one.

A report is on disk before it is answered. Where the disk fails the decision is still given, the
reply says that it was not recorded, and late reports are refused until it heals: their trainer
keeps them.

Units:   `now` in Unix seconds; `timer` gives monotonic seconds, for durations only.
Purity:  no clock; writes through its store only. One thread (the event loop) calls it.
Errors:  RefusedError, which the routes turn into a Refused message.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from sentinel.core.types import Command
from sentinel.sidecar.hub import Hub
from sentinel.sidecar.marks import Marks
from sentinel.sidecar.runs.chronicle import Chronicle
from sentinel.sidecar.runs.comeback import Comeback
from sentinel.sidecar.runs.json_trainers import JsonTrainers
from sentinel.sidecar.runs.orders import Order, Orders
from sentinel.sidecar.runs.recording import Recording
from sentinel.sidecar.runs.registry import Registry
from sentinel.sidecar.runs.reports import Reports
from sentinel.sidecar.runs.run import Run
from sentinel.sidecar.runs.writers import Writers
from sentinel.sidecar.settings import Settings
from sentinel.sidecar.store.store import Store
from sentinel.wire.messages import Close, HandOver, Register, Registered, Reply, Steps

logger = logging.getLogger(__name__)

COMMAND_TTL_S = 600.0


class Runs:
    """See the module docstring.

    Attributes:
        runs: in memory, by name.
        stored: those that are only on disk, see Registry.
        parked: the orders to runs that are not in memory.
        on_order: told of every change of an order.
        marks: what Grafana is told.
        json: trainers that speak JSON.
    """

    def __init__(
        self, settings: Settings, timer: Callable[[], float], store: Store, hub: Hub
    ) -> None:
        def tell(run: str, order: Order) -> None:
            self.on_order(run, order)

        self.on_order: Callable[[str, Order], None] = lambda run, order: None
        self.marks = Marks(settings.grafana, store)
        self._settings = settings
        self._chronicle = Chronicle(store, hub, self.marks)
        self.recording = Recording(store, hub, self._chronicle)
        self._comeback = Comeback(settings, store, self._chronicle, tell)
        self._registry = Registry(
            settings,
            store,
            look=self._comeback.look,
            read=self._comeback.stored,
            save=self._chronicle.save,
            tell=tell,
        )
        self._writers = Writers(settings, self._registry, self.recording, self._chronicle)
        self._reports = Reports(self._registry, self.recording, self._chronicle, timer)
        self.json = JsonTrainers(
            settings,
            self._registry,
            self._writers,
            self.recording,
            self._chronicle,
            self._comeback,
            timer,
        )
        self.runs: dict[str, Run] = self._registry.runs
        self.stored: dict[str, float] = self._registry.stored
        self.parked: dict[str, Orders] = self._registry.parked

    def get(self, name: str) -> Run:
        """The run of that name; raises RefusedError."""
        return self._registry.get(name)

    def peek(self, name: str) -> Run | None:
        """The same for who only looks: a stored one stays so; None: there is none."""
        return self._registry.peek(name)

    def silences_of(self, name: str) -> dict[tuple[int, int], float]:
        """Until when which of its incidents are silenced; of a stored run too."""
        run = self.runs.get(name)
        return self._registry.silences.setdefault(name, {}) if run is None else run.silenced

    async def newest_stored(self, most: int) -> list[Run]:
        """The newest of those that are only on disk; reads it in a thread."""
        stored = self.stored
        names = sorted(stored, key=stored.__getitem__, reverse=True)[:most]
        read = self._comeback.stored
        found = await asyncio.to_thread(lambda: [read(name) for name in names])
        return [run for run in found if run is not None and run.name in stored]

    def orders_of(self, name: str) -> Orders:
        """The orders to the run of that name, whether it is here or not."""
        return self._registry.orders_of(name)

    # ---- the sidecar -------------------------------------------------------------------

    def load(self, now: float) -> None:
        """Take up the runs of an earlier start; their trainers hand their states over."""
        for run in self._comeback.runs(now):
            self.runs[run.name] = run
        self.stored.update(self._comeback.not_taken)

    async def catch_up(self, now: float) -> None:
        """Take up those that only the database knows, which came late; raises StoreError."""
        for run in await self._comeback.missed(now):
            if run.name not in self.runs and len(self.runs) < self._settings.max_runs:
                self._registry.take_up(run)
        for name, at in self._comeback.not_taken.items():
            if name not in self.runs:
                self.stored.setdefault(name, at)

    def let_go(self, run: Run) -> None:
        """Close the files of a run that has been lost for long; a report opens them again."""
        self.recording.close(run)

    def forget(self, name: str) -> None:
        """A run whose series are gone is not listed any more."""
        self._registry.forget(name)

    def expire(self, now: float) -> None:
        """Mark silent runs lost and old orders expired.

        Where the clock was set back, silence counts from now on: no run lives for an hour more.
        """
        back = sum(run.not_after(now) for run in self.runs.values())
        if back:
            logger.warning("the clock was set back, silence counts from now on runs=%s", back)
        for run in self.runs.values():
            if run.run_state == "running" and not run.live(now, self._settings.lost_after_s):
                self._chronicle.lost(run, now)
            run.orders.expire(now)
        for orders in self.parked.values():
            orders.expire(now)

    def save(self, run: Run) -> None:
        """Write what is known of a run into the database."""
        self._chronicle.save(run)

    # ---- trainers ----------------------------------------------------------------------

    def register(self, message: Register, now: float) -> Registered:
        """Take a process as the writer of its run; see Writers."""
        return self._writers.register(message, now)

    def steps(self, message: Steps, now: float) -> Reply:
        """Record the frames and decide the newest, if it can be decided; see Reports."""
        return self._reports.steps(message, now)

    def hand_over(self, message: HandOver, now: float) -> None:
        """Take the trainer's state; see Reports."""
        self._reports.hand_over(message, now)

    def close(self, message: Close, now: float) -> None:
        """The run is over; see Reports."""
        self._reports.close(message, now)

    # ---- people ------------------------------------------------------------------------

    def command(self, name: str, command: Command, ttl_s: float, now: float) -> Order:
        """Take a person's order; the same id again changes nothing.

        Raises:
            RefusedError: unknown run, or too many orders are open.
        """
        return self.get(name).orders.take(command, ttl_s, now)

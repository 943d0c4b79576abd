"""What the routes, the jobs and the page share: one object, made once by create_app.

    service = Service(Settings(), clock=time.time, timer=time.perf_counter)
    service.runs · service.door · service.now()

Threads: the event loop's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sentinel.sidecar import copies
from sentinel.sidecar.door import Door
from sentinel.sidecar.health import Health
from sentinel.sidecar.hub import Hub
from sentinel.sidecar.people import People
from sentinel.sidecar.recall import Past
from sentinel.sidecar.runs import RefusedError, Run, Runs
from sentinel.sidecar.security import TokenFiles
from sentinel.sidecar.settings import Settings
from sentinel.sidecar.store.store import Store
from sentinel.sidecar.verify import Verifier
from sentinel.sidecar.watch import Watched
from sentinel.wire import messages

logger = logging.getLogger(__name__)


class Service:
    """One sidecar's parts.

    Attributes:
        ready: it is up, and not on its way down.
    """

    def __init__(
        self, settings: Settings, *, clock: Callable[[], float], timer: Callable[[], float]
    ) -> None:
        """Put the parts together.

        Args:
            clock: Unix seconds, for what people see and for expiry.
            timer: monotonic seconds, for durations.
        """
        self.settings = settings
        self.now = clock
        self.timer = timer
        self.store = Store(settings, clock, timer)
        self.hub = Hub(f"{int(clock() * 1000):x}")
        self.runs = Runs(settings, timer, self.store, self.hub)
        self.runs.load(clock())
        self.health = Health()
        self.watched = Watched(settings)
        self.tokens = TokenFiles(settings.token_files, settings.token)
        self.access = self.tokens.access
        self.reread: Callable[[], None] = lambda: None  # read token files again: now
        self.door = Door(settings, self.access, timer)
        self.people = People(self.runs, self.store.database, self.hub, clock)
        self.people.restore()
        self.past = Past(self.runs, self.store)
        self.verifier: Verifier | None = None
        if (settings.watch or settings.run_dirs) and settings.verify_every_s:
            self.verifier = Verifier(
                every_s=settings.verify_every_s,
                bytes_per_s=settings.verify_bytes_per_s,
                clock=clock,
            )
            self.verifier.remember(self.people.damaged())
        self.ready = False
        self._whole = self.store.database.opened

    async def catch_up(self) -> None:
        """Take up what a database knows that could not be opened at the start, once it can be."""
        if self._whole or not self.store.database.opened:
            return
        await self.runs.catch_up(self.now())
        await self.people.catch_up()
        await self.past.catch_up()
        if self.verifier is not None:
            self.verifier.remember(await self.people.damaged_later())
        self._whole = True
        logger.warning("what an earlier start has left in the database is taken up")

    def series_directory(self, run: str) -> Path:
        """Where the series of a run lie; raises RefusedError."""
        if not messages.RUN_NAME.fullmatch(run):
            raise RefusedError("unknown_run", f"no run has the name {run!r}", 404)
        place = self.store.run_directory(run)
        if run in self.runs.runs or run in self.runs.stored or place.is_dir():
            return place
        watched = self.watched.directories.get(run)
        if watched is None:
            self.runs.get(run)  # which says how to register it
        assert watched is not None
        return watched

    def run(self, name: str) -> Run:
        """A run that reports here or has, or one that is watched; raises RefusedError."""
        return self.only_watched(name) or self.runs.peek(name) or self.runs.get(name)

    def only_watched(self, name: str) -> Run | None:
        """The run, if it is embedded and does not report here too."""
        own = name in self.runs.runs or name in self.runs.stored
        return None if own else self.watched.runs.get(name)

    def refuse_watched(self, name: str) -> None:
        """Raise RefusedError when the run is only watched: nobody would hear an order."""
        if self.only_watched(name) is not None:
            raise RefusedError(
                "watched",
                f"run {name!r} does not report here and is only watched: it hears no orders; "
                "to pause it, touch the file PAUSE in its directory",
            )

    def seen_at(self, run: str) -> tuple[Path, ...]:
        """Where the files of a trainer may lie."""
        known = self.watched.directories.get(run)
        folders = self.settings.watch
        if run in self.runs.runs or run in self.runs.stored:
            folders = (*self.settings.run_dirs, *folders)
        below = tuple(folder / run for folder in folders)
        return below if known is None else (known, *below)

    def copies(self, run: Run) -> list[dict[str, Any]]:
        """What it can go back to, for people."""
        return copies.listed(run, self.verifier, self.settings, self.now())

    def all_runs(self) -> list[Run]:
        """Both kinds, without those that are only stored."""
        own = self.runs.runs
        return [*own.values(), *(r for n, r in self.watched.runs.items() if n not in own)]

    def close(self) -> None:
        """Let go of the disk and the database; what is queued is written first."""
        if self.verifier is not None:
            self.verifier.close()
        self.store.close()

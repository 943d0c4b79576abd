"""The store: where a sidecar's records and its database lie, and what of them a start finds again.

    store = Store(settings, clock, timer)
    record = store.open_record(run="r7", incarnation=..., ...)       series, written at once
    store.save(row)                                                  run, decision, incident: queued
    store.known_runs(most)                                           what a start finds again
    store.trouble                                                    "" or what is wrong with a disk

    data_dir/sentinel.db                     SQLite, unless Settings.database names a server
    data_dir/runs/<run>/0000-<incarnation>/  the series of a run, in the trace format
    data_dir/runs/<run>/run.json             its row of the database once more, see run_files.py
    data_dir/lock                            one sidecar a directory

Without a data_dir all of it is temporary and goes with the process.

Errors:  ConfigError when another sidecar uses the directory. A disk that cannot be written does not
         keep the sidecar from starting: it decides without a record, says so, and tries again:
         the directory with each probe(), the database as one that fails later.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from sentinel.core.errors import ConfigError
from sentinel.core.policy import Policy
from sentinel.core.state import Incident, State
from sentinel.sidecar.settings import MIN_RUN_BYTES, Settings
from sentinel.sidecar.store import run_files, writes
from sentinel.sidecar.store.database import Database, StoreError
from sentinel.sidecar.store.models import DecisionRow, MarkRow, RunRow
from sentinel.sidecar.store.record import Record, Seen, reports_on_disk, try_to_write
from sentinel.sidecar.store.series import SeriesFiles
from sentinel.traces.recorder import list_incarnations

logger = logging.getLogger(__name__)

ENDED = ("finished", "halted")
MOST_NAMED = 20  # runs in one line of the log
MarkKey = tuple[str, str, int, int]  # run, incarnation, step, attempt


class Store:
    """See the module docstring; used by the event loop, but for what its Database does."""

    def __init__(
        self, settings: Settings, clock: Callable[[], float], timer: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._timer = timer
        self._temporary: weakref.finalize[..., Any] | None = None
        self._lock: int | None = None
        self.start_trouble = ""
        self.disk_trouble = ""
        self._lost_before = self._dropped_before = 0
        self._closer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sentinel-closer")
        self.bytes = 0  # of all series, as last counted
        if settings.data_dir is None:
            self.directory = Path(tempfile.mkdtemp(prefix="sentinel-sidecar-"))
            # At close(), with this object, or when the process ends: whatever comes first.
            self._temporary = weakref.finalize(
                self, shutil.rmtree, self.directory, ignore_errors=True
            )
        else:
            self.directory = settings.data_dir
        self.runs_directory = self.directory / "runs"
        self.series = SeriesFiles(self.directory / "cache")
        self.records: dict[str, Record] = {}  # of the present writers, by run
        self._refused: dict[str, tuple[str, Seen]] = {}  # incarnation and reports no disk took
        self._unkept: dict[str, RunRow] = {}  # whose run.json no disk took
        self._rowless: set[str] = set()  # runs that report and have no row
        self.taken_up: frozenset[str] = frozenset()  # from folders: the database had not got them
        self.not_taken: dict[str, float] = {}  # runs there was no room for: when each was over
        self._take_directory()
        url = settings.database or f"sqlite:///{self.directory / 'sentinel.db'}"
        # A server that was asked for and is not there is not something to hide: it raises.
        self.database = (
            Database.open(url)
            if settings.database
            else Database.open_or_wait(url, ready=self._own_directory)
        )

    def _take_directory(self) -> None:
        """Make it ours; raises ConfigError when it is another sidecar's."""
        try:
            self.runs_directory.mkdir(parents=True, exist_ok=True)
            self._take_lock()
        except OSError as error:
            if not self.start_trouble:
                logger.error("the data directory cannot be used error=%s", error)
            self.start_trouble = f"{self.directory}: {error}"
            return
        if self.start_trouble:
            logger.warning("the data directory can be used now directory=%s", self.directory)
        self.start_trouble = ""

    def _own_directory(self) -> None:
        """Raise OSError while the directory is not ours; the database's worker asks."""
        if self._lock is None:
            raise OSError(self.start_trouble or "the data directory cannot be used")

    def _take_lock(self) -> None:
        lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            if not isinstance(error, BlockingIOError):
                raise
            raise ConfigError(
                f"data directory {self.directory} is used by another sidecar; give this one "
                "another with --data"
            ) from None
        self._lock = lock

    @property
    def trouble(self) -> str:
        """What is wrong, in one line; "" when nothing is."""
        if self.start_trouble:
            return self.start_trouble
        if self.disk_trouble:
            return self.disk_trouble
        for name, record in self.records.items():
            if record.trouble:
                return f"series of run {name}: {record.trouble}"
        return f"database: {self.database.trouble}" if self.database.trouble else ""

    @property
    def dropped_segments(self) -> int:
        """Segments that made room, over all writers since the start."""
        return self._dropped_before + sum(
            record.dropped_segments for record in self.records.values()
        )

    @property
    def lost_records(self) -> int:
        """Reports that could not be written, each once, over all writers since the start."""
        return self._lost_before + sum(record.lost_records for record in self.records.values())

    # ---- series ------------------------------------------------------------------------

    def run_directory(self, run: str) -> Path:
        """Where the series of a run lie."""
        return self.runs_directory / run

    def open_record(
        self,
        *,
        run: str,
        incarnation: str,
        policy: Policy,
        state: State | None,
        layers: Sequence[Any],
        engine_version: int,
        first: int,
    ) -> Record:
        """The record of a new writer; what its incarnation has reported before is known to it.

        Args:
            first: the oldest report that may still come, if nothing of it is on disk.
        """
        self.close_record(run)
        directory = self.run_directory(run)
        try:
            seen = reports_on_disk(directory, incarnation)
        except OSError as error:
            logger.warning("earlier series cannot be read run=%s error=%s", run, error)
            seen = Seen()
        if not seen.count:
            seen.start = first
        refused = self._refused_of(run, incarnation)
        if refused.count:
            seen.told(refused.highest)
        record = Record(
            directory,
            run=run,
            incarnation=incarnation,
            policy=policy,
            state=state,
            seen=seen,
            layers=layers,
            engine_version=engine_version,
            limit_bytes=self.run_limit(),
            clock=self._clock,
            timer=self._timer,
            refused=refused,
        )
        self.records[run] = record
        return record

    def _refused_of(self, run: str, incarnation: str) -> Seen:
        """What no disk took of this process; a record that is opened again does not count twice."""
        known = self._refused.get(run)
        if known is None or known[0] != incarnation:
            known = self._refused[run] = (incarnation, Seen())
        return known[1]

    def run_limit(self) -> int:
        """What one run's series may take: its own limit, or its share of what there is."""
        share = self._settings.max_store_bytes // (len(self.records) + 1)
        return max(min(self._settings.max_run_bytes, share), MIN_RUN_BYTES)

    def close_record(self, run: str) -> None:
        """Nobody writes that run any more."""
        record = self.records.pop(run, None)
        if record is None:
            return
        self._lost_before += record.lost_records
        self._dropped_before += record.dropped_segments
        self._closer.submit(_close, run, record)  # it syncs, which can take long

    # ---- database ------------------------------------------------------------------------

    def save(self, row: RunRow) -> None:
        """Write a run's row, into its folder now and into the database now or soon."""
        self._submit_run(row)
        self._keep(row)

    def _submit_run(self, row: RunRow) -> None:
        self.database.submit(
            lambda session: session.merge(row), what=f"run {row.name}", key=("run", row.name)
        )

    def _keep(self, row: RunRow) -> None:
        try:
            run_files.write(self.run_directory(row.name), row)
            self._unkept.pop(row.name, None)
        except OSError as error:
            if row.name not in self._unkept:
                logger.warning("a run's file cannot be written run=%s error=%s", row.name, error)
            self._unkept[row.name] = row

    def keep(self, run: str) -> None:
        """A disk has just taken a report of that run: so it will take what says whose it is."""
        row = self._unkept.get(run)
        if row is not None:
            self._keep(row)

    def save_heard(self, heard: Sequence[tuple[str, float, int | None]]) -> None:
        """When these runs were last heard, and their newest steps: all in one go."""
        if not heard:
            return
        found = {name: (at, step) for name, at, step in heard}
        self.database.submit(
            partial(writes.save_heard, heard=found, rowless=self._rowless),
            what="when runs were heard",
            key="heard",
            join=writes.join_heard,
        )

    def take_rowless(self) -> list[str]:
        """Runs that were heard and have no row: it is to be written once more."""
        found = list(self._rowless)
        self._rowless.difference_update(found)
        return found

    def save_decision(self, row: DecisionRow, *, mark: bool = False) -> None:
        """Write an executed action; one of the same step replaces it.

        Args:
            mark: if it is new, Grafana is to be told.
        """
        names = (c.key for c in DecisionRow.__table__.columns if c.key != "id")
        values = {name: getattr(row, name) for name in names}
        self.database.submit(
            partial(writes.save_decision, values=values, mark=mark), what="executed action"
        )

    def marked(self, key: MarkKey) -> None:
        """Grafana has been told; from any thread."""
        self.database.submit(lambda session: session.execute(writes.of(MarkRow, key)), what="mark")

    async def marks(self, most: int) -> list[MarkRow]:
        """What it is still to be told, the oldest first; raises StoreError."""
        oldest = select(MarkRow).order_by(MarkRow.id).limit(most)
        return await self.database.run(lambda session: list(session.scalars(oldest)))

    def drop_decision(self, run: str, incarnation: str, step: int) -> None:
        """It was not carried out after all."""
        key = (run, incarnation, step)
        self.database.submit(partial(writes.drop_decision, key=key), what="executed action")

    def end_rollback(
        self, run: str, incarnation: str, before: int, target: int | None, why: str
    ) -> None:
        """Write what the newest rollback before that step came to; see writes.end_rollback."""
        self.database.submit(
            partial(
                writes.end_rollback,
                key=(run, incarnation),
                before=before,
                target=target,
                why=why,
            ),
            what="end of a rollback",
        )

    def save_incidents(self, run: str, incidents: Iterable[Incident], now: float) -> None:
        """Write those incidents as they are now."""
        for incident in incidents:
            self.database.submit(
                partial(writes.save_incident, run=run, incident=incident, now=now, since=now),
                what="incident",
                key=("incident", run, incident.number, incident.opened),
                join=writes.join_incident,
            )

    def known_runs(self, most: int) -> list[RunRow]:
        """The runs of earlier starts, oldest first; `not_taken` has those there is no room for.

        Those that ended longest ago find none, then those that were heard longest ago.
        From the database, and from the runs' folders what it has not got, which it is given.

        Raises:
            StoreError: the database fails, and no folder knows of a run.
        """
        failure: StoreError | None = None
        try:
            rows = {row.name: row for row in self.database.sync(partial(_newest, most=most))}
            every = self.database.sync(_every)
        except StoreError as error:
            failure, rows, every = error, {}, {}
            logger.error("earlier runs are read from their folders alone error=%s", error)
        taken, strays = set(), []
        for directory in self._run_directories():
            name = directory.name
            if name in every and name not in rows:
                continue  # too old to be shown
            kept, row = run_files.read(directory), rows.get(name)
            if kept is None:
                if row is None and failure is None and list_incarnations(directory):
                    strays.append(name)
            elif row is None or _newer(kept, row):
                rows[name] = kept
                taken.add(name)
        self._tell(taken, strays)
        if failure is None:
            for name in taken:
                self._submit_run(rows[name])
        elif not rows:
            raise failure
        self.taken_up = frozenset(taken)
        found = sorted(rows.values(), key=lambda row: (row.state not in ENDED, row.heard_at))
        self.not_taken = every | {row.name: _over_at(row) for row in found}
        found = found[-most:]
        for row in found:
            del self.not_taken[row.name]
        return sorted(found, key=lambda row: row.heard_at)

    async def newest_runs(self, most: int) -> list[RunRow]:
        """The same, from a database that came late and no folder; raises StoreError."""
        rows = await self.database.run(partial(_newest, most=most))
        self.not_taken = await self.database.run(_every)
        for row in rows:
            self.not_taken.pop(row.name, None)
        return rows

    def kept_run(self, name: str) -> RunRow | None:
        """What a run's own file says of it, or was to say; from any thread."""
        waits = self._unkept.get(name)
        return run_files.read(self.run_directory(name)) if waits is None else waits

    def _run_directories(self) -> list[Path]:
        try:
            with os.scandir(self.runs_directory) as entries:
                return sorted(Path(entry.path) for entry in entries if entry.is_dir())
        except OSError:
            return []

    def _tell(self, taken: set[str], strays: list[str]) -> None:
        if taken:
            logger.warning(
                "runs are taken up from their folders, the database had not got them as they are "
                "count=%s runs=%s",
                len(taken),
                ", ".join(sorted(taken)[:MOST_NAMED]),
            )
        if strays:
            logger.error(
                "series belong to no run that is known here, so they are not listed; `sentinel "
                "replay` reads them, and a trainer that registers under that name goes on "
                "count=%s directory=%s runs=%s",
                len(strays),
                self.runs_directory,
                ", ".join(strays[:MOST_NAMED]),
            )

    def forget(self, run: str) -> int:
        """Delete the series of a run that is over; returns the bytes that were freed."""
        directory = self.run_directory(run)
        freed = directory_bytes(directory)
        self._refused.pop(run, None)
        self._unkept.pop(run, None)
        shutil.rmtree(directory, ignore_errors=True)
        shutil.rmtree(self.directory / "cache" / run, ignore_errors=True)
        return freed

    def sizes(self) -> dict[str, int]:
        """What the series of each run take, in bytes; reads the disk."""
        found = {}
        try:
            entries = list(os.scandir(self.runs_directory))
        except OSError:
            return {}
        for entry in entries:
            if entry.is_dir():
                found[entry.name] = directory_bytes(Path(entry.path))
        return found

    def probe(self) -> None:
        """See whether the disk takes writes again, or no more."""
        if self._lock is None:
            try:
                self._take_directory()
            except ConfigError as error:  # another one was faster: nothing is written there
                self.start_trouble = str(error)
        self.database.probe()
        if self.start_trouble:
            return
        for row in list(self._unkept.values()):
            self._keep(row)
        try:
            try_to_write(self.directory)
            self.disk_trouble = ""
        except OSError as error:
            self.disk_trouble = str(error)
            return
        for record in self.records.values():
            record.look_again()

    def close(self) -> None:
        """Close everything; a second call does nothing."""
        for run in list(self.records):
            self.close_record(run)
        self._closer.shutdown(wait=True)
        self.database.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._temporary is not None:
            self._temporary()


def _newest(session: Session, most: int) -> list[RunRow]:
    """Those that have ended only where there is room for them."""
    first = RunRow.state.in_(ENDED), RunRow.heard_at.desc()
    return list(session.scalars(select(RunRow).order_by(*first).limit(most)))


def _every(session: Session) -> dict[str, float]:
    """When each was over, or was heard last."""
    at = func.coalesce(RunRow.ended_at, RunRow.heard_at)
    return {row[0]: row[1] for row in session.execute(select(RunRow.name, at))}


def _over_at(row: RunRow) -> float:
    return row.heard_at if row.ended_at is None else row.ended_at


def _close(run: str, record: Record) -> None:
    try:
        record.close()
    except OSError as error:
        logger.warning("a record was not closed well run=%s error=%s", run, error)


def directory_bytes(directory: Path) -> int:
    """What the files under a directory take."""
    total = 0
    for place, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(place, name)).st_size
            except OSError:
                continue
    return total


def _newer(kept: RunRow, row: RunRow) -> bool:
    """Whether a run's file says something that the database has not heard."""
    if kept.fence != row.fence:
        return kept.fence > row.fence
    if kept.heard_at < row.heard_at:
        return False
    names = ("incarnation", "state", "session", "ended_at", "registered_at")
    return any(getattr(kept, name) != getattr(row, name) for name in names)

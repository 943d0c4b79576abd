"""The store: where a sidecar's records and its database lie, and what of them a start finds again.

    store = Store(settings, clock, timer)
    record = store.open_record(run="r7", incarnation=..., ...)       series, written at once
    store.save(row)                                                  run, decision, incident: queued
    store.trouble                                                    "" or what is wrong with a disk

    data_dir/sentinel.db                     SQLite, unless Settings.database names a server
    data_dir/runs/<run>/0000-<incarnation>/  the series of a run, in the trace format
    data_dir/lock                            one sidecar a directory

Without a data_dir all of it is temporary and goes with the process.

Errors:  ConfigError when another sidecar uses the directory. A disk that cannot be written does not
         keep the sidecar from starting: it decides without a record, and says so.
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
from pathlib import Path
from typing import Any

from sqlalchemy import Delete, delete, select, text, update
from sqlalchemy.orm import Session

from sentinel.core.errors import ConfigError
from sentinel.core.policy import Policy
from sentinel.core.state import Incident, State
from sentinel.sidecar.settings import MIN_RUN_BYTES, Settings
from sentinel.sidecar.store.database import Database, StoreError
from sentinel.sidecar.store.models import DecisionRow, IncidentRow, MarkRow, RunRow
from sentinel.sidecar.store.record import Record, Seen, reports_on_disk
from sentinel.sidecar.store.series import SeriesFiles

logger = logging.getLogger(__name__)

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
        try:
            self.runs_directory.mkdir(parents=True, exist_ok=True)
            self._take_lock()
        except OSError as error:
            self.start_trouble = f"{self.directory}: {error}"
            logger.error("the data directory cannot be used error=%s", error)
        self.database = self._open_database()

    def _take_lock(self) -> None:
        lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ConfigError(
                f"data directory {self.directory} is used by another sidecar; give this one "
                "another with --data"
            ) from None
        self._lock = lock

    def _open_database(self) -> Database:
        url = self._settings.database or f"sqlite:///{self.directory / 'sentinel.db'}"
        try:
            return Database.open(url)
        except StoreError as error:
            if self._settings.database:
                raise  # a server that was asked for and is not there: not something to hide
            self.start_trouble = self.start_trouble or str(error)
            logger.error("the database cannot be used, going on without one error=%s", error)
            return Database.open("sqlite://")

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
            refused=self._refused_of(run, incarnation),
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
        """Write a run's row, now or soon."""
        self.database.submit(lambda session: session.merge(row))

    def save_heard(self, heard: Sequence[tuple[str, float, int | None]]) -> None:
        """When these runs were last heard, and their newest steps: all in one go."""
        if not heard:
            return
        rows = [{"name": n, "heard_at": at, "last_step": step} for n, at, step in heard]
        self.database.submit(lambda session: session.execute(update(RunRow), rows))

    def save_decision(self, row: DecisionRow, *, mark: bool = False) -> None:
        """Write an executed action; one of the same step replaces it.

        Args:
            mark: if it is new, Grafana is to be told.
        """
        self.database.submit(lambda session: _replace_decision(session, row, mark))

    def marked(self, key: MarkKey) -> None:
        """Grafana has been told; from any thread."""
        self.database.submit(lambda session: session.execute(_of(MarkRow, key)))

    async def marks(self, most: int) -> list[MarkRow]:
        """What it is still to be told, the oldest first; raises StoreError."""
        oldest = select(MarkRow).order_by(MarkRow.id).limit(most)
        return await self.database.run(lambda session: list(session.scalars(oldest)))

    def drop_decision(self, run: str, incarnation: str, step: int) -> None:
        """It was not carried out after all."""

        def drop(session: Session) -> None:
            for table in (DecisionRow, MarkRow):
                session.execute(_of(table, (run, incarnation, step)))

        self.database.submit(drop)

    def save_incidents(self, run: str, incidents: Iterable[Incident], now: float) -> None:
        """Write those incidents as they are now."""
        found = tuple(incidents)
        self.database.submit(lambda session: _save_incidents(session, run, found, now))

    def known_runs(self, most: int) -> list[RunRow]:
        """The runs of earlier starts, the newest ones, oldest first."""
        newest = select(RunRow).order_by(RunRow.heard_at.desc()).limit(most)
        return list(reversed(self.database.sync(lambda session: list(session.scalars(newest)))))

    def forget(self, run: str) -> int:
        """Delete the series of a run that is over; returns the bytes that were freed."""
        directory = self.run_directory(run)
        freed = directory_bytes(directory)
        self._refused.pop(run, None)
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
        self.database.submit(lambda session: session.execute(text("SELECT 1")))
        if self.start_trouble:
            return
        try:
            place = self.directory / "probe"
            place.write_bytes(b"")
            place.unlink()
            self.disk_trouble = ""
        except OSError as error:
            self.disk_trouble = str(error)

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


def _of(table: Any, key: tuple[Any, ...]) -> Delete:
    """Delete its rows of that run, incarnation, step and, where it is given, attempt."""
    columns = (table.run, table.incarnation, table.step, table.attempt)
    return delete(table).where(*(c == k for c, k in zip(columns, key, strict=False)))


def _replace_decision(session: Session, row: DecisionRow, mark: bool) -> None:
    old = session.scalar(
        select(DecisionRow).where(
            DecisionRow.run == row.run,
            DecisionRow.incarnation == row.incarnation,
            DecisionRow.step == row.step,
            DecisionRow.attempt == row.attempt,
        )
    )
    if old is None:
        if mark:
            names = [c.key for c in MarkRow.__table__.columns if c.key != "id"]
            session.add(MarkRow(**{name: getattr(row, name) for name in names}))
        session.add(row)
        return
    for name in ("action", "rule", "reason", "target", "source"):
        setattr(old, name, getattr(row, name))


def _save_incidents(session: Session, run: str, incidents: Iterable[Incident], now: float) -> None:
    for incident in incidents:
        row = session.scalar(
            select(IncidentRow).where(
                IncidentRow.run == run,
                IncidentRow.number == incident.number,
                IncidentRow.opened == incident.opened,
            )
        )
        if row is None:
            row = IncidentRow(
                run=run,
                number=incident.number,
                opened=incident.opened,
                key=incident.key,
                opened_at=now,
                acknowledged_by="",
                silenced_by="",
            )
            session.add(row)
        row.state, row.severity = str(incident.state), str(incident.severity)
        row.summary, row.last, row.fired = incident.summary, incident.last, incident.fired
        row.resolved, row.steps, row.latched = incident.resolved, incident.steps, incident.latched
        row.layers = list(incident.layers)
        row.actions = [list(action) for action in incident.actions]
        row.updated_at = now

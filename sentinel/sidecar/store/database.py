"""The database: SQLite beside the series, or a PostgreSQL server by URL.

    database = Database.open("sqlite:////var/lib/sentinel/sentinel.db")
    await database.run(lambda session: session.get(RunRow, "r7"))
    database.submit(lambda session: session.merge(row), what="run")     in order, nobody waits
    database = Database.open_or_wait(url)                        one that may fail at first
    database.trouble                                             "" or what fails now
    database.probe()                                             now and then: what waits goes on

One worker thread owns the connection, so that a slow disk or server never stalls a decision:
`submit` queues, `run` waits without holding the loop up, `sync` is for start and tests.

While the database fails (a server that is gone, a disk that is full), what was submitted waits, in
order, MOST_QUEUED at most, and is tried again: with any later call and each probe, but not before a
backoff of RETRY_S to RETRY_MOST_S is over. So `work` may be called several times and must make what
it adds anew each time. A write that can never succeed is given up: it would hold up all others.
failures.py tells the two apart. What waits when the process dies is lost; whatever must not be lost
is on disk first (series, run.json), or awaited before it is promised (orders of people).

One that cannot even be opened at first is the same case: what is submitted waits until it can be,
and nothing stands in for it, since what that were told would go with the process.

Schema:  Alembic's migrations run when it opens; a database of a later version is refused.
Errors:  run() and sync() raise StoreError; submit() counts failures in `failed`, what is given up
         in `dropped`, and `trouble` says what fails until nothing waits any more.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from alembic import command
from alembic.config import Config
from alembic.util.exc import CommandError
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.orm import Session

from sentinel.core.errors import ConfigError, SentinelError
from sentinel.sidecar.store.failures import gone, passes, read_only, said

logger = logging.getLogger(__name__)

MOST_QUEUED = 10_000
RETRY_S, RETRY_MOST_S = 0.25, 5.0
CLOSE_S = 10.0  # for what still waits at the end
BUSY_MS = 5_000
ANSWER_S = 10.0
MOST_REWRITTEN = 256 * 2**20  # a second or two

T = TypeVar("T")
Work = Callable[[Session], object]


class StoreError(SentinelError, OSError):
    """The database does not do what it was asked."""


@dataclass(slots=True, eq=False)
class _Write:
    """One that waits; `what` it is of, for the log."""

    work: Work
    what: str
    key: Hashable


class Database:
    """See the module docstring.

    Attributes:
        failed: failures, each try of a write that waits among them.
        dropped: writes that were given up: refused for what they are, no room to wait, or still
            waiting at the end.
        opened: it has been reached, and its schema is up to date.
    """

    def __init__(
        self,
        engine: Engine,
        timer: Callable[[], float] = time.perf_counter,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        """Know where it is.

        Args:
            ready: raises OSError while it must not be opened yet; called by the worker.
        """
        self.engine = engine
        self.opened = False
        self._ready = ready
        self.failed = 0
        self.dropped = 0
        self._timer = timer
        self._writes: deque[_Write] = deque()  # the first may be under way
        self._keyed: dict[Hashable, _Write] = {}  # those that a newer one may take the place of
        self._stuck = ""  # why they wait
        self._failing = ""  # what the newest call has heard
        self._retry_s, self._retry_at = RETRY_S, 0.0
        self._began: float | None = None  # of what is under way
        self._until: float | None = None  # the end
        self._closed = False
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sentinel-database")

    @classmethod
    def open(cls, url: str, timer: Callable[[], float] = time.perf_counter) -> Database:
        """Connect, and bring the schema up to date.

        Raises:
            ConfigError: the URL is none, or a later version has written this database.
            StoreError: it cannot be reached.
        """
        database = cls(_engine(url), timer)
        try:
            database._first(url)
        except StoreError:
            database.close()
            raise
        return database

    @classmethod
    def open_or_wait(
        cls,
        url: str,
        timer: Callable[[], float] = time.perf_counter,
        ready: Callable[[], None] = lambda: None,
    ) -> Database:
        """The same, but where it cannot be reached now it is tried again, as a write that waits.

        Args:
            ready: raises OSError while it must not be opened yet; called by the worker.

        Raises:
            ConfigError: see open().
        """
        database = cls(_engine(url), timer, ready)
        try:
            database._first(url)
        except StoreError as error:
            database._not_opened(error.__cause__ or error)
        return database

    def _first(self, url: str) -> None:
        """The first try to open it; raises as open() does."""
        try:
            # In the thread that will use it: a database in memory is one connection's.
            self._worker.submit(self._open).result()
        except CommandError as error:
            self.close()
            raise ConfigError(
                f"database {_shown(url)} was written by another version of sentinel ({error}); "
                "use that version, or give this one a database of its own"
            ) from error
        except (SQLAlchemyError, OSError) as error:
            raise StoreError(f"database {_shown(url)} cannot be opened: {said(error)}") from error

    def submit(
        self,
        work: Work,
        *,
        what: str = "write",
        key: Hashable = None,
        join: Callable[[Work, Work], Work] | None = None,
    ) -> None:
        """Do it later, in order; nobody waits. With too much waiting it is dropped and counted.

        Args:
            what: names it in the log.
            key: one of the same key that still waits is not needed any more: this takes its place.
            join: makes one of the two.
        """
        with self._lock:
            if self._closed:
                self.dropped += 1
                logger.warning("a write came after the end and is lost what=%s", what)
                return
            waits = None if key is None else self._keyed.get(key)
            if waits is not None:
                waits.work = work if join is None else join(waits.work, work)
            elif len(self._writes) >= MOST_QUEUED:
                self.dropped += 1
                if self.dropped == 1 or self.dropped % MOST_QUEUED == 0:
                    logger.error(
                        "writes are lost, too many wait for the database waiting=%s lost=%s "
                        "newest=%s",
                        len(self._writes),
                        self.dropped,
                        what,
                    )
                return
            else:
                write = _Write(work, what, key)
                self._writes.append(write)
                if key is not None:
                    self._keyed[key] = write
            self._worker.submit(self._drain)

    async def run(self, work: Callable[[Session], T]) -> T:
        """Do it, after all that was submitted before and can be done now; raises StoreError."""
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self._call(work)), ANSWER_S)
        except TimeoutError as error:
            raise StoreError(f"the database has not answered within {ANSWER_S:g} s") from error

    def sync(self, work: Callable[[Session], T]) -> T:
        """The same for who may wait; raises StoreError."""
        return self._call(work).result()

    async def written(self) -> bool:
        """Whether all that was submitted is in the database now."""
        with self._lock:
            if self._closed:
                return False
            answer = self._worker.submit(self._settled)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(answer), ANSWER_S)
        except TimeoutError:
            return False

    def probe(self) -> None:
        """See whether it answers again, and go on with what waits; nobody waits for that."""
        with self._lock:
            if not self._closed:
                self._worker.submit(self._look)

    @property
    def waiting(self) -> int:
        """Writes in the queue."""
        return len(self._writes)

    @property
    def trouble(self) -> str:
        """What is wrong, in one line; "" when nothing is."""
        waiting = len(self._writes)
        if not self.opened:
            return f"it cannot be opened: {self._stuck} ({waiting} writes are waiting)"
        if self._stuck and waiting:
            return f"{self._stuck} ({waiting} writes are waiting)"
        if waiting >= MOST_QUEUED:
            return f"{waiting} writes are waiting for the database"
        began = self._began
        if began is not None and self._timer() - began > ANSWER_S:
            return f"it has not answered for {self._timer() - began:.0f} s"
        return self._failing

    def close(self) -> None:
        """Try what waits once more, for CLOSE_S, and let go; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._until = self._timer() + CLOSE_S
            self._worker.submit(self._drain, at_once=True)
        self._worker.shutdown(wait=True)
        lost = list(self._writes)
        self._writes.clear()
        self._keyed.clear()
        if lost:
            self.dropped += len(lost)
            of = Counter(write.what for write in lost).most_common()
            logger.error(
                "writes are lost, the database did not take them until the end lost=%s of=%s "
                "error=%s",
                len(lost),
                ", ".join(f"{what}: {count}" for what, count in of),
                self._stuck or "no time was left",
            )
        self.engine.dispose()

    # ---- the worker's --------------------------------------------------------------------

    def _call(self, work: Callable[[Session], T]) -> Future[T]:
        with self._lock:
            if self._closed:
                raise StoreError("the database is closed: the sidecar is on its way down")
            return self._worker.submit(self._asked, work)

    def _asked(self, work: Callable[[Session], T]) -> T:
        if self._closed:
            raise StoreError("the database is closed: the sidecar is on its way down")
        error = self._drain()
        if not self.opened:
            raise StoreError(f"the database cannot be opened: {self._stuck}") from error
        if error is not None and gone(error):
            raise StoreError(f"the database failed: {said(error)}") from error
        return self._now(work)

    def _settled(self) -> bool:
        self._drain()
        return not self._writes and not self.trouble

    def _look(self) -> None:
        self._drain()
        if self.opened and not self._writes:
            with suppress(StoreError):
                self._now(lambda session: session.execute(text("SELECT 1")))

    def _now(self, work: Callable[[Session], T]) -> T:
        try:
            value = self._do(work)
        except (SQLAlchemyError, OSError) as error:
            self.failed += 1
            self._failing = said(error)
            raise StoreError(f"the database failed: {said(error)}") from error
        self._failing = ""
        return value

    def _do(self, work: Callable[[Session], T]) -> T:
        self._began = self._timer()
        try:
            with Session(self.engine, expire_on_commit=False) as session:
                value = work(session)
                session.commit()
        finally:
            self._began = None
        return value

    def _drain(self, *, at_once: bool = False) -> Exception | None:
        """Do what waits, as long as it can be done; the failure that has stopped it."""
        if not at_once and self._timer() < self._retry_at:
            return None
        if not self.opened:
            if self._closed and not self._writes:
                return None
            try:
                self._open()
            except Exception as error:  # noqa: BLE001 (whatever it is, nothing else would tell)
                self._not_opened(error)
                return error
            logger.warning("the database is open now waiting=%s", len(self._writes))
            self._stuck = ""
            self._retry_s, self._retry_at = RETRY_S, 0.0
        while True:
            with self._lock:
                if not self._writes:
                    return None
                write = self._writes[0]
                # From here on a newer one comes after it.
                if write.key is not None and self._keyed.get(write.key) is write:
                    del self._keyed[write.key]
            if self._until is not None and self._timer() >= self._until:
                return None
            try:
                self._do(write.work)
            except Exception as error:  # noqa: BLE001 (whatever a write raises, the next ones go on)
                self.failed += 1
                if passes(error):
                    self._wait(write, error)
                    return error
                self._give_up(write, error)
            else:
                self._failing = ""
            with self._lock:
                self._writes.popleft()
                last = not self._writes
            self._retry_s, self._retry_at = RETRY_S, 0.0
            if self._stuck and last:
                self._stuck = ""
                logger.warning("the database takes writes again; none waits any more")

    def _open(self) -> None:
        self._ready()
        self._began = self._timer()
        try:
            _migrate(self.engine)
        finally:
            self._began = None
        self.opened = True

    def _not_opened(self, error: BaseException) -> None:
        if not self._stuck:
            logger.error("the database cannot be opened, writes wait for it error=%s", said(error))
        self.failed += 1
        self._stuck = said(error)
        self._later()
        self.engine.dispose()  # what a failed try has left of a connection is not used again

    def _later(self) -> None:
        self._retry_at = self._timer() + self._retry_s
        self._retry_s = min(2.0 * self._retry_s, RETRY_MOST_S)

    def _wait(self, write: _Write, error: Exception) -> None:
        if not self._stuck:
            logger.error("the database fails, writes wait for it error=%s", said(error))
        self._stuck = said(error)
        with self._lock:
            if write.key is not None:
                self._keyed.setdefault(write.key, write)
        self._later()
        if read_only(error):
            # A connection to SQLite that was opened so stays so: the next try opens another. (One
            # to a full disk is kept: it can be read from, and there is no room to open another.)
            self.engine.dispose()

    def _give_up(self, write: _Write, error: Exception) -> None:
        self.dropped += 1
        self._failing = f"a write was refused: {said(error)}"
        known = isinstance(error, SQLAlchemyError)
        logger.error(
            "a write is lost, the database refuses it what=%s error=%s",
            write.what,
            said(error),
            exc_info=None if known else error,
        )


def _migrate(engine: Engine) -> None:
    if engine.dialect.name == "sqlite":
        _let_shrink(engine)
    with engine.begin() as connection:
        config = Config(attributes={"connection": connection})
        place = Path(__file__).parent / "migrations"
        config.set_main_option("script_location", str(place).replace("%", "%%"))
        command.upgrade(config, "head")


def _let_shrink(engine: Engine) -> None:
    """A file of an earlier release gives no space back: it is written anew, once, if it is small.

    New ones are made so by _sqlite.
    """
    with engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        cursor = driver.cursor()
        try:
            ((auto,),) = cursor.execute("PRAGMA auto_vacuum").fetchall()
            ((pages,),) = cursor.execute("PRAGMA page_count").fetchall()
            ((size,),) = cursor.execute("PRAGMA page_size").fetchall()
            if auto or not pages:
                return
            if pages * size > MOST_REWRITTEN:
                logger.warning(
                    "the database file does not shrink when old runs go; to let it, stop the "
                    "sidecar and run once: sqlite3 sentinel.db 'PRAGMA auto_vacuum=INCREMENTAL; "
                    "VACUUM;'"
                )
                return
            cursor.execute("PRAGMA auto_vacuum=INCREMENTAL")
            cursor.execute("VACUUM")
        except sqlite3.Error as error:  # a disk that is full or read-only: it stays as it is
            logger.warning("the database file was not made to shrink error=%s", error)
        finally:
            cursor.close()


def _engine(url: str) -> Engine:
    try:
        parsed = make_url(url)
        if parsed.drivername in ("postgresql", "postgres"):
            parsed = parsed.set(drivername="postgresql+psycopg")
        if parsed.get_backend_name() not in ("sqlite", "postgresql"):
            raise ConfigError(
                f"database must be sqlite:///PATH or postgresql://..., got {_shown(url)}"
            )
        if parsed.get_backend_name() == "sqlite":
            engine = create_engine(parsed, connect_args={"check_same_thread": False})
            event.listen(engine, "connect", _sqlite)
            return engine
        # A server that went away without a word must not hold the worker for minutes.
        patience = {"connect_timeout": 5, "tcp_user_timeout": 10_000}
        return create_engine(parsed, pool_size=2, pool_pre_ping=True, connect_args=patience)
    except (ArgumentError, NoSuchModuleError, ValueError) as error:
        raise ConfigError(
            f"database must be sqlite:///PATH or postgresql://..., got {_shown(url)}"
        ) from error
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"database {_shown(url)} needs {error.name}, which is not installed here; install it "
            "with: pip install 'torch-sentinel[postgres]'"
        ) from error


def _sqlite(connection: Any, _: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA auto_vacuum=INCREMENTAL")  # counts in a new file only, before any other
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute(f"PRAGMA busy_timeout={BUSY_MS}")
    cursor.close()


def _shown(url: str) -> str:
    """The URL without its password."""
    try:
        return make_url(url).render_as_string(hide_password=True)
    except (ArgumentError, ValueError):
        return f"{url.partition(':')[0][:16]!r}: ..."

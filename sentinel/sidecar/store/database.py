"""The database: SQLite beside the series, or a PostgreSQL server by URL.

    database = Database.open("sqlite:////var/lib/sentinel/sentinel.db", timer=...)
    await database.run(lambda session: session.get(RunRow, "r7"))
    database.submit(lambda session: session.merge(row))          in order, nobody waits
    database.trouble                                             "" or what fails now

One worker thread owns the connection, so that a slow disk or server never stalls a decision:
`submit` queues, `run` waits without holding the loop up, `sync` is for start and tests. What is
queued when the process dies is lost; whatever must not be lost is on disk in the series first, or
awaited before it is promised (orders of people).

Schema:  Alembic's migrations run when it opens; a database of a later version is refused.
Errors:  run() and sync() raise StoreError; submit() counts in `failed` and keeps the last error in
         `trouble` until a later write succeeds.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from alembic import command
from alembic.config import Config
from alembic.util.exc import CommandError
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.orm import Session

from sentinel.core.errors import ConfigError, SentinelError

logger = logging.getLogger(__name__)

MOST_QUEUED = 10_000
BUSY_MS = 5_000
ANSWER_S = 10.0
MOST_REWRITTEN = 256 * 2**20  # a second or two

T = TypeVar("T")


class StoreError(SentinelError, OSError):
    """The database does not do what it was asked."""


class Database:
    """See the module docstring."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.trouble = ""
        self.failed = 0
        self.dropped = 0
        self._waiting = 0
        self._closed = False
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sentinel-database")

    @classmethod
    def open(cls, url: str) -> Database:
        """Connect, and bring the schema up to date.

        Raises:
            ConfigError: the URL is none, or a later version has written this database.
            StoreError: it cannot be reached.
        """
        database = cls(_engine(url))
        try:
            # In the thread that will use it: a database in memory is one connection's.
            database._worker.submit(_migrate, database.engine).result()
        except CommandError as error:
            database.close()
            raise ConfigError(
                f"database {_shown(url)} was written by another version of sentinel ({error}); "
                "use that version, or give this one a database of its own"
            ) from error
        except (SQLAlchemyError, OSError) as error:
            database.close()
            raise StoreError(f"database {_shown(url)} cannot be opened: {_said(error)}") from error
        return database

    def submit(self, work: Callable[[Session], object]) -> None:
        """Do it later, in order; nobody waits. With too much waiting it is dropped and counted."""
        with self._lock:
            if self._closed:
                self.dropped += 1
                return
            if self._waiting >= MOST_QUEUED:
                self.dropped += 1
                self.trouble = f"{MOST_QUEUED} writes are waiting for the database"
                return
            self._waiting += 1
        self._worker.submit(self._later, work)

    async def run(self, work: Callable[[Session], T]) -> T:
        """Do it, after all that was submitted before; raises StoreError."""
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self._call(work)), ANSWER_S)
        except TimeoutError as error:
            raise StoreError(f"the database has not answered within {ANSWER_S:g} s") from error

    def sync(self, work: Callable[[Session], T]) -> T:
        """The same for who may wait; raises StoreError."""
        return self._call(work).result()

    @property
    def waiting(self) -> int:
        """Writes in the queue."""
        return self._waiting

    def close(self) -> None:
        """Finish what is queued and let go; a second call does nothing."""
        with self._lock:
            self._closed = True
        self._worker.shutdown(wait=True)
        self.engine.dispose()

    def _call(self, work: Callable[[Session], T]) -> Future[T]:
        if self._closed:
            raise StoreError("the database is closed: the sidecar is on its way down")
        return self._worker.submit(self._now, work)

    def _now(self, work: Callable[[Session], T]) -> T:
        try:
            with Session(self.engine, expire_on_commit=False) as session:
                value = work(session)
                session.commit()
        except (SQLAlchemyError, OSError) as error:
            self.failed += 1
            self.trouble = _said(error)
            raise StoreError(f"the database failed: {_said(error)}") from error
        return value

    def _later(self, work: Callable[[Session], object]) -> None:
        before = self.trouble
        try:
            self._now(work)
            self.trouble = ""
        except StoreError as error:
            if not before:
                logger.error("cannot write to the database error=%s", error)
        except Exception as error:
            self.failed += 1
            self.trouble = f"{type(error).__name__}: {error}"
            logger.exception("database work failed")
        finally:
            with self._lock:
                self._waiting -= 1


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


def _said(error: BaseException) -> str:
    """What the driver says, in one line, without the statement and its values."""
    cause = getattr(error, "orig", None) or error
    return " ".join(str(cause).split())[:300] or type(error).__name__

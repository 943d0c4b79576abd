"""Rows that nobody needs any more: those of runs that ended long ago, and old lines of the audit.

    names = retention.over(session, cutoff)            runs that ended before `cutoff`
    retention.forget(session, "r7", cutoff)            rows deleted: one bite; 0 when it is done
    retention.forget_audit(session, cutoff)            likewise
    retention.shrink(session)                          pages given back: one bite; 0 when done

Each call is one short transaction, so that the writes of running runs come in between. A run's own
row goes last: whoever is killed half-way finds it again. A run that has been registered anew in the
meantime has a row that is not old, and keeps all of its past.

Space:   SQLite's file shrinks: its pages are freed by PRAGMA incremental_vacuum, which needs
         auto_vacuum (database.py turns it on). PostgreSQL uses the space again by itself
         (autovacuum); its files shrink only by VACUUM FULL.
Threads: the database's worker.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import CursorResult, delete, func, select
from sqlalchemy.orm import Session

from sentinel.sidecar.store.models import (
    AuditRow,
    CommandRow,
    DecisionRow,
    IncidentRow,
    MarkRow,
    RunRow,
)

BATCH = 500  # rows of one table in one transaction: milliseconds
PAGES = 256  # 1 MiB of SQLite
MOST_RUNS = 100  # in one turn

# With what says how old a row is.
OF_RUNS: tuple[tuple[Any, Any], ...] = (
    (IncidentRow, IncidentRow.updated_at),
    (DecisionRow, DecisionRow.at),
    (CommandRow, CommandRow.created_at),
    (MarkRow, MarkRow.at),
)
_ended = func.coalesce(RunRow.ended_at, RunRow.heard_at)


def over(session: Session, cutoff: float, most: int = MOST_RUNS) -> list[str]:
    """Runs that ended before `cutoff` or were last heard before it, and those with rows alone."""
    old = select(RunRow.name).where(_ended < cutoff).order_by(_ended).limit(most)
    found = dict.fromkeys(session.scalars(old))
    known = select(RunRow.name)
    for table, at in OF_RUNS:
        alone = select(table.run).where(at < cutoff, table.run.not_in(known)).distinct()
        found |= dict.fromkeys(session.scalars(alone.limit(most)))
    return list(found)


def forget(session: Session, run: str, cutoff: float) -> int:
    """Delete some rows of a run; how many, 0 when there are none left or it is in use again."""
    row = session.get(RunRow, run)
    if row is not None:
        ended = row.heard_at if row.ended_at is None else row.ended_at
        if ended >= cutoff:
            return 0
    deleted = 0
    for table, _ in OF_RUNS:
        some = select(table.id).where(table.run == run).limit(BATCH).scalar_subquery()
        deleted += _count(session, delete(table).where(table.id.in_(some)))
    if not deleted and row is not None:
        session.delete(row)
        deleted = 1
    return deleted


def forget_audit(session: Session, cutoff: float) -> int:
    """Delete some of the audit's lines from before `cutoff`; how many."""
    some = select(AuditRow.id).where(AuditRow.at < cutoff).limit(BATCH).scalar_subquery()
    return _count(session, delete(AuditRow).where(AuditRow.id.in_(some)))


def shrink(session: Session) -> int:
    """Give some free pages of SQLite's file back; how many, 0 when there are none left."""
    if session.get_bind().dialect.name != "sqlite":
        return 0
    driver: Any = session.connection().connection.driver_connection
    free = int(driver.execute("PRAGMA freelist_count").fetchone()[0])
    if not free:
        # What was freed is in the log of writes first; the file itself is cut by this.
        driver.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return 0
    # A script: execute() alone makes a single step of it, and frees a single page.
    driver.executescript(f"PRAGMA incremental_vacuum({PAGES})")
    return free - int(driver.execute("PRAGMA freelist_count").fetchone()[0])


def _count(session: Session, statement: Any) -> int:
    result: CursorResult[Any] = session.execute(statement)  # type: ignore[assignment]
    return result.rowcount

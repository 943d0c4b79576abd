"""Incidents of an engine that is gone: nobody else closes them, and their numbers stay theirs.

    close(database, "r7", keep=(), why="closed: the run was begun anew", now=now)     queued
    database.sync(highest_numbers)                                     {"r7": 12}, of every run

Units:   `now` in Unix seconds; steps are attempted optimizer steps.
Threads: the event loop's; the work is done by the database's worker.
"""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from sentinel.core.types import IncidentState
from sentinel.sidecar.store.database import Database
from sentinel.sidecar.store.models import IncidentRow


def close(
    database: Database, run: str, keep: Collection[tuple[int, int]], why: str, now: float
) -> None:
    """Those of that run that are still open are over; doing it twice changes nothing.

    Args:
        keep: number and opening step of those that are not meant.
        why: for people; it stands behind what each is about.
    """

    def work(session: Session) -> None:
        open_ = select(IncidentRow).where(
            IncidentRow.run == run, IncidentRow.state != IncidentState.RESOLVED.value
        )
        for row in session.scalars(open_):
            if (row.number, row.opened) not in keep:
                row.state, row.resolved = IncidentState.RESOLVED.value, row.last
                row.summary, row.updated_at = f"{row.summary} ({why})", now

    database.submit(work)


def highest_numbers(session: Session) -> dict[str, int]:
    """The highest number of an incident, by run."""
    highest = select(IncidentRow.run, func.max(IncidentRow.number)).group_by(IncidentRow.run)
    return {row[0]: row[1] for row in session.execute(highest)}

"""How rows are written: what the database's worker does with a session.

    database.submit(partial(writes.save_incident, run="r7", incident=i, now=now, since=now), ...)

A write may be tried several times, see database.py: each makes its rows anew, and finds those that
an earlier try has left.

Units:   times in Unix seconds; steps are attempted optimizer steps.
Threads: the database's worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from sqlalchemy import Delete, delete, select, update
from sqlalchemy.orm import Session

from sentinel.core.state import Incident
from sentinel.sidecar.store.database import Work
from sentinel.sidecar.store.models import DecisionRow, IncidentRow, MarkRow, RunRow

FAILED = "rollback_failed"
RESTORE_WITHIN = 8  # steps after its decision
Heard = Mapping[str, tuple[float, int | None]]  # by run: when, and its newest step


def save_heard(session: Session, *, heard: Heard, rowless: set[str]) -> None:
    """When runs were last heard; those that have no row, for whatever reason, go into `rowless`."""
    known = set(session.scalars(select(RunRow.name).where(RunRow.name.in_(list(heard)))))
    rowless.update(heard.keys() - known)
    rows = [
        {"name": name, "heard_at": at, "last_step": step}
        for name, (at, step) in heard.items()
        if name in known
    ]
    if rows:
        session.execute(update(RunRow), rows)


def join_heard(old: Work, new: Work) -> Work:
    """Both at once."""
    before, after = cast("partial[None]", old), cast("partial[None]", new)
    return partial(after, heard={**before.keywords["heard"], **after.keywords["heard"]})


def save_decision(session: Session, *, values: Mapping[str, Any], mark: bool) -> None:
    """Write an executed action; one of the same step and attempt is replaced.

    Args:
        mark: if it is new, Grafana is to be told.
    """
    key = ("run", "incarnation", "step", "attempt")
    old = session.scalar(
        select(DecisionRow).where(*(getattr(DecisionRow, name) == values[name] for name in key))
    )
    if old is None:
        if mark:
            names = [c.key for c in MarkRow.__table__.columns if c.key != "id"]
            session.add(MarkRow(**{name: values[name] for name in names}))
        session.add(DecisionRow(**values))
        return
    if values["action"] == "rollback" and old.action in ("rollback", FAILED):
        return  # how it ended may be written there
    for name in ("action", "rule", "reason", "target", "source"):
        setattr(old, name, values[name])


def of(table: Any, key: tuple[Any, ...]) -> Delete:
    """Delete its rows of that run, incarnation, step and, where it is given, attempt."""
    columns = (table.run, table.incarnation, table.step, table.attempt)
    return delete(table).where(*(c == k for c, k in zip(columns, key, strict=False)))


def drop_decision(session: Session, *, key: tuple[str, str, int]) -> None:
    """It was not carried out after all, and Grafana is not to be told of it."""
    for table in (DecisionRow, MarkRow):
        session.execute(of(table, key))


def end_rollback(
    session: Session, *, key: tuple[str, str], before: int, target: int | None, why: str
) -> None:
    """The newest rollback of that run and incarnation went to `target`, or nowhere (None).

    Written as what was done: another snapshot than was decided on, or an action of the name
    `rollback_failed`. Doing it twice changes nothing.
    """
    row = session.scalar(
        select(DecisionRow)
        .where(
            DecisionRow.run == key[0],
            DecisionRow.incarnation == key[1],
            # A restore of which nobody has decided, in a trainer in another language, is not one.
            DecisionRow.step.between(before - RESTORE_WITHIN, before - 1),
            DecisionRow.action.in_(("rollback", FAILED)),
        )
        .order_by(DecisionRow.id.desc())
        .limit(1)
    )
    if row is None or row.target == target:
        return
    decided = row.target
    row.target = target
    if target is None:
        row.action = FAILED
        row.reason = f"{row.reason}; nothing was restored: {why}"
    else:
        row.action = "rollback"
        row.reason = f"{row.reason}; the snapshot of step {decided} could not be used"


def incident_row(session: Session, run: str, number: int, opened: int) -> IncidentRow | None:
    """The row of an incident, None while it has none."""
    return session.scalar(
        select(IncidentRow).where(
            IncidentRow.run == run, IncidentRow.number == number, IncidentRow.opened == opened
        )
    )


def save_incident(
    session: Session, *, run: str, incident: Incident, now: float, since: float
) -> IncidentRow:
    """Write an incident as it is now; what people have done about it stays.

    Args:
        since: when it was first told of, by the clock.
    """
    row = incident_row(session, run, incident.number, incident.opened)
    if row is None:
        row = IncidentRow(
            run=run,
            number=incident.number,
            opened=incident.opened,
            key=incident.key,
            opened_at=since,
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
    return row


def join_incident(old: Work, new: Work) -> Work:
    """As it is now; it began when it was first told of."""
    before, after = cast("partial[None]", old), cast("partial[None]", new)
    return partial(after, since=before.keywords["since"])

"""What people asked for: their orders, acknowledgements and silences, kept, and the audit log.

    people = People(runs, database, hub, clock)
    people.restore()                                   orders and silences of an earlier start
    await people.catch_up()                            the same, from a database that came late
    await people.earlier(run, "k1")                    an order that is not in memory any more
    people.damaged()                                   snapshots that it has found damaged
    people.audit("command", caller, outcome="accepted", run="r7", detail={...})
    incident = await people.incident("r7:3")           or "41", the number of its row
    await people.acknowledge(incident, by="ann"), await people.silence(incident, until, by="ann")

An order is in memory, and so on its way, before it is written: a disk that is full must not keep
somebody from halting a run. The answer says whether it was written.

Nothing here sees a token: callers come as names.

Errors:  RefusedError for an incident that is not known.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from sentinel.core.state import Incident
from sentinel.core.types import Command, CommandKind, IncidentState
from sentinel.sidecar.hub import Hub
from sentinel.sidecar.runs import Order, RefusedError, Run, Runs
from sentinel.sidecar.runs.orders import MAX_COMMANDS, OPEN_ORDER
from sentinel.sidecar.security import LOCAL, Caller
from sentinel.sidecar.store import writes
from sentinel.sidecar.store.database import Database, StoreError
from sentinel.sidecar.store.models import NAME, AuditRow, CommandRow, IncidentRow
from sentinel.sidecar.verify import Checked, Result
from sentinel.traces.snapshots import parse_name

logger = logging.getLogger(__name__)

RECENT = 1024  # entries kept in memory, for a database that fails
# As the tables say it, and as Order says it.
_STATES = {"taken": "acknowledged"}
_SAID = {state: said for said, state in _STATES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the audit log; see AuditRow."""

    at: float
    actor: str
    role: str
    address: str
    action: str
    run: str
    outcome: str
    detail: dict[str, Any]


@dataclass(slots=True)
class Known:
    """An incident that was asked for.

    Attributes:
        row: the number of its row, None while it has none.
        live: as the engine knows it now, None when it is known from the database only.
        key: what it is about.
    """

    run: str
    number: int
    opened: int
    row: int | None
    live: Incident | None
    key: str = ""

    @property
    def name(self) -> str:
        """What people call it."""
        return f"{self.run}:{self.number}"


class People:
    """See the module docstring."""

    def __init__(
        self, runs: Runs, database: Database, hub: Hub, clock: Callable[[], float]
    ) -> None:
        self._runs = runs
        self._database = database
        self._hub = hub
        self._clock = clock
        self.recent: deque[Entry] = deque(maxlen=RECENT)
        runs.on_order = self._changed

    def restore(self) -> None:
        """Take up the orders and the silences of an earlier start; wait for the database.

        Of those that are over the newest are: as many as a run keeps in memory.
        """
        try:
            self._take_up(*self._database.sync(partial(_asked_for, now=self._clock())))
        except StoreError as error:
            logger.error("earlier orders cannot be read error=%s", error)

    async def catch_up(self) -> None:
        """The same, later; what was asked for since then stands. Raises StoreError."""
        self._take_up(*await self._database.run(partial(_asked_for, now=self._clock())))

    def _take_up(self, commands: list[CommandRow], silenced: list[IncidentRow]) -> None:
        for row in commands:
            order = _order(row)
            if order.open or row.run in self._runs.runs:
                self._runs.orders_of(row.run).restore(order)
        for incident in silenced:
            known = incident.run in self._runs.runs or incident.run in self._runs.stored
            if known and incident.silenced_until is not None:
                silences = self._runs.silences_of(incident.run)
                silences.setdefault((incident.number, incident.opened), incident.silenced_until)

    def damaged(self) -> list[Checked]:
        """Snapshots that an earlier start has found damaged; waits for the database."""
        try:
            return self._database.sync(_found_damaged)
        except StoreError as error:
            logger.error("damaged snapshots cannot be recalled error=%s", error)
            return []

    async def damaged_later(self) -> list[Checked]:
        """The same from a database that came late; raises StoreError."""
        return await self._database.run(_found_damaged)

    # ---- the audit log ---------------------------------------------------------------------

    def audit(
        self,
        action: str,
        caller: Caller | None,
        *,
        outcome: str,
        address: str = "",
        run: str = "",
        detail: dict[str, Any] | None = None,
    ) -> None:
        """Add a line; `caller` is None for somebody who is not known."""
        entry = Entry(
            self._clock(),
            "unknown" if caller is None else caller.name,
            "" if caller is None else _highest(caller),
            address or LOCAL,
            action,
            run[:NAME],
            outcome,
            detail or {},
        )
        self.recent.append(entry)
        logger.info(
            "audit action=%s run=%s actor=%s address=%s outcome=%s",
            entry.action,
            entry.run,
            entry.actor,
            entry.address,
            entry.outcome,
        )
        self._database.submit(lambda session: session.add(AuditRow(**asdict(entry))), what="audit")

    async def log(self, run: str, limit: int) -> list[Entry]:
        """The newest lines, newest first; of all runs for "".

        Raises:
            StoreError: the database fails; `recent` has what is in memory.
        """

        def find(session: Session) -> list[AuditRow]:
            rows = select(AuditRow).order_by(AuditRow.id.desc()).limit(limit)
            if run:
                rows = rows.where(AuditRow.run == run)
            return list(session.scalars(rows))

        return [
            Entry(r.at, r.actor, r.role, r.address, r.action, r.run, r.outcome, r.detail)
            for r in await self._database.run(find)
        ]

    def with_recent(self, entries: list[Entry], run: str) -> list[Entry]:
        """Those of the database, and those that it has not got yet, newest first."""
        known = [(e.at, e.action, e.run, e.outcome, e.actor) for e in entries]
        waiting = [
            e
            for e in reversed(self.recent)
            if (not run or e.run == run)
            and (e.at, e.action, e.run, e.outcome, e.actor) not in known
        ]
        return sorted([*waiting, *entries], key=lambda e: e.at, reverse=True)

    # ---- orders ----------------------------------------------------------------------------

    async def earlier(self, run: Run, key: str) -> Order | None:
        """The order of that id, from memory or from the database; None: there was none."""
        known = run.orders.get(key)
        if known is not None:
            return known
        try:
            row = await self._database.run(
                lambda session: session.get(CommandRow, _row_id(run.name, key))
            )
        except StoreError as error:
            # An order that may be a second one is better than a halt that nobody can give.
            logger.error("earlier orders cannot be read run=%s error=%s", run.name, error)
            return None
        order = None if row is None else _order(row)
        if order is not None and order.open:
            run.orders.restore(order)
        return run.orders.get(key) or order

    async def written(self) -> bool:
        """Whether what was submitted so far is in the database now."""
        return await self._database.written()

    def _changed(self, run: str, order: Order) -> None:
        command, now = order.command, self._clock()
        state = _STATES.get(order.state, order.state)
        step, detail = order.taken_step, order.detail

        def write(session: Session) -> None:
            row = session.get(CommandRow, _row_id(run, command.id))
            if row is None:
                row = CommandRow(
                    id=_row_id(run, command.id),
                    run=run,
                    key=command.id,
                    kind=command.kind.value,
                    argument=_argument(command),
                    actor=command.issued_by,
                    created_at=order.issued,
                    expires_at=order.expires,
                    detail="",
                )
                session.add(row)
            row.state, row.step, row.detail = state, step, detail
            if state == "delivered":
                row.delivered_at = now
            elif state == "acknowledged":
                row.acknowledged_at = now

        self._database.submit(write, what="order")
        self._hub.publish(
            "order",
            run,
            {
                "id": command.id,
                "kind": command.kind.value,
                "argument": _argument(command),
                "state": order.state,
                "taken_step": step,
                "detail": detail,
                "issued_by": command.issued_by,
            },
        )
        if state in ("acknowledged", "expired", "superseded", "failed"):
            self.audit(
                "command",
                Caller("sidecar", frozenset()),
                outcome=state,
                run=run,
                detail={"id": command.id, "kind": command.kind.value}
                | ({} if step is None else {"step": step})
                | ({"detail": detail} if detail else {}),
            )

    # ---- incidents -------------------------------------------------------------------------

    async def incident(self, name: str) -> Known:
        """The incident "RUN:NUMBER", or of that row number.

        Raises:
            RefusedError: there is none.
        """
        run, colon, digits = name.rpartition(":")
        if not digits.isascii() or not digits.isdigit() or len(digits) > 15:
            raise RefusedError(
                "malformed",
                f"an incident is named RUN:NUMBER, as `sentinel incidents` lists it, got {name!r}",
                422,
            )
        number = int(digits)
        live = self._live(run, number) if colon else None

        def find(session: Session) -> IncidentRow | None:
            if not colon:
                return session.get(IncidentRow, number)
            rows = select(IncidentRow).where(IncidentRow.run == run, IncidentRow.number == number)
            return session.scalar(rows.order_by(IncidentRow.id.desc()).limit(1))

        try:
            row = await self._database.run(find)
        except StoreError:
            row = None  # whoever is on call is heard with a broken disk too
        if row is not None:
            live = live or self._live(row.run, row.number)
            if live is not None and live.opened != row.opened:
                live = None if not colon else live
        if live is not None:
            of = run if colon else (row.run if row is not None else "")
            same = row is not None and row.opened == live.opened
            found = row.id if same and row is not None else None
            return Known(of, live.number, live.opened, found, live, live.key)
        if row is None:
            raise RefusedError("unknown_incident", f"there is no incident {name!r} here", 404)
        return Known(row.run, row.number, row.opened, row.id, None, row.key)

    def _live(self, run: str, number: int) -> Incident | None:
        known = self._runs.runs.get(run)
        if known is None or known.state is None:
            return None
        for incident in reversed(known.state.ledger.incidents):
            if incident.number == number:
                return incident
        return None

    async def acknowledge(self, incident: Known, by: str) -> tuple[str, bool]:
        """Note who has taken it; a latched one is also ended.

        Returns:
            What happens now, and whether the note is in the database already.
        """
        now = self._clock()
        note = {"acknowledged_at": now, "acknowledged_by": by[:NAME]}
        recorded = await self._mark(incident, note)
        return self._prospect(incident, by, now), recorded

    def _prospect(self, incident: Known, by: str, now: float) -> str:
        run, live = self._runs.runs.get(incident.run), incident.live
        if run is None or live is None or live.state is IncidentState.RESOLVED:
            return "noted; it was over already"
        if run.run_state == "lost":
            return "noted; the run is lost: it stays open until its trainer returns"
        if run.run_state != "running":
            return f"noted; the run is {run.run_state}, so that it stays open as it was at the end"
        if not live.latched:
            return "noted; it ends by itself when the run is quiet"
        order = Command(
            # The fence: begun from nothing, a run may have another incident of that number.
            f"ack-{incident.number}-{incident.opened}-{run.fence}",
            CommandKind.ACK,
            1.0,
            incident.number,
            by,
        )
        self._runs.command(run.name, order, 86_400.0, now)
        return "noted; the trainer ends it with its next step"

    async def silence(self, incident: Known, until: float | None, by: str) -> bool:
        """It is shown as silenced until then; None ends a silence. No alert knows of it.

        Returns:
            Whether it is in the database already.
        """
        if incident.run in self._runs.runs or incident.run in self._runs.stored:
            silences = self._runs.silences_of(incident.run)
            _silence(silences, (incident.number, incident.opened), until, self._clock())
        return await self._mark(incident, {"silenced_until": until, "silenced_by": by[:NAME]})

    async def _mark(self, incident: Known, values: dict[str, Any]) -> bool:
        now = self._clock()

        def write(session: Session) -> None:
            row = writes.incident_row(session, incident.run, incident.number, incident.opened)
            if row is None and incident.live is not None:
                row = writes.save_incident(
                    session, run=incident.run, incident=incident.live, now=now, since=now
                )
            if row is not None:  # else its retention is over
                for name, value in values.items():
                    setattr(row, name, value)

        self._database.submit(write, what="note on an incident")
        recorded = await self.written()
        told = {"number": incident.number, "opened": incident.opened, **values}
        self._hub.publish("incident_note", incident.run, told)
        return recorded


def _asked_for(session: Session, now: float) -> tuple[list[CommandRow], list[IncidentRow]]:
    """The orders and the silences of an earlier start."""
    newest = func.row_number().over(
        partition_by=CommandRow.run, order_by=CommandRow.created_at.desc()
    )
    place = select(CommandRow.id, newest.label("place")).subquery()
    wanted = or_(CommandRow.state.in_(OPEN_ORDER), place.c.place <= MAX_COMMANDS)
    commands = select(CommandRow).join(place, place.c.id == CommandRow.id).where(wanted)
    silenced = select(IncidentRow).where(IncidentRow.silenced_until > now)
    return (
        list(session.scalars(commands.order_by(CommandRow.created_at))),
        list(session.scalars(silenced)),
    )


def _found_damaged(session: Session) -> list[Checked]:
    """Snapshots whose newest line in the audit log says so."""
    rows = session.scalars(
        select(AuditRow).where(AuditRow.action == "snapshot").order_by(AuditRow.id)
    )
    newest = {(row.run, str(row.detail.get("name"))): row for row in rows}
    return [
        Checked(run, name, place[0], place[1], Result.DAMAGED, reason, 0, row.at)
        for (run, name), row in newest.items()
        if row.outcome == Result.DAMAGED
        and (place := parse_name(name)) is not None
        and (reason := str(row.detail.get("reason")))
    ]


def _silence(
    silences: dict[tuple[int, int], float], key: tuple[int, int], until: float | None, now: float
) -> None:
    for one in [k for k, u in silences.items() if u <= now or k == key]:
        del silences[one]
    if until is not None:
        silences[key] = until


def _highest(caller: Caller) -> str:
    return next((r for r in ("control", "ingest", "read") if r in caller.roles), "")


def _row_id(run: str, key: str) -> str:
    return blake2b(f"{run}\0{key}".encode(), digest_size=16).hexdigest()


def _argument(command: Command) -> dict[str, Any]:
    if command.kind is CommandKind.SCALE_LR:
        return {"value": command.value}
    return {} if command.target is None else {"target": command.target}


def _order(row: CommandRow) -> Order:
    command = Command(
        row.key,
        CommandKind(row.kind),
        float(row.argument.get("value", 1.0)),
        row.argument.get("target"),
        row.actor,
    )
    state = _SAID.get(row.state, row.state)
    if state in OPEN_ORDER:
        state = "pending"  # told again: whether it was heard before, its id will say
    return Order(command, row.created_at, row.expires_at, state, row.step, row.detail)

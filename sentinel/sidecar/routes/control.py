"""What people order: commands for a trainer, acknowledged and silenced incidents, and the record.

    POST /v1/runs/{run}/commands       {"kind": "rollback", "target": 400, "issued_by": "ann"}
    POST /v1/incidents/{id}/ack        {"by": "ann"}
    POST /v1/incidents/{id}/silence    {"for_s": 3600, "by": "ann"}       0 ends it
    GET  /v1/audit?run=r7&limit=100    who asked for what, and whether they got it
    GET  /v1/access                    what this caller may do

A command is idempotent by its id (or Idempotency-Key), is told the trainer with every reply until a
frame of the trainer acknowledges it, and expires by this clock. For a run that has ended it is
refused; for one that is lost it is taken, since a trainer behind a broken network goes on and may
come back at any time, and the answer says until when it would still act. Refusals are audited too,
up to a limit for each token and for strangers, so that nobody can fill the disk.

Errors:  {"code", "detail"}, with the way out in the detail; 429 with Retry-After.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from sentinel.core.errors import ConfigError, ProtocolError
from sentinel.core.incidents import INSTABILITY
from sentinel.core.state import Ledger
from sentinel.core.types import Command, CommandKind
from sentinel.sidecar import copies
from sentinel.sidecar.door import TooManyError, answer, read_json, refusal, speaks_json
from sentinel.sidecar.people import Known, People
from sentinel.sidecar.runs import COMMAND_TTL_S, Order, RefusedError, Run
from sentinel.sidecar.security import LOCAL, SHARED, Caller, Limits, Role
from sentinel.sidecar.service import Service
from sentinel.sidecar.store.database import StoreError
from sentinel.sidecar.store.models import NAME

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 65536
COMMANDS_PER_MINUTE, COMMANDS_AT_ONCE = 30.0, 20  # of one run: people, not programs, give them
# Refusals that are audited: of all strangers together, and of each token.
REFUSED_PER_MINUTE, REFUSED_AT_ONCE = 20.0, 50
MAX_SILENCE_S = 30 * 86_400.0
MAX_TTL_S = 86_400.0
MAX_LOG = 1000
SILENT_S = 30.0  # twice the time between two signs of life


class _JsonCommand(msgspec.Struct, forbid_unknown_fields=True):
    kind: CommandKind
    id: str | None = None
    value: float | None = None
    target: int | None = None
    issued_by: str = ""
    expires_in_s: float = COMMAND_TTL_S


class _JsonAck(msgspec.Struct, forbid_unknown_fields=True):
    by: str = ""


class _JsonSilence(msgspec.Struct, forbid_unknown_fields=True):
    for_s: float
    by: str = ""


Serve = Callable[[Caller, bytes, dict[str, Any]], Awaitable[tuple[int, Any]]]


def router(service: Service) -> APIRouter:
    """See the module docstring."""
    routes, runs, door = APIRouter(), service.runs, service.door
    people: People = service.people
    per_run = Limits(per_minute=COMMANDS_PER_MINUTE, burst=COMMANDS_AT_ONCE)
    refused = Limits(per_minute=REFUSED_PER_MINUTE, burst=REFUSED_AT_ONCE)

    async def ordered(request: Request, action: str, run: str, serve: Serve) -> Response:
        """One request that changes something: let in, read, served, audited whatever comes of it.

        `serve` puts what is worth auditing into the table that it is given.
        """
        caller: Caller | None = None
        detail: dict[str, Any] = {}
        address = "" if request.client is None else request.client.host
        try:
            caller = door.caller(request)
            door.let_in(request, Role.CONTROL)
            speaks_json(request)
            body = await door.body(request, MAX_BODY_BYTES)
            status, value = await serve(caller or _nobody(), body, detail)
        except (RefusedError, ProtocolError, ConfigError) as error:
            said = refusal(error)
            if refused.wait("" if caller is None else caller.name, service.timer()) == 0.0:
                people.audit(
                    action,
                    caller,
                    outcome="refused",
                    address=address,
                    run=detail.pop("run", run),
                    detail=detail | {"why": str(error)[:500]},
                )
            return said
        people.audit(
            action,
            caller,
            outcome="accepted",
            address=address,
            run=detail.pop("run", run),
            detail=detail,
        )
        return answer(value, status)

    @routes.post("/v1/runs/{run}/commands")
    async def commands(run: str, request: Request) -> Response:
        async def serve(caller: Caller, body: bytes, told: dict[str, Any]) -> tuple[int, Any]:
            asked = read_json(_JsonCommand, body, "command")
            command = _command(asked, request.headers.get("idempotency-key", ""), caller)
            told |= {"id": command.id, "kind": command.kind.value, "by": command.issued_by}
            if command.target is not None:
                told["target"] = command.target
            if command.kind is CommandKind.SCALE_LR:
                told["value"] = command.value
            service.refuse_watched(run)
            known = runs.get(run)
            await service.past.recall(known)
            old = await people.earlier(known, command.id)
            if old is not None:
                _same(old.command, command)
                told["again"] = True
                warning = _warning(service, known, command)
                return 202, _shown(known, old, True, service.now(), warning)
            wait = per_run.wait(run, service.timer())
            if wait > 0.0:
                raise TooManyError(
                    f"run {run!r} was given {COMMANDS_AT_ONCE} commands within a short time, "
                    f"{COMMANDS_PER_MINUTE:g} a minute are taken",
                    wait,
                )
            _sensible(known, command)
            warning = _warning(service, known, command)
            if warning:
                told["warning"] = warning[:500]
            order = runs.command(run, command, asked.expires_in_s, service.now())
            if known.run_state != "running":
                told["run_state"] = known.run_state
            return 202, _shown(known, order, await people.written(), service.now(), warning)

        return await ordered(request, "command", run, serve)

    @routes.post("/v1/incidents/{incident}/ack")
    async def ack(incident: str, request: Request) -> Response:
        async def serve(caller: Caller, body: bytes, told: dict[str, Any]) -> tuple[int, Any]:
            by = _by(read_json(_JsonAck, body or b"{}", "acknowledgement").by, caller)
            told |= {"incident": incident, "by": by}
            service.refuse_watched(incident.rpartition(":")[0])
            found = await people.incident(incident)
            told |= {"incident": found.name, "run": found.run}
            what, recorded = await people.acknowledge(found, by)
            return 200, {
                "incident": found.name,
                "acknowledged_by": by,
                "recorded": recorded,
                "detail": what,
            }

        return await ordered(request, "ack", "", serve)

    @routes.post("/v1/incidents/{incident}/silence")
    async def silence(incident: str, request: Request) -> Response:
        async def serve(caller: Caller, body: bytes, told: dict[str, Any]) -> tuple[int, Any]:
            asked = read_json(_JsonSilence, body, "silence")
            if not 0.0 <= asked.for_s <= MAX_SILENCE_S:
                raise ProtocolError(
                    f"silence.for_s must lie between 0 and {MAX_SILENCE_S:g} (30 days), "
                    f"got {asked.for_s:g}"
                )
            by = _by(asked.by, caller)
            told |= {"incident": incident, "by": by, "for_s": asked.for_s}
            service.refuse_watched(incident.rpartition(":")[0])
            found = await people.incident(incident)
            told |= {"incident": found.name, "run": found.run}
            until = service.now() + asked.for_s if asked.for_s else None
            recorded = await people.silence(found, until, by)
            return 200, {
                "incident": found.name,
                "silenced_until": until,
                "silenced_by": by,
                "recorded": recorded,
                "detail": _silenced(found, asked.for_s),
            }

        return await ordered(request, "silence", "", serve)

    @routes.get("/v1/audit")
    async def audit(request: Request, run: str = "", limit: str = "100") -> Response:
        try:
            door.let_in(request, Role.READ)
            if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= MAX_LOG:
                raise ProtocolError(f"limit must lie between 1 and {MAX_LOG}, got {limit[:20]!r}")
            try:
                entries = await people.log(run, int(limit))
                trouble = service.store.database.trouble
            except StoreError as error:
                trouble = str(error)
                entries = []
            if trouble:  # what is in memory waits to be written
                entries = people.with_recent(entries, run)
        except (RefusedError, ProtocolError) as error:
            return refusal(error)
        return answer({"audit": entries[: int(limit)], "trouble": trouble})

    @routes.get("/v1/access")
    async def access(request: Request) -> Response:
        """Never refused to somebody without a token: a page asks this first."""
        tokens = service.access.configured
        caller = door.caller(request)
        try:
            door.let_in(request)
        except RefusedError as error:
            if error.status not in (401, 403):
                return refusal(error)
        orders = caller is not None and caller.may(Role.CONTROL)
        why = ""
        if tokens and caller is None:
            why = "this sidecar wants a token: Authorization: Bearer TOKEN"
        elif not orders:
            why = (
                "this token is not of role control: use one that is to give orders"
                if tokens
                else "this sidecar was started without a token, so it takes no orders over TCP: "
                "start it with SENTINEL_TOKEN or --token-file control=FILE, or use the Unix socket"
            )
        return answer(
            {
                "tokens": tokens,
                "known": caller is not None or not tokens,
                "name": None if caller is None else caller.name,
                "roles": [] if caller is None else sorted(caller.roles),
                "orders": orders,
                "why": why,
            }
        )

    return routes


# The alerts that an incident of that key comes with; advice has none but this one.
_ALERTS = {
    INSTABILITY: "Sentinel(Rollback|RollbackFailed|NonFinite)",
    "attention_logit": "SentinelQkNorm",
}


def _silenced(incident: Known, for_s: float) -> str:
    """What a silence does, and what it does not: alerts are of a run, and not of an incident."""
    if not for_s:
        return "it is not shown as silenced any more; a silence in Alertmanager ends by itself"
    said = "shown as silenced here and in sentinel_incidents; sentinel goes on acting"
    alerts = _ALERTS.get(incident.key)
    if alerts is None:
        return f"{said}. No alert of ours is about such an incident"
    minutes = math.ceil(for_s / 60.0)
    return (
        f"{said}. Its alerts go on; to keep them from paging: amtool silence add "
        f"'run=\"{incident.run}\"' 'alertname=~\"{alerts}\"' --duration={minutes}m "
        f"--comment='incident {incident.name}' (also those of a later incident of this run)"
    )


def _nobody() -> Caller:
    return Caller("unknown", frozenset())


def _by(given: str, caller: Caller) -> str:
    """Who it was: the name that was given; it says so when a token goes by another one."""
    name = " ".join(given.split())[:64]
    if not name.isprintable():
        raise ProtocolError("by must be printable text")
    if not name or name == caller.name:
        return caller.name
    # These two say nothing about who it is.
    return name if caller.name in (LOCAL, SHARED) else f"{name} ({caller.name})"


def _command(asked: _JsonCommand, key: str, caller: Caller) -> Command:
    kind, value = asked.kind, 1.0
    if kind is CommandKind.SCALE_LR:
        if asked.value is None:
            raise ProtocolError(
                "command.value must be given for scale_lr: the factor, above 0 and at most 10"
            )
        value = asked.value
        if not 0.0 < value <= 10.0:
            raise ProtocolError(f"command.value must lie above 0 and at most 10, got {value:g}")
    elif asked.value is not None:
        raise ProtocolError(
            f"command.value is for scale_lr alone: leave it out for {kind.value}, got "
            f"{asked.value:g}"
        )
    if asked.target is not None and kind not in (CommandKind.ROLLBACK, CommandKind.ACK):
        raise ProtocolError(
            f"command.target is for rollback and ack alone: leave it out for {kind.value}, got "
            f"{asked.target}"
        )
    if asked.kind is CommandKind.ACK and asked.target is None:
        raise ProtocolError("command.target must be the number of the incident to acknowledge")
    if asked.target is not None and not 0 <= asked.target < 2**53:
        raise ProtocolError(f"command.target must be a step from 0 on, got {asked.target}")
    if not 0.0 < asked.expires_in_s <= MAX_TTL_S:
        raise ProtocolError(
            f"command.expires_in_s must lie above 0 and at most 86400, got {asked.expires_in_s:g}"
        )
    if asked.id == "":
        raise ProtocolError("command.id must not be empty: leave it out, and one is made up")
    if asked.id and key and asked.id != key:
        raise ProtocolError(
            f"command.id and the header Idempotency-Key must be the same where both are given, got "
            f"{asked.id[:NAME]!r} and {key[:NAME]!r}; leave one out"
        )
    chosen = asked.id or key or uuid.uuid4().hex
    if len(chosen) > NAME or not (chosen.isascii() and chosen.isprintable()):
        raise ProtocolError(f"command.id must have at most {NAME} printable ASCII characters")
    by = _by(asked.issued_by, caller)
    assert math.isfinite(value)
    return Command(chosen, asked.kind, value, asked.target, by)


def _same(old: Command, new: Command) -> None:
    """The same id must mean the same order: raises RefusedError."""
    if (old.kind, old.value, old.target) != (new.kind, new.value, new.target):
        raise RefusedError(
            "conflict",
            f"id {old.id!r} was given to another order ({old.kind.value}); a new order needs a "
            "new id",
        )


def _sensible(run: Run, command: Command) -> None:
    """Refuse what cannot come to anything, while somebody is there to hear it."""
    if run.run_state in ("finished", "halted"):
        # Started again as it is, a halted one would raise StillHalted.
        clear = "clear its marker where the run_dir is with `sentinel resume RUN`, then "
        raise RefusedError(
            "over",
            f"run {run.name!r} is {run.run_state}: nobody would hear it; "
            f"{clear if run.run_state == 'halted' else ''}start the run again, "
            "or look at what happened: sentinel incidents RUN --all",
        )
    ledger: Ledger | None = None if run.state is None else run.state.ledger
    if ledger is None:
        return
    if command.kind is CommandKind.ROLLBACK:
        healthy = [s.step for s in ledger.snapshots if s.healthy]
        if not healthy:
            raise RefusedError(
                "no_snapshot", f"run {run.name!r} has no healthy snapshot to roll back to yet"
            )
        if command.target is not None and command.target not in healthy:
            raise RefusedError(
                "no_snapshot",
                f"command.target must be the step of a healthy snapshot "
                f"({', '.join(map(str, healthy))}), got {command.target}",
            )
    if command.kind is CommandKind.ACK and all(
        i.number != command.target for i in ledger.incidents
    ):
        raise RefusedError(
            "unknown_incident", f"run {run.name!r} has no incident {command.target}", 404
        )


def _warning(service: Service, run: Run, command: Command) -> str:
    """What speaks against it; it is given all the same (see sentinel.sidecar.copies)."""
    if command.kind is not CommandKind.ROLLBACK:
        return ""
    return copies.doubt(service.copies(run), command.target)


def _shown(run: Run, order: Order, recorded: bool, now: float, warning: str) -> dict[str, Any]:
    return {
        "id": order.command.id,
        "kind": order.command.kind,
        "state": order.state,
        "taken_step": order.taken_step,
        "expires_at": order.expires,
        "recorded": recorded,
        "run_state": run.run_state,
        "detail": _prospect(run, order, now),
        "result": order.detail,
        "warning": warning,
    }


def _prospect(run: Run, order: Order, now: float) -> str:
    """What is to be expected of an order, in one sentence."""
    match order.state:
        case "taken":
            said = f": {order.detail}" if order.detail else ""
            return f"the trainer has obeyed{said}"
        case "restoring":
            return "the trainer has taken it and has not restored the snapshot yet"
        case "superseded":
            return f"not carried out: {order.detail}"
        case "failed":
            return f"it failed: {order.detail}"
        case "expired":
            return "it has expired and was never acted on; a new order needs a new id"
    until = datetime.fromtimestamp(order.expires, UTC).strftime("%H:%M:%S UTC")
    if order.expires - now > 86_400.0 / 2:
        until = datetime.fromtimestamp(order.expires, UTC).strftime("%Y-%m-%d %H:%M UTC")
    silent = now - run.last_heard
    if run.run_state == "running" and silent <= max(SILENT_S, 3.0 * (run.interval_s or 0.0)):
        return "the trainer hears of it with its next report"
    so = "is lost" if run.run_state == "lost" else "is silent"
    return (
        f"run {run.name!r} {so} (no sign of life for {silent:.0f} s): it acts on this only if its "
        f"trainer returns before {until}; otherwise nothing happens"
    )

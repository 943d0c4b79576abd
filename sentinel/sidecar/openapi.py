"""The interface as an OpenAPI document: GET /openapi.json.

    document(version) -> dict

Written by hand, since the routes read raw bodies: a test compares its paths with the application's,
and another lets schemathesis try every operation against it. Trainers of ours speak msgpack on the
ingest routes (sentinel.wire.messages); the JSON described here is for people and other languages.
"""

from __future__ import annotations

from typing import Any

from sentinel.core.types import Action, CommandKind, IncidentState, Severity
from sentinel.sidecar.copies import Copy
from sentinel.sidecar.runs import SESSION_HEADER
from sentinel.sidecar.runs.orders import STATES as ORDER_STATES
from sentinel.sidecar.store.series import CURVES, DECODED, MOST_POINTS
from sentinel.wire import messages

Schema = dict[str, Any]

WORDS = ["nan", "inf", "-inf"]
NUMBER: Schema = {"anyOf": [{"type": "number"}, {"type": "string", "enum": WORDS}]}
NORM: Schema = {
    "anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "enum": ["nan", "inf"]}]
}
STEP: Schema = {"type": "integer", "minimum": 0, "maximum": 2**53 - 1}
TEXT: Schema = {"type": "string"}
TRUTH: Schema = {"type": "boolean"}
WHOLE: Schema = {"type": "integer"}
TIME: Schema = {"type": "number", "description": "Unix seconds"}
ACTIONS = [action.name.lower() for action in Action]

# What `code` of a refusal may be: for programs; `detail` is for people and may change.
CODES = {
    "malformed": "it cannot be read, or makes no sense; the detail names the field",
    "garbled": "a trainer's message that does not carry the seal of its bytes",
    "unauthorized": "a token is wanted, or another host name, or the Unix socket",
    "forbidden": "the token has another role",
    "fenced": "another process writes this run, or the session is not the one that does",
    "conflict": "the same id was given to another order, other layers to a run that goes on, or "
    "another observation of the newest step",
    "over": "the run has ended: it takes no order and no step",
    "watched": "the run does not report here and hears no orders",
    "no_snapshot": "there is no such healthy snapshot to roll back to",
    "unknown_run": "there is no run of that name",
    "unknown_incident": "there is no such incident",
    "unreadable": "the series of the run cannot be read",
    "not_found": "there is nothing at that address",
    "method_not_allowed": "the method is not taken there; the header Allow says which are",
    "too_many": "too often; the header Retry-After says when it may come again",
    "full": "no room for another run, order or listener",
    "unavailable": "a disk or the database does not allow it now",
    "not_ready": "the sidecar is starting, or on its way down",
    "internal": "an error of sentinel's own; the sidecar's log has more",
}


def maybe(schema: Schema) -> Schema:
    """That, or null: it was not measured, or there is none."""
    return {"anyOf": [schema, {"type": "null"}]}


def listed(schema: Schema) -> Schema:
    """A list of that."""
    return {"type": "array", "items": schema}


def table(required: tuple[str, ...] = (), /, **properties: Schema) -> Schema:
    """An object; more fields may come in later versions."""
    found: Schema = {"type": "object", "properties": properties}
    if required:
        found["required"] = list(required)
    return found


def strict(required: tuple[str, ...] = (), /, **properties: Schema) -> Schema:
    """An object that somebody sends: a field that there is not is refused."""
    return table(required, **properties) | {"additionalProperties": False}


def ref(name: str) -> Schema:
    """One of SCHEMAS."""
    return {"$ref": f"#/components/schemas/{name}"}


SCHEMAS: dict[str, Schema] = {
    "Number": NUMBER | {"description": "A number that is not finite is a word."},
    "Refusal": table(
        ("code", "detail"),
        code={
            "type": "string",
            "enum": list(CODES),
            "description": "; ".join(f"{code}: {means}" for code, means in CODES.items()),
        },
        detail=TEXT | {"description": "What is wrong and what to do about it, for people."},
    ),
    "Layer": {
        "anyOf": [
            TEXT,
            strict(
                ("name",),
                name=TEXT,
                kind=TEXT,
                shape=listed(WHOLE),
                block=maybe(WHOLE),
                attention=TRUTH,
            ),
        ]
    },
    "Registration": strict(
        layers=listed(ref("Layer")),
        first_step=maybe(STEP),
        exclusive=TRUTH
        | {"description": "nobody else may write; the answer has the session to carry"},
        take_over=TRUTH | {"description": "whoever writes this run is gone, alive as it looks"},
    ),
    "Observation": strict(
        ("step",),
        step=STEP,
        loss=maybe(NUMBER),
        grad_norm=maybe(NORM),
        lr=maybe(NORM),
        loss_scale=maybe(NORM),
        params_finite=maybe(TRUTH),
        shape={"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 16},
        blind=TRUTH,
        batch_id={"type": "string", "maxLength": 1024},
        columns={
            "type": "object",
            "additionalProperties": listed(maybe(NUMBER)),
            "maxProperties": 64,
            "description": "A number for each registered layer; norms are 0 or more; null, or "
            "-inf, where a layer was not measured.",
        },
    ),
    "Outcome": strict(
        ("step", "executed", "applied"),
        step=STEP,
        executed={"type": "string", "enum": ACTIONS},
        applied=TRUTH,
    ),
    "Event": strict(
        ("kind", "step"),
        kind={
            "type": "string",
            "enum": [
                "snapshot_taken",
                "restored",
                "restore_failed",
                "snapshot_lost",
                "automation_set",
            ],
        },
        step=STEP,
        target=maybe(STEP),
        reason=TEXT,
        paused=TRUTH,
    ),
    "Step": {
        "anyOf": [
            strict(
                ("observation",),
                observation=ref("Observation"),
                outcome=maybe(ref("Outcome")),
                events=listed(ref("Event")) | {"maxItems": 64},
            ),
            ref("Observation"),
        ]
    },
    "Decision": table(
        ("step", "action", "rule", "reason", "would", "lr_factor", "readings"),
        step=STEP,
        action={"type": "string", "enum": ACTIONS},
        rule=TEXT,
        reason=TEXT,
        would={"type": "string", "enum": ACTIONS},
        target=maybe(WHOLE),
        lr_factor=NUMBER,
        keep_batch=TRUTH,
        drop_canaries=TRUTH,
        take_snapshot=TRUTH,
        findings=listed({"type": "object"}),
        readings={"type": "object"},
    ),
    "Summary": table(
        ("run", "state", "step", "loss", "grad_norm", "protection", "decides", "last_report_s_ago"),
        run=TEXT,
        state={"type": "string", "enum": ["running", "finished", "halted", "lost"]},
        step=maybe(WHOLE),
        loss=maybe(NUMBER),
        grad_norm=maybe(NUMBER),
        protection=maybe({"type": "string", "enum": ["armed", "warming", "blind", "off"]}),
        protection_why=TEXT
        | {"description": "What its trainer has said of it since its newest step, else empty"},
        decides=TRUTH,
        reason=TEXT,
        watched=TRUTH,
        policy=TEXT,
        mode=TEXT,
        open_incidents=maybe(WHOLE),
        open_advice=maybe(WHOLE),
        skipped=maybe(WHOLE),
        rolled_back=maybe(WHOLE),
        damaged_snapshots=maybe(WHOLE)
        | {"description": "of those it may go back to; null: no file is seen"},
        last_report_s_ago={"type": "number"},
        registered_at=TIME,
        ended_at=maybe(TIME),
    ),
    "Snapshot": table(
        ("step", "healthy", "disk", "detail", "checked_at", "warning"),
        step=STEP,
        healthy=maybe(TRUTH) | {"description": "null: its ledger is not known"},
        quiet=maybe(WHOLE),
        name=maybe(TEXT) | {"description": "of its copy on disk"},
        disk={
            "type": "string",
            "enum": [str(copy) for copy in Copy],
            "description": "its copy on disk: sound or damaged, as it was last read; unread: it is "
            "not its turn yet; adopted: the user's own checkpoint, not read; none: there is no "
            "copy; unseen: it cannot be told from here",
        },
        detail=TEXT | {"description": "Why it is not sound, for people."},
        checked_at=maybe(TIME),
        checked_s_ago=maybe({"type": "number", "minimum": 0}),
        warning=TEXT | {"description": "What speaks against going back to it, for people."},
    ),
    "Incident": table(
        ("id", "run", "number", "key", "state", "severity", "summary", "opened", "last"),
        id=maybe(WHOLE | {"description": "null: of a run that is only watched"}),
        run=TEXT,
        number=WHOLE,
        key=TEXT,
        state={"type": "string", "enum": [str(one) for one in IncidentState]},
        severity={"type": "string", "enum": [str(one) for one in Severity]},
        summary=TEXT,
        opened=WHOLE,
        last=WHOLE,
        fired=maybe(WHOLE),
        resolved=maybe(WHOLE),
        steps=WHOLE,
        latched=TRUTH,
        layers=listed(WHOLE),
        actions=listed({"type": "array"}),
        opened_at=maybe(TIME),
        updated_at=maybe(TIME),
        acknowledged_at=maybe(TIME),
        acknowledged_by=TEXT,
        silenced_until=maybe(TIME),
        silenced_by=TEXT,
    ),
    "Executed": table(
        ("run", "incarnation", "step", "attempt", "action", "rule", "reason", "source", "at"),
        run=TEXT,
        incarnation=TEXT,
        step=WHOLE,
        attempt=WHOLE,
        action=TEXT,
        rule=TEXT,
        reason=TEXT,
        target=maybe(WHOLE),
        source=TEXT,
        at=maybe(TIME),
    ),
    "Checked": table(
        ("name", "step", "attempt", "result", "reason", "size_bytes", "checked_at"),
        name=TEXT,
        step=WHOLE,
        attempt=WHOLE,
        result={"type": "string", "enum": ["sound", "damaged"]},
        reason=TEXT,
        size_bytes=WHOLE,
        checked_at=TIME,
    ),
    "Command": strict(
        ("kind",),
        kind={"type": "string", "enum": [str(kind) for kind in CommandKind]},
        id={"type": "string", "minLength": 1, "maxLength": 128},
        value=maybe({"type": "number", "exclusiveMinimum": 0, "maximum": 10})
        | {"description": "for scale_lr alone, which wants it"},
        target=maybe(STEP) | {"description": "for rollback and ack alone"},
        issued_by=TEXT,
        expires_in_s={"type": "number", "exclusiveMinimum": 0, "maximum": 86400},
    ),
}

_RUN: Schema = {
    "name": "run",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "pattern": f"^{messages.RUN_NAME.pattern}$"},
}
_SESSION: Schema = {
    "name": SESSION_HEADER,
    "in": "header",
    "required": False,
    "schema": TEXT,
    "description": "the session that a JSON trainer was given when it registered",
}
_INCIDENT: Schema = {"name": "incident", "in": "path", "required": True, "schema": TEXT}
_REFUSED = {
    400: "The message is not sealed as it was sent, or ended early.",
    401: "A token is wanted.",
    403: "This token may not do that, or orders are not taken here.",
    404: "There is none of that name.",
    405: "The method is not taken here.",
    408: "The body came too slowly.",
    409: "Another process writes this run, or the same id or step meant something else.",
    413: "The body is too large.",
    415: "The content type is neither JSON nor msgpack.",
    421: "Without a token only local names are answered.",
    422: "It cannot be read, or makes no sense.",
    429: "Too many.",
    500: "An error of sentinel's own.",
    503: "A disk, the database or the number of listeners does not allow it now.",
}
_OPEN_REFUSED = (405, 500, 503)


def _query(name: str, schema: Schema, about: str) -> Schema:
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": about}


_RANGE = [
    _query("from", WHOLE, "first step, at most `to`"),
    _query("to", WHOLE, "last step, included"),
]


def _operation(
    summary: str,
    answers: Schema | str,
    *,
    parameters: tuple[Schema, ...] = (),
    body: Schema | None = None,
    required: bool = True,
    msgpack: bool = False,
    status: int = 200,
    open_: bool = False,
) -> Schema:
    """One operation; `answers` is a schema for JSON, or the content type of something else."""
    content: Schema
    if isinstance(answers, str):
        content = {one: {"schema": TEXT} for one in answers.split(" | ")}
    else:
        content = {"application/json": {"schema": answers}}
    binary = {"schema": {"type": "string", "format": "binary"}}
    refusal: Schema = {"application/json": {"schema": ref("Refusal")}}
    if msgpack:
        content = content | {messages.CONTENT_TYPE: binary}
        refusal = refusal | {messages.CONTENT_TYPE: binary}
    found: Schema = {
        "summary": summary,
        "responses": {str(status): {"description": "Done.", "content": content}}
        | {
            str(code): {"description": why, "content": refusal}
            for code, why in _REFUSED.items()
            if not open_ or code in _OPEN_REFUSED
        },
    }
    if parameters:
        found["parameters"] = list(parameters)
    if body is not None:
        given: Schema = {"application/json": {"schema": body}}
        if msgpack:
            given[messages.CONTENT_TYPE] = binary
        found["requestBody"] = {"required": required, "content": given}
    if open_:
        found["security"] = []
    return found


def _paths() -> dict[str, dict[str, Schema]]:
    runs = "/v1/runs/{run}"
    known = table(("run",), run=TEXT)
    stream = "text/event-stream"
    names = "comma separated: " + ", ".join((*CURVES, *DECODED))
    sealed_only: Schema = {"type": "object", "description": "Only msgpack is taken here."}
    return {
        "/v1/runs": {
            "get": _operation(
                "All runs, and what is wrong with the record",
                table(
                    ("runs", "trouble"),
                    runs=listed(ref("Summary")),
                    stored=WHOLE
                    | {"description": "More runs that are over: on disk only, for want of room."},
                    trouble=TEXT,
                    not_shown={
                        "type": "object",
                        "additionalProperties": TEXT,
                        "description": "Why, by the name of a watched run that is not among them.",
                    },
                ),
                parameters=(_query("all", WHOLE, "1: stored ones too, the newest 1000"),),
            ),
        },
        runs: {
            "put": _operation(
                "Register a run",
                table(
                    ("run", "policy", "next_step"),
                    run=TEXT,
                    policy={"type": "object"},
                    next_step=maybe(STEP),
                    session=maybe(TEXT)
                    | {"description": f"for the header {SESSION_HEADER}; null: none to carry"},
                ),
                parameters=(_RUN, _SESSION),
                body=ref("Registration"),
                required=False,
                msgpack=True,
            ),
            "get": _operation(
                "One run in full",
                {
                    "allOf": [
                        ref("Summary"),
                        table(("snapshots",), snapshots=listed(ref("Snapshot"))),
                    ]
                },
                parameters=(_RUN,),
            ),
        },
        f"{runs}/steps": {
            "post": _operation(
                "Report a step; the decision is in the answer",
                table(
                    ("run", "decision", "recorded"),
                    run=TEXT,
                    decision=ref("Decision"),
                    recorded=TRUTH,
                ),
                parameters=(_RUN, _SESSION),
                body=ref("Step"),
                msgpack=True,
            ),
        },
        f"{runs}/state": {
            "put": _operation(
                "Hand the engine's state over",
                known,
                parameters=(_RUN,),
                body=sealed_only,
                msgpack=True,
            ),
        },
        f"{runs}/close": {
            "post": _operation(
                "The run is over",
                table(("run", "state"), run=TEXT, state=TEXT),
                parameters=(_RUN, _SESSION),
                body=strict(state={"type": "string", "enum": ["finished", "halted"]}),
                required=False,
                msgpack=True,
            ),
        },
        f"{runs}/series": {
            "get": _operation(
                "Curves, thinned so that no spike is lost",
                table(
                    ("run", "rows", "downsampled", "series", "incarnations", "actions"),
                    run=TEXT,
                    rows=WHOLE,
                    downsampled=TRUTH,
                    series={
                        "type": "object",
                        "additionalProperties": table(
                            ("step", "value"), step=listed(WHOLE), value=listed({})
                        ),
                    },
                    incarnations=listed({"type": "object"}),
                    actions=listed({"type": "object"}),
                    actions_total=WHOLE,
                ),
                parameters=(
                    _RUN,
                    _query("name", TEXT, names),
                    *_RANGE,
                    _query("points", WHOLE, f"about so many a series, 1 to {MOST_POINTS}"),
                ),
            ),
        },
        f"{runs}/layers": {
            "get": _operation(
                "A map of layers by steps",
                table(
                    ("run", "name", "layers", "steps", "last", "values"),
                    run=TEXT,
                    name=TEXT,
                    layers=listed(TEXT),
                    rows=WHOLE,
                    steps=listed(WHOLE),
                    last=listed(WHOLE),
                    values=listed(listed(maybe(NUMBER))),
                ),
                parameters=(
                    _RUN,
                    _query("name", TEXT, "a per-layer column, such as layer_grad_norm"),
                    *_RANGE,
                    _query("points", WHOLE, "buckets, 1 to 2000"),
                ),
            ),
        },
        f"{runs}/incidents": {
            "get": _operation(
                "What happened to a run",
                table(("run", "incidents"), run=TEXT, incidents=listed(ref("Incident"))),
                parameters=(_RUN,),
            ),
        },
        f"{runs}/decisions": {
            "get": _operation(
                "Executed actions other than proceed",
                table(("run", "decisions"), run=TEXT, decisions=listed(ref("Executed"))),
                parameters=(_RUN,),
            ),
        },
        f"{runs}/snapshots": {
            "get": _operation(
                "Snapshots on disk that were read again",
                table(
                    ("run", "seen", "why", "snapshots"),
                    run=TEXT,
                    seen=TRUTH,
                    why=TEXT | {"description": "Why nothing can be seen."},
                    snapshots=listed(ref("Checked")),
                ),
                parameters=(_RUN,),
            ),
        },
        f"{runs}/events": {"get": _operation("Live events of a run", stream, parameters=(_RUN,))},
        "/v1/events": {"get": _operation("Live events of all runs", stream)},
        f"{runs}/commands": {
            "post": _operation(
                "Give an order",
                table(
                    ("id", "kind", "state", "detail", "warning"),
                    id=TEXT,
                    kind=TEXT,
                    state={"type": "string", "enum": list(ORDER_STATES)},
                    taken_step=maybe(STEP),
                    expires_at=TIME,
                    recorded=TRUTH,
                    run_state=TEXT,
                    detail=TEXT | {"description": "What is to be expected of it, for people."},
                    result=TEXT
                    | {"description": "What was restored, or why it was not carried out."},
                    warning=TEXT
                    | {"description": "What speaks against it; it is given all the same."},
                ),
                parameters=(
                    _RUN,
                    {
                        "name": "Idempotency-Key",
                        "in": "header",
                        "required": False,
                        "schema": TEXT,
                        "description": "instead of id: the same one again is the same order",
                    },
                ),
                body=ref("Command"),
                status=202,
            ),
        },
        "/v1/incidents/{incident}/ack": {
            "post": _operation(
                "Acknowledge an incident",
                table(
                    ("incident", "acknowledged_by", "recorded"),
                    incident=TEXT,
                    acknowledged_by=TEXT,
                    recorded=TRUTH,
                ),
                parameters=(_INCIDENT,),
                body=strict(by=TEXT),
                required=False,
            ),
        },
        "/v1/incidents/{incident}/silence": {
            "post": _operation(
                "Nobody is paged about it for a while",
                table(
                    ("incident", "silenced_until", "recorded"),
                    incident=TEXT,
                    silenced_until=maybe(TIME),
                    recorded=TRUTH,
                ),
                parameters=(_INCIDENT,),
                body=strict(
                    ("for_s",),
                    for_s={"type": "number", "minimum": 0, "maximum": 30 * 86400},
                    by=TEXT,
                ),
            ),
        },
        "/v1/audit": {
            "get": _operation(
                "Who asked for what, and whether they got it",
                table(("audit", "trouble"), audit=listed({"type": "object"}), trouble=TEXT),
                parameters=(
                    _query("run", TEXT, "of one run"),
                    _query("limit", WHOLE, "the newest, at most 1000"),
                ),
            ),
        },
        "/v1/access": {
            "get": _operation(
                "What this caller may do",
                table(("tokens", "known", "roles", "orders", "why"), tokens=TRUTH, orders=TRUTH),
            ),
        },
        "/metrics": {
            "get": _operation(
                "Prometheus text, or OpenMetrics when asked for",
                "text/plain | application/openmetrics-text",
                parameters=(_query("layers", {"type": "string", "enum": ["top", "all"]}, "which"),),
                open_=True,
            ),
        },
        "/healthz": {"get": _operation("Alive", "text/plain", open_=True)},
        "/readyz": {
            "get": _operation("Ready for trainers, and what is wrong", "text/plain", open_=True),
        },
        "/openapi.json": {"get": _operation("This document", {"type": "object"}, open_=True)},
    }


PATHS = _paths()


def document(version: str) -> dict[str, Any]:
    """The whole document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "sentinel",
            "version": version,
            "description": "Training stability: report steps, obey decisions, look, order.",
        },
        "paths": PATHS,
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }

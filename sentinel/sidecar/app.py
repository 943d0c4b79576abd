"""The sidecar's HTTP side: a FastAPI application, built by a factory that is given its clocks.

    app = create_app(Settings(), clock=time.time, timer=time.perf_counter)

Trainers speak msgpack (wire.messages) through raw-body routes, since a pydantic body model costs
ten times as much and turns NaN into null. People, and trainers in other languages, speak JSON in
which non-finite numbers are the words "nan", "inf" and "-inf".

Who may answer a step may steer it: over TCP with a token configured every trainer's message must be
sealed with it and everybody else must bring it as a bearer token; on the Unix socket its mode 0660
decides. Orders are taken only in these two cases.

Threads: one event loop; every route runs in it, start to end.
Errors:  a request that cannot be served gets a Refused message or {"code", "detail"}.
"""

from __future__ import annotations

import hmac
import json
import logging
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from datetime import UTC
from typing import Any, TypeVar

import msgspec
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from fastapi import FastAPI, Request, Response

from sentinel import __version__
from sentinel.core.errors import ConfigError, ProtocolError
from sentinel.core.events import (
    AutomationSet,
    Event,
    Restored,
    RestoreFailed,
    SnapshotLost,
    SnapshotTaken,
)
from sentinel.core.state import Stats
from sentinel.core.types import Action, Command, CommandKind, Outcome
from sentinel.sidecar import exporter
from sentinel.sidecar.runs import COMMAND_TTL_S, RefusedError, Runs, details, summary
from sentinel.sidecar.settings import Settings
from sentinel.wire import codec, messages
from sentinel.wire.messages import (
    Accepted,
    Close,
    HandOver,
    Layer,
    Message,
    Refused,
    Register,
    Steps,
)

logger = logging.getLogger(__name__)

JOB_SECONDS = 5.0

M = TypeVar("M", bound=Message)


class _JsonRegister(msgspec.Struct):
    layers: tuple[Layer | str, ...] = ()


class _JsonEvent(msgspec.Struct):
    kind: str
    step: int
    target: int | None = None
    reason: str = ""
    paused: bool = False


class _JsonOutcome(msgspec.Struct):
    step: int
    executed: str
    applied: bool


class _JsonStep(msgspec.Struct):
    observation: msgspec.Raw
    outcome: _JsonOutcome | None = None
    events: tuple[_JsonEvent, ...] = ()


class _JsonCommand(msgspec.Struct):
    kind: CommandKind
    id: str = ""
    value: float = 1.0
    target: int | None = None
    issued_by: str = ""
    expires_in_s: float = COMMAND_TTL_S


def create_app(
    settings: Settings, *, clock: Callable[[], float], timer: Callable[[], float]
) -> FastAPI:
    """Build the sidecar.

    Args:
        clock: Unix seconds, for what people see and for expiry.
        timer: monotonic seconds, for durations.
    """
    runs = Runs(settings, timer)
    ready = False

    async def expire() -> None:
        runs.expire(clock())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        nonlocal ready
        scheduler = AsyncIOScheduler(timezone=UTC)
        scheduler.add_job(
            expire,
            "interval",
            seconds=min(JOB_SECONDS, settings.lost_after_s / 4),
            coalesce=True,
            max_instances=1,
        )
        scheduler.start()
        ready = True
        try:
            yield
        finally:
            ready = False
            scheduler.shutdown(wait=False)

    app = FastAPI(
        title="sentinel",
        version=__version__,
        lifespan=lifespan,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    app.state.runs = runs

    async def body_of(request: Request) -> bytes:
        chunks: list[bytes] = []
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > settings.max_body_bytes:
                raise RefusedError(
                    "malformed", f"a request may hold {settings.max_body_bytes} bytes", 413
                )
            chunks.append(chunk)
        return b"".join(chunks)

    def local(request: Request) -> bool:
        """It came through the Unix socket, whose mode says who may use it."""
        return request.client is None

    def bearer(request: Request) -> bool:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        return bool(settings.token) and hmac.compare_digest(given.encode(), settings.token.encode())

    def let_in(request: Request) -> None:
        if settings.token and not local(request) and not bearer(request):
            raise RefusedError(
                "unauthorized", "this sidecar wants a token: Authorization: Bearer TOKEN", 401
            )

    def speaks_json(request: Request) -> bool:
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        if kind == messages.CONTENT_TYPE:
            return False
        if kind == "application/json":
            return True
        raise RefusedError(
            "malformed",
            f"content-type must be application/json or {messages.CONTENT_TYPE}, got {kind!r}",
            415,
        )

    async def sealed(
        request: Request, kind: type[M], run: str, serve: Callable[[M], Message]
    ) -> Response:
        """One trainer's message, checked, served and answered under its seal."""
        path = request.scope["raw_path"].decode("ascii").partition("?")[0]
        given = request.headers.get(messages.SEAL_HEADER, "")
        key, status = settings.token, 200
        answer: Message
        try:
            body = await body_of(request)
            keys = [settings.token]
            if settings.token and local(request):
                keys.append("")
            genuine = [k for k in keys if messages.sealed(k, path, body, given)]
            if not genuine:
                raise RefusedError(
                    "unauthorized" if settings.token else "garbled",
                    "the message is not sealed"
                    + (" with this sidecar's token" if settings.token else " as it was sent"),
                    401 if settings.token else 400,
                )
            key = genuine[0]
            message = messages.decode_message(kind, body)
            if message.run != run:
                raise ProtocolError(f"run must be {run!r} as in the path, got {message.run!r}")
            answer = serve(message)
        except RefusedError as error:
            status, answer = error.status, Refused(run=run, code=error.code, detail=error.detail)
        except ProtocolError as error:
            status, answer = 422, Refused(run=run, code="malformed", detail=str(error))
        except Exception as error:
            logger.exception("request failed run=%s", run)
            status, answer = 500, Refused(run=run, code="internal", detail=type(error).__name__)
        data = messages.encode_message(answer)
        return Response(
            data,
            status_code=status,
            media_type=messages.CONTENT_TYPE,
            headers={messages.SEAL_HEADER: messages.seal(key, path, data, given)},
        )

    async def for_people(
        request: Request, serve: Callable[[bytes], tuple[int, Any]], *, orders: bool = False
    ) -> Response:
        """One JSON request, with its refusals as JSON too."""
        try:
            let_in(request)
            if orders and not (local(request) or bearer(request)):
                raise RefusedError(
                    "unauthorized",
                    "orders are taken on the Unix socket, or over TCP when the sidecar was started "
                    "with a token (SENTINEL_TOKEN) and the request brings it",
                    403,
                )
            body = b"" if request.method == "GET" else await body_of(request)
            status, value = serve(body)
        except RefusedError as error:
            status, value = error.status, {"code": error.code, "detail": error.detail}
        except (ProtocolError, ConfigError) as error:
            status, value = 422, {"code": "malformed", "detail": str(error)}
        return Response(
            codec.to_json(value) + b"\n", status_code=status, media_type="application/json"
        )

    @app.put("/v1/runs/{run}")
    async def register(run: str, request: Request) -> Response:
        def of_person(body: bytes) -> tuple[int, Any]:
            asked = _read(_JsonRegister, body or b"{}", "registration")
            layers = tuple(Layer(x) if isinstance(x, str) else x for x in asked.layers)
            taken = runs.register_json(run, layers, clock())
            return 200, {"run": run, "policy": taken.policy.to_dict()}

        def of_trainer(message: Register) -> Message:
            return runs.register(message, clock())

        return await route(request, Register, run, of_trainer, of_person)

    async def steps(request: Request) -> Response:
        run: str = request.path_params["run"]

        def of_person(body: bytes) -> tuple[int, Any]:
            asked = _json_step(body)
            outcome = None
            if asked.outcome is not None:
                outcome = _outcome(asked.outcome)
            events = tuple(_event(e) for e in asked.events)
            observation = codec.observation_from_json(bytes(asked.observation))
            return 200, {
                "run": run,
                "decision": runs.step_json(run, observation, outcome, events, clock()),
            }

        def of_trainer(message: Steps) -> Message:
            return runs.steps(message, clock())

        return await route(request, Steps, run, of_trainer, of_person)

    # A plain route: FastAPI's own would look for parameters to inject at every step.
    app.add_route("/v1/runs/{run}/steps", steps, methods=["POST"])

    @app.put("/v1/runs/{run}/state")
    async def state(run: str, request: Request) -> Response:
        def of_trainer(message: HandOver) -> Message:
            runs.hand_over(message, clock())
            return Accepted(run=run)

        return await sealed(request, HandOver, run, of_trainer)

    @app.post("/v1/runs/{run}/close")
    async def close(run: str, request: Request) -> Response:
        def of_trainer(message: Close) -> Message:
            runs.close(message, clock())
            return Accepted(run=run)

        return await sealed(request, Close, run, of_trainer)

    async def route(
        request: Request,
        kind: type[M],
        run: str,
        of_trainer: Callable[[M], Message],
        of_person: Callable[[bytes], tuple[int, Any]],
    ) -> Response:
        try:
            as_json = speaks_json(request)
        except RefusedError as error:
            detail = {"code": error.code, "detail": error.detail}
            return Response(json.dumps(detail), error.status, media_type="application/json")
        if as_json:
            return await for_people(request, of_person)
        return await sealed(request, kind, run, of_trainer)

    @app.post("/v1/runs/{run}/commands")
    async def commands(run: str, request: Request) -> Response:
        def serve(body: bytes) -> tuple[int, Any]:
            speaks_json(request)
            asked = _read(_JsonCommand, body, "command")
            order = runs.command(
                run,
                _command(asked, request.headers.get("idempotency-key", "")),
                asked.expires_in_s,
                clock(),
            )
            return 202, {
                "id": order.command.id,
                "kind": order.command.kind,
                "state": order.state,
                "taken_step": order.taken_step,
            }

        return await for_people(request, serve, orders=True)

    @app.get("/v1/runs")
    async def list_runs(request: Request) -> Response:
        def serve(_: bytes) -> tuple[int, Any]:
            return 200, {"runs": [summary(run, clock()) for run in runs.runs.values()]}

        return await for_people(request, serve)

    @app.get("/v1/runs/{run}")
    async def one_run(run: str, request: Request) -> Response:
        return await for_people(request, lambda _: (200, details(runs.get(run), clock())))

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        openmetrics = "application/openmetrics-text" in request.headers.get("accept", "")
        text = exporter.render(runs, clock(), __version__, openmetrics=openmetrics)
        kind = exporter.OPENMETRICS if openmetrics else exporter.TEXT
        return Response(text, headers={"content-type": kind})

    @app.get("/healthz")
    async def healthz() -> Response:
        return Response("ok\n", media_type="text/plain")

    @app.get("/readyz")
    async def readyz() -> Response:
        return Response(
            "ready\n" if ready else "not ready\n",
            status_code=200 if ready else 503,
            media_type="text/plain",
        )

    return app


T = TypeVar("T")


def _read(kind: type[T], body: bytes, what: str) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{what} cannot be read: {error}") from error


def _json_step(body: bytes) -> _JsonStep:
    """A step as {"observation": {...}, ...}, or the bare observation."""
    table = _read(dict[str, msgspec.Raw], body, "step")
    if "observation" in table:
        return _read(_JsonStep, body, "step")
    return _JsonStep(observation=msgspec.Raw(body))


def _outcome(asked: _JsonOutcome) -> Outcome:
    names = {action.name.lower(): action for action in Action}
    if asked.executed not in names:
        raise ProtocolError(
            f"outcome.executed must be one of {', '.join(names)}, got {asked.executed!r}"
        )
    return Outcome(asked.step, names[asked.executed], asked.applied)


def _event(asked: _JsonEvent) -> Event:
    def target() -> int:
        if asked.target is None:
            raise ProtocolError(f"event.target must be given for {asked.kind!r}")
        return asked.target

    match asked.kind:
        case "snapshot_taken":
            return SnapshotTaken(asked.step, "trainer")
        case "restored":
            return Restored(asked.step, target(), Stats())
        case "restore_failed":
            return RestoreFailed(asked.step, asked.target, asked.reason)
        case "snapshot_lost":
            return SnapshotLost(asked.step, target(), asked.reason)
        case "automation_set":
            return AutomationSet(asked.step, asked.paused, "trainer")
    raise ProtocolError(
        "event.kind must be one of snapshot_taken, restored, restore_failed, snapshot_lost, "
        f"automation_set, got {asked.kind!r}"
    )


def _command(asked: _JsonCommand, key: str) -> Command:
    if asked.kind is CommandKind.SCALE_LR and not 0.0 < asked.value <= 10.0:
        raise ProtocolError(f"command.value must lie above 0 and at most 10, got {asked.value:g}")
    if asked.kind is CommandKind.ACK and asked.target is None:
        raise ProtocolError("command.target must be the number of the incident to acknowledge")
    if not 0.0 < asked.expires_in_s <= 86_400.0:
        raise ProtocolError(
            f"command.expires_in_s must lie above 0 and at most 86400, got {asked.expires_in_s:g}"
        )
    chosen = asked.id or key or uuid.uuid4().hex
    return Command(chosen, asked.kind, asked.value, asked.target, asked.issued_by)

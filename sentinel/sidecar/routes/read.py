"""What is known of the runs, for people: JSON in which non-finite numbers are words.

Series are read from disk in a thread, so that a long run being opened delays no decision. Live
events are server-sent: a client that does not keep up loses events and is told so; it never makes
the sidecar wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from sqlalchemy import select

from sentinel.core.errors import ConfigError, ProtocolError, TraceError
from sentinel.sidecar import copies, embedded
from sentinel.sidecar.counted import counted
from sentinel.sidecar.door import answer, refusal
from sentinel.sidecar.hub import MOST_LISTENERS, Event
from sentinel.sidecar.runs import RefusedError, details, summary
from sentinel.sidecar.service import Service
from sentinel.sidecar.store.database import StoreError
from sentinel.sidecar.store.models import DecisionRow, IncidentRow
from sentinel.sidecar.store.series import QueryError, encode
from sentinel.sidecar.waiting import waiting
from sentinel.wire import codec

POINTS, COLUMNS = 1500, 300
MOST_ROWS = 1000
SILENCE_S = 15.0  # a comment keeps proxies from closing a quiet stream
STEPS_EVERY_S = 0.5
TURN_S = 1.0  # a stream ends so soon after the sidecar was told to stop


def router(service: Service) -> APIRouter:
    """See the module docstring."""
    routes, door = APIRouter(), service.door

    async def reading(request: Request, work: Callable[[], Awaitable[Response]]) -> Response:
        try:
            door.let_in(request)
            return await work()
        except TraceError as error:
            return refusal(RefusedError("unreadable", str(error), 404))
        except (StoreError, OSError) as error:
            return refusal(RefusedError("unavailable", str(error), 503))
        except (RefusedError, ProtocolError, ConfigError) as error:
            return refusal(error)

    @routes.get("/v1/runs")
    async def list_runs(request: Request) -> Response:
        async def work() -> Response:
            wanted = request.query_params.get("all", "") not in ("", "0")
            stored = await service.runs.newest_stored(MOST_ROWS) if wanted else []
            now = service.now()
            past = service.past
            runs = [
                summary(r, now)
                | counted(r)
                | past.tally(r)
                | {"damaged_snapshots": copies.damaged(r, service.verifier)}
                for r in (*service.all_runs(), *stored)
            ]
            return answer(
                {
                    "runs": runs,
                    "stored": len(service.runs.stored),
                    "trouble": service.store.trouble,
                    "not_shown": service.watched.trouble,
                }
            )

        return await reading(request, work)

    @routes.get("/v1/runs/{run}")
    async def one_run(run: str, request: Request) -> Response:
        async def work() -> Response:
            found = service.run(run)
            await service.past.recall(found)
            about = details(found, service.now()) | service.past.tally(found)
            return answer(
                about
                | {
                    "waiting": waiting(found),
                    "damaged_snapshots": copies.damaged(found, service.verifier),
                    "snapshots": service.copies(found),
                }
            )

        return await reading(request, work)

    @routes.get("/v1/runs/{run}/series")
    async def series(run: str, request: Request) -> Response:
        async def work() -> Response:
            asked = request.query_params
            place = service.series_directory(run)
            names = tuple(n for n in asked.get("name", "loss,grad_norm").split(",") if n)
            if not names:
                raise QueryError("name must name at least one series")
            found = await asyncio.to_thread(
                service.store.series.curves,
                place,
                names,
                *_stretch(request),
                _points(request, POINTS),
            )
            return Response(encode({"run": run, **found}), media_type="application/json")

        return await reading(request, work)

    @routes.get("/v1/runs/{run}/layers")
    async def layers(run: str, request: Request) -> Response:
        async def work() -> Response:
            found = await asyncio.to_thread(
                service.store.series.layers,
                service.series_directory(run),
                request.query_params.get("name", "layer_grad_norm"),
                *_stretch(request),
                _points(request, COLUMNS),
            )
            return Response(encode({"run": run, **found}), media_type="application/json")

        return await reading(request, work)

    @routes.get("/v1/runs/{run}/incidents")
    async def incidents(run: str, request: Request) -> Response:
        async def work() -> Response:
            watched = service.only_watched(run)
            if watched is not None:
                return answer({"run": run, "incidents": embedded.incidents(run, watched.state)})
            service.series_directory(run)
            chosen = select(IncidentRow).where(IncidentRow.run == run)
            newest = chosen.order_by(IncidentRow.id.desc()).limit(MOST_ROWS)
            found = await service.store.database.run(
                lambda session: [_table(row) for row in session.scalars(newest)]
            )
            return answer({"run": run, "incidents": found})

        return await reading(request, work)

    @routes.get("/v1/runs/{run}/decisions")
    async def decisions(run: str, request: Request) -> Response:
        async def work() -> Response:
            if service.only_watched(run) is not None:
                place = service.watched.directories[run]
                done = await asyncio.to_thread(embedded.executed, place, run, MOST_ROWS)
                return answer({"run": run, "decisions": done})
            service.series_directory(run)
            chosen = select(DecisionRow).where(DecisionRow.run == run)
            newest = chosen.order_by(DecisionRow.id.desc()).limit(MOST_ROWS)
            found = await service.store.database.run(
                lambda session: [_table(row) for row in session.scalars(newest)]
            )
            return answer({"run": run, "decisions": found})

        return await reading(request, work)

    async def listening(request: Request, run: str | None) -> Response:
        async def work() -> Response:
            if run is not None:
                service.series_directory(run)
            if len(service.hub.listeners) >= MOST_LISTENERS:
                raise RefusedError(
                    "full", f"{MOST_LISTENERS} clients listen already; try again later", 503
                )
            after = request.headers.get("last-event-id", "")
            return StreamingResponse(
                _stream(service, run, after),
                media_type="text/event-stream",
                headers={"x-accel-buffering": "no"},
            )

        return await reading(request, work)

    @routes.get("/v1/events")
    async def all_events(request: Request) -> Response:
        return await listening(request, None)

    @routes.get("/v1/runs/{run}/events")
    async def run_events(run: str, request: Request) -> Response:
        return await listening(request, run)

    return routes


async def _stream(service: Service, run: str | None, after: str) -> AsyncIterator[bytes]:
    listener = service.hub.listen(run, after)
    try:
        yield b"retry: 2000\n\n"
        silent = 0.0
        while service.ready and not listener.over:
            found = await listener.next(TURN_S)
            silent = 0.0 if found else silent + TURN_S
            for event in found:
                yield _sent(event)
            if silent >= SILENCE_S:
                silent = 0.0
                yield b": still here\n\n"
            if found:
                await asyncio.sleep(STEPS_EVERY_S)  # so that steps come by the dozen
    finally:
        service.hub.forget(listener)


def _sent(event: Event) -> bytes:
    data = codec.to_json({"run": event.run, **_plain(event.data)})
    number = f"id: {event.id}\n".encode() if event.id else b""
    return number + f"event: {event.kind}\n".encode() + b"data: " + data + b"\n\n"


def _plain(data: Any) -> dict[str, Any]:
    found = codec.plain(data)
    return found if isinstance(found, dict) else {"value": found}


def _table(row: Any) -> dict[str, Any]:
    return {column.key: getattr(row, column.key) for column in row.__table__.columns}


def _stretch(request: Request) -> tuple[int | None, int | None]:
    """The first and the last step that are asked for; raises QueryError."""
    first, last = _whole(request, "from"), _whole(request, "to")
    if first is not None and last is not None and first > last:
        raise QueryError(
            f"from must be at most to ({last}), got {first}: both are steps and both are included; "
            "swap them, or leave one out"
        )
    return first, last


def _points(request: Request, usual: int) -> int:
    """How many points are asked for; raises QueryError."""
    given = _whole(request, "points")
    return usual if given is None else given


def _whole(request: Request, name: str) -> int | None:
    """A whole number of the query; raises QueryError."""
    given = request.query_params.get(name, "")
    if not given:
        return None
    if not (given.isascii() and given.lstrip("-").isdigit() and len(given) <= 18):
        raise QueryError(f"{name} must be a whole number, got {given[:32]!r}")
    return int(given)

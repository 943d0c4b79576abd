"""The short way for the one request that comes at every step of every trainer.

    server = Direct(app, service)              an ASGI application around the other one
    uvicorn.Config(server, http=Prompt, ...)   a protocol that knows it

A trainer's msgpack steps go straight to the door: the framework's routing and middleware cost a
tenth of a report. Prompt spares another quarter: a step that has come whole, as nearly all do, is
answered before anything else is read, without a task, and head and body of the answer leave in one
write (each is a call of the system that wakes the trainer). Everything else, JSON steps too, goes
through `app`. The answer is the same on all ways, and a test holds them together.

Errors:  none of its own: what the door cannot serve is an answer too.
"""

from __future__ import annotations

from functools import cache
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from sentinel.sidecar.door import Answer, Envelope
from sentinel.sidecar.patience import Impatient
from sentinel.sidecar.security import HEADERS
from sentinel.sidecar.service import Service
from sentinel.wire import messages
from sentinel.wire.messages import Message, Steps

BEFORE, AFTER = "/v1/runs/", "/steps"
_MSGPACK = (b"content-type", messages.CONTENT_TYPE.encode())
_SEAL = messages.SEAL_HEADER.encode()
_ALWAYS = b"".join([b"%b: %b\r\n" % pair for pair in (_MSGPACK, *HEADERS)])


class Direct:
    """See the module docstring."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run = _run_of(scope)
        if not run:
            await self._app(scope, receive, send)
            return
        service = self._service
        started = service.timer()
        response = await service.door.sealed(Request(scope, receive), Steps, run, self._serve)
        response.raw_headers.extend(HEADERS)
        service.health.request("steps", response.status_code, service.timer() - started)
        await response(scope, receive, send)

    def at_once(self, scope: Scope, body: bytes) -> Answer | None:
        """The answer to a request that has come whole; None unless it is a trainer's step."""
        run = _run_of(scope)
        service = self._service
        if not run or len(body) > service.door.most_bytes(Steps):
            return None
        started = service.timer()
        seal = next((value for name, value in scope["headers"] if name == _SEAL), b"")
        path = scope["raw_path"].decode("ascii").partition("?")[0]
        envelope = Envelope(path, seal.decode("latin-1"), scope["client"] is None)
        answer = service.door.answered(envelope, body, Steps, run, self._serve)
        service.health.request("steps", answer.status, service.timer() - started)
        return answer

    def _serve(self, message: Steps) -> Message:
        return self._service.runs.steps(message, self._service.now())


class Prompt(Impatient):
    """See the module docstring; h11, where httptools is missing, starts its tasks otherwise."""

    _feeding = False
    _held: tuple[Any, Any] | None = None

    def _feed(self, data: bytes) -> bool:
        self._feeding = True
        try:
            super()._feed(data)
        finally:
            self._feeding = False
            held, self._held = self._held, None
        if held is None:
            return False
        if self._answer(*held):
            return True
        super()._start_asgi_task(*held)
        return False

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """The server has read the head of a request; the body may be in the same bytes."""
        if self._feeding:
            self._held = cycle, app
        else:
            super()._start_asgi_task(cycle, app)

    def _answer(self, cycle: Any, app: Any) -> bool:
        """Answer a step that is whole, on a connection that stays; False for anything else."""
        if (
            not isinstance(app, Direct)
            or cycle.more_body
            or not cycle.keep_alive
            or cycle.flow.write_paused
            or self.transport.is_closing()
        ):
            return False
        answer = app.at_once(cycle.scope, bytes(cycle.body))
        if answer is None:
            return False
        head = [
            _status_line(answer.status),
            *[b"%b: %b\r\n" % pair for pair in cycle.default_headers],
            b"%b: %b\r\ncontent-length: %d\r\n" % (_SEAL, answer.seal.encode(), len(answer.data)),
        ]
        self.transport.write(b"".join((*head, _ALWAYS, b"\r\n", answer.data)))
        cycle.response_started = cycle.response_complete = True
        cycle.on_response()
        return True


@cache
def _status_line(status: int) -> bytes:
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()


def _run_of(scope: Scope) -> str:
    """The run whose trainer sends steps with this request; "" for any other request."""
    path: str = scope.get("path", "")
    if not (
        path.endswith(AFTER)
        and path.startswith(BEFORE)
        and scope["type"] == "http"
        and scope["method"] == "POST"
        and _MSGPACK in scope["headers"]
    ):
        return ""
    run = path[len(BEFORE) : -len(AFTER)]
    return "" if "/" in run else run

"""The short way for the one request that comes at every step of every trainer.

    server = Direct(app, service)              an ASGI application around the other one

A trainer's msgpack steps go straight to the door: the framework's routing and middleware cost as
much as the decision itself (50 us of 300). Everything else, JSON steps too, goes through `app`. The
answer is the same on both ways, and a test holds them together.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from sentinel.sidecar.security import HEADERS
from sentinel.sidecar.service import Service
from sentinel.wire import messages
from sentinel.wire.messages import Message, Steps

BEFORE, AFTER = "/v1/runs/", "/steps"
_MSGPACK = (b"content-type", messages.CONTENT_TYPE.encode())


class Direct:
    """See the module docstring."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        run = path[len(BEFORE) : -len(AFTER)]
        if not (
            path.endswith(AFTER)
            and path.startswith(BEFORE)
            and scope["type"] == "http"
            and scope["method"] == "POST"
            and _MSGPACK in scope["headers"]
            and run
            and "/" not in run
        ):
            await self._app(scope, receive, send)
            return
        service = self._service
        started = service.timer()

        def serve(message: Steps) -> Message:
            return service.runs.steps(message, service.now())

        response = await service.door.sealed(Request(scope, receive), Steps, run, serve)
        response.raw_headers.extend(HEADERS)
        service.health.request("steps", response.status_code, service.timer() - started)
        await response(scope, receive, send)

"""What is done to every request, whatever route it goes to.

    app.add_middleware(Headers)

Plain ASGI: starlette's BaseHTTPMiddleware would cost every step two tasks and a queue.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sentinel.sidecar.health import Health, route_of
from sentinel.sidecar.security import HEADERS


class Headers:
    """Adds the headers that every answer carries, unless its route has set them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = message.setdefault("headers", [])
                names = {name for name, _ in given}
                given.extend(pair for pair in HEADERS if pair[0] not in names)
            await send(message)

        await self._app(scope, receive, sending)


class Timed:
    """Notes how long each request took; of a stream, until it began."""

    def __init__(self, app: ASGIApp, health: Health, timer: Callable[[], float]) -> None:
        self._app = app
        self._health = health
        self._timer = timer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, timer = self._timer(), self._timer

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = route_of(scope["method"], scope["path"])
                self._health.request(route, message["status"], timer() - started)
            await send(message)

        await self._app(scope, receive, sending)

"""What is done to every request, whatever route it goes to.

    app.add_middleware(Headers)

Plain ASGI: starlette's BaseHTTPMiddleware would cost every step two tasks and a queue.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

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

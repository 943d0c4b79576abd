"""What no route answers: unknown addresses, methods that are not taken, errors of our own.

    unserved.install(app)        404 and 405 as {"code", "detail"}
    app.add_middleware(Caught)   whatever is raised, as a 500 of the same shape

The framework's own answers are {"detail"} or plain text; a client that reads `code` would have to
tell them apart. Only what is no HTTP at all is still answered by the server, in plain text.

Threads: the event loop's.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sentinel.sidecar.openapi import PATHS

logger = logging.getLogger(__name__)

_CODES = {404: "not_found", 405: "method_not_allowed"}


def install(app: FastAPI) -> None:
    """Have the application answer as the module docstring says."""
    app.add_exception_handler(HTTPException, _unserved)
    app.add_exception_handler(RequestValidationError, _invalid)


def heads(path: str, methods: Collection[str]) -> bool:
    """Whether HEAD is taken there as well: where GET is, but for streams, which do not end."""
    return "GET" in methods and not path.endswith("/events")


def error(status: int, code: str, detail: str, headers: dict[str, str] | None = None) -> Response:
    """An error as {"code", "detail"}."""
    said = json.dumps({"code": code, "detail": detail})
    return Response(said, status, headers, "application/json")


async def _unserved(request: Request, raised: Exception) -> Response:
    assert isinstance(raised, HTTPException)
    path, status = request.url.path[:200], raised.status_code
    headers = dict(raised.headers or {})
    if status == 405:
        known = filter(None, headers.get("Allow", "").split(", "))
        taken = _methods(path) or tuple(method for method in known if method != "HEAD")
        also = ("HEAD",) if heads(path, taken) else ()
        headers = {"allow": ", ".join((*taken, *also))}
        detail = f"{request.method} is not taken at {path!r}, only {' and '.join(taken)}"
    elif status == 404:
        detail = f"there is nothing at {path!r}; GET /openapi.json lists what there is"
    else:
        detail = str(raised.detail)
    return error(status, _CODES.get(status, "malformed"), detail, headers)


async def _invalid(request: Request, raised: Exception) -> Response:
    return error(422, "malformed", str(raised)[:500])


def _methods(path: str) -> tuple[str, ...]:
    """What is taken there; a route knows its own method only."""
    for pattern, methods in _TEMPLATES:
        if pattern.fullmatch(path):
            return methods
    return ()


def _template(path: str, item: dict[str, Any]) -> tuple[re.Pattern[str], tuple[str, ...]]:
    parts = re.split(r"\{\w+\}", path)
    methods = tuple(method.upper() for method in item)
    return re.compile("[^/]+".join(map(re.escape, parts))), methods


_TEMPLATES = [_template(path, item) for path, item in PATHS.items()]


class Caught:
    """Answers what nobody else has caught, and logs it: never a traceback in an answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception as raised:
            logger.exception("request failed method=%s path=%s", scope["method"], scope["path"])
            if begun:
                raise  # the connection is cut: an answer that looks whole must not be half of one
            kind = type(raised).__name__
            said = f"an error of sentinel's own ({kind}); the sidecar's log has more"
            await error(500, "internal", said)(scope, receive, send)

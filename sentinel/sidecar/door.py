"""The door: who may come in, how much they may bring, and in which language they are answered.

    await door.sealed(request, Steps, run, serve)           a trainer's message, under its seal
    await door.for_people(request, serve, role=Role.CONTROL)    JSON, for people and other programs

Who may answer a step may steer it: over TCP with tokens configured every trainer's message must be
sealed with one of role `ingest`, and everybody else must bring one of the role that the route asks
for (security.py); on the Unix socket its mode 0660 decides. Orders are taken only in these two
cases. Without tokens a request by a public host name is refused: it could be a web page that made
its own name point here.

Errors:  a request that cannot be served gets a Refused message or {"code", "detail"}; never a
         traceback, and never a null where a number was not finite.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from sentinel.core.errors import ConfigError, ProtocolError
from sentinel.sidecar.runs import RefusedError
from sentinel.sidecar.security import ANYONE, Access, Caller, Limits, Role
from sentinel.sidecar.settings import Settings
from sentinel.wire import codec, messages, sense
from sentinel.wire.messages import Message, Refused, Steps

logger = logging.getLogger(__name__)

MOST_REPORT_BYTES = 8 * 2**20  # 100,000 layers x 6 signals are 2.4 MB; a state may be larger
BODY_S = 60.0  # a whole body must have come by then

# For each address, of those who look and order; trainers are not counted. A page that is open asks
# about twice a second, and many may sit behind one proxy.
REQUESTS_PER_MINUTE = 6000
REQUESTS_AT_ONCE = 600

M = TypeVar("M", bound=Message)
T = TypeVar("T")


class TooManyError(RefusedError):
    """Not now; `wait_s` says when."""

    def __init__(self, detail: str, wait_s: float) -> None:
        super().__init__("too_many", f"{detail}; try again in {max(wait_s, 0.1):.1f} s", 429)
        self.wait_s = wait_s


class Envelope(NamedTuple):
    """What is said of a trainer's message outside its body; `local`: by the Unix socket."""

    path: str
    seal: str
    local: bool


class Answer(NamedTuple):
    """What a trainer is answered, and the seal it goes under."""

    status: int
    data: bytes
    seal: str


class Door:
    """See the module docstring."""

    def __init__(self, settings: Settings, access: Access, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._requests = Limits(per_minute=REQUESTS_PER_MINUTE, burst=REQUESTS_AT_ONCE)
        self.access = access

    async def body(self, request: Request, most: int = 0) -> bytes:
        """The whole body; raises RefusedError when it is too large."""
        most = min(most or self._settings.max_body_bytes, self._settings.max_body_bytes)
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_S):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > most:
                        raise RefusedError("malformed", f"a request may hold {most} bytes", 413)
                    chunks.append(chunk)
        except TimeoutError:  # what has come would be held for as long as the client likes
            raise RefusedError("malformed", f"the body took more than {BODY_S:g} s", 408) from None
        except ClientDisconnect:  # nobody reads the answer; no trouble of ours, and no traceback
            raise RefusedError("malformed", "the request ended before its body", 400) from None
        return b"".join(chunks)

    def local(self, request: Request) -> bool:
        """It came through the Unix socket, whose mode says who may use it."""
        return request.client is None

    def caller(self, request: Request) -> Caller | None:
        """Who this is; None without a token that is known."""
        if self.local(request):
            return ANYONE
        return self.access.who(request.headers.get("authorization", ""))

    def let_in(self, request: Request, role: Role = Role.READ) -> Caller:
        """Who it is; raises RefusedError unless this request may do what `role` may."""
        caller = self.caller(request)
        if role is not Role.INGEST and not self.local(request):
            self._not_too_often(request)
        if caller is None:
            if self.access.configured:
                raise RefusedError(
                    "unauthorized", "this sidecar wants a token: Authorization: Bearer TOKEN", 401
                )
            if not _plain_host(request.headers.get("host", "")):
                raise RefusedError(
                    "unauthorized",
                    "without a token this sidecar answers to localhost, an address or a name "
                    "without a dot only; start it with a token (SENTINEL_TOKEN) to use another",
                    421,
                )
            if role is Role.CONTROL:
                raise RefusedError(
                    "unauthorized",
                    "orders are taken on the Unix socket, or over TCP when the sidecar was started "
                    "with a token (SENTINEL_TOKEN) and the request brings it",
                    403,
                )
            return ANYONE
        if not caller.may(role):
            raise RefusedError(
                "forbidden",
                f"the token of {caller.name!r} has the role {', '.join(sorted(caller.roles))}; "
                f"this needs one of role {role.value}",
                403,
            )
        return caller

    def _not_too_often(self, request: Request) -> None:
        address = "" if request.client is None else request.client.host
        wait = self._requests.wait(address, self._clock())
        if wait > 0.0:
            raise TooManyError(
                f"more than {REQUESTS_PER_MINUTE} requests a minute from {address}", wait
            )

    async def sealed(
        self, request: Request, kind: type[M], run: str, serve: Callable[[M], Message]
    ) -> Response:
        """One trainer's message, checked, served and answered under its seal."""
        came: bytes | RefusedError
        try:
            came = await self.body(request, self.most_bytes(kind))
        except RefusedError as error:
            came = error
        envelope = Envelope(
            request.scope["raw_path"].decode("ascii").partition("?")[0],
            request.headers.get(messages.SEAL_HEADER, ""),
            self.local(request),
        )
        answer = self.answered(envelope, came, kind, run, serve)
        return Response(
            answer.data,
            status_code=answer.status,
            media_type=messages.CONTENT_TYPE,
            headers={messages.SEAL_HEADER: answer.seal},
        )

    def most_bytes(self, kind: type[Message]) -> int:
        """How large a trainer's message of that kind may be."""
        most = self._settings.max_body_bytes
        return min(most, MOST_REPORT_BYTES) if kind is Steps else most

    def answered(
        self,
        envelope: Envelope,
        body: bytes | RefusedError,
        kind: type[M],
        run: str,
        serve: Callable[[M], Message],
    ) -> Answer:
        """The same once the body is there, or why it is not."""
        configured = self.access.configured
        keys = self.access.seal_keys
        if configured and envelope.local:
            keys = (*keys, "")
        path, given = envelope.path, envelope.seal
        key, status = keys[0] if keys else "", 200
        answer: Message
        try:
            if isinstance(body, RefusedError):
                raise body
            genuine = [k for k in keys if messages.sealed(k, path, body, given)]
            if not genuine:
                raise RefusedError(
                    "unauthorized" if configured else "garbled",
                    "the message is not sealed"
                    + (" with this sidecar's token" if configured else " as it was sent"),
                    401 if configured else 400,
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
        return Answer(status, data, messages.seal(key, path, data, given))

    async def for_people(
        self,
        request: Request,
        serve: Callable[[bytes], tuple[int, Any]],
        *,
        role: Role = Role.READ,
    ) -> Response:
        """One JSON request, with its refusals as JSON too."""
        try:
            self.let_in(request, role)
            body = (
                b""
                if request.method in ("GET", "HEAD")
                else await self.body(request, MOST_REPORT_BYTES)
            )
            status, value = serve(body)
        except (RefusedError, ProtocolError, ConfigError) as error:
            return refusal(error)
        return answer(value, status)

    async def either(
        self,
        request: Request,
        kind: type[M],
        run: str,
        of_trainer: Callable[[M], Message],
        of_person: Callable[[bytes], tuple[int, Any]],
    ) -> Response:
        """A route that speaks both languages; the content type says which."""
        try:
            as_json = speaks_json(request)
        except RefusedError as error:
            return refusal(error)
        if as_json:
            return await self.for_people(request, of_person, role=Role.INGEST)
        return await self.sealed(request, kind, run, of_trainer)


def _plain_host(host: str) -> bool:
    """Whether a Host header is no name that somebody outside could have made point here."""
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    if "." not in name or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def speaks_json(request: Request) -> bool:
    """JSON or msgpack; raises RefusedError for anything else."""
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


def answer(value: Any, status: int = 200) -> Response:
    """Any value of ours as JSON, non-finite numbers as words."""
    return Response(codec.to_json(value) + b"\n", status, media_type="application/json")


def refusal(error: RefusedError | ProtocolError | ConfigError) -> Response:
    """An error as {"code", "detail"}."""
    if isinstance(error, RefusedError):
        said = {"code": error.code, "detail": error.detail}
        headers: dict[str, str] = {}
        if isinstance(error, TooManyError):
            headers["retry-after"] = str(math.ceil(max(error.wait_s, 1.0)))
        elif error.status == 401:
            headers["www-authenticate"] = "Bearer"
        return Response(json.dumps(said), error.status, headers, "application/json")
    said = {"code": "malformed", "detail": str(error)}
    return Response(json.dumps(said), 422, media_type="application/json")


def read_json(kind: type[T], body: bytes, what: str) -> T:
    """A JSON body as that type, strictly; raises ProtocolError."""
    return sense.decode_json(body, kind, what)

"""Blocking client of the sidecar: one connection, and a deadline that holds.

    client = Client("http://127.0.0.1:8123")        or unix:///run/sentinel/sentinel.sock
    reply = client.post_steps(steps, deadline_s=0.05)

http.client's timeout counts anew with every recv: a server that drips held a "50 ms" call for
367 ms. Here every send and recv gets what is left of one absolute deadline, and the connection is
closed on any miss, since what is left on it could be the answer to a question asked before.
Answers are believed only if their seal fits the request (see wire.messages).

Units:   deadlines in seconds from the call.
Threads: none inside; one Client serves one thread.
Errors:  MissError, with the reason as a word that counters can use.
"""

from __future__ import annotations

import http.client
import io
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar, cast
from urllib.parse import quote, urlsplit

from sentinel.core.errors import ConfigError, ProtocolError, SentinelError
from sentinel.wire import messages
from sentinel.wire.messages import (
    Accepted,
    Close,
    HandOver,
    Message,
    Refused,
    Register,
    Registered,
    Reply,
    Steps,
)

DEADLINE_S = 0.05
MAX_REPLY_BYTES = 16 * 2**20  # the largest honest answer is a policy and some commands
TOKEN_VARIABLE = "SENTINEL_TOKEN"  # noqa: S105  (the name of a variable)

M = TypeVar("M", bound=Message)


class MissError(SentinelError):
    """The sidecar did not answer this call as it should have.

    Attributes:
        reason: timeout, unreachable, reset, garbled, unknown_run, fenced, refused.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class _Stream(io.RawIOBase):
    """Reads from a socket until an absolute time, then raises TimeoutError."""

    def __init__(self, owner: _Deadline) -> None:
        self._owner = owner

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        return self._owner.receive(buffer)


class _Deadline:
    """What http.client needs of a socket, each call bounded by one absolute deadline."""

    def __init__(self, sock: socket.socket, clock: Callable[[], float]) -> None:
        self._sock = sock
        self._clock = clock
        self.until = 0.0

    def left(self) -> float:
        seconds = self.until - self._clock()
        if seconds <= 0.0:
            raise TimeoutError("the deadline has passed")
        return seconds

    def sendall(self, data: bytes) -> None:
        self._sock.settimeout(self.left())
        self._sock.sendall(data)  # its timeout is for the whole call, unlike that of recv

    def receive(self, buffer: Any) -> int:
        self._sock.settimeout(self.left())
        return self._sock.recv_into(buffer)

    def makefile(self, mode: str) -> io.BufferedReader:
        assert mode == "rb"
        return io.BufferedReader(_Stream(self), 65536)

    def close(self) -> None:
        """http.client closes its socket while an answer of unknown length is still to be read."""

    def shut(self) -> None:
        """Really close."""
        self._sock.close()


class Client:
    """One keep-alive connection to a sidecar.

    Args:
        url: http://host:port or unix:///path/to/socket.
        token: shared secret; default $SENTINEL_TOKEN.
        clock: monotonic seconds.

    Raises:
        ConfigError: the URL is neither.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.url = url
        self._clock = clock
        self._token = os.environ.get(TOKEN_VARIABLE, "") if token is None else token
        self._path, self._host, self._port = _parse(url)
        self._addresses: list[tuple[Any, ...]] = []
        self._sock: _Deadline | None = None
        self._http: http.client.HTTPConnection | None = None

    def resolve(self) -> None:
        """Look the host name up. It cannot be bounded in time, so never do it inside a step.

        Raises:
            MissError: unreachable.
        """
        if self._path or self._addresses:
            return
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise MissError("unreachable", f"{self.url}: {error}") from error
        self._addresses = list(found)

    def register(self, message: Register, *, deadline_s: float) -> Registered:
        """Introduce this process; raises MissError."""
        return self._call("PUT", "", message, Registered, deadline_s)

    def post_steps(self, message: Steps, *, deadline_s: float = DEADLINE_S) -> Reply:
        """Post frames; raises MissError."""
        return self._call("POST", "/steps", message, Reply, deadline_s)

    def put_state(self, message: HandOver, *, deadline_s: float) -> Accepted:
        """Hand the engine's state over; raises MissError."""
        return self._call("PUT", "/state", message, Accepted, deadline_s)

    def post_close(self, message: Close, *, deadline_s: float) -> Accepted:
        """Say that the run is over; raises MissError."""
        return self._call("POST", "/close", message, Accepted, deadline_s)

    def get(self, path: str, *, deadline_s: float) -> bytes:
        """The body of any page of the sidecar, for people; raises MissError."""
        headers = {"authorization": f"Bearer {self._token}"} if self._token else {}
        status, _, body = self._exchange("GET", path, b"", headers, deadline_s)
        if status != http.client.OK:
            raise MissError("refused", f"{self.url}{path} answered {status}: {body[:200]!r}")
        return body

    def close(self) -> None:
        """Close the connection; the next call opens a new one."""
        if self._sock is not None:
            with suppress(OSError):
                self._sock.shut()
        self._sock = self._http = None

    def _call(
        self, method: str, what: str, message: Message, kind: type[M], deadline_s: float
    ) -> M:
        path = f"/v1/runs/{quote(message.run, safe='')}{what}"
        body = messages.encode_message(message)
        seal = messages.seal(self._token, path, body)
        headers = {"content-type": messages.CONTENT_TYPE, messages.SEAL_HEADER: seal}
        status, given, answer = self._exchange(method, path, body, headers, deadline_s)
        genuine = messages.sealed(
            self._token, path, answer, given.get(messages.SEAL_HEADER, ""), seal
        )
        if not genuine:
            self.close()
            raise MissError(
                "garbled",
                f"{self.url}{path}: the answer ({status}) is not sealed for this question",
            )
        try:
            if status == http.client.OK:
                return messages.decode_message(kind, answer)
            refused = messages.decode_message(Refused, answer)
        except ProtocolError as error:
            self.close()
            raise MissError("garbled", str(error)) from error
        code = refused.code if refused.code in ("unknown_run", "fenced", "garbled") else "refused"
        raise MissError(code, refused.detail)

    def _exchange(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str], deadline_s: float
    ) -> tuple[int, Mapping[str, str], bytes]:
        until = self._clock() + deadline_s
        try:
            try:
                fresh = self._http is None
                return self._once(method, path, body, headers, until)
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                # A kept connection may have been closed while it was idle: ask once more on a
                # new one. Every message may be sent twice.
                self.close()
                if fresh:
                    raise
                return self._once(method, path, body, headers, until)
        except TimeoutError as error:
            self.close()
            raise MissError(
                "timeout", f"{self.url}: no answer within {deadline_s * 1e3:.0f} ms"
            ) from error
        except (ConnectionResetError, BrokenPipeError, http.client.RemoteDisconnected) as error:
            self.close()
            raise MissError("reset", f"{self.url}: {error}") from error
        except OSError as error:
            self.close()
            raise MissError("unreachable", f"{self.url}: {error}") from error
        except (http.client.HTTPException, ValueError) as error:
            self.close()
            raise MissError("garbled", f"{self.url}: {type(error).__name__} {error}") from error
        except BaseException:
            self.close()  # an interrupt in the middle of an answer: nothing left may be read
            raise

    def _once(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str], until: float
    ) -> tuple[int, Mapping[str, str], bytes]:
        connection, sock = self._connect(until)
        sock.until = until
        connection.request(method, path, body=body or None, headers=dict(headers))
        response = connection.getresponse()
        if (response.length or 0) > MAX_REPLY_BYTES:
            raise ValueError(f"an answer of {response.length} bytes")
        answer = response.read(MAX_REPLY_BYTES)
        if response.length or (not response.isclosed() and response.read(1)):
            raise ValueError("an answer that does not end")
        if response.will_close:
            self.close()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, answer

    def _connect(self, until: float) -> tuple[http.client.HTTPConnection, _Deadline]:
        if self._http is not None and self._sock is not None:
            return self._http, self._sock
        raw = self._open(until)
        self._sock = _Deadline(raw, self._clock)
        self._http = http.client.HTTPConnection(self._host or "localhost", self._port or 80)
        self._http.sock = cast("socket.socket", self._sock)
        self._http.auto_open = 0  # never open one by itself: that one would have no deadline
        return self._http, self._sock

    def _open(self, until: float) -> socket.socket:
        if self._path:
            return self._dial(socket.AF_UNIX, 0, self._path, until)
        self.resolve()
        problem: OSError = ConnectionRefusedError("no address")
        for family, _, protocol, _, address in self._addresses:
            try:
                sock = self._dial(family, protocol, address, until)
            except TimeoutError:
                raise
            except OSError as error:
                problem = error
                continue
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        raise problem

    def _dial(self, family: int, protocol: int, address: Any, until: float) -> socket.socket:
        left = until - self._clock()
        if left <= 0.0:
            raise TimeoutError("the deadline has passed")
        sock = socket.socket(family, socket.SOCK_STREAM, protocol)
        try:
            sock.settimeout(left)
            sock.connect(address)
        except BaseException:
            sock.close()
            raise
        return sock


def _parse(url: str) -> tuple[str, str, int]:
    """(socket path, host, port) of a sidecar's URL; raises ConfigError."""
    parts = urlsplit(url)
    if parts.scheme == "unix" and parts.path and not parts.netloc:
        return parts.path, "", 0
    try:
        port = parts.port
    except ValueError:
        port = -1
    if port != -1 and parts.scheme == "http" and parts.hostname and parts.path in ("", "/"):
        return "", parts.hostname, 80 if port is None else port
    raise ConfigError(f"sidecar must be http://host:port or unix:///path/to/socket, got {url!r}")

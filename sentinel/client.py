"""Blocking client of the sidecar: one connection, and a deadline that holds.

    client = Client("http://127.0.0.1:8123")        or unix:///run/sentinel/sentinel.sock
    reply = client.post_steps(steps, deadline_s=0.05)

http.client's timeout counts anew with every recv: a server that drips held a "50 ms" call for
367 ms. Here every send and recv gets what is left of one absolute deadline, and the connection is
closed on any miss, since what is left on it could be the answer to a question asked before.
Answers are believed only if their seal fits the request (see wire.messages).

HTTP is spoken by hand, as much of it as the sidecar speaks: one request, one answer with a
content-length or until the end of the connection. It costs a third of http.client's time, most of
which goes into header objects that nobody here asks for. The socket never blocks: a step is one
send, one poll, one recv.

What no deadline can bound is the lookup of a host name, so a step never does one: resolve() does,
and register() and get(), which nobody calls inside a step. An address needs no lookup.

Units:   deadlines in seconds from the call; after it a call ends as soon as its thread gets a core.
Threads: none inside; one Client serves one thread. share() may be called by another.
Errors:  MissError, with the reason as a word that counters can use.
"""

from __future__ import annotations

import math
import os
import re
import select
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar
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
OK = 200
MAX_HEAD_BYTES = 65536
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


class _Connection:
    """A socket on which every call is bounded by one absolute deadline."""

    def __init__(self, sock: socket.socket, clock: Callable[[], float]) -> None:
        self._sock = sock
        self._clock = clock
        self._buffer = b""
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self.until = 0.0

    def send(self, data: bytes) -> None:
        """Send all of it; raises TimeoutError at the deadline."""
        self._left()
        sent = self._send(data)
        if sent == len(data):
            return
        rest = memoryview(data)
        self._poll.modify(self._sock, select.POLLOUT)
        try:
            while len(rest := rest[sent:]):
                self._wait()
                sent = self._send(rest)
        finally:
            self._poll.modify(self._sock, select.POLLIN)

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers (names in lower case) and body of the next answer.

        Raises:
            TimeoutError: the deadline has passed.
            ConnectionResetError: the connection ended before the answer did.
            ValueError: what came is no such answer.
        """
        status, headers = self._head()
        while 100 <= status < 200:
            status, headers = self._head()
        if "transfer-encoding" in headers:
            raise ValueError(f"transfer-encoding {headers['transfer-encoding']!r} is not spoken")
        given = headers.get("content-length")
        if given is None:
            headers["connection"] = "close"
            return status, headers, self._rest()
        if not given.isascii() or not given.isdigit() or int(given) > MAX_REPLY_BYTES:
            raise ValueError(f"a content-length of {given[:32]!r}")
        length = int(given)
        while len(self._buffer) < length:
            self._more()
        body, self._buffer = self._buffer[:length], self._buffer[length:]
        if self._buffer:
            raise ValueError("more than one answer to one question")
        return status, headers, body

    def close(self) -> None:
        """Close it."""
        self._sock.close()

    def _head(self) -> tuple[int, dict[str, str]]:
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise ValueError(f"headers above {MAX_HEAD_BYTES} bytes")
            self._more()
        head, self._buffer = self._buffer[:end], self._buffer[end + 4 :]
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        code = rest[:3]
        if version not in ("HTTP/1.1", "HTTP/1.0") or not (code.isascii() and code.isdigit()):
            raise ValueError(f"an answer that begins with {first[:32]!r}")
        headers: dict[str, str] = {}
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon:
                raise ValueError(f"a header line {line[:32]!r}")
            headers[name.lower()] = value.strip()
        return int(code), headers

    def _rest(self) -> bytes:
        """All until the connection ends."""
        parts = [self._buffer]
        size = len(self._buffer)
        self._buffer = b""
        while more := self._receive():
            parts.append(more)
            size += len(more)
            if size > MAX_REPLY_BYTES:
                raise ValueError("an answer that does not end")
        return b"".join(parts)

    def _more(self) -> None:
        more = self._receive()
        if not more:
            raise ConnectionResetError("the connection ended before the answer did")
        self._buffer += more

    def _receive(self) -> bytes:
        while True:
            self._wait()
            try:
                return self._sock.recv(65536)
            except BlockingIOError:
                continue  # woken for nothing

    def _send(self, data: bytes | memoryview) -> int:
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0

    def _wait(self) -> None:
        """Until the socket is ready; raises TimeoutError at the deadline."""
        while not self._poll.poll(math.ceil(self._left() * 1e3)):
            pass

    def _left(self) -> float:
        seconds = self.until - self._clock()
        if seconds <= 0.0:
            raise TimeoutError("the deadline has passed")
        return seconds


class Client:
    """One keep-alive connection to a sidecar.

    Args:
        url: http://host:port, with the path under which a proxy has the sidecar, or
            unix:///path/to/socket.
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
        self._path, self._host, self._port, self._prefix = _parse(url)
        self._addresses = _literal(self._host, self._port)
        self._named = not self._path and not self._addresses
        self._paths: dict[tuple[str, str], str] = {}
        self._connection: _Connection | None = None

    def resolve(self, *, anew: bool = False) -> None:
        """Look the host name up. It cannot be bounded in time, so never do it inside a step.

        Args:
            anew: also when it was found before: a sidecar that moved has another address.

        Raises:
            MissError: unreachable.
        """
        if not self._named or (self._addresses and not anew):
            return
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise MissError("unreachable", f"{self.url}: {error}") from error
        self._addresses = list(found)

    def share(self, other: Client) -> None:
        """Use the addresses that `other`, a client of the same URL, has found."""
        self._addresses = list(other._addresses)

    def register(self, message: Register, *, deadline_s: float) -> Registered:
        """Introduce this process, looking its name up if need be; raises MissError."""
        self.resolve()
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
        """The body of any page of the sidecar, for people; looks its name up; raises MissError."""
        status, body = self.ask("GET", path, deadline_s=deadline_s)
        if status != OK:
            raise MissError("refused", f"{self.url}{path} answered {status}: {body[:200]!r}")
        return body

    def ask(
        self, method: str, path: str, body: bytes = b"", *, deadline_s: float
    ) -> tuple[int, bytes]:
        """Status and body of any JSON request of a person; raises MissError when none comes."""
        self.resolve()
        headers = {"authorization": f"Bearer {self._token}"} if self._token else {}
        if body:
            headers["content-type"] = "application/json"
        until = self._clock() + deadline_s
        status, _, found = self._exchange(method, path, body, headers, until, deadline_s)
        return status, found

    def close(self) -> None:
        """Close the connection; the next call opens a new one."""
        if self._connection is not None:
            with suppress(OSError):
                self._connection.close()
        self._connection = None

    def _call(
        self, method: str, what: str, message: Message, kind: type[M], deadline_s: float
    ) -> M:
        until = self._clock() + deadline_s  # encoding counts: the caller waits for that too
        path = self._paths.get((message.run, what))
        if path is None:
            path = f"/v1/runs/{quote(message.run, safe='')}{what}"
            self._paths[message.run, what] = path
        body = messages.encode_message(message)
        seal = messages.seal(self._token, path, body)
        headers = {"content-type": messages.CONTENT_TYPE, messages.SEAL_HEADER: seal}
        status, given, answer = self._exchange(method, path, body, headers, until, deadline_s)
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
            if status == OK:
                return messages.decode_message(kind, answer)
            refused = messages.decode_message(Refused, answer)
        except ProtocolError as error:
            self.close()
            raise MissError("garbled", str(error)) from error
        code = refused.code if refused.code in ("unknown_run", "fenced", "garbled") else "refused"
        raise MissError(code, refused.detail)

    def _exchange(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        until: float,
        deadline_s: float,
    ) -> tuple[int, Mapping[str, str], bytes]:
        # What a proxy takes off again: the seal is over the path without it.
        lines = [f"{method} {self._prefix}{path} HTTP/1.1", f"host: {self._host or 'sidecar'}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += [f"content-length: {len(body)}", "", ""]
        request = "\r\n".join(lines).encode("latin-1") + body
        try:
            kept = self._connection is not None
            try:
                return self._once(request, until)
            except (ConnectionResetError, BrokenPipeError):
                # A kept connection may have been closed while it was idle: ask once more on a
                # new one. Every message may be sent twice.
                self.close()
                if not kept:
                    raise
                return self._once(request, until)
        except TimeoutError as error:
            self.close()
            raise MissError(
                "timeout", f"{self.url}: no answer within {deadline_s * 1e3:.0f} ms"
            ) from error
        except (ConnectionResetError, BrokenPipeError) as error:
            self.close()
            raise MissError("reset", f"{self.url}: {error}") from error
        except OSError as error:
            self.close()
            raise MissError("unreachable", f"{self.url}: {error}") from error
        except ValueError as error:
            self.close()
            raise MissError("garbled", f"{self.url}: {error}") from error
        except BaseException:
            self.close()  # an interrupt in the middle of an answer: nothing left may be read
            raise

    def _once(self, request: bytes, until: float) -> tuple[int, Mapping[str, str], bytes]:
        connection = self._connection
        if connection is None:
            connection = self._connection = _Connection(self._open(until), self._clock)
        connection.until = until
        connection.send(request)
        status, headers, body = connection.answer()
        if headers.get("connection", "").lower() == "close":
            self.close()
        return status, headers, body

    def _open(self, until: float) -> socket.socket:
        if self._path:
            return self._dial(socket.AF_UNIX, 0, self._path, until)
        problem: OSError = ConnectionRefusedError(
            f"{self._host} has not been looked up" if self._named else "no address"
        )
        for place, (family, _, protocol, _, address) in enumerate(self._addresses):
            try:
                sock = self._dial(family, protocol, address, until)
            except TimeoutError:
                # The deadline is spent: let the next call begin with another address.
                self._addresses = self._addresses[place + 1 :] + self._addresses[: place + 1]
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
            sock.connect(address)  # a Unix socket whose backlog is full says so at once
            if family != socket.AF_UNIX and sock.getsockname() == sock.getpeername():
                # Nobody listens, and the port that this end was given is the very one it asked
                # for: it would talk to itself and keep the sidecar from coming back.
                raise ConnectionRefusedError("nobody listens there")
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        return sock


def _literal(host: str, port: int) -> list[tuple[Any, ...]]:
    """The address of a host that is given as one; nothing is asked, so it cannot wait."""
    if not host:
        return []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except OSError:
        return []
    return list(found)


_PREFIX = re.compile(r"(?:/[A-Za-z0-9._~%-]+)*/?")


def _parse(url: str) -> tuple[str, str, int, str]:
    """(socket path, host, port, path prefix) of a sidecar's URL; raises ConfigError."""
    parts = urlsplit(url)
    if parts.scheme == "unix" and parts.path and not parts.netloc:
        return parts.path, "", 0, ""
    try:
        port = parts.port
    except ValueError:
        port = -1
    plain = _PREFIX.fullmatch(parts.path) and not parts.query and not parts.fragment
    if port != -1 and parts.scheme == "http" and parts.hostname and plain:
        return "", parts.hostname, 80 if port is None else port, parts.path.rstrip("/")
    raise ConfigError(
        f"sidecar must be http://host:port[/path] or unix:///path/to/socket, got {url!r}"
    )

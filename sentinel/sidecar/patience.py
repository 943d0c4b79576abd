"""How long a connection may hold a place without asking for anything, and how much it may bring.

    uvicorn.Config(app, http=Impatient, ...)

The server itself waits for ever for the head of a request, and keeps any number of header lines: a
few hundred slow or endless ones would keep trainers out, or the memory full. So:

* a connection without a whole request head within HEAD_S of its first need for one is closed: one
  that is new, and one that has begun a further request; between two requests of a trainer the
  server's own, longer keep-alive counts;
* a head not whole after MOST_HEAD bytes is answered with 431, what is no HTTP with 400, both in the
  shape of every refusal, and the connection is closed;
* more than MOST_CONNECTIONS at once are not taken.

How long a body may take and how large it may be is the door's affair.

Units:   seconds, bytes.
Threads: the event loop's.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

logger = logging.getLogger(__name__)

HEAD_S = 30.0
MOST_HEAD = 65_536
MOST_CONNECTIONS = 16_384

_Server: Any = AutoHTTPProtocol  # one of two classes, by what is installed


class Impatient(_Server):  # type: ignore[misc]
    """See the module docstring."""

    _waiting: asyncio.TimerHandle | None = None
    _head = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """A client has come."""
        if len(self.connections) >= MOST_CONNECTIONS:
            logger.warning("too many connections, one more is not taken most=%s", MOST_CONNECTIONS)
            transport.abort()
            return
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Bytes have come: a whole head, a part of one, or of a body."""
        # A head is measured alike however its bytes are cut on the way.
        while data and self.transport is not None and not self.transport.is_closing():
            room = len(data) if self._busy() else MOST_HEAD + 1 - self._head
            self._take(data[:room])
            data = data[room:]

    def _take(self, data: bytes) -> None:
        if self._feed(data) or self._busy():
            if self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None
            self._head = 0
            return
        self._head += len(data)
        if self._head > MOST_HEAD:
            self._refuse(
                431,
                "Request Header Fields Too Large",
                f"a request's head may hold {MOST_HEAD} bytes",
            )
        elif self._waiting is None:
            self._expect()

    def _feed(self, data: bytes) -> bool:
        """Let the server read these bytes; whether a request that ends in them is answered."""
        super().data_received(data)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        if self in self.connections:
            super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is refused in the one shape, too."""
        self._refuse(400, "Bad Request", "this is no HTTP request")

    def _refuse(self, status: int, phrase: str, detail: str) -> None:
        if self.transport.is_closing():
            return
        body = json.dumps({"code": "malformed", "detail": detail}).encode()
        head = (
            f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _busy(self) -> bool:
        """Whether a request was read that is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def _expect(self) -> None:
        self._waiting = self.loop.call_later(HEAD_S, self._give_up)

    def _give_up(self) -> None:
        self._waiting = None
        if not self._busy() and not self.transport.is_closing():
            self.transport.close()

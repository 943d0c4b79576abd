"""A sidecar on a TCP port, in a thread of this process: its settings and parts are at hand."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import uvicorn

from sentinel.client import Client
from sentinel.sidecar.app import create_app
from sentinel.sidecar.direct import Direct, Prompt
from sentinel.sidecar.settings import Settings

Start = Callable[..., "Served"]  # the fixture `start`


class Served:
    """A sidecar on a TCP port, in a thread of this process."""

    def __init__(self, settings: Settings) -> None:
        app = create_app(settings, clock=time.time, timer=time.perf_counter)
        self.service = app.state.service
        self.sock = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.port: int = self.sock.getsockname()[1]
        config = uvicorn.Config(
            Direct(app, self.service),
            http=Prompt,
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, args=([self.sock],), daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.02)

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        self.sock.close()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def raw(self, data: bytes) -> bytes:
        """What is answered to these bytes, until the connection is closed or it is whole."""
        with self.connect() as sock:
            with suppress(ConnectionError):
                sock.sendall(data)
            return read_all(sock)

    def get(self, path: str) -> tuple[int, bytes]:
        return self.ask("GET", path)

    def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        client = Client(f"http://127.0.0.1:{self.port}", token="")
        try:
            return client.ask(method, path, body, deadline_s=20.0)
        finally:
            client.close()


def read_all(sock: socket.socket) -> bytes:
    found = b""
    with suppress(ConnectionError):
        while more := sock.recv(65536):
            found += more
            head, _, body = found.partition(b"\r\n\r\n")
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"content-length:") and len(body) >= int(line[15:]):
                    return found
    return found

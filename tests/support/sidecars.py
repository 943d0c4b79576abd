"""Sidecars for tests: a real `sentinel serve` process, and a proxy that behaves badly."""

from __future__ import annotations

import os
import re
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

START_TIMEOUT_S = 30.0


class ServeProcess:
    """`sentinel serve`, started and listening."""

    def __init__(self, *arguments: str, port: int = 0, env: dict[str, str] | None = None) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if "--data" not in arguments:
            self._folder = tempfile.TemporaryDirectory(prefix="sentinel-data-")
            arguments = (*arguments, "--data", self._folder.name)
        self._arguments = arguments
        self._env = {k: v for k, v in os.environ.items() if not k.startswith("SENTINEL_")}
        self._env |= env or {}
        self.start(port)

    def start(self, port: int) -> None:
        """Start it, on that port if it is not 0.

        A port that was free a moment ago may be somebody's outgoing one for a while.
        """
        for _ in range(40):
            self._start(port)
            if "Address already in use" not in self.line:
                break
            self.process.communicate(timeout=20)
            time.sleep(0.5)
        found = re.search(r"http://127\.0\.0\.1:(\d+)", self.line)
        assert found, f"sentinel serve said {self.line!r}"
        self.port = int(found.group(1))
        self.url = f"http://127.0.0.1:{self.port}"

    def _start(self, port: int) -> None:
        command = [sys.executable, "-m", "sentinel.cli.main", "serve", "--port", str(port)]
        self.process = subprocess.Popen(
            [*command, *self._arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._env,
        )
        assert self.process.stdout is not None
        self.line = _first_line(self.process)

    def kill(self) -> None:
        """kill -9."""
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=20)

    def freeze(self) -> None:
        """SIGSTOP: the kernel still accepts connections and bytes for it."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Gone, and its data too."""
        if self.process.poll() is None:
            self.kill()
        if self._folder is not None:
            self._folder.cleanup()

    def stop(self) -> tuple[int, str]:
        """SIGTERM; returns the exit status and what it said."""
        self.process.send_signal(signal.SIGTERM)
        said, _ = self.process.communicate(timeout=20)
        return self.process.returncode, said


def _first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        if not ready.select(START_TIMEOUT_S):
            process.kill()
            raise TimeoutError(f"sentinel serve said nothing within {START_TIMEOUT_S} s")
    return process.stdout.readline()


@contextmanager
def serving(*arguments: str, env: dict[str, str] | None = None) -> Iterator[ServeProcess]:
    """A `sentinel serve` process on a free port, gone at the end."""
    process = ServeProcess(*arguments, env=env)
    try:
        yield process
    finally:
        process.close()


class HostileProxy:
    """Sits before a sidecar and, while `behaviour` says so, spoils its answers.

    healthy: passes bytes on. drips: answers one byte every 20 ms. stale: answers with the answer
    to the request before. garbles: flips bits in the answer's body. garbles_request: flips bits on
    the way in. resets: cuts the connection with RST. hangs: never answers. nonsense: answers
    something that is no HTTP. refuses: accepts and closes at once. endless: an answer without end.
    loses: of eight requests two in a row do not arrive (a client asks twice), and two answers.
    late: a good answer, 45 ms after the question.

    Whatever the behaviour, the next answer that holds `drop_next` is lost; b"" for none.
    """

    BEHAVIOURS = (
        "drips",
        "stale",
        "garbles",
        "garbles_request",
        "resets",
        "hangs",
        "nonsense",
        "refuses",
        "endless",
    )

    def __init__(self, port: int) -> None:
        self._target = port
        self.behaviour = "healthy"
        self.requests = self.lost = 0
        self.drop_next = b""
        self._before = b""
        self._closing = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads: list[threading.Thread] = []
        self._accepting = self._spawn(self._accept)

    def _spawn(self, target: object, *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()
        return thread

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._spawn(self._serve, connection)

    def _serve(self, front: socket.socket) -> None:
        with front, suppress(OSError):
            front.settimeout(60.0)
            if self.behaviour == "refuses":
                return
            with socket.create_connection(("127.0.0.1", self._target), 5.0) as back:
                back.settimeout(10.0)
                while not self._closing.is_set():
                    request = _message(front)
                    if not request:
                        return
                    self.requests += 1
                    if not self._answer(request, front, back):
                        return

    def _answer(self, request: bytes, front: socket.socket, back: socket.socket) -> bool:
        how = self.behaviour
        if how == "refuses":
            return False
        if how == "hangs":
            self._closing.wait(20.0)
            return False
        if how == "resets":
            front.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        if how == "nonsense":
            front.sendall(b"\x00\x01\x02 this is no HTTP\r\n\r\n" * 3)
            return False
        if how == "endless":
            front.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\n")
            while not self._closing.is_set():
                front.sendall(b"x" * 65536)
        if how == "loses" and self.requests % 8 in (1, 2):
            return self._lose(front)
        back.sendall(_flip(request) if how == "garbles_request" else request)
        answer = _message(back)
        if not answer:
            return False
        if how == "late":
            time.sleep(0.045)
        if how == "loses" and self.requests % 8 in (5, 6):
            return self._lose(front)
        if self.drop_next and self.drop_next in answer:
            self.drop_next = b""
            return self._lose(front)
        before, self._before = self._before, answer
        if how == "stale":
            front.sendall(before or answer)
        elif how == "garbles":
            front.sendall(_flip(answer))
        elif how == "drips":
            for at in range(len(answer)):
                if self._closing.is_set() or self.behaviour != "drips":
                    return False
                front.sendall(answer[at : at + 1])
                time.sleep(0.02)
        else:
            front.sendall(answer)
        return True

    def _lose(self, front: socket.socket) -> bool:
        self.lost += 1
        front.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return False

    def close(self) -> None:
        self._closing.set()
        self._listener.close()


@contextmanager
def hostile_proxy(port: int) -> Iterator[HostileProxy]:
    """A HostileProxy before `port`, gone at the end."""
    proxy = HostileProxy(port)
    try:
        yield proxy
    finally:
        proxy.close()


def _message(sock: socket.socket) -> bytes:
    """One whole HTTP message with its body; b"" at the end of the connection."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = sock.recv(65536)
        if not more:
            return b""
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    found = re.search(rb"(?i)content-length: *(\d+)", head)
    length = int(found.group(1)) if found else 0
    while len(body) < length:
        more = sock.recv(65536)
        if not more:
            return b""
        body += more
    return head + b"\r\n\r\n" + body


def _flip(message: bytes) -> bytes:
    """The message with the lowest bit of every 7th body byte turned."""
    head, _, body = message.partition(b"\r\n\r\n")
    turned = bytes(b ^ (1 if at % 7 == 3 else 0) for at, b in enumerate(body))
    return head + b"\r\n\r\n" + turned

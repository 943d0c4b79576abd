"""A step that has come whole is answered at once; however it comes, the answer is the same."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

from sentinel.core.policy import Policy
from sentinel.sidecar import door, patience
from sentinel.sidecar.direct import Prompt
from sentinel.wire import codec, messages
from sentinel.wire.messages import Register, Registered, Steps
from tests.support.listening import Served, Start, read_all

POLICY = Policy.load("default")
PATH = "/v1/runs/r/steps"


def register(served: Served) -> int:
    """Its fence."""
    message = Register(run="r", incarnation="i", policy=codec.encode_policy(POLICY))
    client = served.connect()
    with client:
        client.sendall(posted(messages.encode_message(message), path="/v1/runs/r", method="PUT"))
        answer = read_all(client).partition(b"\r\n\r\n")[2]
    return messages.decode_message(Registered, answer).fence


def alive(fence: int, why: str = "") -> bytes:
    """A sign of life: the smallest message of a trainer that is answered like its steps."""
    return messages.encode_message(
        Steps(
            run="r",
            incarnation="i",
            fence=fence,
            policy_hash=codec.policy_hash(POLICY),
            why=why,
            frames=(),
        )
    )


def posted(
    body: bytes, *more: str, path: str = PATH, method: str = "POST", version: str = "1.1"
) -> bytes:
    lines = [
        f"{method} {path} HTTP/{version}",
        "host: localhost",
        f"content-type: {messages.CONTENT_TYPE}",
        f"{messages.SEAL_HEADER}: {messages.seal('', path, body)}",
        f"content-length: {len(body)}",
        *more,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def parted(answer: bytes) -> tuple[bytes, list[bytes], bytes]:
    """Status line, headers without their order and the date, and body."""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *rest = head.split(b"\r\n")
    return first, sorted(line for line in rest if not line.startswith(b"date:")), body


class Taken:
    """How many requests took the way of an application with a task of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        sealed = door.Door.sealed

        async def counting(*args: Any) -> Any:
            self.count += 1
            return await sealed(*args)

        monkeypatch.setattr(door.Door, "sealed", counting)


def answer_in_pieces(served: Served, data: bytes) -> bytes:
    with served.connect() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head, _, body = data.partition(b"\r\n\r\n")
        for piece in (head[:30], head[30:] + b"\r\n\r\n" + body[:1], body[1:]):
            sock.sendall(piece)
            time.sleep(0.05)
        return read_all(sock)


@pytest.mark.parametrize("wrong", ["nothing", "fence", "seal", "body"])
def test_whole_and_in_pieces_the_answer_is_the_same(
    start: Start, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    served = start()
    body = alive(register(served) + (wrong == "fence"))
    data = posted(b"\xff\xff" if wrong == "body" else body)
    if wrong == "seal":
        data = data.removesuffix(body) + body.replace(b"why", b"wyh")
    taken = Taken(monkeypatch)
    whole = served.raw(data)
    assert taken.count == 0
    pieces = answer_in_pieces(served, data)
    assert taken.count == 1
    assert parted(whole) == parted(pieces)
    assert b"date: " in whole
    status = {"nothing": 200, "fence": 409, "seal": 400, "body": 422}[wrong]
    assert whole.startswith(b"HTTP/1.1 %d " % status)
    assert served.service.health.requests["steps", f"{status // 100}xx"] == 2


def test_its_head_and_body_leave_in_one_write(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write is a call of the system that wakes the trainer."""
    served = start()
    body = alive(register(served))
    made = Prompt.connection_made
    writes: list[bytes] = []

    class Noting:
        def __init__(self, transport: Any) -> None:
            self._transport = transport

        def write(self, data: bytes) -> None:
            writes.append(data)
            self._transport.write(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._transport, name)

    monkeypatch.setattr(Prompt, "connection_made", lambda self, t: made(self, Noting(t)))
    assert served.raw(posted(body)) == b"".join(writes)
    assert len(writes) == 1


def test_thousands_on_one_connection_are_not_counted_as_one_endless_head(start: Start) -> None:
    served = start()
    data = posted(alive(register(served)))
    with served.connect() as sock:
        for _ in range(patience.MOST_HEAD // len(data) + 2):
            sock.sendall(data)
            assert read_all(sock).startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_kept_connection_may_be_idle_after_one(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "HEAD_S", 0.2)
    served = start()
    data = posted(alive(register(served)))
    with served.connect() as sock:
        for _ in range(2):
            sock.sendall(data)
            assert read_all(sock).startswith(b"HTTP/1.1 200 OK\r\n")
            time.sleep(0.6)


def test_pipelined_with_others_they_are_answered_in_turn(start: Start) -> None:
    served = start()
    body = alive(register(served))
    get = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with served.connect() as sock:
        sock.sendall(posted(body) + get + posted(b"\xff") + get + posted(body, "connection: close"))
        answers = b""
        while more := sock.recv(65536):
            answers += more
    statuses = [part[:3] for part in answers.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"200", b"422", b"200", b"200"]


@pytest.mark.parametrize(("more", "version"), [("connection: close", "1.1"), ("x: y", "1.0")])
def test_a_connection_that_is_not_to_stay_is_closed(start: Start, more: str, version: str) -> None:
    served = start()
    body = alive(register(served))
    with served.connect() as sock:
        sock.sendall(posted(body, more, version=version))
        answer = read_all(sock)
        assert sock.recv(1) == b""
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"connection: close" in answer


def test_one_that_waits_to_be_told_to_go_on_is_told(start: Start) -> None:
    served = start()
    body = alive(register(served))
    data = posted(body, "expect: 100-continue")
    with served.connect() as sock:
        sock.sendall(data.removesuffix(body))
        assert sock.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        assert read_all(sock).startswith(b"HTTP/1.1 200 OK\r\n")


def test_one_that_is_too_large_is_refused_as_ever(start: Start) -> None:
    served = start(max_body_bytes=8000)
    body = alive(register(served))
    assert served.raw(posted(body)).startswith(b"HTTP/1.1 200 ")
    long = alive(1, "x" * 8000)
    assert served.raw(posted(long)).startswith(b"HTTP/1.1 413 ")

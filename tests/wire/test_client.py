"""The client: an absolute deadline, no leftovers, only sealed answers are believed."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sentinel.client import Client, MissError
from sentinel.core.errors import ConfigError
from sentinel.wire import messages
from sentinel.wire.messages import Accepted, HandOver, Refused

DEADLINE_S = 0.05
SLACK_S = 0.2
MESSAGE = HandOver(run="r", incarnation="i", fence=1, seq=0, state=b"")
PATH = "/v1/runs/r/state"

Answer = Callable[[socket.socket, bytes], None]


def request_of(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        if not more:
            return b""
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


@contextmanager
def server(
    answer: Answer, *, family: int = socket.AF_INET, address: object = ("127.0.0.1", 0)
) -> Iterator[socket.socket]:
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind(address)  # type: ignore[arg-type]
    listener.listen(8)

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=talk, args=(connection,), daemon=True).start()

    def talk(connection: socket.socket) -> None:
        with connection:
            try:
                while request := request_of(connection):
                    answer(connection, request)
            except OSError:
                return

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listener
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


@contextmanager
def talking_to(answer: Answer, token: str = "") -> Iterator[Client]:
    with server(answer) as listener:
        client = Client(f"http://127.0.0.1:{listener.getsockname()[1]}", token=token)
        try:
            yield client
        finally:
            client.close()


def reply_to(
    request: bytes, message: messages.Message, *, token: str = "", status: int = 200
) -> bytes:
    head = request.partition(b"\r\n\r\n")[0].decode()
    asked = next(
        line.partition(": ")[2]
        for line in head.splitlines()
        if line.lower().startswith(messages.SEAL_HEADER)
    )
    body = messages.encode_message(message)
    seal = messages.seal(token, PATH, body, asked)
    return (
        f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n"
        f"{messages.SEAL_HEADER}: {seal}\r\n\r\n"
    ).encode() + body


def good(connection: socket.socket, request: bytes) -> None:
    connection.sendall(reply_to(request, Accepted(run="r")))


@pytest.mark.parametrize("prefix", ["", "/", "/ml/sentinel", "/ml/sentinel/"])
def test_a_path_of_a_proxy_is_asked_for_and_stands_in_no_seal(prefix: str) -> None:
    first: list[bytes] = []

    def answer(connection: socket.socket, request: bytes) -> None:
        first.append(request.split(b"\r\n")[0])
        head = request.partition(b"\r\n\r\n")[0].decode()
        given = head.split(f"{messages.SEAL_HEADER}: ")[1].split("\r\n")[0]
        body = request.partition(b"\r\n\r\n")[2]
        assert messages.sealed("", PATH, body, given)
        good(connection, request)

    with server(answer) as listener:
        client = Client(f"http://127.0.0.1:{listener.getsockname()[1]}{prefix}", token="")
        client.put_state(MESSAGE, deadline_s=5.0)
        client.close()
    assert first == [f"PUT {prefix.rstrip('/')}{PATH} HTTP/1.1".encode()]


def missed(client: Client, deadline_s: float = DEADLINE_S) -> tuple[str, float]:
    start = time.perf_counter()
    with pytest.raises(MissError) as caught:
        client.put_state(MESSAGE, deadline_s=deadline_s)
    return caught.value.reason, time.perf_counter() - start


def test_a_sealed_answer_is_taken_and_the_connection_kept() -> None:
    ports = set()

    def answer(connection: socket.socket, request: bytes) -> None:
        ports.add(connection.getpeername())
        good(connection, request)

    with talking_to(answer) as client:
        for _ in range(3):
            assert client.put_state(MESSAGE, deadline_s=2.0) == Accepted(run="r")
    assert len(ports) == 1


def test_a_unix_socket_serves_as_well(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with server(good, family=socket.AF_UNIX, address=path):
        client = Client(f"unix://{path}", token="")
        assert client.put_state(MESSAGE, deadline_s=2.0) == Accepted(run="r")
        client.close()


def test_a_server_that_drips_is_left_at_the_deadline() -> None:
    def drip(connection: socket.socket, request: bytes) -> None:
        for byte in reply_to(request, Accepted(run="r")):
            connection.sendall(bytes([byte]))
            time.sleep(0.02)

    with talking_to(drip) as client:
        reason, waited = missed(client)
    assert reason == "timeout"
    assert DEADLINE_S * 0.9 <= waited <= DEADLINE_S + SLACK_S


def test_a_server_that_drips_headers_forever_is_left_at_the_deadline() -> None:
    def drip(connection: socket.socket, request: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n")
        while True:
            connection.sendall(b"x-y: z\r\n")
            time.sleep(0.01)

    with talking_to(drip) as client:
        reason, waited = missed(client)
    assert reason == "timeout"
    assert waited <= DEADLINE_S + SLACK_S


def test_a_late_answer_is_never_taken_for_the_next_question() -> None:
    first = [True]

    def late(connection: socket.socket, request: bytes) -> None:
        if first.pop() if first else False:
            time.sleep(0.15)
        good(connection, request)

    with talking_to(late) as client:
        assert missed(client)[0] == "timeout"
        time.sleep(0.2)
        assert client.put_state(MESSAGE, deadline_s=2.0) == Accepted(run="r")


def test_a_connection_that_was_closed_while_idle_is_opened_again() -> None:
    def once(connection: socket.socket, request: bytes) -> None:
        good(connection, request)
        connection.shutdown(socket.SHUT_RDWR)

    with talking_to(once) as client:
        for _ in range(3):
            assert client.put_state(MESSAGE, deadline_s=2.0) == Accepted(run="r")
            time.sleep(0.02)


def test_an_answer_that_closes_the_connection_is_read_to_its_end() -> None:
    def closing(connection: socket.socket, request: bytes) -> None:
        head, _, body = reply_to(request, Accepted(run="r")).partition(b"\r\n\r\n")
        seal = head.split(b"\r\n")[-1]
        connection.sendall(b"HTTP/1.1 200 OK\r\nconnection: close\r\n" + seal + b"\r\n\r\n")
        time.sleep(0.02)
        connection.sendall(body)
        connection.shutdown(socket.SHUT_RDWR)

    with talking_to(closing) as client:
        assert client.put_state(MESSAGE, deadline_s=2.0) == Accepted(run="r")
        assert client.put_state(MESSAGE, deadline_s=2.0) == Accepted(run="r")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda a: a.replace(b"\xa3run\xa1r", b"\xa3run\xa1s"), "garbled"),
        (lambda a: a.replace(b"HTTP/1.1 200", b"HTTP/1.1 abc"), "garbled"),
        (lambda a: b"\x16\x03\x01 no http\r\n\r\n", "garbled"),
        (lambda a: a.replace(b"content-length: ", b"content-length: 9"), "timeout"),
        (lambda a: a.replace(messages.SEAL_HEADER.encode(), b"x-other"), "garbled"),
    ],
    ids=["body", "status", "no http", "too short", "no seal"],
)
def test_a_spoilt_answer_is_a_miss(spoil: Callable[[bytes], bytes], reason: str) -> None:
    def answer(connection: socket.socket, request: bytes) -> None:
        connection.sendall(spoil(reply_to(request, Accepted(run="r"))))

    with talking_to(answer) as client:
        assert missed(client)[0] == reason


def test_the_answer_to_the_request_before_is_not_believed() -> None:
    kept: list[bytes] = []

    def stale(connection: socket.socket, request: bytes) -> None:
        kept.append(reply_to(request, Accepted(run="r")))
        connection.sendall(kept[0])

    with talking_to(stale) as client:
        client.put_state(MESSAGE, deadline_s=2.0)
        other = HandOver(run="r", incarnation="i", fence=1, seq=1, state=b"")
        with pytest.raises(MissError) as caught:
            client.put_state(other, deadline_s=2.0)
    assert caught.value.reason == "garbled"


def test_with_a_token_an_answer_sealed_without_it_is_not_believed() -> None:
    with talking_to(good, token="secret") as client:
        assert missed(client, 2.0)[0] == "garbled"


def test_a_refusal_says_what_it_is_about() -> None:
    def refuse(connection: socket.socket, request: bytes) -> None:
        refused = Refused(run="r", code="fenced", detail="another process")
        connection.sendall(reply_to(request, refused, status=409))

    with talking_to(refuse) as client, pytest.raises(MissError, match="another process") as caught:
        client.put_state(MESSAGE, deadline_s=2.0)
    assert caught.value.reason == "fenced"


def test_a_tcp_listener_that_never_accepts_is_left_at_the_deadline() -> None:
    with contextlib.ExitStack() as held:
        listener = held.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1))
        for _ in range(4):  # fill the backlog: from then on the kernel drops what knocks
            knocking = held.enter_context(socket.socket())
            knocking.setblocking(False)
            knocking.connect_ex(listener.getsockname())
        time.sleep(0.02)
        client = Client(f"http://127.0.0.1:{listener.getsockname()[1]}", token="")
        reason, waited = missed(client)
    assert reason == "timeout"
    assert DEADLINE_S * 0.9 <= waited <= DEADLINE_S + SLACK_S


def test_a_unix_listener_with_a_full_backlog_is_a_miss_and_no_wait(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with contextlib.ExitStack() as held:
        listener = held.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen(0)
        for _ in range(4):
            knocking = held.enter_context(socket.socket(socket.AF_UNIX))
            knocking.setblocking(False)
            knocking.connect_ex(path)
        reason, waited = missed(Client(f"unix://{path}", token=""))
    assert reason in ("unreachable", "timeout")
    assert waited <= DEADLINE_S + SLACK_S


def test_a_server_that_accepts_and_is_frozen_is_left_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # the kernel completes the handshake
        client = Client(f"http://127.0.0.1:{listener.getsockname()[1]}", token="")
        first, waited = missed(client)
        again, waited_again = missed(client)
    assert (first, again) == ("timeout", "timeout")
    assert max(waited, waited_again) <= DEADLINE_S + SLACK_S


def test_a_server_that_does_not_read_holds_a_long_request_only_until_the_deadline() -> None:
    long = HandOver(run="r", incarnation="i", fence=1, seq=0, state=bytes(8 * 2**20))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Client(f"http://127.0.0.1:{listener.getsockname()[1]}", token="")
        start = time.perf_counter()
        with pytest.raises(MissError) as caught:
            client.put_state(long, deadline_s=0.3)
        waited = time.perf_counter() - start
    assert caught.value.reason == "timeout"
    assert waited <= 0.3 + SLACK_S


def test_a_request_larger_than_the_sockets_buffers_arrives_whole() -> None:
    long = HandOver(run="r", incarnation="i", fence=1, seq=0, state=bytes(range(256)) * 2**15)
    seen: list[bytes] = []

    def answer(connection: socket.socket, request: bytes) -> None:
        seen.append(request.partition(b"\r\n\r\n")[2])
        good(connection, request)

    with talking_to(answer) as client:
        assert client.put_state(long, deadline_s=10.0) == Accepted(run="r")
        assert client.put_state(MESSAGE, deadline_s=2.0) == Accepted(run="r")
    assert seen[0] == messages.encode_message(long)


def test_a_peer_that_closes_its_half_is_a_reset_at_once() -> None:
    def half(connection: socket.socket, request: bytes) -> None:
        connection.shutdown(socket.SHUT_WR)
        time.sleep(0.5)

    with talking_to(half) as client:
        reason, waited = missed(client, 2.0)
    assert reason == "reset"
    assert waited < 1.0


class TestNames:
    @staticmethod
    def count(monkeypatch: pytest.MonkeyPatch) -> list[str]:
        asked: list[str] = []
        real = socket.getaddrinfo

        def lookup(host: str, port: int, **options: Any) -> Any:
            if options.get("flags"):
                return real(host, port, **options)
            asked.append(host)
            return real("127.0.0.1", port, **options)

        monkeypatch.setattr(socket, "getaddrinfo", lookup)
        return asked

    def test_a_step_never_looks_a_name_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = self.count(monkeypatch)
        with server(good) as listener:
            client = Client(f"http://sidecar.test:{listener.getsockname()[1]}", token="")
            assert missed(client)[0] == "unreachable"
            assert asked == []
            client.resolve()
            assert client.put_state(MESSAGE, deadline_s=2.0) == Accepted(run="r")
            client.close()
            assert client.put_state(MESSAGE, deadline_s=2.0) == Accepted(run="r")
            client.resolve()
            assert asked == ["sidecar.test"]
            client.resolve(anew=True)
            assert asked == ["sidecar.test"] * 2
            client.close()

    def test_what_one_client_found_another_may_use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = self.count(monkeypatch)
        with server(good) as listener:
            url = f"http://sidecar.test:{listener.getsockname()[1]}"
            one, other = Client(url, token=""), Client(url, token="")
            one.resolve()
            other.share(one)
            assert other.put_state(MESSAGE, deadline_s=2.0) == Accepted(run="r")
            other.close()
        assert asked == ["sidecar.test"]

    def test_an_address_that_swallows_everything_is_tried_last_the_next_time(self) -> None:
        with contextlib.ExitStack() as held:
            hole = held.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1))
            for _ in range(4):
                knocking = held.enter_context(socket.socket())
                knocking.setblocking(False)
                knocking.connect_ex(hole.getsockname())
            time.sleep(0.02)
            listener = held.enter_context(server(good))
            client = Client("http://sidecar.test:1", token="")
            client._addresses = [
                (socket.AF_INET, socket.SOCK_STREAM, 0, "", hole.getsockname()),
                (socket.AF_INET, socket.SOCK_STREAM, 0, "", listener.getsockname()),
            ]
            assert missed(client)[0] == "timeout"
            assert client.put_state(MESSAGE, deadline_s=2.0) == Accepted(run="r")
            client.close()


def test_a_connection_to_itself_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may give a client the very port that it asks for, when nobody listens there."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    class Unlucky(socket.socket):
        def connect(self, address: Any) -> None:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.bind(("127.0.0.1", port))
            super().connect(address)

    with monkeypatch.context() as patched:
        patched.setattr(socket, "socket", Unlucky)
        client = Client(f"http://127.0.0.1:{port}", token="")
        with pytest.raises(MissError) as caught:
            client.get("/v1/runs", deadline_s=2.0)
    assert caught.value.reason == "unreachable"
    client.close()
    socket.create_server(("127.0.0.1", port)).close()  # and the port is free again


def test_nobody_there_is_a_miss_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    reason, waited = missed(Client(f"http://127.0.0.1:{port}", token=""), 2.0)
    assert reason == "unreachable"
    assert waited < 1.0


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:80",
        "https://a:1",
        "http://",
        "unix://relative/s",
        "http://a:b",
        "http://a:1/x?y=1",
        "http://a:1/x#y",
        "http://a:1/x y",
    ],
)
def test_an_address_that_is_none_is_refused_with_the_forms_that_are(url: str) -> None:
    with pytest.raises(ConfigError, match=r"http://host:port\[/path\] or unix:///path.*got"):
        Client(url)


@pytest.mark.parametrize(
    ("head", "detail"),
    [
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked", "transfer-encoding"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: -5", "content-length"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999", "content-length"),
        (b"HTTP/1.1 200 OK\r\nno colon", "header line"),
        (b"HTTP/1.1 2x0 OK\r\na: b", "begins with"),
        (b"SSH-2.0-x\r\na: b", "begins with"),
        (b"x: " + b"y" * 200_000, "headers above"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_no_answer_of_a_sidecar_is_named(head: bytes, detail: str) -> None:
    def answer(connection: socket.socket, request: bytes) -> None:
        connection.sendall(head + b"\r\n\r\n")

    with talking_to(answer) as client, pytest.raises(MissError, match=detail) as caught:
        client.put_state(MESSAGE, deadline_s=2.0)
    assert caught.value.reason == "garbled"


def test_an_interim_answer_is_passed_over() -> None:
    def answer(connection: socket.socket, request: bytes) -> None:
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        good(connection, request)

    with talking_to(answer) as client:
        assert client.put_state(MESSAGE, deadline_s=2.0) == Accepted(run="r")


def test_a_second_answer_to_one_question_spoils_the_connection() -> None:
    def answer(connection: socket.socket, request: bytes) -> None:
        connection.sendall(reply_to(request, Accepted(run="r")) * 2)

    with talking_to(answer) as client:
        assert missed(client, 2.0)[0] == "garbled"

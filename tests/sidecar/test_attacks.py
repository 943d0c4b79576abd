"""A sidecar under attack: slow, endless, idle and garbled connections, and paths full of tricks."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from sentinel.client import Client
from sentinel.sidecar import door, patience
from sentinel.sidecar.security import Role
from tests.support.listening import Start, read_all

CONTROL, READ = "control-0123456789", "reader-0123456789"
ENDLESS = b"GET /v1/runs HTTP/1.1\r\nhost: localhost\r\n"


def closed(sock: socket.socket) -> bool:
    """Whether the other side hangs up, within the socket's time."""
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


class TestSlow:
    @pytest.mark.parametrize(
        "sent", [b"", b"GET /v1/ru", ENDLESS], ids=["nothing", "half a line", "half a head"]
    )
    def test_one_that_never_asks_is_hung_up_on(
        self, start: Start, monkeypatch: pytest.MonkeyPatch, sent: bytes
    ) -> None:
        monkeypatch.setattr(patience, "HEAD_S", 0.3)
        served = start()
        with served.connect() as sock:
            sock.sendall(sent)
            assert closed(sock)

    def test_dripping_a_head_gains_no_time(
        self, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(patience, "HEAD_S", 0.5)
        served = start()
        with served.connect() as sock:
            sock.sendall(ENDLESS)
            sock.settimeout(0.05)
            dripped, gone = 0, False
            while not gone and dripped < 400:
                try:
                    sock.sendall(b"x: y\r\n")
                    gone = sock.recv(1) == b""
                except TimeoutError:
                    dripped += 1
                except ConnectionError:
                    gone = True
            assert gone

    def test_nor_does_a_second_request_on_a_kept_connection(
        self, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(patience, "HEAD_S", 0.5)
        served = start()
        with served.connect() as sock:
            sock.sendall(ENDLESS + b"\r\n")
            assert read_all(sock).startswith(b"HTTP/1.1 200")
            sock.settimeout(1.5)
            assert not closed(sock)  # idle between two requests: a trainer does that for minutes
            sock.settimeout(20)
            sock.sendall(b"GET /v1")
            assert closed(sock)

    def test_a_slow_body_is_answered_408(
        self, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(door, "BODY_S", 0.3)
        head = (
            b"POST /v1/runs/r/steps HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: 999\r\n\r\n{"
        )
        answer = start().raw(head)
        assert answer.startswith(b"HTTP/1.1 408")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == "malformed"

    def test_a_request_that_takes_long_to_answer_is_not_cut(
        self, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(patience, "HEAD_S", 0.2)
        served = start()
        assert served.ask("PUT", "/v1/runs/r", b"{}")[0] == 200

        async def slow(run: object) -> None:
            await asyncio.sleep(1.0)

        served.service.past.recall = slow
        assert served.get("/v1/runs/r")[0] == 200


class TestEndless:
    def test_a_head_without_end_is_answered_431_and_cut(self, start: Start) -> None:
        served = start()
        with served.connect() as sock:
            sent = 0
            sock.sendall(ENDLESS)
            with suppress(ConnectionError):
                while sent < 50 * 2**20:
                    sock.sendall(b"x-%d: " % sent + b"y" * 8192 + b"\r\n")
                    sent += 8200
            assert sent < 20 * 2**20  # what the two kernels hold, and no more
        assert served.get("/healthz")[0] == 200

    @pytest.mark.parametrize(("most", "said"), [(60_000, 200), (66_000, 431), (100_000, 431)])
    @pytest.mark.parametrize("piece", [5_000, 10**6])
    def test_a_head_is_measured_alike_however_it_arrives(
        self, start: Start, most: int, said: int, piece: int
    ) -> None:
        head = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx: "
        head += b"y" * (most - len(head) - 4) + b"\r\n\r\n"
        with start().connect() as sock:
            with suppress(ConnectionError):
                for at in range(0, most, piece):
                    sock.sendall(head[at : at + piece])
                    time.sleep(0.005)
            assert read_all(sock).startswith(b"HTTP/1.1 %d " % said)

    def test_the_answer_has_the_one_shape(self, start: Start) -> None:
        answer = start().raw(ENDLESS + b"x: " + b"y" * 70_000)
        assert answer.startswith(b"HTTP/1.1 431 ")
        said = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert said == {
            "code": "malformed",
            "detail": "a request's head may hold 65536 bytes",
        }

    @pytest.mark.parametrize(
        "data",
        [
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
            b"\x00" * 200,
            b"GET\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"POST /v1/runs HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
            b"POST /v1/runs HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
        ],
    )
    def test_what_is_no_http_is_refused_in_the_same_shape(self, start: Start, data: bytes) -> None:
        served = start()
        answer = served.raw(data)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == "malformed"
        assert served.get("/healthz")[0] == 200

    def test_a_thousand_pipelined_requests_are_answered_in_turn(self, start: Start) -> None:
        served = start()
        with served.connect() as sock:
            sock.sendall((ENDLESS + b"\r\n") * 1000)
            sock.settimeout(20)
            answers = b""
            while answers.count(b"HTTP/1.1 ") < 1000:
                more = sock.recv(2**20)
                assert more
                answers += more


class TestIdle:
    @pytest.mark.slow
    def test_a_thousand_idle_connections_delay_nobody_and_are_gone_after_a_while(
        self, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < 3000:
            if hard != resource.RLIM_INFINITY and hard < 3000:
                pytest.skip("this machine allows too few open files")
            resource.setrlimit(resource.RLIMIT_NOFILE, (3000, hard))
        monkeypatch.setattr(patience, "HEAD_S", 12.0)
        served = start()
        assert served.get("/v1/runs")[0] == 200
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with ExitStack() as stack:
            idle = [stack.enter_context(served.connect()) for _ in range(1000)]
            for at, sock in enumerate(idle):
                sock.sendall((b"", b"G", ENDLESS)[at % 3])
            connections = served.server.server_state.connections
            for _ in range(200):
                if len(connections) >= 1000:
                    break
                time.sleep(0.02)
            assert len(connections) >= 1000
            assert served.get("/v1/runs")[0] == 200
            client = Client(f"http://127.0.0.1:{served.port}", token="")
            client.ask("PUT", "/v1/runs/r", b"{}", deadline_s=20.0)
            for step in range(50):
                said = json.dumps({"step": step, "loss": 2.0, "grad_norm": 1.0}).encode()
                assert client.ask("POST", "/v1/runs/r/steps", said, deadline_s=20.0)[0] == 200
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            assert grown < 100 * 1024
            assert all(map(closed, idle))
            assert len(connections) <= 1  # the client's own
            client.close()

    def test_more_connections_than_there_is_room_for_are_not_taken(
        self, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(patience, "MOST_CONNECTIONS", 3)
        served = start()
        with ExitStack() as stack:
            for _ in range(3):
                sock = stack.enter_context(served.connect())
                sock.sendall(ENDLESS + b"\r\n")
                assert read_all(sock).startswith(b"HTTP/1.1 200")
            assert closed(stack.enter_context(served.connect()))
        for _ in range(100):
            with suppress(Exception):
                if served.get("/healthz")[0] == 200:
                    return
            time.sleep(0.05)
        pytest.fail("it takes nobody any more")


TRICKS = (
    "../../etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "%2e%2e%2f%2e%2e%2fetc",
    "..",
    ".",
    "%2e",
    "r%00",
    "r%0d%0aset-cookie:x",
    "r%2f..%2f..",
    "r/../../x",
    "//etc",
    "r%5c..%5c..",
    "%ff%fe",
    "%c3%28",
    "r" * 129,
    "-r",
    "r%20s",
    "%3Cscript%3E",
    "r%3bx",
    "%E2%80%AE",
)
PLACES = (
    ("PUT", ""),
    ("GET", ""),
    ("POST", "/steps"),
    ("POST", "/close"),
    ("POST", "/commands"),
    ("GET", "/series"),
    ("GET", "/layers"),
    ("GET", "/incidents"),
    ("GET", "/decisions"),
)


def test_a_run_id_full_of_tricks_makes_no_file_and_reads_none(start: Start, tmp_path: Path) -> None:
    data = tmp_path / "deep" / "down" / "data"
    data.mkdir(parents=True)
    (tmp_path / "deep" / "secret").write_text("root:secret")
    served = start(data_dir=data)
    before = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*"))
    for trick in TRICKS:
        for method, what in PLACES:
            body = b"{}" if method != "GET" else b""
            head = f"{method} /v1/runs/{trick}{what} HTTP/1.1\r\nhost: localhost\r\n".encode()
            head += b"content-type: application/json\r\nconnection: close\r\n"
            answer = served.raw(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            status = int(answer.split()[1])
            assert 400 <= status < 500, (trick, method, what, answer)
            assert b"root:" not in answer
            assert b"set-cookie" not in answer.partition(b"\r\n\r\n")[0].lower()
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"]
    after = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*"))
    assert [p for p in after if p not in before and p.name != "probe"] == []
    assert served.service.runs.runs == {}


def test_no_token_reaches_a_log_an_answer_or_the_record(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "control").write_text(f"ann {CONTROL}")
    (tmp_path / "read").write_text(READ)
    files = ((Role.CONTROL, tmp_path / "control"), (Role.READ, tmp_path / "read"))
    secrets = (CONTROL, READ, "wrong-but-a-secret")
    answers, order = b"", "content-length: 1\r\ncontent-type: application/json\r\n"
    with caplog.at_level(logging.DEBUG):
        served = start(token_files=files, data_dir=tmp_path / "data")
        for token in secrets:
            for head in (
                f"GET /v1/runs HTTP/1.1\r\nauthorization: Bearer {token}\r\n",
                f"GET /v1/nothing HTTP/1.1\r\nauthorization: Bearer {token}\r\n",
                f"DELETE /v1/runs HTTP/1.1\r\nauthorization: bearer {token}\r\n",
                f"GET /v1/runs/x/series?from={token[:3]} HTTP/1.1\r\nauthorization: {token}\r\n",
                f"POST /v1/runs/x/commands HTTP/1.1\r\n{order}authorization: Bearer {token}\r\n",
                f"BROKEN\r\nauthorization: Bearer {token}\r\n",
            ):
                answers += served.raw(head.encode() + b"host: localhost\r\n\r\n{")
        asyncio.run(asyncio.sleep(0.1))
        served.close()
    kept = b"".join(p.read_bytes() for p in (tmp_path / "data").rglob("*") if p.is_file())
    for secret in secrets:
        assert secret not in caplog.text
        assert secret.encode() not in answers
        assert secret.encode() not in kept
    assert b"HTTP/1.1 401" in answers

"""What people see and do from a terminal: runs, incidents, orders, and errors with a way out."""

from __future__ import annotations

import http.client
import http.server
import io
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from sentinel.cli import look, remote, words
from sentinel.cli import main as cli
from sentinel.client import Client
from sentinel.sidecar.app import create_app
from sentinel.sidecar.security import Role
from sentinel.sidecar.serve import bind_uds
from sentinel.sidecar.settings import Settings

CONTROL, READ = "control-0123456789", "reader-0123456789"


class JsonTrainer:
    """A trainer in another language: it posts JSON and does what it is told."""

    def __init__(self, url: str, run: str) -> None:
        self.client, self.run, self.at = Client(url, token=""), run, 0
        self._done: dict[str, Any] = {}
        self.send("PUT", "", {"layers": ["embed", "block\x1b[31m.0"]})

    def send(self, method: str, what: str, value: Any) -> Any:
        body = json.dumps(value).encode()
        status, answer = self.client.ask(
            method, f"/v1/runs/{self.run}{what}", body, deadline_s=10.0
        )
        assert status == 200, answer
        return json.loads(answer)

    def step(self, loss: Any = 2.0, norm: Any = 1.0, events: Any = ()) -> str:
        seen = {"step": self.at, "loss": loss, "grad_norm": norm, "lr": 1e-3}
        body = {"observation": seen, "events": list(events), **self._done}
        decision = self.send("POST", "/steps", body)["decision"]
        action = str(decision["action"])
        executed = {"0": "proceed", "1": "skip_step", "2": "rollback", "3": "halt"}.get(
            action, action
        )
        self._done = {
            "outcome": {
                "step": self.at,
                "executed": executed,
                "applied": executed == "proceed",
            }
        }
        self.at += 1
        return executed


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """(the socket's URL, the TCP URL) of a sidecar in this process, with tokens."""
    folder = tmp_path_factory.mktemp("sidecar")
    files = []
    for role, text in ((Role.CONTROL, f"ann {CONTROL}"), (Role.READ, READ)):
        (folder / role.value).write_text(text)
        files.append((role, folder / role.value))
    settings = Settings(token_files=tuple(files))
    app = create_app(settings, clock=time.time, timer=time.perf_counter)
    uds = bind_uds(str(folder / "s.sock"))
    tcp = socket.create_server(("127.0.0.1", 0))
    uds.listen(64)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
    thread = threading.Thread(target=server.run, args=([uds, tcp],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield f"unix://{folder / 's.sock'}", f"http://127.0.0.1:{tcp.getsockname()[1]}"
    server.should_exit = True
    thread.join(20)
    uds.close()
    tcp.close()


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: str) -> tuple[int, str, str]:
        status = cli.main(list(arguments))
        said = capsys.readouterr()
        return status, said.out, said.err

    return call


@pytest.fixture(scope="module")
def trainer(served: tuple[str, str]) -> Iterator[JsonTrainer]:
    """A run with a healthy snapshot and one skipped step."""
    found = JsonTrainer(served[0], "r7")
    found.step(events=[{"kind": "snapshot_taken", "step": 0}])
    for _ in range(3):
        found.step()
    assert found.step(norm="nan") == "skip_step"
    found.step()
    yield found
    found.client.close()


@pytest.mark.parametrize("broken", [False, True])
def test_no_runs_is_said_and_whether_that_can_be_believed(
    say: Any, tmp_path: Path, broken: bool
) -> None:
    if broken:
        (tmp_path / "sentinel.db").write_bytes(b"no database" * 1000)
    app = create_app(Settings(data_dir=tmp_path), clock=time.time, timer=time.perf_counter)
    with bind_uds(str(tmp_path / "e.sock")) as sock:
        sock.listen(8)
        server = uvicorn.Server(uvicorn.Config(app, log_config=None))
        thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.02)
        here = ("--sidecar", f"unix://{tmp_path / 'e.sock'}")
        status, out, err = say("runs", *here)
        _, audit, _ = say("audit", *here)
        server.should_exit = True
        thread.join(20)
    assert (status, err) == (0, "")
    assert out.endswith("no runs\n")
    assert ("runs may be missing: " in out and "is not a database" in out) == broken
    assert ("the database fails" in audit) == broken


class TestLooking:
    def test_runs_are_a_table(self, served: Any, trainer: JsonTrainer, say: Any) -> None:
        status, out, _ = say("runs", "--sidecar", served[0])
        assert status == 0
        head, row = out.splitlines()[:2]
        assert head.split() == [
            "run",
            "state",
            "protection",
            "step",
            "loss",
            "norm",
            "last",
            "report",
        ]
        assert row.split()[:4] == ["r7", "running", "warming", str(trainer.at - 1)]

    def test_status_of_a_run_is_for_people_and_json_only_when_asked(
        self, served: Any, trainer: JsonTrainer, say: Any
    ) -> None:
        status, out, _ = say("status", "r7", "--sidecar", served[0])
        assert status == 0
        assert out.startswith("run r7: running, protection ")
        assert "{" not in out
        for part in ("skipped         1   (nonfinite_grad 1)", "snapshots       0", "loss "):
            assert part in out
        status, out, _ = say("status", "r7", "--json", "--sidecar", served[0])
        assert json.loads(out)["run"] == "r7"

    def test_an_incident_says_what_was_done_and_why(
        self, served: Any, trainer: JsonTrainer, say: Any
    ) -> None:
        status, out, _ = say("incidents", "--all", "--sidecar", served[0])
        assert status == 0
        assert out.startswith("r7:1  ")
        assert "skipped step 4: the gradients were NaN or inf" in out
        found = json.loads(say("incidents", "r7", "--all", "--json", "--sidecar", served[0])[1])
        assert found["incidents"][0]["run"] == "r7"

    def test_an_unknown_run_is_answered_with_the_known_ones(
        self, served: Any, trainer: JsonTrainer, say: Any
    ) -> None:
        status, out, err = say("status", "r8", "--sidecar", served[0])
        assert (status, out) == (1, "")
        assert "no run 'r8'" in err
        assert "it knows r7" in err

    def test_no_escape_sequence_reaches_the_terminal(self) -> None:
        assert words.text("a\x1b[31mb\u202e") == "a\\x1b[31mb\\x202e"

    def test_absent_is_a_dash_and_nan_is_nan(self) -> None:
        assert [words.number(v) for v in (None, "nan", 0.0, float("-inf"), 12345)] == [
            "-",
            "NaN",
            "0",
            "-inf",
            "12,345",
        ]


class TestTokens:
    def test_without_a_token_the_way_in_is_told(
        self, served: Any, trainer: JsonTrainer, say: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("SENTINEL_TOKEN", raising=False)
        status, _, err = say("runs", "--sidecar", served[1])
        assert status == 1
        assert "set SENTINEL_TOKEN or name a file with --token-file" in err

    def test_a_token_of_the_wrong_role_is_told_the_right_one(
        self, served: Any, trainer: JsonTrainer, say: Any, tmp_path: Path
    ) -> None:
        (tmp_path / "t").write_text(f"# mine\nreader {READ}\n")
        here = ("--sidecar", served[1], "--token-file", str(tmp_path / "t"))
        assert say("runs", *here)[0] == 0
        status, _, err = say("command", "r7", "pause", *here)
        assert status == 1
        assert "this needs one of role control" in err
        assert READ not in err

    def test_a_token_file_that_is_not_there_is_named(self, served: Any, say: Any) -> None:
        status, _, err = say("runs", "--sidecar", served[1], "--token-file", "/none")
        assert status == 1
        assert "token file /none cannot be read" in err

    @pytest.mark.parametrize("text", ["control", "admin=/x", "control="])
    def test_a_role_that_is_none_is_bad_usage(
        self, text: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as caught:
            cli.main(["serve", "--token-file", text])
        assert caught.value.code == 2
        assert "must be ROLE=FILE" in capsys.readouterr().err


class TestOrders:
    def test_an_order_is_waited_for(self, served: Any, trainer: JsonTrainer, say: Any) -> None:
        done = threading.Event()

        def train() -> None:
            while not done.is_set():
                trainer.step()
                time.sleep(0.05)

        thread = threading.Thread(target=train)
        thread.start()
        try:
            status, out, _ = say(
                "command", "r7", "pause", "--by", "ann", "--wait", "30s", "--sidecar", served[0]
            )
        finally:
            done.set()
            thread.join()
        assert status == 0
        assert out.startswith("pause automation: obeyed at step ")
        trainer.step()  # a report tells what was done at the step before
        status, out, _ = say("status", "r7", "--sidecar", served[0])
        assert "! a person paused automation: nothing is done; sentinel command r7 resume" in out
        assert "pause automation: obeyed at step" in out
        assert "by ann" in out

    def test_one_that_nobody_hears_yet_says_so(
        self, served: Any, trainer: JsonTrainer, say: Any
    ) -> None:
        here = ("--sidecar", served[0])
        status, out, _ = say("command", "r7", "resume", "--wait", "1s", "--id", "x", *here)
        assert status == 3
        assert "waiting for the trainer; it is told with every step until it expires" in out
        status, out, _ = say("command", "r7", "resume", "--wait", "0", "--id", "x", "--json", *here)
        assert (status, json.loads(out)["state"]) == (0, "pending")
        trainer.step()
        status, out, _ = say("command", "r7", "resume", "--id", "x", *here)
        assert (status, out.startswith("resume automation: obeyed at step")) == (0, True)

    def test_a_rollback_to_what_is_none_names_the_snapshots(
        self, served: Any, trainer: JsonTrainer, say: Any
    ) -> None:
        status, _, err = say(
            "command", "r7", "rollback", "--to", "3", "--yes", "--sidecar", served[0]
        )
        assert status == 1
        assert "must be the step of a healthy snapshot (0), got 3" in err

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("scale-lr",), "scale-lr needs a factor above 0 and at most 10"),
            (("pause", "0.5"), "pause takes no number, got 0.5"),
            (("rollback", "40"), "a snapshot is named with --to STEP"),
            (("pause", "--to", "4"), "--to belongs to rollback, not to pause"),
        ],
    )
    def test_what_does_not_fit_is_told_before_anything_is_sent(
        self, say: Any, arguments: tuple[str, ...], said: str
    ) -> None:
        status, out, err = say("command", "r7", *arguments, "--sidecar", "unix:///nowhere")
        assert (status, out) == (2, "")
        assert said in err

    def test_a_halt_is_asked_about_in_a_terminal_and_only_a_yes_sends_it(
        self,
        served: Any,
        trainer: JsonTrainer,
        say: Any,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        for typed in ("\n", "n\n", "halt\n", ""):
            monkeypatch.setattr(sys, "stdin", Terminal(typed))
            status, out, _ = say("command", "r7", "halt", "--id", "h", "--sidecar", served[0])
            assert (status, out.endswith("Really halt run r7? [y/N] not sent\n")) == (1, True)
        run = json.loads(say("status", "r7", "--json", "--sidecar", served[0])[1])
        assert "h" not in [o["command"]["id"] for o in run["orders"]]

    def test_an_order_for_an_unknown_run_names_the_known_ones(
        self, served: Any, trainer: JsonTrainer, say: Any
    ) -> None:
        status, _, err = say("command", "r8", "pause", "--sidecar", served[0])
        assert status == 1
        assert "it knows r7" in err

    def test_an_incident_is_acknowledged_and_silenced(
        self, served: Any, trainer: JsonTrainer, say: Any
    ) -> None:
        here = ("--by", "ann", "--sidecar", served[0])
        status, out, _ = say("ack", "r7:1", *here)
        assert (status, out.startswith("r7:1: noted; it ")) == (0, True)
        status, out, _ = say("silence", "r7:1", "--for", "30m", *here)
        assert "nobody is paged" not in out
        assert (
            "Its alerts go on; to keep them from paging: amtool silence add 'run=\"r7\"' "
            "'alertname=~\"Sentinel(Rollback|RollbackFailed|NonFinite)\"' --duration=30m"
        ) in out
        assert status == 0
        status, out, _ = say("incidents", "r7", "--all", "--sidecar", served[0])
        assert "acknowledged by ann, silenced" in out.splitlines()[0]
        status, _, err = say("silence", "r7:99", *here)
        assert status == 1
        assert "there is no incident 'r7:99' here" in err
        status, out, _ = say("audit", "r7", "--sidecar", served[0])
        assert status == 0
        assert [line.split()[4] for line in out.splitlines()[-2:]] == ["ack", "silence"]

    @pytest.mark.parametrize("text", ["2 hours", "-1", "nan", "inf", ""])
    def test_a_time_that_is_none_is_bad_usage(
        self, text: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            cli.main(["silence", "r7:1", f"--for={text}"])
        assert "must be a time like 90s, 10m or 2h" in capsys.readouterr().err


def test_an_ended_run_whose_step_is_not_known_is_not_said_to_be_about_to_start() -> None:
    run = {
        "run": "r7",
        "state": "finished",
        "step": None,
        "last_report_s_ago": 600.0,
        "mode": "act",
    }
    run |= {"decides": True, "reason": ""}
    assert look._last_report(run) == "10 min ago"
    assert look._alarms(run, {}, False) == []
    run["state"] = "running"
    assert look._last_report(run) == "none yet"
    assert "not reported a step yet" in look._alarms(run, {}, False)[0]


@pytest.mark.parametrize(
    ("open_", "advice", "said"),
    [
        (3, 1, "2 open incidents; 1 open advice"),
        (2, 2, "2 open advice"),
        (1, 0, "1 open incident"),
        (1, None, "1 open incident"),  # an older sidecar does not tell them apart
        (None, None, ""),
    ],
)
def test_advice_is_no_open_incident(open_: int | None, advice: int | None, said: str) -> None:
    run = {"open_incidents": open_, "open_advice": advice, "mode": "act", "decides": True}
    assert look._remarks(run) == said


def test_an_incident_says_where_its_rollback_went_to(served: tuple[str, str], say: Any) -> None:
    trainer = JsonTrainer(served[0], "back")
    trainer.step(events=[{"kind": "snapshot_taken", "step": 0}])
    for _ in range(40):
        trainer.step()
    say("command", "back", "rollback", "--yes", "--wait", "0", "--sidecar", served[0])
    assert trainer.step() == "rollback"
    trainer.step()
    _, out, _ = say("incidents", "back", "--all", "--sidecar", served[0])
    assert "rolled back at step 41 to step 0: a person ordered it" in out
    trainer.client.close()


def back_at(served: tuple[str, str], name: str, say: Any, *more: str) -> tuple[JsonTrainer, str]:
    """A run with healthy snapshots 0 and 20 that a person sends back: it, and the order's id."""
    trainer = JsonTrainer(served[0], name)
    trainer.step(events=[{"kind": "snapshot_taken", "step": 0}])
    for step in range(1, 60):
        events = [{"kind": "snapshot_taken", "step": 20}] if step == 20 else ()
        trainer.step(events=events)
    order = ("command", name, "rollback", "--yes", "--wait", "0", "--id", "o", *more)
    say(*order, "--sidecar", served[0])
    assert trainer.step() == "rollback"
    return trainer, "o"


def decided(url: str, run: str) -> list[tuple[str, Any]]:
    client = Client(url, token="")
    done = client.ask("GET", f"/v1/runs/{run}/decisions", b"", deadline_s=10.0)[1]
    client.close()
    return [(d["action"], d["target"]) for d in json.loads(done)["decisions"]]


def test_a_rollback_that_went_to_an_older_snapshot_says_to_which(
    served: tuple[str, str], say: Any
) -> None:
    trainer, order = back_at(served, "older", say)
    again = ("command", "older", "rollback", "--yes", "--id", order, "--sidecar", served[0])
    status, out, _ = say(*again, "--wait", "0.1")
    assert (status, out.strip()) == (
        3,
        "roll back: taken, the snapshot is not restored yet at step 60",
    )
    trainer.step(events=[{"kind": "restored", "step": 61, "target": 0}])
    status, out, _ = say(*again)
    assert (status, out.strip()) == (
        0,
        "roll back: obeyed at step 60, to step 0: the snapshot of step 20 could not be used",
    )
    _, out, _ = say("incidents", "older", "--all", "--sidecar", served[0])
    assert "rolled back at step 60 to step 0: a person ordered it" in out
    assert decided(served[0], "older") == [("rollback", 0)]
    trainer.client.close()


def test_a_rollback_that_restored_nothing_has_failed_everywhere(
    served: tuple[str, str], say: Any
) -> None:
    trainer, order = back_at(served, "fails", say, "--to", "20")
    trainer.step(events=[{"kind": "restore_failed", "step": 61, "target": 20, "reason": "torn"}])
    again = ("command", "fails", "rollback", "--to", "20", "--yes", "--id", order)
    status, out, _ = say(*again, "--sidecar", served[0])
    assert status == 1
    assert out.startswith("roll back: FAILED at step 60: nothing was restored: torn;")
    _, out, _ = say("incidents", "fails", "--all", "--sidecar", served[0])
    assert "tried to roll back and restored nothing at step 60: a person ordered it" in out
    assert "rolled back" not in out
    _, out, _ = say("status", "fails", "--sidecar", served[0])
    assert "rolled back     none; 1 could not be done   (command failed 1)" in out
    assert "roll back to step 20: FAILED at step 60: nothing was restored: torn" in out
    assert decided(served[0], "fails") == [("rollback_failed", None)]
    trainer.client.close()


def test_two_orders_to_skip_skip_two_steps_and_a_halt_goes_before_a_rollback(
    served: tuple[str, str], say: Any
) -> None:
    trainer = JsonTrainer(served[0], "several")
    trainer.step(events=[{"kind": "snapshot_taken", "step": 0}])
    for key in ("1", "2"):
        say("command", "several", "skip", "--id", key, "--wait", "0", "--sidecar", served[0])
    assert [trainer.step() for _ in range(3)] == ["skip_step", "skip_step", "proceed"]
    _, out, _ = say("status", "several", "--sidecar", served[0])
    assert "skip the next step: obeyed at step 1, by" in out
    assert "skip the next step: obeyed at step 2, by" in out
    for what in ("rollback", "halt"):
        order = ("command", "several", what, "--yes", "--id", what, "--sidecar", served[0])
        say(*order, "--wait", "0")
    assert trainer.step() == "halt"
    status, out, _ = say("command", "several", "rollback", "--yes", "--id", "rollback", *order[-2:])
    assert (status, out.strip()) == (
        1,
        "roll back: not carried out at step 4: the run is halted at this step",
    )
    trainer.client.close()


def test_a_long_incident_is_shown_with_its_beginning_and_its_end() -> None:
    actions = [[n, "skip_step" if n % 2 else "rollback", "r"] for n in range(16)]
    actions += [[2000, "left_out", "1985"], [2157, "rollback_failed", "r"]]
    done = words.deeds(actions)
    assert done[16:] == [
        "... 1,985 more up to step 2,000, not listed",
        "tried to roll back and restored nothing at step 2,157: rule r",
    ]
    incident = {
        "number": 1,
        "severity": "critical",
        "key": "instability",
        "state": "firing",
        "opened": 0,
        "last": 2157,
        "summary": "s",
        "actions": actions,
    }
    shown = words.incident_lines(incident)[2:]
    assert shown[0].strip() == done[0]
    assert shown[1].strip() == "... 10 lines left out: --json has them"
    assert [line.strip() for line in shown[2:]] == done[-7:]


def test_many_runs_are_asked_about_only_where_something_is_open_and_a_refusal_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [{"run": f"x{n:04d}", "open_incidents": 0} for n in range(1000)]
    runs += [{"run": "bad", "open_incidents": 1}, {"run": "old", "open_incidents": None}]
    asked: list[str] = []
    left, naps = [3], []

    def ask(self: Any, method: str, path: str, body: bytes, *, deadline_s: float) -> Any:
        asked.append(path)
        if not left[0]:
            left[0] = 100
            return 429, json.dumps({"code": "too_many", "detail": "too often"}).encode()
        left[0] -= 1
        if path == "/v1/runs":
            return 200, json.dumps({"runs": runs}).encode()
        name = path.split("/")[3]
        if path.endswith("/incidents"):
            return 200, json.dumps({"incidents": []}).encode()
        one = {"number": 1, "opened": 3, "last": 3, "state": "firing", "severity": "critical"}
        one |= {"key": "instability", "summary": "s"}
        incidents = [one] if name == "bad" else []
        found = {"run": name, "layers": [], "ledger": {"next_incident": 1, "incidents": incidents}}
        return 200, json.dumps(found).encode()

    monkeypatch.setattr(Client, "ask", ask)
    monkeypatch.setattr(remote.time, "sleep", naps.append)
    assert cli.main(["incidents", "--sidecar", "http://127.0.0.1:1"]) == 0
    assert "bad:1  critical instability, firing" in capsys.readouterr().out
    assert naps == [remote.AGAIN_S]
    assert len(asked) == 1 + 2 * 2 + 1


@pytest.fixture
def proxied(served: tuple[str, str]) -> Iterator[str]:
    """The sidecar's URL behind a proxy that has it under a path of its own."""
    host, port = served[1].removeprefix("http://").split(":")

    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith("/ml/sentinel/"):
                self.send_error(404)
                return
            behind = http.client.HTTPConnection(host, int(port), timeout=10)
            size = int(self.headers.get("content-length") or 0)
            body = self.rfile.read(size) if size else None
            path = self.path.removeprefix("/ml/sentinel")
            behind.request(self.command, path, body, dict(self.headers))
            got = behind.getresponse()
            data = got.read()
            self.send_response(got.status)
            for name, value in got.getheaders():
                if name in ("content-type", "sentinel-seal"):
                    self.send_header(name, value)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            behind.close()

        do_PUT = do_POST = do_GET

        def log_message(self, *_: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/ml/sentinel"
        server.shutdown()
        thread.join(10)


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_sidecar_under_a_path_of_a_proxy_is_reached_by_that_path(
    proxied: str, say: Any, trainer: JsonTrainer, monkeypatch: pytest.MonkeyPatch, slash: str
) -> None:
    monkeypatch.setenv("SENTINEL_TOKEN", CONTROL)
    status, out, err = say("status", "r7", "--sidecar", proxied + slash)
    assert (status, out.splitlines()[0].startswith("run r7: running"), err) == (0, True, "")
    at_root = proxied.removesuffix("/ml/sentinel")
    assert say("status", "r7", "--sidecar", at_root)[0] == 1

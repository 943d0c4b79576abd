"""The command at 3 a.m.: every verb with the wrong input, no sidecar, a narrow terminal."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sentinel.cli import failing, remote, words
from sentinel.cli import main as cli
from sentinel.sidecar.openapi import CODES
from tests.cli.test_remote import CONTROL, JsonTrainer, say, served

__all__ = ["say", "served"]  # fixtures

NOWHERE = "http://127.0.0.1:1"
REMOTE: tuple[tuple[str, ...], ...] = (
    ("runs",),
    ("status",),
    ("status", "r7"),
    ("incidents",),
    ("incidents", "r7"),
    ("audit",),
    ("audit", "r7"),
    ("command", "r7", "pause"),
    ("command", "r7", "rollback", "--to", "3"),
    ("ack", "r7:1"),
    ("silence", "r7:1", "--for", "1h"),
)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine under load is no sidecar that does not answer."""
    monkeypatch.setattr(remote, "DEADLINE_S", 60.0)


def run(*arguments: str) -> int:
    """The exit status, as a shell would see it."""
    try:
        return cli.main(list(arguments))
    except SystemExit as error:
        return int(error.code or 0)


def refusal(out: str) -> dict[str, str]:
    """The one JSON object that an error is, with --json."""
    said: dict[str, str] = json.loads(out)
    assert set(said) == {"code", "detail"}
    assert said["code"] in {*CODES, *failing.CODES}
    return said


@pytest.mark.parametrize("verb", REMOTE, ids=" ".join)
class TestNoSidecar:
    def test_nobody_there_is_one_line_with_a_way_out_and_json_when_asked(
        self, verb: tuple[str, ...], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(*verb, "--sidecar", NOWHERE) == 1
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("sentinel: no sidecar answers at http://127.0.0.1:1")
        assert said.err.count("\n") == 1
        assert "start one (sentinel serve) or name another" in said.err
        assert run(*verb, "--sidecar", NOWHERE, "--json") == 1
        assert refusal(capsys.readouterr().out)["code"] == "unreachable"

    def test_a_dead_socket_is_nobody_either(
        self, verb: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(tmp_path / "s"))
        assert run(*verb, "--sidecar", f"unix://{tmp_path / 's'}", "--json") == 1
        said = capsys.readouterr()
        assert "Connection refused" in said.err
        assert refusal(said.out)["code"] == "unreachable"

    def test_a_wrong_token_is_told_the_right_place(
        self, verb: tuple[str, ...], served: Any, tmp_path: Path, say: Any
    ) -> None:
        wrong = tmp_path / "token"
        wrong.write_text("not-the-right-one-at-all")
        status, out, err = say(*verb, "--sidecar", served[1], "--token-file", str(wrong), "--json")
        assert status == 1
        assert refusal(out)["code"] == "unauthorized"
        assert "SENTINEL_TOKEN" in err
        assert "not-the-right-one" not in out + err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("statsu",), "did you mean status?"),
        (("command", "r7", "puase"), "did you mean pause?"),
        ((), "the following arguments are required: COMMAND"),
        (("command", "r7"), "arguments are required"),
        (("command", "r7", "scale-lr"), "scale-lr needs a factor"),
        (("ack", "r7"), "an incident is named RUN:NUMBER, such as r7:1"),
        (("silence", "r7:x"), "an incident is named RUN:NUMBER"),
        (("silence", "r7:1", "--for", "soon"), "must be a time like 90s"),
        (("audit", "--limit", "0"), "must be a number from 1 to 1000, got '0'"),
        (("run", "--port", "99999", "--", "true"), "must be a number from 0 to 65535, got '99999'"),
        (("run", "--"), "run needs a command"),
        (("serve", "--port", "x"), "must be a number from 0 to 65535"),
        (("replay", "r7", "--policy", "nope"), "policy must be one of default, observe"),
        (("serve", "--policy", "nope"), "--policy: policy must be one of default, observe"),
        (("serve", "--lost-after", "0"), "--lost-after: must be above 0, got '0'"),
        (("serve", "--lost-after", "inf"), "--lost-after: must be above 0, got 'inf'"),
        (("serve", "--retention", "0"), "--retention: must be above 0, got '0'"),
        (
            ("serve", "--audit-retention", "3"),
            "--audit-retention must be at least --retention",
        ),
        (("serve", "--verify-every", "0.01"), "--verify-every: must be 0, or at least 0.0167"),
        (("serve", "--verify-rate", "0"), "--verify-rate: must be at least 1, got '0'"),
        (
            ("serve", "--run-quota", "0.001"),
            "--run-quota: must be a number of GiB, at least",
        ),
        (("serve", "--database", "foo"), "--database: must be postgresql://... or sqlite:///PATH"),
        (("serve", "--database", "mysql://u:secret@h/d"), "got mysql://..."),
        (("serve", "--grafana-every", "-1"), "--grafana-every must be 0 or at least 0.1"),
        (("runs", "--sidecar", "ftp://x"), "--sidecar must be http://host:port or unix:///"),
    ],
)
def test_bad_usage_is_2_and_json_when_asked(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert said in told.err
    assert "secret" not in told.err
    at = list(arguments)
    at[1:1] = ["--json"] if at else []
    if at and at[0] in ("run", "serve"):
        return  # they print no JSON: the first is another command, the second goes on
    assert run(*(at or ["--json"])) == 2
    found = refusal(capsys.readouterr().out)
    assert found["code"] == "usage"


@pytest.mark.parametrize("verb", ["replay", "snapshots", "resume"])
def test_a_run_that_is_not_on_this_disk_names_those_that_are(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("r7", "r8"):
        (tmp_path / name).mkdir()
    assert run(verb, "r9", "--run-dir", str(tmp_path), "--json") == 2
    said = capsys.readouterr()
    assert f"there is no run 'r9'; {tmp_path} holds r7, r8" in said.err
    assert refusal(said.out)["code"] == "not_found"
    assert run(verb, "r9", "--run-dir", str(tmp_path / "none")) == 2
    assert "cannot be read (No such file or directory)" in capsys.readouterr().err
    assert run(verb, str(tmp_path / "none" / "r9")) == 2
    assert "there is no run's directory" in capsys.readouterr().err


def test_a_run_that_is_not_halted_has_nothing_to_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("resume", str(tmp_path), "--json") == 2
    assert "is not halted" in refusal(capsys.readouterr().out)["detail"]


def test_resume_says_as_json_why_it_was_halted_and_what_it_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "HALTED").write_text(json.dumps({"step": 41, "reason": "the budget is spent"}))
    assert run("resume", str(tmp_path), "--json", "--show") == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {
        "run": tmp_path.name,
        "step": 41,
        "reason": "the budget is spent",
        "cleared": None,
    }
    assert run("resume", str(tmp_path), "--json") == 0
    assert Path(json.loads(capsys.readouterr().out)["cleared"]).exists()


def test_help_says_what_the_exit_status_means(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "exit status: 0 done; 1 could not be done" in text
    assert "3 an order that was not obeyed yet" in text


def test_stale_files_of_a_checkout_are_a_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("dashboards", "build", "--root", str(tmp_path), "--check", "--json") == 1
    assert "grafana/dashboards/run.json" in json.loads(capsys.readouterr().out)["stale"]
    assert run("dashboards", "build", "--root", str(tmp_path), "--json") == 0
    assert "grafana/dashboards/run.json" in json.loads(capsys.readouterr().out)["written"]
    assert run("dashboards", "build", "--root", str(tmp_path), "--check", "--json") == 0
    assert json.loads(capsys.readouterr().out)["stale"] == []


def test_a_watched_folder_that_is_not_there_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Any] = []
    monkeypatch.setattr("sentinel.sidecar.serve.serve", lambda *a, **k: served.append(a))
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)
    folders = ("--watch", str(tmp_path), "--watch", str(tmp_path / "no"))
    assert run("serve", *folders, "--run-dir", str(tmp_path), "--run-dir", str(tmp_path / "x")) == 0
    err = capsys.readouterr().err
    assert f"--watch: {tmp_path / 'no'} is not there; its runs are shown once it is" in err
    assert f"--run-dir: {tmp_path / 'x'} is not there; snapshots in it are read again" in err
    assert err.count("--watch") == err.count("--run-dir") == 1
    assert len(served) == 1


def test_json_after_the_two_dashes_is_the_other_commands() -> None:
    assert failing.wants_json(["runs", "--json"])
    assert not failing.wants_json(["run", "--", "x", "--json"])


# ---- with a sidecar ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def several(served: tuple[str, str]) -> str:
    """Runs whose names begin alike, and one whose name is another's beginning."""
    for name in ("gpt-a", "gpt-b", "gpt", "llama-2026-11-29"):
        trainer = JsonTrainer(served[0], name)
        trainer.step()
        trainer.client.close()
    return served[0]


def test_a_rollback_that_is_due_is_said(several: str, say: Any) -> None:
    trainer = JsonTrainer(several, "due")
    trainer.step(events=[{"kind": "snapshot_taken", "step": 0}])
    for _ in range(3):
        trainer.step(loss="nan")
    assert trainer.step() == "proceed"
    trainer.client.close()
    out = say("status", "due", "--sidecar", several)[1]
    assert "! a rollback to step 0 was decided; its trainer has not done it yet" in out


def test_a_run_may_be_named_by_its_beginning_to_be_looked_at(several: str, say: Any) -> None:
    status, out, _ = say("status", "lla", "--sidecar", several)
    assert (status, out.splitlines()[0].split(":")[0]) == (0, "run llama-2026-11-29")
    assert say("incidents", "llama", "--sidecar", several)[0] == 0
    status, out, _ = say("status", "gpt", "--sidecar", several, "--json")
    assert json.loads(out)["run"] == "gpt"


def test_two_runs_that_begin_so_are_named_and_none_is_guessed(several: str, say: Any) -> None:
    for verb in (("status", "gp"), ("incidents", "gp"), ("command", "gp", "pause", "--wait", "0")):
        status, out, err = say(*verb, "--sidecar", several, "--json")
        assert status == 1
        assert refusal(out)["code"] == "unknown_run"
        assert "several runs begin with 'gp': gpt, gpt-a, gpt-b" in err


def test_an_order_wants_the_whole_name(several: str, say: Any) -> None:
    status, _, err = say("command", "llama", "halt", "--yes", "--wait", "0", "--sidecar", several)
    assert status == 1
    assert "no run 'llama'" in err
    assert "did you mean llama-2026-11-29?" in err
    orders = json.loads(say("status", "llama", "--json", "--sidecar", several)[1])["orders"]
    assert orders == []


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "..", "%2e%2e", "\x1b[31mx", "ü" * 99])
def test_a_name_full_of_tricks_is_no_run_and_reaches_no_terminal(
    several: str, say: Any, name: str
) -> None:
    for verb in (("status", name), ("command", name, "pause", "--wait", "0"), ("audit", name)):
        status, out, err = say(*verb, "--sidecar", several)
        assert (status == 0) == (verb[0] == "audit")
        assert "\x1b" not in out + err
        assert "root:" not in out


def test_warming_says_which_rule_waits_for_what(several: str, say: Any) -> None:
    out = say("status", "gpt-a", "--sidecar", several)[1]
    assert "warming: the gradient norm rule waits for 64 accepted norms, 0 so far" in out
    assert "warming: the loss rules wait for 48 finite losses, 0 so far" in out


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_a_narrow_terminal_gets_lines_that_fit(
    several: str, say: Any, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    say("command", "gpt-a", "pause", "--wait", "0", "--sidecar", several, "--by", "ann")
    for verb in (("runs",), ("status", "gpt-a"), ("incidents", "--all"), ("audit",)):
        status, out, _ = say(*verb, "--sidecar", several)
        assert status == 0
        for line in out.splitlines():  # one word alone stays whole, so that it can be copied
            assert len(line) <= columns or len(line.split()) == 1, line
    assert "gpt-a" in say("runs", "--sidecar", several)[1]


def test_a_pipe_gets_whole_rows(several: str, say: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    out = say("runs", "--sidecar", several)[1].splitlines()
    assert out[0].split()[:3] == ["run", "state", "protection"]
    assert len(out) == len({line.split()[0] for line in out})


def test_a_table_that_does_not_fit_names_each_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    text = words.table(
        ("run", "state", "step", ""), [("a" * 20, "running", "1,000", "2 open incidents")]
    )
    assert text.splitlines()[0] == "a" * 20
    assert " ".join(text.split()[1:]) == "state running, step 1,000, 2 open incidents"


def test_no_colour_and_no_control_character_is_ever_printed(
    several: str, say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    for verb in (("runs",), ("status", "gpt-a"), ("audit",), ("incidents", "--all")):
        assert "\x1b" not in say(*verb, "--sidecar", several)[1]


def test_what_is_done_to_a_lost_run_is_said_and_not_waited_for(
    several: str, say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sentinel.sidecar.runs import Runs

    real = Runs.get

    def lost(self: Runs, name: str) -> Any:
        run = real(self, name)
        if name == "gpt-b" and run.run_state == "running":
            run.run_state = "lost"
        return run

    monkeypatch.setattr(Runs, "get", lost)
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("it waited"))
    status, out, _ = say("command", "gpt-b", "pause", "--sidecar", several)
    assert status == 3
    assert "run 'gpt-b' is lost (no sign of life for" in out
    assert "it acts on this only if its trainer returns before" in out


def test_an_ended_run_takes_no_order_and_says_what_to_do(several: str, say: Any) -> None:
    trainer = JsonTrainer(several, "over")
    trainer.step()
    trainer.send("POST", "/close", {"state": "finished"})
    trainer.client.close()
    status, out, err = say("command", "over", "pause", "--sidecar", several, "--json")
    assert status == 1
    assert refusal(out)["code"] == "over"
    assert "is finished: nobody would hear it; start the run again" in err


def test_what_answers_and_is_no_sidecar_is_asked_about(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import threading

    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = server.accept()
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello")
        connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    url = f"http://127.0.0.1:{server.getsockname()[1]}"
    assert run("runs", "--sidecar", url, "--json") == 1
    thread.join()
    server.close()
    assert refusal(capsys.readouterr().out)["code"] == "not_a_sidecar"


@pytest.mark.slow
def test_a_real_shell_sees_json_and_the_status() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sentinel", "status", "--sidecar", NOWHERE, "--json"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert refusal(done.stdout)["code"] == "unreachable"
    assert CONTROL not in done.stderr

"""Without a sidecar a run still tells: a .prom file, and one webhook that hears what happened."""

from __future__ import annotations

import http.server
import json
import logging
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sentinel_hooks
from sentinel.core.errors import ConfigError
from sentinel.core.policy import Policy
from sentinel_hooks import outlets

pytestmark = pytest.mark.torch


BAD = (4, 5, 6)  # three losses in a row that are not finite: a rollback


class Receiver:
    """A real server that keeps what it is posted; `answers` are its next statuses."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.answers: list[int] = []
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                status = receiver.answers.pop(0) if receiver.answers else 200
                if status == 200:
                    receiver.got.append({"path": self.path, **json.loads(body)})
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/hook?key=s3cret"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


def train(tmp_path: Path, steps: int = 8, bad: tuple[int, ...] = (), **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = sentinel_hooks.attach(
        model=model, optimizer=optimizer, sidecar=None, run_dir=tmp_path, run_id="a run", **options
    )
    for t in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(3, 4)).square().mean()
        (loss * float("nan") if t in bad else loss).backward()
        optimizer.step()
    session.detach()
    return session


def test_a_prom_file_tells_the_run_and_ends_as_finished(tmp_path: Path) -> None:
    train(tmp_path, bad=BAD)
    text = (tmp_path / "sentinel-a%20run.prom").read_text()
    assert 'sentinel_steps_total{run="a run"} 8.0\n' in text
    assert 'sentinel_run_state{run="a run",state="finished"} 1.0\n' in text
    assert 'sentinel_nonfinite_steps_total{run="a run",signal="loss"} 3.0\n' in text
    assert not list(tmp_path.glob("*.new"))
    promtool = shutil.which("promtool")
    if promtool is not None:
        checked = subprocess.run(
            [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stderr


def test_with_a_sidecar_or_without_a_record_there_is_none(tmp_path: Path) -> None:
    train(tmp_path, record=False)
    assert not list(tmp_path.glob("*.prom"))


def test_files_of_runs_that_ended_long_ago_are_taken_away(tmp_path: Path) -> None:
    import os

    old, new, users = (tmp_path / n for n in ("sentinel-x.prom", "sentinel-y.prom", "mine.prom"))
    for path in (old, new, users):
        path.write_text("")
    for path in (old, users):
        os.utime(path, (1, 1))
    train(tmp_path)
    assert (old.exists(), new.exists(), users.exists()) == (False, True, True)


def test_the_webhook_hears_of_an_incident_once_in_words(receiver: Receiver, tmp_path: Path) -> None:
    train(tmp_path, bad=BAD, webhook=receiver.url)
    told = [t for t in receiver.got if t["event"] == "incident"]
    assert len(told) == 1, receiver.got
    assert told[0]["path"] == "/hook?key=s3cret"
    assert (told[0]["run"], told[0]["severity"], told[0]["schema"]) == ("a run", "critical", 1)
    assert "the loss was not finite" in told[0]["text"]
    assert [t["event"] for t in receiver.got if t["event"] != "incident"] == ["rollback"]


def test_the_step_that_is_told_is_the_one_that_the_record_has(
    receiver: Receiver, tmp_path: Path
) -> None:
    session = train(tmp_path, bad=BAD, webhook=receiver.url)
    deeds = [deed for incident in session.state.ledger.incidents for deed in incident.actions]
    back = next(step for step, what, _ in deeds if what == "rollback")
    told = {t["event"]: t["step"] for t in receiver.got}
    assert told == {"incident": back, "rollback": back}


def test_rollbacks_with_nowhere_to_go_and_a_spent_budget_are_told_within_one_incident(
    receiver: Receiver, tmp_path: Path
) -> None:
    policy = Policy.parse(
        "[rollback]\nbudget = 2\nwindow = 1000\n[rules.nonfinite_loss]\ncooldown = 2\n"
    )
    session = train(
        tmp_path,
        steps=40,
        bad=tuple(range(4, 40)),
        webhook=receiver.url,
        policy=policy,
        snapshots=sentinel_hooks.Snapshots(ram=False),
    )
    assert session.state.ledger.stopped
    events = [t["event"] for t in receiver.got]
    assert events == ["incident", "rollback", "rollback_failed", "off"]
    assert "no usable snapshot" in receiver.got[2]["text"]
    assert "the rollback budget is spent" in receiver.got[-1]["text"]
    assert all(t["severity"] == "critical" for t in receiver.got)


def test_observing_loses_no_protection_and_tells_of_none(
    receiver: Receiver, tmp_path: Path
) -> None:
    train(
        tmp_path,
        steps=40,
        bad=tuple(range(4, 40)),
        webhook=receiver.url,
        policy=Policy.parse('mode = "observe"\n[rollback]\nbudget = 1\nwindow = 1000\n'),
        snapshots=sentinel_hooks.Snapshots(ram=False),
    )
    assert {t["event"] for t in receiver.got} == {"incident"}


def test_one_step_that_was_skipped_wakes_nobody(receiver: Receiver, tmp_path: Path) -> None:
    train(tmp_path, bad=(4,), webhook=receiver.url)
    assert receiver.got == []


def test_a_healthy_run_tells_the_webhook_nothing(receiver: Receiver, tmp_path: Path) -> None:
    train(tmp_path, webhook=receiver.url)
    assert receiver.got == []


def test_a_receiver_that_fails_is_tried_again_and_training_does_not_wait(
    receiver: Receiver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.answers = [503, 503]
    train(tmp_path / "1", bad=BAD, webhook=receiver.url)
    assert len(receiver.got) == 2
    receiver.answers = [403] * 9
    with caplog.at_level(logging.WARNING):
        train(tmp_path / "2", bad=BAD, webhook=receiver.url)
    assert "the webhook fails" in caplog.text
    assert "answered 403" in caplog.text
    assert "s3cret" not in caplog.text


def test_a_receiver_that_hangs_costs_the_end_of_training_a_moment_only(tmp_path: Path) -> None:
    import socket

    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(1)
        began = time.perf_counter()
        train(tmp_path, bad=BAD, webhook=f"http://127.0.0.1:{deaf.getsockname()[1]}/")
        assert time.perf_counter() - began < outlets.CLOSE_S + 30


def test_things_that_come_too_fast_are_counted_not_kept(receiver: Receiver) -> None:
    receiver.answers = [200]
    one = outlets.Outlets.of(run="r", run_dir=Path("nowhere"), page=None, webhook=receiver.url)
    assert one is not None
    with one._wake:  # the thread cannot take any
        for i in range(outlets.QUEUE + 5):
            one._queue.append({"n": i}) if len(one._queue) < outlets.QUEUE else one.tell(
                "x", outlets.Severity.INFO, i, "y"
            )
    one.close("finished", sentinel_state())
    assert any(t.get("dropped") == 5 for t in receiver.got)


def sentinel_state() -> Any:
    from sentinel.core import engine

    return engine.initial()


@pytest.mark.parametrize("given", ["ftp://x/y", "host/path", 3, "http:///path"])
def test_an_address_that_is_none_is_refused_without_showing_it(given: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="webhook must be an address like https://host/path"):
        train(tmp_path, webhook=given)
    assert list(tmp_path.iterdir()) == []

"""Orders of people, the real sidecar and the real link: each arrives once, also on a bad way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sentinel.client import Client
from tests.support.live import LiveTrainer
from tests.support.sidecars import HostileProxy, ServeProcess, hostile_proxy, serving

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.torch]

WAIT_S = 60.0


def wait_until(true: Callable[[], Any], what: str) -> None:
    until = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < until, f"not within {WAIT_S} s: {what}"
        time.sleep(0.02)


class People:
    """Somebody at the Unix socket."""

    def __init__(self, path: Path) -> None:
        self.client = Client(f"unix://{path}", token="")

    def order(self, kind: str, id_: str, **more: Any) -> tuple[int, Any]:
        body = json.dumps({"kind": kind, "id": id_, **more}).encode()
        status, answer = self.client.ask("POST", "/v1/runs/r7/commands", body, deadline_s=20.0)
        return status, json.loads(answer)

    def states(self) -> dict[str, str]:
        run = json.loads(self.client.get("/v1/runs/r7", deadline_s=20.0))
        return {o["command"]["id"]: o["state"] for o in run["orders"]}

    def outcomes(self, id_: str) -> list[str]:
        log = json.loads(self.client.get("/v1/audit?run=r7&limit=500", deadline_s=20.0))["audit"]
        return [e["outcome"] for e in reversed(log) if e["detail"].get("id") == id_]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[ServeProcess, HostileProxy, People]]:
    path = tmp_path / "s.sock"
    with serving("--uds", str(path), "--verbose") as process, hostile_proxy(process.port) as proxy:
        people = People(path)
        yield process, proxy, people
        people.client.close()


@pytest.mark.parametrize("decide", ["sidecar", "trainer"])
def test_each_order_is_obeyed_once_though_requests_and_replies_are_lost(
    served: tuple[ServeProcess, HostileProxy, People], decide: str
) -> None:
    _, proxy, people = served
    with LiveTrainer(proxy.url, "r7", decide=decide) as trainer:
        wait_until(lambda: trainer.step > 5, "training")
        proxy.behaviour = "loses"
        ids = [f"skip-{n}" for n in range(6)]
        for id_ in ids:
            assert people.order("skip_next", id_)[0] == 202
            assert people.order("skip_next", id_)[0] == 202  # somebody presses twice
            wait_until(lambda i=id_: people.states()[i] == "taken", f"order {id_} taken")
        proxy.behaviour = "healthy"
        after = trainer.step
        wait_until(lambda: trainer.step > after + 20, "training on")
        assert proxy.lost > 3
        assert trainer.obeyed() == ids
        assert len(trainer.acted("skip_step", "command")) == len(ids)
        for id_ in ids:
            told = people.outcomes(id_)
            assert (told.count("accepted"), told.count("acknowledged"), len(told)) == (2, 1, 3)


def test_an_order_that_expired_while_the_way_was_blocked_never_acts(
    served: tuple[ServeProcess, HostileProxy, People],
) -> None:
    _, proxy, people = served
    with LiveTrainer(proxy.url, "r7", deadline_s=0.2) as trainer:
        wait_until(lambda: trainer.step > 5, "training")
        proxy.behaviour = "refuses"
        assert people.order("skip_next", "late", expires_in_s=1.0)[0] == 202
        time.sleep(1.5)
        proxy.behaviour = "healthy"
        assert people.order("skip_next", "due")[0] == 202
        wait_until(lambda: people.states()["due"] == "taken", "the later order taken")
        assert people.states()["late"] == "expired"
        assert trainer.obeyed() == ["due"]


def test_an_order_is_obeyed_once_though_the_sidecar_is_killed_and_started_again(
    tmp_path: Path,
) -> None:
    path, data = tmp_path / "s.sock", tmp_path / "data"
    with serving("--uds", str(path), "--data", str(data)) as process:
        people = People(path)
        with LiveTrainer(process.url, "r7") as trainer:
            wait_until(lambda: trainer.step > 5, "training")
            status, answer = people.order("pause", "p")
            assert (status, answer["recorded"]) == (202, True)
            process.kill()
            process.start(process.port)
            wait_until(lambda: people.states().get("p") == "taken", "the order taken")
            after = trainer.step
            wait_until(lambda: trainer.step > after + 20, "training on")
            assert trainer.obeyed().count("p") == 1
            assert not trainer.sim.state.ledger.automation
        people.client.close()


def test_a_rollback_goes_to_the_snapshot_that_was_named(
    served: tuple[ServeProcess, HostileProxy, People],
) -> None:
    process, _, people = served
    with LiveTrainer(process.url, "r7", pause_s=0.0) as trainer:
        wait_until(
            lambda: sum(s.healthy for s in trainer.sim.state.ledger.snapshots) > 2, "snapshots"
        )
        chosen = [s.step for s in trainer.sim.state.ledger.snapshots if s.healthy][-2]
        assert people.order("rollback", "b", target=chosen)[0] == 202
        wait_until(lambda: trainer.acted("rollback", "command"), "the rollback")
        wait_until(lambda: trainer.sim.state.ledger.attempt == 1, "the restore")
        assert trainer.sim.state.ledger.last_target == chosen


def test_no_token_is_in_what_the_process_says(tmp_path: Path) -> None:
    tokens = {role: f"{role}-very-secret-0123" for role in ("control", "read", "ingest")}
    files = []
    for role, token in tokens.items():
        (tmp_path / role).write_text(f"{role}er {token}\n")
        files += ["--token-file", f"{role}={tmp_path / role}"]
    with serving("--verbose", *files) as process:
        with LiveTrainer(process.url, "r7", token=tokens["ingest"], steps=20) as trainer:
            wait_until(lambda: trainer.step >= 10, "training")
        for token in (*tokens.values(), "a-wrong-secret-0123456"):
            client = Client(process.url, token=token)
            client.ask("GET", f"/v1/runs?token={token}", deadline_s=20.0)
            client.ask("POST", "/v1/runs/r7/commands", b'{"kind": "pause"}', deadline_s=20.0)
            client.ask("POST", "/v1/runs/r7/commands", b"not json", deadline_s=20.0)
            client.close()
        _, said = process.stop()
    assert "audit action=command" in said
    for token in (*tokens.values(), "a-wrong-secret-0123456"):
        assert token not in said


def test_the_command_line_steers_a_live_run(
    served: tuple[ServeProcess, HostileProxy, People], tmp_path: Path
) -> None:
    process, _, _ = served
    here = ["--sidecar", f"unix://{tmp_path / 's.sock'}", "--by", "ann"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("SENTINEL_")}

    def sentinel(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sentinel", *arguments, *here]
        return subprocess.run(command, capture_output=True, text=True, env=env, check=False)

    with LiveTrainer(process.url, "r7") as trainer:
        wait_until(lambda: trainer.step > 5, "training")
        done = sentinel("command", "r7", "scale-lr", "0.5", "--wait", "30s")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("scale the learning rate: obeyed at step ")
        wait_until(lambda: trainer.sim.state.ledger.manual_lr == 0.5, "the factor")
        done = sentinel("command", "r7", "halt", "--yes", "--wait", "30s")
        assert done.returncode == 0, done.stderr
        wait_until(lambda: trainer.sim.halted, "the halt")

"""A real attached training loop with a real `sentinel serve`: it decides, and it dies.

The reference is the same loop, same seed, with sidecar=None; its own faults are put into the data.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sentinel
from sentinel.client import Client
from sentinel.core.types import Action
from sentinel.traces.reader import Reader
from sentinel_hooks import attaching
from sentinel_hooks import link as link_module
from tests.support.sidecars import hostile_proxy, serving
from tests.support.waits import Metered

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.torch]

STEPS = 150
NAN_AT = 90
GARBAGE = range(110, 118)  # the canary cannot be had here: the fourth hot step rolls back


@pytest.fixture
def ample_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the point is not the waiting, no answer may be missed on a busy machine."""
    defaults = link_module.make_link.__kwdefaults__ | {"deadline_s": 2.0}
    monkeypatch.setattr(link_module.make_link, "__kwdefaults__", defaults)


@pytest.fixture
def metered(monkeypatch: pytest.MonkeyPatch) -> list[Metered]:
    """The link of each attach, with its waits timed."""
    made: list[Metered] = []
    real = attaching.make_link

    def make(*args: Any, **options: Any) -> Any:
        made.append(Metered(real(*args, **options)))
        return made[-1]

    monkeypatch.setattr(attaching, "make_link", make)
    return made


def train(
    run_dir: Path,
    sidecar: str | None,
    decide: str | None = None,
    *,
    at: dict[int, Callable[[], None]] | None = None,
    **options: Any,
) -> tuple[list[tuple[Action, str]], Any, dict[str, torch.Tensor]]:
    """Train 150 steps; returns what was executed, the session's status, the final weights."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(5)
    true = torch.randn(8, 1, generator=data)
    session = sentinel.attach(
        model=model,
        optimizer=optimizer,
        sidecar=sidecar,
        decide=decide,
        run_dir=run_dir,
        run_id="r7",
        **options,
    )
    with session:
        for step in range(STEPS):
            if at and step in at:
                at[step]()
            x = torch.randn(64, 8, generator=data)
            y = x @ true + 1.0 + 0.1 * torch.randn(64, 1, generator=data)
            if step in GARBAGE:
                y = y * 20.0
            loss = nn.functional.mse_loss(model(x), y) + 1.0
            optimizer.zero_grad()
            loss.backward()
            if step == NAN_AT:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad.fill_(float("nan"))
            optimizer.step()
        status = session.status()
    steps = Reader(session.directory).steps()
    executed = [(r.outcome.executed, str(r.outcome.source)) for r in steps]
    return executed, status, {k: v.clone() for k, v in model.state_dict().items()}


def actions(executed: list[tuple[Action, str]]) -> list[Action]:
    return [action for action, _ in executed]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def test_the_sidecar_decides_a_healthy_link_and_shows_the_run(tmp_path: Path) -> None:
    alone, _, weights = train(tmp_path / "alone", None)
    assert {Action.SKIP_STEP, Action.ROLLBACK} <= set(actions(alone))
    share = 0.0
    for number in range(3):  # a run in which the machine was taken away says nothing of the sidecar
        with serving() as process:
            together, status, others = train(tmp_path / f"together-{number}", process.url)
            client = Client(process.url)
            seen = json.loads(client.get("/v1/runs/r7", deadline_s=5.0))
            metrics = client.get("/metrics", deadline_s=5.0).decode()
            client.close()
        share = sum(source == "sidecar" for _, source in together) / len(together)
        if share >= 0.99:
            break
    assert share >= 0.99, status.link
    assert status.link.mismatches == 0
    assert actions(together) == actions(alone)
    assert same(weights, others)
    assert seen["state"] == "finished"
    assert seen["record"]["holes"] == 0
    assert seen["layers"] == ["0", "2"]
    assert f'sentinel_steps_total{{run="r7"}} {STEPS}.0' in metrics
    assert 'sentinel_layer_grad_norm{run="r7",layer="0"}' in metrics
    assert 'sentinel_rollbacks_total{run="r7",rule="loss_spike",outcome="restored"} 1.0' in metrics


@pytest.mark.usefixtures("ample_deadline")
def test_kill_9_in_the_middle_of_the_fault_changes_nothing(tmp_path: Path) -> None:
    alone, _, weights = train(tmp_path / "alone", None)
    with serving() as process:
        hit, status, others = train(
            tmp_path / "hit", process.url, at={GARBAGE.start + 2: process.kill}
        )
    assert hit[GARBAGE.start + 1][1] == "sidecar"
    assert all(source == "trainer" for _, source in hit[GARBAGE.start + 2 :])
    assert actions(hit) == actions(alone)
    assert same(weights, others)
    assert status.link.misses


@pytest.mark.parametrize("behaviour", ["drips", "stale", "garbles"])
def test_a_proxy_that_misbehaves_changes_no_executed_action(
    behaviour: str, tmp_path: Path, metered: list[Metered]
) -> None:
    alone, _, weights = train(tmp_path / "alone", None)
    with serving() as process, hostile_proxy(process.port) as proxy:

        def spoil() -> None:
            proxy.behaviour = behaviour

        hit, status, others = train(tmp_path / "hit", proxy.url, at={80: spoil})
    assert "sidecar" in {source for _, source in hit[60:80]}
    assert all(source == "trainer" for _, source in hit[80:])
    assert actions(hit) == actions(alone)
    assert same(weights, others)
    assert status.link.longest_wait_s > 0.0
    assert metered[-1].longest <= 0.25


def test_decide_trainer_is_told_to_the_sidecar_and_changes_nothing(tmp_path: Path) -> None:
    alone, _, weights = train(tmp_path / "alone", None)
    with serving() as process:
        told, status, others = train(tmp_path / "told", process.url, "trainer")
        client = Client(process.url)
        seen = json.loads(client.get("/v1/runs/r7", deadline_s=5.0))
        client.close()
    assert all(source == "trainer" for _, source in told)
    assert actions(told) == actions(alone)
    assert same(weights, others)
    assert seen["record"]["frames"] == STEPS
    assert seen["ledger"]["counters"]["steps"] == STEPS
    assert status.link.longest_wait_s == 0.0


@pytest.mark.usefixtures("ample_deadline")
def test_a_stricter_policy_from_the_sidecar_is_obeyed(tmp_path: Path) -> None:
    strict = tmp_path / "strict.toml"
    strict.write_text('name = "strict"\n[rules.loss_spike]\nfor = 2\n')
    alone, _, _ = train(tmp_path / "alone", None)
    with serving("--policy", str(strict)) as process:
        hit, status, _ = train(tmp_path / "strict", process.url)
    assert actions(alone).index(Action.ROLLBACK) == GARBAGE.start + 3
    assert actions(hit).index(Action.ROLLBACK) == GARBAGE.start + 1
    assert hit[GARBAGE.start + 1][1] == "sidecar"
    assert status.policy == "strict"


@pytest.mark.usefixtures("ample_deadline")
def test_a_run_that_is_started_again_hands_its_ledger_to_the_sidecar(tmp_path: Path) -> None:
    with serving() as process:
        _, before, _ = train(tmp_path, process.url)
        _, after, _ = train(tmp_path, process.url)  # from scratch: known weights, of step 0
    assert dict(before.counters.rollbacks) != {}
    assert after.step == 2 * STEPS
    assert after.counters.steps == 2 * STEPS
    assert after.link.mismatches == 0
    assert after.link.decided["sidecar"] >= 0.99 * STEPS, after.link
    assert "the weights are those of step 0" in after.lineage

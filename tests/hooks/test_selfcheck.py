"""In its first steps a session finds out whether it sees what it says it sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sentinel_hooks
from sentinel.traces.reader import Reader
from sentinel_hooks import Signals
from sentinel_hooks.selfcheck import STEPS, SelfCheck

pytestmark = pytest.mark.torch


def check(**signals: bool) -> SelfCheck:
    off = dict.fromkeys(("attention", "activations"), False) | signals
    return SelfCheck("r7", Signals(**off), blocks=2, attention=2)


def steps(one: SelfCheck, *columns: str, loss: bool = True, forward: bool = True) -> None:
    for _ in range(STEPS):
        one.saw(loss=loss, forward=forward, columns=columns)


def test_it_is_pending_until_it_has_seen_enough_and_then_says_what_it_saw() -> None:
    one = check()
    assert str(one).startswith("pending")
    one.norms([(1.0, 1.0000001, False)])
    steps(one, "layer_grad_norm")
    assert str(one).startswith("passed: norms of 1 tensors equal a plain float64 sum")
    assert one.failures == []


@pytest.mark.parametrize(
    ("loss", "forward", "columns", "said"),
    [
        (False, True, ["layer_grad_norm"], "the loss was not seen"),
        (True, False, ["layer_grad_norm"], "the forward was not seen"),
        (True, True, [], "layer_grad_norm was not measured"),
    ],
)
def test_what_was_promised_and_never_came_is_named(
    loss: bool, forward: bool, columns: list[str], said: str
) -> None:
    one = check()
    steps(one, *columns, loss=loss, forward=forward)
    assert said in str(one)
    assert len(one.failures) == 1


def test_a_probe_that_has_modules_to_watch_is_a_promise_and_one_without_is_none() -> None:
    promised = check(attention=True)
    steps(promised, "layer_grad_norm")
    assert "layer_attention_max_logit was not measured" in str(promised)
    without = SelfCheck("r7", Signals(), blocks=0, attention=0)
    steps(without, "layer_grad_norm")
    assert without.failures == []


@pytest.mark.parametrize(("ours", "narrow", "fails"), [(1.01, False, True), (1.01, True, False)])
def test_a_norm_that_is_off_fails_by_the_precision_of_its_gradients(
    ours: float, narrow: bool, fails: bool
) -> None:
    one = check()
    one.norms([(ours, 1.0, narrow)])
    steps(one, "layer_grad_norm")
    assert bool(one.failures) is fails


def test_shares_that_do_not_add_up_to_one_model_are_named() -> None:
    one = check()
    one.copies(1000.0, 1000, 4)
    assert one.failures == []
    one.copies(250.0, 1000, 4)
    assert "add up to 250 elements of a model of 1,000" in one.failures[0]


def run(tmp_path: Path, clip: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = sentinel_hooks.attach(
        model=model, optimizer=optimizer, sidecar=None, run_dir=tmp_path
    )
    for _ in range(STEPS + 3):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    status = session.status()
    session.detach()
    last = list(Reader(tmp_path / session.run_id).steps())[-1]
    return status, dict(last.observation.scalars)


@pytest.mark.parametrize("clip", [False, True])
def test_a_real_loop_passes_clipped_or_not_and_the_metric_says_so(
    clip: bool, tmp_path: Path
) -> None:
    status, scalars = run(tmp_path, clip)
    assert "norms of 4 tensors equal a plain float64 sum" in status.self_check
    assert status.self_check.startswith("passed")
    assert scalars["self_check_failures"] == 0
    assert "self-check: passed" in str(status)


@pytest.mark.parametrize("clip", [False, True])
def test_norms_that_are_wrong_are_found_out(
    clip: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch._foreach_norm
    monkeypatch.setattr(torch, "_foreach_norm", lambda *a, **k: [n / 2 for n in real(*a, **k)])
    status, scalars = run(tmp_path, clip)
    assert "norms differ from a plain float64 sum by 50" in status.self_check
    assert scalars["self_check_failures"] == 1


def test_gradients_that_died_on_the_way_are_no_wrong_norms() -> None:
    one = check()
    one.norms([(0.0, 1e-23, False), (1.0, 1.0, False)])
    assert one.failures == []
    one = check()
    one.norms([(0.0, 1e-6, False)])
    assert len(one.failures) == 1

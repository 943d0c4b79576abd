"""Following a script that did not ask for us: who is attached, when, and who is only named.

The hook that `sentinel run --attach` puts into a process is put in here for one test.
"""

from __future__ import annotations

import copy
import gc
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sentinel_hooks import attach
from sentinel_hooks.seams.step_tap import STEP_TAP
from sentinel_hooks.session import Session, is_attached, open_sessions
from sentinel_hooks.unasked import stepping
from sentinel_hooks.unasked.judging import OVER, Seen, Verdict, judge
from tests.hooks.worlds import digest

pytestmark = pytest.mark.torch

Say = Callable[[], str]


@pytest.fixture
def said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Say]:
    """As in a process of `sentinel run --attach`; what was said on standard error since."""
    torch.manual_seed(7)
    gc.collect()
    options = {"run_dir": str(tmp_path / "runs")}
    monkeypatch.setenv("SENTINEL_ATTACH", json.dumps(options))
    monkeypatch.setenv("SENTINEL_ATTACH_REPORT", str(tmp_path / "report"))
    monkeypatch.setattr(stepping, "_FOLLOWER", stepping.Follower())
    monkeypatch.setattr(STEP_TAP, "_carried", STEP_TAP._carried)
    before = set(open_sessions())
    handle = register_optimizer_step_pre_hook(lambda o, *_: stepping.on_step(o))
    yield lambda: capsys.readouterr().err
    handle.remove()
    for session in set(open_sessions()) - before:
        session.detach()


def watching() -> Session:
    session = stepping._FOLLOWER._now()
    assert session is not None
    return session


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, bad: bool = False, size: int = 4
) -> None:
    loss = model(torch.randn(3, size)).square().mean()
    optimizer.zero_grad()
    (loss * math.nan if bad else loss).backward()
    optimizer.step()


class Gan:
    """D steps before G is backpropagated."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.g = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.d = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        self.og = torch.optim.Adam(self.g.parameters(), 1e-3)
        self.od = torch.optim.Adam(self.d.parameters(), 1e-3)

    def of_d(self, *, bad: bool = False) -> None:
        fake = self.g(torch.randn(8, 4)).detach()
        loss = self.d(fake).mean() - self.d(torch.randn(8, 2)).mean()
        self.od.zero_grad()
        (loss * math.nan if bad else loss).backward()
        self.od.step()

    def of_g(self, *, bad: bool = False) -> None:
        loss = -self.d(self.g(torch.randn(8, 4))).mean()
        self.og.zero_grad()
        (loss * math.nan if bad else loss).backward()
        self.og.step()

    def train(self, bad: str = "", at: int = 6, steps: int = 12) -> tuple[str, str]:
        for i in range(steps):
            self.of_d(bad=bad == "D" and i == at)
            self.of_g(bad=bad == "G" and i == at)
        return digest(self.g.state_dict()), digest(self.d.state_dict())


@pytest.mark.parametrize("bad", ["G", "D", ""])
def test_a_gan_is_watched_as_if_both_optimizers_had_been_given_by_hand(
    bad: str, said: Say, tmp_path: Path
) -> None:
    """Seen red: without the mark that D has stepped, D follows the decision of the G before."""
    hand = Gan()
    with attach(
        model=[hand.d, hand.g],
        optimizer=[hand.od, hand.og],
        sidecar=None,
        run_dir=tmp_path / "hand",
    ) as session:
        expected = hand.train(bad)
        skipped = session.status().late_skips, dict(session.status().counters.skipped)
    stepping._FOLLOWER = stepping.Follower()  # "the script attaches by itself" was noted
    said()
    gan = Gan()
    assert gan.train(bad) == expected
    status = watching().status()
    assert (status.late_skips, dict(status.counters.skipped)) == skipped
    assert set(watching().optimizers) == {gan.od, gan.og}
    assert not [s for s in status.blind_spots if "not watched" in s.what]
    assert said().count("sentinel: attached") == 2, "D, then both"


def test_what_joins_is_checked_in_the_step_that_it_joins_in(said: Say) -> None:
    """Seen red: its gradients were made before the session heard of any."""
    gan = Gan()
    before = digest(gan.g.state_dict())
    gan.of_d()
    gan.of_g(bad=True)
    assert digest(gan.g.state_dict()) == before
    assert watching().status().late_skips == 1


def test_a_critic_that_steps_five_times_is_joined_when_both_have_taken_turns(said: Say) -> None:
    gan = Gan()
    for i in range(3):
        for _ in range(5):
            gan.of_d()
        gan.of_g()
        if i == 0:
            assert watching().optimizers == (gan.od,)
            assert "NOT WATCHED: Adam (58 parameters) steps and is unprotected" in said()
    assert watching().optimizers == (gan.od, gan.og)
    before = digest(gan.g.state_dict())
    gan.of_g(bad=True)
    assert digest(gan.g.state_dict()) == before


def test_an_optimizer_made_anew_for_the_same_model_is_attached_at_its_first_step(
    said: Say,
) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    first = torch.optim.SGD(model[1].parameters(), 1e-3)
    for _ in range(5):
        step(model, first)
    second = torch.optim.AdamW(model.parameters(), 1e-3)
    before = digest(model.state_dict())
    step(model, second, bad=True)
    assert digest(model.state_dict()) == before
    assert watching().optimizers == (second,)
    assert not is_attached(first)
    assert not first._optimizer_step_pre_hooks, "the one before is let go of"


def test_a_model_after_the_other_is_attached_at_its_first_step(said: Say, tmp_path: Path) -> None:
    def fit(*, bad: bool) -> bool:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        step(model, optimizer)
        for _ in range(5):
            step(model, optimizer)
        before = digest(model.state_dict())
        step(model, optimizer, bad=bad)
        return digest(model.state_dict()) == before

    assert not fit(bad=False)
    assert fit(bad=True)
    assert said().count("attached") == 2
    assert len([p for p in (tmp_path / "runs").iterdir() if p.is_dir()]) == 2


def test_a_scaler_that_goes_on_with_the_next_model_does_not_hold_the_one_before(said: Say) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def fit() -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for _ in range(5):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(3, 4)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert watching().optimizers == (optimizer,)

    fit()
    fit()
    text = said()
    assert text.count("attached") == 2
    assert "NOT WATCHED" not in text


def test_a_phase_whose_forerunner_the_script_still_holds_is_named_and_then_attached(
    said: Say,
) -> None:
    tried = nn.Linear(4, 1)
    sgd = torch.optim.SGD(tried.parameters(), 1e-3)
    for _ in range(5):
        step(tried, sgd)
    model = nn.Linear(4, 3)
    adam = torch.optim.Adam(model.parameters(), 1e-3)
    said()
    for _ in range(OVER - 1):
        step(model, adam)
    text = said()
    assert text.count("NOT WATCHED: Adam (15 parameters)") == 1
    assert "call sentinel.attach(model=[...], optimizer=[...]) in the script" in text
    assert watching().optimizers == (sgd,)
    step(model, adam)
    assert watching().optimizers == (adam,)


def test_an_inner_loop_beside_the_training_is_named_once_and_nothing_else_is_done(
    said: Say, tmp_path: Path
) -> None:
    model = nn.Linear(4, 1)
    outer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(4):
        step(model, outer)
    session = watching()
    said()
    for _ in range(6):
        clone = copy.deepcopy(model)
        inner = torch.optim.SGD(clone.parameters(), 1e-2)
        for _ in range(5):
            step(clone, inner)
        step(model, outer)
    assert watching() is session
    assert said().count("NOT WATCHED: SGD (5 parameters)") == 1
    (spot,) = [s for s in session.status().blind_spots if "not watched" in s.what]
    assert spot.what == "an optimizer that is not watched steps: SGD, 5 parameters"


@pytest.mark.slow
def test_optimizers_made_anew_at_every_step_are_not_followed_for_ever(
    said: Say, tmp_path: Path
) -> None:
    model = nn.Linear(4, 1)
    for _ in range(20):
        step(model, torch.optim.SGD(model.parameters(), 1e-2))
    assert len([p for p in (tmp_path / "runs").iterdir() if p.is_dir()]) == stepping.HASTY + 1
    assert said().count("optimizers come and go every few steps here") == 1


def test_two_that_move_the_same_parameters_in_turns_do_not_push_each_other_out_for_ever(
    said: Say, tmp_path: Path
) -> None:
    model = nn.Linear(4, 1)
    pair = [torch.optim.SGD(model.parameters(), 1e-2) for _ in range(2)]
    for _ in range(20):
        for one in pair:
            step(model, one)
    assert len([p for p in (tmp_path / "runs").iterdir() if p.is_dir()]) <= 2 * stepping.BACK + 1
    assert said().count("moves the same parameters in turns") == 1


class Around(torch.optim.Optimizer):
    """A wrapper that is an optimizer itself, as Lookahead and SAM are."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        super().__init__(inside.param_groups, inside.defaults)
        self.base_optimizer = inside

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base_optimizer.step(closure)


class Of(torch.optim.Optimizer):
    """One that steps two of its own, which nothing from outside can find."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        super().__init__([g for p in parts for g in p.param_groups], {})
        self.parts = list(parts)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


@pytest.mark.parametrize("kind", ["around", "of"])
def test_an_optimizer_made_of_others_is_one(kind: str, said: Say) -> None:
    model = nn.Linear(4, 1)
    if kind == "around":
        optimizer: torch.optim.Optimizer = Around(torch.optim.SGD(model.parameters(), 0.1))
    else:
        optimizer = Of(torch.optim.SGD([model.weight], 0.1), torch.optim.Adam([model.bias], 0.1))
    for _ in range(3):
        step(model, optimizer)
    before = digest(model.state_dict())
    step(model, optimizer, bad=True)
    assert digest(model.state_dict()) == before
    text = said()
    assert text.count("attached") == 1
    assert "NOT" not in text


def test_a_script_that_attaches_by_itself_is_left_to_itself(said: Say, tmp_path: Path) -> None:
    model, other = nn.Linear(4, 1), nn.Linear(4, 1)
    mine = torch.optim.SGD(model.parameters(), 0.1)
    theirs = torch.optim.SGD(other.parameters(), 0.1)
    with attach(model=model, optimizer=mine, sidecar=None, run_dir=tmp_path / "own") as session:
        step(model, mine)
        step(other, theirs)
        assert not is_attached(theirs)
        assert [s for s in session.status().blind_spots if "not watched" in s.what]
    assert said().count("the script attaches by itself; nothing more is done") == 1
    assert (tmp_path / "report").read_text() == "own\n"


def test_after_parameters_of_no_module_the_one_that_trains_is_attached_all_the_same(
    said: Say,
) -> None:
    loose = torch.zeros(3, requires_grad=True)
    sgd = torch.optim.SGD([loose], 0.1)
    torch.autograd.backward(loose.square().sum())
    sgd.step()
    sgd.step()
    assert said().count("NOT ATTACHED, training goes on unprotected: no torch.nn.Module") == 1
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step(model, optimizer)
    assert watching().optimizers == (optimizer,)


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        ({"alive": False}, Verdict.HEIR),
        ({"shares": True, "age": 1}, Verdict.HEIR),
        ({"age": 1}, Verdict.PARTNER),
        ({"age": 2}, Verdict.OPEN),
        ({"own": 2, "between": True}, Verdict.PARTNER),
        ({"own": OVER - 1}, Verdict.OPEN),
        ({"own": OVER}, Verdict.HEIR),
    ],
)
def test_what_was_seen_decides_between_partner_and_heir(
    seen: dict[str, Any], verdict: Verdict
) -> None:
    usual: dict[str, Any] = {
        "alive": True,
        "shares": False,
        "age": 100,
        "own": 1,
        "between": False,
    }
    assert judge(Seen(**{**usual, **seen})) is verdict

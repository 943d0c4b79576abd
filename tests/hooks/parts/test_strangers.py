"""Optimizers that nobody watches: named while they step, untouched, and no hook stays behind."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from sentinel_hooks import Session, attach
from sentinel_hooks.parts.strangers import FORGOTTEN
from tests.hooks.worlds import digest

pytestmark = pytest.mark.torch


class World:
    """One model that is watched, and one that is not."""

    def __init__(self, tmp_path: Path, **options: Any) -> None:
        torch.manual_seed(3)
        self.model, self.other = nn.Linear(4, 2), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
        self.mine = torch.optim.SGD(self.model.parameters(), 0.01)
        self.theirs = torch.optim.Adam(self.other.parameters(), 0.01)
        self.session: Session = attach(
            model=self.model, optimizer=self.mine, sidecar=None, run_dir=tmp_path, **options
        )

    def step(self, *, other: bool = True) -> None:
        pairs = [(self.model, self.mine), (self.other, self.theirs)]
        for model, optimizer in pairs if other else pairs[:1]:
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()

    def named(self) -> list[str]:
        return [s.what for s in self.session.status().blind_spots if "not watched" in s.what]


def hooks() -> int:
    return len(torch_optimizer._global_optimizer_pre_hooks)


def test_an_optimizer_of_other_parameters_that_steps_is_named_with_the_way_out_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path)
    with caplog.at_level(logging.WARNING, "sentinel_hooks"):
        for _ in range(3):
            world.step()
    assert world.named() == ["an optimizer that is not watched steps: Adam, 67 parameters"]
    (spot,) = [s for s in world.session.status().blind_spots if "not watched" in s.what]
    assert "give it to attach(optimizer=[...])" in spot.way_out
    assert len([r for r in caplog.messages if "Adam, 67 parameters" in r]) == 1
    world.session.detach()


def test_it_steps_as_without_us_and_the_hook_goes_with_the_last_session(tmp_path: Path) -> None:
    before = hooks()
    world = World(tmp_path)
    assert hooks() == before + 1
    second = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(second.parameters(), 0.01)
    with attach(model=second, optimizer=optimizer, sidecar=None, run_dir=tmp_path):
        assert hooks() == before + 1, "one hook serves all"
    for _ in range(3):
        world.step()
    ours = digest(world.other.state_dict())
    world.session.detach()
    assert hooks() == before
    plain = World(tmp_path)
    plain.session.detach()
    for _ in range(3):
        plain.step()
    assert digest(plain.other.state_dict()) == ours


def test_optimizers_of_other_sessions_wrappers_and_state_made_with_rate_zero_are_no_strangers(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    with attach(model=world.other, optimizer=world.theirs, sidecar=None, run_dir=tmp_path):
        world.step()
        assert world.named() == []
    same = torch.optim.SGD(world.model.parameters(), 0.1)
    same.step()  # a wrapper, or one made anew, moves nothing else: "forsaken" is what sees those
    still = torch.optim.SGD(world.other.parameters(), 0.0)
    still.step()
    assert world.named() == []
    world.step()
    assert world.named() == ["an optimizer that is not watched steps: Adam, 67 parameters"]
    world.session.detach()


def test_one_that_has_stopped_is_named_no_more(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.step()
    for _ in range(FORGOTTEN):
        world.step(other=False)
    assert world.named()
    world.step(other=False)
    assert world.named() == []
    world.session.detach()


def test_several_are_named_by_kind_however_many_an_inner_loop_makes(tmp_path: Path) -> None:
    world = World(tmp_path)
    for i in range(5):
        world.step()
        inner = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(inner.parameters(), 0.1)
        inner(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        assert len(world.named()) == 1, i
    assert world.named() == [
        "optimizers that are not watched step: Adam, 67 parameters; SGD, 5 parameters"
    ]
    world.session.detach()


def test_a_session_that_ends_while_torch_goes_through_its_hooks_breaks_no_step_off(
    tmp_path: Path,
) -> None:
    """The garbage collector may come at any moment. Seen red: the hook was taken out at once."""
    before = hooks()
    world: World | None = World(tmp_path)
    bystander = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(bystander.parameters(), 0.1)

    def let_go(*_: Any) -> None:
        nonlocal world
        world = None
        gc.collect()

    first = torch_optimizer.register_optimizer_step_pre_hook(let_go)
    later = torch_optimizer.register_optimizer_step_pre_hook(lambda *_: None)
    bystander(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    first.remove()
    later.remove()
    with attach(model=bystander, optimizer=optimizer, sidecar=None, run_dir=tmp_path):
        pass
    assert hooks() == before


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_compiled_step_of_a_stranger_has_no_graph_break_of_ours(tmp_path: Path) -> None:
    """Seen red: the hook looked at the optimizer while dynamo traced it."""
    breaks: list[int] = []
    for attached in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        world = World(tmp_path)
        if not attached:
            world.session.detach()
        world.other(torch.ones(2, 4)).sum().backward()
        sgd = torch.optim.SGD(world.other.parameters(), 0.1)
        torch.compile(sgd.step, backend="eager")()
        breaks.append(sum(torch._dynamo.utils.counters["graph_break"].values()))
        world.session.detach()
    assert breaks[0] == breaks[1]
    assert breaks[0] > 0, "torch's own"

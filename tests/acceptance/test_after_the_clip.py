"""Gradients that go bad between the user's clip and optimizer.step(): no parameter may move.

Seen red: their norms were those that the clip had measured, and the weights became nan.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import sentinel_hooks

pytestmark = pytest.mark.torch

norm = nn.utils.clip_grad_norm_


def whole(model: nn.Sequential) -> None:
    norm(model.parameters(), 1.0)


def whole_and_hardly_ever(model: nn.Sequential) -> None:
    norm(model.parameters(), 1e9)


def by_value(model: nn.Sequential) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.5)


def by_value_and_norm(model: nn.Sequential) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.5)
    norm(model.parameters(), 0.1)


def in_two(model: nn.Sequential) -> None:
    norm(model[0].parameters(), 1.0)
    norm(model[2].parameters(), 1.0)


def each(model: nn.Sequential) -> None:
    for p in model.parameters():
        norm([p], 0.1)


def the_head(model: nn.Sequential) -> None:
    norm(model[2].parameters(), 0.1)


def all_and_the_head(model: nn.Sequential) -> None:
    norm(model.parameters(), 1.0)
    norm(model[2].parameters(), 0.1)


CLIPS = [
    whole,
    whole_and_hardly_ever,
    by_value,
    by_value_and_norm,
    in_two,
    each,
    the_head,
    all_and_the_head,
]


def in_place(p: nn.Parameter) -> None:
    assert p.grad is not None
    p.grad.mul_(float("nan"))


def one_entry(p: nn.Parameter) -> None:
    assert p.grad is not None
    p.grad.view(-1)[0] = float("inf")


def another_tensor(p: nn.Parameter) -> None:
    assert p.grad is not None
    p.grad = p.grad * float("nan")


def together(p: nn.Parameter) -> None:
    torch._foreach_mul_([p.grad], float("nan"))


HURTS = [in_place, one_entry, another_tensor, together]


class Loop:
    """Twelve steps; what is done to gradients after the clip of one."""

    def __init__(self, run_dir: Path, clip: Callable[[nn.Sequential], None]) -> None:
        torch.manual_seed(0)
        self.clip = clip
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        self.session = sentinel_hooks.attach(
            model=self.model, optimizer=self.optimizer, sidecar=None, run_dir=run_dir
        )

    def step(self, after: Callable[[], None] | None = None) -> float | None:
        """The norm that was seen."""
        x = torch.randn(16, 8)
        self.optimizer.zero_grad()
        (self.model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        self.clip(self.model)
        if after is not None:
            after()
        self.optimizer.step()
        open_ = self.session._open
        assert open_ is not None
        return open_.observation.grad_norm


@pytest.mark.parametrize("hurt", HURTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("clip", CLIPS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("where", [0, 2])
def test_no_parameter_moves(
    tmp_path: Path,
    clip: Callable[[nn.Sequential], None],
    hurt: Callable[[nn.Parameter], None],
    where: int,
) -> None:
    loop = Loop(tmp_path, clip)
    for _ in range(3):
        loop.step()
    before = [p.detach().clone() for p in loop.model.parameters()]
    weight = loop.model[where].weight
    loop.step(lambda: hurt(weight))
    assert all(map(torch.equal, before, loop.model.parameters()))
    assert dict(loop.session.status().counters.skipped) == {"nonfinite_grad": 1}
    loop.step()
    assert not torch.equal(before[0], next(loop.model.parameters()))
    loop.session.detach()


@pytest.mark.parametrize("clip", CLIPS, ids=lambda f: f.__name__)
def test_the_clips_norm_is_the_one_unless_what_was_written_is_larger(
    tmp_path: Path, clip: Callable[[nn.Sequential], None]
) -> None:
    """A loop that adds noise to clipped gradients is judged by what it had before the clip."""

    def scaled(by: float) -> float | None:
        loop = Loop(tmp_path, clip)
        for _ in range(3):
            loop.step()

        def scale() -> None:
            for p in loop.model[2].parameters():
                assert p.grad is not None
                p.grad.mul_(by)

        found = loop.step(scale if by != 1.0 else None)
        truth = [p.grad.norm() for p in loop.model.parameters() if p.grad is not None]
        left = float(torch.stack(truth).norm())
        loop.session.detach()
        assert found is not None
        assert by <= 1.0 or found == pytest.approx(left)
        return found

    assert scaled(0.5) == scaled(1.0)
    assert scaled(1e4) != scaled(1.0)


@pytest.mark.parametrize("clip", CLIPS, ids=lambda f: f.__name__)
def test_clips_themselves_are_no_writing_and_nothing_is_measured_twice(
    tmp_path: Path, clip: Callable[[nn.Sequential], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(tmp_path, clip)
    probe = loop.session._observer.probe
    again = []
    measure = probe.measure

    def watched(*args: object, **kwargs: object) -> object:
        pending = measure(*args, **kwargs)  # type: ignore[arg-type]
        again.append(bool(pending.again))
        return pending

    monkeypatch.setattr(probe, "measure", watched)
    for _ in range(3):
        loop.step()
    assert again == [False] * 3
    loop.step(lambda: one_entry(loop.model[2].weight))
    assert again[3]
    loop.session.detach()

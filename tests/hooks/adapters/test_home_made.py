"""An adapter for somebody's own trainer, written with docs/adapters.md alone, in under 60 lines.

The trainer below knows nothing of us, and has all that makes one awkward: it builds its objects in
train(), compiles the step away from __call__, saves by itself between the step and the next
forward, and can train again.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sentinel_hooks
from sentinel_hooks import TrainerSession, adapters, register_adapter
from tests.hooks.adapters.watching import POLICY, acted
from tests.hooks.worlds import digest

pytestmark = pytest.mark.torch


class Smith:
    """The trainer."""

    def __init__(self, *, seed: int, accumulate: int = 1, folder: Path | None = None) -> None:
        self.seed, self.accumulate, self.folder = seed, accumulate, folder
        self.spoil: Callable[[int, Smith], None] = lambda step, smith: None
        self.saves: list[str] = []

    def forge(self, steps: int) -> None:
        torch.manual_seed(self.seed)
        self.parts = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
        self.tool = torch.optim.AdamW(self.parts.parameters(), lr=3e-2)
        self.pace = torch.optim.lr_scheduler.StepLR(self.tool, 30, 0.5)
        self._law = torch.randn(6, 4)
        for step in range(steps):
            self.beat(step)
            if self.folder is not None and step % 4 == 3:
                self.keep(self.folder / f"{step + 1}.pt")

    def beat(self, step: int) -> None:
        self.spoil(step, self)
        for _ in range(self.accumulate):
            x = torch.randn(64, 6)
            y = (x @ self._law + torch.randn(64, 4)).argmax(1)
            logits = self.parts.forward(x)  # past __call__
            (F.cross_entropy(logits, y) / self.accumulate).backward()
        self.tool.step()
        self.pace.step()
        self.tool.zero_grad()

    def keep(self, path: Path) -> Path:
        torch.save(self.parts.state_dict(), path)
        self.saves.append(path.name)
        return path


class SmithAdapter:
    name = "Smith"
    waits_for = "smith.forge()"

    def accepts(self, trainer: Any) -> bool:
        return isinstance(trainer, Smith)

    def watch(self, trainer: Smith, session: TrainerSession) -> Callable[[], None]:
        def beat(step: int) -> None:
            if not session.live:  # forge() makes the objects before its first beat
                session.begin(
                    model=trainer.parts, optimizer=trainer.tool, lr_scheduler=trainer.pace
                )
            session.safe_point()

        undo = [
            session.beside(trainer, "forge", at_end=session.end),
            session.beside(trainer, "beat", before=beat, at_end=session.safe_point),
            session.beside(trainer, "keep", after=session.saved),
        ]

        def unhook() -> None:
            for step in undo:
                step()

        return unhook


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    adapter = SmithAdapter()
    register_adapter(adapter)
    yield
    adapters.unregister_adapter(adapter)


def attach(smith: Smith, tmp_path: Path, **options: Any) -> Any:
    return sentinel_hooks.attach(
        smith, sidecar=None, run_dir=tmp_path / "runs", policy=POLICY, **options
    )


def finished(smith: Smith) -> str:
    return digest(dict(smith.parts.named_parameters()), smith.tool.state_dict())


def test_it_is_short() -> None:
    assert len(inspect.getsource(SmithAdapter).splitlines()) < 60


def test_a_watched_smith_forges_the_same(tmp_path: Path) -> None:
    alone = Smith(seed=3, accumulate=4)
    alone.forge(30)
    smith = Smith(seed=3, accumulate=4)
    with attach(smith, tmp_path) as session:
        assert session.status().why == "waiting for smith.forge()"
        during: list[Any] = []
        smith.spoil = lambda step, _: during.append(session.status())
        smith.forge(30)
        assert session.status().step == 30
    assert finished(smith) == finished(alone)
    assert not any(status.blind_spots for status in during[2:])
    assert {"forge", "beat", "keep"}.isdisjoint(vars(smith))


def test_a_bad_gradient_is_skipped_once(tmp_path: Path) -> None:
    def spoil(step: int, smith: Smith) -> None:
        if step == 9:
            weight = smith.parts[0].weight
            handle = weight.register_hook(lambda g: (handle.remove(), g * math.nan)[1])

    smith = Smith(seed=3)
    smith.spoil = spoil
    session = attach(smith, tmp_path)
    smith.forge(20)
    session.detach()
    assert acted(session) == [(9, "SKIP_STEP", "nonfinite_grad")]
    assert all(bool(torch.isfinite(p).all()) for p in smith.parts.parameters())


def test_damage_is_undone_before_the_smith_saves(tmp_path: Path) -> None:
    seen: list[str] = []

    def spoil(step: int, smith: Smith) -> None:
        seen.append(digest([p.detach() for p in smith.parts.parameters()]))
        if step == 24:
            with torch.no_grad():
                for p in smith.parts.parameters():
                    p.mul_(-8.0)

    smith = Smith(seed=3, folder=tmp_path)
    smith.spoil = spoil
    session = attach(smith, tmp_path)
    smith.forge(40)
    session.detach()
    assert [s for s, a, _ in acted(session) if a == "ROLLBACK"] == [27]
    saved = torch.load(tmp_path / "28.pt")
    names = [name for name, _ in smith.parts.named_parameters()]
    assert digest([saved[name] for name in names]) == seen[16], "saved as restored"


def test_forging_again_is_watched_again(tmp_path: Path) -> None:
    smith = Smith(seed=3)
    with attach(smith, tmp_path, run_id="mine") as session:
        smith.forge(5)
        smith.forge(5)
        assert session.status().step == 10
        with pytest.raises(TypeError):
            smith.forge("many")  # type: ignore[arg-type]
        assert not session.live

"""An adapter that a reader of docs/adapters.md alone wrote, for a trainer of their own.

The trainer makes its objects inside run(), accumulates, evaluates and saves by itself, and has one
event: all else is heard of from outside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sentinel_hooks
from sentinel_hooks import TrainerSession, register_adapter
from sentinel_hooks.adapters import unregister_adapter

pytestmark = pytest.mark.torch

DATA = [
    (torch.randn(8, 4, generator=g), torch.randn(8, 1, generator=g))
    for g in [torch.Generator().manual_seed(0)]
    for _ in range(20)
]


class Engine:
    """The trainer."""

    def __init__(self, folder: Path, *, boom: int = -1) -> None:
        self.folder, self.boom = folder, boom
        self.hooks: dict[str, list[Callable[[Engine], None]]] = {}

    def run(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 10)
        self.step = 0
        for hook in self.hooks.get("start", ()):
            hook(self)
        for _ in range(2):
            for i, (x, y) in enumerate(DATA):
                (self.criterion(x, y) / 2).backward()
                if i % 2:
                    nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                    self.step += 1
                    if self.step == self.boom:
                        raise RuntimeError("boom")
            self.validate()
            self.save()

    def criterion(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.model(x), y)

    def validate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.value = sum(float(self.criterion(x, y)) for x, y in DATA)
        self.model.train()

    def save(self) -> None:
        self.path = self.folder / f"{self.step}.pt"
        torch.save(self.model.state_dict(), self.path)


class EngineAdapter:
    """The adapter."""

    name = "Engine"
    waits_for = "engine.run()"

    def accepts(self, trainer: Any) -> bool:
        return isinstance(trainer, Engine)

    def watch(self, trainer: Any, session: TrainerSession) -> Callable[[], None]:
        def start(engine: Engine) -> None:
            session.begin(
                model=engine.model, optimizer=engine.optimizer, lr_scheduler=engine.schedule
            )

        hook = session.guarded(start)
        trainer.hooks.setdefault("start", []).append(hook)
        undo = [
            session.beside(trainer, "run", at_end=session.end),
            session.beside(trainer, "validate", before=session.safe_point),
            session.beside(trainer, "save", after=lambda _: session.saved(trainer.path)),
        ]

        def unhook() -> None:
            for out in reversed(undo):
                out()
            trainer.hooks["start"].remove(hook)

        return unhook


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    adapter = EngineAdapter()
    register_adapter(adapter)
    yield
    unregister_adapter(adapter)


@contextlib.contextmanager
def attached(engine: Engine, folder: Path) -> Iterator[Any]:
    with sentinel_hooks.attach(engine, sidecar=None, run_dir=folder) as session:
        yield session


def test_it_trains_as_without_and_is_left_as_it_was(tmp_path: Path) -> None:
    bare, watched = Engine(tmp_path), Engine(tmp_path)
    bare.run()
    with attached(watched, tmp_path) as session:
        assert session.status().why == "waiting for engine.run()"
        watched.run()
        assert session.status().step == 20
        assert session.status().blind_spots == ()
    pairs = zip(bare.model.parameters(), watched.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert bare.value == watched.value
    assert watched.hooks == {"start": []}
    assert not {"run", "validate", "save"} & set(vars(watched))


def test_a_bad_gradient_is_skipped_once(tmp_path: Path) -> None:
    engine = Engine(tmp_path)

    def spoil(engine: Engine) -> None:
        calls = iter(range(1000))
        engine.model[0].weight.register_hook(
            lambda grad: grad * float("nan") if next(calls) == 11 else grad
        )

    engine.hooks["start"] = [spoil]
    with attached(engine, tmp_path) as session:
        engine.run()
        assert dict(session.status().counters.skipped) == {"nonfinite_grad": 1}
    assert all(bool(p.isfinite().all()) for p in engine.model.parameters())


def test_a_run_that_raises_has_ended_and_the_next_one_is_watched(tmp_path: Path) -> None:
    engine = Engine(tmp_path, boom=5)
    with attached(engine, tmp_path) as session:
        with pytest.raises(RuntimeError, match="boom"):
            engine.run()
        assert session.status().why.startswith("training has ended")
        engine.boom = -1
        engine.run()
        assert session.status().step == 20

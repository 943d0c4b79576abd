"""Muon for matrices and AdamW for the rest, in a plain loop: one logical step.

Seen red: with a decision for each optimizer instead of one for both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hooks.adapters.watching import acted, attach, records
from tests.support.trainers import Cell, Plain

pytestmark = [pytest.mark.torch, pytest.mark.slow]


class Muon(Plain):
    """Hidden matrices go to Muon, embeddings, norms, biases and the head to AdamW."""

    def build(self) -> None:
        super().build()
        hidden = [
            p for n, p in self.model.named_parameters() if p.dim() == 2 and n.startswith("blocks")
        ]
        ids = {id(p) for p in hidden}
        rest = [p for p in self.model.parameters() if id(p) not in ids]
        self.both = [torch.optim.Muon(hidden, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]
        self.paces = [self.make_scheduler(o) for o in self.both]
        self.stepped: list[str] = []

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return self.both

    @property
    def schedulers(self) -> list[Any]:
        return self.paces

    def attach_options(self) -> dict[str, Any]:
        return {"model": self.forward, "optimizer": self.both, "lr_scheduler": self.paces}

    def train(self) -> None:
        k, batches = self.cell.accumulation, self.forever()
        for _ in range(self.cell.steps):
            for optimizer in self.both:
                optimizer.zero_grad()
            for _ in range(k):
                batch = next(batches)
                self.before_batch()
                (self.forward(**batch)["loss"] / k).backward()
            if self.cell.clip is not None:
                torch.nn.utils.clip_grad_norm_(self.forward.parameters(), self.cell.clip)
            for optimizer in self.both:
                optimizer.step()
            for pace in self.paces:
                pace.step()


@pytest.mark.parametrize(
    "cell", [Cell(), Cell(accumulation=4, clip=0.5, steps=20)], ids=["plain", "accumulated"]
)
def test_muon_and_adamw_are_unharmed_and_one_step(cell: Cell, tmp_path: Path) -> None:
    alone = Muon(cell, tmp_path)
    alone.train()
    world = Muon(cell, tmp_path)
    session = attach(world, tmp_path / "runs")
    world.train()
    session.detach()
    assert world.fingerprint() == alone.fingerprint()
    assert len(records(session)) == cell.steps, "one decision for both"
    assert [r.observation.loss for r in records(session)] == pytest.approx(world.losses, rel=1e-6)
    norms = [r.observation.grad_norm for r in records(session)]
    assert all(norm is not None and norm > 0 for norm in norms)


def test_a_nan_in_the_others_gradients_holds_both_back(tmp_path: Path) -> None:
    world = Muon(Cell(steps=14, clip=None), tmp_path)
    session = attach(world, tmp_path / "runs")

    def spoil(step: int) -> None:
        if step == 9:
            bias = world.model.head.bias  # AdamW's, which steps second
            handle = bias.register_hook(lambda g: (handle.remove(), g * float("nan"))[1])

    world.before_step = spoil
    world.train()
    session.detach()
    assert acted(session) == [(9, "SKIP_STEP", "nonfinite_grad")]
    assert world.weights[10] == world.weights[9]


def test_damage_is_rolled_back_in_both(tmp_path: Path) -> None:
    world = Muon(Cell(damage_at=24), tmp_path)
    session = attach(world, tmp_path / "runs")
    world.train()
    session.detach()
    assert [s for s, a, _ in acted(session) if a == "ROLLBACK"] == [27]
    assert world.weights[28] == world.weights[16]

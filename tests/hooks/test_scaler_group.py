"""Two optimizers under one GradScaler: what overflows in one is no business of the other.

The scaler leaves out the step of the optimizer that overflowed and takes the other's; watched or
not, the run must end with the same bits.
"""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch import nn

import sentinel

pytestmark = pytest.mark.torch
STEPS = 12
OVERFLOWS = {3, 7}  # steps at which the first model's gradients are infinite


def train(first: str, attach_to: Path | None) -> list[torch.Tensor]:
    torch.manual_seed(3)
    models = [nn.Linear(6, 1), nn.Linear(6, 1)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    session = None
    if attach_to is not None:
        session = sentinel.attach(
            model=models, optimizer=optimizers, grad_scaler=scaler, sidecar=None, run_dir=attach_to
        )
    order = optimizers if first == "the one that overflows" else optimizers[::-1]
    for step in range(STEPS):
        x = torch.randn(16, 6)
        loss = sum(((m(x) - x.sum(1, keepdim=True)) ** 2).mean() for m in models)
        scaler.scale(loss).backward()
        if step in OVERFLOWS:
            models[0].weight.grad.fill_(torch.inf)
        for optimizer in order:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    if session is not None:
        counts = dict(session.status().counters.nonfinite)
        session.detach()
        assert counts == {"grad": len(OVERFLOWS)}
    return [p.detach().clone() for m in models for p in m.parameters()]


@pytest.mark.parametrize("first", ["the one that overflows", "the other"])
def test_an_overflow_in_one_optimizer_does_not_hold_the_other_back(
    first: str, tmp_path: Path
) -> None:
    bare, watched = train(first, None), train(first, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(bare, watched, strict=True))

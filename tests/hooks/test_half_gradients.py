"""16-bit gradients through a whole session: the norm neither overflows nor is rounded away."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sentinel_hooks
from sentinel.core.types import LAYER_GRAD_NORM, Action
from sentinel.traces.reader import Reader
from sentinel_hooks import Snapshots

pytestmark = pytest.mark.torch


class Slope(nn.Module):
    """Two layers whose gradients are a constant."""

    def __init__(self, slope: float, n: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.slope = slope
        self.a = nn.Linear(n, 1, bias=False, dtype=dtype)
        self.b = nn.Linear(n, 1, bias=False, dtype=dtype)
        for layer in (self.a, self.b):
            nn.init.zeros_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return (self.a(x * self.slope) + self.b(x * self.slope)).sum()


@pytest.mark.parametrize("clip", [False, True], ids=["no clip", "the user clips"])
@pytest.mark.parametrize(
    ("dtype", "slope", "n"),
    [
        # fp16 ends at 65,504: the squares, a layer's norm and the whole norm lie beyond.
        (torch.float16, 60_000.0, 100),
        (torch.bfloat16, 0.001, 10_000),  # bf16 sums stop growing at 256 equal terms
    ],
    ids=["fp16", "bf16"],
)
def test_the_norm_of_16_bit_gradients_is_that_of_float64(
    dtype: torch.dtype, slope: float, n: int, clip: bool, tmp_path: Path
) -> None:
    model = Slope(slope, n, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session = sentinel_hooks.attach(
        model=model,
        optimizer=optimizer,
        sidecar=None,
        run_dir=tmp_path,
        snapshots=Snapshots(ram=False, disk=False),
    )
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, n, dtype=dtype)).backward()
        exact = math.sqrt(
            sum(
                float(p.grad.double().square().sum())
                for p in model.parameters()
                if p.grad is not None
            )
        )
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    session.detach()
    assert session.status().internal_errors == {}
    for record in Reader(session.directory).steps(columns=True):
        assert record.observation.grad_norm == pytest.approx(exact, rel=1e-3)
        layers = record.observation.columns[LAYER_GRAD_NORM].tolist()
        assert layers == pytest.approx([exact / math.sqrt(2)] * 2, rel=1e-3)
        assert record.outcome.executed is Action.PROCEED

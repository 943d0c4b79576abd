"""A skipped batch leaves no trace in BatchNorm, whose statistics its forward had moved already."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch import nn

import sentinel

pytestmark = pytest.mark.torch
BAD = 6


def train(bad: float | None, folder: Path | None, accumulation: int = 1) -> dict[str, torch.Tensor]:
    """Ten steps; step BAD's batch is multiplied by `bad`, or, with None, never seen at all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session = None
    if folder is not None:
        session = sentinel.attach(model=model, optimizer=optimizer, sidecar=None, run_dir=folder)
    for step in range(10):
        for micro in range(accumulation):
            x = torch.randn(16, 4)
            if step == BAD:
                if bad is None:
                    continue
                if micro == accumulation - 1:
                    x = x * bad
            (((model(x) - x.sum(1, keepdim=True)) ** 2).mean() / accumulation).backward()
        if step == BAD and bad is None:
            continue
        optimizer.step()
        optimizer.zero_grad()
    if session is not None:
        assert dict(session.status().counters.skipped) == {"nonfinite_loss": 1}
        session.detach()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("accumulation", [1, 4])
def test_after_a_skipped_nan_batch_the_model_is_as_if_it_had_never_come(
    accumulation: int, tmp_path: Path
) -> None:
    never = train(None, None, accumulation)
    skipped = train(float("nan"), tmp_path, accumulation)
    assert all(torch.equal(never[name], skipped[name]) for name in never)


def test_unwatched_such_a_batch_ruins_the_statistics_for_good() -> None:
    ruined = train(float("nan"), None)
    assert ruined["1.running_mean"].isnan().any()

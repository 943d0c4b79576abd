"""A real training run with faults: its trace replays byte for byte."""

from __future__ import annotations

import math
import os
import random
from pathlib import Path

import pytest
import torch
from torch import nn

import sentinel
from sentinel.core.events import Restored, SnapshotTaken
from sentinel.core.types import Action
from sentinel.traces.reader import Reader
from sentinel.traces.records import StepRecord
from sentinel.traces.replay import replay

pytestmark = [pytest.mark.torch, pytest.mark.slow]
STEPS = 2000
SEED = int(os.environ.get("SENTINEL_SEED", "2026"))


def ten_faults() -> dict[int, str]:
    """Ten faults of four kinds, drawn from the printed seed, well apart."""
    rng = random.Random(SEED)
    kinds = ["nan"] * 3 + ["big"] * 3 + ["garbage"] * 2 + ["damage"] * 2
    rng.shuffle(kinds)
    faults = {200 + 175 * i + rng.randrange(60): kind for i, kind in enumerate(kinds)}
    print(f"SENTINEL_SEED={SEED}: {faults}")
    return faults


class Batches:
    """A regression problem whose data come from a generator of its own."""

    def __init__(self, seed: int, garbage: set[int]) -> None:
        self.garbage = garbage
        self.rng = torch.Generator().manual_seed(seed)
        self.truth = torch.randn(16, 4, generator=self.rng)

    def next(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(64, 16, generator=self.rng)
        y = torch.tanh(x @ self.truth) + 0.3 * torch.randn(64, 4, generator=self.rng)
        if step in self.garbage:
            y = y + 4.0 * torch.randn(64, 4, generator=self.rng)
        return x, y


def train(directory: Path, run_id: str, faults: dict[int, str]) -> tuple[int, list[float]]:
    torch.manual_seed(5)
    model = nn.Sequential(
        nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss_fn = nn.MSELoss()
    starts = [step for step, kind in faults.items() if kind == "garbage"]
    batches = Batches(1, {s + i for s in starts for i in range(20)})
    losses = []
    with sentinel.attach(
        model=model,
        optimizer=optimizer,
        loss_fn=loss_fn,
        run_id=run_id,
        run_dir=directory,
        sidecar=None,
    ) as session:
        for step in range(STEPS):
            if faults.get(step) == "damage":
                with torch.no_grad():
                    model[2].weight.mul_(12.0)
            x, y = batches.next(step)
            loss = loss_fn(model(x), y)
            losses.append(float(loss.detach()))
            loss.backward()
            if faults.get(step) == "nan":
                model[0].weight.grad[0, 0] = math.nan
            if faults.get(step) == "big":
                for p in model.parameters():
                    p.grad.mul_(40.0)
            optimizer.step()
            optimizer.zero_grad()
        attempt = session.state.ledger.attempt
    return attempt, losses


Trained = tuple[Path, int, list[float], dict[int, str]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    directory = tmp_path_factory.mktemp("runs")
    faults = ten_faults()
    attempt, losses = train(directory, "torch-run", faults)
    return directory / "torch-run", attempt, losses, faults


def test_every_decision_of_a_real_run_is_computed_again_byte_for_byte(
    trained: Trained,
) -> None:
    directory, attempt, _, _ = trained
    report = replay(directory)
    assert report.identical
    assert (report.steps, report.unverified, report.lost_bytes) == (STEPS, 0, 0)
    assert attempt >= 1


def test_the_trace_holds_what_was_measured_and_done(
    trained: Trained,
) -> None:
    directory, attempt, losses, faults = trained
    reader = Reader(directory)
    steps = {r.step: r for r in reader.steps(columns=True)}
    assert sorted(steps) == list(range(STEPS))
    for step in range(STEPS):
        loss = steps[step].observation.loss
        assert loss is not None
        assert math.isclose(loss, losses[step], rel_tol=1e-6)
        columns = steps[step].observation.columns
        norm = steps[step].observation.grad_norm
        assert norm is not None
        if math.isfinite(norm):
            layers = columns["layer_grad_norm"].astype("float64")
            assert math.isclose(math.sqrt((layers**2).sum()), norm, rel_tol=1e-5)
    for step in (s for s, kind in faults.items() if kind in ("nan", "big")):
        assert steps[step].outcome.executed is Action.SKIP_STEP
        assert not steps[step].outcome.applied
    events = [item for item in reader if not isinstance(item, StepRecord)]
    assert isinstance(events[0], SnapshotTaken)
    assert sum(isinstance(e, Restored) for e in events) == attempt

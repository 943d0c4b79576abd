"""The norm does not depend on how many ranks there are, nor on how they hold their parameters.

Two references, both in float64 and in this process: brute force over the gradients that the ranks
really held at the gate (whatever the precision they were made in), and the gradient of the same
weights on the whole batch, computed here by one model in double precision.

Seen red: without the weight of a replicated parameter; with local norms of shards not added up.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from sentinel.traces.reader import Reader
from tests.ranks import judge
from tests.support.ranks import Ranks
from tests.support.ranks.loop import batch, initial

pytestmark = [pytest.mark.torch, pytest.mark.e2e]

STEPS = [0, 1, 4, 7]
SHAPES = {n: list(p.shape) for n, p in initial(1).named_parameters()}


def by_layer(grads: dict[str, torch.Tensor]) -> dict[str, float]:
    squares: dict[str, float] = {}
    for name, grad in grads.items():
        owner = name.rpartition(".")[0]
        squares[owner] = squares.get(owner, 0.0) + float(grad.double().square().sum())
    return {name: math.sqrt(s) for name, s in squares.items()}


def in_double(
    weights: dict[str, torch.Tensor], seed: int, t: int, ranks: int, micros: int
) -> dict[str, torch.Tensor]:
    """The gradient of the mean over every rank's rows of every micro-batch, computed here."""
    net = initial(seed).double()
    net.load_state_dict({n: w.double() for n, w in weights.items()})
    parts = [batch(seed, t, r, m, 16) for r in range(ranks) for m in range(micros)]
    x = torch.cat([p[0] for p in parts]).double()
    y = torch.cat([p[1] for p in parts]).double()
    net(x, y).backward()
    return {n: p.grad for n, p in net.named_parameters() if p.grad is not None}


def recorded(directory: Path) -> dict[int, tuple[float, dict[str, float]]]:
    """step -> (global norm, norm of each layer), from the trace that rank 0 has written."""
    (run,) = [p for p in (directory / "runs").iterdir() if p.is_dir()]
    reader = Reader(run)
    config = reader.configuration()
    assert config is not None
    names = [row["name"].removeprefix("module.") for row in config["layers"]]
    found = {}
    for record in reader.steps(columns=True):
        column = record.observation.columns["layer_grad_norm"]
        norm = record.observation.grad_norm
        assert norm is not None
        found[record.observation.step] = (norm, dict(zip(names, column, strict=True)))
    return found


CELLS = [
    (world, count, mixed, more)
    for world in ("ddp", "fsdp", "plain")
    for count in (1, 2, 4)
    for mixed in (False, True)
    for more in ("", "clip", "accumulation")
    # A few corners of the cube are enough for the additions.
    if not more or (count < 4 and not mixed)
]


@pytest.mark.parametrize(("world", "count", "mixed", "more"), CELLS)
def test_norms_agree_with_a_reference_in_double_precision(
    ranks: Ranks, world: str, count: int, mixed: bool, more: str
) -> None:
    args = {
        "world": world,
        "attach": "all",
        "steps": max(STEPS) + 1,
        "dump": STEPS,
        "mixed": mixed,
        "clip": 0.05 if more == "clip" else None,
        "accumulation": 3 if more == "accumulation" else 1,
        "snapshots": {"ram": False, "disk": False},
    }
    report = ranks.run("tests.support.ranks.loop:train", count, args=args)
    report.ended_well()
    norms = recorded(report.directory)
    for t in STEPS:
        norm, layers = norms[t]
        grads = judge.whole(report.directory, count, SHAPES, step=t, part="grads")
        references = [by_layer(grads)]
        if not mixed:
            weights = judge.whole(report.directory, count, SHAPES, step=t, part="weights")
            exact = in_double(weights, 4, t, count, args["accumulation"])
            references.append(by_layer(exact))
        for reference in references:
            whole = math.sqrt(sum(v * v for v in reference.values()))
            assert norm == pytest.approx(whole, rel=1e-5)
            for name, value in reference.items():
                # The column is float32; a layer whose gradient is all but zero rounds on its own.
                slack = 1e-6 * whole
                assert layers[name] == pytest.approx(value, rel=1e-5, abs=slack), name
        assert np.isfinite(list(layers.values())).all()

"""A whole session on a compiled model, every signal on: nothing more is compiled than without us.

Graphs, graph breaks and compilations after the warm-up are counted by torch.compile itself, in the
same loop watched and not; test_attention_compiled.py has the probes alone, in more ways.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import sentinel_hooks
from sentinel.core.types import (
    LAYER_ACTIVATION_RMS,
    LAYER_ATTENTION_MAX_LOGIT,
    LAYER_GRAD_NORM,
    LAYER_UPDATE_RATIO,
)
from sentinel.traces.reader import Reader
from sentinel_hooks import Signals
from sentinel_hooks.demo.corpus import Corpus
from sentinel_hooks.demo.model import GPT, Shape

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    # torch's own.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
SHAPE = Shape(width=16, heads=2, layers=3, rows=4, length=16)
WARM, STEPS = 2, 60  # past the first snapshot and the first batches kept for a canary


def compiled() -> dict[str, int]:
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "calls": counters["stats"]["calls_captured"],
        "breaks": sum(counters["graph_break"].values()),
        "frames": counters["frames"]["total"],
    }


def run(backend: str, blocks: bool, run_dir: Path | None) -> tuple[list[dict[str, int]], Any]:
    """(what was compiled, after the warm-up and at the end; what was measured)."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model, corpus = GPT(SHAPE), Corpus.load()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    call: Any = model
    if blocks:
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)
    else:
        call = torch.compile(model, backend=backend, fullgraph=True)
    session = None
    if run_dir is not None:
        session = sentinel_hooks.attach(
            model=call, optimizer=optimizer, sidecar=None, run_dir=run_dir, signals=Signals(every=2)
        )
    counts = []
    for step in range(STEPS):
        optimizer.zero_grad()
        call(*corpus.batch(0, step, SHAPE.rows, SHAPE.length)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step in (WARM, STEPS - 1):
            counts.append(compiled())
    measured: set[str] = set()
    if session is not None:
        assert session.status().blind_spots == ()
        assert session.status().internal_errors == {}
        session.detach()
        for record in Reader(session.directory).steps(columns=True):
            measured |= {*record.observation.columns, *record.observation.scalars}
    return counts, measured


@pytest.mark.parametrize("blocks", [False, True], ids=["model", "blocks"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_a_session_adds_no_graph_no_break_and_no_compilation(
    backend: str, blocks: bool, tmp_path: Path
) -> None:
    plain, _ = run(backend, blocks, None)
    watched, measured = run(backend, blocks, tmp_path)
    assert watched[0] == watched[1]  # nothing after the warm-up
    for when in (0, 1):
        assert watched[when]["breaks"] == 0
        for what in ("graphs", "frames"):
            assert watched[when][what] == plain[when][what], (plain, watched)
    assert measured >= {
        LAYER_GRAD_NORM,
        LAYER_ATTENTION_MAX_LOGIT,
        LAYER_ACTIVATION_RMS,
        LAYER_UPDATE_RATIO,
        "clipped_step_ratio",
        "memory_bytes/weights",
        "tokens_per_second",
    }

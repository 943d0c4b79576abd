"""What recording costs a step, and how soon a long run's curve is there.

    python -m tests.bench traces

Recording: the step's record with the columns of a 10 M-parameter GPT's layers, written to disk as
the session does it, against a training step of that model at 256 tokens. Reading: a run of a
million steps (its files are in the page cache), CPU time.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from sentinel.core import engine
from sentinel.core.policy import Policy
from sentinel.core.types import Observation, Outcome
from sentinel.traces.reader import Reader
from sentinel.traces.recorder import Recorder
from sentinel_hooks.layers import LayerTable
from tests.bench.loop import Loop, ten_million
from tests.bench.timing import cpu_us, machine, table
from tests.support.long_runs import write_run

STEPS = 1_000_000


def recording(directory: Path, layers: int) -> tuple[float, float]:
    """CPU microseconds and bytes of one step's record."""
    policy, state = Policy(), engine.initial()
    column = np.linspace(0.1, 1, layers, dtype=np.float32)
    seen = Observation(
        0,
        loss=3.0,
        grad_norm=1.0,
        lr=1e-3,
        shape=(2, 128),
        columns={"layer_grad_norm": column, "layer_max_abs": column},
    )
    decision = engine.decide(state, seen, policy)
    outcome = Outcome(0, decision.action, applied=True)
    state = engine.apply(state, seen, decision, outcome, policy)
    recorder = Recorder(directory, run="bench", policy=policy, state=state)
    calls = 0

    def step() -> None:
        nonlocal calls
        calls += 1
        recorder.step(seen, decision, outcome, state, gate_s=1e-3)

    spent = cpu_us(step)
    recorder.close()
    return spent, recorder.written_bytes / calls


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    loop = Loop(ten_million)
    bare = sorted(loop.step()["bare"] for _ in range(9))[4] * 1000
    layers = len(LayerTable.of((loop.model,)))
    directory = Path(tempfile.mkdtemp(dir=Path.cwd()))
    try:
        recorded, size = recording(directory / "short", layers)
        print(machine())
        print(
            table(
                f"Recording a step: {layers} layers, {size:.0f} bytes",
                [
                    ("10 M parameters, 256 tokens, one core", f"{bare:.0f}", "100"),
                    ("its record on disk", f"{recorded:.0f}", f"{100 * recorded / bare:.3f}"),
                ],
                ("what", "us", "% of the step"),
            )
        )
        write_run(directory / "long", STEPS, close_last=False)
        rows = []
        for name, call in (
            ("curve", lambda: Reader(directory / "long").curve()),
            ("overview", lambda: Reader(directory / "long").overview()),
        ):
            rows.append((name, f"{best_ms(call):.0f}"))
        on_disk = sum(p.stat().st_size for p in directory.rglob("*.seg")) / 2**20
        print(table(f"Reading {STEPS:,} steps ({on_disk:.0f} MiB)", rows, ("what", "ms")))
    finally:
        shutil.rmtree(directory)


def best_ms(call: Callable[[], object]) -> float:
    """Least milliseconds of CPU time of three."""
    times = []
    for _ in range(3):
        start = time.process_time_ns()
        call()
        times.append(time.process_time_ns() - start)
    return min(times) / 1e6


if __name__ == "__main__":
    main()

"""A process killed at any moment loses no step whose recording had returned."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sentinel.traces.reader import Reader
from sentinel.traces.replay import replay
from tests.support import ROOT

CHILD = """
import sys
from pathlib import Path
from sentinel.core.policy import Policy
from sentinel.core.state import State
from sentinel.traces.recorder import Recorder
from tests.support.simulated import SimulatedTrainer, ten_faults

recorder = Recorder(
    Path(sys.argv[1]), run="r", policy=Policy(), state=State(), segment_bytes=100_000
)
trainer = SimulatedTrainer(faults=ten_faults(), layers=2, recorder=recorder, keep_steps=False)
while True:
    step = trainer.state.step
    trainer.step()
    print(step, flush=True)
"""


@pytest.mark.e2e
def test_a_killed_process_loses_no_recorded_step(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert child.stdout is not None
    said = -1
    try:
        for line in child.stdout:
            said = int(line)
            if said >= 777:
                break
    finally:
        os.kill(child.pid, signal.SIGKILL)
        said = int(([str(said), *child.stdout.read().split()])[-1])
        child.wait()
        child.stdout.close()
    steps = [record.step for record in Reader(tmp_path).steps()]
    assert said >= 777
    assert steps == list(range(len(steps)))
    assert len(steps) > said
    report = replay(tmp_path)
    assert report.identical
    assert report.steps == len(steps)
    assert report.unverified == 0

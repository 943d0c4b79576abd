"""Every signal on, for thousands of steps: no tensor, no object and no graph is left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT

pytest.importorskip("torch")

pytestmark = [pytest.mark.torch, pytest.mark.e2e, pytest.mark.slow]

# Snapshots, saves and windows come and go: the least of many samples is compared, early and late.
TENSORS = 30
OBJECTS_A_STEP = 0.5
MIB = 1.0


def samples(
    run_dir: Path, steps: int, every: int, timeout: float
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    command = [sys.executable, "-m", "tests.support.all_signals", str(run_dir)]
    command += [str(steps), str(every)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    *found, end = (json.loads(line) for line in done.stdout.splitlines())
    return found, end


def assert_flat(found: list[dict[str, Any]], early: range, late: range) -> None:
    def least(what: str, when: range) -> float:
        return min(float(sample[what]) for sample in found if sample["step"] in when)

    assert {sample["graphs"] for sample in found} == {0}
    grown = {what: least(what, late) - least(what, early) for what in ("tensors", "objects", "mib")}
    print(grown)
    assert grown["tensors"] < TENSORS, found
    assert grown["objects"] < OBJECTS_A_STEP * (late.start - early.start), found
    assert grown["mib"] < MIB, found


def assert_lived(end: dict[str, Any], steps: int) -> None:
    """All of it took part, and nothing was switched off on the way."""
    assert end["errors"] == {}
    assert end["blind"] == []
    assert end["skipped"] == (steps - 333 + 399) // 400
    assert end["flags"]["attention_logit"] > 0
    assert set(end["levels"]) == {0, 1}  # bounds only, and few rows exact


def test_over_1500_steps(tmp_path: Path) -> None:
    found, end = samples(tmp_path, 1500, 50, timeout=280)
    assert_flat(found, range(800, 1101), range(1200, 1501))
    assert_lived(end, 1500)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_over_10000_steps(tmp_path: Path) -> None:
    found, end = samples(tmp_path, 10_000, 100, timeout=1100)
    assert_flat(found, range(2000, 4001), range(8000, 10_001))
    assert_lived(end, 10_000)

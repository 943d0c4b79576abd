"""Resident memory of a watched process: after warm-up it does not grow with the steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.sidecars import serving

pytest.importorskip("torch")

pytestmark = [pytest.mark.torch, pytest.mark.e2e, pytest.mark.slow]

STEPS, WARM, EVERY = 10_000, 3_000, 1_000
# 150 bytes a step. A record is 400, an observation in a list as much: kept, each would show.
ALLOWED_MIB = 1.0
# Frames wait for a busy sidecar and are sent together, now more of them and now fewer.
ALLOWED_WITH_SIDECAR_MIB = 2.5


def marathon(place: Path, *sidecar: str) -> tuple[dict[int, float], dict[str, Any]]:
    command = [sys.executable, "-m", "tests.support.marathon", str(place)]
    command += [str(STEPS), str(EVERY), *sidecar]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    *samples, end = (json.loads(line) for line in done.stdout.splitlines())
    return {sample["step"]: sample["mib"] for sample in samples}, end


def assert_flat(mib: dict[int, float], allowed: float = ALLOWED_MIB) -> None:
    assert mib[STEPS] - mib[WARM] < allowed, mib


def test_with_recording_snapshots_and_incidents(tmp_path: Path) -> None:
    mib, end = marathon(tmp_path)
    assert_flat(mib)
    assert end["rollbacks"] > 10, end
    assert end["on_disk"] > 1
    assert end["errors"] == {}


def test_with_a_sidecar(tmp_path: Path) -> None:
    with serving() as sidecar:
        mib, end = marathon(tmp_path, sidecar.url)
    assert_flat(mib, ALLOWED_WITH_SIDECAR_MIB)
    assert end["rollbacks"] > 10, end

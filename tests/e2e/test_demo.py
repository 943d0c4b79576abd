"""The demo for real: every world trained unprotected and protected, with a sidecar that decides.

This is the one long test of `make test`: ten training runs, about four minutes on two idle cores.
It runs `sentinel demo` once, as a user does, and judges the JSON that it wrote with numbers and
arithmetic of its own.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(2400)]

SEED = 0
STEPS = 240
GUESSING = math.log(256)  # what a model that knows nothing pays for a byte

Report = dict[str, Any]


def run_demo(*arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sentinel.cli.main", "demo", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, str]:
    """The demo's JSON and what it printed."""
    pytest.importorskip("torch")
    pytest.importorskip("uvicorn")
    path: Path = tmp_path_factory.mktemp("demo") / "demo.json"
    done = run_demo("--json", str(path), "--seed", str(SEED), timeout_s=2300)
    assert done.returncode == 0, done.stdout + done.stderr
    report: Report = json.loads(path.read_text())
    return report, done.stdout


@pytest.fixture(scope="module")
def report(finished: tuple[Report, str]) -> Report:
    return finished[0]


@pytest.fixture(scope="module")
def worlds(report: Report) -> dict[str, Report]:
    return {world["key"]: world for world in report["worlds"]}


def losses(report: Report, world: Report) -> tuple[float, float, float]:
    """Validation loss unprotected, protected and without a fault; nan counts as guessing."""
    found = [
        float(part["validation_loss"])
        for part in (world["unprotected"], world["protected"], report["fault_free"])
    ]
    unprotected, protected, free = (x if math.isfinite(x) else GUESSING for x in found)
    return unprotected, protected, free


def actions(world: Report) -> list[str]:
    return [action["action"] for action in world["protected"]["actions"]]


def test_all_five_worlds_are_there_in_the_published_format(
    report: Report, worlds: dict[str, Report]
) -> None:
    assert report["schema"] == 1
    assert set(report) >= {"machine", "measured_at", "fault_free", "worlds"}
    assert list(worlds) == ["none", "nan", "lr", "garbage", "weights"]
    assert 0.8e6 < report["parameters"] < 1.2e6
    assert report["steps"] == STEPS


@pytest.mark.parametrize("key", ["nan", "lr", "weights"])
def test_a_fault_that_ruins_the_run_is_mostly_undone(
    report: Report, worlds: dict[str, Report], key: str
) -> None:
    raw = float(worlds[key]["unprotected"]["validation_loss"])
    unprotected, protected, free = losses(report, worlds[key])
    assert math.isnan(raw) or unprotected >= 1.05 * free
    assert (unprotected - protected) / (unprotected - free) >= 0.6


def test_a_nan_gradient_costs_one_step_and_nothing_else(
    report: Report, worlds: dict[str, Report]
) -> None:
    assert math.isnan(float(worlds["nan"]["unprotected"]["validation_loss"]))
    assert actions(worlds["nan"]) == ["skip_step"]
    assert worlds["nan"]["protected"]["noticed_after_steps"] == 0
    assert worlds["nan"]["protected"]["lost_steps"] == 1
    _, protected, free = losses(report, worlds["nan"])
    assert protected < 1.01 * free


@pytest.mark.parametrize("key", ["lr", "weights"])
def test_damaged_weights_are_noticed_within_a_few_steps_and_rolled_back_once(
    worlds: dict[str, Report], key: str
) -> None:
    protected = worlds[key]["protected"]
    assert protected["noticed_after_steps"] in range(5)
    assert actions(worlds[key]).count("rollback") == 1
    (target,) = [a["target"] for a in protected["actions"] if a["action"] == "rollback"]
    assert 0 < target <= worlds[key]["fault_step"]


def test_garbage_batches_are_skipped_and_at_least_half_of_the_gap_is_closed_without_a_rollback(
    report: Report, worlds: dict[str, Report]
) -> None:
    unprotected, protected, free = losses(report, worlds["garbage"])
    assert (unprotected - protected) / (unprotected - free) >= 0.5
    done = actions(worlds["garbage"])
    assert "rollback" not in done
    assert 15 <= done.count("skip_step") <= 25


def test_nothing_is_done_to_a_run_without_a_fault(
    report: Report, worlds: dict[str, Report]
) -> None:
    assert actions(worlds["none"]) == []
    assert worlds["none"]["protected"]["lost_steps"] == 0
    assert worlds["none"]["protected"]["noticed_after_steps"] is None
    # Bitwise: an attached run without faults is the same run.
    assert (
        worlds["none"]["protected"]["validation_loss"] == (report["fault_free"]["validation_loss"])
    )


def test_the_sidecar_decided_and_its_metrics_moved(report: Report) -> None:
    metrics = report["sidecar"]["metrics"]
    decided = report["decided_by"]
    assert report["sidecar"]["used"]
    assert sum(decided.values()) == 5 * STEPS
    # How many of them depends on how busy the machine is: a late answer is the trainer's own.
    assert decided["sidecar"] > 0
    assert metrics['sentinel_decisions_total{source="sidecar"}'][1] > 0
    for name in ("steps", "skipped_steps", "rollbacks", "loss_spike_steps", "nonfinite_steps"):
        before, after = metrics[f"sentinel_{name}_total"]
        assert before == 0
        assert after > 0, f"sentinel_{name}_total did not move"
    # Whoever decided, the sidecar knows of every step in the end, but for the last of a run.
    assert 5 * STEPS - 5 <= metrics["sentinel_steps_total"][1] <= 5 * STEPS
    assert metrics["sentinel_rollbacks_total"][1] == 2


def test_progress_and_the_table_are_printed(finished: tuple[Report, str]) -> None:
    report, printed = finished
    assert f"seed {report['seed']}" in printed
    assert "runs |" in printed  # progress where there is no terminal
    for world in report["worlds"]:
        start = world["fault"] + "  "  # a cell of the table; other lines go on differently
        (row,) = [line for line in printed.splitlines() if line.startswith(start)]
        assert f"{float(world['unprotected']['validation_loss']):.3f}" in row
        assert f"{float(world['protected']['validation_loss']):.3f}" in row
    assert "sentinel_rollbacks_total" in printed

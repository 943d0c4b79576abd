"""`sentinel replay` tells the incidents of the run, not only whether its decisions are the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sentinel.cli.main import main
from sentinel.core.policy import Policy
from sentinel.core.state import State
from sentinel.traces.recorder import Recorder
from tests.support.simulated import NanGradient, SimulatedTrainer


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    recorder = Recorder(tmp_path / "r7", run="r7", policy=Policy(), state=State(), layers=())
    trainer = SimulatedTrainer(seed=3, faults=[NanGradient(40)], policy=Policy(), recorder=recorder)
    trainer.run(60)
    recorder.close()
    return tmp_path / "r7"


def test_replay_shows_what_went_wrong_and_what_was_done(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(recorded)]) == 0
    out = capsys.readouterr().out
    assert "incidents:" in out
    assert "skipped step 40: the gradients were NaN or inf" in out


def test_replay_as_json_holds_them_too(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(recorded), "--json"]) == 0
    (incident,) = json.loads(capsys.readouterr().out)["incidents"]
    assert incident["actions"] == [[40, "skip_step", "nonfinite_grad"]]


def test_a_run_without_any_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(tmp_path / "r8", run="r8", policy=Policy(), state=State(), layers=())
    SimulatedTrainer(seed=3, policy=Policy(), recorder=recorder).run(10)
    recorder.close()
    assert main(["replay", str(tmp_path / "r8")]) == 0
    assert capsys.readouterr().out.rstrip().endswith("no incidents")

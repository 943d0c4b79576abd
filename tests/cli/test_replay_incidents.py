"""`sentinel replay` tells the incidents of the run, not only whether its decisions are the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sentinel.cli.main import main
from sentinel.core import engine
from sentinel.core.policy import Policy
from sentinel.core.state import ENGINE_VERSION, State
from sentinel.core.types import Action, Protection
from sentinel.traces.recorder import Recorder
from tests.support.simulated import Damage, NanGradient, SimulatedTrainer


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


def test_a_rollback_says_where_it_went_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(tmp_path / "r9", run="r9", policy=Policy(), state=State(), layers=())
    trainer = SimulatedTrainer(
        seed=3, faults=[Damage(160, 3.0)], policy=Policy(), recorder=recorder
    )
    trainer.run(200)
    recorder.close()
    (at,) = [s for s in trainer.steps if s.decision.action is Action.ROLLBACK]
    step, target = at.observation.step, at.decision.target
    assert main(["replay", str(tmp_path / "r9")]) == 0
    assert f"rolled back at step {step} to step {target}: " in capsys.readouterr().out
    assert main(["replay", str(tmp_path / "r9"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["targets"] == [[step, target]]


@pytest.mark.parametrize("version", [ENGINE_VERSION, ENGINE_VERSION - 1])
def test_decisions_of_another_engine_differ_for_a_reason_that_is_said(
    version: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = Recorder(
        tmp_path / "r6",
        run="r6",
        policy=Policy(),
        state=State(),
        layers=(),
        engine_version=version,
    )
    SimulatedTrainer(seed=3, policy=Policy(), recorder=recorder).run(10)
    recorder.close()
    monkeypatch.setattr(engine, "_protection", lambda *_: Protection.BLIND)
    assert main(["replay", str(tmp_path / "r6")]) == 1
    out = capsys.readouterr().out
    assert "10 of 10 decisions differ" in out
    said = f"recorded by engine version {version}, computed again by {ENGINE_VERSION}" in out
    assert said is (version != ENGINE_VERSION)

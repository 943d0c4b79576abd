"""Replay: the decisions of a recorded run can be computed again, byte for byte."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sentinel.cli.main import main
from sentinel.core import engine
from sentinel.core.events import AutomationSet
from sentinel.core.policy import Policy
from sentinel.core.state import State
from sentinel.core.types import Action, Decision, Mode, Observation
from sentinel.traces.reader import Reader
from sentinel.traces.recorder import Recorder
from sentinel.traces.records import decode_step, encode_step
from sentinel.traces.replay import replay
from sentinel.traces.segments import FRAME, MAGIC, Kind, encode_frame, list_segments, read_segment
from tests.support.simulated import SimulatedTrainer, Step, actions, ten_faults

STEPS = 2000
LAYERS = 4


def record_run(
    directory: Path,
    *,
    steps: int = STEPS,
    policy: Policy | None = None,
    segment_bytes: int = 200_000,
    layers: int = LAYERS,
    seed: int = 11,
    **more: object,
) -> SimulatedTrainer:
    policy = policy or Policy()
    trainer = SimulatedTrainer(
        seed=seed,
        faults=ten_faults(steps),
        policy=policy,
        layers=layers,
        recorder=Recorder(
            directory,
            run="r7",
            policy=policy,
            state=State(),
            layers=[f"layer{i}" for i in range(layers)],
            segment_bytes=segment_bytes,
        ),
        **more,  # type: ignore[arg-type]
    )
    trainer.run(steps)
    assert trainer.recorder is not None
    trainer.recorder.close()
    return trainer


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Step]]:
    """A 2,000-step run with ten faults, in many segments."""
    directory = tmp_path_factory.mktemp("run") / "r7"
    trainer = record_run(directory)
    done = {(action, rule) for _, action, rule in actions(trainer.steps)}
    assert {
        ("SKIP_STEP", "nonfinite_grad"),
        ("SKIP_STEP", "grad_norm"),
        ("SKIP_STEP", "loss_outlier"),
        ("SKIP_STEP", "nonfinite_loss"),
        ("ROLLBACK", "loss_spike"),
    } <= done  # else this file tests little
    return directory, trainer.steps


@pytest.fixture
def copy(recorded: tuple[Path, list[Step]], tmp_path: Path) -> Path:
    """The recorded run, to be damaged."""
    return Path(shutil.copytree(recorded[0], tmp_path / "r7"))


def scalars(directory: Path) -> list[Path]:
    return [p for path in sorted(directory.iterdir()) for _, p in list_segments(path, "scalars")]


def test_recomputed_decisions_equal_the_recorded_ones_byte_for_byte(
    recorded: tuple[Path, list[Step]],
) -> None:
    report = replay(recorded[0])
    assert report.identical
    assert report.same_policy
    assert (report.steps, report.different, report.unverified) == (STEPS, 0, 0)
    assert report.segments > 3
    assert report.state_mismatches == 0
    assert report.lost_bytes == 0
    events = sum(len(step.events) for step in recorded[1])
    assert report.events == events


def edit(path: Path, step: int, change: Callable[[Observation], Observation]) -> bool:
    """Rewrite one step's observation in a segment; False when it is not in it."""
    out = [MAGIC]
    found = False
    for frame in read_segment(path).frames:
        payload = bytes(frame.payload)
        if frame.kind is Kind.STEP:
            record = decode_step(frame.payload, "")
            if record.step == step:
                found = True
                payload = encode_step(
                    change(record.observation),
                    record.decision,
                    record.outcome,
                    record.attempt,
                    record.gate_s,
                    record.at,
                    has_columns=record.has_columns,
                )
        out.append(encode_frame(frame.kind, payload))
    if found:
        path.write_bytes(b"".join(out))
    return found


@pytest.mark.parametrize(
    ("change", "action"),
    [
        pytest.param(lambda o: replace(o, loss=o.loss * 3), Action.SKIP_STEP, id="loss x3"),
        pytest.param(
            lambda o: replace(o, grad_norm=o.grad_norm * 30), Action.SKIP_STEP, id="norm x30"
        ),
        pytest.param(
            lambda o: replace(o, loss=math.nextafter(o.loss, 9)), Action.PROCEED, id="one ulp"
        ),
    ],
)
def test_changing_one_observation_changes_its_decision(
    copy: Path, change: Callable[[Observation], Observation], action: Action
) -> None:
    assert [edit(path, 1000, change) for path in scalars(copy)].count(True) == 1
    report = replay(copy)
    assert not report.identical
    first = report.differences[0]
    assert first.step == 1000
    assert first.recorded.action is Action.PROCEED
    assert first.recomputed.action is action
    assert first.recorded != first.recomputed


def test_rewriting_a_segment_without_a_change_changes_nothing(copy: Path) -> None:
    for path in scalars(copy):
        before = path.read_bytes()
        edit(path, 1000, lambda o: o)
        assert path.read_bytes() == before
    assert replay(copy).identical


def expected_after_cut(path: Path, cut: int) -> tuple[int, int]:
    """(steps left, bytes lost) by walking the frames with arithmetic alone."""
    data = path.read_bytes()[:cut]
    if cut < len(MAGIC):
        return 0, cut
    offset, steps = len(MAGIC), 0
    while offset + FRAME.size <= len(data):
        kind, length, _ = FRAME.unpack_from(data, offset)
        if offset + FRAME.size + length > len(data):
            break
        steps += kind == Kind.STEP
        offset += FRAME.size + length
    return steps, len(data) - offset


def test_a_trace_cut_at_random_bytes_replays_to_the_cut(tmp_path: Path) -> None:
    directory = tmp_path / "r"
    record_run(directory, steps=400, segment_bytes=80_000)
    paths = scalars(directory)
    assert len(paths) >= 3
    last = paths[-1]
    whole = last.read_bytes()
    before = sum(
        frame.kind is Kind.STEP for path in paths[:-1] for frame in read_segment(path).frames
    )
    rng = random.Random(2026)
    print("seed 2026")
    for cut in [0, 5, len(MAGIC), len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(12))]:
        last.write_bytes(whole[:cut])
        steps, lost = expected_after_cut(last, cut)
        report = replay(directory)
        assert report.identical, cut
        assert (report.steps, report.lost_bytes) == (before + steps, lost), cut
        assert report.unverified == 0
        assert len(report.damage) == (lost > 0 or cut == 0)
        last.write_bytes(whole)


def test_damage_in_the_middle_costs_one_segment_and_replay_goes_on_after_it(copy: Path) -> None:
    paths = scalars(copy)
    steps = [sum(f.kind is Kind.STEP for f in read_segment(p).frames) for p in paths]
    data = bytearray(paths[1].read_bytes())
    data[len(data) // 3] ^= 0xFF
    paths[1].write_bytes(data)
    left = sum(f.kind is Kind.STEP for f in read_segment(paths[1]).frames)
    report = replay(copy)
    assert report.identical
    assert 0 < left < steps[1]
    assert report.steps == STEPS - steps[1] + left
    assert report.missing == steps[1] - left
    assert [d.path for d in report.damage] == [paths[1]]


def steps_in(path: Path) -> int:
    return sum(frame.kind is Kind.STEP for frame in read_segment(path).frames)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize("which", [0, -1])
@pytest.mark.parametrize("part", [0.0, 0.4, 1.0])
def test_what_damage_inside_a_record_cost_is_counted_and_fails_the_command(
    copy: Path, capsys: pytest.CaptureFixture[str], which: int, part: float
) -> None:
    path = scalars(copy)[which]
    steps = [f for f in read_segment(path).frames if f.kind is Kind.STEP]
    hit = steps[int(part * (len(steps) - 1))]  # also the last step of all, before the index
    flip(path, hit.offset + FRAME.size + 9)
    lost = len(steps) - steps_in(path)
    assert lost > 0
    report = replay(copy)
    assert (report.identical, report.complete) == (True, False)
    assert (report.missing, report.steps) == (lost, STEPS - lost)
    assert [d.path for d in report.broken] == [path]
    assert command(str(copy)) == 1
    said = capsys.readouterr().out
    assert f"missing: {lost} steps are damaged or not in the trace" in said
    assert f"the record is not complete; the {STEPS - lost} recomputed decisions equal" in said
    assert command(str(copy), "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["identical"], told["complete"], told["missing"]) == (True, False, lost)


def test_a_header_that_is_damaged_costs_its_segment_and_that_is_said(copy: Path) -> None:
    path = scalars(copy)[-1]
    steps = steps_in(path)
    flip(path, len(MAGIC) + FRAME.size + 20)
    report = replay(copy)
    assert (report.missing, report.complete) == (steps, False)


@pytest.mark.parametrize("zeroed", [False, True])
def test_a_torn_tail_is_no_failure(
    copy: Path, capsys: pytest.CaptureFixture[str], zeroed: bool
) -> None:
    path = scalars(copy)[-1]
    data = path.read_bytes()
    kept = data[: len(data) // 2]
    path.write_bytes(kept + bytes(len(data) - len(kept) if zeroed else 0))
    report = replay(copy)
    assert report.complete
    assert report.damage
    assert report.steps < STEPS
    assert command(str(copy)) == 0
    assert "not complete" not in capsys.readouterr().out


def test_damage_inside_the_columns_fails_and_a_torn_end_of_them_does_not(tmp_path: Path) -> None:
    directory = tmp_path / "r"
    record_run(directory, steps=400, segment_bytes=80_000)
    (incarnation,) = directory.iterdir()
    last = [path for _, path in list_segments(incarnation, "layers")][-1]
    whole = last.read_bytes()
    last.write_bytes(whole[: len(whole) // 2])
    report = replay(directory)
    assert report.unverified > 0
    assert report.complete
    last.write_bytes(whole)
    flip(last, len(whole) // 2)
    assert not replay(directory).complete


def test_replay_starts_at_any_segment(copy: Path) -> None:
    paths = scalars(copy)
    gone = sum(f.kind is Kind.STEP for path in paths[:2] for f in read_segment(path).frames)
    for path in paths[:2]:
        path.unlink()
    report = replay(copy)
    assert report.identical
    assert report.steps == STEPS - gone
    assert report.missing == gone
    assert report.complete, "the oldest were dropped for space"
    assert replay(next(copy.iterdir())).missing == 0, "one incarnation may start anywhere"


def test_a_missing_segment_is_no_difference(copy: Path) -> None:
    paths = scalars(copy)
    gone = sum(f.kind is Kind.STEP for f in read_segment(paths[1]).frames)
    paths[1].unlink()
    report = replay(copy)
    assert report.identical
    assert (report.steps, report.unverified, report.missing) == (STEPS - gone, 0, gone)


def test_steps_whose_columns_are_lost_are_not_claimed_to_be_verified(tmp_path: Path) -> None:
    directory = tmp_path / "r"
    record_run(directory, steps=400, segment_bytes=80_000)
    (incarnation,) = directory.iterdir()
    layers = [path for _, path in list_segments(incarnation, "layers")]
    layers[0].write_bytes(layers[0].read_bytes()[:2000])
    report = replay(directory)
    assert report.identical
    assert report.unverified > 0
    assert report.steps > 0
    assert report.steps + report.unverified == 400
    assert [d.path for d in report.damage] == [layers[0]]


def test_a_changed_state_between_two_segments_is_noticed(copy: Path) -> None:
    paths = scalars(copy)
    (first, second) = (read_segment(p) for p in paths[:2])
    assert first.frames
    # Drop the last step of a segment as if it had never been there: no byte is damaged.
    frames = [f for f in first.frames if f.kind in (Kind.HEADER, Kind.STEP, Kind.EVENT)]
    kept = [f for f in frames if f is not frames[-1]]
    paths[0].write_bytes(MAGIC + b"".join(encode_frame(f.kind, bytes(f.payload)) for f in kept))
    report = replay(copy)
    assert second.frames
    assert report.state_mismatches == 1
    assert not report.identical


def test_another_policy_lists_what_it_would_have_decided(recorded: tuple[Path, list[Step]]) -> None:
    stricter = Policy.parse('[rules.loss_outlier]\nmode = "off"\n[canary]\nmode = "off"\n', "mine")
    report = replay(recorded[0], stricter)
    assert not report.same_policy
    assert report.policy == "mine"
    assert report.steps == STEPS
    assert report.state_mismatches == 0
    assert 0 < report.different < 100
    for difference in report.differences:
        a, b = difference.recorded, difference.recomputed
        assert (a.action, a.rule, a.target) != (b.action, b.rule, b.target)


def test_another_policy_keeps_statistics_of_its_own_also_over_a_rollback(
    recorded: tuple[Path, list[Step]], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy.parse("[spike]\nwindow = 32\nwarmup = 24\n", "short")
    seen = []

    def decide(state: State, observation: Observation, policy: Policy) -> Decision:
        seen.append(len(state.stats.spike.losses))
        return real(state, observation, policy)

    real = engine.decide
    monkeypatch.setattr(engine, "decide", decide)
    replay(recorded[0], policy)
    assert len(seen) == STEPS
    assert max(seen) == 32


def test_the_observing_policy_would_have_done_nothing(recorded: tuple[Path, list[Step]]) -> None:
    report = replay(recorded[0], replace(Policy(), name="watch", mode=Mode.OBSERVE))
    acted = actions(recorded[1])
    assert {d.step for d in report.differences} >= {step for step, _, _ in acted}
    assert all(d.recomputed.action is Action.PROCEED for d in report.differences)


def test_the_same_policy_given_by_hand_is_compared_byte_for_byte(
    recorded: tuple[Path, list[Step]],
) -> None:
    report = replay(recorded[0], Policy())
    assert report.same_policy
    assert report.identical


def test_a_run_of_several_processes_replays_as_one(tmp_path: Path) -> None:
    first = record_run(tmp_path / "r", steps=300)
    second = SimulatedTrainer(
        seed=11,
        faults=ten_faults(300),
        state=first.state,
        weights=first.weights,
        layers=LAYERS,
        recorder=Recorder(
            tmp_path / "r", run="r7", policy=Policy(), state=first.state, layers=["a"] * LAYERS
        ),
    )
    second.note(AutomationSet(second.state.step, paused=True, by="a person"))
    second.run(100)
    assert second.recorder is not None
    second.recorder.close()
    report = replay(tmp_path / "r")
    assert report.identical
    assert (report.steps, report.incarnations) == (400, 2)
    assert [r.step for r in Reader(tmp_path / "r").steps()] == list(range(400))


def test_a_run_with_failing_restores_and_no_canary_replays(tmp_path: Path) -> None:
    record_run(tmp_path / "a", steps=600, layers=0, restores=False)
    record_run(tmp_path / "b", steps=600, layers=0, canary=False)
    assert replay(tmp_path / "a").identical
    assert replay(tmp_path / "b").identical


# ---- the command ------------------------------------------------------------------------------


def command(*arguments: str) -> int:
    return main(["replay", *arguments])


def test_the_command_says_that_a_run_is_the_same(
    recorded: tuple[Path, list[Step]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(str(recorded[0])) == 0
    out = capsys.readouterr().out
    assert "2000 steps" in out
    assert "byte for byte" in out


def test_the_command_finds_a_run_by_its_id(
    recorded: tuple[Path, list[Step]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("r7", "--run-dir", str(recorded[0].parent)) == 0
    assert "r7" in capsys.readouterr().out


def test_the_command_shows_the_first_difference_and_fails(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in scalars(copy):
        edit(path, 1000, lambda o: replace(o, loss=math.inf))
    assert command(str(copy)) == 1
    out = capsys.readouterr().out
    assert "1000" in out
    assert "nonfinite_loss" in out
    assert command(str(copy), "--json") == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["differences"][0]["step"] == 1000
    assert shown["differences"][0]["recomputed"]["action"] == "skip_step"


def test_the_command_with_another_policy_is_no_failure(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "mine.toml"
    policy.write_text("[grad_norm]\nfactor = 1000\n")
    assert command(str(copy), "--policy", str(policy)) == 0
    out = capsys.readouterr().out
    assert "mine" in out
    assert "grad_norm" in out


def test_the_command_explains_a_wrong_place_and_a_wrong_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("nowhere", "--run-dir", str(tmp_path)) == 2
    assert "there is no run 'nowhere'" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert command("empty", "--run-dir", str(tmp_path)) == 2
    assert "holds no trace" in capsys.readouterr().err
    assert command(str(tmp_path), "--policy", str(tmp_path / "none.toml")) == 2
    assert "policy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("dirty", "told"), [(True, "0123456789ab with changes"), (False, "0123456789ab"), (None, "ab")]
)
def test_the_command_says_what_recorded_the_run_and_what_is_missing(
    copy: Path, capsys: pytest.CaptureFixture[str], dirty: bool | None, told: str
) -> None:
    assert command(str(copy)) == 0
    said = capsys.readouterr().out
    assert "recorded with" not in said
    assert "missing" not in said
    paths = scalars(copy)
    gone = sum(f.kind is Kind.STEP for f in read_segment(paths[1]).frames)
    paths[1].unlink()
    versions = {"sentinel": "0.1.0", "torch": "2.6.0", "python": "3.11.7", "numpy": "2.0"}
    code = {"commit": "0123456789abcdef", "dirty": dirty}
    config = paths[0].with_name("config.json")
    config.write_text(json.dumps({"versions": versions, "code": code}))
    assert command(str(copy)) == 1, "a hole in the middle"
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == (
        "recorded with sentinel 0.1.0, torch 2.6.0, python 3.11.7, "
        f"commit {'0123456789' if dirty is None else ''}{told} (config.json has the rest)"
    )
    assert lines[2] == f"missing: {gone} steps are not in the trace"
    config.write_text("[1, 2")
    assert command(str(copy)) == 1
    assert "recorded with" not in capsys.readouterr().out

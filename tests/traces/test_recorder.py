"""Recorder and reader: what was written is read back, whatever happens to the disk."""

from __future__ import annotations

import math
import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from sentinel.core.errors import TraceError
from sentinel.core.events import Event, SnapshotTaken
from sentinel.core.policy import Policy
from sentinel.core.state import Ledger, State
from sentinel.core.types import (
    NO_COLUMNS,
    Action,
    Column,
    Decision,
    Finding,
    Mode,
    Observation,
    Outcome,
    Protection,
    Readings,
    Severity,
    Source,
    Status,
)
from sentinel.traces import recorder as recorder_module
from sentinel.traces import segments
from sentinel.traces.reader import Curve, Reader
from sentinel.traces.recorder import Recorder, list_incarnations
from sentinel.traces.records import StepRecord, decode_header
from sentinel.traces.segments import list_segments, read_segment
from sentinel.traces.summary import (
    BUCKET,
    decode_summary,
    encode_summary,
    encode_trailer,
    read_summary,
    summarise,
)
from sentinel.wire import codec
from tests.support import FakeClock
from tests.support.long_runs import write_run

POLICY = Policy()
LAYERS = ["embed", "blocks.0", "blocks.1", "head"]


def columns_of(step: int) -> dict[str, Column]:
    rng = np.random.default_rng(step)
    columns = {"layer_grad_norm": rng.normal(size=len(LAYERS)).astype(np.float32)}
    if step % 10 == 0:
        columns["layer_update_ratio"] = np.full(len(LAYERS), np.nan, dtype=np.float32)
    return columns


def observation(step: int, *, columns: bool = False) -> Observation:
    loss: float | None = 3.0 - step * 1e-3
    if step % 17 == 3:
        loss = math.nan
    if step % 19 == 5:
        loss = None
    return Observation(
        step,
        loss=loss,
        grad_norm=math.inf if step % 23 == 7 else 1.5 + step,
        lr=1e-3,
        shape=(1, 8),
        batch_id=f"b{step}",
        columns=columns_of(step) if columns else NO_COLUMNS,
    )


def decision(step: int) -> Decision:
    return Decision(
        step=step,
        action=Action.SKIP_STEP if step % 5 == 0 else Action.PROCEED,
        rule="grad_norm" if step % 5 == 0 else "",
        reason="the gradient norm is 12 times its mean" if step % 5 == 0 else "",
        would=Action.PROCEED,
        target=None,
        lr_factor=1.0,
        keep_batch=True,
        drop_canaries=False,
        take_snapshot=False,
        findings=(Finding("norm_band", Severity.INFO, "norm above 10", 12.0),),
        readings=Readings(
            spike_score=math.nan,
            spike_level=0,
            loss_baseline=2.9,
            norm_status=Status.NORMAL,
            norm_baseline=1.5,
            norm_ratio=1.0,
            drift=0.01,
            quiet=True,
            protection=Protection.ARMED,
        ),
    )


def outcome(step: int) -> Outcome:
    return Outcome(step, Action.PROCEED, applied=step % 5 != 0, source=Source.SIDECAR)


def state_at(step: int) -> State:
    return State(step=step, ledger=Ledger(attempt=step // 100))


def record(
    recorder: Recorder, start: int, stop: int, *, columns: bool = False, events: int = 0
) -> None:
    for step in range(start, stop):
        if events and step % events == 0:
            recorder.event(SnapshotTaken(step), state_at(step))
        recorder.step(
            observation(step, columns=columns),
            decision(step),
            outcome(step),
            state_at(step + 1),
            gate_s=step * 1e-6,
        )


def new_recorder(directory: Path, *, start: int = 0, **more: object) -> Recorder:
    return Recorder(
        directory,
        run="r7",
        policy=POLICY,
        state=state_at(start),
        layers=LAYERS,
        **more,  # type: ignore[arg-type]
    )


def same(got: Observation, wanted: Observation) -> bool:
    return codec.encode_observation(got) == codec.encode_observation(wanted)


def test_steps_and_events_come_back_in_the_order_they_happened(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path)
    record(recorder, 0, 60, events=20)
    recorder.close()
    items = list(Reader(tmp_path))
    wanted: list[int | Event] = []
    for step in range(60):
        if step % 20 == 0:
            wanted.append(SnapshotTaken(step))
        wanted.append(step)
    assert [i.step if isinstance(i, StepRecord) else i for i in items] == wanted
    for item in items:
        if isinstance(item, StepRecord):
            assert same(item.observation, observation(item.step))
            assert item.decision_bytes == codec.encode_decision(decision(item.step))
            assert repr(item.decision) == repr(decision(item.step))  # repr: nan equals nan
            assert item.outcome == outcome(item.step)
            assert item.gate_s == item.step * 1e-6
            assert item.at is None


def test_what_was_recorded_can_be_read_before_the_recorder_is_closed(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path)
    record(recorder, 0, 3)
    assert [r.step for r in Reader(tmp_path).steps()] == [0, 1, 2]
    recorder.close()


def test_columns_are_joined_by_step_and_not_read_without_need(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path, segment_bytes=2000)
    for step in range(100):
        record(recorder, step, step + 1, columns=step % 3 == 0)
    recorder.close()
    joined = list(Reader(tmp_path).steps(columns=True))
    assert [r.step for r in joined] == list(range(100))
    for r in joined:
        assert r.has_columns == (r.step % 3 == 0)
        assert same(r.observation, observation(r.step, columns=r.step % 3 == 0))
    for _, path in list_segments(recorder.directory, "layers"):
        path.unlink()
    bare = list(Reader(tmp_path).steps())
    assert [r.has_columns for r in bare] == [step % 3 == 0 for step in range(100)]
    assert all(not r.observation.columns for r in bare)


def test_the_curve_tells_nan_from_not_measured(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path)
    record(recorder, 0, 50, columns=True)
    recorder.close()
    curve = Reader(tmp_path).curve()
    assert curve.step.tolist() == list(range(50))
    for step in range(50):
        loss = observation(step).loss
        assert curve.loss_measured[step] == (loss is not None)
        if loss is not None and not math.isnan(loss):
            assert curve.loss[step] == loss
        else:
            assert math.isnan(curve.loss[step])
        assert curve.grad_norm[step] == observation(step).grad_norm
    assert curve.norm_measured.all()


def curve_by_parsing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Curve:
    with monkeypatch.context() as patch:
        patch.setattr("sentinel.traces.reader.read_index", lambda path: None)
        return Reader(directory).curve()


def assert_equal_curves(got: Curve, wanted: Curve) -> None:
    for field in fields(Curve):
        np.testing.assert_array_equal(getattr(got, field.name), getattr(wanted, field.name))


def test_the_curve_of_closed_segments_is_the_one_that_their_steps_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = new_recorder(tmp_path, segment_bytes=8000)
    record(recorder, 0, 250, columns=True, events=7)
    closed = len(list_segments(recorder.directory, "scalars")) - 1
    reader = Reader(tmp_path)
    curve = reader.curve()
    assert closed > 5
    assert [path.name for path in reader.parsed] == [f"scalars-{closed:05d}.seg"], "the open one"
    assert_equal_curves(curve, curve_by_parsing(tmp_path, monkeypatch))
    assert curve.attempt.tolist() == [s // 100 for s in range(250)]
    assert curve.lr.tolist() == [1e-3] * 250
    recorder.close()
    reader = Reader(tmp_path)
    assert_equal_curves(reader.curve(), curve)
    assert reader.parsed == []
    assert reader.damage == ()


@pytest.mark.parametrize("record_kind", [segments.Kind.INDEX, segments.Kind.SUMMARY])
def test_a_damaged_end_of_a_segment_costs_time_and_no_step(
    tmp_path: Path, record_kind: segments.Kind
) -> None:
    recorder = new_recorder(tmp_path, segment_bytes=8000)
    record(recorder, 0, 250)
    recorder.close()
    whole = Reader(tmp_path).curve()
    path = list_segments(recorder.directory, "scalars")[2][1]
    (frame,) = (f for f in read_segment(path).frames if f.kind is record_kind)
    data = bytearray(path.read_bytes())
    data[frame.offset + segments.FRAME.size + 3] ^= 1
    path.write_bytes(data)
    reader = Reader(tmp_path)
    assert_equal_curves(reader.curve(), whole)
    assert reader.parsed == [path]
    assert [(d.path, d.offset) for d in reader.damage] == [(path, frame.offset)]


def test_the_curve_of_a_run_recorded_before_there_was_an_index_is_read_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = recorder_module.footer
    monkeypatch.setattr(
        recorder_module,
        "footer",
        lambda index, offset: [
            (segments.Kind.SUMMARY, encode_summary(decode_summary(real(index, offset)[1][1]))),
            (segments.Kind.TRAILER, encode_trailer(offset)),
        ],
    )
    recorder = new_recorder(tmp_path)
    record(recorder, 0, 100)
    recorder.close()
    reader = Reader(tmp_path)
    assert reader.curve().step.tolist() == list(range(100))
    assert len(reader.parsed) == 1
    assert reader.damage == ()
    assert reader.overview().last[-1] == 99
    assert reader.parsed == []


@pytest.mark.slow
def test_the_curve_of_a_million_steps_is_there_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, 1_000_000, close_last=False)
    reader, began = Reader(tmp_path), time.process_time()
    curve = reader.curve()
    took = time.process_time() - began
    assert len(curve.step) == 1_000_000
    assert len(reader.parsed) == 1
    assert took < 5.0  # a wide margin: `make bench` has the figure, `parsed` is the proof
    assert_equal_curves(curve, curve_by_parsing(tmp_path, monkeypatch))
    assert np.isnan(curve.loss).sum() > 100
    assert (~curve.loss_measured).sum() > 100


def test_every_scalars_segment_starts_with_the_state_before_its_first_record(
    tmp_path: Path,
) -> None:
    recorder = new_recorder(tmp_path, segment_bytes=8000)
    record(recorder, 0, 120, events=7)
    recorder.close()
    paths = [path for _, path in list_segments(recorder.directory, "scalars")]
    assert len(paths) > 5
    for chapter in Reader(tmp_path).chapters():
        assert chapter.header is not None
        state = codec.decode_state(chapter.header.state)
        first = next(iter(Reader(tmp_path).items(chapter)))
        assert state.step == first.step
        assert state == state_at(first.step)
        assert codec.decode_policy(chapter.header.policy) == POLICY
        assert chapter.header.layers == LAYERS
    contiguous = [chapter.contiguous for chapter in Reader(tmp_path).chapters()]
    assert contiguous == [False] + [True] * (len(paths) - 1)


def test_the_attempt_of_a_step_is_the_one_it_was_decided_in(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path)
    record(recorder, 0, 250)
    recorder.close()
    assert [r.attempt for r in Reader(tmp_path).steps()] == [s // 100 for s in range(250)]


def test_a_restarted_process_is_the_next_incarnation(tmp_path: Path) -> None:
    for number, name in enumerate(["zz", "aa", "mm"]):
        recorder = new_recorder(tmp_path, start=number * 10, incarnation=name)
        record(recorder, number * 10, number * 10 + 10)
        recorder.close()
    names = [path.name for path in list_incarnations(tmp_path)]
    assert names == ["0000-zz", "0001-aa", "0002-mm"]
    assert [r.step for r in Reader(tmp_path).steps()] == list(range(30))
    assert [r.step for r in Reader(tmp_path / "0001-aa").steps()] == list(range(10, 20))


def test_an_incarnation_id_cannot_leave_the_run_directory(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path / "run", incarnation="../../etc")
    recorder.close()
    assert recorder.directory.parent == tmp_path / "run"


def test_a_trace_cut_anywhere_is_read_up_to_the_cut_and_the_tail_is_counted(
    tmp_path: Path,
) -> None:
    recorder = new_recorder(tmp_path)
    record(recorder, 0, 40, events=10)
    recorder.close()
    (path,) = (p for _, p in list_segments(recorder.directory, "scalars"))
    data = path.read_bytes()
    frames = read_segment(path).frames
    ends = [f.offset + segments.FRAME.size + len(f.payload) for f in frames]
    steps_until = [
        sum(f.kind is segments.Kind.STEP for f in frames[: i + 1]) for i in range(len(frames))
    ]
    rng = random.Random(5)
    for cut in sorted({0, 1, 7, 8, 9, *ends, *(rng.randrange(len(data)) for _ in range(150))}):
        path.write_bytes(data[:cut])
        reader = Reader(tmp_path)
        got = [r.step for r in reader.steps()]
        whole = [i for i, end in enumerate(ends) if end <= cut]
        wanted = steps_until[whole[-1]] if whole else 0
        assert got == list(range(wanted)), cut
        last_good = ends[whole[-1]] if whole else (8 if cut >= 8 else 0)
        assert reader.lost_bytes == cut - last_good, cut


@pytest.mark.parametrize(
    ("share", "contiguous"),
    [
        pytest.param(0.9, [False, True, False, True], id="in a step"),
        pytest.param(0.05, [False, False, False, True], id="in the header"),
    ],
)
def test_a_flipped_bit_costs_the_rest_of_its_segment(
    tmp_path: Path, share: float, contiguous: list[bool]
) -> None:
    recorder = new_recorder(tmp_path, segment_bytes=6000)
    record(recorder, 0, 100)
    recorder.close()
    path = list_segments(recorder.directory, "scalars")[1][1]
    data = bytearray(path.read_bytes())
    data[int(len(data) * share)] ^= 0x10
    path.write_bytes(data)
    reader = Reader(tmp_path)
    got = [r.step for r in reader.steps()]
    assert got == sorted(got)
    assert got[0] == 0
    assert got[-1] == 99
    assert 70 < len(got) < 100
    assert [d.path for d in reader.damage] == [path]
    assert [c.contiguous for c in Reader(tmp_path).chapters()][:4] == contiguous


def test_zeroed_pages_are_damage_not_records(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path)
    record(recorder, 0, 5)
    recorder.close()
    (path,) = (p for _, p in list_segments(recorder.directory, "scalars"))
    with path.open("ab") as file:
        file.write(bytes(4096))
    reader = Reader(tmp_path)
    assert len(list(reader.steps())) == 5
    assert reader.lost_bytes == 4096


def test_nothing_there_is_said_with_the_place(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"holds no trace.*0000-"):
        Reader(tmp_path / "no-such-run")


def test_another_format_is_refused_with_both_versions(tmp_path: Path) -> None:
    payload = msgspec.msgpack.encode(
        {
            "format": 9,
            "stream": "scalars",
            "number": 0,
            "run": "r",
            "incarnation": "",
            "engine_version": 1,
            "some_later_field": 3,
        }
    )
    with pytest.raises(TraceError, match="format 9, this sentinel reads format 1"):
        decode_header(payload, "x.seg")


class FullDisk:
    """os.write that takes `allowed` bytes and then fails, until `freed`."""

    def __init__(self, allowed: int) -> None:
        self.left = allowed
        self.real: Callable[[int, bytes], int] = os.write

    def __call__(self, fd: int, data: bytes) -> int:
        if self.left == 0:
            raise OSError(28, "No space left on device")
        written = self.real(fd, data[: self.left])
        self.left -= written
        return written


def test_a_full_disk_raises_and_recording_resumes_in_a_fresh_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = new_recorder(tmp_path)
    record(recorder, 0, 10)
    disk = FullDisk(700)
    monkeypatch.setattr(segments.os, "write", disk)
    failed = []
    for step in range(10, 20):
        try:
            record(recorder, step, step + 1)
        except OSError:
            failed.append(step)
    assert failed
    assert failed[-1] == 19
    disk.left = 10**9
    record(recorder, 20, 30)
    recorder.close()
    reader = Reader(tmp_path)
    got = [r.step for r in reader.steps()]
    assert got == [s for s in range(30) if s not in failed]
    assert reader.lost_bytes == 0  # half a record was taken back
    last = list(reader.chapters())[-1]
    assert last.header is not None
    assert last.header.after_gap
    assert not last.contiguous
    assert codec.decode_state(last.header.state) == state_at(20)


def test_a_recorder_that_cannot_begin_says_why_and_begins_later(tmp_path: Path) -> None:
    place = tmp_path / "run"
    place.write_text("a file where the directory should be")
    recorder = new_recorder(place, config=b"{}")
    assert "File exists" in recorder.trouble
    for step in range(5):
        with pytest.raises(OSError, match="File exists"):
            record(recorder, step, step + 1)
    assert recorder.lost_records == 5
    place.unlink()
    record(recorder, 5, 10)
    assert recorder.trouble == ""
    assert recorder.lost_records == 5
    recorder.close()
    reader = Reader(place)
    assert [r.step for r in reader.steps()] == list(range(5, 10))
    (chapter,) = reader.chapters()
    assert chapter.header is not None
    assert chapter.header.after_gap
    assert codec.decode_state(chapter.header.state) == state_at(5)
    assert reader.configuration() == {}


@pytest.mark.parametrize("what", ["everything", "the open segment", "the columns"])
def test_files_that_vanish_are_noticed_at_the_next_record(tmp_path: Path, what: str) -> None:
    recorder = new_recorder(tmp_path / "r", segment_bytes=8000, config=b"{}")
    record(recorder, 0, 100, columns=True)
    opened = [list_segments(recorder.directory, s)[-1][1] for s in ("scalars", "layers")]
    first = next(iter(read_segment(opened[0]).frames[1:]))
    start = int(np.frombuffer(first.payload[:8], "<i8")[0])
    if what == "everything":
        shutil.rmtree(tmp_path / "r")
    else:
        opened[what == "the columns"].unlink()
    record(recorder, 100, 150, columns=True)
    recorder.close()
    reader = Reader(tmp_path / "r")
    gone = {"everything": range(100), "the open segment": range(start, 100), "the columns": ()}
    assert recorder.lost_records == len(gone[what])
    assert [r.step for r in reader.steps()] == sorted({*range(150)} - {*gone[what]})
    assert [c.header.after_gap for c in reader.chapters() if c.header].count(True) == 1
    assert reader.configuration() == {}
    with_columns = [r.step for r in reader.steps(columns=True) if r.observation.columns]
    assert set(range(100, 150)) <= set(with_columns)


def test_without_room_for_the_configuration_the_steps_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = True

    def write(path: Path, data: bytes) -> None:
        path.with_name(path.name + ".tmp").write_bytes(b"half")
        if full:
            raise OSError(28, "No space left on device")
        path.with_name(path.name + ".tmp").replace(path)

    monkeypatch.setattr(recorder_module, "write_durably", write)
    recorder = new_recorder(tmp_path, segment_bytes=3000, config=b"{}")
    record(recorder, 0, 3)
    assert Reader(tmp_path).configuration() is None
    assert not list(tmp_path.rglob("*.tmp"))
    full = False
    record(recorder, 3, 40)
    recorder.close()
    assert list(recorder.directory.glob("config.json"))
    assert [r.step for r in Reader(tmp_path).steps()] == list(range(40))


def test_a_disk_that_is_slow_again_and_again_is_left_alone_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, slow = FakeClock(), 0.0
    real = os.write

    def write(fd: int, data: bytes) -> int:
        clock.advance(slow)
        return real(fd, data)

    monkeypatch.setattr(segments.os, "write", write)
    recorder = new_recorder(tmp_path, timer=clock)
    record(recorder, 0, 10)
    slow = 3.0
    record(recorder, 10, 11)  # once is no reason
    slow = 0.0
    record(recorder, 11, 20)
    slow = 3.0
    record(recorder, 20, 21)
    before = clock.now
    for step in range(21, 500):
        with pytest.raises(OSError, match=r"the disk is slow: .* left alone for \d+ s"):
            record(recorder, step, step + 1)
        clock.advance(0.1)
    assert recorder.lost_records == 479
    assert clock.now - before < 60, "none of these touched the disk"
    clock.advance(60)
    slow = 3.0
    record(recorder, 500, 501)  # tried again, and slow still
    with pytest.raises(OSError, match="left alone"):
        record(recorder, 501, 502)
    clock.advance(10_000)
    slow = 0.0
    record(recorder, 502, 510)
    recorder.close()
    got = [r.step for r in Reader(tmp_path).steps()]
    assert got == [*range(21), 500, *range(502, 510)]


def test_the_oldest_columns_are_dropped_first_when_space_runs_out(tmp_path: Path) -> None:
    limit = 360_000
    wide = {"layer_grad_norm": np.zeros(500, np.float32)}
    for start in (0, 60, 120):
        recorder = new_recorder(tmp_path, start=start, segment_bytes=8000, limit_bytes=limit)
        for step in range(start, start + 60):
            seen = replace(observation(step), columns=wide)
            recorder.step(seen, decision(step), outcome(step), state_at(step + 1))
        recorder.close()
    assert sum(p.stat().st_size for p in tmp_path.rglob("*.seg")) <= limit
    assert recorder.dropped_segments > 0
    assert [r.step for r in Reader(tmp_path).steps()] == list(range(180))
    left = [r.step for r in Reader(tmp_path).steps(columns=True) if r.observation.columns]
    assert left == list(range(left[0], 180))
    assert left[0] > 60


def test_without_columns_to_drop_the_oldest_steps_go(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path, segment_bytes=4000, limit_bytes=40_000)
    record(recorder, 0, 200)
    recorder.close()
    assert sum(p.stat().st_size for p in tmp_path.rglob("*.seg")) <= 40_000
    left = [r.step for r in Reader(tmp_path).steps()]
    assert left == list(range(left[0], 200))
    assert left[0] > 0


def test_a_stretch_without_a_finite_value_has_no_extremes() -> None:
    steps, losses = np.arange(BUCKET + 1), np.array([math.nan] * BUCKET + [2.0])
    summary = decode_summary(encode_summary(summarise(steps, losses, losses)))
    assert math.isnan(summary.loss_min[0])
    assert math.isnan(summary.loss_max[0])
    assert (summary.loss_min[1], summary.loss_max[1]) == (2.0, 2.0)
    assert summary.nonfinite.tolist() == [BUCKET, 0]


def test_closed_segments_carry_the_extremes_of_their_steps(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path)
    record(recorder, 0, 200)
    (path,) = (p for _, p in list_segments(recorder.directory, "scalars"))
    assert read_summary(path) is None  # still open
    recorder.close()
    summary = read_summary(path)
    assert summary is not None
    assert summary.first.tolist() == list(range(0, 200, BUCKET))
    assert summary.last.tolist() == [63, 127, 191, 199]
    for i, start in enumerate(range(0, 200, BUCKET)):
        seen = [observation(s) for s in range(start, min(start + BUCKET, 200))]
        losses = [o.loss for o in seen if o.loss is not None and math.isfinite(o.loss)]
        norms = [o.grad_norm for o in seen if o.grad_norm and math.isfinite(o.grad_norm)]
        assert (summary.loss_min[i], summary.loss_max[i]) == (min(losses), max(losses))
        assert (summary.norm_min[i], summary.norm_max[i]) == (min(norms), max(norms))
        assert summary.nonfinite[i] == len(seen) - len(
            [
                o
                for o in seen
                if o.loss is not None
                and math.isfinite(o.loss)
                and math.isfinite(o.grad_norm or math.nan)
            ]
        )


def test_the_overview_is_the_same_whether_segments_are_closed_or_not(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path, segment_bytes=60_000)
    record(recorder, 0, 250)
    open_ = Reader(tmp_path).overview()
    assert len(list_segments(recorder.directory, "scalars")) > 1
    recorder.close()
    closed = Reader(tmp_path).overview()
    for name in ("first", "last", "loss_min", "loss_max", "norm_min", "norm_max", "nonfinite"):
        np.testing.assert_array_equal(getattr(open_, name), getattr(closed, name))
    assert closed.last[-1] == 249
    assert (closed.first[1:] == closed.last[:-1] + 1).all()


def test_a_closed_recorder_refuses_and_closing_twice_is_fine(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path)
    record(recorder, 0, 2)
    recorder.close()
    recorder.close()
    with pytest.raises(OSError, match="closed"):
        record(recorder, 2, 3)


def test_an_empty_recording_is_readable(tmp_path: Path) -> None:
    new_recorder(tmp_path).close()
    assert list(Reader(tmp_path)) == []
    assert len(Reader(tmp_path).curve().step) == 0


def test_the_policy_is_recorded_whole(tmp_path: Path) -> None:
    policy = replace(POLICY, name="mine", mode=Mode.OBSERVE)
    Recorder(tmp_path, run="r", policy=policy, state=State()).close()
    (chapter,) = Reader(tmp_path).chapters()
    assert chapter.header is not None
    assert codec.decode_policy(chapter.header.policy) == policy

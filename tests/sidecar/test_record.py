"""The sidecar's record: on disk before it is answered, the same rows as the trainer's own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select

from sentinel.core.types import Action, Outcome
from sentinel.sidecar import exporter
from sentinel.sidecar.app import create_app
from sentinel.sidecar.runs import RefusedError, details, summary
from sentinel.sidecar.service import Service
from sentinel.sidecar.settings import Settings
from sentinel.sidecar.store import record as records
from sentinel.sidecar.store.models import DecisionRow, IncidentRow, RunRow
from sentinel.sidecar.store.record import Seen
from sentinel.traces.replay import replay
from sentinel.traces.segments import SegmentWriter
from sentinel.wire import messages
from sentinel.wire.messages import Close
from tests.support import FakeClock
from tests.support.reports import Reporter, expected
from tests.support.simulated import (
    Damage,
    Garbage,
    LogitGrowth,
    NanGradient,
    NanLoss,
    SimulatedTrainer,
    actions,
)

FAULTS = (NanGradient(90), Damage(150, 2.0), NanLoss(210, 2), Garbage(240, 3), LogitGrowth(60))


def trainer(**options: Any) -> SimulatedTrainer:
    return SimulatedTrainer(**{"seed": 3, "faults": FAULTS, "layers": 3} | options)


@pytest.fixture
def start(tmp_path: Path, clock: FakeClock) -> Iterator[Callable[..., Service]]:
    """Start a sidecar on the same directory; `die` is what kill -9 leaves of it."""
    open_: list[Service] = []

    def starting(**settings: Any) -> Service:
        for service in open_:
            service.close()
        open_.clear()
        service = Service(
            Settings(data_dir=tmp_path / "data", **settings), clock=clock, timer=lambda: 0.0
        )
        open_.append(service)
        return service

    yield starting
    for service in open_:
        service.close()


def metrics(service: Service) -> str:
    return asyncio.run(exporter.render(service, "1")).decode()


def die(service: Service) -> None:
    """What kill -9 leaves: the files as they are, no footer, no goodbye."""
    service.store.database.sync(lambda session: None)  # the queue is SQL's affair, not this test's
    for record in service.store.records.values():
        for writer in (record._scalars, record._layers):
            if writer is not None:
                writer.close()
        record._closed = True
    service.store.records.clear()
    service.close()


def test_the_series_equal_the_trainers_own_rows(start: Callable[..., Service]) -> None:
    reporter = Reporter(start(), trainer())
    reporter.register()
    reporter.steps(300)
    found = reporter.curves()
    own = expected(reporter.trainer)
    assert "nan" in own["grad_norm"]
    assert {"skip_step", "rollback"} <= set(own["action"])
    for name in ("loss", "grad_norm", "lr", "action"):
        assert found["series"][name]["step"] == own["step"]
        assert found["series"][name]["value"] == own[name]
    reporter.close()
    assert reporter.curves() == found


def test_what_was_acknowledged_is_there_after_the_sidecar_was_killed(
    start: Callable[..., Service],
) -> None:
    service = start()
    reporter = Reporter(service, trainer())
    reporter.register()
    reporter.steps(120)
    die(service)
    again = start()
    reporter.service = again
    before = expected(reporter.trainer)
    assert reporter.curves()["series"]["loss"]["value"] == before["loss"]
    reporter.register()
    reporter.post(*reporter.frames[100:], late=True)  # its answers were lost: it sends them again
    reporter.steps(180)
    own = expected(reporter.trainer)
    found = reporter.curves()["series"]
    assert found["loss"]["step"] == own["step"]
    assert found["action"]["value"] == own["action"]
    about = again.runs.get("r")
    assert (about.kept.seen.count, about.kept.seen.missing) == (300, 0)


def test_late_reports_stand_where_they_belong(start: Callable[..., Service]) -> None:
    reporter = Reporter(start(), trainer())
    reporter.register()
    reporter.steps(80)
    missed = reporter.move(60)
    reporter.steps(40)
    random.Random(5).shuffle(missed)
    for frame in missed:
        reporter.post(frame, late=True)
        reporter.post(frame, late=True)
    own, found = expected(reporter.trainer), reporter.curves()["series"]
    assert found["loss"]["step"] == own["step"]
    assert found["loss"]["value"] == own["loss"]
    assert found["action"]["value"] == own["action"]


def test_an_outcome_that_differs_from_what_was_decided_is_what_the_record_shows(
    start: Callable[..., Service],
) -> None:
    service = start()
    reporter = Reporter(service, trainer())
    reporter.register()
    reporter.steps(90)
    skipped = reporter.move(1)[0]
    reporter.post(skipped)
    assert reporter.curves()["series"]["action"]["value"][-1] == "skip_step"
    run = service.runs.get("r")
    assert run.kept.record is not None
    let_through = messages.wire_outcome(Outcome(90, Action.PROCEED, True))
    service.runs.recording.outcomes(run, (let_through,), 0.0)
    assert reporter.curves()["series"]["action"]["value"][-1] == "proceed"
    service.store.database.sync(lambda session: None)
    assert decisions(service) == []
    service.store.close_record("r")
    assert reporter.curves()["series"]["action"]["value"][-1] == "proceed"


def test_every_executed_action_is_in_the_database_once(start: Callable[..., Service]) -> None:
    service = start()
    reporter = Reporter(service, trainer())
    reporter.register()
    for at, frame in enumerate(reporter.move(300)):
        reporter.post(frame)
        if at % 7 == 0:
            reporter.post(frame)
    die(service)
    again = start()
    wanted = [(s, a.lower(), r) for s, a, r in actions(reporter.trainer.steps)]
    assert decisions(again) == wanted
    assert len(wanted) > 5


def test_actions_that_a_killed_sidecar_had_not_written_down_are_found_in_the_series(
    start: Callable[..., Service],
) -> None:
    service = start()
    reporter = Reporter(service, trainer())
    reporter.register()
    reporter.steps(300)
    service.store.database.sync(lambda session: session.query(DecisionRow).delete())
    die(service)
    wanted = [(s, a.lower(), r) for s, a, r in actions(reporter.trainer.steps)]
    assert decisions(start()) == wanted


def test_incidents_are_kept_with_their_steps(start: Callable[..., Service]) -> None:
    service = start()
    reporter = Reporter(service, trainer())
    reporter.register()
    reporter.steps(300)
    rows = service.store.database.sync(
        lambda session: list(session.scalars(select(IncidentRow).order_by(IncidentRow.number)))
    )
    ledger = reporter.trainer.state.ledger.incidents
    assert [(r.number, r.key, r.state, r.opened) for r in rows] == [
        (i.number, i.key, str(i.state), i.opened) for i in ledger
    ]


def test_what_a_trainer_that_begins_from_nothing_does_not_know_of_is_over(
    start: Callable[..., Service],
) -> None:
    def rows() -> list[tuple[int, str]]:
        found = service.store.database.sync(lambda s: list(s.scalars(select(IncidentRow))))
        return [(row.opened, row.state) for row in found]

    service = start()
    first = Reporter(service, trainer())
    first.register()
    first.steps(93)  # one is open
    opened = [i.opened for i in first.trainer.state.ledger.incidents]
    assert [state for _, state in rows() if state != "resolved"]
    first.close()
    second = Reporter(service, trainer(seed=4, faults=()), incarnation="j")
    second.register()
    second.steps(3)
    assert rows() == [(step, "resolved") for step in opened]


def test_the_record_of_a_deciding_sidecar_replays_to_the_same_decisions(
    start: Callable[..., Service], small_segments: None
) -> None:
    service = start()
    reporter = Reporter(service, trainer())
    reporter.register()
    reporter.steps(300)
    reporter.close()
    report = replay(service.store.run_directory("r"))
    assert report.segments > 10
    assert report.identical
    assert (report.steps, report.unverified, report.missing) == (300, 0, 0)


def test_small_segments_lose_and_double_nothing(
    start: Callable[..., Service], small_segments: None
) -> None:
    service = start()
    reporter = Reporter(service, trainer())
    reporter.register()
    chance = random.Random(1)
    held: list[Any] = []
    for frame in reporter.move(300):
        if chance.random() < 0.2:
            held.append(frame)
        else:
            reporter.post(frame)
        if held and chance.random() < 0.1:
            reporter.post(*held, late=True)
            held.clear()
        if chance.random() < 0.02:
            die(service)
            service = reporter.service = start()
            reporter.register()
    if held:
        reporter.post(*held, late=True)
    die(service)
    service = reporter.service = start()
    reporter.register()
    assert service.runs.get("r").kept.seen.spans == [(0, 299)]
    reporter.post(*reporter.frames, late=True)  # all of it once more
    own, found = expected(reporter.trainer), reporter.curves()["series"]
    for name in ("loss", "grad_norm", "action"):
        assert found[name]["step"] == own["step"]
        assert found[name]["value"] == own[name]


def test_an_outcome_that_comes_when_its_segment_is_closed_is_shown_all_the_same(
    start: Callable[..., Service], small_segments: None
) -> None:
    service = start()
    reporter = Reporter(service, trainer())
    reporter.register()
    reporter.steps(200)
    run = service.runs.get("r")
    assert run.kept.record is not None
    assert len(list(run.kept.record.directory.glob("scalars-*.seg"))) > 5
    let_through = messages.wire_outcome(Outcome(90, Action.PROCEED, True))
    service.runs.recording.outcomes(run, (let_through,), 0.0)
    for _ in range(2):
        shown = dict(zip(*reporter.curves("action")["series"]["action"].values(), strict=True))
        assert shown[90] == "proceed"
        service.store.close_record("r")


def test_the_series_of_a_run_keep_to_their_quota_and_the_newest_stay(
    start: Callable[..., Service], small_segments: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("settings", "store.store"):
        monkeypatch.setattr(f"sentinel.sidecar.{module}.MIN_RUN_BYTES", 1)
    sizes, kept = [], []
    for run, limit in (("free", 2**30), ("bounded", 150_000)):
        service = start(max_run_bytes=limit)
        reporter = Reporter(service, trainer(layers=20), run=run)
        reporter.register()
        reporter.steps(300)
        sizes.append(service.store.sizes()[run])
        kept.append(reporter.curves("loss")["series"]["loss"]["step"])
        assert (service.store.dropped_segments > 0) is (run == "bounded")
    assert sizes[0] > 200_000 > 160_000 > sizes[1]
    assert kept[0] == list(range(300))
    assert kept[1] == list(range(kept[1][0], 300))


def test_a_hole_is_as_large_as_what_never_came(start: Callable[..., Service]) -> None:
    service = start()
    reporter = Reporter(service, trainer())
    reporter.register()
    reporter.steps(50)
    die(service)
    reporter.move(30)  # more than its buffer holds: these never come
    service = reporter.service = start()
    reporter.register(first=80)
    reporter.steps(20)
    run = service.runs.get("r")
    assert run.kept.seen.missing == 30
    assert run.kept.seen.holes() == [(50, 79)]
    steps = reporter.curves()["series"]["loss"]["step"]
    assert steps == [*range(50), *range(80, 100)]


def test_a_second_live_writer_is_refused_also_after_a_restart(
    start: Callable[..., Service], clock: FakeClock
) -> None:
    service = start()
    first = Reporter(service, trainer(), incarnation="first")
    first.register()
    first.steps(5)
    die(service)
    service = start()
    second = Reporter(service, trainer(), incarnation="second")
    with pytest.raises(RefusedError, match="another live process"):
        second.register()
    first.service = service
    first.register()
    first.steps(5)
    assert service.runs.get("r").refused == ["second"]
    rows = service.store.database.sync(lambda session: list(session.scalars(select(RunRow))))
    assert [(row.name, row.refused) for row in rows] == [("r", ["second"])]
    clock.advance(100.0)
    second.register()
    with pytest.raises(RefusedError, match="written by incarnation"):
        first.steps(1)


@pytest.mark.parametrize("ended", [True, False])
def test_a_run_of_an_earlier_start_shows_its_newest_step(
    start: Callable[..., Service], ended: bool
) -> None:
    service = start()
    reporter = Reporter(service, trainer())
    reporter.register()
    reporter.steps(20)
    if ended:
        service.runs.close(Close(run="r", incarnation="i", fence=reporter.fence), service.now())
    before = details(service.run("r"), service.now())
    die(service)
    service = start()
    after = details(service.run("r"), service.now())
    assert after["step"] == 19
    assert [after[k] for k in ("state", "step", "loss", "grad_norm")] == [
        before[k] for k in ("state", "step", "loss", "grad_norm")
    ]
    assert after["protection"] is None  # nobody has said; "off" would be an alarm


def test_fences_rise_over_restarts(start: Callable[..., Service], clock: FakeClock) -> None:
    fences = []
    for life in range(3):
        reporter = Reporter(start(), trainer(), incarnation=f"i{life}")
        clock.advance(1000.0)  # nobody of the life before has come back
        reporter.register()
        reporter.steps(2)
        fences.append(reporter.fence)
    assert fences == sorted(set(fences))


def test_a_disk_that_fails_takes_no_late_reports_and_says_that_live_ones_are_not_kept(
    start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start()
    reporter = Reporter(service, trainer())
    reporter.register()
    reporter.steps(50)
    real = records.Record._append_columns

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records.Record, "_append_columns", full)
    reply = reporter.steps(10)
    assert not reply.recorded
    assert reply.decision is not None
    assert "No space" in service.store.trouble
    assert not reporter.post(*reporter.move(2)).recorded
    with pytest.raises(RefusedError, match="takes no reports") as caught:
        reporter.post(*reporter.frames[50:], late=True)
    assert caught.value.status == 503
    assert not reporter.post(reporter.frames[-1]).recorded  # the same question again
    monkeypatch.setattr(records.Record, "_append_columns", real)
    again = reporter.post(reporter.frames[-1])
    assert again.recorded
    assert again.decision is not None
    assert service.runs.get("r").kept.seen.spans == [(0, 49), (61, 61)]
    reporter.post(*reporter.frames[50:], late=True)
    assert service.store.trouble == ""
    assert reporter.steps(1).recorded
    own, found = expected(reporter.trainer), reporter.curves()["series"]
    assert found["loss"]["step"] == own["step"]
    assert found["action"]["value"] == own["action"]


def test_a_trainer_in_another_language_hears_that_no_disk_took_its_report(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(Settings(data_dir=tmp_path / "data"), clock=clock, timer=lambda: 0.0)
    client = TestClient(app, base_url="http://localhost")
    client.put("/v1/runs/js", json={})
    real = records.Record.report

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    told = []
    for step in range(4):
        monkeypatch.setattr(records.Record, "report", full if step in (1, 2) else real)
        told.append(client.post("/v1/runs/js/steps", json={"step": step, "loss": 2.0}).json())
    assert [answer["recorded"] for answer in told] == [True, False, False, True]
    assert [answer["decision"]["step"] for answer in told] == [0, 1, 2, 3]
    app.state.service.close()


@pytest.mark.parametrize("state", ["lost", "halted"])
def test_the_list_shows_how_a_run_stood_that_needs_somebody(
    start: Callable[..., Service], clock: FakeClock, state: str
) -> None:
    service = start()
    reporter = Reporter(service, trainer())
    reporter.register()
    reporter.steps(20)
    if state == "halted":
        close = Close(run="r", incarnation="i", fence=reporter.fence, state="halted")
        service.runs.close(close, service.now())
    else:
        clock.advance(1000.0)
        service.runs.expire(service.now())
    die(service)
    (line,) = [summary(run, clock.now) for run in start().all_runs()]
    assert (line["state"], line["step"], line["loss"] is not None) == (state, 19, True)


def test_holes_are_not_said_before_anybody_looked(
    start: Callable[..., Service], clock: FakeClock
) -> None:
    service = start()
    reporter = Reporter(service, trainer())
    reporter.register()
    reporter.steps(5)
    reporter.move(3)
    reporter.steps(2)
    assert 'sentinel_report_holes{run="r"} 3' in metrics(service)
    die(service)
    service = start()
    assert "sentinel_report_holes{" not in metrics(service)
    service.run("r")
    assert 'sentinel_report_holes{run="r"} 3' in metrics(service)


def test_two_sidecars_cannot_share_a_directory(start: Callable[..., Service]) -> None:
    service = start()
    with pytest.raises(ValueError, match="another sidecar"):
        Service(service.settings, clock=lambda: 0.0, timer=lambda: 0.0)


def test_seen_is_the_set_of_numbers_that_were_added() -> None:
    chance = random.Random(0)
    for _ in range(200):
        seen, plain = Seen(), set[int]()
        for _ in range(30):
            if chance.random() < 0.2:
                first = chance.randrange(40)
                last = first + chance.randrange(6)
                seen.add_span(first, last)
                plain.update(range(first, last + 1))
            else:
                number = chance.randrange(40)
                assert seen.add(number) is (number not in plain)
                plain.add(number)
            assert seen.count == len(plain)
            assert all((n in seen) == (n in plain) for n in range(48))
            holes = [n for first, last in seen.holes() for n in range(first, last + 1)]
            assert holes == [n for n in range(max(plain) + 1) if n not in plain]
            assert seen.missing == len(holes)


def decisions(service: Service) -> list[tuple[int, str, str]]:
    rows = service.store.database.sync(
        lambda session: list(session.scalars(select(DecisionRow).order_by(DecisionRow.step)))
    )
    return [(row.step, row.action, row.rule) for row in rows]


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """While it is True, no byte of any segment can be written."""
    state = {"full": False}
    for name in ("append", "append_all"):
        real = getattr(SegmentWriter, name)

        def write(self: SegmentWriter, *args: Any, real: Any = real) -> None:
            if state["full"]:
                raise OSError(28, "No space left on device")
            real(self, *args)

        monkeypatch.setattr(SegmentWriter, name, write)

    def turn(full: bool) -> None:
        state["full"] = full

    return turn


def test_lost_records_are_the_rows_that_are_missing_and_nothing_besides(
    start: Callable[..., Service], full_disk: Callable[[bool], None]
) -> None:
    service = start()
    reporter = Reporter(service, trainer())
    reporter.register()
    reporter.steps(50)
    full_disk(True)
    reporter.steps(37)  # each with the outcome of the step before, a correction of the record
    reporter.post(reporter.frames[-1])  # and told again
    for _ in range(2):
        with pytest.raises(RefusedError, match="takes no reports"):
            reporter.post(*reporter.frames[60:], late=True)
    reporter.register()  # its connection was cut
    reporter.steps(3)
    service.store.close_record("r")  # and its record opened anew
    service.runs.get("r").kept.record = None
    with pytest.raises(RefusedError, match="takes no reports"):
        reporter.post(reporter.frames[52], late=True)
    full_disk(False)
    reporter.steps(20)
    steps = reporter.curves()["series"]["loss"]["step"]
    missing = sorted(set(range(110)) - set(steps))
    assert missing == list(range(50, 90))
    assert service.runs.get("r").kept.seen.missing == len(missing)
    assert service.store.lost_records == len(missing)
    assert details(service.run("r"), 0.0)["unwritten_reports"] == len(missing)
    assert f"\nsentinel_sidecar_lost_records_total {len(missing)}.0\n" in metrics(service)


def test_a_correction_that_no_disk_took_is_written_when_one_does(
    start: Callable[..., Service], full_disk: Callable[[bool], None]
) -> None:
    service = start()
    reporter = Reporter(service, trainer())
    reporter.register()
    reporter.steps(90)
    reporter.post(reporter.move(1)[0])
    assert reporter.curves()["series"]["action"]["value"][-1] == "skip_step"
    full_disk(True)
    let_through = messages.wire_outcome(Outcome(90, Action.PROCEED, True))
    service.runs.recording.outcomes(service.runs.get("r"), (let_through,), 0.0)
    assert reporter.curves()["series"]["action"]["value"][-1] == "skip_step"
    assert service.store.lost_records == 0
    full_disk(False)
    reporter.steps(3)
    shown = dict(zip(*reporter.curves("action")["series"]["action"].values(), strict=True))
    assert shown[90] == "proceed"

"""A run of an earlier start reads as it did: nothing about it is unknown."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from sentinel.core.events import SnapshotTaken
from sentinel.sidecar import exporter, recall
from sentinel.sidecar.app import create_app
from sentinel.sidecar.service import Service
from sentinel.sidecar.settings import Settings
from sentinel.wire import codec, messages
from sentinel.wire.messages import Close
from tests.sidecar.test_record import FAULTS, die, metrics, trainer
from tests.support import FakeClock
from tests.support.reports import Reporter


@pytest.fixture
def start(tmp_path: Path, clock: FakeClock) -> Iterator[Callable[..., Service]]:
    open_: list[Service] = []

    def starting(**settings: Any) -> Service:
        for service in open_:
            service.close()
        app = create_app(
            Settings(data_dir=tmp_path / "data", **settings), clock=clock, timer=lambda: 0.0
        )
        open_[:] = [app.state.service]
        open_[0].app = app  # type: ignore[attr-defined]
        found: Service = app.state.service
        return found

    yield starting
    for service in open_:
        service.close()


def get(service: Service, path: str) -> Any:
    async def ask() -> Any:
        app: Any = service.app  # type: ignore[attr-defined]
        transport = httpx.ASGITransport(app=app, client=None)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            return (await client.get(path)).json()

    return asyncio.run(ask())


WHAT = ("ledger", "decision", "step", "loss", "open_incidents", "protection", "skipped")


def counters(service: Service) -> list[str]:
    names = ("skipped_steps", "rollbacks", "lost_steps", "flags", "nonfinite", "steps_total")
    keep = tuple(f"sentinel_{name}" for name in (*names, "last_good_snapshot_step"))
    return [line for line in metrics(service).splitlines() if line.startswith(keep)]


@pytest.mark.parametrize("segments", ["large", "small"])
def test_a_finished_run_reads_after_a_restart_as_it_did_before(
    start: Callable[..., Service], segments: str, request: pytest.FixtureRequest
) -> None:
    if segments == "small":
        request.getfixturevalue("small_segments")
    service = start()
    reporter = Reporter(service, trainer())
    reporter.register()
    reporter.steps(300)
    reporter.close()
    before, exported = get(service, "/v1/runs/r"), counters(service)
    state = service.runs.get("r").state
    assert state is not None
    assert before["skipped"] > 0
    assert before["rolled_back"] > 0
    service = start()
    assert service.runs.runs["r"].state is None
    listed = {r["run"]: r for r in get(service, "/v1/runs")["runs"]}["r"]
    assert (listed["skipped"], listed["rolled_back"]) == (
        before["skipped"],
        before["rolled_back"],
    )
    after = get(service, "/v1/runs/r")
    assert {name: after[name] for name in WHAT} == {name: before[name] for name in WHAT}
    again = service.runs.get("r").state
    assert again is not None
    assert codec.state_hash(again) == codec.state_hash(state)
    assert counters(service) == exported
    assert get(service, "/v1/runs/r/incidents")["incidents"]


def test_what_happened_after_the_last_step_is_not_forgotten(start: Callable[..., Service]) -> None:
    service = start()
    reporter = Reporter(service, trainer())
    reporter.register()
    reporter.steps(60)
    last = reporter.trainer.steps[-1]
    taken = SnapshotTaken(last.observation.step + 1, "disk")
    service.runs.close(
        Close(
            run="r",
            incarnation="i",
            fence=reporter.fence,
            moves=(messages.wire_outcome(last.outcome), codec.wire_event(taken)),
        ),
        0.0,
    )
    before = service.runs.get("r").state
    service = start()
    get(service, "/v1/runs/r")
    assert service.runs.get("r").state == before
    assert before is not None
    assert before.ledger.snapshots[-1].step == 60


def test_metrics_of_runs_that_still_have_any_come_back_by_themselves(
    start: Callable[..., Service], clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recall, "PAUSE_S", 0.0)
    service = start()
    for name in ("new", "old"):
        reporter = Reporter(service, trainer(), run=name)
        reporter.register()
        reporter.steps(150)
        reporter.close()
    exported = counters(service)
    service.runs.get("old").ended = clock() - exporter.ENDED_S - 1
    service.runs.save(service.runs.get("old"))
    service = start()
    with TestClient(service.app):  # type: ignore[attr-defined]
        for _ in range(500):
            if service.runs.runs["new"].state is not None:
                break
            asyncio.run(asyncio.sleep(0.02))
        assert counters(service) == [line for line in exported if '"new"' in line]
        assert service.runs.runs["old"].state is None


def test_a_lost_run_reads_as_it_stood_and_its_trainer_goes_on_from_its_own_state(
    start: Callable[..., Service], clock: FakeClock
) -> None:
    service = start()
    reporter = Reporter(service, trainer())
    reporter.register()
    reporter.steps(200)
    before = get(service, "/v1/runs/r")
    die(service)
    service = reporter.service = start()
    clock.advance(1000.0)
    service.runs.expire(clock())
    found = get(service, "/v1/runs/r")
    assert found["state"] == "lost"
    # Its newest step is taken to have gone as it was decided: nobody has said otherwise.
    assert found["ledger"]["counters"]["steps"] == before["ledger"]["counters"]["steps"] + 1
    assert found["ledger"]["counters"]["rollbacks"] == before["ledger"]["counters"]["rollbacks"]
    reply = reporter.steps(1)
    assert reply.decision is not None
    run = service.runs.get("r")
    assert (run.run_state, run.figures.handovers) == ("running", 1)
    assert codec.state_hash(run.state) == codec.state_hash(  # type: ignore[arg-type]
        reporter.trainer.steps[-1].before
    )


def test_a_record_with_a_hole_is_counted_by_the_database_and_not_guessed(
    start: Callable[..., Service],
) -> None:
    service = start()
    reporter = Reporter(service, trainer())
    reporter.register()
    reporter.steps(100)
    reporter.move(3)  # never told
    late = reporter.move(20)
    reporter.post(*late, late=True)
    reporter.close()
    service = start()
    found = get(service, "/v1/runs/r")
    assert found["ledger"] is None
    assert found["skipped"] == 1  # the one at step 90
    assert FAULTS[0].step == 90


def test_reports_that_came_late_are_put_in_order(start: Callable[..., Service]) -> None:
    service = start()
    reporter = Reporter(service, trainer())
    reporter.register()
    reporter.steps(100)
    missed = reporter.move(5)
    reporter.post(*missed[3:], late=True)
    reporter.post(*missed[:3], late=True)
    reporter.close()
    service = start()
    assert get(service, "/v1/runs/r")["ledger"]["counters"]["steps"] == 105


def test_a_record_that_cannot_be_read_leaves_the_run_unknown(
    start: Callable[..., Service],
) -> None:
    service = start()
    reporter = Reporter(service, trainer())
    reporter.register()
    reporter.steps(30)
    reporter.close()
    place = service.series_directory("r")
    service = start()
    for path in place.rglob("*"):
        if path.is_file():
            path.write_bytes(b"\x00" * 100)
    found = get(service, "/v1/runs/r")
    assert (found["ledger"], found["skipped"], found["step"]) == (None, 0, None)


def test_a_run_that_is_only_recorded_has_no_counts_of_an_engine(
    start: Callable[..., Service],
) -> None:
    service = start()
    run = Reporter(service, trainer())
    run.register()
    assert service.past.tally(service.runs.get("r")) == {"skipped": None, "rolled_back": None}


def test_nothing_is_recalled_twice_or_while_the_trainer_is_there(
    start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []

    def count(place: Path, *_: Any) -> None:
        calls.append(place)

    monkeypatch.setattr(recall, "recalled", count)
    service = start()
    for name in ("live", "done"):
        reporter = Reporter(service, trainer(), run=name)
        reporter.register()
        reporter.steps(10)
    reporter.close()
    service = start()
    for _ in range(3):
        get(service, "/v1/runs/live")
        get(service, "/v1/runs/done")
    assert [place.name for place in calls] == ["done"]

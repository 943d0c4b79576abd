"""The sidecar's disk fills up, or is read-only from the start: it still decides, and says so.

On file systems of their own. What a disk did not take is kept by its trainer and told again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from fastapi import FastAPI
from sqlalchemy import select
from starlette.testclient import TestClient

from sentinel.core.types import Action
from sentinel.sidecar.app import create_app
from sentinel.sidecar.jobs import Jobs
from sentinel.sidecar.runs import RefusedError
from sentinel.sidecar.service import Service
from sentinel.sidecar.settings import Settings
from sentinel.sidecar.store.database import StoreError
from sentinel.sidecar.store.models import AuditRow, DecisionRow
from tests.support import mounts
from tests.support.reports import Reporter, expected
from tests.support.simulated import NanGradient, SimulatedTrainer

pytestmark = [pytest.mark.e2e]

TOKEN = "a-token-of-some-length"
FAULTS = [NanGradient(step) for step in range(20, 400, 20)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounts.small_disk(tmp_path / "disk", "2m") as place:
        yield place


def started(place: Path) -> tuple[FastAPI, Service]:
    settings = Settings(data_dir=place, token=TOKEN)
    app = create_app(settings, clock=time.time, timer=time.perf_counter)
    service: Service = app.state.service
    service.ready = True
    return app, service


def reporting(service: Service) -> Reporter:
    reporter = Reporter(service, SimulatedTrainer(seed=1, layers=4, faults=FAULTS))
    reporter.register()
    return reporter


def shown(app: FastAPI) -> tuple[str, str]:
    """What /readyz says, and the store's line in /metrics."""
    client = TestClient(app, base_url="http://localhost")
    ready = client.get("/readyz")
    assert ready.status_code == 200
    lines = client.get("/metrics").text.splitlines()
    return ready.text, next(x for x in lines if x.startswith("sentinel_sidecar_store_trouble"))


def order(app: FastAPI, key: str, run: str = "r") -> dict[str, Any]:
    """What somebody hears who pauses the run."""
    client = TestClient(app, base_url="http://localhost")
    answer = client.post(
        f"/v1/runs/{run}/commands",
        json={"kind": "pause", "id": key, "issued_by": "ann"},
        headers={"authorization": f"Bearer {TOKEN}"},
    )
    assert answer.status_code == 202, answer.text
    found: dict[str, Any] = answer.json()
    return found


def asked(app: FastAPI) -> list[str]:
    """The orders in the audit log, the oldest first."""
    client = TestClient(app, base_url="http://localhost")
    answer = client.get("/v1/audit", headers={"authorization": f"Bearer {TOKEN}"}).json()
    return [line["detail"]["id"] for line in reversed(answer["audit"]) if "id" in line["detail"]]


def until_well(service: Service) -> None:
    """The disk is well again, and the store has seen it."""
    end = time.monotonic() + 60.0
    while True:
        service.store.probe()
        with suppress(StoreError):
            service.store.database.sync(lambda session: None)
        database = service.store.database
        if (database.opened and not database.waiting) or time.monotonic() > end:
            return
        time.sleep(0.1)  # it is tried again after a while only


def deliver(reporter: Reporter, service: Service) -> None:
    """What the trainer keeps because it was not recorded, told again."""
    seen = service.runs.get(reporter.run).kept.seen
    missing = [frame for frame in reporter.frames if frame.seq not in seen]
    assert missing
    reporter.post(*missing, late=True)


def assert_whole(reporter: Reporter, service: Service) -> None:
    own, found = expected(reporter.trainer), reporter.curves()["series"]
    for name in ("loss", "grad_norm", "action"):
        assert found[name]["step"] == own["step"]
        assert found[name]["value"] == own[name]
    assert service.runs.get(reporter.run).kept.seen.missing == 0
    service.store.database.sync(lambda session: None)
    rows = service.store.database.sync(
        lambda session: list(session.scalars(select(DecisionRow).order_by(DecisionRow.step)))
    )
    acted = [
        s.observation.step
        for s in reporter.trainer.steps
        if s.outcome.executed is not Action.PROCEED
    ]
    assert sorted({row.step for row in rows} & set(acted)) == sorted({row.step for row in rows})


def test_a_disk_that_is_full_is_survived_shown_and_made_up_for(disk: Path) -> None:
    app, service = started(disk)
    reporter = reporting(service)
    assert reporter.steps(100).recorded
    assert shown(app) == ("ready\n", "sentinel_sidecar_store_trouble 0.0")
    filler = mounts.fill(disk)
    replies = [reporter.post(frame) for frame in reporter.move(100)]
    assert all(reply.decision is not None for reply in replies)
    unrecorded = [reply for reply in replies if not reply.recorded]
    assert len(unrecorded) > 50
    assert service.runs.get("r").kept.seen.missing == len(unrecorded)
    service.store.probe()
    service.store.database.sync(lambda session: None)
    ready, line = shown(app)
    assert "degraded: " in ready
    assert line == "sentinel_sidecar_store_trouble 1.0"
    with pytest.raises(RefusedError, match="takes no reports"):
        deliver(reporter, service)
    filler.unlink()
    until_well(service)
    deliver(reporter, service)
    assert reporter.steps(100).recorded
    until_well(service)
    assert shown(app) == ("ready\n", "sentinel_sidecar_store_trouble 0.0")
    assert_whole(reporter, service)
    service.close()
    _, again = started(disk)
    reporter.service = again
    assert_whole(reporter, again)
    again.close()


def test_a_disk_that_is_read_only_from_the_start_keeps_nobody_from_deciding(disk: Path) -> None:
    mounts.remount(disk, "ro")
    app, service = started(disk / "data")
    reporter = reporting(service)
    reply = reporter.steps(60)
    assert reply.decision is not None
    assert not reply.recorded
    ready, line = shown(app)
    assert "Read-only" in ready
    assert line == "sentinel_sidecar_store_trouble 1.0"
    assert service.runs.get("r").run_state == "running"
    service.close()
    mounts.remount(disk, "rw")


Broken = tuple[Callable[[Path], Any], Callable[[Path], None], str]
BROKEN: dict[str, Broken] = {
    "full": (mounts.fill, lambda disk: (disk / "filler").unlink(), "No space"),
    "read-only": (
        lambda disk: mounts.remount(disk, "ro"),
        lambda disk: mounts.remount(disk, "rw"),
        "Read-only",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_orders_to_a_sidecar_that_started_without_its_disk_are_kept_once_it_is_back(
    disk: Path, how: str
) -> None:
    spoil, mend, said = BROKEN[how]
    (disk / "data").mkdir()
    spoil(disk)
    app, service = started(disk / "data")
    reporter = reporting(service)
    assert not reporter.steps(30).recorded
    assert order(app, "p1")["recorded"] is False, "nothing has written it anywhere"
    assert asked(app) == ["p1"], "what waits is shown"
    ready, line = shown(app)
    assert "degraded: " in ready
    assert said in ready
    assert line == "sentinel_sidecar_store_trouble 1.0"
    metrics = TestClient(app, base_url="http://localhost").get("/metrics").text
    assert "\nsentinel_sidecar_database_queue 0.0\n" not in metrics
    assert "\nsentinel_sidecar_database_errors_total 0.0\n" not in metrics
    assert order(app, "p2")["recorded"] is False
    mend(disk)
    until_well(service)
    assert shown(app) == ("ready\n", "sentinel_sidecar_store_trouble 0.0"), "without a report"
    assert order(app, "p3")["recorded"] is True
    deliver(reporter, service)
    assert reporter.steps(30).recorded
    service.close()
    app, service = started(disk / "data")
    assert asked(app)[:3] == ["p1", "p2", "p3"]
    assert [o.command.id for o in service.runs.get("r").orders] == ["p1", "p2", "p3"]
    reporter.service = service
    assert_whole(reporter, service)
    service.close()


@pytest.mark.parametrize("how", BROKEN)
def test_orders_that_were_recorded_before_such_a_start_are_told_when_the_disk_is_back(
    disk: Path, how: str
) -> None:
    spoil, mend, _ = BROKEN[how]
    app, service = started(disk / "data")
    reporter = reporting(service)
    assert reporter.steps(60).recorded
    assert order(app, "p1")["recorded"] is True
    service.close()
    spoil(disk)
    app, service = started(disk / "data")
    reporter.service = service
    reporter.register()
    reporter.steps(1)
    mend(disk)
    until_well(service)
    anyio.run(Jobs(service).save)
    assert "p1" in {command.id for command in reporter.steps(1).commands}
    assert service.past.tally(service.runs.get("r"))["skipped"]
    service.close()


def test_what_a_disk_never_took_is_logged_at_the_end(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (disk / "data").mkdir()
    mounts.fill(disk)
    app, service = started(disk / "data")
    reporting(service)
    order(app, "p1")
    service.close()
    assert "writes are lost, the database did not take them until the end" in caplog.text
    assert "order: 1" in caplog.text


def test_a_directory_that_another_sidecar_took_meanwhile_is_left_alone(disk: Path) -> None:
    mounts.remount(disk, "ro")
    app, service = started(disk / "data")
    reporting(service)
    assert order(app, "p1")["recorded"] is False
    mounts.remount(disk, "rw")
    _, other = started(disk / "data")
    until = service.store.database.failed + 1
    while service.store.database.failed < until:
        service.store.probe()
        time.sleep(0.1)
    assert "used by another sidecar" in shown(app)[0]
    assert order(app, "p2")["recorded"] is False
    service.close()
    rows = other.store.database.sync(lambda session: list(session.scalars(select(AuditRow))))
    assert rows == []
    other.close()

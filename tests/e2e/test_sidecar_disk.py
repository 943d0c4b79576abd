"""The sidecar's disk fills up, or is read-only from the start: it still decides, and says so.

On file systems of their own. What a disk did not take is kept by its trainer and told again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from sqlalchemy import select
from starlette.testclient import TestClient

from sentinel.core.types import Action
from sentinel.sidecar.app import create_app
from sentinel.sidecar.runs import RefusedError
from sentinel.sidecar.service import Service
from sentinel.sidecar.settings import Settings
from sentinel.sidecar.store.models import DecisionRow
from tests.support import mounts
from tests.support.reports import Reporter, expected
from tests.support.simulated import NanGradient, SimulatedTrainer

pytestmark = [pytest.mark.e2e]

FAULTS = [NanGradient(step) for step in range(20, 400, 20)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounts.small_disk(tmp_path / "disk", "2m") as place:
        yield place


def started(place: Path) -> tuple[FastAPI, Service]:
    app = create_app(Settings(data_dir=place), clock=time.time, timer=time.perf_counter)
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


def until_well(service: Service) -> None:
    """The disk is well again, and the store has seen it."""
    for _ in range(3):
        service.store.probe()
        service.store.database.sync(lambda session: None)


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

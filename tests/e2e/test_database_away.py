"""A PostgreSQL server that goes away under a sidecar and comes back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from sqlalchemy import select

from sentinel.sidecar.service import Service
from sentinel.sidecar.settings import Settings
from sentinel.sidecar.store.database import StoreError
from sentinel.sidecar.store.models import DecisionRow, IncidentRow, RunRow
from tests.support.postgres import Server, server
from tests.support.reports import Reporter
from tests.support.simulated import NanGradient, SimulatedTrainer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture
def away() -> Iterator[Server]:
    with server() as one:
        yield one


def reporting(service: Service, run: str) -> Reporter:
    trainer = SimulatedTrainer(seed=1, layers=2, faults=[NanGradient(40), NanGradient(80)])
    reporter = Reporter(service, trainer, run=run)
    reporter.register()
    return reporter


def rows(service: Service, table: Any) -> list[Any]:
    return service.store.database.sync(lambda session: list(session.scalars(select(table))))


def test_what_happens_while_the_server_is_away_is_written_when_it_is_back(
    away: Server, tmp_path: Path
) -> None:
    settings = Settings(data_dir=tmp_path, database=away.url)
    service = Service(settings, clock=time.time, timer=time.perf_counter)
    old = reporting(service, "old")
    assert old.steps(60).recorded
    assert [row.step for row in rows(service, DecisionRow)] == [40]
    away.stop()
    assert old.steps(40).recorded
    new = reporting(service, "new")
    assert new.steps(60).recorded

    async def acknowledge() -> bool:
        incident = await service.people.incident("old:1")
        return (await service.people.acknowledge(incident, "ann"))[1]

    assert not anyio.run(acknowledge)
    old.close()
    with pytest.raises(StoreError):
        rows(service, RunRow)
    database = service.store.database
    assert database.waiting > 4
    assert "writes are waiting" in service.store.trouble
    away.start()

    end = time.monotonic() + 60.0
    while database.waiting and time.monotonic() < end:
        service.store.probe()
        time.sleep(0.1)
    assert (service.store.trouble, database.dropped) == ("", 0)
    assert {row.name: row.state for row in rows(service, RunRow)} == {
        "old": "finished",
        "new": "running",
    }
    acted = {(row.run, row.step) for row in rows(service, DecisionRow)}
    assert acted == {("old", 40), ("old", 80), ("new", 40)}
    by = {(row.run, row.number): row.acknowledged_by for row in rows(service, IncidentRow)}
    assert by["old", 1] == "ann"
    service.close()

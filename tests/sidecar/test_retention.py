"""What the database holds of runs that are over for long goes, in bites, and nothing besides."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from sentinel.core.errors import ConfigError
from sentinel.core.types import Command, CommandKind
from sentinel.sidecar.jobs import DAY_S, Jobs
from sentinel.sidecar.security import Caller
from sentinel.sidecar.service import Service
from sentinel.sidecar.settings import Settings
from sentinel.sidecar.store import database as databases
from sentinel.sidecar.store import retention
from sentinel.sidecar.store.database import Database
from sentinel.sidecar.store.models import AuditRow, CommandRow, DecisionRow, IncidentRow, RunRow
from tests.support import FakeClock
from tests.support.reports import Reporter
from tests.support.simulated import Damage, NanGradient, SimulatedTrainer

TABLES = (RunRow, IncidentRow, DecisionRow, CommandRow)


@pytest.fixture
def start(url: str, tmp_path: Path, clock: FakeClock) -> Iterator[Callable[..., Service]]:
    open_: list[Service] = []

    def starting(**settings: float) -> Service:
        for service in open_:
            service.close()
        open_.clear()
        given = {"retention_days": 30.0} | settings
        service = Service(
            Settings(data_dir=tmp_path / "data", database=url, **given),  # type: ignore[arg-type]
            clock=clock,
            timer=lambda: 0.0,
        )
        open_.append(service)
        return service

    yield starting
    for service in open_:
        service.close()


def a_run(service: Service, name: str, *, ends: bool = True) -> Reporter:
    """One with decisions, incidents and an order."""
    trainer = SimulatedTrainer(seed=3, faults=[NanGradient(80), Damage(150, 2.5)], layers=2)
    reporter = Reporter(service, trainer, run=name, incarnation=f"i-{name}")
    reporter.register()
    reporter.steps(170)
    order = Command(f"o-{name}", CommandKind.PAUSE, 1.0, None, "ann")
    service.runs.command(name, order, 60.0, service.now())
    service.people.audit("command", Caller("ann", frozenset()), outcome="accepted", run=name)
    if ends:
        reporter.close()
    return reporter


def retain(service: Service) -> None:
    asyncio.run(Jobs(service).retain())


def held(service: Service) -> dict[str, set[str]]:
    """Names of runs in each table."""

    def find(session: Session) -> dict[str, set[str]]:
        found = {"run": set(session.scalars(select(RunRow.name)))}
        for table in (*TABLES[1:], AuditRow):
            found[table.__tablename__] = set(session.scalars(select(table.run)))
        return found

    return service.store.database.sync(find)


def test_rows_of_runs_that_are_over_for_long_go_and_the_audit_stays_longer(
    start: Callable[..., Service], clock: FakeClock
) -> None:
    service = start(audit_days=100.0)
    a_run(service, "old")
    a_run(service, "live", ends=False)  # for months, and in use all the time
    clock.advance(20 * DAY_S)
    a_run(service, "young")
    clock.advance(15 * DAY_S)
    retain(service)
    assert held(service) == {
        name: {"live", "young"} | ({"old"} if name == "audit" else set())
        for name in ("run", "incident", "decision", "command", "audit")
    }
    clock.advance(70 * DAY_S)
    retain(service)
    assert held(service) == {
        "run": {"live"},
        "incident": {"live"},
        "decision": {"live"},
        "command": {"live"},
        "audit": {"young"},
    }
    retain(service)
    assert held(service)["audit"] == {"young"}


def test_a_run_whose_series_made_room_keeps_its_rows_until_its_retention_is_over(
    start: Callable[..., Service], clock: FakeClock
) -> None:
    service = start()
    a_run(service, "r")
    object.__setattr__(service.settings, "max_store_bytes", 1)
    retain(service)
    assert "r" not in service.runs.runs
    assert held(service)["decision"] == {"r"}
    clock.advance(31 * DAY_S)
    retain(service)
    assert not any(held(service)[name] for name in ("run", "incident", "decision", "command"))


def test_a_run_that_is_registered_anew_while_its_rows_go_keeps_all_that_is_left(
    start: Callable[..., Service], clock: FakeClock
) -> None:
    service = start()
    a_run(service, "r")
    clock.advance(31 * DAY_S)
    cutoff = clock.now - 30 * DAY_S
    service.runs.forget("r")
    a_run(service, "r", ends=False)  # between the look for old runs and the deletion
    before = held(service)
    assert service.store.database.sync(lambda s: retention.forget(s, "r", cutoff)) == 0
    assert held(service) == before


def test_rows_without_a_run_go_too(start: Callable[..., Service], clock: FakeClock) -> None:
    service = start()
    a_run(service, "r")
    service.store.database.sync(lambda session: session.query(RunRow).delete())
    service.runs.forget("r")
    retain(service)
    assert held(service)["incident"] == {"r"}
    clock.advance(31 * DAY_S)
    retain(service)
    assert not any(held(service)[name] for name in ("run", "incident", "decision", "command"))


def many(session: Session, run: str, rows: int) -> None:
    session.add_all(
        DecisionRow(
            run=run,
            incarnation="i",
            step=10_000 + step,
            attempt=0,
            action="skip_step",
            rule="grad_norm",
            reason="x" * 1000,
            source="trainer",
            at=1.0,
        )
        for step in range(rows)
    )


def test_ten_thousand_rows_go_in_bites_between_which_others_write(
    start: Callable[..., Service], clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start()
    a_run(service, "r")
    service.store.database.sync(lambda session: many(session, "r", 5_000))
    clock.advance(31 * DAY_S)
    bites: list[int] = []
    real = retention.forget

    def forget(session: Session, run: str, cutoff: float) -> int:
        done = real(session, run, cutoff)
        bites.append(done)
        if len(bites) == 3:  # somebody writes in the middle
            service.people.audit("command", None, outcome="refused", run="other")
        if len(bites) == 5:
            others = select(func.count()).where(AuditRow.run == "other")
            assert session.scalar(others) == 1
        return done

    monkeypatch.setattr(retention, "forget", forget)
    retain(service)
    assert len(bites) > 10
    assert max(bites) <= 3 * retention.BATCH
    assert held(service)["decision"] == set()


def test_the_file_of_sqlite_shrinks(tmp_path: Path, clock: FakeClock) -> None:
    service = Service(Settings(data_dir=tmp_path), clock=clock, timer=lambda: 0.0)
    file = tmp_path / "sentinel.db"
    try:
        a_run(service, "r")
        service.store.database.sync(lambda session: many(session, "r", 5_000))
        service.store.database.sync(
            lambda session: session.execute(text("PRAGMA wal_checkpoint(TRUNCATE)")).all()
        )
        before = file.stat().st_size
        assert before > 5_000_000
        clock.advance(31 * DAY_S)
        retain(service)
        assert file.stat().st_size < before / 20
        assert (tmp_path / "sentinel.db-wal").stat().st_size < before / 20
    finally:
        service.close()


def test_a_file_of_an_earlier_release_is_made_to_shrink_once_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"sqlite:///{tmp_path / 'sentinel.db'}"
    database = Database.open(url)
    database.sync(lambda session: many(session, "r", 50))
    database.close()
    with closing(sqlite3.connect(tmp_path / "sentinel.db", isolation_level=None)) as earlier:
        earlier.execute("PRAGMA auto_vacuum=NONE")
        earlier.execute("VACUUM")
    shutil.copy(tmp_path / "sentinel.db", tmp_path / "large.db")

    def state(url: str) -> tuple[int, int]:
        database = Database.open(url)
        auto = database.sync(lambda s: s.execute(text("PRAGMA auto_vacuum")).scalar_one())
        rows = database.sync(lambda s: len(list(s.scalars(select(DecisionRow)))))
        database.close()
        return auto, rows

    assert state(url) == (2, 50)
    monkeypatch.setattr(databases, "MOST_REWRITTEN", 1)
    assert state(f"sqlite:///{tmp_path / 'large.db'}") == (0, 50)
    assert "does not shrink" in caplog.text


def test_the_audit_is_kept_at_least_as_long_as_the_runs() -> None:
    with pytest.raises(ConfigError, match="audit_days must be at least retention_days"):
        Settings(retention_days=90.0, audit_days=30.0)

"""The store on both databases: the same tests on SQLite and on a real PostgreSQL server."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import anyio
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, select, text
from sqlalchemy.exc import IntegrityError

from sentinel.core.errors import ConfigError
from sentinel.sidecar.service import Service
from sentinel.sidecar.settings import Settings
from sentinel.sidecar.store.database import Database, StoreError
from sentinel.sidecar.store.models import (
    AuditRow,
    Base,
    CommandRow,
    DecisionRow,
    IncidentRow,
    RunRow,
)
from tests.support import FakeClock
from tests.support.reports import Reporter
from tests.support.simulated import Damage, NanGradient, SimulatedTrainer, actions


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    database = Database.open(url)
    yield database
    database.close()


def run_row(name: str = "r7") -> RunRow:
    return RunRow(
        name=name,
        incarnation="i",
        fence=3,
        state="running",
        engine_version=2,
        policy=b"\x00\xff",
        reason="",
        json=False,
        layers=[{"name": "a"}],
        info={"host": "x"},
        refused=[],
        registered_at=1.5,
        heard_at=2.5,
        ended_at=None,
        last_step=2**40,
    )


def test_the_migrations_make_exactly_the_tables_of_the_models(database: Database) -> None:
    with database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
        names = set(inspect(connection).get_table_names())
    assert names == {*Base.metadata.tables, "alembic_version"}


def test_a_row_comes_back_as_it_was_written(database: Database) -> None:
    database.sync(lambda session: session.merge(run_row()))
    database.sync(lambda session: session.merge(run_row()))
    row = database.sync(lambda session: session.get(RunRow, "r7"))
    assert row is not None
    assert (row.policy, row.layers, row.last_step) == (b"\x00\xff", [{"name": "a"}], 2**40)
    assert (row.registered_at, row.ended_at) == (1.5, None)


def test_opening_again_keeps_what_is_there(url: str) -> None:
    for _ in range(2):
        database = Database.open(url)
        database.sync(lambda session: session.merge(run_row()))
        found = database.sync(lambda session: len(list(session.scalars(select(RunRow)))))
        database.close()
    assert found == 1


def test_a_database_of_a_later_version_is_refused(url: str) -> None:
    database = Database.open(url)
    database.sync(
        lambda session: session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    )
    database.close()
    with pytest.raises(ConfigError, match="another version of sentinel"):
        Database.open(url)


def test_the_same_idempotency_key_cannot_stand_twice_for_one_run(database: Database) -> None:
    def command(id_: str, run: str, key: str) -> CommandRow:
        return CommandRow(id=id_, run=run, key=key, kind="pause", created_at=0.0, expires_at=1.0)

    database.sync(lambda session: session.add(command("1", "a", "k")))
    database.sync(lambda session: session.add(command("2", "b", "k")))
    with pytest.raises(StoreError) as caught:
        database.sync(lambda session: session.add(command("3", "a", "k")))
    assert isinstance(caught.value.__cause__, IntegrityError)
    assert database.sync(lambda session: len(list(session.scalars(select(CommandRow))))) == 2


def test_what_is_submitted_is_done_in_order_and_a_failure_stops_nothing(
    database: Database,
) -> None:
    for number in range(50):
        database.submit(
            lambda session, n=number: session.add(
                AuditRow(at=float(n), actor="ann", action="pause", outcome="done")
            )
        )
        if number == 20:
            database.submit(lambda session: session.execute(text("SELECT * FROM nowhere")))
    rows = database.sync(lambda session: list(session.scalars(select(AuditRow))))
    assert [row.at for row in rows] == [float(n) for n in range(50)]
    assert database.failed == 1
    assert database.trouble == ""
    assert database.waiting == 0


def test_with_too_much_waiting_writes_are_dropped_and_it_shows(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sentinel.sidecar.store.database.MOST_QUEUED", 5)
    gate = threading.Event()
    database.submit(lambda session: gate.wait(20.0))
    for _ in range(10):
        database.submit(lambda session: session.merge(run_row()))
    assert database.dropped == 6
    assert "waiting" in database.trouble
    gate.set()
    database.sync(lambda session: None)
    assert database.waiting == 0


def test_run_waits_without_holding_the_loop_up(database: Database) -> None:
    async def test() -> None:
        gate = threading.Event()
        database.submit(lambda session: gate.wait(20.0))

        async def asking() -> None:
            assert await database.run(lambda session: 7) == 7

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(asking)
            await anyio.sleep(0.01)
            gate.set()

    anyio.run(test)


def test_a_whole_run_is_told_by_its_tables(url: str, tmp_path: Path, clock: FakeClock) -> None:
    settings = Settings(data_dir=tmp_path / "data", database=url)
    service = Service(settings, clock=clock, timer=lambda: 0.0)
    trainer = SimulatedTrainer(seed=3, faults=[NanGradient(80), Damage(150, 2.5)], layers=2)
    reporter = Reporter(service, trainer)
    reporter.register()
    reporter.steps(260)
    reporter.close()
    service.close()
    again = Service(settings, clock=clock, timer=lambda: 0.0)
    read = again.store.database.sync
    rows = read(lambda session: list(session.scalars(select(DecisionRow).order_by("step"))))
    assert [(r.step, r.action, r.rule) for r in rows] == [
        (step, action.lower(), rule) for step, action, rule in actions(trainer.steps)
    ]
    incidents = read(lambda session: list(session.scalars(select(IncidentRow))))
    assert len(incidents) == len(trainer.state.ledger.incidents) > 0
    known = again.runs.get("r")
    assert (known.run_state, known.kept.seen.count) == ("finished", 260)
    again.close()


@pytest.mark.parametrize(
    "bad", ["nonsense", "mysql://x/y", "sqlite+aiosqlite:///x", "postgresql://:x:/"]
)
def test_a_url_that_is_none_is_refused(bad: str) -> None:
    with pytest.raises((ConfigError, StoreError), match="database"):
        Database.open(bad)


def test_a_password_is_never_shown() -> None:
    with pytest.raises(StoreError) as caught:
        Database.open("postgresql://ann:secret@127.0.0.1:1/x")
    assert "secret" not in str(caught.value)
    assert "ann" in str(caught.value)


def test_a_server_that_is_not_there_keeps_the_sidecar_from_starting(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, database="postgresql://ann@127.0.0.1:1/x")
    with pytest.raises(StoreError, match="cannot be opened"):
        Service(settings, clock=lambda: 0.0, timer=lambda: 0.0)


def test_a_directory_that_cannot_be_used_is_no_reason_not_to_decide(
    tmp_path: Path, clock: FakeClock
) -> None:
    (tmp_path / "file").write_text("no directory")
    with ExitStack() as stack:
        service = Service(
            Settings(data_dir=tmp_path / "file" / "data"), clock=clock, timer=lambda: 0.0
        )
        stack.callback(service.close)
        assert "file" in service.store.trouble
        reporter = Reporter(service, SimulatedTrainer(seed=1))
        reporter.register()
        reply = reporter.steps(5)
        assert reply.decision is not None
        assert not reply.recorded


def test_retention_and_quota_delete_ended_runs_oldest_first(
    tmp_path: Path, clock: FakeClock
) -> None:
    from sentinel.sidecar.jobs import Jobs

    service = Service(
        Settings(data_dir=tmp_path, retention_days=1.5), clock=clock, timer=lambda: 0.0
    )
    for name in ("old", "middle", "new", "live"):
        reporter = Reporter(service, SimulatedTrainer(seed=1, layers=2), run=name)
        reporter.register()
        reporter.steps(30)
        if name != "live":
            reporter.close()
        clock.advance(40_000.0)

    async def test() -> None:
        jobs = Jobs(service)
        await jobs.retain()
        there = {path.name for path in service.store.runs_directory.iterdir()}
        assert there == {"middle", "new", "live"}
        assert "old" not in service.runs.runs
        size = service.store.sizes()["new"]
        object.__setattr__(service.settings, "max_store_bytes", 2 * size + size // 2)
        await jobs.retain()
        there = {path.name for path in service.store.runs_directory.iterdir()}
        assert there == {"new", "live"}
        assert service.store.bytes == sum(service.store.sizes().values())

    anyio.run(test)
    service.close()
    assert shutil.disk_usage(tmp_path).free > 0

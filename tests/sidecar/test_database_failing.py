"""While the database fails what it should have been told waits; what is given up is counted."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from sqlalchemy import exc, select, text
from starlette.testclient import TestClient

from sentinel.sidecar.app import create_app
from sentinel.sidecar.jobs import Jobs
from sentinel.sidecar.service import Service
from sentinel.sidecar.settings import Settings
from sentinel.sidecar.store import database as databases
from sentinel.sidecar.store import failures, run_files
from sentinel.sidecar.store.database import Database
from sentinel.sidecar.store.models import AuditRow, DecisionRow, IncidentRow, RunRow
from sentinel.traces.segments import SegmentWriter
from tests.support import FakeClock
from tests.support.reports import Reporter
from tests.support.simulated import NanGradient, SimulatedTrainer

TOKEN = "a-token-of-some-length"


class Lock:
    """Another program that holds the database: readers pass, writers do not."""

    def __init__(self, path: Path) -> None:
        self._held = sqlite3.connect(path, isolation_level=None)

    def __enter__(self) -> Lock:
        self._held.execute("BEGIN IMMEDIATE")
        return self

    def __exit__(self, *_: object) -> None:
        self._held.execute("ROLLBACK")
        self._held.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(databases, "BUSY_MS", 1)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "sentinel.db"


@pytest.fixture
def timer() -> FakeClock:
    return FakeClock()


@pytest.fixture
def database(place: Path, timer: FakeClock) -> Iterator[Database]:
    database = Database.open(f"sqlite:///{place}", timer)
    yield database
    database.close()


def line(number: int) -> Callable[[Any], None]:
    return lambda session: session.add(
        AuditRow(at=float(number), actor="ann", action="pause", outcome="done")
    )


def lines(database: Database) -> list[float]:
    return database.sync(lambda session: [row.at for row in session.scalars(select(AuditRow))])


def test_writes_wait_in_order_while_it_is_locked_and_are_done_when_it_is_free(
    database: Database, place: Path, timer: FakeClock
) -> None:
    with Lock(place):
        for number in range(3):
            database.submit(line(number))
        assert lines(database) == [], "it can be read meanwhile"
        assert (database.waiting, database.dropped) == (3, 0)
        assert database.trouble == "database is locked (3 writes are waiting)"
        assert not anyio.run(database.written)
    timer.advance(databases.RETRY_MOST_S)
    database.probe()
    assert lines(database) == [0.0, 1.0, 2.0]
    assert (database.waiting, database.dropped, database.trouble) == (0, 0, "")
    assert anyio.run(database.written)


def test_it_is_tried_again_ever_more_rarely(
    database: Database, place: Path, timer: FakeClock
) -> None:
    with Lock(place):
        database.submit(line(0))
        lines(database)
        tries, waits = database.failed, []
        for _ in range(7):
            waited = 0.0
            while database.failed == tries:
                timer.advance(0.125)
                waited += 0.125
                database.probe()
                lines(database)
            waits.append(waited)
            tries = database.failed
    assert waits == [0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_a_write_that_can_never_succeed_holds_up_no_other(
    database: Database, place: Path, timer: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    def twice(session: Any) -> None:
        session.add(AuditRow(id=7, at=0.0, actor="ann", action="pause", outcome="done"))

    with Lock(place):
        for work in (twice, twice, line(1)):
            database.submit(work, what="the one")
    timer.advance(1.0)
    database.probe()
    assert lines(database) == [0.0, 1.0]
    assert (database.waiting, database.dropped, database.trouble) == (0, 1, "")
    assert "a write is lost, the database refuses it what=the one" in caplog.text


def test_one_that_waits_gives_its_place_to_a_newer_one_of_the_same_thing(
    database: Database, place: Path, timer: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(databases, "MOST_QUEUED", 3)
    with Lock(place):
        database.submit(line(0))
        lines(database)
        for number in range(1, 20):
            database.submit(line(number), key="k")
        database.submit(line(20))
        database.submit(line(21))
        assert (database.waiting, database.dropped) == (3, 1)
    timer.advance(1.0)
    database.probe()
    assert lines(database) == [0.0, 19.0, 20.0]


def test_at_the_end_it_is_tried_once_more_and_what_is_lost_is_said(
    place: Path, timer: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    database = Database.open(f"sqlite:///{place}", timer)
    with Lock(place):
        database.submit(line(0), what="audit")
        lines(database)
    database.close()  # its backoff is not over
    database = Database.open(f"sqlite:///{place}", timer)
    assert lines(database) == [0.0]
    with Lock(place):
        for what in ("audit", "order", "audit"):
            database.submit(line(1), what=what)
        database.close()
    assert "lost=3 of=audit: 2, order: 1 error=database is locked" in caplog.text
    assert database.dropped == 3


def of_postgres(kind: type[exc.DBAPIError], state: str | None) -> exc.DBAPIError:
    return kind("SELECT", {}, SimpleNamespace(sqlstate=state))  # type: ignore[arg-type]


def of_sqlite(code: int) -> exc.DBAPIError:
    error = sqlite3.OperationalError("x")
    error.sqlite_errorcode = code
    return exc.OperationalError("SELECT", {}, error)


@pytest.mark.parametrize(
    ("error", "passing"),
    [
        (of_postgres(exc.OperationalError, None), True),  # nobody there
        (of_postgres(exc.OperationalError, "57P01"), True),  # it is shut down
        (of_postgres(exc.OperationalError, "53100"), True),  # its disk is full
        (of_postgres(exc.OperationalError, "40001"), True),
        (of_postgres(exc.InternalError, "25006"), True),  # read-only: a standby
        (of_postgres(exc.ProgrammingError, "42501"), True),  # a right that was taken away
        (of_postgres(exc.OperationalError, "54000"), False),  # a row too large
        (of_postgres(exc.DataError, "22001"), False),
        (of_postgres(exc.IntegrityError, "23505"), False),
        (of_postgres(exc.ProgrammingError, "42P01"), False),
        (of_postgres(exc.DataError, None), False),
        (of_sqlite(5), True),  # busy
        (of_sqlite(8), True),  # read-only
        (of_sqlite(13), True),  # full
        (of_sqlite(10 | (3 << 8)), True),  # an input/output error, extended
        (of_sqlite(1), False),
        (of_sqlite(19 | (8 << 8)), False),  # a constraint, extended
        (OSError("disk"), True),
        (ValueError("ours"), False),
        (OverflowError("too large for a column"), False),
    ],
)
def test_what_passes_and_what_never_will(error: Exception, passing: bool) -> None:
    assert failures.passes(error) is passing


# ---- a whole sidecar -------------------------------------------------------------------------


def started(place: Path, clock: FakeClock) -> Service:
    return Service(Settings(data_dir=place, token=TOKEN), clock=clock, timer=lambda: 0.0)


def reporting(service: Service, run: str, *faults: int) -> Reporter:
    trainer = SimulatedTrainer(seed=1, layers=2, faults=[NanGradient(at) for at in faults])
    reporter = Reporter(service, trainer, run=run)
    reporter.register()
    return reporter


def as_killed(place: Path, at: Path, clock: FakeClock) -> Service:
    """What a start finds of a sidecar that was killed at this moment."""
    shutil.copytree(place, at, ignore=shutil.ignore_patterns("lock"))
    return started(at, clock)


def rows(service: Service, table: Any) -> list[Any]:
    return service.store.database.sync(lambda session: list(session.scalars(select(table))))


def well_again(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.store.database, "_retry_at", 0.0)
    service.store.probe()
    service.store.database.sync(lambda session: None)


def test_what_happens_while_it_fails_is_there_after_a_kill_and_after_it_is_well(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "data"
    service = started(place, clock)
    ends = reporting(service, "ends", 70)
    ends.steps(60)
    service.store.database.sync(lambda session: None)
    with Lock(place / "sentinel.db"):
        new = reporting(service, "new", 40)
        assert new.steps(80).recorded
        ends.steps(20)
        clock.advance(1.0)
        ends.close()
        assert rows(service, DecisionRow) == []
        assert "writes are waiting" in service.store.trouble
        killed = as_killed(place, tmp_path / "killed", clock)
    for found in (killed.runs.get("new"), killed.runs.get("ends")):
        now = service.runs.get(found.name)
        assert (found.fence, found.incarnation) == (now.fence, now.incarnation)
        assert (found.run_state, found.kept.seen.count) == (now.run_state, now.kept.seen.count)
    assert killed.runs.get("ends").run_state == "finished"
    assert {row.name: row.state for row in rows(killed, RunRow)} == {
        "new": "running",
        "ends": "finished",
    }
    acted = {("new", 40), ("ends", 70)}
    assert {(row.run, row.step) for row in rows(killed, DecisionRow)} == acted
    killed.close()
    well_again(service, monkeypatch)
    assert service.store.trouble == ""
    assert {row.name: row.state for row in rows(service, RunRow)} == {
        "new": "running",
        "ends": "finished",
    }
    assert {(row.run, row.step) for row in rows(service, DecisionRow)} == acted
    for reporter in (new, ends):
        numbers = [incident.number for incident in reporter.trainer.state.ledger.incidents]
        kept = [row for row in rows(service, IncidentRow) if row.run == reporter.run]
        assert [row.number for row in kept] == numbers
    service.close()


def test_an_acknowledgement_says_that_it_waits_and_is_not_lost(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(Settings(data_dir=tmp_path, token=TOKEN), clock=clock, timer=lambda: 0.0)
    service: Service = app.state.service
    service.ready = True
    client = TestClient(app, headers={"authorization": f"Bearer {TOKEN}"})
    reporting(service, "r", 40).steps(60)
    service.store.database.sync(lambda session: None)

    def ack() -> dict[str, Any]:
        answer = client.post("/v1/incidents/r:1/ack", json={"by": "ann"})
        assert answer.status_code == 200
        found: dict[str, Any] = answer.json()
        return found

    with Lock(tmp_path / "sentinel.db"):
        assert ack()["recorded"] is False
        silenced = client.post("/v1/incidents/r:1/silence", json={"for_s": 60}).json()
        assert silenced["recorded"] is False
        log = client.get("/v1/audit").json()
        assert "writes are waiting" in log["trouble"]
        assert [entry["action"] for entry in log["audit"]] == ["silence", "ack"]
        lines = client.get("/metrics").text.splitlines()
        waiting = next(x for x in lines if x.startswith("sentinel_sidecar_database_queue "))
        assert float(waiting.split()[1]) >= 3
        assert "degraded: database: database is locked" in client.get("/readyz").text
    well_again(service, monkeypatch)
    (row,) = (row for row in rows(service, IncidentRow) if row.number == 1)
    assert row.acknowledged_by == "ann"
    assert row.silenced_until is not None
    assert [entry.action for entry in rows(service, AuditRow)] == ["ack", "silence"]
    assert client.get("/v1/audit").json()["trouble"] == ""
    assert ack()["recorded"] is True
    service.close()


def test_an_incident_that_has_no_row_gets_one_when_somebody_takes_it(
    tmp_path: Path, clock: FakeClock
) -> None:
    service = started(tmp_path, clock)
    reporting(service, "r", 40).steps(60)
    service.store.database.sync(lambda s: s.execute(text("DELETE FROM incident")))

    async def test() -> None:
        await service.people.acknowledge(await service.people.incident("r:1"), "ann")

    anyio.run(test)
    assert [(row.number, row.acknowledged_by) for row in rows(service, IncidentRow)] == [(1, "ann")]
    service.close()


def test_a_run_whose_row_is_lost_gets_it_again_while_it_reports(
    tmp_path: Path, clock: FakeClock
) -> None:
    service = started(tmp_path, clock)
    reporters = [reporting(service, name) for name in ("a", "b")]
    service.store.database.sync(lambda s: s.execute(text("DELETE FROM run WHERE name = 'b'")))
    jobs = Jobs(service)
    for _ in range(2):
        clock.advance(1.0)
        for reporter in reporters:
            reporter.steps(3)
        anyio.run(jobs.save)
        service.store.database.sync(lambda session: None)
    assert {row.name: row.last_step for row in rows(service, RunRow)} == {"a": 5, "b": 5}
    assert service.store.database.failed == 0
    service.close()


def test_a_database_that_is_gone_altogether_costs_no_run(
    tmp_path: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    service = started(tmp_path / "data", clock)
    reporting(service, "r", 40).steps(60)
    (tmp_path / "data/runs/stray").mkdir()
    shutil.copytree(tmp_path / "data/runs/r", tmp_path / "data/runs/old")
    (tmp_path / "data/runs/old/run.json").unlink()
    service.close()
    for file in (tmp_path / "data").glob("sentinel.db*"):
        file.unlink()
    again = started(tmp_path / "data", clock)
    assert list(again.runs.runs) == ["r"]
    assert [row.name for row in rows(again, RunRow)] == ["r"]
    assert "runs are taken up from their folders" in caplog.text
    (said,) = [r.getMessage() for r in caplog.records if "belong to no run" in r.getMessage()]
    assert said.endswith("runs=old"), "an empty folder is nothing to speak of"
    again.close()


def test_an_older_file_changes_nothing_in_the_database(tmp_path: Path, clock: FakeClock) -> None:
    service = started(tmp_path, clock)
    reporter = reporting(service, "r")
    reporter.steps(5)
    old = (tmp_path / "runs/r/run.json").read_bytes()
    clock.advance(5.0)
    reporter.close()
    service.close()
    (tmp_path / "runs/r/run.json").write_bytes(old)
    again = started(tmp_path, clock)
    assert again.runs.get("r").run_state == "finished"
    again.close()
    for junk in (b"", b"\0\xff", b'{"format": 2}', old.replace(b'"name":"r"', b'"name":"x"')):
        (tmp_path / "runs/r/run.json").write_bytes(junk)
        assert run_files.read(tmp_path / "runs/r") is None


def test_reports_that_a_full_disk_refuses_are_missing_at_once(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = started(tmp_path, clock)
    reporter = reporting(service, "r")
    reporter.steps(20)
    seen = service.runs.get("r").kept.seen
    with monkeypatch.context() as full:

        def refuse(*_: object) -> None:
            raise OSError(28, "No space left on device")

        full.setattr(SegmentWriter, "append", refuse)
        full.setattr(SegmentWriter, "append_all", refuse)
        assert not reporter.steps(30).recorded
        assert (seen.count, seen.missing, seen.holes()) == (20, 30, [(20, 49)])
    assert reporter.steps(10).recorded
    assert (seen.count, seen.missing, seen.holes()) == (30, 30, [(20, 49)])
    reporter.post(*reporter.frames[20:50], late=True)
    assert (seen.count, seen.missing, seen.holes()) == (60, 0, [])
    service.close()

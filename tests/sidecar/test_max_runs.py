"""More runs than fit into memory: what makes room stays on disk, is listed, and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from sentinel.cli import main as cli
from sentinel.core.types import Command, CommandKind, Observation
from sentinel.sidecar.app import create_app
from sentinel.sidecar.jobs import Jobs
from sentinel.sidecar.runs import RefusedError
from sentinel.sidecar.service import Service
from sentinel.sidecar.settings import Settings
from sentinel.wire.messages import Layer
from tests.sidecar.test_record import metrics, trainer
from tests.support import FakeClock
from tests.support.reports import Reporter
from tests.support.served import served

LAYERS = (Layer("a"),)
MOST = 4


@pytest.fixture
def start(tmp_path: Path, clock: FakeClock) -> Iterator[Callable[..., Service]]:
    open_: list[Service] = []

    def starting(**settings: Any) -> Service:
        for service in open_:
            service.close()
        known = {"data_dir": tmp_path / "data", "max_runs": MOST} | settings
        app = create_app(Settings(**known), clock=clock, timer=lambda: 0.0)
        found: Service = app.state.service
        found.app = app  # type: ignore[attr-defined]
        open_[:] = [found]
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


def put(service: Service, name: str) -> int | None:
    """Register a JSON run; the step that comes next."""
    run = service.runs.json.register(name, LAYERS, service.now())
    assert run.session is not None
    return run.session.due(run.mirror)


def step(service: Service, name: str, at: int) -> Any:
    seen = Observation(step=at, loss=2.0 + 0.01 * (at % 7), grad_norm=1.0 + 0.01 * (at % 5))
    return service.runs.json.step(name, seen, None, (), service.now())


def lose(service: Service, clock: FakeClock) -> None:
    clock.advance(2.0 * service.settings.lost_after_s)
    service.runs.expire(service.now())


def crowd(service: Service, clock: FakeClock, count: int = MOST) -> None:
    """As many runs as fit, newer ones, which go on."""
    for at in range(count):
        put(service, f"new{at}")
    clock.advance(1.0)


def names(service: Service) -> set[str]:
    return set(service.runs.runs)


def test_runs_that_have_ended_make_room_before_lost_ones(
    start: Callable[..., Service], clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    service = start()
    put(service, "lost")
    lose(service, clock)
    for name in ("done1", "done2"):
        put(service, name)
        clock.advance(1.0)
        service.runs.json.close(name, "finished", service.now())
    put(service, "goes-on")
    put(service, "new1")
    assert names(service) == {"lost", "done2", "goes-on", "new1"}
    put(service, "new2")
    assert names(service) == {"lost", "goes-on", "new1", "new2"}
    assert "a lost run makes room" not in caplog.text
    put(service, "new3")
    assert names(service) == {"goes-on", "new1", "new2", "new3"}
    assert "a lost run makes room" in caplog.text
    assert "run=lost" in caplog.text
    with pytest.raises(RefusedError, match="--max-runs"):
        put(service, "new4")
    assert 'sentinel_sidecar_runs{state="stored"} 3.0' in metrics(service)


def test_a_restart_leaves_out_those_that_have_ended_first(
    start: Callable[..., Service], clock: FakeClock
) -> None:
    service = start(max_runs=10)
    put(service, "lost")
    lose(service, clock)
    for at in range(MOST):
        put(service, f"done{at}")
        clock.advance(1.0)
        service.runs.json.close(f"done{at}", "finished", service.now())
    again = start()
    assert names(again) == {"lost", "done1", "done2", "done3"}
    assert set(again.runs.stored) == {"done0"}


def test_a_json_run_that_made_room_goes_on_where_it_was(
    start: Callable[..., Service], clock: FakeClock
) -> None:
    service = start()
    put(service, "r7")
    for at in range(60):
        step(service, "r7", at)
    order = Command("p1", CommandKind.PAUSE, 1.0, None, "ann")
    service.runs.command("r7", order, 3600.0, service.now())
    assert step(service, "r7", 60).readings.protection == "off"
    state = service.runs.get("r7").state
    lose(service, clock)
    crowd(service, clock)
    assert "r7" not in names(service)
    lose(service, clock)
    assert put(service, "r7") == 61, "and not as a new run"
    run = service.runs.get("r7")
    assert run.state == state
    assert run.incarnation == "json-1"
    assert [(o.command.id, o.state) for o in run.orders] == [("p1", "taken")]
    assert step(service, "r7", 61).readings.protection == "off", "a person's pause stands"
    series = get(service, "/v1/runs/r7/series?name=loss")["series"]["loss"]
    assert series["step"] == list(range(62))


def test_it_also_goes_on_by_a_step_alone_and_with_an_order_that_waited(
    start: Callable[..., Service], clock: FakeClock
) -> None:
    service = start()
    put(service, "r7")
    for at in range(30):
        step(service, "r7", at)
    lose(service, clock)
    order = Command("p1", CommandKind.PAUSE, 1.0, None, "ann")
    service.runs.command("r7", order, 3600.0, service.now())
    crowd(service, clock)
    assert "r7" not in names(service)
    assert [o["command"]["id"] for o in get(service, "/v1/runs/r7")["orders"]] == ["p1"]
    lose(service, clock)
    step(service, "r7", 30)
    run = service.runs.runs["r7"]
    assert run.run_state == "running"
    assert [(o.command.id, o.state) for o in run.orders] == [("p1", "taken")]


def test_a_finished_json_run_that_made_room_begins_anew_as_another_incarnation(
    start: Callable[..., Service], clock: FakeClock
) -> None:
    service = start()
    put(service, "r7")
    step(service, "r7", 0)
    service.runs.json.close("r7", "finished", service.now())
    crowd(service, clock)
    lose(service, clock)
    put(service, "r7")
    assert service.runs.get("r7").incarnation == "json-2"


def test_a_run_of_frames_that_made_room_is_asked_for_its_state_and_goes_on(
    start: Callable[..., Service], clock: FakeClock
) -> None:
    service = start()
    reporter = Reporter(service, trainer())
    reporter.register()
    reporter.steps(50)
    lose(service, clock)
    crowd(service, clock)
    assert "r" not in names(service)
    lose(service, clock)
    assert reporter.steps(50).decision is not None
    run = service.runs.runs["r"]
    assert (run.run_state, run.incarnation, run.kept.seen.count) == ("running", "i", 100)
    assert run.kept.seen.missing == 0


def test_another_process_than_the_one_that_made_room_gets_a_higher_fence(
    start: Callable[..., Service], clock: FakeClock
) -> None:
    service = start()
    Reporter(service, trainer()).register()
    lose(service, clock)
    crowd(service, clock)
    lose(service, clock)
    assert Reporter(service, trainer(), incarnation="later").register().fence == 2


def test_runs_on_disk_only_are_counted_listed_and_shown_in_full(
    start: Callable[..., Service], clock: FakeClock
) -> None:
    service = start()
    put(service, "r7")
    for at in range(30):
        step(service, "r7", at)
    lose(service, clock)
    before = get(service, "/v1/runs/r7")
    crowd(service, clock)
    for _ in range(2):  # over a restart too
        short, long = get(service, "/v1/runs"), get(service, "/v1/runs?all=1")
        assert short["stored"] == long["stored"] == 1
        assert "r7" not in {run["run"] for run in short["runs"]}
        (found,) = (run for run in long["runs"] if run["run"] == "r7")
        assert found["state"] == "lost"
        full = get(service, "/v1/runs/r7")
        for name in ("state", "step", "loss", "layers", "protection"):
            assert full[name] == before[name], name
        assert full["ledger"]["counters"]["steps"] == 30
        assert get(service, "/v1/runs/r7/series?name=loss")["rows"] == 30
        assert "r7" not in names(service), "who only looks takes nobody's place"
        service = start()


def test_series_of_runs_on_disk_only_go_when_their_retention_is_over(
    start: Callable[..., Service], clock: FakeClock
) -> None:
    service = start()
    put(service, "r7")
    step(service, "r7", 0)
    service.runs.json.close("r7", "finished", service.now())
    crowd(service, clock)
    place = service.store.run_directory("r7")
    anyio.run(Jobs(service).retain)
    assert place.is_dir()
    clock.advance(31 * 86_400.0)
    anyio.run(Jobs(service).retain)
    assert not place.exists()
    assert get(service, "/v1/runs")["stored"] == 0
    assert get(service, "/v1/runs/r7")["code"] == "unknown_run"


def test_a_silence_outlives_that_its_run_made_room(
    start: Callable[..., Service], clock: FakeClock
) -> None:
    service = start()
    put(service, "r7")
    step(service, "r7", 0)
    service.runs.silences_of("r7")[1, 0] = service.now() + 86_400.0
    lose(service, clock)
    crowd(service, clock)
    lose(service, clock)
    put(service, "r7")
    assert list(service.runs.get("r7").silenced) == [(1, 0)]


def test_the_command_line_says_how_many_are_on_disk_only_and_lists_them(
    start: Callable[..., Service],
    clock: FakeClock,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    service = start()
    put(service, "r7")
    step(service, "r7", 0)
    lose(service, clock)
    crowd(service, clock)
    with served(service.app, tmp_path / "s.sock") as url:  # type: ignore[attr-defined]
        assert cli.main(["runs", "--sidecar", url]) == 0
        short = capsys.readouterr().out
        assert cli.main(["runs", "--all", "--sidecar", url]) == 0
        long = capsys.readouterr().out
        assert cli.main(["status", "r7", "--sidecar", url]) == 0
        one = capsys.readouterr().out
    assert "r7" not in short
    assert "1 more, which is over, on disk only" in short
    assert "sentinel runs --all" in short
    assert long.splitlines()[1].split()[:2] == ["r7", "lost"]
    assert "on disk only" not in long
    assert one.startswith("run r7: lost")

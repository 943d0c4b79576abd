"""The sidecar's clock is set back, as by NTP after a boot with a wrong one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from sentinel.core.types import Command, CommandKind, Observation
from sentinel.sidecar.app import create_app
from sentinel.sidecar.jobs import Jobs
from sentinel.sidecar.runs import details
from sentinel.sidecar.service import Service
from sentinel.sidecar.settings import Settings
from sentinel.wire.messages import Layer
from tests.support import FakeClock

HOUR_S = 3600.0


@pytest.fixture
def service(tmp_path: Path, clock: FakeClock) -> Iterator[Service]:
    app = create_app(Settings(data_dir=tmp_path), clock=clock, timer=lambda: 0.0)
    found: Service = app.state.service
    found.runs.json.register("r7", (Layer("a"),), found.now())
    for at in range(5):
        step(found, at)
        clock.advance(1.0)
    yield found
    found.close()


def step(service: Service, at: int) -> None:
    seen = Observation(step=at, loss=2.0, grad_norm=1.0)
    service.runs.json.step("r7", seen, None, (), service.now())


def test_a_dead_trainer_is_lost_as_soon_as_ever(
    service: Service, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    clock.now -= HOUR_S
    service.runs.expire(service.now())
    service.runs.expire(service.now())
    assert caplog.text.count("the clock was set back") == 1
    clock.advance(service.settings.lost_after_s + 1.0)
    service.runs.expire(service.now())
    run = service.runs.get("r7")
    assert run.run_state == "lost"
    assert details(run, service.now())["last_report_s_ago"] > service.settings.lost_after_s


def test_a_living_one_goes_on_and_is_saved(service: Service, clock: FakeClock) -> None:
    anyio.run(Jobs(service).save)
    clock.now -= HOUR_S
    for at in range(5, 8):
        clock.advance(1.0)
        step(service, at)
        service.runs.expire(service.now())
    run = service.runs.get("r7")
    assert run.run_state == "running"
    assert run.interval_s is not None
    assert 0.0 <= run.interval_s < 2.0
    anyio.run(Jobs(service).save)
    assert run.saved_at == service.now()


def test_an_order_is_not_obeyed_for_an_hour_more(service: Service, clock: FakeClock) -> None:
    order = Command("h1", CommandKind.HALT, 1.0, None, "ann")
    known = service.runs.command("r7", order, 60.0, service.now())
    clock.now -= HOUR_S
    service.runs.expire(service.now())
    assert known.open
    clock.advance(61.0)
    service.runs.expire(service.now())
    assert known.state == "expired"

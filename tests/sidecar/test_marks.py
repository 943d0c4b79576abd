"""Marks of skips and rollbacks reach Grafana once each, late ones too, and its troubles nobody."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from sentinel.cli.keep import grafana_from
from sentinel.cli.main import build_parser
from sentinel.core.errors import ConfigError
from sentinel.dashboards.annotate import AnnotationWriter
from sentinel.dashboards.grafana import GrafanaPort, Target
from sentinel.sidecar import exporter
from sentinel.sidecar.grafana import Grafana
from sentinel.sidecar.jobs import DAY_S, Jobs
from sentinel.sidecar.service import Service
from sentinel.sidecar.settings import Settings
from sentinel.sidecar.store.models import DecisionRow, MarkRow
from tests.support import FakeClock
from tests.support.fake_grafana import TOKEN, FakeGrafana, fake_grafana
from tests.support.reports import Reporter
from tests.support.sidecars import serving
from tests.support.simulated import Damage, NanGradient, SimulatedTrainer, actions
from tests.support.waits import until

FAULTS = (NanGradient(80), Damage(150, 2.5))


@pytest.fixture
def grafana() -> Iterator[FakeGrafana]:
    with fake_grafana() as fake:
        yield fake


Start = Callable[..., tuple[Service, AnnotationWriter]]


@pytest.fixture
def start(tmp_path: Path, clock: FakeClock) -> Iterator[Start]:
    """A sidecar on the same directory, told where Grafana is; the one before has gone."""
    before: list[tuple[Service, AnnotationWriter]] = []

    def stop() -> None:
        for service, writer in before:
            writer.close(0.2)
            service.close()
        before.clear()

    def starting(url: str, timeout_s: float = 5.0, **options: Any) -> Any:
        stop()
        target = Target(url, TOKEN)
        writer = AnnotationWriter(
            lambda: GrafanaPort(target, timeout_s=timeout_s), first_pause_s=0.01, **options
        )
        settings = Settings(data_dir=tmp_path / "data", grafana=Grafana(writer))
        service = Service(settings, clock=clock, timer=lambda: 0.0)
        before.append((service, writer))
        return service, writer

    yield starting
    stop()


def reporting(service: Service, clock: FakeClock, steps: int = 200) -> Reporter:
    reporter = Reporter(service, SimulatedTrainer(seed=3, faults=FAULTS, layers=2))
    reporter.register()
    for _ in range(steps):
        reporter.steps(1)
        clock.advance(0.5)
    return reporter


def wanted(reporter: Reporter) -> list[str]:
    words = {"SKIP_STEP": "skip", "ROLLBACK": "rollback"}
    found = actions(reporter.trainer.steps)
    return sorted(f"<b>{words[action]}</b> at step {step}" for step, action, _ in found)


def seen(grafana: FakeGrafana) -> list[str]:
    return sorted(str(a["text"]).partition(":")[0] for a in grafana.annotations)


def pending(service: Service) -> int:
    rows = service.store.database.sync(lambda session: list(session.scalars(select(MarkRow))))
    return len(rows)


def bring(service: Service) -> None:
    asyncio.run(Jobs(service).marks())


def test_every_executed_action_is_marked_once_and_then_forgotten(
    grafana: FakeGrafana, start: Start, clock: FakeClock
) -> None:
    service, writer = start(grafana.url)
    reporter = reporting(service, clock)
    assert len(wanted(reporter)) > 4
    until(lambda: seen(grafana) == wanted(reporter))
    bring(service)
    until(lambda: pending(service) == 0 and not writer.waiting)
    assert seen(grafana) == wanted(reporter)
    assert f'sentinel_sidecar_annotations_total{{outcome="written"}} {writer.written}.0' in (
        asyncio.run(exporter.render(service, "1")).decode()
    )


@pytest.mark.parametrize("status", [401, 403, 404, 500, 503])
def test_marks_of_a_grafana_that_was_away_come_late_each_once(
    grafana: FakeGrafana, start: Start, clock: FakeClock, status: int
) -> None:
    service, writer = start(grafana.url, capacity=3)
    grafana.before = lambda verb, path: grafana.fail_next(status)
    reporter = reporting(service, clock)
    until(lambda: bool(writer.trouble))
    assert grafana.annotations == []
    assert pending(service) == len(wanted(reporter))
    grafana.before, grafana._failures = None, []
    for _ in range(len(wanted(reporter))):
        bring(service)
        until(lambda: not writer.waiting and not writer._keys)
    assert seen(grafana) == wanted(reporter)
    assert (pending(service), writer.dropped) == (0, 0)
    first = min(a["time"] for a in grafana.annotations)
    assert first < 1000 * (clock.now - 20.0)  # where it happened, not where it was written


def test_a_restart_while_grafana_is_away_loses_and_doubles_nothing(
    grafana: FakeGrafana, start: Start, clock: FakeClock
) -> None:
    with fake_grafana() as gone:
        nowhere = gone.url
    service, _ = start(nowhere)
    reporter = reporting(service, clock)
    service, writer = start(grafana.url)
    bring(service)
    until(lambda: seen(grafana) == wanted(reporter))
    until(lambda: pending(service) == 0)
    service, writer = start(grafana.url)
    bring(service)
    assert (seen(grafana), writer.waiting) == (wanted(reporter), 0)


def test_a_mark_that_was_written_without_an_answer_is_not_written_again(
    grafana: FakeGrafana, start: Start, clock: FakeClock
) -> None:
    cut = {"answers": 3}
    real = grafana.answer

    def answer(verb: str, target: str, auth: str, raw: bytes) -> tuple[int, bytes]:
        said = real(verb, target, auth, raw)
        if verb == "POST" and cut["answers"]:
            cut["answers"] -= 1
            return 502, b"the proxy lost it"
        return said

    grafana.answer = answer  # type: ignore[method-assign]
    service, _ = start(grafana.url)
    reporter = reporting(service, clock)
    until(lambda: pending(service) == 0)
    assert cut["answers"] == 0
    assert seen(grafana) == wanted(reporter)


def test_a_mark_whose_deletion_a_kill_cut_off_is_not_written_again(
    grafana: FakeGrafana, start: Start, clock: FakeClock
) -> None:
    service, writer = start(grafana.url)
    writer.on_done = lambda key: None  # killed between the answer and the database
    reporter = reporting(service, clock)
    until(lambda: seen(grafana) == wanted(reporter))
    service, writer = start(grafana.url)
    assert pending(service) == len(wanted(reporter))
    bring(service)
    until(lambda: pending(service) == 0)
    assert seen(grafana) == wanted(reporter)


def test_actions_that_a_killed_sidecar_had_not_written_down_are_marked_too(
    grafana: FakeGrafana, start: Start, clock: FakeClock
) -> None:
    with fake_grafana() as gone:
        nowhere = gone.url
    service, _ = start(nowhere)
    reporter = reporting(service, clock)
    service.store.database.sync(
        lambda session: [session.query(table).delete() for table in (DecisionRow, MarkRow)]
    )
    service, _ = start(grafana.url)
    bring(service)
    until(lambda: seen(grafana) == wanted(reporter))


def test_a_mark_that_grafana_refuses_for_its_own_sake_is_given_up(
    grafana: FakeGrafana, start: Start, clock: FakeClock
) -> None:
    service, writer = start(grafana.url)
    grafana.fail_next(400)
    reporter = reporting(service, clock)
    until(lambda: pending(service) == 0)
    assert writer.dropped == 1
    assert len(seen(grafana)) == len(wanted(reporter)) - 1


def test_reports_that_come_late_mark_nothing(
    grafana: FakeGrafana, start: Start, clock: FakeClock
) -> None:
    service, _ = start(grafana.url)
    reporter = Reporter(service, SimulatedTrainer(seed=3, faults=FAULTS, layers=2))
    reporter.register()
    reporter.post(*reporter.move(200), late=True)
    assert len(wanted(reporter)) > 4
    assert pending(service) == 0


def test_a_grafana_that_hangs_costs_no_step_and_no_end(start: Start, clock: FakeClock) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=16) as hanging:
        service, writer = start(f"http://127.0.0.1:{hanging.getsockname()[1]}", timeout_s=600.0)
        reporter = reporting(service, clock)
        assert pending(service) == len(wanted(reporter)) > 4
        threads = [t for t in threading.enumerate() if t.name == "sentinel-annotations"]
        assert len(threads) == 1
        writer.close(0.1)
    # It is a daemon's affair now: nobody has waited 600 s.


def test_without_grafana_no_mark_is_kept(clock: FakeClock, tmp_path: Path) -> None:
    service = Service(Settings(data_dir=tmp_path), clock=clock, timer=lambda: 0.0)
    reporter = reporting(service, clock)
    assert len(wanted(reporter)) > 4
    assert pending(service) == 0
    assert "grafana" not in asyncio.run(exporter.render(service, "1")).decode()
    service.close()


def test_marks_of_runs_that_are_over_for_long_go_with_them(start: Start, clock: FakeClock) -> None:
    with fake_grafana() as gone:
        nowhere = gone.url
    service, _ = start(nowhere)
    reporting(service, clock).close()
    assert pending(service) > 0
    clock.advance(31 * DAY_S)
    asyncio.run(Jobs(service).retain())
    assert pending(service) == 0


# ---- the command line ---------------------------------------------------------------------


def options(*arguments: str) -> Any:
    return build_parser().parse_args(["serve", *arguments])


def test_there_is_a_keeper_only_where_a_grafana_is_named(
    grafana: FakeGrafana, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("URL", "TOKEN", "TOKEN_FILE"):
        monkeypatch.delenv(f"SENTINEL_GRAFANA_{name}", raising=False)
    assert grafana_from(options()) is None
    with pytest.raises(ConfigError, match="token is missing"):
        grafana_from(options("--grafana-url", grafana.url))
    file = tmp_path / "token"
    file.write_text("glsa_wrong")
    named = ("--grafana-url", grafana.url, "--grafana-token-file", str(file))
    marks_only = grafana_from(options(*named, "--grafana-every", "0"))
    assert marks_only is not None
    assert marks_only.keeper is None
    with pytest.raises(ConfigError, match="--grafana-every must be"):
        grafana_from(options(*named, "--grafana-every", "-1"))
    both = grafana_from(options(*named, "--grafana-every", "5"))
    assert both is not None
    assert both.keeper is not None
    assert both.every_s == 300.0
    both.keeper.begin()
    until(lambda: both.keeper is not None and both.keeper.up is False)
    file.write_text(TOKEN)  # the next turn reads it anew
    until(lambda: both.keeper is not None and (both.keeper.begin() or both.keeper.up is True))
    assert set(grafana.dashboards) == {"sentinel-run"}
    assert grafana.groups == {}  # alert rules are Prometheus's, unless it is said


@pytest.mark.e2e
def test_a_real_sidecar_fills_an_empty_grafana_and_ends_though_it_hangs(
    grafana: FakeGrafana, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    named = ("--grafana-token-file", str(token), "--grafana-alerts")
    with serving("--grafana-url", grafana.url, *named) as at:
        until(lambda: len(grafana.groups) == 1)
        assert at.stop()[0] == 0
    with socket.create_server(("127.0.0.1", 0), backlog=16) as hanging:
        url = f"http://127.0.0.1:{hanging.getsockname()[1]}"
        with serving("--grafana-url", url, *named) as at:
            status, said = at.stop()
            assert (status, "Traceback" in said) == (0, False)

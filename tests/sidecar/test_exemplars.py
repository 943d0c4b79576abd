"""Exemplars lead from a counter to the step and the incident; OpenMetrics only, and in bounds."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse

from sentinel.core.state import Counters, Incident, Ledger, State
from sentinel.core.types import IncidentState, Severity
from sentinel.sidecar import exporter
from sentinel.sidecar.exemplars import MOST, Exemplars
from sentinel.sidecar.service import Service
from sentinel.sidecar.settings import Settings
from tests.support import FakeClock, require
from tests.support.reports import Reporter
from tests.support.simulated import Damage, NanGradient, SimulatedTrainer, actions


@pytest.fixture
def service(clock: FakeClock) -> Iterator[Service]:
    service = Service(Settings(), clock=clock, timer=lambda: 0.0)
    yield service
    service.close()


def reporting(service: Service, run: str = "r7", steps: int = 200) -> Reporter:
    trainer = SimulatedTrainer(seed=3, faults=[NanGradient(80), Damage(150, 2.5)], layers=2)
    reporter = Reporter(service, trainer, run=run)
    reporter.register()
    reporter.steps(steps)
    return reporter


def found(service: Service) -> dict[tuple[str, ...], Any]:
    """Exemplars as a client library reads them, by metric and labels but `run`."""
    text = asyncio.run(exporter.render(service, "1", openmetrics=True)).decode()
    return {
        (sample.name, *(v for k, v in sample.labels.items() if k != "run")): sample.exemplar
        for family in parse(text)
        for sample in family.samples
        if sample.exemplar is not None
    }


def test_what_was_done_carries_its_step_and_its_incident(
    service: Service, clock: FakeClock
) -> None:
    reporter = reporting(service)
    done = actions(reporter.trainer.steps)
    (rollback,) = [(step, rule) for step, action, rule in done if action == "ROLLBACK"]
    last = {rule: step for step, action, rule in done if action == "SKIP_STEP"}
    seen = found(service)
    one = seen["sentinel_rollbacks_total", rollback[1], "restored"]
    number = next(
        i.number
        for i in reporter.trainer.state.ledger.incidents
        if i.opened <= rollback[0] <= i.last
    )
    assert one.labels == {"step": str(rollback[0]), "incident": f"r7:{number}"}
    assert (one.value, float(one.timestamp)) == (1.0, clock.now)
    for rule, step in last.items():
        assert seen["sentinel_skipped_steps_total", rule].labels["step"] == str(step)
    assert seen["sentinel_nonfinite_steps_total", "grad"].labels["step"] == "80"


def test_the_text_format_has_none_and_its_samples_are_the_same(service: Service) -> None:
    reporting(service)
    assert found(service)
    text = asyncio.run(exporter.render(service, "1")).decode()
    assert " # {" not in text
    lines = set(asyncio.run(exporter.render(service, "1", openmetrics=True)).decode().splitlines())
    plain = {line.partition(" # {")[0] for line in lines if not line.startswith("#")}
    assert plain == {line for line in text.splitlines() if not line.startswith("#")}
    promtool = shutil.which("promtool")
    require(promtool, "promtool (apt-get install prometheus)")
    done = subprocess.run(
        [str(promtool), "check", "metrics"], input=text.encode(), capture_output=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_the_longest_run_id_keeps_to_the_bound_of_128_characters(service: Service) -> None:
    reporting(service, run="r" * 128)  # the parser refuses longer ones
    seen = found(service)
    assert seen
    for exemplar in seen.values():
        assert sum(len(k) + len(v) for k, v in exemplar.labels.items()) <= MOST
        assert not exemplar.labels.get("incident", "").startswith("r")
    assert any("incident" in exemplar.labels for exemplar in seen.values())


def test_a_connection_that_was_cut_loses_no_exemplar(service: Service) -> None:
    reporter = reporting(service)
    before = found(service)
    reporter.register()
    assert found(service) == before


def state(step: int, counters: Counters, *incidents: Incident) -> State:
    return State(step=step, ledger=Ledger(counters=counters, incidents=incidents))


def test_what_was_counted_before_anybody_looked_has_none() -> None:
    exemplars = Exemplars()
    counted = Counters(skipped=(("grad_norm", 7),))
    exemplars.note("r", state(50, counted), 1.0)
    assert exemplars.of("skipped_steps_total", ("grad_norm",)) == ""
    more = replace(counted, skipped=(("grad_norm", 9), ("loss_outlier", 1)))
    exemplars.note("r", state(53, more), 2.0)
    exemplars.note("r", state(54, replace(more, steps=3)), 3.0)
    assert exemplars.of("skipped_steps_total", ("grad_norm",)) == ' # {step="52"} 2.0 2.0'
    assert exemplars.of("skipped_steps_total", ("loss_outlier",)) == ' # {step="52"} 1.0 2.0'


def test_an_incident_that_was_over_before_the_step_is_not_its_incident() -> None:
    incident = Incident(
        number=3,
        key="instability",
        state=IncidentState.RESOLVED,
        severity=Severity.WARNING,
        opened=10,
        last=14,
        resolved=16,
        summary="",
    )
    exemplars = Exemplars()
    exemplars.note("r", state(9, Counters()), 1.0)
    for step, labels in ((15, 'step="14",incident="r:3"'), (40, 'step="39"')):
        exemplars.note("r", state(step, Counters(skipped=(("x", step),)), incident), 1.0)
        assert exemplars.of("skipped_steps_total", ("x",)).startswith(f" # {{{labels}}} ")


def test_advice_that_was_raised_since_is_not_the_incident_of_a_skip() -> None:
    instability, advice = (
        Incident(
            number=number,
            key=key,
            state=IncidentState.FIRING,
            severity=Severity.WARNING,
            opened=opened,
            last=61,
            summary="",
        )
        for number, key, opened in ((1, "instability", 59), (2, "layer_band", 60))
    )
    counters = Counters(
        skipped=(("nonfinite_loss", 1),),
        nonfinite=(("loss", 1),),
        rollbacks=(("nonfinite_loss/restored", 1),),
        flags=(("layer_band", 1),),
    )
    exemplars = Exemplars()
    exemplars.note("h1", state(9, Counters()), 1.0)
    exemplars.note("h1", state(61, counters, instability, advice), 1.0)
    for metric, values, number in (
        ("skipped_steps_total", ("nonfinite_loss",), 1),
        ("nonfinite_steps_total", ("loss",), 1),
        ("rollbacks_total", ("nonfinite_loss", "restored"), 1),
        ("flags_total", ("layer_band",), 2),
    ):
        found = exemplars.of(metric, values)
        assert found.startswith(f' # {{step="60",incident="h1:{number}"}} '), metric

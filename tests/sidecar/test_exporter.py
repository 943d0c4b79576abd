"""The exporter: bounded, sticky, and gone when the run is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from sentinel.core.state import ENGINE_VERSION
from sentinel.core.types import NOT_MEASURED
from sentinel.sidecar import exporter
from sentinel.sidecar.exporter import ENDED_S, LOST_S, TOP, Layers
from sentinel.sidecar.routes.metrics import wants_openmetrics
from sentinel.sidecar.service import Service
from sentinel.sidecar.settings import Settings
from sentinel.wire.messages import Counts, Layer
from tests.support import FakeClock
from tests.support.reports import Reporter
from tests.support.simulated import NanGradient, SimulatedTrainer

LAYERS = 60


@pytest.fixture
def service(clock: FakeClock) -> Iterator[Service]:
    service = Service(Settings(max_layers=50), clock=clock, timer=lambda: 0.0)
    yield service
    service.close()


def reporting(service: Service, layers: int = LAYERS, run: str = "r") -> Reporter:
    reporter = Reporter(service, SimulatedTrainer(seed=1, layers=layers), run=run)
    reporter.register()
    reporter.steps(3)
    return reporter


def scrape(service: Service, layers: Layers = Layers.TOP) -> dict[str, list[tuple[dict, float]]]:
    text = asyncio.run(exporter.render(service, "1", layers=layers)).decode()
    found: dict[str, list[tuple[dict, float]]] = {}
    for family in parse(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def shown(service: Service, layers: Layers = Layers.TOP) -> dict[str, float]:
    samples = scrape(service, layers)["sentinel_layer_grad_norm"]
    return {labels["layer"]: value for labels, value in samples}


def set_norms(service: Service, values: np.ndarray) -> None:
    service.runs.get("r").figures.columns["layer_grad_norm"] = values.astype(np.float32)


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("", False),
        ("*/*", False),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text; version=1.0.0; Q=0.5", True),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=0.000, text/plain", False),
        ("application/openmetrics-text;q=0.2,text/plain;q=0.9", False),
        ("text/plain;q=0.9, application/openmetrics-text", True),
        ("application/openmetrics-text;q=often", False),
        (
            # Prometheus's own
            "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*",
            True,
        ),
    ],
)
def test_the_format_is_the_one_that_is_asked_for_most(accept: str, wanted: bool) -> None:
    assert wants_openmetrics(accept) is wanted


def test_of_many_layers_the_largest_have_series_and_quantiles_speak_for_all(
    service: Service,
) -> None:
    reporting(service)
    values = np.arange(1.0, LAYERS + 1)
    set_norms(service, values)
    found = scrape(service)
    assert shown(service) == {f"layer{at}": at + 1.0 for at in range(LAYERS - TOP, LAYERS)}
    quantiles = {
        labels["q"]: value
        for labels, value in found["sentinel_layer_quantile"]
        if labels["signal"] == "layer_grad_norm"
    }
    assert quantiles == {"0": 1.0, "0.5": 31.0, "0.9": 54.0, "1": 60.0}
    assert found["sentinel_layers_left_out"] == [({"run": "r"}, float(LAYERS - TOP))]


def test_a_layer_keeps_its_series_until_another_is_a_quarter_larger(service: Service) -> None:
    reporting(service)
    values = np.full(LAYERS, 1.0)
    values[:TOP] = 2.0
    set_norms(service, values)
    before = set(shown(service))
    values[TOP] = 2.2  # larger, but not by a quarter
    set_norms(service, values)
    assert set(shown(service)) == before
    values[TOP + 1] = 2.6
    set_norms(service, values)
    assert set(shown(service)) - before == {f"layer{TOP + 1}"}
    assert len(shown(service)) == TOP


def test_a_layer_that_is_no_number_is_always_shown_and_one_not_measured_never(
    service: Service,
) -> None:
    reporting(service)
    values = np.full(LAYERS, 1.0)
    values[40], values[41] = np.nan, np.inf
    values[:30] = NOT_MEASURED
    set_norms(service, values)
    found = shown(service)
    assert np.isnan(found["layer40"])
    assert found["layer41"] == np.inf
    assert not set(found) & {f"layer{at}" for at in range(30)}


def test_all_layers_can_be_had_up_to_the_cap(service: Service) -> None:
    reporting(service)
    assert len(shown(service, Layers.ALL)) == 50
    assert scrape(service, Layers.ALL)["sentinel_layers_left_out"][0][1] == 10.0


def test_series_of_runs_that_are_over_disappear_after_a_while(
    service: Service, clock: FakeClock
) -> None:
    reporting(service, 2).close()
    reporting(service, 2, run="silent")
    clock.advance(100.0)
    service.runs.expire(clock.now)
    states = {
        (labels["run"], labels["state"])
        for labels, value in scrape(service)["sentinel_run_state"]
        if value == 1.0
    }
    assert states == {("r", "finished"), ("silent", "lost")}
    clock.advance(ENDED_S)
    assert {labels["run"] for labels, _ in scrape(service)["sentinel_run_state"]} == {"silent"}
    clock.advance(LOST_S)
    assert "sentinel_run_state" not in scrape(service)
    assert scrape(service)["sentinel_sidecar_runs"]


def test_what_the_trainer_measures_besides_is_exported(service: Service) -> None:
    reporting(service, 2)
    service.runs.get("r").figures.counts = Counts(
        gauges={"tokens_per_second": 1234.5, "memory_bytes/weights": 1e9, "unknown": 1.0}
    )
    found = scrape(service)
    assert found["sentinel_tokens_per_second"] == [({"run": "r"}, 1234.5)]
    assert found["sentinel_memory_bytes"] == [({"run": "r", "kind": "weights"}, 1e9)]
    assert "sentinel_clipped_step_ratio" not in found


def test_a_label_with_every_odd_character_comes_back_as_it_was(service: Service) -> None:
    reporter = Reporter(service, SimulatedTrainer(seed=1, layers=2))
    odd = 'a%s"\\\n%d{}'
    reporter.layers = (Layer(odd), Layer("b"))
    reporter.register()
    reporter.steps(1)
    assert set(shown(service)) == {odd, "b"}
    set_norms(service, np.array([np.nan, 1.0]))
    assert set(shown(service)) == {odd, "b"}


@pytest.mark.parametrize("decides", [True, False])
def test_a_process_that_registers_again_keeps_what_was_counted(
    service: Service, monkeypatch: pytest.MonkeyPatch, decides: bool
) -> None:
    if not decides:  # another engine version only records
        real = service.runs.register
        monkeypatch.setattr(
            service.runs,
            "register",
            lambda m, now: real(msgspec.structs.replace(m, engine_version=ENGINE_VERSION + 1), now),
        )
    reporter = Reporter(service, SimulatedTrainer(seed=1, layers=3, faults=[NanGradient(5)]))
    reporter.register()
    reporter.steps(20)
    service.runs.get("r").figures.errors["decide"] = 1
    before = of_run(service)
    assert ("sentinel_skipped_steps_total", "1.0") in {(name, v) for name, _, v in before}
    reporter.register()
    assert of_run(service) == before


def of_run(service: Service) -> list[tuple[str, dict, str]]:
    return [
        (name, labels, repr(value))
        for name, samples in scrape(service).items()
        for labels, value in samples
        if "run" in labels
    ]

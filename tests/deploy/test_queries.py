"""Every query of the dashboard returns data, and the alerts speak, on a run that went wrong.

A real sidecar, a real Prometheus that scrapes it every second, and a simulated trainer with a NaN,
logits that grow and damaged weights, which reports over the real link.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from sentinel.core.policy import Policy
from sentinel.core.state import State
from sentinel.core.types import (
    LAYER_ACTIVATION_RMS,
    LAYER_GRAD_NORM,
    Action,
    Column,
    Decision,
    Observation,
)
from sentinel.dashboards.grafana import TOKEN_VARIABLE, URL_VARIABLE
from sentinel.dashboards.panels import ANNOTATIONS, Panel, panels
from sentinel.wire.messages import Layer
from sentinel_hooks.link import Breaker, Link, make_link
from tests.support import ROOT
from tests.support.fake_grafana import TOKEN, FakeGrafana, fake_grafana
from tests.support.prometheus import Prometheus, prometheus
from tests.support.sidecars import HostileProxy, hostile_proxy, serving
from tests.support.simulated import (
    Damage,
    Fault,
    LogitGrowth,
    NanGradient,
    SimulatedTrainer,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.torch]

RULES = ROOT / "deploy/prometheus/sentinel-rules.yaml"
LAYERS = 12
NAN, LOGITS, DAMAGE, END = 140, 160, 230, 330
GAUGES = {
    "tokens_per_second": 51_200.0,
    "clipped_step_ratio": 0.02,
    "memory_bytes/weights": 2e9,
    "memory_bytes/optimizer": 12e9,
}
SCRAPE_S = 2.2  # for sure two scrapes


class ReportingTrainer(SimulatedTrainer):
    """A simulated trainer that asks a sidecar and reports to it, as the session does."""

    def __init__(self, link: Link, **options: Any) -> None:
        self.link = link
        super().__init__(decider=self._ask, policy=link.policy, layers=LAYERS, **options)

    def _ask(self, state: State, observation: Observation, policy: Policy) -> Decision:
        from sentinel.core import engine

        own = engine.decide(state, observation, policy)
        decision, source = self.link.decide(observation, own, state)
        self._source = source
        return decision

    def step(self) -> None:
        super().step()
        done = self.steps[-1]
        outcome = replace(done.outcome, source=self._source)
        self.link.settled(done.observation, done.decision, outcome)

    def _observe(self, step: int) -> tuple[Observation, float]:
        observation, batch = super()._observe(step)
        return replace(observation, loss_scale=65536.0), batch

    def _note(self, event: Any) -> None:
        super()._note(event)
        self.link.event(event)

    def _columns(self, step: int, norm: float, logit: float) -> dict[str, Column]:
        columns = super()._columns(step, norm, logit)
        columns[LAYER_ACTIVATION_RMS] = np.linspace(0.5, 2.0, LAYERS, dtype=np.float32)
        if step == NAN:
            columns[LAYER_GRAD_NORM] = np.ones(LAYERS, dtype=np.float32)
            columns[LAYER_GRAD_NORM][3] = np.nan
        return columns

    def until(self, step: int) -> None:
        """Run to a step, not quite as fast as possible."""
        while self.state.step < step:
            self.step()
            time.sleep(0.002)


def trainer(url: str, run: str, faults: list[Fault]) -> ReportingTrainer:
    link = make_link(
        url,
        run=run,
        incarnation=f"{run}-1",
        policy=Policy.load("default"),
        layers=tuple(Layer(f"blocks.{i}") for i in range(LAYERS)),
        breaker=Breaker(floor_s=0.05, retry_s=0.02),
    )
    counts = link._counts  # type: ignore[attr-defined]
    # What a trainer measures besides its observations travels with its own counters.
    link._counts = lambda: msgspec.structs.replace(counts(), gauges=GAUGES)  # type: ignore[attr-defined]
    return ReportingTrainer(link, seed=3, faults=faults)


def live(made: ReportingTrainer, proxy: HostileProxy) -> None:
    """The run that goes wrong; it waits where a scrape has to see something."""
    made.link.count_error("probe")
    made.until(NAN - 1)
    time.sleep(SCRAPE_S)
    made.until(NAN + 1)
    time.sleep(SCRAPE_S)
    made.until(LOGITS + 10)
    time.sleep(SCRAPE_S)
    proxy.behaviour = "refuses"
    made.until(LOGITS + 12)
    proxy.behaviour = "healthy"
    made.until(END)
    time.sleep(SCRAPE_S)


@dataclass
class World:
    """What the tests look at: the run `bad` goes on, `good` has ended well."""

    prom: Prometheus
    bad: ReportingTrainer
    start: float
    grafana: FakeGrafana


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder: Path = tmp_path_factory.mktemp("prometheus")
    with (
        fake_grafana() as grafana,
        serving(env={URL_VARIABLE: grafana.url, TOKEN_VARIABLE: TOKEN}) as sidecar,
        hostile_proxy(sidecar.port) as proxy,
        prometheus(folder, targets={"sentinel": [sidecar.port]}, rules=[RULES]) as prom,
    ):
        start = time.time()
        good = trainer(sidecar.url, "good", [])
        good.until(200)
        time.sleep(SCRAPE_S)
        good.link.close()
        faults = [NanGradient(NAN), LogitGrowth(LOGITS), Damage(DAMAGE)]
        bad = trainer(proxy.url, "bad", faults)
        live(bad, proxy)
        yield World(prom, bad, start, grafana)
        bad.link.close()


def ready(expr: str, run: str) -> str:
    """The expression with Grafana's variables filled in."""
    return expr.replace("$__rate_interval", "10s").replace("$run", run)


CASES = [(panel, query.expr) for panel in panels() for query in panel.queries]


@pytest.mark.parametrize(("panel", "expr"), CASES, ids=[f"{p.title}: {e}" for p, e in CASES])
def test_every_query_of_the_dashboard_returns_data(world: World, panel: Panel, expr: str) -> None:
    asked = ready(expr, "bad")
    if panel.kind == "stat":
        assert world.prom.until(asked, 20)
    else:
        assert world.prom.range(asked, world.start, time.time()), asked


@pytest.mark.parametrize("mark", [m for m in ANNOTATIONS if m.expr], ids=lambda m: m.name)
def test_every_mark_is_there_for_the_bad_run_and_not_for_the_good_one(
    world: World, mark: Any
) -> None:
    assert world.prom.range(ready(mark.expr, "bad"), world.start, time.time())
    assert not world.prom.range(ready(mark.expr, "good"), world.start, time.time())


def test_the_layer_that_is_nan_is_named(world: World) -> None:
    (expr,) = [e for _, e in CASES if "!= 0" in e]
    found = world.prom.range(ready(expr, "bad"), world.start, time.time())
    assert {series["metric"]["layer"] for series in found} == {"blocks.3"}


def test_the_sidecar_marks_in_grafana_what_it_did_and_nothing_else(world: World) -> None:
    done = [
        (step.observation.step, step.decision.action.name)
        for step in world.bad.steps
        if step.decision.action is not Action.PROCEED
    ]
    deadline = time.monotonic() + 20
    while len(world.grafana.annotations) < len(done):
        assert time.monotonic() < deadline, world.grafana.annotations
        time.sleep(0.1)
    marks = world.grafana.annotations
    names = {"SKIP_STEP": "skip", "ROLLBACK": "rollback"}
    assert [
        (m["tags"][1], f"at step {step}:" in m["text"])
        for m, (step, _) in zip(marks, done, strict=True)
    ] == [(names[action], True) for _, action in done]
    wanted = next(m for m in ANNOTATIONS if m.tags)
    for mark in marks:
        assert {tag.replace("$run", "bad") for tag in wanted.tags} <= set(mark["tags"])
        assert world.start * 1000 - 1 <= mark["time"] <= time.time() * 1000


def test_the_list_of_runs_holds_both(world: World) -> None:
    found = world.prom.instant("group by (run) (sentinel_run_info)")
    assert {sample["metric"]["run"] for sample in found} == {"bad", "good"}


def test_the_alerts_fire_for_the_bad_run_and_none_for_the_good_one(world: World) -> None:
    for name in ("SentinelRollback", "SentinelNonFinite", "SentinelQkNorm"):
        world.prom.until(f'ALERTS{{alertname="{name}",alertstate="firing",run="bad"}}', 20)
    everything = world.prom.range("ALERTS", world.start, time.time())
    found = {(s["metric"]["alertname"], s["metric"]["run"]) for s in everything}
    assert found == {
        ("SentinelRollback", "bad"),
        ("SentinelNonFinite", "bad"),
        ("SentinelQkNorm", "bad"),
    }


def test_the_run_was_really_rolled_back_once(world: World) -> None:
    counters = world.bad.state.ledger.counters
    assert [key.partition("/")[2] for key, _ in counters.rollbacks] == ["restored"]

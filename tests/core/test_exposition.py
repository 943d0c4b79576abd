"""The .prom text of an embedded run: the same metrics as a sidecar's, without any library."""

from __future__ import annotations

import math
import shutil
import subprocess

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from sentinel.core.catalog import CATALOG
from sentinel.core.exposition import SOURCES, TEXTFILE_LAYERS, Textfile, WindowMax
from sentinel.core.policy import Policy
from sentinel.core.types import LAYER_GRAD_NORM, NOT_MEASURED, Observation
from tests.support import require
from tests.support.simulated import Damage, LogitGrowth, NanGradient, SimulatedTrainer

NOW = 1_700_000_000.0
Found = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def run(steps: int = 260, layers: int = 3) -> tuple[SimulatedTrainer, Textfile]:
    trainer = SimulatedTrainer(
        seed=3,
        layers=layers,
        faults=[NanGradient(80), LogitGrowth(100, 2), Damage(150, 2.5)],
        policy=Policy.load("default"),
    )
    page = Textfile(
        "r7", policy=trainer.policy, incarnation="i", layers=[f"l{n}" for n in range(layers)]
    )
    trainer.run(steps)
    for at, step in enumerate(trainer.steps):
        page.note(step.observation, step.decision, NOW + at * 0.1)
    return trainer, page


def samples(text: str) -> Found:
    found: Found = {}
    for family in parse(text):
        assert family.documentation
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == "r7"
            key = (sample.name.removeprefix("sentinel_"), tuple(sorted(labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def test_what_the_trainer_has_said_since_its_last_step_is_the_newer_word() -> None:
    trainer, page = run()
    for said, shown in (("", "armed"), ("blind", "blind"), ("off", "off"), ("", "armed")):
        found = samples(page.render(trainer.state, run_state="running", now=NOW + 30.0, said=said))
        states = {dict(k[1])["state"]: v for k, v in found.items() if k[0] == "protection"}
        assert [state for state, value in states.items() if value] == [shown]
    over = samples(page.render(trainer.state, run_state="lost", now=NOW + 30.0, said="blind"))
    assert over["protection", (("state", "off"),)] == 1.0


def test_the_text_says_what_the_run_is_and_did() -> None:
    trainer, page = run()
    found = samples(page.render(trainer.state, run_state="running", now=NOW + 30.0))
    last, counters = trainer.steps[-1], trainer.state.ledger.counters
    assert found["loss", ()] == last.observation.loss
    assert found["step", ()] == 259.0
    assert found["last_report_timestamp_seconds", ()] == NOW + 25.9
    assert found["steps_total", ()] == counters.steps
    for rule, count in counters.skipped:
        assert found["skipped_steps_total", (("rule", rule),)] == count
    assert counters.rollbacks
    for both, count in counters.rollbacks:
        rule, outcome = both.split("/")
        assert found["rollbacks_total", (("outcome", outcome), ("rule", rule))] == count
    assert found["nonfinite_steps_total", (("signal", "grad"),)] >= 1.0
    assert found["run_state", (("state", "running"),)] == 1.0
    assert sum(v for (name, _), v in found.items() if name == "protection") == 1.0
    assert (
        found["layer_grad_norm", (("layer", "l1"),)] == last.observation.columns[LAYER_GRAD_NORM][1]
    )


def test_a_one_step_spike_is_still_there_when_it_is_scraped() -> None:
    trainer, page = run()
    top = max(
        s.observation.grad_norm
        for s in trainer.steps
        if s.observation.grad_norm == s.observation.grad_norm
    )
    found = samples(page.render(trainer.state, run_state="running", now=NOW + 30.0))
    assert found["grad_norm_window_max", ()] == top > found["grad_norm", ()]
    assert found["attention_max_logit_window_max", ()] == 80.0
    later = samples(page.render(trainer.state, run_state="running", now=NOW + 300.0))
    assert ("grad_norm_window_max", ()) not in later


def test_what_was_not_measured_has_no_sample_and_nan_is_a_value() -> None:
    trainer, page = run(3)
    page.note(Observation(3, grad_norm=math.nan), trainer.steps[-1].decision, NOW)
    found = samples(page.render(None, run_state="running", now=NOW))
    assert ("loss", ()) not in found
    assert math.isnan(found["grad_norm", ()])
    assert ("steps_total", ()) not in found
    assert ("tokens_per_second", ()) not in found


def test_gauges_and_errors_of_the_trainer_are_shown() -> None:
    trainer, page = run(3)
    found = samples(
        page.render(
            trainer.state,
            run_state="finished",
            now=NOW,
            gauges={"tokens_per_second": 10.5, "memory_bytes/weights": 2.0},
            internal_errors={"probe": 2},
        )
    )
    assert found["tokens_per_second", ()] == 10.5
    assert found["memory_bytes", (("kind", "weights"),)] == 2.0
    assert found["internal_errors_total", (("where", "probe"),)] == 2.0
    assert found["protection", (("state", "off"),)] == 1.0


def test_of_many_layers_the_largest_are_shown_and_those_that_are_no_number() -> None:
    trainer, page = run(3, layers=100)
    column = np.arange(100, dtype=np.float32)
    column[7], column[8] = np.nan, NOT_MEASURED
    observation = Observation(3, columns={LAYER_GRAD_NORM: column})
    page.note(observation, trainer.steps[-1].decision, NOW)
    found = samples(page.render(trainer.state, run_state="running", now=NOW))
    shown = {dict(key)["layer"] for name, key in found if name == "layer_grad_norm"}
    assert shown == {"l7", *(f"l{n}" for n in range(101 - TEXTFILE_LAYERS, 100))}


def test_every_source_has_a_place_in_the_catalogue() -> None:
    assert set(SOURCES) <= {spec.name for spec in CATALOG if spec.per_run}


def test_promtool_has_nothing_to_say() -> None:
    promtool = shutil.which("promtool")
    require(promtool, "promtool (apt-get install prometheus)")
    trainer, page = run()
    text = page.render(trainer.state, run_state="running", now=NOW).encode()
    done = subprocess.run(
        [str(promtool), "check", "metrics"], input=text, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


@pytest.mark.parametrize(("at", "value"), [(0.0, 3.0), (59.0, 3.0), (119.0, 3.0), (180.0, None)])
def test_a_window_maximum_lasts_one_to_two_minutes(at: float, value: float | None) -> None:
    window = WindowMax()
    for number in (1.0, 3.0, math.nan, None, 2.0):
        window.add(number, 6_000_000.0)
    assert window.value(6_000_000.0 + at) == value

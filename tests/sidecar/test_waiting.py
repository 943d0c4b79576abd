"""What "warming" waits for, in words that a person can count with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from sentinel.core.detectors.grad_norm import NormState
from sentinel.core.types import Protection
from sentinel.sidecar.app import create_app
from sentinel.sidecar.service import Service
from sentinel.sidecar.settings import Settings
from sentinel.sidecar.waiting import waiting
from tests.support import FakeClock
from tests.support.reports import Reporter
from tests.support.simulated import NanGradient, SimulatedTrainer


@pytest.fixture
def service() -> Iterator[Service]:
    found: Service = create_app(Settings(), clock=FakeClock(), timer=lambda: 0.0).state.service
    yield found
    found.close()


def rules(service: Service) -> list[str]:
    return [one["rule"] for one in waiting(service.runs.get("r"))]


def test_each_rule_is_named_until_it_is_armed_and_no_longer(service: Service) -> None:
    reporter = Reporter(service, SimulatedTrainer(seed=1, layers=3, faults=[NanGradient(10)]))
    reporter.register()
    assert waiting(service.runs.get("r")) == []  # nothing has been judged
    seen: list[tuple[str, ...]] = []
    for _ in range(120):
        reporter.steps(1)
        found = tuple(rules(service))
        run = service.runs.get("r")
        assert run.decision is not None
        protection = run.decision.readings.protection
        assert (protection is Protection.WARMING) == bool(found), reporter.trainer.state.step
        if not seen or seen[-1] != found:
            seen.append(found)
    assert seen[-1] == ()
    assert ("grad_norm", "loss_spike") in seen
    assert ("grad_norm",) in seen


def test_the_numbers_count_up_and_a_skipped_step_does_not_count(service: Service) -> None:
    reporter = Reporter(service, SimulatedTrainer(seed=1, layers=3, faults=[NanGradient(10)]))
    reporter.register()
    reporter.steps(20)  # the newest is not carried out yet, and step 10 was skipped
    norm, loss = waiting(service.runs.get("r"))
    assert norm["detail"] == "the gradient norm rule waits for 64 accepted norms, 18 so far"
    assert loss["detail"].startswith("the loss rules wait for 48 finite losses, ")


def test_a_baseline_that_still_moves_is_told_with_its_two_halves(service: Service) -> None:
    reporter = Reporter(service, SimulatedTrainer(seed=1, layers=3))
    reporter.register()
    reporter.steps(5)
    run = service.runs.get("r")
    assert run.state is not None
    norms = tuple(100.0 * 0.9**n for n in range(70))
    run.mirror.state = replace(run.state, stats=replace(run.state.stats, norm=NormState(norms)))
    said = waiting(run)[0]["detail"]
    assert "for its baseline to hold still" in said
    assert "differ by 1.5x or more" in said
    assert "16.68 and 0.4175" in said


def test_without_a_state_it_is_said_that_it_is_not_known(service: Service) -> None:
    reporter = Reporter(service, SimulatedTrainer(seed=1, layers=3))
    reporter.register()
    reporter.steps(5)
    run = service.runs.get("r")
    run.mirror.state = None
    assert waiting(run)[0]["rule"] == ""

"""What decide() would say, known before anything is measured.

Seen red: with a limit one float too large or too small, with z_stay instead of z_hot, without the
joint limit of loss and norm, without recurrence, without the drift, and with steps in trouble, or
before a snapshot, not read at once.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel.core import engine
from sentinel.core.ahead import Ahead, Limits
from sentinel.core.detectors import grad_norm, spike
from sentinel.core.detectors.grad_norm import NormConfig, NormState
from sentinel.core.detectors.spike import SpikeConfig, SpikeState
from sentinel.core.policy import CanaryMode, Policy, RuleConfig
from sentinel.core.state import State
from sentinel.core.types import Action, Decision, Mode, Observation
from sentinel.core.windows import LARGEST, last_below
from tests.core.test_engine_properties import POLICIES, SMALL, faults
from tests.core.test_generated_policies import policies
from tests.support.simulated import BigGradient, Garbage, Shift, SimulatedTrainer

UP, DOWN = math.inf, -math.inf


def around(limit: float) -> list[float]:
    """Both sides of a limit, to the last bit; nothing where there is none."""
    if limit >= LARGEST:
        return []
    return [math.nextafter(limit, DOWN), limit, math.nextafter(limit, UP)]


class Checked:
    """A decider that first asks what is known ahead, and holds decide() to it."""

    def __init__(self, policy: Policy) -> None:
        self.ahead = Ahead(policy)
        self.fresh_every_time = policy
        self.asked = self.late = self.compared = 0
        self.why: dict[str, int] = {}

    def __call__(self, state: State, observation: Observation, policy: Policy) -> Decision:
        self.asked += 1
        limits = self.ahead.limits(state)
        assert limits == Ahead(self.fresh_every_time).limits(state)  # what it remembers is true
        if limits.read_now:
            self.why[limits.read_now] = self.why.get(limits.read_now, 0) + 1
        else:
            self.late += 1
            # A step of its own kind, or one of a few: all would take minutes.
            if limits.holds(observation.grad_norm, observation.loss) or self.late % 11 == 0:
                self.compare(state, observation, policy, limits)
        decision = engine.decide(state, observation, policy)
        assert limits.read_now or not decision.take_snapshot
        return decision

    def compare(
        self, state: State, observation: Observation, policy: Policy, limits: Limits
    ) -> None:
        norms = [observation.grad_norm, math.nan, math.inf, 0.0, 1e-3, 1e30]
        losses = [observation.loss, math.nan, math.inf, DOWN, 1e-3, 1e30, -2.0]
        norms += [*around(limits.norm), *around(limits.norm_with_loss)]
        losses += [*around(limits.loss), *around(limits.loss_with_norm)]
        for norm, loss in itertools.product(norms, losses):
            if norm is None or loss is None:
                continue
            seen = Observation(observation.step, loss=loss, grad_norm=norm)
            decision = engine.decide(state, seen, policy)
            assert decision.action <= Action.SKIP_STEP, (decision.rule, norm, loss)
            held = decision.action is Action.SKIP_STEP
            assert limits.holds(norm, loss) is held, (norm, loss, limits, decision.reason)
            assert not engine.wants_canary(state, seen, policy)
            assert not decision.take_snapshot
            assert decision.lr_factor == limits.lr_factor
            self.compared += 1
        alone = self.ahead.limits(state, loss=False)
        for norm in norms:
            if norm is not None:
                decision = engine.decide(
                    state, Observation(observation.step, grad_norm=norm), policy
                )
                assert alone.holds(norm, None) is (decision.action is Action.SKIP_STEP)


def run(policy: Policy, steps: int = 160, **more: Any) -> Checked:
    checked = Checked(policy)
    trainer = SimulatedTrainer(policy=policy, decider=checked, **more)
    trainer.run(steps)
    return checked


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), faults_=faults, name=st.sampled_from(sorted(POLICIES)))
def test_limits_say_what_decide_will_say(seed: int, faults_: Any, name: str) -> None:
    checked = run(POLICIES[name], seed=seed, faults=faults_)
    assert checked.asked


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), faults_=faults, policy=policies())
def test_limits_hold_for_any_policy(seed: int, faults_: Any, policy: Policy) -> None:
    run(policy, 100, seed=seed, faults=faults_)


def test_nearly_every_step_of_a_calm_run_is_known_ahead() -> None:
    checked = run(Policy(), 400)
    assert checked.late > 0.95 * checked.asked, checked.why
    assert set(checked.why) <= {"a snapshot follows", "trouble"}


def test_after_a_fault_steps_are_read_at_once_until_it_is_over() -> None:
    policy = replace(SMALL, mode=Mode.ACT)
    checked = run(policy, 120, faults=[Shift(60, 8, 1.5)])
    assert checked.why["trouble"] >= 5
    assert checked.late > 50


def test_observing_nothing_is_held() -> None:
    policy = POLICIES["observe"]
    state = SimulatedTrainer(policy=policy)
    state.run(36)
    limits = Ahead(policy).limits(state.state)
    assert limits == Limits(held=False)
    assert not limits.holds(math.nan, math.nan)


def test_a_policy_that_climbs_at_the_first_bad_step_is_always_read() -> None:
    rules = replace(SMALL.rules, loss_spike=RuleConfig(for_steps=1))
    ahead = Ahead(replace(SMALL, rules=rules))
    assert ahead.limits(State()).read_now
    without = replace(SMALL, rules=rules, canary=replace(SMALL.canary, mode=CanaryMode.OFF))
    assert Ahead(without).limits(State(step=3)).read_now


# ---- the limits of single detectors ------------------------------------------------------------


@given(st.lists(st.floats(1e-6, 1e6), min_size=4, max_size=12), st.floats(1.0, 1e3))
def test_the_norms_limit_is_the_last_float_that_is_no_spike(
    norms: list[float], factor: float
) -> None:
    config = NormConfig(window=12, warmup=4, factor=factor)
    state = NormState(tuple(norms), 0, True)
    limit = grad_norm.limit(state, config)
    assert grad_norm.judge(state, limit, config).status == "normal"
    assert grad_norm.judge(state, math.nextafter(limit, UP), config).status == "spike"


@pytest.mark.parametrize("level", [3e-3, 0.049, 0.051, 1.0, 2.7, 11.0, 1e4, 1e200])
def test_the_losses_limit_is_the_last_float_that_is_not_hot(level: float) -> None:
    config = SpikeConfig(window=12, warmup=8)
    dice = random.Random(str(level))
    state = SpikeState()
    for _ in range(30):
        noisy = level * math.exp(dice.gauss(0, 0.01))
        state, _ = spike.observe(state, noisy, math.exp(dice.gauss(0, 0.1)), config)
    limits = spike.limits(state, config)
    hot = [spike.observe(state, loss, 1.0, config)[1].hot for loss in around(limits.loss)]
    assert hot == [False, False, True]
    joint = limits.loss_with_norm
    hot = [spike.observe(state, loss, 1e3, config)[1].hot for loss in around(joint)]
    assert hot == [False, False, True]
    over = math.nextafter(joint, UP)
    at = around(limits.norm_with_loss)
    assert [spike.observe(state, over, norm, config)[1].hot for norm in at] == [False, False, True]


def test_a_boundary_is_found_from_a_bad_guess() -> None:
    for guess in (-1e9, 0.0, 0.3, 1e12):
        assert last_below(lambda x: x > 0.3, guess) == 0.3
    assert last_below(lambda x: False, 1.0) == LARGEST
    assert last_below(lambda x: True, 1.0) == -LARGEST


def test_lone_outliers_that_recur_move_the_limit() -> None:
    config = SpikeConfig(window=12, warmup=8, recur_count=2, recur_window=200)
    dice, state = random.Random(3), SpikeState()
    for t in range(80):
        loss = 2.0 * math.exp(dice.gauss(0, 0.005)) * (1.5 if t > 20 and t % 14 == 0 else 1.0)
        state, _ = spike.observe(state, loss, None, config)
    while state.hot or state.clean < 6:
        state, _ = spike.observe(state, 2.0, None, config)
    assert len(state.lone) >= 2
    limit = spike.limits(state, config).loss
    assert limit > spike.limits(replace(state, lone=()), config).loss * 1.2
    hot = [spike.observe(state, loss, None, config)[1].hot for loss in around(limit)]
    assert hot == [False, False, True]


def test_the_kinds_of_faults_are_reached() -> None:
    seen = [
        run(SMALL, 120, faults=[fault], seed=5)
        for fault in (BigGradient(70, 1, 30.0), Garbage(70, 1, 3.0))
    ]
    assert all(c.late > 60 and c.compared > 500 for c in seen)

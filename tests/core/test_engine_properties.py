"""The engine under anything: arbitrary measurements, arbitrary outcomes, closed loops with faults.

The oracles here are bookkeeping of the tests' own: they count actions from the outside and never
look into the ledger, except where the property is about the ledger itself.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel.core import advice, engine
from sentinel.core.events import (
    AutomationSet,
    Event,
    Restored,
    RestoreFailed,
    SnapshotLost,
    SnapshotTaken,
)
from sentinel.core.policy import CanaryMode, Policy
from sentinel.core.state import State, Stats
from sentinel.core.types import (
    LAYER_ACTIVATION_RMS,
    LAYER_ACTIVATION_SPREAD,
    LAYER_ATTENTION_MAX_LOGIT,
    LAYER_BLOCK,
    LAYER_GRAD_NORM,
    LAYER_ROLE,
    LAYER_UPDATE_RATIO,
    LAYER_WEIGHT_NORM,
    NO_COLUMNS,
    NO_SCALARS,
    Action,
    CanaryAnswer,
    Command,
    CommandKind,
    Decision,
    Mode,
    Observation,
    Outcome,
)
from sentinel.wire import codec
from tests.support.simulated import (
    BigGradient,
    Blind,
    Damage,
    Fault,
    Garbage,
    LearningRate,
    NanGradient,
    NanLoss,
    Shift,
    SimulatedTrainer,
    Step,
    ten_faults,
)

# Windows are small, so that short runs reach every rung.
SMALL = Policy.parse(
    """
    [spike]
    window = 12
    warmup = 8
    accept_after = 24
    [level_shift]
    width = 8
    every = 2
    look = 64
    [grad_norm]
    window = 12
    warmup = 8
    [rules.loss_spike]
    cooldown = 6
    [rollback]
    budget = 3
    window = 120
    quiet = 6
    relapse = 60
    [skip]
    in_a_row = 6
    in_window = 14
    window = 60
    data = 6
    [lr]
    hold = 4
    rewarm = 6
    again_hold = 6
    again_rewarm = 10
    [canary]
    age = 3
    [snapshots]
    ram_every = 10
    confirm = 5
    keep = 2
    older_by = 40
    """,
    "small",
)
NO_CANARY = replace(SMALL, canary=replace(SMALL.canary, mode=CanaryMode.OFF))
POLICIES = {
    "small": SMALL,
    "no canary": NO_CANARY,
    "observe": replace(SMALL, mode=Mode.OBSERVE),
    "halting": replace(SMALL, rollback=replace(SMALL.rollback, halt_when_spent=True)),
    "default": Policy(),
}
LAYERED = (
    LAYER_ACTIVATION_RMS,
    LAYER_ACTIVATION_SPREAD,
    LAYER_BLOCK,
    LAYER_GRAD_NORM,
    LAYER_ROLE,
    LAYER_WEIGHT_NORM,
)
ODD = (math.nan, math.inf, -math.inf, 0.0, -0.0, -3.0, 5e-324, 1e308, 1e-30, None)

faults = st.lists(
    st.one_of(
        st.builds(NanGradient, st.integers(0, 250), st.integers(1, 12)),
        st.builds(BigGradient, st.integers(0, 250), st.floats(2, 100), st.integers(1, 40)),
        st.builds(Garbage, st.integers(0, 250), st.integers(1, 40), st.floats(0.2, 8)),
        st.builds(Damage, st.integers(0, 250), st.floats(0.1, 6)),
        st.builds(LearningRate, st.integers(0, 250), st.integers(1, 30)),
        st.builds(NanLoss, st.integers(0, 250), st.integers(1, 12)),
        st.builds(Shift, st.integers(0, 250), st.floats(0.2, 4)),
        st.builds(Blind, st.integers(0, 250), st.integers(1, 10)),
    ),
    max_size=6,
)
policies = st.sampled_from(sorted(POLICIES))


def loop(
    faults_: list[Fault], seed: int, policy: Policy, *, steps: int = 280, **more: object
) -> SimulatedTrainer:
    trainer = SimulatedTrainer(seed=seed, faults=faults_, policy=policy, **more)  # type: ignore[arg-type]
    trainer.run(steps)
    return trainer


# ---- anything at all -----------------------------------------------------------------------------


def strange_observation(rng: random.Random, step: int, sane: float) -> Observation:
    def number(usual: float) -> float | None:
        if rng.random() < sane:
            return usual * math.exp(rng.gauss(0, 0.05))
        return rng.choice([*ODD, usual * rng.choice([0.1, 3.0, 30.0, 1e6])])

    columns = NO_COLUMNS
    if rng.random() < 0.3:
        columns = {
            LAYER_ATTENTION_MAX_LOGIT: np.array(
                [rng.choice([1.0, 80.0, math.nan, math.inf]) for _ in range(3)], np.float32
            ),
            LAYER_UPDATE_RATIO: np.array(
                [rng.choice([1e-3, 0.0, 1.0, math.nan, -1.0]) for _ in range(3)], np.float32
            ),
            **{
                name: np.array(
                    [rng.choice([1.0, 1.1, 0.9, 0.0, 1e9, math.nan, math.inf]) for _ in range(3)],
                    np.float32,
                )
                for name in LAYERED
                if rng.random() < 0.8
            },
        }
    scalars = NO_SCALARS
    if rng.random() < 0.5:
        scalars = {
            name: value
            for name in advice.SCALARS
            if (value := number(rng.choice([0.1, 0.9, 1e5]))) is not None
        }
    commands = []
    while rng.random() < 0.05:
        kind = rng.choice(list(CommandKind))
        target = rng.choice([None, 0, 10, 10**9, -1])
        commands.append(
            Command(f"c{rng.randrange(30)}", kind, rng.choice([0.1, 1.0, 5.0]), target, "p")
        )
    canary = None
    if rng.random() < 0.2:
        canary = CanaryAnswer(0, rng.choice([2.0, 0.0, math.nan, -1.0]), rng.choice([2.0, 9.0]))
    return Observation(
        step,
        loss=number(2.0),
        grad_norm=number(1.0),
        lr=number(1e-3),
        loss_scale=number(65536.0),
        params_finite=rng.choice([None, None, True, True, True, False]),
        shape=rng.choice([(), (1, 8), (1, 8), (2, 8)]),
        canary=canary,
        commands=tuple(commands),
        blind=rng.random() < 0.03,
        columns=columns,
        scalars=scalars,
    )


def strange_events(rng: random.Random, state: State, stats: list[Stats]) -> Iterator[Event]:
    step = state.step
    known = [s.step for s in state.ledger.snapshots] or [0]
    target = rng.choice([*known, rng.randrange(step + 5)])
    if rng.random() < 0.2:
        yield SnapshotTaken(step)
    if rng.random() < 0.05:
        yield Restored(step, target, rng.choice(stats))
    if rng.random() < 0.03:
        yield RestoreFailed(step, rng.choice([None, target]), "no")
    if rng.random() < 0.03:
        yield SnapshotLost(step, target, "gone")
    if rng.random() < 0.03:
        yield AutomationSet(step, rng.random() < 0.3, "p")


def well_formed(decision: Decision, state: State, observation: Observation) -> None:
    assert decision.step == observation.step == state.step
    assert isinstance(decision.action, Action)
    assert isinstance(decision.would, Action)
    assert decision.action <= decision.would
    assert (decision.rule == "") == (decision.would is Action.PROCEED)
    assert (decision.reason == "") == (decision.rule == "")
    assert math.isfinite(decision.lr_factor)
    assert decision.lr_factor > 0
    if decision.would is Action.ROLLBACK:
        healthy = [s.step for s in state.ledger.snapshots if s.healthy]
        assert decision.target in healthy
    else:
        assert decision.target is None
    if decision.action is not Action.PROCEED:
        assert not decision.keep_batch
        assert not decision.take_snapshot


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), policies, st.sampled_from([0.0, 0.6, 0.95]))
def test_nothing_that_is_measured_or_done_makes_it_raise_or_answer_nonsense(
    seed: int, name: str, sane: float
) -> None:
    rng, policy = random.Random(seed), POLICIES[name]
    state, stats = engine.initial(), [Stats()]
    for step in range(80):
        for event in strange_events(rng, state, stats):
            state = engine.note(state, event, policy)
        observation = strange_observation(rng, step, sane)
        assert isinstance(engine.wants_canary(state, observation, policy), bool)
        decision = engine.decide(state, observation, policy)
        well_formed(decision, state, observation)
        executed = rng.choice([decision.action, decision.action, rng.choice(list(Action))])
        outcome = Outcome(step, executed, executed is Action.PROCEED and rng.random() < 0.95)
        after = engine.apply(state, observation, decision, outcome, policy)
        assert after.step == step + 1
        # The state is a plain value: it survives its bytes, and so do the decision's own.
        data = codec.encode_state(after)
        assert codec.encode_state(codec.decode_state(data)) == data
        assert len(data) < 200_000
        # Whoever decided: without the memo the same state comes out.
        received = codec.decode_decision(codec.encode_decision(decision))
        assert received.memo is None
        again = engine.apply(state, observation, received, outcome, policy)
        assert codec.encode_state(again) == data
        state = after
        stats.append(state.stats)


# ---- closed loops --------------------------------------------------------------------------------


def rollbacks(steps: list[Step]) -> list[Step]:
    return [s for s in steps if s.decision.action is Action.ROLLBACK]


@settings(max_examples=20, deadline=None)
@given(faults, st.integers(0, 1000), st.sampled_from(["small", "no canary", "halting"]))
def test_the_ladder_keeps_its_cooldown_and_budget(
    faults_: list[Fault], seed: int, name: str
) -> None:
    policy = POLICIES[name]
    trainer = loop(faults_, seed, policy)
    for step in trainer.steps:
        well_formed(step.decision, step.before, step.observation)
    back = [
        (s.observation.step, s.decision.rule, s.decision.target) for s in rollbacks(trainer.steps)
    ]
    for (earlier, _, old), (later, rule, new) in itertools.pairwise(back):
        cooldown = getattr(policy.rules, rule).cooldown
        assert later - earlier > cooldown
        if later - earlier < policy.rollback.relapse:
            assert new is not None
            assert old is not None
            assert new < old  # a relapse takes a strictly older one
    at = [b[0] for b in back]
    for i, first in enumerate(at):
        assert (
            sum(1 for s in at[i:] if s < first + policy.rollback.window) <= policy.rollback.budget
        )


@settings(max_examples=20, deadline=None)
@given(faults, st.integers(0, 1000), st.sampled_from(["small", "no canary"]), st.booleans())
def test_skips_in_a_row_are_bounded_unless_the_step_would_write_nan(
    faults_: list[Fault], seed: int, name: str, restores: bool
) -> None:
    policy = POLICIES[name]
    trainer = loop(faults_, seed, policy, restores=restores)
    run = 0
    for s in trainer.steps:
        finite = all(
            v is not None and math.isfinite(v)
            for v in (s.observation.loss, s.observation.grad_norm)
        )
        run = run + 1 if s.decision.action is Action.SKIP_STEP and finite else 0
        assert run <= policy.skip.in_a_row


@settings(max_examples=20, deadline=None)
@given(faults, st.integers(0, 1000), st.sampled_from(["small", "no canary"]))
def test_a_restored_state_has_the_statistics_of_the_snapshot(
    faults_: list[Fault], seed: int, name: str
) -> None:
    trainer = loop(faults_, seed, POLICIES[name])
    taken: dict[int, Stats] = {0: Stats()}
    for earlier, later in itertools.pairwise(trainer.steps):
        for event in later.events:
            if isinstance(event, SnapshotTaken):
                taken[event.step] = earlier.after.stats
            elif isinstance(event, Restored):
                stats = later.before.stats
                assert stats.spike == taken[event.target].spike
                assert stats.shift == taken[event.target].shift
                assert earlier.decision.target == event.target
                assert later.before.ledger.attempt == earlier.after.ledger.attempt + 1
                assert later.before.ledger.counters.steps == earlier.after.ledger.counters.steps


@settings(max_examples=15, deadline=None)
@given(faults, st.integers(0, 1000), policies, st.integers(1, 40))
def test_a_run_resumed_from_its_bytes_goes_on_as_if_nothing_had_happened(
    faults_: list[Fault], seed: int, name: str, every: int
) -> None:
    policy = POLICIES[name]
    whole = loop(faults_, seed, policy, steps=200, layers=3)
    state = whole.steps[0].before
    for s in whole.steps:
        for event in s.events:
            if s is not whole.steps[0]:
                state = engine.note(state, codec.decode_event(codec.encode_event(event)), policy)
        if s.observation.step % every == 0:
            state = codec.decode_state(codec.encode_state(state))
        observation = codec.decode_observation(codec.encode_observation(s.observation))
        decision = engine.decide(state, observation, policy)
        assert codec.encode_decision(decision) == codec.encode_decision(s.decision)
        state = engine.apply(state, observation, decision, s.outcome, policy)
        assert codec.encode_state(state) == codec.encode_state(s.after)


@settings(max_examples=15, deadline=None)
@given(faults, st.integers(0, 1000))
def test_observing_never_touches_the_run(faults_: list[Fault], seed: int) -> None:
    trainer = loop(faults_, seed, POLICIES["observe"])
    free = loop(faults_, seed, POLICIES["observe"], decider=proceed)
    assert all(s.decision.action is Action.PROCEED for s in trainer.steps)
    assert all(s.decision.lr_factor == 1.0 for s in trainer.steps)
    # repr: nan equals nan
    assert [repr(s.weights) for s in trainer.steps] == [repr(s.weights) for s in free.steps]


def proceed(state: State, observation: Observation, policy: Policy) -> Decision:
    decision = engine.decide(state, observation, policy)
    return replace(
        decision, action=Action.PROCEED, rule="", would=Action.PROCEED, target=None, memo=None
    )


def test_observing_would_do_first_what_acting_does_first() -> None:
    for seed in range(5):
        acting = loop([Damage(120, 2.0)], seed, SMALL)
        watching = loop([Damage(120, 2.0)], seed, POLICIES["observe"])
        first = next(s for s in acting.steps if s.decision.action is Action.ROLLBACK)
        would = next(s for s in watching.steps if s.decision.would is Action.ROLLBACK)
        assert first.decision.rule == would.decision.rule
        assert first.observation.step == would.observation.step


@settings(max_examples=15, deadline=None)
@given(faults, st.integers(0, 1000), st.sampled_from(["small", "no canary"]))
def test_the_learning_rate_is_cut_only_after_rollbacks_and_comes_back(
    faults_: list[Fault], seed: int, name: str
) -> None:
    policy = POLICIES[name]
    trainer = loop(faults_, seed, policy)
    troubled = False
    for s in trainer.steps:
        factor = s.decision.lr_factor
        assert policy.lr.floor <= factor <= 1.0
        if not troubled:
            assert factor == 1.0
        troubled = (
            troubled
            or s.decision.action is Action.ROLLBACK
            or any(f.key == "no_snapshot" for f in s.decision.findings)
        )
    trainer.faults = []
    longest = policy.lr.again_hold + policy.lr.again_rewarm
    if not trainer.weights.nan and not trainer.state.ledger.stopped:
        trainer.run(3 * longest + policy.rollback.window)
        assert trainer.steps[-1].decision.lr_factor == 1.0


@pytest.mark.parametrize("seed", range(6))
def test_a_healthy_run_is_left_alone(seed: int) -> None:
    trainer = loop([], seed, Policy(), steps=1500, keep_steps=True)
    acted = [s for s in trainer.steps if s.decision.action is not Action.PROCEED]
    assert len(acted) <= 5  # one lone outlier in 300 is the stated price
    assert not rollbacks(trainer.steps)


@pytest.mark.parametrize("seed", range(6))
def test_every_one_of_ten_faults_is_survived(seed: int) -> None:
    policy = Policy()
    protected = loop(ten_faults(), seed, policy, steps=2000)
    assert not protected.weights.nan
    assert protected.weights.damage < 0.2
    exposed = loop(ten_faults(), seed, policy, steps=2000, decider=proceed)
    assert exposed.weights.nan


@pytest.mark.parametrize("seed", range(4))
def test_garbage_is_blamed_on_the_data_and_damage_on_the_weights(seed: int) -> None:
    policy = Policy()
    garbage = loop([Garbage(500, 20)], seed, policy, steps=700)
    assert not rollbacks(garbage.steps)
    assert garbage.weights.damage == 0.0
    damage = loop([Damage(500, 1.5)], seed, policy, steps=700)
    assert [s.observation.step for s in rollbacks(damage.steps)] == [503]
    assert damage.weights.damage == 0.0


@pytest.mark.parametrize("seed", range(4))
def test_garbage_without_a_canary_takes_one_rollback_at_most(seed: int) -> None:
    policy = replace(Policy(), canary=replace(Policy().canary, mode=CanaryMode.OFF))
    trainer = loop([Garbage(500, 20)], seed, policy, steps=800)
    assert len(rollbacks(trainer.steps)) == 1
    assert trainer.weights.damage == 0.0


@pytest.mark.parametrize("seed", range(4))
def test_a_lawful_change_of_the_data_is_let_through_and_never_rolled_back(seed: int) -> None:
    trainer = loop([Shift(500, 1.0)], seed, Policy(), steps=900)
    assert not rollbacks(trainer.steps)
    skipped = [s for s in trainer.steps if s.decision.action is Action.SKIP_STEP]
    after = [s for s in skipped if s.observation.step >= 500]
    assert 0 < len(after) <= Policy().skip.data + 5
    assert any(s.decision.drop_canaries for s in trainer.steps)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("halting", [False, True])
def test_a_cause_that_persists_spends_the_budget_and_then_acting_stops(
    seed: int, halting: bool
) -> None:
    rungs = replace(SMALL.rollback, relapse=0, budget=2, window=400, halt_when_spent=halting)
    faults_: list[Fault] = [Damage(100 + 30 * i, 3.0) for i in range(8)]
    trainer = loop(faults_, seed, replace(SMALL, rollback=rungs), steps=360)
    assert len(rollbacks(trainer.steps)) == 2
    spent = [s for s in trainer.steps if any(f.key == "budget_spent" for f in s.decision.findings)]
    assert spent
    assert trainer.halted == halting
    after = [s for s in trainer.steps if s.observation.step > spent[0].observation.step]
    rules = {s.decision.rule for s in after}
    assert rules <= {"", "grad_norm", "nonfinite_grad", "nonfinite_loss", "nonfinite_params"}
    assert spent[0].after.ledger.stopped or halting

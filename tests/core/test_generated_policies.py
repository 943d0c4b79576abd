"""Any policy that is accepted, over any faults: what holds whatever the settings are.

The bookkeeping is the test's own: it sees decisions only, and the policy as plain numbers.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel.core import advice, engine
from sentinel.core.errors import ConfigError
from sentinel.core.policy import Policy
from sentinel.core.types import Action
from sentinel.wire import codec
from tests.core.test_engine_properties import faults, well_formed
from tests.support.simulated import Fault, SimulatedTrainer, Step

STEPS = 160
LADDER = ("nonfinite_params", "nonfinite_loss", "loss_spike", "skip_bound")
SKIPS = ("nonfinite_grad", "grad_norm", "loss_outlier")
FLAGS = ("level_shift", "attention_logit", "update_ratio", "norm_band", *advice.FLAGS)


def rule() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {},
        optional={
            "mode": st.sampled_from(["act", "act", "act", "observe", "off"]),
            "for": st.integers(1, 5),
            "cooldown": st.integers(0, 30),
            "budget": st.integers(0, 3),
            "budget_window": st.integers(1, 80),
        },
    )


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    window, norms = draw(st.integers(4, 16)), draw(st.integers(2, 16))
    skips = draw(st.integers(1, 60))
    return Policy.from_dict(
        {
            "name": "drawn",
            "mode": draw(st.sampled_from(["act", "act", "act", "observe"])),
            "rules": draw(st.fixed_dictionaries({name: rule() for name in LADDER + SKIPS + FLAGS})),
            "spike": {
                "window": window,
                "warmup": draw(st.integers(4, window)),
                "rearm": draw(st.integers(1, 6)),
                "accept_after": draw(st.integers(1, 40)),
            },
            "level_shift": {
                "width": draw(st.integers(2, 12)),
                "every": draw(st.integers(1, 6)),
                "away_rise": draw(st.sampled_from([0.0, 0.1, 0.5])),
            },
            "grad_norm": {
                "window": norms,
                "warmup": draw(st.integers(2, norms)),
                "factor": draw(st.floats(1.5, 20)),
            },
            "skip": {
                "in_a_row": draw(st.integers(1, 10)),
                "window": skips,
                "in_window": draw(st.integers(1, skips)),
                "data": draw(st.integers(1, 10)),
            },
            "rollback": {
                "budget": draw(st.integers(0, 4)),
                "window": draw(st.integers(1, 200)),
                "quiet": draw(st.integers(0, 20)),
                "relapse": draw(st.integers(0, 100)),
                "cool": draw(st.integers(1, 4)),
                "halt_when_spent": draw(st.booleans()),
            },
            "lr": {
                "cut": draw(st.floats(0.001, 1.0)),
                "floor": draw(st.floats(0.0, 1.0)),
                "hold": draw(st.integers(0, 20)),
                "rewarm": draw(st.integers(0, 20)),
            },
            "canary": {
                "mode": draw(st.sampled_from(["on", "off"])),
                "age": draw(st.integers(1, 12)),
                "margin": draw(st.floats(0.0, 1.0)),
            },
            "snapshots": {
                "ram_every": draw(st.integers(1, 30)),
                "confirm": draw(st.integers(1, 20)),
                "keep": draw(st.integers(1, 3)),
                "older_by": draw(st.integers(1, 60)),
            },
        }
    )


def simulate(
    policy: Policy, faults_: list[Fault], seed: int, canary: bool, restores: bool
) -> list[Step]:
    trainer = SimulatedTrainer(
        seed=seed, faults=faults_, policy=policy, canary=canary, restores=restores
    )
    return trainer.run(STEPS)


def most_within(at: list[int], window: int) -> int:
    return max(
        (sum(1 for s in at[i:] if s < first + window) for i, first in enumerate(at)), default=0
    )


@settings(max_examples=40, deadline=None)
@given(policies(), faults, st.integers(0, 1000), st.booleans(), st.booleans())
def test_one_action_a_step_none_in_cooldown_none_beyond_its_budget(
    policy: Policy, faults_: list[Fault], seed: int, canary: bool, restores: bool
) -> None:
    steps = simulate(policy, faults_, seed, canary, restores)
    assert [s.observation.step for s in steps] == list(range(len(steps)))
    assert len(steps) == STEPS or steps[-1].decision.action is Action.HALT
    for s in steps:
        well_formed(s.decision, s.before, s.observation)
        assert s.decision.lr_factor <= 1.0
    done = [(s.observation.step, s.decision.rule, s.decision.would) for s in steps]

    back = [(at, name) for at, name, would in done if would is Action.ROLLBACK]
    for (earlier, _), (later, name) in itertools.pairwise(back):
        assert later - earlier > getattr(policy.rules, name).cooldown
    assert most_within([at for at, _ in back], policy.rollback.window) <= policy.rollback.budget
    for name in LADDER:
        own = getattr(policy.rules, name)
        if own.budget:
            mine = [at for at, n in back if n == name]
            assert most_within(mine, own.budget_window) <= own.budget
    for name in SKIPS:
        own = getattr(policy.rules, name)
        mine = [at for at, n, would in done if n == name and would is Action.SKIP_STEP]
        assert all(later - earlier > own.cooldown for earlier, later in itertools.pairwise(mine))
        if own.budget:
            assert most_within(mine, own.budget_window) <= own.budget
    for name in LADDER + SKIPS:
        mode = str(getattr(policy.rules, name).mode)
        if mode == "off":
            assert name not in {rule for _, rule, _ in done}
        if mode == "observe" or str(policy.mode) == "observe":
            done_by_it = [s.decision.action for s in steps if s.decision.rule == name]
            assert set(done_by_it) <= {Action.PROCEED}


@settings(max_examples=25, deadline=None)
@given(policies(), faults, st.integers(0, 1000), st.lists(st.integers(0, STEPS), max_size=4))
def test_resuming_from_bytes_at_any_step_equals_running_through(
    policy: Policy, faults_: list[Fault], seed: int, at: list[int]
) -> None:
    whole = simulate(policy, faults_, seed, True, True)
    policy = codec.decode_policy(codec.encode_policy(policy))
    for start in {s for s in at if s < len(whole)} | {len(whole) // 2}:
        state = codec.decode_state(codec.encode_state(whole[start].before))
        for s in whole[start : start + 40]:
            if s is not whole[start]:
                for event in s.events:
                    state = engine.note(state, event, policy)
            decision = engine.decide(state, s.observation, policy)
            assert codec.encode_decision(decision) == codec.encode_decision(s.decision)
            state = engine.apply(state, s.observation, decision, s.outcome, policy)
            assert codec.encode_state(state) == codec.encode_state(s.after)


ANY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**8),
    st.floats(),
    st.text(max_size=5),
    st.builds(lambda: [1, 2]),
    st.builds(lambda: {"a": 1}),
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_policy_of_any_values_is_refused_by_its_field_or_comes_back_equal(
    data: st.DataObject,
) -> None:
    table = Policy().to_dict()
    for _ in range(data.draw(st.integers(1, 3))):
        inner = table
        path = [data.draw(st.sampled_from(sorted(inner)))]
        while isinstance(inner[path[-1]], dict) and data.draw(st.booleans()):
            inner = inner[path[-1]]
            path.append(data.draw(st.sampled_from(sorted(inner))))
        inner[path[-1]] = data.draw(ANY)
    refusal, policy = "", None
    try:
        policy = Policy.from_dict(table)
    except ConfigError as error:
        refusal = str(error)
    if policy is None:
        field, _, rest = refusal.partition(" ")
        assert field.split(".")[0].split("[")[0] in {*Policy().to_dict(), "policy"}, refusal
        assert "must" in rest or "is not a setting" in rest
    else:
        assert Policy.from_dict(policy.to_dict()) == policy
        assert math.isfinite(policy.canary.margin)

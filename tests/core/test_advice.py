"""Flags through the engine: each on a run that has the illness, none on its healthy twin.

A run is 620 steps of a loss that falls with noise, norms that scatter, 24 blocks of two layers and
every scalar that a trainer measures; an illness changes some of it. What is judged is what the
engine found and noted, not a detector's reading.

`python -m pytest tests/core/test_advice.py -k table -s` prints the confusion table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sentinel.core import advice, engine, incidents
from sentinel.core.events import Restored, SnapshotTaken
from sentinel.core.incidents import INSTABILITY
from sentinel.core.policy import Policy
from sentinel.core.state import State, Stats
from sentinel.core.types import (
    LAYER_ACTIVATION_RMS,
    LAYER_ACTIVATION_SPREAD,
    LAYER_BLOCK,
    LAYER_GRAD_NORM,
    LAYER_ROLE,
    LAYER_WEIGHT_NORM,
    NOT_MEASURED,
    Action,
    Decision,
    Mode,
    Observation,
    Outcome,
    Severity,
)
from sentinel.wire import codec

STEPS, BLOCKS, L = 620, 24, 48
ALL_ON = Policy.parse("""
[rules]
loss_swing = { mode = "act" }
loss_plateau = { mode = "act" }
[loss_shape]
length = 16
""")
FLAGS = {*advice.FLAGS}

Seen = dict[str, Any]
Illness = Callable[[int, Seen, np.random.Generator], None]


def healthy(t: int, rng: np.random.Generator) -> Seen:
    """What is measured of a run that is well."""
    seen: Seen = {
        "loss": (2.0 + 5.0 * (1 + t / 30) ** -0.5) * math.exp(0.02 * rng.normal()),
        "grad_norm": 2.0 * math.exp(0.2 * rng.normal()),
        "loss_scale": 65536.0 / 2 ** min(t // 8, 5),  # it finds its level
        "scalars": {
            "tokens_per_second": 1e5 * math.exp(0.05 * rng.normal()),
            "memory_headroom": 0.3,
            "clipped_step_ratio": 0.97,
            "clip_factor_mean": 0.95,
            "residual_mixing_forward": 1.6,
            "residual_mixing_backward": 1.5,
        },
    }
    drift = math.exp(0.2 * t / STEPS)  # all layers grow slowly, as they do
    norms = drift * np.tile([1.0, 0.01], BLOCKS) * np.exp(0.2 * rng.normal(size=L))
    rms = np.full(L, NOT_MEASURED)
    rms[1::2] = drift * 1.03 ** np.arange(BLOCKS) * np.exp(0.05 * rng.normal(size=BLOCKS))
    columns = {LAYER_GRAD_NORM: norms, LAYER_ACTIVATION_RMS: rms}
    if t % 10 == 0:
        columns[LAYER_WEIGHT_NORM] = 5.0 + 0.01 * t + np.zeros(L)
        spread = np.full(L, NOT_MEASURED)
        spread[1::2] = rng.uniform(0.3, 1.0, size=BLOCKS)
        columns[LAYER_ACTIVATION_SPREAD] = spread
    seen["columns"] = columns
    return seen


def norm_trend(t: int, seen: Seen, rng: np.random.Generator) -> None:
    seen["grad_norm"] *= 6.0 ** (t / 400)


def rising_together(t: int, seen: Seen, rng: np.random.Generator) -> None:
    k = max(t - 480, 0)
    seen["loss"] *= 1 + 0.015 * k
    seen["grad_norm"] *= 1 + 0.15 * k


def stale_grads(t: int, seen: Seen, rng: np.random.Generator) -> None:
    seen["grad_norm"] = 1.5 * (t + 1) * math.exp(0.005 * rng.normal())


def loss_swing(t: int, seen: Seen, rng: np.random.Generator) -> None:
    seen["loss"] *= math.exp(0.1 * rng.normal())


def loss_period(t: int, seen: Seen, rng: np.random.Generator) -> None:
    seen["loss"] *= 1.0 + 0.12 * (t % 7 == 3)


def loss_plateau(t: int, seen: Seen, rng: np.random.Generator) -> None:
    seen["loss"] = 3.0 * math.exp(0.01 * rng.normal())


def loss_scale(t: int, seen: Seen, rng: np.random.Generator) -> None:
    seen["loss_scale"] = 2048.0 / 2 ** max((t - 300) // 8, 0)


def clip_pressure(t: int, seen: Seen, rng: np.random.Generator) -> None:
    seen["scalars"]["clip_factor_mean"] = 0.6


def headroom(t: int, seen: Seen, rng: np.random.Generator) -> None:
    seen["scalars"]["memory_headroom"] = 0.1


def throughput(t: int, seen: Seen, rng: np.random.Generator) -> None:
    seen["scalars"]["tokens_per_second"] *= 0.7 if t > 400 else 1.0


def layer_band(t: int, seen: Seen, rng: np.random.Generator) -> None:
    if t >= 300:
        seen["columns"][LAYER_ACTIVATION_RMS][21::2] *= 10.0


def layer_outlier(t: int, seen: Seen, rng: np.random.Generator) -> None:
    seen["columns"][LAYER_GRAD_NORM][14] *= 1e-3


def depth(t: int, seen: Seen, rng: np.random.Generator) -> None:
    seen["columns"][LAYER_GRAD_NORM] *= 1.3 ** (np.arange(L) // 2)


def residual_gain(t: int, seen: Seen, rng: np.random.Generator) -> None:
    seen["columns"][LAYER_ACTIVATION_RMS][21::2] *= 200.0  # from the start: its own band is there


def residual_mixing(t: int, seen: Seen, rng: np.random.Generator) -> None:
    seen["scalars"]["residual_mixing_backward"] = 3000.0


def collapse(t: int, seen: Seen, rng: np.random.Generator) -> None:
    if LAYER_ACTIVATION_SPREAD in seen["columns"]:
        seen["columns"][LAYER_ACTIVATION_SPREAD][31] = 0.001


ILL: dict[str, Illness] = {
    f.__name__: f
    for f in (
        norm_trend,
        rising_together,
        stale_grads,
        loss_swing,
        loss_period,
        loss_plateau,
        loss_scale,
        clip_pressure,
        headroom,
        throughput,
        layer_band,
        layer_outlier,
        depth,
        residual_gain,
        residual_mixing,
        collapse,
    )
}


def observation(t: int, seen: Seen, state: State) -> Observation:
    columns = {name: np.asarray(c, np.float32) for name, c in seen.pop("columns").items()}
    if columns and advice.wants_layers(state.stats.advice):
        columns.setdefault(LAYER_BLOCK, (np.arange(L) // 2).astype(np.float32))
        columns[LAYER_ROLE] = (np.arange(L) % 2).astype(np.float32)
    return Observation(t, columns=columns, **seen)


def carry(state: State, seen: Observation, policy: Policy) -> tuple[State, Decision]:
    decision = engine.decide(state, seen, policy)
    outcome = Outcome(seen.step, decision.action, decision.action is Action.PROCEED)
    return engine.apply(state, seen, decision, outcome, policy), decision


def trained(
    illness: Illness | None, seed: int, policy: Policy = ALL_ON, steps: int = STEPS
) -> tuple[State, list[Decision]]:
    """The run to its end, observing: the flags are asked, not the actions."""
    policy, rng = policy.with_mode("observe"), np.random.default_rng(seed)
    state, decisions = engine.initial(), []
    for t in range(steps):
        seen = healthy(t, rng)
        if illness is not None:
            illness(t, seen, rng)
        state, decision = carry(state, observation(t, seen, state), policy)
        decisions.append(decision)
    return state, decisions


def flags(state: State) -> dict[str, int]:
    return {k: n for k, n in state.ledger.counters.flags if k in FLAGS}


# ---------------------------------------------------------------- one run each


def test_there_is_an_illness_for_every_flag() -> None:
    assert set(ILL) == FLAGS
    assert set(advice.ADVICE) == FLAGS


@pytest.mark.parametrize("name", ILL)
def test_the_ill_run_is_flagged_with_advice_and_nothing_is_done_about_it(name: str) -> None:
    state, decisions = trained(ILL[name], seed=1)
    assert flags(state).get(name, 0) >= 1, flags(state)
    findings = [f for d in decisions for f in d.findings if f.key == name]
    assert advice.ADVICE[name] in findings[0].summary
    assert findings[0].severity is getattr(ALL_ON.rules, name).severity
    assert not any(d.rule == name for d in decisions)
    incident = next(i for i in state.ledger.incidents if i.key == name)
    assert incident.fired is not None
    assert incident.actions == ()


def test_the_healthy_twin_is_not_flagged_at_all() -> None:
    for seed in range(4):
        assert flags(trained(None, seed)[0]) == {}


@pytest.mark.slow
def test_the_confusion_table() -> None:
    runs = {"healthy": None, **ILL}
    rows = {}
    for name, illness in runs.items():
        counts = dict.fromkeys(ILL, 0)
        for seed in range(100, 104):
            for flag in flags(trained(illness, seed)[0]):
                counts[flag] += 1
        rows[name] = counts
    print("\nruns of 4 in which a flag (column) was raised; an illness a row")
    print(f"{'':16}" + "".join(f"{i:>4}" for i in range(1, len(ILL) + 1)))
    for name, counts in rows.items():
        number = f"{list(ILL).index(name) + 1:>3} " if name in ILL else "    "
        print(f"{number}{name:16}" + "".join(f"{n or '.':>4}" for n in counts.values()))
    assert all(rows[name][name] >= 3 for name in ILL), rows
    assert sum(rows["healthy"].values()) == 0, rows["healthy"]
    elsewhere = sum(n for row, c in rows.items() for flag, n in c.items() if flag != row)
    assert elsewhere <= 20, rows


def test_flags_that_are_off_by_default_stay_silent_and_the_others_speak() -> None:
    default = Policy()
    off = {name for name in ILL if getattr(default.rules, name).mode is Mode.OFF}
    assert off == {"loss_swing", "loss_plateau"}
    for name in off:
        assert name not in flags(trained(ILL[name], 1, default)[0])
    silent = Policy.from_dict({"rules": {name: {"mode": "off"} for name in ILL}})
    for name in ("depth", "layer_band", "norm_trend"):
        state, _ = trained(ILL[name], 1, silent)
        assert flags(state) == {}
        assert state.ledger.incidents == () or all(
            i.key not in FLAGS for i in state.ledger.incidents
        )


def test_one_layer_is_not_flagged_twice_within_the_cooldown_and_the_incident_ends() -> None:
    state, decisions = trained(headroom, 1)
    at = [d.step for d in decisions for f in d.findings if f.key == "headroom"]
    assert at[0] == 2 * advice.LOOK - 1  # `for` is 32 steps: two looks
    assert at[1] - at[0] >= 500

    def cured(t: int, seen: Seen, rng: np.random.Generator) -> None:
        if t < 64:
            headroom(t, seen, rng)

    state, _ = trained(cured, 1)
    incident = next(i for i in state.ledger.incidents if i.key == "headroom")
    assert incident.resolved is not None


def test_a_condition_that_does_not_last_is_not_flagged() -> None:
    def for_a_moment(t: int, seen: Seen, rng: np.random.Generator) -> None:
        if t // 16 in (4, 6, 8):  # one look each, and well again in between
            headroom(t, seen, rng)

    state, _ = trained(for_a_moment, 1, steps=200)
    assert "headroom" not in flags(state)


def out_at(*steps: int) -> Illness:
    """All activations are NaN at these steps."""

    def ill(t: int, seen: Seen, rng: np.random.Generator) -> None:
        if t in steps:
            seen["columns"][LAYER_ACTIVATION_RMS][1::2] = math.nan

    return ill


def band(state: State) -> list[tuple[int, int | None]]:
    """Incidents of layers out of their band: opened and resolved."""
    return [(i.opened, i.resolved) for i in state.ledger.incidents if i.key == "layer_band"]


def test_layers_that_are_back_in_their_band_are_flagged_no_longer() -> None:
    end = advice.LINGERS + 1
    state, _ = trained(out_at(100), 1, steps=100 + end)
    assert band(state) == [(100, None)]
    state, _ = trained(out_at(100), 1, steps=101 + end)
    assert band(state) == [(100, 100 + end)]
    # Again, long before the cooldown is over: that is said too.
    state, _ = trained(out_at(100, 105, 140), 1, steps=150)
    assert band(state) == [(100, 105 + end), (140, None)]
    # Out for good: open until the level is taken for its own, and then no longer.
    state, _ = trained(layer_band, 1, steps=620)
    ((opened, resolved),) = band(state)
    patience = ALL_ON.layer_band.patience
    assert opened == 300
    assert resolved is not None
    assert 300 + patience <= resolved <= 300 + patience + 2 * end


def test_a_flag_of_the_time_before_a_rollback_ends_with_it() -> None:
    rng = np.random.default_rng(1)
    state, stats = engine.initial(), Stats()
    policy = ALL_ON.with_mode("observe")
    for t in range(110):
        if t == 96:
            stats = state.stats
        seen = healthy(t, rng)
        out_at(100)(t, seen, rng)
        state, _ = carry(state, observation(t, seen, state), policy)
    assert band(state) == [(100, None)]
    state = engine.note(state, SnapshotTaken(96), policy)
    state = engine.note(state, Restored(110, 96, stats), policy)
    state, _ = carry(state, observation(110, healthy(110, rng), state), policy)
    assert band(state) == [(100, 110)]


def test_layers_that_are_sampled_rarely_are_out_until_the_next_sample_says_otherwise() -> None:
    def rare(t: int, seen: Seen, rng: np.random.Generator) -> None:
        rms = seen["columns"][LAYER_ACTIVATION_RMS] * (50.0 if t == 200 else 1.0)
        there = t < 40 or t % 40 == 0
        seen["columns"] = {LAYER_ACTIVATION_RMS: rms} if there else {}

    state, _ = trained(rare, 1, steps=240)
    assert band(state) == [(200, None)]
    state, _ = trained(rare, 1, steps=270)
    ((_, resolved),) = band(state)
    assert resolved is not None
    assert resolved >= 240


# ---------------------------------------------------------------- who was first


def broken_layer(block: int, at: int, factor: float = 50.0) -> Illness:
    """From `at` on, a block's weights are `factor` times too large: it and all after it blow up."""

    def ill(t: int, seen: Seen, rng: np.random.Generator) -> None:
        columns = seen["columns"]
        if t < at:
            return
        columns[LAYER_ACTIVATION_RMS][2 * block + 1 :: 2] *= factor
        columns[LAYER_GRAD_NORM] *= factor  # the loss is far off: everywhere
        if LAYER_WEIGHT_NORM in columns:
            columns[LAYER_WEIGHT_NORM][2 * block] *= factor
        seen["loss"] *= 1.5

    return ill


def test_an_incident_names_the_layer_that_left_its_own_band_first() -> None:
    right = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        block, at = int(rng.integers(BLOCKS)), int(rng.integers(80, 240))
        state, _ = trained(broken_layer(block, at), seed, steps=at + 8)
        incident = incidents.find(state.ledger, INSTABILITY)
        assert incident is not None
        right += incident.layers[:1] in ((2 * block,), (2 * block + 1,))
    assert right >= 19


def test_the_weights_say_it_best_and_what_breaks_later_is_not_added() -> None:
    for at, first in ((400, 10), (402, 11)):  # weight norms are sampled at the former
        state, decisions = trained(broken_layer(5, at), 1, steps=at + 12)
        incident = incidents.find(state.ledger, INSTABILITY)
        assert incident is not None
        assert incident.layers == (first,)
        told = [f.layers[0] for d in decisions for f in d.findings if f.key == "layer_band"]
        assert told[0] == first
        assert 10 in told


def test_a_layer_that_was_out_long_ago_is_not_blamed() -> None:
    def early(t: int, seen: Seen, rng: np.random.Generator) -> None:
        if t == 100:
            seen["columns"][LAYER_ACTIVATION_RMS][7] *= 50.0
        if t >= 100 + advice.LINGERS + 1:
            seen["loss"] *= 1.5

    state, _ = trained(early, 1, steps=130)
    incident = incidents.find(state.ledger, INSTABILITY)
    assert incident is not None
    assert incident.layers == ()


# ---------------------------------------------------------------- no gradient at all


def silent(rows: list[int], since: int = 0, until: int = 10**6, value: float = 0.0) -> Illness:
    """These layers have a gradient of `value` for some steps."""

    def ill(t: int, seen: Seen, rng: np.random.Generator) -> None:
        if since <= t < until:
            seen["columns"][LAYER_GRAD_NORM][rows] = value

    return ill


def outliers(illness: Illness, steps: int) -> list[tuple[int, tuple[int, ...]]]:
    _, decisions = trained(illness, 1, steps=steps)
    return [(d.step, f.layers) for d in decisions for f in d.findings if f.key == "layer_outlier"]


def test_a_layer_that_has_no_gradient_for_long_is_named() -> None:
    assert outliers(silent([14]), 258) == [(256, (14,))], "dead from the start"
    assert outliers(silent([14], since=150), 514) == [(512, (14,))], "dies"
    assert outliers(silent([14, 31]), 258) == [(256, (31, 14))]
    _, decisions = trained(silent([14]), 1, steps=258)
    said = [f.summary for d in decisions for f in d.findings if f.key == "layer_outlier"]
    assert said[0].startswith("1 layer(s) have had no gradient for 256 steps: ")


def test_a_cut_path_is_named_from_the_cut_on_although_most_layers_are_below_it() -> None:
    below = list(range(34))
    ((step, layers),) = outliers(silent(below), 258)
    assert (step, layers[:3]) == (256, (33, 32, 31))


def test_no_gradient_for_a_while_or_in_a_part_that_is_not_in_use_says_nothing() -> None:
    assert outliers(silent([14], until=250), 620) == [], "an expert, an adapter: it comes"
    used = [0, 200, 400, 600]

    def rarely(t: int, seen: Seen, rng: np.random.Generator) -> None:
        if t not in used:
            seen["columns"][LAYER_GRAD_NORM][14] = 0.0

    assert outliers(rarely, 620) == []
    assert outliers(silent([14], value=NOT_MEASURED), 620) == [], "frozen"
    assert outliers(silent(list(range(L))), 620) == [], "all: the loss is another's business"
    assert outliers(silent(list(range(0, L, 2))), 620) == [], "a whole role: what it is in is off"
    # Most of a role, and what lies below them has gradients: heads of which few are in use.
    assert outliers(silent(list(range(12, L, 2))), 620) == []


def test_what_has_no_gradient_is_no_outlier_where_that_is_off_and_leaves_no_state() -> None:
    off = Policy.from_dict({"rules": {"layer_outlier": {"mode": "off"}}})
    state, _ = trained(silent([14]), 1, off, steps=300)
    assert flags(state) == {}
    assert state.stats.advice.layers is not None
    assert state.stats.advice.layers.silent == b""


# ---------------------------------------------------------------- what the trainer knows


def aged(age: Callable[[int], float]) -> Illness:
    """The norms pile up, or seem to, and the trainer says how old the gradients are."""

    def ill(t: int, seen: Seen, rng: np.random.Generator) -> None:
        stale_grads(t, seen, rng)
        seen["scalars"]["gradient_age"] = age(t)

    return ill


def test_norms_that_rise_are_not_stale_gradients_where_these_were_dropped() -> None:
    assert "stale_grads" in flags(trained(stale_grads, 1, steps=100)[0]), "nobody knows"
    assert "stale_grads" in flags(trained(aged(lambda t: t + 1.0), 1, steps=100)[0])
    assert "stale_grads" in flags(trained(aged(lambda t: math.nan), 1, steps=100)[0])
    for fresh in (lambda t: 1.0, lambda t: t % 20 + 1.0):
        assert "stale_grads" not in flags(trained(aged(fresh), 1, steps=200)[0])


def test_a_norm_that_grows_out_of_a_small_start_while_the_loss_falls_is_no_trend() -> None:
    def begins_small(t: int, seen: Seen, rng: np.random.Generator) -> None:
        norm_trend(t, seen, rng)
        seen["loss"] = 3.0 * 0.6 ** (t / 400) * math.exp(0.02 * rng.normal())

    def stops_falling(t: int, seen: Seen, rng: np.random.Generator) -> None:
        begins_small(t, seen, rng)
        if t > 200:
            seen["loss"] = 2.3 * math.exp(0.02 * rng.normal())

    assert "norm_trend" not in flags(trained(begins_small, 1, steps=420)[0])
    assert "norm_trend" in flags(trained(stops_falling, 1, steps=520)[0])


def test_blocks_of_a_single_layer_have_no_residual_path_and_a_dead_one_amplifies_nothing() -> None:
    def plain(t: int, seen: Seen, rng: np.random.Generator) -> None:
        residual_gain(t, seen, rng)
        if t == 0:
            seen["columns"][LAYER_BLOCK] = np.arange(L)  # as in an MLP

    def nearly_dead(t: int, seen: Seen, rng: np.random.Generator) -> None:
        seen["columns"][LAYER_ACTIVATION_RMS][21] /= 430.0

    assert "residual_gain" in flags(trained(residual_gain, 1, steps=140)[0])
    assert "residual_gain" not in flags(trained(plain, 1, steps=140)[0])
    assert "residual_gain" not in flags(trained(nearly_dead, 1, steps=140)[0])


# ---------------------------------------------------------------- the state


def test_the_state_is_small_bounded_and_survives_being_saved() -> None:
    empty = codec.encode_state(State())
    bare, _ = trained_scalars_only(40)
    assert len(codec.encode_stats(Stats())) < 500
    assert bare.stats.advice.layers is None
    sizes = []
    state, rng = engine.initial(), np.random.default_rng(3)
    for t in range(1700):
        before = state
        seen = observation(t, healthy(t, rng), state)
        state, _ = carry(state, seen, ALL_ON)
        if t % 97 == 0:
            again = codec.decode_state(codec.encode_state(before))
            assert again == before
            assert codec.state_hash(carry(again, seen, ALL_ON)[0]) == codec.state_hash(state)
        if t in (1000, 1600):
            sizes.append(len(codec.encode_stats(state.stats)))
    assert len(empty) < 1000
    assert sizes[1] <= sizes[0] * 1.1
    assert sizes[1] < 6500


def trained_scalars_only(steps: int) -> tuple[State, list[Decision]]:
    state, decisions, rng = engine.initial(), [], np.random.default_rng(0)
    for t in range(steps):
        seen = healthy(t, rng)
        state, decision = carry(state, Observation(t, seen["loss"], seen["grad_norm"]), ALL_ON)
        decisions.append(decision)
    return state, decisions


def test_what_was_not_measured_leaves_no_state_and_a_blind_step_changes_nothing() -> None:
    state = engine.initial()
    for t in range(40):
        state, _ = carry(state, Observation(t), ALL_ON)
    assert state.stats.advice == advice.AdviceState()
    seen = healthy(40, np.random.default_rng(0))
    blind = replace(observation(40, seen, state), blind=True)
    state, _ = carry(state, blind, ALL_ON)
    assert state.stats.advice == advice.AdviceState()


def test_the_layer_table_is_asked_for_until_it_came_and_again_after_a_rollback_behind_it() -> None:
    policy, rng = ALL_ON, np.random.default_rng(0)
    state = engine.note(engine.initial(), SnapshotTaken(0), policy)
    at_start = state.stats
    asked = []
    for t in range(4):
        asked.append(advice.wants_layers(state.stats.advice))
        state, _ = carry(state, observation(t, healthy(t, rng), state), policy)
    assert asked == [True, False, False, False]
    state = engine.note(state, Restored(4, 0, at_start), policy)
    assert advice.wants_layers(state.stats.advice)


def test_rows_that_are_no_small_whole_numbers_are_nobodys_like() -> None:
    column = np.array([0.0, 3.0, -1.0, math.nan, math.inf, 1e6], np.float32)
    columns = {LAYER_BLOCK: column, LAYER_ROLE: column, LAYER_GRAD_NORM: np.ones(6, np.float32)}
    state, _ = carry(engine.initial(), Observation(0, columns=columns), ALL_ON)
    layers = state.stats.advice.layers
    assert layers is not None
    assert np.frombuffer(layers.blocks, "<i2").tolist() == [0, 3, -1, -1, -1, -1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e308, 0.0, -1.0])
def test_no_value_raises_or_lasts(bad: float) -> None:
    def odd(t: int, seen: Seen, rng: np.random.Generator) -> None:
        if 100 <= t < 140:
            for name in ("loss", "grad_norm", "loss_scale"):
                seen[name] = bad
            seen["scalars"] = dict.fromkeys(advice.SCALARS, bad)
            for column in seen["columns"].values():
                column[3] = min(bad, 3e38)

    _, decisions = trained(odd, 5)
    late = [f.key for d in decisions[320:] for f in d.findings if f.key in FLAGS]
    assert late == []


def test_no_flag_is_louder_than_a_warning() -> None:
    severities = {getattr(Policy().rules, name).severity for name in FLAGS}
    assert severities <= {Severity.INFO, Severity.WARNING}


def test_residual_mappings_with_a_nan_hold_nan_and_amplify_nothing_nan_fold() -> None:
    state, said = advice.AdviceState(), advice.NOTHING
    scalars = dict.fromkeys(advice.MIXING, math.nan)
    for step in range(advice.LOOK):
        state, said = advice.observe(state, Observation(step, loss=1.0, scalars=scalars), ALL_ON)
    (raised,) = said.raised
    assert raised.key == "residual_mixing"
    assert raised.summary.startswith("the residual mappings hold NaN: constrain")


def test_advice_to_constant_clipping_asks_for_zero_grad_too() -> None:
    assert "zero_grad is called" in advice.ADVICE["clip_pressure"]

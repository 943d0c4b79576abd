"""Level-shift detector: slow changes that no single step shows."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel.core.detectors import level_shift, spike
from sentinel.core.detectors.level_shift import ShiftConfig, ShiftReading, ShiftState, observe
from sentinel.core.errors import ConfigError
from tests.core.detectors import reference
from tests.core.detectors.series import Series, series

CONFIG = ShiftConfig()
TINY = ShiftConfig(width=4, every=2, look=12, needed=2, away_rise=0.15, accept_after=5)


def run(
    losses: list[float | None],
    sigmas: list[float],
    config: ShiftConfig = CONFIG,
    state: ShiftState | None = None,
) -> tuple[ShiftState, list[ShiftReading]]:
    state = state or ShiftState()
    readings = []
    for loss, sigma in zip(losses, sigmas, strict=True):
        state, reading = observe(state, loss, sigma, config)
        readings.append(reading)
    return state, readings


def noisy(n: int, level: float, seed: int = 0) -> list[float | None]:
    rng = random.Random(seed)
    return [level + 0.05 * rng.gauss(0, 1) for _ in range(n)]


@pytest.mark.parametrize("seed", range(8))
def test_a_worse_level_is_reported_within_its_width(seed: int) -> None:
    losses = noisy(300, 3.0, seed) + noisy(100, 3.6, seed + 50)
    _, readings = run(losses, [0.017] * 400)
    assert not any(r.shifted for r in readings[:300])
    first = next(i for i, r in enumerate(readings) if r.shifted)
    assert 312 <= first <= 332
    assert readings[-1].drift == pytest.approx(math.log(3.6 / 3.0), abs=0.02)


def test_a_creeping_rise_is_reported_though_no_step_stands_out() -> None:
    rng = random.Random(2)
    losses = [
        3.0 * math.exp(max(0, i - 300) * 0.0005 + 0.015 * rng.gauss(0, 1)) for i in range(900)
    ]
    s, state, hot, shifted = spike.SpikeState(), ShiftState(), 0, []
    for i, loss in enumerate(losses):
        s, reading = spike.observe(s, loss, None, spike.SpikeConfig())
        hot += reading.hot
        state, shift = observe(state, loss, reading.sigma, CONFIG)
        shifted += [i] if shift.shifted else []
    assert hot == 0
    assert 450 < shifted[0] < 620


def test_a_fall_is_no_shift_and_noise_raises_the_bar() -> None:
    _, falling = run([4.0 - 0.003 * i for i in range(600)], [0.01] * 600)
    assert not any(r.shifted for r in falling)
    _, loud = run(noisy(300, 3.0) + noisy(100, 3.6), [0.1] * 400)
    assert not any(r.shifted for r in loud)  # 3 spreads are more than ln(3.6 / 3.0)


def test_nothing_is_said_before_a_spread_was_measured() -> None:
    state, readings = run(noisy(200, 3.0) + noisy(200, 9.0), [math.nan] * 400)
    assert not any(r.shifted for r in readings)
    assert state.lows == ()


def ramp(per_step: float, seed: int = 0) -> list[float | None]:
    rng = random.Random(seed)
    rises = [max(0, i - 300) * per_step for i in range(500)]
    return [3.0 * math.exp(rise + 0.08 * rng.gauss(0, 1)) for rise in rises]


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_divergence_is_away_though_no_step_is_hot(seed: int) -> None:
    s, state, hot, away = spike.SpikeState(), ShiftState(), 0, []
    for i, loss in enumerate(ramp(0.008, seed)):
        s, reading = spike.observe(s, loss, None, spike.SpikeConfig())
        hot += reading.hot
        state, shift = observe(state, loss, reading.sigma, CONFIG)
        away += [i] if shift.away else []
    assert hot == 0
    assert 340 < away[0] < 375
    assert len([i for i in away if 375 <= i < 400]) > 20


def test_a_loss_that_runs_away_does_not_hide_in_its_own_spread() -> None:
    rng = random.Random(1)
    losses = [3.0 * math.exp(0.09 * rng.gauss(0, 1)) for _ in range(300)]
    losses += [3.0 * math.exp(0.0012 * i * i + 0.09 * rng.gauss(0, 1)) for i in range(60)]
    s, state, flagged = spike.SpikeState(), ShiftState(), []
    for i, loss in enumerate(losses):
        s, reading = spike.observe(s, loss, None, spike.SpikeConfig())
        state, shift = observe(state, loss, reading.sigma, CONFIG)
        flagged += [i] if reading.hot or shift.away else []
    assert flagged[0] < 335  # the loss is at 13 then
    assert len([i for i in flagged if i >= 335]) == 25  # and at 200 in the end


def test_a_step_is_away_only_if_it_is_far_above_itself() -> None:
    state, _ = run(noisy(300, 3.0) + noisy(60, 4.5), [0.017] * 300 + [0.05] * 60)
    _, low = observe(state, 3.0, 0.017, CONFIG)
    assert (low.shifted, low.away) == (True, False)
    _, high = observe(state, 4.5, 0.017, CONFIG)
    assert high.away
    assert high.baseline == pytest.approx(3.0, abs=0.05)
    assert high.excess == pytest.approx(math.log(1.5), abs=0.02)
    assert high.score == pytest.approx(high.excess / 0.017)  # the spread at the lowest level
    off = dataclasses.replace(CONFIG, away_rise=0.0)
    assert not observe(state, 4.5, 0.017, off)[1].away


@pytest.mark.parametrize("low", [-0.4, -4.0, -300.0])
def test_an_objective_that_rises_towards_zero_has_not_drifted(low: float) -> None:
    rng = random.Random(8)
    noise = abs(low) / 8
    rising: list[float | None] = [
        low * math.exp(-max(0, i - 200) / 150) + noise * rng.gauss(0, 1) for i in range(1000)
    ]
    _, readings = run(rising, [noise] * 1000)
    assert not any(r.shifted or r.away for r in readings)


def test_a_loss_below_zero_that_runs_away_is_away_above_it() -> None:
    rng = random.Random(9)
    losses: list[float | None] = [
        -4.0 + max(0, i - 300) * 0.1 + 0.1 * rng.gauss(0, 1) for i in range(450)
    ]
    _, readings = run(losses, [0.1] * 450)
    first = next(i for i, r in enumerate(readings) if r.away)
    assert losses[first] == pytest.approx(5.6, abs=1.0)  # +4, and the half of a median's width
    assert readings[first].baseline == pytest.approx(-4.0, abs=0.1)
    assert readings[first].excess == pytest.approx(9.6, abs=1.0)


def test_after_so_many_steps_the_level_is_taken_as_it_is() -> None:
    _, readings = run(noisy(300, 3.0) + noisy(500, 4.5), [0.017] * 800)
    assert sum(r.away for r in readings) == CONFIG.accept_after
    assert not any(r.shifted for r in readings[500:])


def test_restarting_makes_now_the_new_normal() -> None:
    state, readings = run(noisy(300, 3.0) + noisy(100, 3.6), [0.017] * 400)
    assert readings[-1].shifted
    _, after = run(noisy(300, 3.6), [0.017] * 300, state=level_shift.restart(state))
    assert not any(r.shifted for r in after)


def test_config_errors_name_the_field() -> None:
    with pytest.raises(ConfigError, match=r"level_shift\.width must lie between 2 and 4096, got 1"):
        ShiftConfig(width=1)


@settings(max_examples=200, deadline=None)
@given(series, st.integers(0, 1000))
def test_it_equals_the_plain_reference(steps: Series, seed: int) -> None:
    rng = random.Random(seed)
    losses = [loss for loss, _ in steps]
    sigmas = [rng.choice([math.nan, 0.01, 0.02, 0.05]) for _ in losses]
    for config in (TINY, ShiftConfig(width=3, every=1, look=5, needed=1, away_rise=0.0)):
        _, readings = run(losses, sigmas, config)
        expected = reference.level_shift(losses, sigmas, **dataclasses.asdict(config))
        got = [(r.drift, r.shifted, r.excess if r.away else None) for r in readings]
        assert got == expected


@settings(max_examples=60, deadline=None)
@given(series, series)
def test_resuming_from_a_saved_state_changes_nothing(before: Series, after: Series) -> None:
    losses = [loss for loss, _ in before + after]
    sigmas = [0.01 + 0.001 * (i % 7) for i in range(len(losses))]
    whole, readings = run(losses, sigmas, TINY)
    cut = len(before)
    saved, _ = run(losses[:cut], sigmas[:cut], TINY)
    loaded = ShiftState(*(getattr(saved, f.name) for f in dataclasses.fields(saved)))
    resumed_state, resumed = run(losses[cut:], sigmas[cut:], TINY, loaded)
    assert resumed_state == whole
    assert resumed == readings[cut:]


def test_memory_is_bounded_whatever_the_loss_does() -> None:
    rising = [3.0 + 0.001 * i for i in range(3000)]  # worst case: every median may become lowest
    state, _ = run(rising, [1.0] * 3000)
    assert len(state.lows) <= CONFIG.look // CONFIG.every + 1
    assert len(state.recent) == CONFIG.width

"""Loss-spike detector: examples for the reader, the plain reference and properties for the rest."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from hypothesis import given, settings

from sentinel.core.detectors.spike import (
    SpikeConfig,
    SpikeReading,
    SpikeState,
    observe,
    restart,
)
from sentinel.core.errors import ConfigError
from sentinel.core.types import Status
from tests.core.detectors import reference
from tests.core.detectors.series import Series, make, series

CONFIG = SpikeConfig()
# Generated series are short: windows and bounds must be shorter.
TINY = SpikeConfig(
    window=8,
    warmup=5,
    rearm=2,
    accept_after=6,
    persist_hot=2,
    persist_window=3,
    z_hot=6.0,
    z_grad=4.0,
    recur_count=2,
    recur_window=30,
)
ODD = SpikeConfig(window=7, warmup=4, rearm=3, accept_after=9, recur_count=3, recur_window=20)


def run(
    steps: Series, config: SpikeConfig = CONFIG, state: SpikeState | None = None
) -> tuple[SpikeState, list[SpikeReading]]:
    state = state or SpikeState()
    readings = []
    for loss, norm in steps:
        state, reading = observe(state, loss, norm, config)
        readings.append(reading)
    return state, readings


def calm(n: int, level: float = 3.0, noise: float = 0.05, seed: int = 1) -> Series:
    rng = random.Random(seed)
    return [(level + noise * rng.gauss(0, 1), math.exp(0.2 * rng.gauss(0, 1))) for _ in range(n)]


@pytest.mark.parametrize(
    ("loss", "norm", "status", "level", "hot"),
    [
        pytest.param(3.05, 1.0, Status.NORMAL, 0, False, id="inside the noise"),
        pytest.param(1.0, 1.0, Status.NORMAL, 0, False, id="a drop is not a spike"),
        pytest.param(4.5, 1.0, Status.SPIKE, 1, True, id="far above"),
        pytest.param(3.35, 1.0, Status.NORMAL, 0, False, id="somewhat above"),
        pytest.param(3.35, 9.0, Status.SPIKE, 1, True, id="somewhat above with a large norm"),
        pytest.param(3.0, 9.0, Status.NORMAL, 0, False, id="a large norm alone"),
        pytest.param(math.nan, 1.0, Status.NONFINITE, 3, True, id="nan"),
        pytest.param(math.inf, 1.0, Status.NONFINITE, 3, True, id="overflow"),
        pytest.param(3.0, math.inf, Status.NONFINITE, 3, False, id="only the norm overflows"),
        pytest.param(4.5, math.nan, Status.NONFINITE, 3, True, id="far above with a nan norm"),
        pytest.param(None, 1.0, Status.ABSENT, 0, False, id="not measured"),
    ],
)
def test_a_step_is_judged_against_the_calm_before_it(
    loss: float | None, norm: float, status: Status, level: int, hot: bool
) -> None:
    _, readings = run([*calm(100), (loss, norm)])
    last = readings[-1]
    assert (last.status, last.level, last.hot) == (status, level, hot)


def test_it_speaks_after_the_warm_up_and_says_so() -> None:
    _, readings = run(calm(60))
    assert [r.status for r in readings[:48]] == [Status.WARMING_UP] * 48
    assert all(r.baseline is None and math.isnan(r.score) for r in readings[:48])
    assert all(r.status is Status.NORMAL for r in readings[48:])
    assert readings[-1].baseline == pytest.approx(3.0, abs=0.05)


def test_before_the_warm_up_nothing_finite_is_hot() -> None:
    _, readings = run([*calm(40), (30.0, 1.0)])
    assert not readings[-1].hot


@pytest.mark.parametrize("seed", range(12))
def test_a_lasting_shift_stays_hot_and_is_accepted_as_the_new_level(seed: int) -> None:
    # +0.6 nats on level 3.0 with noise 0.05.
    before = calm(300, seed=seed)
    after = [
        (loss + 0.6 if loss is not None else None, norm) for loss, norm in calm(300, seed=seed + 99)
    ]
    _, readings = run(before + after)
    assert sum(r.hot for r in readings[300:360]) >= 57
    accepted = [i for i, r in enumerate(readings) if r.accepted_level]
    assert len(accepted) == 1
    assert 427 <= accepted[0] <= 431  # 128 hot steps
    assert not any(r.hot for r in readings[accepted[0] + 1 :])
    assert readings[-1].baseline == pytest.approx(3.6, abs=0.05)


def test_a_burst_of_spikes_does_not_hide_its_own_tail() -> None:
    _, readings = run([*calm(100), *[(8.0, 5.0)] * 40])
    assert all(r.hot for r in readings[100:])


def test_a_fall_may_go_on_but_a_rise_is_never_excused() -> None:
    rng = random.Random(3)

    def slope(per_step: float) -> Series:
        return [(math.exp(1.0 + per_step * i + 0.005 * rng.gauss(0, 1)), None) for i in range(120)]

    _, falling = run(slope(-0.01))
    _, rising = run(slope(+0.02))
    # The line follows the fall: what comes is what was expected, not far below it.
    assert abs(falling[-1].excess) < 0.03
    # On the rise the line is the level of the newer half.
    assert rising[-1].excess > 0.2


def test_staying_hot_needs_less_than_becoming_hot_until_five_clean_steps() -> None:
    mild = (3.0 * math.exp(0.095), 1.0)
    sharp = (4.5, 1.0)
    quiet = [(3.0, 1.0)]
    base = calm(100)
    assert not run([*base, mild])[1][-1].hot
    assert run([*base, sharp, mild])[1][-1].hot
    assert run([*base, sharp, *quiet * 4, mild])[1][-1].hot
    assert not run([*base, sharp, *quiet * 5, mild])[1][-1].hot


def test_persistence_is_level_two() -> None:
    quiet = (3.0, 1.0)
    spike = (3.6, 1.0)  # r about 0.18
    base = calm(100)
    levels = [r.level for r in run([*base, spike, quiet, spike, quiet, spike, quiet])[1][100:]]
    assert levels == [1, 0, 1, 0, 2, 0]  # the third of six
    huge = (6.0, 1.0)  # r about 0.7
    assert [r.level for r in run([*base, huge, huge])[1][100:]] == [1, 2]


def test_nan_losses_leave_the_baseline_alone_and_do_not_count_towards_accepting() -> None:
    base = calm(100)
    state, _ = run(base)
    after, readings = run([(math.nan, 1.0)] * 400, state=state)
    assert (after.losses, after.norms) == (state.losses, state.norms)
    assert all(r.hot and r.level == 3 and not r.accepted_level for r in readings)
    _, later = run(calm(20, seed=7), state=after)
    assert not any(r.hot for r in later)


def test_a_finite_loss_with_a_nan_norm_enters_the_baseline_and_the_norm_does_not() -> None:
    state, _ = run(calm(100))
    after, _ = run([(3.01, math.nan)], state=state)
    assert after.losses[-1] == math.log(3.01)
    assert after.norms == state.norms


def test_outlying_norms_enter_capped() -> None:
    steps = [(loss, 1.0) for loss, _ in calm(100)]
    state, _ = run([*steps, (3.0, 1e9)])
    assert state.norms[-1] == pytest.approx(6 * 0.10)  # median 0, spread at its floor


def mixture(n: int, share: float, seed: int) -> Series:
    """Lawful data: a share of the batches comes from a source that is 35 % harder."""
    rng = random.Random(seed)
    return [
        (
            3.0 * math.exp(0.012 * rng.gauss(0, 1) + (0.3 if rng.random() < share else 0.0)),
            math.exp(0.2 * rng.gauss(0, 1)),
        )
        for _ in range(n)
    ]


@pytest.mark.parametrize("share", [0.03, 0.05, 0.08])
def test_outliers_that_recur_are_the_datas_own(share: float) -> None:
    off = dataclasses.replace(CONFIG, recur_count=0)
    steps = mixture(2000, share, seed=4)
    hot = [sum(r.hot for r in run(steps, config)[1][500:]) for config in (CONFIG, off)]
    assert hot[0] < 0.25 * hot[1]
    assert hot[0] < 0.015 * 1500


def test_a_lasting_shift_among_recurrent_outliers_is_seen_one_step_later() -> None:
    steps = mixture(1000, 0.05, seed=4) + [(4.05, None)] * 10
    readings = run(steps)[1]
    assert readings[999].hot is False
    assert [r.hot for r in readings[1000:]] == [False] + [True] * 9


def test_an_outlier_larger_than_the_usual_ones_is_hot() -> None:
    state, readings = run(mixture(1000, 0.05, seed=4))
    assert sum(r.recurrent for r in readings) > 20
    assert not run([(4.05, None)], state=state)[1][0].hot
    assert run([(5.5, None)], state=state)[1][0].hot
    assert run([(4.05, 50.0)], state=state)[1][0].hot  # so is one whose norm is an outlier too
    assert len(state.lone) == 16


@pytest.mark.parametrize(("length", "lone"), [(1, 6), (2, 6), (3, 0)])
def test_at_most_two_hot_steps_in_a_row_are_a_lone_outlier(length: int, lone: int) -> None:
    steps = calm(100, noise=0.03)
    for i in range(6):
        steps += [*[(4.05, 1.0)] * length, *calm(30, noise=0.03, seed=i)]
    state, readings = run(steps)
    assert sum(r.hot for r in readings) == 6 * length
    assert len(state.lone) == lone
    assert all(r == pytest.approx(0.3, abs=0.03) for _, r in state.lone)
    assert run([(4.05, 1.0)], state=state)[1][0].recurrent == (lone > 0)


def test_a_few_lone_outliers_are_each_hot() -> None:
    steps = calm(100)
    for i in range(8):  # the last of which lie outside the window of the first ones
        steps += [(4.5, 1.0), *calm(120, seed=i)]
    readings = run(steps)[1]
    assert sum(r.hot for r in readings) == 8


def test_small_losses_are_compared_linearly() -> None:
    rng = random.Random(5)
    small: Series = [(0.001 + 0.0005 * rng.random(), None) for _ in range(100)]
    assert not run([*small, (0.01, None)])[1][-1].hot  # ten times as much, and only noise
    assert run([*small, (0.2, None)])[1][-1].hot
    _, readings = run(small)
    assert readings[-1].baseline == pytest.approx(0.00125, abs=0.0003)


def test_nothing_is_expected_below_the_lowest_loss_so_far() -> None:
    rng = random.Random(6)
    # A fast fall that bends: the line of ln(loss) would go on far below zero.
    bent: Series = [(0.6 * math.exp(-i / 8) + 0.02 + 0.002 * rng.random(), None) for i in range(52)]
    _, readings = run([*bent, (0.43, None)])
    lowest = min(loss for loss, _ in bent if loss is not None)
    judged = [r.baseline for r in readings if r.baseline is not None]
    assert len(judged) == 5
    assert all(b >= lowest * (1 - 1e-12) for b in judged)


def about_zero(n: int, seed: int = 1, noise: float = 0.1) -> Series:
    """An objective that rises towards zero and changes its sign again and again."""
    rng = random.Random(seed)
    return [(-0.4 * math.exp(-i / 300) + noise * rng.gauss(0, 1), None) for i in range(n)]


@pytest.mark.parametrize("seed", range(6))
def test_noise_about_zero_is_no_spike(seed: int) -> None:
    assert not any(r.hot for r in run(about_zero(1200, seed))[1])


@pytest.mark.parametrize("level", [-300.0, -3.0, 0.0])
def test_a_loss_below_zero_spikes_too(level: float) -> None:
    _, readings = run([*calm(100, level=level, noise=0.05), (level + 1.0, 1.0)])
    assert readings[-1].hot
    assert readings[-1].excess == pytest.approx(1.0, abs=0.1)  # plainly, on both sides of zero
    assert readings[-1].baseline == pytest.approx(level, abs=0.05)


def test_restarting_forgets_the_baseline() -> None:
    state, _ = run(calm(100))
    _, readings = run(calm(60, level=9.0), state=restart(state))
    assert [r.status for r in readings] == [Status.WARMING_UP] * 48 + [Status.NORMAL] * 12


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"warmup": 200}, r"spike\.warmup must lie between 4 and spike\.window \(64 steps\), got"),
        ({"window": 2}, r"spike\.window must lie between 4 and 4096, got 2"),
        ({"z_hot": math.nan}, r"spike\.z_hot .* got nan"),
        ({"z_stay": 9.0}, r"spike\.z_stay must lie between 0 and 8, got 9"),
        ({"sigma_floor": 0.0}, r"spike\.sigma_floor"),
        ({"persist_hot": 7}, r"spike\.persist_hot must lie between 1 and 6, got 7"),
        ({"accept_after": 0}, r"spike\.accept_after"),
    ],
)
def test_settings_that_make_no_sense_are_refused(bad: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpikeConfig(**bad)  # type: ignore[arg-type]


def assert_equals_reference(steps: Series, config: SpikeConfig) -> None:
    _, readings = run(steps, config)
    rows = reference.spike(
        [loss for loss, _ in steps], [norm for _, norm in steps], **dataclasses.asdict(config)
    )
    for i, (got, row) in enumerate(zip(readings, rows, strict=True)):
        expected = (row.level, row.hot, row.accepted, row.recurrent)
        assert (got.level, got.hot, got.accepted_level, got.recurrent) == expected, i
        assert (got.status is Status.WARMING_UP) == (
            not row.judged and row.level != 3 and steps[i][0] is not None
        ), i
        if row.judged:
            assert (got.score, got.excess, got.sigma) == (row.z, row.r, row.sigma), i
        else:
            assert math.isnan(got.score), i
            assert math.isnan(got.sigma), i
        if row.gz is None:
            assert math.isnan(got.grad_score), i
        elif math.isnan(got.grad_score):
            assert not row.outlier, i
        else:
            assert got.grad_score == row.gz, i


@settings(max_examples=120, deadline=None)
@given(series)
def test_it_equals_the_plain_reference_in_small_windows(steps: Series) -> None:
    assert_equals_reference(steps, TINY)
    assert_equals_reference(steps, ODD)


@pytest.mark.parametrize("seed", range(3))
def test_it_equals_the_plain_reference_with_the_default_settings(seed: int) -> None:
    rng = random.Random(seed)
    kinds = [
        "calm", "spike", "nan loss", "falling", "norm burst with loss", "shift up",
        "norm burst", "small spike", "no loss", "no norm", "nan norm",
    ]  # fmt: skip
    plan: list[tuple[str, int]] = [("calm", 70)]
    for _ in range(14):
        plan += [(rng.choice(kinds), rng.choice([1, 2, 4, 9, 140])), ("calm", rng.choice([3, 80]))]
    assert_equals_reference(make(plan, seed), CONFIG)


@settings(max_examples=100, deadline=None)
@given(series, series)
def test_resuming_from_a_saved_state_changes_nothing(before: Series, after: Series) -> None:
    whole, readings = run(before + after, TINY)
    saved, _ = run(before, TINY)
    loaded = SpikeState(*dataclasses.astuple(saved))
    resumed_state, resumed = run(after, TINY, loaded)
    assert resumed_state == whole
    assert repr(resumed) == repr(readings[len(before) :])  # repr: nan equals nan


@settings(max_examples=100, deadline=None)
@given(series)
def test_the_state_stays_bounded_and_finite_and_hot_steps_leave_no_trace(steps: Series) -> None:
    state = SpikeState()
    for loss, norm in steps:
        following, reading = observe(state, loss, norm, TINY)
        assert len(following.losses) <= TINY.window
        assert len(following.norms) <= TINY.window
        assert all(math.isfinite(v) for v in following.losses + following.norms)
        if reading.status is Status.ABSENT:
            assert following == state
        elif reading.hot and not reading.accepted_level:
            assert (following.losses, following.norms) == (state.losses, state.norms)
        state = following


@pytest.mark.parametrize("loss", [1e300, -1e300, 5e-324, 0.0, -0.0, 1.7e308, -1.7e308])
def test_absurd_losses_are_readings_not_exceptions(loss: float) -> None:
    run([*calm(60), (loss, 1.0), *[(loss, 5e-324)] * 150, *[(2.0, 1.0)] * 60])

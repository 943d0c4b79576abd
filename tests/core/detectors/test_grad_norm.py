"""Gradient-norm rule: 10 x the historical mean, once that mean means something."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sentinel.core.detectors.grad_norm import (
    RECHECK,
    NormConfig,
    NormState,
    accept,
    judge,
    restart,
)
from sentinel.core.errors import ConfigError
from sentinel.core.types import Status

CONFIG = NormConfig()


def fed(norms: list[float], config: NormConfig = CONFIG) -> NormState:
    state = NormState()
    for norm in norms:
        state = accept(state, norm, config)
    return state


def calm(n: int, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [2.0 + 0.1 * rng.gauss(0, 1) for _ in range(n)]


def test_ten_point_one_times_the_mean_is_a_spike_and_nine_point_nine_is_not() -> None:
    norms = calm(200)
    mean = float(np.mean(norms[-128:]))
    state = fed(norms)
    low, high = judge(state, 9.9 * mean, CONFIG), judge(state, 10.1 * mean, CONFIG)
    assert (low.status, high.status) == (Status.NORMAL, Status.SPIKE)
    assert high.baseline == pytest.approx(mean)
    assert high.score == pytest.approx(10.1)


@pytest.mark.parametrize("n", [0, 1, 63])
def test_before_it_is_armed_neither_is(n: int) -> None:
    state = fed(calm(n))
    for norm in (9.9 * 2.0, 10.1 * 2.0, 1e9):
        assert judge(state, norm, CONFIG).status is Status.WARMING_UP
    assert judge(fed(calm(64)), 10.5 * 2.0, CONFIG).status is Status.SPIKE


def test_a_norm_that_is_not_finite_is_seen_from_the_first_step() -> None:
    for norm in (math.nan, math.inf):
        assert judge(NormState(), norm, CONFIG).status is Status.NONFINITE
    assert judge(NormState(), None, CONFIG).status is Status.ABSENT


def test_it_is_not_armed_while_its_own_baseline_moves() -> None:
    falling = [100.0 * math.exp(-0.02 * i) for i in range(128)]
    assert judge(fed(falling), 1.0, CONFIG).status is Status.WARMING_UP
    state = fed(falling + calm(128 + RECHECK))
    assert judge(state, 2.0, CONFIG).status is Status.NORMAL


def test_flatness_is_the_ratio_of_the_medians_of_the_halves() -> None:
    config = NormConfig(window=16, warmup=8, flatness=1.5)
    assert judge(fed([1.0] * 4 + [1.49] * 4, config), 1.0, config).status is Status.NORMAL
    assert judge(fed([1.0] * 4 + [1.51] * 4, config), 1.0, config).status is Status.WARMING_UP
    assert judge(fed([1.51] * 4 + [1.0] * 4, config), 1.0, config).status is Status.WARMING_UP


def test_only_accepted_finite_norms_move_the_mean() -> None:
    state = fed(calm(100))
    for norm in (math.nan, math.inf, None):
        assert accept(state, norm, CONFIG) == state


def test_norms_of_zero_never_make_a_ratio() -> None:
    assert judge(fed([0.0] * 100), 5.0, CONFIG).status is Status.WARMING_UP


def test_restarting_warms_up_anew() -> None:
    assert judge(restart(fed(calm(200))), 1e6, CONFIG).status is Status.WARMING_UP


def test_config_errors_name_the_field_the_bound_and_the_value() -> None:
    with pytest.raises(
        ConfigError,
        match=r"grad_norm\.warmup must lie between 2 and grad_norm\.window \(128 steps\), got 200",
    ):
        NormConfig(warmup=200)
    with pytest.raises(ConfigError, match=r"grad_norm\.factor must lie between 1 .* got 0"):
        NormConfig(factor=0)


@given(st.lists(st.floats(0, 1e6) | st.sampled_from([math.nan, math.inf]), max_size=40))
def test_the_state_is_the_last_finite_norms_and_the_flatness_of_a_recent_window(
    norms: list[float],
) -> None:
    config = NormConfig(window=8, warmup=4)
    state = fed(norms, config)
    finite = [n for n in norms if math.isfinite(n)]
    assert state.norms == tuple(finite[-8:])

    def flat(seen: list[float]) -> bool:
        window = seen[-8:]
        half = len(window) // 2
        older, newer = np.median(window[:half]), np.median(window[half:])
        return bool(max(older, newer) < 1.5 * min(older, newer))

    # Compared when the warm-up ends and after every RECHECK norms from then on.
    if len(finite) >= 4:
        compared = 4 + (len(finite) - 4) // RECHECK * RECHECK
        assert state.flat == flat(finite[:compared])
    else:
        assert not state.flat

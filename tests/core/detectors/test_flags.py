"""Flags with advice: each on a series that has the illness, and on its healthy twin.

`python -m pytest tests/core/detectors/test_flags.py -k table -s` prints the confusion table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from sentinel.core.detectors import (
    depth,
    layer_band,
    layer_outlier,
    loss_scale,
    loss_shape,
    norm_trend,
    resources,
    stale_grads,
    throughput,
)
from sentinel.core.errors import ConfigError
from sentinel.core.types import NOT_MEASURED

Rng = np.random.Generator


def falling(rng: Rng, n: int, noise: float = 0.02) -> list[float]:
    """A loss as it falls in healthy training."""
    t = np.arange(n)
    return list((2.0 + 5.0 * (1 + t / 30) ** -0.5) * np.exp(noise * rng.normal(size=n)))


def norms(rng: Rng, n: int, level: float = 2.0, noise: float = 0.2) -> list[float]:
    return list(level * np.exp(noise * rng.normal(size=n)))


def f32(values: Any) -> Any:
    return np.asarray(values, dtype=np.float32)


def ever(
    module: Any, state: Any, config: Any, series: Any, flag: Callable[[Any], bool], block: int = 1
) -> bool:
    """Was it flagged at any step, when asked every `block` steps?"""
    series, flagged = list(series), False
    for at in range(0, len(series), block):
        state, reading = module.observe(state, series[at : at + block], config)
        flagged = flagged or flag(reading)
    return flagged


# ---------------------------------------------------------------- one pair each


def over_depth(rng: Rng, rho: float) -> bool:
    L = 48
    column = f32(rho ** np.arange(L) * np.exp(0.3 * rng.normal(size=L)))
    column[::2] = NOT_MEASURED
    blocks = np.arange(L) // 2
    return depth.judge(column, blocks, depth.DepthConfig()).flagged


def mixing(rng: Rng, strength: float) -> bool:
    maps = [np.eye(4) + strength * np.abs(rng.normal(size=(4, 4))) for _ in range(30)]
    maps = [m / (m.sum(1, keepdims=True) if strength == 0.05 else 1.0) for m in maps]
    return depth.mixing_flagged(depth.mixing_gain(maps), depth.DepthConfig())


def residual_path(rng: Rng, factor: float) -> bool:
    column = f32(1.03 ** np.arange(24) * np.exp(0.1 * rng.normal(size=24)))
    column[int(rng.integers(1, 24)) :] *= factor
    return depth.gain(column, np.arange(24), depth.DepthConfig()).flagged


def outlier(rng: Rng, factor: float) -> bool:
    names = tuple(f"h.{i}.{part}" for i in range(12) for part in ("attn.q", "norm", "mlp"))
    level = np.tile([1.0, 0.001, 5.0], 12)  # roles differ by themselves
    column = f32(level * np.exp(0.5 * rng.normal(size=36)))
    column[int(rng.integers(36))] *= factor
    reading = layer_outlier.judge(
        column, layer_outlier.roles_of(names), layer_outlier.OutlierConfig()
    )
    return bool(reading.high or reading.low)


def left_band(rng: Rng, factor: float) -> bool:
    def series() -> Any:
        drift = np.linspace(0, 1, 200)  # all layers grow slowly, as they do
        for t in range(200):
            column = f32(np.exp(drift[t] + 0.1 * rng.normal(size=24)))
            if t >= 150:
                column[7:] *= factor
            yield column

    config, state, out = layer_band.BandConfig(), layer_band.BandState(), False
    for step, column in enumerate(series()):
        state, reading = layer_band.observe(state, column, step, config)
        out = out or bool(reading.out)
    return out


def rising_norm(rng: Rng, growth: float) -> bool:
    series = [(n * growth ** (t / 400), None) for t, n in enumerate(norms(rng, 400))]
    series[200] = (series[200][0] * 100, None)  # one spike is no trend
    return ever(
        norm_trend, norm_trend.TrendState(), norm_trend.TrendConfig(), series, lambda r: r.rising
    )


def together(rng: Rng, rise: float) -> bool:
    loss, norm = falling(rng, 300), norms(rng, 300, noise=0.05)
    for i in range(12):
        loss[280 + i] *= 1 + rise * (i + 1)
        norm[280 + i] *= 1 + 4 * rise * (i + 1)
    series = list(zip(norm, loss, strict=True))
    return ever(
        norm_trend, norm_trend.TrendState(), norm_trend.TrendConfig(), series, lambda r: r.together
    )


def swinging(rng: Rng, noise: float) -> bool:
    return ever(
        loss_shape,
        loss_shape.ShapeState(),
        loss_shape.ShapeConfig(),
        falling(rng, 400, noise)[60:],
        lambda r: r.swinging,
    )


def periodic(rng: Rng, height: float) -> bool:
    loss = [v * (1 + height * (t % 7 == 3)) for t, v in enumerate(falling(rng, 600, noise=0.02))]
    return ever(
        loss_shape,
        loss_shape.ShapeState(),
        loss_shape.ShapeConfig(),
        loss[100:],
        lambda r: r.period != 0,
    )


def plateau(rng: Rng, slope: float) -> bool:
    loss = [4.0 * math.exp(-slope * t) * math.exp(0.01 * rng.normal()) for t in range(1500)]
    return ever(
        loss_shape, loss_shape.ShapeState(), loss_shape.ShapeConfig(), loss, lambda r: r.plateau
    )


def forgotten(rng: Rng, piling: bool, noise: float = 1.0) -> bool:
    """Gradients of which a part points the same way, and the rest is the batch's own."""
    shared = rng.normal(size=400)
    total, series = np.zeros(400), []
    for _ in range(60):
        own = shared + noise * rng.normal(size=400)
        total = total + own if piling else own
        series.append(float(np.linalg.norm(total)))
    config = stale_grads.StaleConfig()
    return ever(stale_grads, stale_grads.StaleState(), config, series, lambda r: r.flagged)


def forgotten_in_noise(rng: Rng, piling: bool) -> bool:
    return forgotten(rng, piling, noise=4.0)


def early(rng: Rng, piling: bool) -> bool:
    """A healthy norm that doubles, with its own scatter, in the first steps of a run."""
    level = [1.5 * (t + 1.0) if piling else 1.0 + t / 12 for t in range(24)]
    series = [v * math.exp((0.001 if piling else 0.05) * rng.normal()) for v in level]
    config = stale_grads.StaleConfig()
    return ever(stale_grads, stale_grads.StaleState(), config, series, lambda r: r.flagged)


def scale(rng: Rng, collapsing: bool) -> bool:
    values = [65536.0 / 2 ** min(t, 5) for t in range(64)]  # finding its level is no collapse
    values += [2048.0 / (2 ** (t // 8) if collapsing else 1 + (t > 100)) for t in range(200)]
    config = loss_scale.ScaleConfig()
    return ever(loss_scale, loss_scale.ScaleState(), config, values, lambda r: r.collapsing)


def slow(rng: Rng, factor: float) -> bool:
    rates = [1e5 * math.exp(0.05 * rng.normal()) * (factor if t > 300 else 1) for t in range(400)]
    rates[150:153] = [1e3] * 3  # an evaluation
    config = throughput.PaceConfig()
    return ever(throughput, throughput.PaceState(), config, rates, lambda r: r.slow)


def full(rng: Rng, free: float) -> bool:
    return resources.low_headroom(free, resources.ResourceConfig())


def clipping(rng: Rng, left: float) -> bool:
    return resources.clip_pressure(0.97, left, resources.ResourceConfig())


def alike(rng: Rng, spread: float) -> bool:
    column = f32(rng.uniform(0.3, 1.0, size=12))
    column[5], column[8] = spread, NOT_MEASURED
    found = resources.collapsed(column, resources.ResourceConfig())
    assert found in ((), (5,))
    return bool(found)


PAIRS: dict[str, tuple[Callable[[Rng, Any], bool], Any, Any]] = {
    "growth with depth": (over_depth, 1.2, 1.02),
    "decay with depth": (over_depth, 0.8, 0.98),
    "residual mixing": (mixing, 0.3, 0.05),
    "one block amplifies": (residual_path, 200.0, 1.0),
    "layer far above": (outlier, 1000.0, 1.0),
    "layer far below": (outlier, 1e-4, 1.0),
    "layer out of its band": (left_band, 10.0, 1.0),
    "norm rises steadily": (rising_norm, 6.0, 1.0),
    "loss and norm rise together": (together, 0.04, 0.0),
    "loss swings": (swinging, 0.08, 0.01),
    "periodic spikes": (periodic, 0.12, 0.0),
    "plateau": (plateau, 0.0, 1e-4),
    "zero_grad forgotten": (forgotten, True, False),
    "zero_grad forgotten, much noise": (forgotten_in_noise, True, False),
    "zero_grad forgotten, early": (early, True, False),
    "loss scale collapses": (scale, True, False),
    "throughput drops": (slow, 0.7, 0.95),
    "memory headroom": (full, 0.1, 0.2),
    "clip pressure": (clipping, 0.7, 0.95),
    "representations collapse": (alike, 0.001, 0.1),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_ill_one_is_flagged_and_its_healthy_twin_is_not(name: str) -> None:
    run, ill, healthy = PAIRS[name]
    for seed in range(5):
        assert run(np.random.default_rng(seed), ill), f"missed, seed {seed}"
        assert not run(np.random.default_rng(seed), healthy), f"false alarm, seed {seed}"


def test_the_confusion_table() -> None:
    rows = []
    for name, (run, ill, healthy) in PAIRS.items():
        caught = sum(run(np.random.default_rng(s), ill) for s in range(100, 110))
        false = sum(run(np.random.default_rng(s), healthy) for s in range(100, 110))
        rows.append((name, caught, false))
        print(f"{name:32s} ill {caught:3d}/10 flagged   healthy {false:3d}/10 flagged")
    assert sum(caught for _, caught, _ in rows) >= 10 * len(rows) - 2
    assert sum(false for _, _, false in rows) <= 2


# ---------------------------------------------------------------- details


def test_depth_tells_rho_and_is_not_tilted_by_one_block() -> None:
    column = f32(1.1 ** np.arange(100))
    reading = depth.judge(column, np.arange(100), depth.DepthConfig())
    assert reading.rho == pytest.approx(1.1, rel=1e-4)
    assert reading.total == pytest.approx(1.1**99, rel=1e-2)
    column[40] *= 1e6
    assert depth.judge(column, np.arange(100), depth.DepthConfig()).rho == pytest.approx(
        1.1, rel=1e-3
    )
    few = depth.judge(column[:3], np.arange(3), depth.DepthConfig())
    assert math.isnan(few.rho)
    assert not few.flagged
    broken = depth.judge(f32([math.nan] * 9), np.arange(9), depth.DepthConfig())
    assert not broken.flagged


def test_layers_of_a_block_count_together_and_those_outside_do_not() -> None:
    column = f32([9.0, 3.0, 4.0, NOT_MEASURED, 5.0, 7.0])
    blocks = np.array([-1, 0, 0, 1, 1, -1])
    assert depth.per_block(column, blocks).tolist() == [5.0, 5.0]


def test_the_gain_names_the_block_and_needs_two() -> None:
    config = depth.DepthConfig(gain=100.0)
    rms, blocks = f32([9.0, NOT_MEASURED, 2.0, 4.0, math.nan, 3.0, 7.0]), np.arange(-1, 6)
    assert depth.gain(rms, blocks, config) == depth.GainReading(3.5, 2.0, 2, False)
    rms[3] = 300.0
    assert depth.gain(rms, blocks, config) == depth.GainReading(3.5, 150.0, 2, True)
    late = f32([1.0] * 20 + [200.0] * 4)
    assert depth.gain(late, np.arange(24), config).block == 20
    assert not depth.judge(late, np.arange(24), config).flagged, "the slope does not see it"
    steady = f32([1.0, 11.0, 110.0])
    assert depth.gain(steady, np.arange(3), config) == depth.GainReading(110.0, 11.0, 1, True)
    for few in ([2.0], [0.0, 2.0], [math.inf, 2.0], []):
        assert depth.gain(f32(few), np.arange(len(few)), config) == depth.gain(
            f32([1.0]), np.arange(1), config
        )


def test_a_layer_that_is_nearly_dead_is_not_amplified_by_the_one_after_it() -> None:
    config = depth.DepthConfig(gain=100.0)
    found = depth.gain(f32([1.0, 0.002, 0.9, 1.0]), np.arange(4), config)
    assert (found.flagged, found.worst) == (False, 1.0)
    assert depth.compound(np.array([-1, 0, 1, 1, 2, 3, 3])).tolist() == [-1, -1, 1, 1, -1, 3, 3]
    assert depth.compound(np.array([-1, -1])).tolist() == [-1, -1]


def test_a_norm_may_rise_for_as_long_as_the_loss_falls_with_it() -> None:
    config = norm_trend.TrendConfig()

    def rises(loss: Callable[[int], float | None]) -> bool:
        series = [(2.0 ** (t / 128), loss(t)) for t in range(256)]
        state = norm_trend.TrendState()
        return norm_trend.observe(state, series, config)[1].rising

    assert rises(lambda t: None), "nothing is known of the loss"
    assert rises(lambda t: 2.0)
    assert rises(lambda t: 2.0 - 0.1 * t / 256), "by less than a tenth"
    assert not rises(lambda t: 2.0 - 0.4 * t / 256)
    assert not rises(lambda t: -2.0 - 0.4 * t / 256), "of a likelihood"
    assert rises(lambda t: -2.0 + 0.4 * t / 256)
    assert rises(lambda t: 0.0)


def test_a_norm_that_jumped_once_and_creeps_on_is_no_trend() -> None:
    """As an adapter's does, half of which has no gradient until the other half has moved."""
    levels = [0.196, 0.316, 0.349, 0.35, 0.365, 0.37, 0.38, 0.397]
    config, state = norm_trend.TrendConfig(), norm_trend.TrendState()
    creeping = [(v, 2.5) for v in levels for _ in range(config.length)]
    _, seen = norm_trend.observe(state, creeping, config)
    assert (seen.rising, seen.ratio > config.factor) == (False, True)
    even = [(0.196 * 2.1 ** (i / 7), 2.5) for i in range(8) for _ in range(config.length)]
    assert norm_trend.observe(state, even, config)[1].rising


def test_of_the_layers_without_gradient_those_that_say_something_are_named() -> None:
    config, blocks = layer_outlier.OutlierConfig(), np.repeat(np.arange(4), 2)
    roles = np.tile([0, 1], 4)

    def named(dead: list[int], **other: Any) -> tuple[int, ...]:
        column = f32(np.ones(8))
        column[dead] = 0.0
        given = {"roles": roles, "blocks": blocks} | other
        return layer_outlier.silent(np.array(dead, int), column, config=config, **given)

    assert named([4]) == (4,)
    assert named([2, 5]) == (5, 2)
    assert named([0, 1, 2, 3]) == (3, 2, 1, 0), "all below block 2"
    assert named([2, 4, 6]) == (), "most of a role, above one that has a gradient"
    assert named([0, 2, 4, 6]) == (), "all of a role"
    assert named(list(range(8))) == ()
    assert named([]) == ()
    nothing = np.full(8, -1)
    assert named([4], roles=nothing) == ()
    assert named([0, 1, 2, 3], blocks=nothing) == ()
    few = f32([1.0, 0.0, 1.0])
    assert (
        layer_outlier.silent(np.array([1]), few, np.zeros(3, int), np.full(3, -1), config) == ()
    ), "three are no role"


def test_rows_stay_silent_while_they_are_0_or_not_measured() -> None:
    column = f32([0.0, 1.0, NOT_MEASURED, math.nan, math.inf, 1e-30])
    assert layer_outlier.still(np.arange(9), column).tolist() == [0, 2]


def test_mixing_gain_is_that_of_the_product() -> None:
    up, down = np.array([[2.0, 0.0], [1.0, 1.0]]), np.array([[0.5, 0.5], [0.0, -3.0]])
    product = down @ up
    assert depth.mixing_gain([up, down]) == (
        np.abs(product).sum(1).max(),
        np.abs(product).sum(0).max(),
    )
    config = depth.DepthConfig(mixing=5.0)
    assert depth.mixing_flagged((math.nan, 1.0), config)
    assert depth.mixing_flagged((1.0, 5.0), config)
    assert not depth.mixing_flagged((4.9, 1.0), config)


def test_the_layer_that_left_first_is_remembered_until_all_are_back() -> None:
    config = layer_band.BandConfig(warmup=8)
    state = layer_band.BandState()
    calm = f32([1.0, 2.0, 3.0, NOT_MEASURED])
    for t in range(20):
        state, reading = layer_band.observe(state, calm * (1 + 0.01 * (t % 3)), t, config)
        assert reading == layer_band.BandReading()
    one, two = f32([1.0, 200.0, 3.0, NOT_MEASURED]), f32([1e6, 200.0, math.nan, NOT_MEASURED])
    state, reading = layer_band.observe(state, one, 20, config)
    assert reading == layer_band.BandReading((1,), (1,))
    state, reading = layer_band.observe(state, two, 21, config)
    assert reading == layer_band.BandReading((2, 0, 1), (1,))
    state, reading = layer_band.observe(state, calm, 22, config)
    assert reading == layer_band.BandReading()
    state, reading = layer_band.observe(state, f32([50.0, 2.0, 3.0, NOT_MEASURED]), 23, config)
    assert reading.first == (0,)
    infinite = f32([1.0, 2.0, math.inf, NOT_MEASURED])
    assert layer_band.observe(state, infinite, 24, config)[1].out == (2,)


@pytest.mark.parametrize("odd", [None, 0.0, np.nan, np.inf, NOT_MEASURED])
@pytest.mark.parametrize("layers", [1, 5, 200])
def test_a_lesson_of_the_bands_is_what_it_says(layers: int, odd: float | None) -> None:
    """Running means of ln and of the distance from it, in 1/1024, in float32 to the last bit."""
    rng, state = np.random.default_rng(layers), layer_band.BandState()
    rate, least, most = np.float32(0.125), -(2**15) + 1, 2**15 - 1
    mean = distance = np.zeros(layers, np.float32)
    for step in range(30):
        column = np.exp(rng.normal(size=layers) * 20).astype(np.float32)
        if odd is not None and step % 7 == 3:
            column[0] = odd
        state, _ = layer_band.observe(state, column, step, layer_band.BandConfig())
        with np.errstate(all="ignore"):
            y = np.log(column)
        if step == 0:
            mean = np.clip(np.rint(y * 1024), least, most) / np.float32(1024)
            continue
        away = np.where(np.isfinite(y), y - mean, np.float32(0))
        told = [mean + rate * away, distance + rate * (np.abs(away) - distance)]
        for at, new in enumerate(told):
            new = np.clip(np.rint(new * 1024), least, most) / np.float32(1024)
            told[at] = np.where(np.isfinite(y), new, (mean, distance)[at])
        mean, distance = told
    assert np.array_equal(np.frombuffer(state.mean, "<i2"), mean * 1024)
    assert np.array_equal(np.frombuffer(state.distance, "<i2"), distance * 1024)


def test_what_a_band_remembers_beside_its_state_changes_nothing() -> None:
    config, wide = layer_band.BandConfig(warmup=4), layer_band.BandConfig(warmup=4, factor=100.0)
    state = layer_band.BandState()
    for t in range(8):
        state, _ = layer_band.observe(state, f32([1.0, 2.0]), t, config)
    fresh, data = replace(state), msgspec.msgpack.encode(state)
    assert layer_band.observe(state, f32([1.0, 20.0]), 8, config)[1].out == (1,)
    assert layer_band.observe(state, f32([1.0, 20.0]), 8, wide)[1].out == ()
    assert layer_band.observe(state, f32([1.0, 20.0]), 8, config)[1].out == (1,)
    assert state == fresh
    assert hash(state) == hash(fresh)
    assert msgspec.msgpack.encode(state) == data


def test_without_an_order_the_farthest_layer_is_the_first() -> None:
    config, state = layer_band.BandConfig(warmup=8), layer_band.BandState()
    for t in range(20):
        state, _ = layer_band.observe(state, f32([1.0, 2.0, 3.0]), t, config, forward=False)
    column = f32([50.0, 2.0, 3000.0])
    _, reading = layer_band.observe(state, column, 20, config, forward=False)
    assert reading.first == (2, 0)


def test_a_warm_band_learns_every_few_steps_and_is_the_same_value_between() -> None:
    config, state = layer_band.BandConfig(warmup=8), layer_band.BandState()
    same = 0
    for t in range(8 + 40):
        before = state
        state, _ = layer_band.observe(state, f32([1.0 + 0.1 * (t % 5)]), t, config)
        same += state is before
    assert same == 40 - 2  # it learns at steps 23 and 39
    # The mean follows a slow drift all the same.
    for t in range(48, 2000):
        state, reading = layer_band.observe(state, f32([np.exp(0.005 * t)]), t, config)
        assert not reading.out


def test_a_new_level_is_a_layers_own_after_a_while() -> None:
    config = layer_band.BandConfig(warmup=8, patience=20)
    state = layer_band.BandState()
    outs = []
    for t in range(120):
        column = f32([1.0, 1.0 if t < 20 else 30.0])
        state, reading = layer_band.observe(state, column, t, config)
        outs.append(bool(reading.out))
    assert outs.index(True) == 20
    assert outs.count(True) == 20


@pytest.mark.parametrize(
    ("module", "first", "config", "value"),
    [
        (norm_trend, norm_trend.TrendState(), norm_trend.TrendConfig(), 2.0),
        (loss_shape, loss_shape.ShapeState(), loss_shape.ShapeConfig(), 3.0),
        (stale_grads, stale_grads.StaleState(), stale_grads.StaleConfig(), 2.0),
        (loss_scale, loss_scale.ScaleState(), loss_scale.ScaleConfig(), 1024.0),
        (throughput, throughput.PaceState(), throughput.PaceConfig(), 1e5),
    ],
    ids=lambda x: getattr(x, "__name__", "").rpartition(".")[2],
)
def test_states_are_bounded_values_that_survive_being_saved(
    module: Any, first: Any, config: Any, value: float
) -> None:
    rng = np.random.default_rng(0)
    state, sizes = first, []
    for t in range(3000):
        moved: list[Any] = [value * float(np.exp(0.1 * rng.normal()))]
        if module is norm_trend:
            moved = [(moved[0], moved[0])]
        state, _ = module.observe(state, moved, config)
        if t in (1500, 2999):
            saved = msgspec.msgpack.encode(state)
            sizes.append(len(saved))
            again = msgspec.msgpack.decode(saved, type=type(state))
            assert again == state
            assert repr(module.observe(again, moved, config)) == repr(
                module.observe(state, moved, config)
            )
    assert sizes[1] <= sizes[0] * 1.2


def test_bands_are_bounded_values_that_survive_being_saved() -> None:
    rng = np.random.default_rng(0)
    config, state, sizes = layer_band.BandConfig(), layer_band.BandState(), []
    for t in range(3000):
        column = f32([1.0, 2.0] * np.exp(0.1 * rng.normal(size=2)))
        state, _ = layer_band.observe(state, column, t, config)
        if t in (1500, 2999):
            saved = msgspec.msgpack.encode(state)
            sizes.append(len(saved))
            again = msgspec.msgpack.decode(saved, type=layer_band.BandState)
            assert again == state
            assert layer_band.observe(again, column, t + 1, config) == layer_band.observe(
                state, column, t + 1, config
            )
    assert sizes[1] <= sizes[0] * 1.2


def test_of_a_run_of_rising_norms_one_may_fall() -> None:
    config = stale_grads.StaleConfig(window=12, growth=1.5)
    rising = [1.0 + 0.1 * t for t in range(12)]

    def flagged(series: list[float]) -> bool:
        return stale_grads.observe(stale_grads.StaleState(), series, config)[1].flagged

    assert flagged(rising)
    assert not flagged(rising[1:]), "too few"
    assert not flagged([v**0.5 for v in rising]), "too little"
    once, twice = rising.copy(), rising.copy()
    once[4] = twice[4] = twice[8] = 1.0
    assert flagged(once)
    assert not flagged(twice)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0])
def test_no_value_raises_and_none_stays_for_good(bad: float) -> None:
    config, state = layer_band.BandConfig(), layer_band.BandState()
    for t in range(400):
        column = f32([bad if t in (0, 200) else 2.0 + 0.01 * (t % 5), 1])
        state, reading = layer_band.observe(state, column, t, config)
    assert not reading.out
    stale = stale_grads.StaleState((1.0, 2.0))
    if bad != 0.0:
        stale, found = stale_grads.observe(stale, [bad], stale_grads.StaleConfig())
        assert (stale, found.flagged) == (stale_grads.StaleState(), False)


@pytest.mark.parametrize("block", [1, 7, 16])
def test_how_many_steps_come_at_once_changes_what_is_judged_and_not_what_is_known(
    block: int,
) -> None:
    rng = np.random.default_rng(4)
    values = [float(v) for v in np.exp(0.1 * rng.normal(size=7 * 16 * 10))]
    for module, state, config in (
        (loss_scale, loss_scale.ScaleState(), loss_scale.ScaleConfig()),
        (throughput, throughput.PaceState(), throughput.PaceConfig()),
        (stale_grads, stale_grads.StaleState(), stale_grads.StaleConfig()),
        (norm_trend, norm_trend.TrendState(), norm_trend.TrendConfig()),
    ):
        series: Any = [(v, v) for v in values] if module is norm_trend else values
        one: Any = state
        many: Any = state
        for value in series:
            one, _ = module.observe(one, [value], config)  # type: ignore[attr-defined]
        for at in range(0, len(series), block):
            many, _ = module.observe(many, series[at : at + block], config)  # type: ignore[attr-defined]
        assert many == one


# Steps 160 to 239 of a GRU that learns to forecast, from 0.17 on its way to 0.0001 (a real run):
# losses [1e-6] and gradient norms [1e-4].
FORECAST_LOSSES = [
    820, 1024, 495, 807, 529, 487, 825, 972, 610, 833, 860, 944, 648, 760, 608, 1167, 539, 510,
    1372, 1178, 858, 665, 716, 915, 711, 1410, 418, 355, 482, 1238, 538, 885, 814, 446, 935, 1113,
    820, 598, 352, 1055, 1046, 793, 825, 205, 455, 547, 573, 627, 563, 526, 407, 730, 283, 824,
    849, 486, 632, 871, 501, 1146, 870, 370, 507, 940, 495, 218, 1270, 669, 456, 793, 872, 338,
    771, 501, 598, 665, 1381, 726, 617, 978,
]  # fmt: skip
FORECAST_NORMS = [
    319, 228, 450, 550, 324, 287, 495, 1088, 260, 669, 573, 811, 541, 1020, 786, 359, 833, 248,
    1319, 1237, 560, 229, 455, 519, 819, 1219, 436, 141, 309, 1402, 757, 775, 792, 292, 1112,
    1173, 1037, 650, 724, 813, 753, 719, 639, 183, 293, 751, 534, 359, 54, 560, 903, 420, 626,
    947, 734, 440, 1258, 1048, 270, 1132, 1443, 133, 733, 1062, 832, 324, 1245, 802, 315, 1388,
    664, 373, 1148, 672, 688, 763, 1951, 1175, 1112, 1466,
]  # fmt: skip


def test_the_wiggle_of_a_loss_that_falls_is_no_rise() -> None:
    series = [(n * 1e-4, v * 1e-6) for v, n in zip(FORECAST_LOSSES, FORECAST_NORMS, strict=True)]
    for run_away in (False, True):
        state, raised = norm_trend.TrendState(), []
        for at in range(0, len(series), 16):
            state, reading = norm_trend.observe(
                state, series[at : at + 16], norm_trend.TrendConfig()
            )
            raised.append(reading.together)
        assert raised == [False, False, False, run_away, run_away]
        # The same noise on a loss that really runs away.
        rise = [1.0] * 48 + [math.exp(0.15 * i) for i in range(32)]
        series = [(n * f, v * f) for (n, v), f in zip(series, rise, strict=True)]


def test_what_was_not_measured_says_nothing() -> None:
    config = resources.ResourceConfig()
    assert not resources.low_headroom(None, config)
    assert not resources.clip_pressure(None, 0.1, config)
    assert resources.collapsed(f32([NOT_MEASURED, math.nan]), config) == ()
    state = throughput.PaceState()
    assert throughput.observe(state, [], throughput.PaceConfig())[0] is state
    assert loss_scale.observe(loss_scale.ScaleState(), [], loss_scale.ScaleConfig())[1] == (
        loss_scale.ScaleReading()
    )


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: depth.DepthConfig(total=0.5), "depth.total must lie between 1 and 1e+12, got 0.5"),
        (lambda: layer_outlier.OutlierConfig(least=1), "layer_outlier.least must"),
        (lambda: layer_band.BandConfig(width=0.0), "layer_band.width must"),
        (lambda: norm_trend.TrendConfig(short=2), "norm_trend.short must"),
        (lambda: loss_shape.ShapeConfig(swing=-1.0), "loss_shape.swing must"),
        (lambda: stale_grads.StaleConfig(growth=0.5), "stale_grads.growth must"),
        (lambda: loss_scale.ScaleConfig(window=1), "loss_scale.window must"),
        (lambda: throughput.PaceConfig(drop=2.0), "throughput.drop must"),
        (lambda: throughput.PaceConfig(recent=100), "throughput.window must be at least twice"),
        (lambda: loss_shape.ShapeConfig(length=129), "loss_shape.length must be at most"),
        (lambda: resources.ResourceConfig(headroom=2.0), "resources.headroom must"),
    ],
)
def test_a_setting_out_of_bounds_is_refused_by_name(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make()
    assert text in str(raised.value)


def test_a_band_learns_the_same_whether_or_not_another_layer_was_measured() -> None:
    config, rng = layer_band.BandConfig(), np.random.default_rng(3)
    alone = beside = layer_band.BandState()
    for t in range(100):
        column = np.exp(rng.normal(0.0, 1.5, 7)).astype(np.float32)
        alone, _ = layer_band.observe(alone, column, t, config)
        beside, _ = layer_band.observe(beside, np.append(column, f32([NOT_MEASURED])), t, config)
        assert beside.mean[:-2] == alone.mean
        assert beside.distance[:-2] == alone.distance
        assert (beside.seen, beside.learned) == (alone.seen, alone.learned)

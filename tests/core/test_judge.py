"""Judging one step: what a changed batch regime does to the norm's baseline."""

from __future__ import annotations

import pytest

from sentinel.core.judge import REGIME_STEPS
from sentinel.core.types import Status
from tests.core.test_engine import Run

SHAPES = ((1, 8), (2, 8))


def armed() -> Run:
    run = Run()
    for _ in range(20):
        run.step(shape=SHAPES[0])
    assert run.decisions[-1].readings.norm_status is Status.NORMAL
    return run


def test_a_new_batch_regime_reopens_the_warm_up() -> None:
    run = armed()
    for _ in range(REGIME_STEPS):
        run.step(shape=SHAPES[1])
    assert run.step(shape=SHAPES[1], norm=50.0).readings.norm_status is Status.WARMING_UP
    assert run.state.stats.shape == SHAPES[1]


@pytest.mark.parametrize("odd", [1, REGIME_STEPS - 1])
def test_a_few_smaller_batches_are_no_new_regime(odd: int) -> None:
    run = armed()
    for _ in range(3):
        for _ in range(odd):
            run.step(shape=SHAPES[1])
        run.step(shape=SHAPES[0])
    assert run.step(shape=SHAPES[0], norm=50.0).readings.norm_status is Status.SPIKE


def test_an_unknown_shape_is_no_new_regime() -> None:
    run = armed()
    for _ in range(2 * REGIME_STEPS):
        run.step(shape=())
    assert run.step(norm=50.0).readings.norm_status is Status.SPIKE

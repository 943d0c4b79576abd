"""A real GPT on a slow ramp of its learning rate: the flag speaks before the loss does.

One ramp and one seed of the study in tests/bench/logit_growth.py, whose table is in
docs/signals.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.logit_growth import Rate, train

pytestmark = [pytest.mark.torch, pytest.mark.slow]

RAMP = Rate(1e-3, 1.02)
SEED, STEPS = 1, 500


def test_without_qk_norm_the_flag_comes_well_before_the_first_word_of_the_loss(
    tmp_path: Path,
) -> None:
    run = train(RAMP, False, SEED, STEPS, tmp_path)
    assert run.flag is not None
    assert run.hot is not None
    assert run.ruined is not None
    assert run.flag + 20 < run.hot, run
    assert run.flag + 20 < run.ruined, run


def test_with_qk_norm_the_same_ramp_ends_in_ruin_unflagged(tmp_path: Path) -> None:
    run = train(RAMP, True, SEED, STEPS, tmp_path)
    assert run.hot is not None
    assert run.ruined is not None  # it is no cure for a learning rate without bounds
    assert run.largest < 50
    assert run.flag is None or run.flag > run.ruined

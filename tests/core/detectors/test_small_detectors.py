"""The detectors without memory: non-finite, attention logit, update ratio, norm band."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sentinel.core.detectors import attention_logit, nonfinite, norm_band, update_ratio
from sentinel.core.detectors.attention_logit import AttentionLogitConfig
from sentinel.core.detectors.norm_band import Band, NormBandConfig
from sentinel.core.detectors.update_ratio import UpdateRatioConfig
from sentinel.core.errors import ConfigError
from sentinel.core.types import Column, Observation, Severity

nan, inf = math.nan, math.inf


def column(*values: float) -> Column:
    return np.array(values, dtype=np.float32)


@pytest.mark.parametrize(
    ("observation", "expected"),
    [
        (Observation(0), ()),
        (Observation(0, loss=2.0, grad_norm=1.0, params_finite=True), ()),
        (Observation(0, loss=nan), ("loss",)),
        (Observation(0, loss=2.0, grad_norm=inf), ("grad",)),
        (Observation(0, params_finite=False), ("params",)),
        (Observation(0, loss=-inf, grad_norm=nan, params_finite=False), ("loss", "grad", "params")),
    ],
)
def test_non_finite_signals_are_named(observation: Observation, expected: tuple[str, ...]) -> None:
    assert nonfinite.judge(observation) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((), ()),
        ((1.0, 50.0, 3.0), ()),
        ((51.0, 3.0, 80.0), (2, 0)),
        ((51.0, nan, 80.0), (1, 2, 0)),
        ((inf, 3.0), (0,)),
        ((-inf, 3.0), ()),
    ],
)
def test_layers_above_the_logit_threshold_come_worst_first(
    values: tuple[float, ...], expected: tuple[int, ...]
) -> None:
    assert attention_logit.judge(column(*values), AttentionLogitConfig()) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param((), (), id="no layers"),
        pytest.param((1e-3, 2e-3, 5e-4, 1e-3), (), id="healthy"),
        pytest.param((1e-3, 0.2, 5e-4, 1e-3), (1,), id="a fifth of itself in one step"),
        pytest.param((1e-3, 0.05, 1e-3, 1e-3), (1,), id="fifty times the others"),
        pytest.param((1e-5, 5e-4, 1e-5, 1e-5), (), id="fifty times, but all of them tiny"),
        pytest.param((1e-3, 5e-7, 1e-3, 1e-3), (1,), id="two thousand times below the others"),
        pytest.param((1e-3, 0.0, 1e-3, 1e-3), (), id="a frozen layer"),
        pytest.param((0.0, 0.0, 1e-3, 0.05), (), id="too few layers for a median"),
        pytest.param((1e-3, nan, 0.5, inf), (1, 3, 2), id="nan and inf are worst"),
        pytest.param((1e-3, 0.05, 1e-3, 1e-3, 5e-7), (1, 4), id="fast before slow"),
    ],
)
def test_layers_out_of_line_come_worst_first(
    values: tuple[float, ...], expected: tuple[int, ...]
) -> None:
    assert update_ratio.judge(column(*values), UpdateRatioConfig()) == expected


@pytest.mark.parametrize(
    ("norm", "band", "severity"),
    [
        (None, Band.ABSENT, None),
        (nan, Band.NONFINITE, None),
        (inf, Band.NONFINITE, None),
        (0.3, Band.BELOW, Severity.INFO),
        (1.0, Band.INSIDE, None),
        (10.0, Band.INSIDE, None),
        (10.1, Band.ABOVE, Severity.INFO),
        (50.1, Band.ALARM, Severity.WARNING),
    ],
)
def test_the_norm_is_placed_in_its_band(
    norm: float | None, band: Band, severity: Severity | None
) -> None:
    reading = norm_band.judge(norm, NormBandConfig(low=1.0))
    assert (reading.band, reading.severity) == (band, severity)


@pytest.mark.parametrize("norm", [0.0, 1e-9, 0.3, 1.0, 9.9])
def test_no_norm_is_too_small_unless_somebody_asks(norm: float) -> None:
    assert norm_band.judge(norm, NormBandConfig()).severity is None


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"norm_band\.high must lie between 0 and 50, got 60"):
        NormBandConfig(high=60.0)
    with pytest.raises(ConfigError, match=r"attention_logit\.threshold .* got nan"):
        AttentionLogitConfig(threshold=nan)
    with pytest.raises(ConfigError, match=r"update_ratio\.least must lie between 2 and"):
        UpdateRatioConfig(least=1)

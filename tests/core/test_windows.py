"""Order statistics: the same numbers as numpy, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sentinel.core.windows import mad, median, quantile

windows = st.lists(st.floats(-1e6, 1e6) | st.integers(-3, 3).map(float), min_size=1, max_size=40)


@given(windows)
def test_median_is_numpys(values: list[float]) -> None:
    assert median(sorted(values)) == np.median(values)


@given(windows)
def test_mad_is_the_median_distance_from_the_median(values: list[float]) -> None:
    centre = float(np.median(values))
    assert mad(sorted(values), centre) == np.median(np.abs(np.asarray(values) - centre))


@given(windows, st.floats(-10, 10))
def test_mad_may_be_taken_from_any_centre(values: list[float], centre: float) -> None:
    assert mad(sorted(values), centre) == np.median(np.abs(np.asarray(values) - centre))


@given(windows, st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0]))
def test_quantile_is_numpys_linear_one(values: list[float], q: float) -> None:
    assert quantile(sorted(values), q) == np.quantile(values, q)


@given(windows, st.floats(-10, 10))
def test_quantile_may_be_taken_above_any_centre(values: list[float], centre: float) -> None:
    expected = np.quantile(np.asarray(values) - centre, 0.9)
    assert quantile(sorted(values), 0.9, centre) == expected


@pytest.mark.parametrize("n", [1, 2, 3, 4, 47, 48, 63, 64])
def test_ties_do_not_lead_the_search_astray(n: int) -> None:
    values = [2.0] * (n // 2) + [5.0] * (n - n // 2)
    centre = float(np.median(values))
    assert mad(values, centre) == np.median(np.abs(np.asarray(values) - centre))

"""Stale-gradient detector: was `zero_grad` forgotten?

    observe(state, norms, config) -> (next state, StaleReading(flagged, fit))

Takes the norms of the steps since it was last asked, one or many.

Gradients that nobody drops add up: while they still point the same way, the norm grows in
proportion to the steps, along a straight line through its window, where a healthy norm scatters
about a level. Flagged when a line through the last `window` norms explains `fit` of their variance
and the last is `growth` times the first.

Units:   norm as measured; fit = R^2. On a 12-block model that piles up, R^2 stays above 0.9 for 40
         steps; on its healthy twin it reaches 0.7 (tests/acceptance/test_flags_on_models.py).
Purity:  state is an immutable value of bounded size.
Errors:  StaleConfig raises ConfigError. A norm that is not finite empties the window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sentinel.core import bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleConfig:
    """Settings; see the module docstring."""

    window: int = 12
    fit: float = 0.9
    growth: float = 2.0

    def __post_init__(self) -> None:
        bounds.check(
            "stale_grads",
            window=(self.window, 6, 512),
            fit=(self.fit, 0.0, 1.0),
            growth=(self.growth, 1.0, 1e6),
        )


@dataclass(frozen=True, slots=True)
class StaleState:
    """The last norms, oldest first; one less than the window."""

    norms: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StaleReading:
    """`fit` is that of the last window that had grown enough, nan where none had."""

    flagged: bool = False
    fit: float = math.nan


def observe(
    state: StaleState, norms: Sequence[float], config: StaleConfig
) -> tuple[StaleState, StaleReading]:
    """Take in the norms of the steps since the last call; every place of the window is judged."""
    n = config.window
    seen = list(state.norms)
    flagged, fit = False, math.nan
    for norm in norms:
        if not math.isfinite(norm):
            seen = []
            continue
        seen.append(norm)
        # The growth is the cheap part of the question, and hardly ever there.
        if len(seen) >= n and norm >= config.growth * seen[-n]:
            fit = _fit(seen[-n:])
            flagged = flagged or fit >= config.fit
    return StaleState(tuple(seen[1 - n :])), StaleReading(flagged, fit)


def _fit(norms: list[float]) -> float:
    """R^2 of a rising line; 0 for a falling one."""
    n, largest = len(norms), max(norms)
    norms = [v / largest for v in norms] if largest > 0 else norms  # squares must not overflow
    middle_t, middle = (n - 1) / 2, sum(norms) / n
    along = sum([(t - middle_t) * (v - middle) for t, v in enumerate(norms)])
    spread = sum([(v - middle) * (v - middle) for v in norms])
    return along * along * 12 / (n * (n * n - 1) * spread) if spread > 0 and along > 0 else 0.0

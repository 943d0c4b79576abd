"""Stale-gradient detector: was `zero_grad` forgotten?

    observe(state, norm, config) -> (next state, StaleReading(flagged, fit))

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
    """The last norms, oldest first."""

    norms: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StaleReading:
    """`fit` is nan while the window fills."""

    flagged: bool = False
    fit: float = math.nan


def observe(
    state: StaleState, norm: float | None, config: StaleConfig
) -> tuple[StaleState, StaleReading]:
    """Take in one step."""
    if norm is None:
        return state, StaleReading()
    if not math.isfinite(norm):
        return StaleState(), StaleReading()
    norms = (*state.norms, norm)[-config.window :]
    if len(norms) < config.window:
        return StaleState(norms), StaleReading()
    n = len(norms)
    middle_t, middle = (n - 1) / 2, sum(norms) / n
    along = sum((t - middle_t) * (v - middle) for t, v in enumerate(norms))
    spread_t = sum((t - middle_t) ** 2 for t in range(n))
    spread = sum((v - middle) ** 2 for v in norms)
    fit = along * along / (spread_t * spread) if spread > 0 else 0.0
    flagged = along > 0 and fit >= config.fit and norms[-1] >= config.growth * norms[0]
    return StaleState(norms), StaleReading(flagged, fit)

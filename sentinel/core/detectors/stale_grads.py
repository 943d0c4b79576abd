"""Stale-gradient detector: was `zero_grad` forgotten?

    observe(state, norms, config) -> (next state, StaleReading(flagged, fit))

Takes the norms of the steps since it was last asked, one or many.

Gradients that nobody drops add up: while they still point the same way, the norm grows in
proportion to the steps, along a straight line through its window, where a healthy norm scatters
about a level. Flagged when a line through the last `window` norms explains `fit` of their variance
and the last is `growth` times the first.

At the learning rates of real training the sum soon leaves the line; but hardly a step takes it
down, for one batch is a small part of it. So it is flagged too when, of the last `run` norms, all
but one are above the one before, and the last is `rise` times the first.

Units:   norm as measured; fit = R^2. On a model that piles up at rate 1e-4, R^2 is 0.97 and the
         norm doubles in 12 steps; at 1e-3 it does not, and rises at each of 48 steps
         (tests/acceptance/test_flags_on_models.py).
Purity:  state is an immutable value of bounded size.
Errors:  StaleConfig raises ConfigError. A norm that is not finite empties the window.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from sentinel.core import bounds

FALLS = 1  # that a run of rising norms may have


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleConfig:
    """Settings; see the module docstring."""

    window: int = 12
    fit: float = 0.9
    growth: float = 2.0
    run: int = 24
    rise: float = 1.5

    def __post_init__(self) -> None:
        bounds.check(
            "stale_grads",
            window=(self.window, 6, 512),
            fit=(self.fit, 0.0, 1.0),
            growth=(self.growth, 1.0, 1e6),
            run=(self.run, 12, 512),
            rise=(self.rise, 1.0, 1e6),
        )


@dataclass(frozen=True, slots=True)
class StaleState:
    """The last norms, oldest first; one less than the longer of the two windows."""

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
    n, run = config.window, config.run
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
        if len(seen) >= run and norm >= config.rise * seen[-run]:
            falls = sum([b <= a for a, b in itertools.pairwise(seen[-run:])])
            flagged = flagged or falls <= FALLS
    return StaleState(tuple(seen[1 - max(n, run) :])), StaleReading(flagged, fit)


def _fit(norms: list[float]) -> float:
    """R^2 of a rising line; 0 for a falling one."""
    n, largest = len(norms), max(norms)
    norms = [v / largest for v in norms] if largest > 0 else norms  # squares must not overflow
    middle_t, middle = (n - 1) / 2, sum(norms) / n
    along = sum([(t - middle_t) * (v - middle) for t, v in enumerate(norms)])
    spread = sum([(v - middle) * (v - middle) for v in norms])
    return along * along * 12 / (n * (n * n - 1) * spread) if spread > 0 and along > 0 else 0.0

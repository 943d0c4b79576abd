"""Stale-gradient detector: was `zero_grad` forgotten?

    observe(state, norms, config) -> (next state, StaleReading(flagged, ratio))

Takes the norms of the steps since it was last asked, one or many.

Gradients that nobody drops add up, and the norm with them. How fast depends on the learning rate:
in proportion to the steps while the weights hardly move, like a root of them at real rates. But
hardly a step takes the sum down, for one batch is a small part of it, where a healthy norm scatters
from step to step. Flagged when, of the last `window` norms, all but FALLS are above the one before,
and the last is `growth` times the first.

Units:   norm as measured; ratio = last / first of a window. GPTs of 6 blocks that pile up at rates
         from 1e-4 to 3e-3 rise so for 38 steps and more, their healthy twins for at most 8
         (tests/acceptance/ill_models.py). A straight line that explains 0.9 of the variance of 12
         norms, which was asked for at first, missed the one and was there in the other.
Purity:  state is an immutable value of bounded size.
Errors:  StaleConfig raises ConfigError. A norm that is not finite empties the window.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from sentinel.core import bounds

FALLS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleConfig:
    """Settings; see the module docstring."""

    window: int = 24
    growth: float = 1.5

    def __post_init__(self) -> None:
        bounds.check(
            "stale_grads",
            window=(self.window, 12, 512),
            growth=(self.growth, 1.0, 1e6),
        )


@dataclass(frozen=True, slots=True)
class StaleState:
    """The last norms, oldest first; one less than the window."""

    norms: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StaleReading:
    """`ratio` is that of the last window that had risen so, nan where none had."""

    flagged: bool = False
    ratio: float = math.nan


def observe(
    state: StaleState, norms: Sequence[float], config: StaleConfig
) -> tuple[StaleState, StaleReading]:
    """Take in the norms of the steps since the last call; every place of the window is judged."""
    n = config.window
    seen = list(state.norms)
    ratio = math.nan
    for norm in norms:
        if not math.isfinite(norm):
            seen = []
            continue
        seen.append(norm)
        # The growth is the cheap part of the question, and hardly ever there.
        if len(seen) >= n and norm >= config.growth * seen[-n] > 0.0:
            falls = sum([b <= a for a, b in itertools.pairwise(seen[-n:])])
            if falls <= FALLS:
                ratio = norm / seen[-n]
    return StaleState(tuple(seen[1 - n :])), StaleReading(ratio == ratio, ratio)

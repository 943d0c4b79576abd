"""Throughput detector: has training become lastingly slower?

    observe(state, rates, config) -> (next state, PaceReading(slow, ratio))

Takes the rates of the steps since it was last asked, one or many. Every `recent` steps their median
is compared with the median of such medians over the `window` steps before them: an evaluation or a
checkpoint in between moves no median. What is slow does not become usual, for `patience` steps;
then the new pace is taken for the usual one.

Units:   tokens / s, or any rate; ratio to the usual one; window, recent, patience [steps].
Purity:  state is an immutable value of bounded size.
Errors:  PaceConfig raises ConfigError. Rates that are not positive numbers are to be left out.
Source:  20 % is beyond the jitter of a shared cluster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sentinel.core import bounds
from sentinel.core.errors import ConfigError
from sentinel.core.windows import median


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceConfig:
    """Settings; see the module docstring."""

    window: int = 128
    recent: int = 16
    drop: float = 0.2
    patience: int = 256

    def __post_init__(self) -> None:
        bounds.check(
            "throughput",
            window=(self.window, 16, 4096),
            recent=(self.recent, 4, 512),
            drop=(self.drop, 0.0, 1.0),
            patience=(self.patience, 1, 1_000_000),
        )
        if self.window < 2 * self.recent:
            raise ConfigError(
                f"throughput.window must be at least twice throughput.recent ({self.recent} "
                f"steps), got {self.window}"
            )


@dataclass(frozen=True, slots=True)
class PaceState:
    """What the detector remembers.

    Attributes:
        usual: medians of the segments that count as usual, oldest first.
        filling: rates of the segment that is being filled.
        slow_for: segments in a row that were slow.
        ratio: of the last whole segment; nan is written as 0.
    """

    usual: tuple[float, ...] = ()
    filling: tuple[float, ...] = ()
    slow_for: int = 0
    ratio: float = 0.0


@dataclass(frozen=True, slots=True)
class PaceReading:
    """`ratio` is nan until there is a usual pace; between two segments the last answer stands."""

    slow: bool = False
    ratio: float = math.nan


def observe(
    state: PaceState, rates: Sequence[float], config: PaceConfig
) -> tuple[PaceState, PaceReading]:
    """Take in the rates since the last call; all finite and positive."""
    if not rates:
        return state, PaceReading()
    usual, slow_for, ratio = state.usual, state.slow_for, state.ratio
    filling = [*state.filling, *rates]
    while len(filling) >= config.recent:
        now = median(sorted(filling[: config.recent]))
        filling = filling[config.recent :]
        known = len(usual) * config.recent >= config.window // 2
        ratio = now / median(sorted(usual)) if known else 0.0
        if not known or ratio >= 1.0 - config.drop:
            slow_for = 0
            usual = (*usual, now)[-(config.window // config.recent) :]
        else:
            slow_for += 1
            if slow_for * config.recent > config.patience:
                usual, slow_for = (now,), 0
    following = PaceState(usual, tuple(filling), slow_for, ratio)
    return following, PaceReading(slow_for > 0, ratio or math.nan)

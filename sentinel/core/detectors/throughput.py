"""Throughput detector: has training become lastingly slower?

    observe(state, tokens_per_second, config) -> (next state, PaceReading(slow, ratio))

The median of the last `recent` steps against the median of the `window` steps before them: an
evaluation or a checkpoint in between moves no median. After `patience` slow steps the new pace is
taken for the usual one.

Units:   tokens / s, or any rate; ratio to the usual one.
Purity:  state is an immutable value of bounded size.
Errors:  PaceConfig raises ConfigError.
Source:  20 % is beyond the jitter of a shared cluster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sentinel.core import bounds
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


@dataclass(frozen=True, slots=True)
class PaceState:
    """Rates that count as usual, and those of the last steps; oldest first."""

    usual: tuple[float, ...] = ()
    last: tuple[float, ...] = ()
    slow_for: int = 0


@dataclass(frozen=True, slots=True)
class PaceReading:
    """`ratio` is nan until there is a usual pace."""

    slow: bool = False
    ratio: float = math.nan


def observe(
    state: PaceState, rate: float | None, config: PaceConfig
) -> tuple[PaceState, PaceReading]:
    """Take in one step."""
    if rate is None or not math.isfinite(rate) or rate <= 0:
        return state, PaceReading()
    last = (*state.last, rate)
    usual = state.usual
    slow, ratio = False, math.nan
    if len(usual) >= config.window // 2 and len(last) > config.recent:
        ratio = median(sorted(last[-config.recent :])) / median(sorted(usual))
        slow = ratio < 1.0 - config.drop
    if slow and state.slow_for >= config.patience:
        return PaceState(last[-config.recent :]), PaceReading(slow, ratio)
    if len(last) > config.recent:
        if not slow:  # what is slow shall not become usual while it is told
            usual = (*usual, last[0])[-config.window :]
        last = last[1:]
    return PaceState(usual, last, state.slow_for + 1 if slow else 0), PaceReading(slow, ratio)

"""Gradient-norm detector: is this step's norm more than 10 x its historical mean?

    judge(state, norm, config) -> Reading        (status, value, baseline = mean, score = ratio)
    accept(state, norm, config) -> NormState     for each applied step that nothing flagged

"Historical mean" is the mean of the last `window` accepted, finite, pre-clip norms. A mean since
the start would be wrong: norms fall a hundredfold early on, and "10 x" would then mean 211 x the
norm of now. For the same reason the rule is armed only after `warmup` norms and while the medians
of the two halves of its window differ by less than `flatness`: a baseline that is still moving is
no baseline. Unarmed is a reading of its own, WARMING_UP. A norm that is not finite is NONFINITE
from the first step on.

Units:   norms as measured; score [ratio to the mean]; window, warmup [accepted steps].
Purity:  no clock, no I/O, no randomness.
Errors:  NormConfig raises ConfigError. judge() and accept() never raise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sentinel.core import bounds
from sentinel.core.errors import ConfigError
from sentinel.core.quick import quick
from sentinel.core.types import Reading, Status
from sentinel.core.windows import LARGEST, last_below, median

# The halves are compared again after this many accepted norms: sorting them each step would cost
# more than the rest of the detector, and a trend does not turn within four steps.
RECHECK = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class NormConfig:
    """Settings of the gradient-norm rule; see the module docstring."""

    factor: float = 10.0
    window: int = 128
    warmup: int = 64
    flatness: float = 1.5

    def __post_init__(self) -> None:
        bounds.check(
            "grad_norm",
            factor=(self.factor, 1.0, 1e6),
            window=(self.window, 2, 100_000),
            flatness=(self.flatness, 1.0, 1e6),
        )
        if not 2 <= self.warmup <= self.window:
            raise ConfigError(
                f"grad_norm.warmup must lie between 2 and grad_norm.window "
                f"({self.window} steps), got {self.warmup}"
            )


@quick
@dataclass(frozen=True, slots=True)
class NormState:
    """What the detector remembers.

    Attributes:
        norms: the last accepted norms, oldest first; at most `window`.
        since: norms accepted since the halves were last compared.
        flat: they differed by less than `flatness` then.
    """

    norms: tuple[float, ...] = ()
    since: int = 0
    flat: bool = False


def judge(state: NormState, norm: float | None, config: NormConfig) -> Reading:
    """Compare `norm` with the mean of the accepted ones; the state does not change."""
    if norm is None:
        return Reading(Status.ABSENT)
    if not norm < math.inf:
        return Reading(Status.NONFINITE, norm, None, math.inf)
    norms = state.norms
    if len(norms) < config.warmup or not state.flat:
        return Reading(Status.WARMING_UP, norm)
    mean = sum(norms) / len(norms)
    if mean <= 0.0:
        return Reading(Status.WARMING_UP, norm)
    ratio = norm / mean
    status = Status.SPIKE if ratio > config.factor else Status.NORMAL
    return Reading(status, norm, mean, ratio)


def limit(state: NormState, config: NormConfig) -> float:
    """The largest norm that judge() does not call a SPIKE; LARGEST while it is not armed."""
    mean = judge(state, 0.0, config).baseline
    if mean is None:
        return LARGEST
    return last_below(lambda norm: norm / mean > config.factor, config.factor * mean)


def accept(state: NormState, norm: float | None, config: NormConfig) -> NormState:
    """Take the norm of an applied, unflagged step into the mean."""
    if norm is None or not 0.0 <= norm < math.inf:
        return state
    norms = state.norms
    if len(norms) >= config.window:
        norms = norms[len(norms) - config.window + 1 :]
    norms = (*norms, norm)
    n = len(norms)
    if n < config.warmup:
        return NormState(norms)
    since = state.since + 1
    if n > config.warmup and since < RECHECK:
        return NormState(norms, since, state.flat)
    older = median(sorted(norms[: n // 2]))
    newer = median(sorted(norms[n // 2 :]))
    flat = max(older, newer) < config.flatness * min(older, newer)
    return NormState(norms, 0, flat)


def restart(state: NormState) -> NormState:
    """Forget the norms: another regime of batches has begun."""
    return NormState()

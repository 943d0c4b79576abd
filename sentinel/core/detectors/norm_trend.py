"""Norm-trend detector: does the gradient norm rise steadily, and the loss with it?

    observe(state, pairs, config) -> (next state, TrendReading(rising, ratio, together))

Takes the (norm, loss) of the steps since it was last asked, one or many, and judges once, at the
newest.

Steadily: the medians of `segments` segments of `length` steps each rise from one to the next, all
but one of them, and the last is `factor` times the first, of which the newer half has its share;
and the loss has not fallen by `loss_fall` of itself from the first segment to the last. A single
spike moves no median. A norm that grows out of a small start is healthy: with embeddings and plain
deep networks the loss falls fast meanwhile, with adapters that begin at 0 the norm soon stays where
it is. One that is ill still rises when the loss has slowed down. The reading behind it: init
variance too large, a normalisation missing.

Together: within the last `short` steps the median of the newer half is above that of the older one
for both, by `loss_rise` and `norm_rise`; and that of the loss is above every loss of the older half
(two medians of eight differ by noise alone) and above the median of the `BEFORE` times as many
steps before them (the wiggle of a loss that falls is no rise). The reading behind it: the update
direction oscillates.

Units:   norm as measured; loss [nats/token]; ratio = last median / first median.
Purity:  state is an immutable value of bounded size.
Errors:  TrendConfig raises ConfigError. Norms that are not finite are to be left out; a loss that
         was not measured, or is not finite, is None.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from sentinel.core import bounds
from sentinel.core.windows import median

BEFORE = 1  # times `short` losses before the short ones say what level the loss had


@dataclass(frozen=True, slots=True, kw_only=True)
class TrendConfig:
    """Settings; see the module docstring."""

    segments: int = 8
    length: int = 32
    factor: float = 2.0
    loss_fall: float = 0.1
    short: int = 16
    loss_rise: float = 0.02
    norm_rise: float = 0.25

    def __post_init__(self) -> None:
        bounds.check(
            "norm_trend",
            segments=(self.segments, 4, 64),
            length=(self.length, 4, 4096),
            factor=(self.factor, 1.0, 1e6),
            loss_fall=(self.loss_fall, 0.0, 10.0),
            short=(self.short, 8, 512),
            loss_rise=(self.loss_rise, 0.0, 10.0),
            norm_rise=(self.norm_rise, 0.0, 100.0),
        )


@dataclass(frozen=True, slots=True)
class TrendState:
    """Medians of whole segments, what the one that is being filled has, the last pairs.

    Attributes:
        loss_medians, loss_filling: None where none was measured.
        losses, norms: the last `short` pairs; of the losses those of `BEFORE` times as many steps
            before them too.
    """

    medians: tuple[float, ...] = ()
    loss_medians: tuple[float | None, ...] = ()
    filling: tuple[float, ...] = ()
    loss_filling: tuple[float | None, ...] = ()
    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TrendReading:
    """`ratio` is nan until all segments are there."""

    rising: bool = False
    ratio: float = math.nan
    together: bool = False


def observe(
    state: TrendState, pairs: Sequence[tuple[float, float | None]], config: TrendConfig
) -> tuple[TrendState, TrendReading]:
    """Take in (norm, loss) of the steps since the last call."""
    if not pairs:
        return state, TrendReading()
    medians, filling = state.medians, [*state.filling, *[norm for norm, _ in pairs]]
    levels, beside = state.loss_medians, [*state.loss_filling, *[loss for _, loss in pairs]]
    length = config.length
    while len(filling) >= length:
        medians = (*medians, median(sorted(filling[:length])))[-config.segments :]
        known = sorted([loss for loss in beside[:length] if loss is not None])
        levels = (*levels, median(known) if known else None)[-config.segments :]
        filling, beside = filling[length:], beside[length:]
    both = [(loss, norm) for norm, loss in pairs if loss is not None]
    losses = (*state.losses, *[loss for loss, _ in both])[-(1 + BEFORE) * config.short :]
    norms = (*state.norms, *[norm for _, norm in both])[-config.short :]
    rising, ratio = False, math.nan
    if len(medians) == config.segments and medians[0] > 0:
        ratio = medians[-1] / medians[0]
        if ratio >= config.factor:
            ups = sum(b > a for a, b in itertools.pairwise(medians))
            half = config.segments // 2
            late = config.factor ** (1.0 - half / (config.segments - 1.0))
            rising = (
                ups >= config.segments - 2
                and medians[-1] >= late * medians[half]
                and not _fallen(levels, config.loss_fall)
            )
    together = (
        len(norms) == config.short
        and _rise(norms) >= config.norm_rise
        and _rise(losses[-config.short :]) >= config.loss_rise
        and _is_high(losses, config.short)
    )
    following = TrendState(medians, levels, tuple(filling), tuple(beside), losses, norms)
    return following, TrendReading(rising, ratio, together)


def _fallen(levels: tuple[float | None, ...], share: float) -> bool:
    """The last level is that much of the first below it; what was not measured has not fallen."""
    first, last = levels[0], levels[-1]
    return first is not None and last is not None and first - last > share * abs(first)


def _is_high(losses: tuple[float, ...], short: int) -> bool:
    """The newest half of `short` losses is above the noise and the level of those before it."""
    newest = short - short // 2
    newer = median(sorted(losses[-newest:]))
    before = sorted(losses[:-short])
    return newer > max(losses[-short:-newest]) and (not before or newer > median(before))


def _rise(values: tuple[float, ...]) -> float:
    """Median of the newer half over that of the older, less 1."""
    half = len(values) // 2
    older, newer = median(sorted(values[:half])), median(sorted(values[half:]))
    return newer / older - 1.0 if older > 0 else 0.0

"""Loss-shape detector: does the loss swing, stand still, or jump at regular steps?

    observe(state, losses, config) -> (next state, ShapeReading(swing, swinging, period, plateau))

Takes the losses since it was last asked, one or many, and judges once, at the newest.

Swing: the range of the last `swing_window` losses about their own line, without the one highest and
lowest, as a share of their median. 15 % and more: the learning rate is too high.

Period: within the last `window` losses one phase of some period p stands above all others, by
`lift` in ln and in nearly all of its occurrences: gradients of an accumulation are not divided, or
a data source comes round. Looked for every LOOK losses, and only if so many losses stand out at all
as a period of LONGEST would have.

Plateau: the median of the newest of `segments` segments of `length` losses is not even `progress`
lower than that of the oldest.

Units:   loss [nats/token]; swing, progress are shares; period [steps], 0 for none.
Purity:  state is an immutable value of bounded size.
Errors:  ShapeConfig raises ConfigError. Losses that are not finite are another detector's, and are
         to be left out.
Source:  swing: practitioners' rule. Lift and shares were chosen so that noise of 5 % has no period
         (tests/core/detectors/test_flags.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from sentinel.core import bounds
from sentinel.core.errors import ConfigError
from sentinel.core.windows import median

LOOK = 64
LONGEST = 32  # period [steps]
REGULAR = 0.8  # of a phase's occurrences must stand out

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeConfig:
    """Settings; see the module docstring."""

    swing_window: int = 16
    swing: float = 0.15
    window: int = 128
    lift: float = 0.03
    segments: int = 16
    length: int = 64
    progress: float = 0.005

    def __post_init__(self) -> None:
        bounds.check(
            "loss_shape",
            swing_window=(self.swing_window, 8, 512),
            swing=(self.swing, 0.0, 10.0),
            window=(self.window, 64, 4096),
            lift=(self.lift, 0.0, 10.0),
            segments=(self.segments, 2, 256),
            length=(self.length, 4, 4096),
            progress=(self.progress, 0.0, 1.0),
        )
        for name in ("swing_window", "length"):
            if getattr(self, name) > self.window:
                raise ConfigError(
                    f"loss_shape.{name} must be at most loss_shape.window ({self.window} losses), "
                    f"got {getattr(self, name)}"
                )


@dataclass(frozen=True, slots=True)
class ShapeState:
    """What the detector remembers.

    Attributes:
        losses: the last `window`, oldest first, as float64.
        medians: of whole segments, oldest first.
        seen: losses so far.
        period: what the last look for one found.
    """

    losses: bytes = b""
    medians: tuple[float, ...] = ()
    seen: int = 0
    period: int = 0


@dataclass(frozen=True, slots=True)
class ShapeReading:
    """`swing` is nan while its window fills."""

    swing: float = math.nan
    swinging: bool = False
    period: int = 0
    plateau: bool = False


def observe(
    state: ShapeState, losses: Sequence[float], config: ShapeConfig, *, swings: bool = True
) -> tuple[ShapeState, ShapeReading]:
    """Take in the losses since the last call; all finite.

    Args:
        swings: somebody wants to know whether it swings, half of the work of most calls.
    """
    if not losses:
        return state, ShapeReading(period=state.period)
    new = np.array(losses, dtype="<f8").tobytes()
    kept = (state.losses + new)[-8 * config.window :]
    window: Float64 = np.frombuffer(kept, "<f8")
    medians, seen, period = state.medians, state.seen + len(losses), state.period
    if seen // config.length != state.seen // config.length:
        newest = median(sorted(window[-config.length :].tolist()))
        medians = (*medians, newest)[-config.segments :]
    if len(window) == config.window and seen // LOOK != state.seen // LOOK:
        period = _period(window, config.lift)
    swing = math.nan
    if swings and len(window) >= config.swing_window:
        swing = _swing(window[-config.swing_window :].tolist())
    plateau = (
        len(medians) == config.segments
        and medians[0] > 0
        and medians[-1] > medians[0] * (1.0 - config.progress)
    )
    reading = ShapeReading(swing, swing >= config.swing, period, plateau)
    return ShapeState(kept, medians, seen, period), reading


def _swing(losses: list[float]) -> float:
    n, h = len(losses), len(losses) // 2
    slope = (median(sorted(losses[h:])) - median(sorted(losses[:h]))) / (n - h)
    flat = sorted([v - slope * i for i, v in enumerate(losses)])
    middle = abs(median(sorted(losses)))
    return (flat[-2] - flat[1]) / middle if middle else math.nan


def _period(losses: Float64, lift: float) -> int:
    """The shortest period of which one phase stands out; 0 for none."""
    n = len(losses)
    y = np.log(np.maximum(losses, 1e-6))
    t, squares = _offsets(n)
    y = y - (y.sum() / n + t * (float(t @ y) / squares))
    if not _many_stand_out(y, lift):
        return 0
    for p in range(2, LONGEST + 1):
        whole = n // p
        if whole < 4:
            break
        phases = y[n - whole * p :].reshape(whole, p)
        centre = np.median(phases, axis=0)
        best = int(centre.argmax())
        others = np.delete(phases, best, axis=1)
        usual = float(np.median(others))
        spread = 1.4826 * float(np.median(np.abs(others - usual)))
        bar = usual + max(lift, 3.0 * spread)
        if centre[best] > bar and float((phases[:, best] > bar).mean()) >= REGULAR:
            return p
    return 0


@lru_cache(maxsize=8)
def _offsets(n: int) -> tuple[Float64, float]:
    """Distance of each place from the middle, and the sum of their squares."""
    t: Float64 = np.arange(n, dtype=np.float64) - (n - 1) / 2
    t.flags.writeable = False
    return t, float(t @ t)


def _many_stand_out(y: Float64, lift: float) -> bool:
    """A cheap way out of the search, which costs a hundred times as much.

    Spread and level come from the lower part of the losses, where no spike is. A period of 2 lifts
    every other loss, and shows as neighbours on opposite sides.
    """
    if float(y[1:] @ y[:-1]) < -0.5 * float(y @ y):
        return True
    ordered = np.sort(y)
    n = len(ordered)
    usual = float(ordered[n // 3])
    spread = (usual - float(ordered[n // 10])) / 0.85  # both quantiles of a normal distribution
    high = y > usual + max(lift, 3.0 * spread)
    count = int((high[1:] & ~high[:-1]).sum())  # a block of bad batches is one
    return count >= REGULAR * (n // LONGEST)

"""Loss-shape detector: does the loss swing, stand still, or jump at regular steps?

    observe(state, loss, config) -> (next state, ShapeReading(swing, period, plateau))

Swing: the range of the last `swing_window` losses about their own line, without the one highest and
lowest, as a share of their median. 15 % and more: the learning rate is too high.

Period: within the last `window` losses one phase of some period p stands above all others, by
`lift` in ln and in nearly all of its occurrences: gradients of an accumulation are not divided, or
a data source comes round. Looked for every LOOK steps.

Plateau: the median of the newest of `segments` segments of `length` steps is not even `progress`
lower than that of the oldest.

Units:   loss [nats/token]; swing, progress are shares; period [steps], 0 for none.
Purity:  state is an immutable value of bounded size.
Errors:  ShapeConfig raises ConfigError. A loss that is not finite is another detector's.
Source:  swing: practitioners' rule. Lift and shares were chosen so that noise of 5 % has no period
         (tests/core/detectors/test_flags.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sentinel.core import bounds
from sentinel.core.windows import median

LOOK = 16
LONGEST = 32  # period [steps]
REGULAR = 0.8  # of a phase's occurrences must stand out


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
            window=(self.window, 4 * LOOK, 4096),
            lift=(self.lift, 0.0, 10.0),
            segments=(self.segments, 2, 256),
            length=(self.length, 4, 4096),
            progress=(self.progress, 0.0, 1.0),
        )


@dataclass(frozen=True, slots=True)
class ShapeState:
    """The last losses, the medians of whole segments, the losses of the one being filled."""

    losses: tuple[float, ...] = ()
    medians: tuple[float, ...] = ()
    filling: tuple[float, ...] = ()
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
    state: ShapeState, loss: float | None, config: ShapeConfig
) -> tuple[ShapeState, ShapeReading]:
    """Take in one step."""
    if loss is None or not math.isfinite(loss):
        return state, ShapeReading(period=state.period)
    losses = (*state.losses, loss)[-config.window :]
    medians, filling = state.medians, (*state.filling, loss)
    if len(filling) == config.length:
        medians = (*medians, median(sorted(filling)))[-config.segments :]
        filling = ()
    seen, period = state.seen + 1, state.period
    if len(losses) == config.window and seen % LOOK == 0:
        period = _period(losses, config.lift)
    swing = math.nan
    if len(losses) >= config.swing_window:
        swing = _swing(losses[-config.swing_window :])
    plateau = (
        len(medians) == config.segments
        and medians[0] > 0
        and medians[-1] > medians[0] * (1.0 - config.progress)
    )
    reading = ShapeReading(swing, swing >= config.swing, period, plateau)
    return ShapeState(losses, medians, filling, seen, period), reading


def _swing(losses: tuple[float, ...]) -> float:
    n, h = len(losses), len(losses) // 2
    slope = (median(sorted(losses[h:])) - median(sorted(losses[:h]))) / (n - h)
    flat = sorted(v - slope * i for i, v in enumerate(losses))
    middle = abs(median(sorted(losses)))
    return (flat[-2] - flat[1]) / middle if middle else math.nan


def _period(losses: tuple[float, ...], lift: float) -> int:
    """The shortest period of which one phase stands out; 0 for none."""
    y = np.log(np.maximum(np.array(losses), 1e-6))
    t = np.arange(len(y))
    y = y - np.polyval(np.polyfit(t, y, 1), t)
    for p in range(2, LONGEST + 1):
        whole = len(y) // p
        if whole < 4:
            break
        phases = y[len(y) - whole * p :].reshape(whole, p)
        centre = np.median(phases, axis=0)
        best = int(centre.argmax())
        others = np.delete(phases, best, axis=1)
        usual = float(np.median(others))
        spread = 1.4826 * float(np.median(np.abs(others - usual)))
        bar = usual + max(lift, 3.0 * spread)
        if centre[best] > bar and float((phases[:, best] > bar).mean()) >= REGULAR:
            return p
    return 0

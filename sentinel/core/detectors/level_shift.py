"""Level-shift detector: did the loss come to rest on a worse level than it had?

    observe(state, loss, sigma, config) -> (next state, ShiftReading)

A run can "recover" from a spike onto a level a little worse than before, or creep upwards too
slowly for any single step to stand out. So every `every` steps the median of the last `width`
losses (in ln, hot ones included) is compared with the lowest such median of the last `look`
steps; the rise must exceed `rise` and `z` times the smoothed spread of the loss.

Units:   loss [nats/token]; sigma, drift, rise [ln nats]; steps are steps with a finite loss.
Purity:  no clock, no I/O, no randomness; memory bounded by width + 2 look / every numbers, and
         in practice far less: only medians that can still become the lowest are kept.
Errors:  ShiftConfig raises ConfigError. observe() never raises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sentinel.core import bounds
from sentinel.core.windows import median


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftConfig:
    """Settings of the level-shift detector.

    Attributes:
        width: losses in one median.
        every: steps between two medians.
        look: how far back the lowest median may lie [steps].
        rise: least drift that counts [ln nats].
        z: least drift that counts, in smoothed spreads of the loss.
        decay: of the smoothing, per step.
        needed: medians that must exist before it speaks.
        loss_floor: below it y is linear in the loss, as in the spike detector.
    """

    width: int = 32
    every: int = 4
    look: int = 1024
    rise: float = 0.10
    z: float = 3.0
    decay: float = 0.98
    needed: int = 4
    loss_floor: float = 0.05

    def __post_init__(self) -> None:
        bounds.check(
            "level_shift",
            width=(self.width, 2, 4096),
            every=(self.every, 1, 10_000),
            look=(self.look, 1, 1_000_000),
            rise=(self.rise, 0.0, 100.0),
            z=(self.z, 0.0, 1e6),
            decay=(self.decay, 0.0, 0.999999),
            needed=(self.needed, 1, 10_000),
            loss_floor=(self.loss_floor, 1e-9, 1e6),
        )


@dataclass(frozen=True, slots=True)
class ShiftState:
    """What the detector remembers.

    Attributes:
        count: steps with a finite loss so far.
        recent: the last `width` y, oldest first.
        lows: (count, median) of medians that may still become the lowest, rising in both.
        medians: how many medians were taken.
        spread: smoothed spread of the loss; negative before the first one.
    """

    count: int = 0
    recent: tuple[float, ...] = ()
    lows: tuple[tuple[int, float], ...] = ()
    medians: int = 0
    spread: float = -1.0
    drift: float = 0.0
    shifted: bool = False


@dataclass(frozen=True, slots=True)
class ShiftReading:
    """Drift above the lowest recent level [ln nats], and whether it counts as a shift."""

    drift: float
    shifted: bool


def observe(
    state: ShiftState, loss: float | None, sigma: float, config: ShiftConfig
) -> tuple[ShiftState, ShiftReading]:
    """Take in one loss and the spike detector's spread of it (nan: not judged).

    Between two medians, and without a finite loss, the last reading stands.
    """
    if loss is None or not -math.inf < loss < math.inf:
        return state, ShiftReading(state.drift, state.shifted)
    floor = config.loss_floor
    y = math.log(loss) if loss >= floor else math.log(floor) - (floor - loss)

    spread = state.spread
    if sigma == sigma:
        spread = sigma if spread < 0 else config.decay * spread + (1 - config.decay) * sigma
    count = state.count + 1
    recent = state.recent
    if len(recent) >= config.width:
        recent = recent[1 - config.width :]
    recent = (*recent, y)
    lows, medians, drift, shifted = state.lows, state.medians, state.drift, state.shifted
    if spread >= 0 and len(recent) == config.width and count % config.every == 0:
        level = median(sorted(recent))
        lows = tuple(p for p in lows if count - p[0] <= config.look)
        if lows and medians >= config.needed:
            drift = level - lows[0][1]
            shifted = drift > max(config.rise, config.z * spread)
        lows = (*(p for p in lows if p[1] < level), (count, level))
        medians += 1
    return (
        ShiftState(count, recent, lows, medians, spread, drift, shifted),
        ShiftReading(drift, shifted),
    )


def restart(state: ShiftState) -> ShiftState:
    """Forget the levels so far: what is now is the new normal. The spread is kept."""
    return ShiftState(spread=state.spread)

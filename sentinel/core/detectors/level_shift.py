"""Level-shift detector: did the loss come to rest on a worse level than it had?

    observe(state, loss, sigma, config) -> (next state, ShiftReading)

A run can "recover" from a spike onto a level a little worse than before, or creep upwards too
slowly for any single step to stand out. So every `every` steps the median of the last `width`
losses (in ln, hot ones included) is compared with the lowest such median of the last `look`
steps; the rise must exceed `rise` and `z` times the smoothed spread of the loss.

That is worth a finding. A slow divergence is worth more: a learning rate that creeps up by 3 % a
step lifts the loss so gently that the spike detector's baseline goes along and no step is ever
hot. So once the drift exceeds `away_rise`, and `z` times the spread that the loss had at its lowest
level, a step that lies as far above that level itself is `away`, and counts as a spike step. The
spread of now will not do: a loss on its way from 3 to 180 has a spread of 2 in ln, above which
nothing stands out. At most `accept_after` steps are away, then the level is taken as it is.

Where the lowest level is below zero the loss is no likelihood of tokens, and distances are plain
[nats], without a logarithm. Such an objective may rise towards zero because the run goes well: what
a policy gradient weighs its log-probabilities with averages zero, and they shrink as it learns. So
a drift must also exceed twice the depth of that level: the loss is as far above zero then as it
was below.

Units:   loss [nats/token]; sigma, drift, rise [ln nats, or nats above a level below zero]; steps
         are steps with a finite loss.
Purity:  no clock, no I/O, no randomness; memory bounded by width + 2 look / every numbers, and
         in practice far less: only medians that can still become the lowest are kept.
Errors:  ShiftConfig raises ConfigError. observe() never raises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sentinel.core import bounds
from sentinel.core.quick import quick
from sentinel.core.windows import LARGEST, from_plain, median, to_log, to_loss, to_plain


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
        away_rise: least drift, instead of `rise`, at which steps are away [ln nats]; 0 switches
            this off.
        accept_after: steps that are away after which the level is accepted.
    """

    width: int = 32
    every: int = 4
    look: int = 1024
    rise: float = 0.10
    z: float = 3.0
    decay: float = 0.98
    needed: int = 4
    loss_floor: float = 0.05
    away_rise: float = 0.3
    accept_after: int = 128

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
            away_rise=(self.away_rise, 0.0, 100.0),
            accept_after=(self.accept_after, 1, 1_000_000),
        )


@quick
@dataclass(frozen=True, slots=True)
class ShiftState:
    """What the detector remembers.

    Attributes:
        count: steps with a finite loss so far.
        recent: the last `width` y, oldest first.
        lows: (count, median, spread then) of medians that may still become the lowest, rising in
            the first two.
        medians: how many medians were taken.
        spread: smoothed spread of the loss; negative before the first one.
        drift, shifted: what the last median said; `low` is the level it was compared with, and
            `low_spread` the smoothed spread at that time.
        away: steps that were away since the drift last was small.
    """

    count: int = 0
    recent: tuple[float, ...] = ()
    lows: tuple[tuple[int, float, float], ...] = ()
    medians: int = 0
    spread: float = -1.0
    drift: float = 0.0
    shifted: bool = False
    low: float = 0.0
    low_spread: float = 0.0
    away: int = 0


@quick
@dataclass(frozen=True, slots=True)
class ShiftReading:
    """One step as the detector sees it.

    Attributes:
        drift: last median above the lowest recent one [ln nats].
        shifted: whether that counts as a shift.
        away: this step counts as a spike step.
        excess: this step above the lowest recent median [ln nats]; 0 when not away.
        score: the same in the spreads of that time.
        baseline: the lowest recent median [nats]; None when not away.
    """

    drift: float
    shifted: bool
    away: bool = False
    excess: float = 0.0
    score: float = 0.0
    baseline: float | None = None


def observe(
    state: ShiftState, loss: float | None, sigma: float, config: ShiftConfig
) -> tuple[ShiftState, ShiftReading]:
    """Take in one loss and the spike detector's spread of it (nan: not judged).

    Between two medians, and without a finite loss, the last reading stands.
    """
    if loss is None or not -math.inf < loss < math.inf:
        return state, ShiftReading(state.drift, state.shifted)
    y = to_log(loss, config.loss_floor)

    spread = state.spread
    if sigma == sigma:
        spread = sigma if spread < 0 else config.decay * spread + (1 - config.decay) * sigma
    count = state.count + 1
    recent = state.recent
    if len(recent) >= config.width:
        recent = recent[1 - config.width :]
    recent = (*recent, y)
    lows, medians, drift, shifted = state.lows, state.medians, state.drift, state.shifted
    low, low_spread, away = state.low, state.low_spread, state.away
    if spread >= 0 and len(recent) == config.width and count % config.every == 0:
        level = median(sorted(recent))
        lows = tuple(p for p in lows if count - p[0] <= config.look)
        if lows and medians >= config.needed:
            _, low, low_spread = lows[0]
            drift = _above(low, level, config)
            shifted = drift > max(config.rise, config.z * spread, _both_sides(low, config))
        lows = (*(p for p in lows if p[1] < level), (count, level, spread))
        medians += 1
    reading = ShiftReading(drift, shifted)
    least = max(config.away_rise, config.z * low_spread, _both_sides(low, config))
    if config.away_rise <= 0.0 or drift <= least:
        away = 0
    elif (excess := _above(low, y, config)) > least:
        away += 1
        baseline = to_loss(low, config.loss_floor)
        reading = ShiftReading(drift, shifted, True, excess, excess / low_spread, baseline)
        if away >= config.accept_after:
            return ShiftState(spread=spread), reading
    return (
        ShiftState(count, recent, lows, medians, spread, drift, shifted, low, low_spread, away),
        reading,
    )


def may_be_away(state: ShiftState, sigma: float, config: ShiftConfig) -> bool:
    """Whether the next step could be away, whatever its finite loss is.

    The drift and the step's own distance both rise with the loss: the largest one tells.
    """
    if config.away_rise <= 0.0:
        return False
    return observe(state, LARGEST, sigma, config)[1].away


def restart(state: ShiftState) -> ShiftState:
    """Forget the levels so far: what is now is the new normal. The spread is kept."""
    return ShiftState(spread=state.spread)


def _above(low: float, y: float, config: ShiftConfig) -> float:
    """How far y lies above the lowest level: plainly, if that is below zero."""
    floor = config.loss_floor
    if low < to_log(0.0, floor) and y > math.log(floor):
        y = to_plain(to_loss(y, floor), floor)
    return y - low


def _both_sides(low: float, config: ShiftConfig) -> float:
    """Twice the depth of a level below zero; 0 or less for any other."""
    return -2.0 * from_plain(low, config.loss_floor)

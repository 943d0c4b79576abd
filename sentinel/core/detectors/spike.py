"""Loss-spike detector: is this step's loss far above where the last 64 steps lead?

    observe(state, loss, grad_norm, config) -> (next state, SpikeReading)

Losses are compared in y = ln(loss), so that a threshold means the same at 11 nats and at 2; below
`loss_floor`, where relative moves are noise, y goes on linearly. A loss that goes below zero (an
objective of reinforcement learning, a likelihood of densities) is no size of which a share could be
told: while one is in the window, y is linear above the floor too. With the kink there, in which y
becomes twenty times as steep, ordinary noise about zero would stand far out on its upper side.

The baseline is a robust line through the last `window` accepted values: the medians of its two
halves, extrapolated downwards only (a fall may go on, a rise is never excused), and not below the
lowest of them: a fall that bends leaves its line, and a loss that never was negative will not be.
The spread is the larger of the MAD and the upper 90 % quantile of the residuals, which protects
runs whose noise has a heavy upper tail.

A step is hot (a spike step, level 1) if r > r_hot and z > z_hot, where r is the excess over the
line and z the same in spreads; or already at r_with_grad and z_with_grad when its gradient norm
is an outlier too. Once hot, `z_stay` and `r_stay` keep it hot until `rearm` clean steps have
passed: a lasting shift must not flicker. Hot steps stay out of the baseline, for otherwise it
would absorb the spike it is meant to catch; but only for `accept_after` of them, then the new
level is accepted and the detector warms up anew.

Outliers that come back by themselves, again and again, are the data's own: one batch in twenty
from a harder source is no fault, and skipping it would take that source out of the training. So
once `recur_count` lone outliers lie within the last `recur_window` steps, another of the usual
size is recurrent, not hot, unless it follows directly on one. A lasting fault of that size is
seen one step later; no recorded run has more than four in 512.

Levels:  0 calm, 1 hot, 2 persistent (3 hot of 6, or 2 in a row with summed r >= 0.5),
         3 loss or gradient norm not finite.
Units:   loss, baseline [nats/token]; excess r [ln nats, or nats where y is linear]; score z [robust
         std]; window, warmup, rearm, accept_after [steps with a loss].
Purity:  no clock, no I/O, no randomness. State is an immutable value, saved in each snapshot and
         restored on rollback together with the weights.
Errors:  SpikeConfig raises ConfigError. observe() never raises: a nan loss is a reading.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from sentinel.core import bounds
from sentinel.core.detectors.level_shift import ShiftReading
from sentinel.core.errors import ConfigError
from sentinel.core.quick import quick
from sentinel.core.types import Status
from sentinel.core.windows import (
    LARGEST,
    MAD_TO_STD,
    Q90_TO_STD,
    from_plain,
    last_below,
    mad,
    median,
    quantile,
    to_log,
    to_loss,
    to_plain,
)

LONE_KEPT = 16  # lone outliers remembered
LONE_RUN = 2  # hot steps in a row, at most, that still are one lone outlier

_INF = math.inf
_NAN = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeConfig:
    """Settings of the loss-spike detector; units in the module docstring.

    Attributes:
        window: accepted losses, and norms, that make the baseline.
        warmup: accepted losses after which it may speak.
        z_hot, r_hot: both exceeded: hot.
        z_stay, r_stay: both exceeded while hot: still hot.
        z_grad, grad_factor: both exceeded by ln(norm), norm: the norm is an outlier.
        z_with_grad, r_with_grad: both exceeded while the norm is an outlier: hot.
        rearm: clean steps after which z_hot is needed again.
        sigma_floor, grad_sigma_floor: least spread of y and of ln(norm).
        accept_after: hot steps after which the new level is the baseline.
        loss_floor: below it y is linear in the loss.
        persist_hot, persist_window: so many hot steps of so many: level 2.
        persist_run, persist_excess: so many in a row with so much summed r: level 2.
        recur_count, recur_window: so many lone outliers in so many steps are a trait of the data;
            a count of 0 switches this off.
        recur_margin: an outlier is of the usual size up to this many times their median r.
    """

    window: int = 64
    warmup: int = 48
    z_hot: float = 8.0
    r_hot: float = 0.08
    z_stay: float = 3.0
    r_stay: float = 0.04
    z_grad: float = 6.0
    grad_factor: float = 4.0
    z_with_grad: float = 4.0
    r_with_grad: float = 0.02
    rearm: int = 5
    sigma_floor: float = 0.004
    grad_sigma_floor: float = 0.10
    accept_after: int = 128
    loss_floor: float = 0.05
    persist_hot: int = 3
    persist_window: int = 6
    persist_run: int = 2
    persist_excess: float = 0.5
    recur_count: int = 6
    recur_window: int = 512
    recur_margin: float = 1.5

    def __post_init__(self) -> None:
        bounds.check("spike", window=(self.window, 4, 4096))
        if not 4 <= self.warmup <= self.window:
            raise ConfigError(
                f"spike.warmup must lie between 4 and spike.window ({self.window} steps), "
                f"got {self.warmup}"
            )
        bounds.check(
            "spike",
            z_hot=(self.z_hot, 0.0, 1e6),
            r_hot=(self.r_hot, 0.0, 100.0),
            z_stay=(self.z_stay, 0.0, self.z_hot),
            r_stay=(self.r_stay, 0.0, self.r_hot),
            z_grad=(self.z_grad, 0.0, 1e6),
            grad_factor=(self.grad_factor, 1.0, 1e6),
            z_with_grad=(self.z_with_grad, 0.0, self.z_hot),
            r_with_grad=(self.r_with_grad, 0.0, self.r_hot),
            rearm=(self.rearm, 1, 10_000),
            sigma_floor=(self.sigma_floor, 1e-9, 10.0),
            grad_sigma_floor=(self.grad_sigma_floor, 1e-9, 10.0),
            accept_after=(self.accept_after, 1, 1_000_000),
            loss_floor=(self.loss_floor, 1e-9, 1e6),
            persist_window=(self.persist_window, 1, 62),
            persist_hot=(self.persist_hot, 1, self.persist_window),
            persist_run=(self.persist_run, 1, 10_000),
            persist_excess=(self.persist_excess, 0.0, 1e6),
            recur_count=(self.recur_count, 0, LONE_KEPT),
            recur_window=(self.recur_window, 1, 1_000_000),
            recur_margin=(self.recur_margin, 0.0, 1e6),
        )


@quick
@dataclass(frozen=True, slots=True)
class SpikeState:
    """What the detector remembers.

    Attributes:
        losses: the last accepted y, oldest first; at most `window`.
        norms: the last accepted ln(norm), outliers capped, oldest first; at most `window`.
        recent: the last `persist_window` steps as bits, newest lowest: 1 = hot.
        hot: the thresholds for staying hot are in force.
        clean: clean steps since the last hot one.
        age: hot steps since it became hot; 0 when not hot.
        run: hot steps in a row; `excess` is their summed r.
        seen: judged steps since the baseline began.
        lone: (seen, r) of the last lone outliers, recurrent ones included, oldest first.
        maybe_lone: mean r of the hot steps just over, until a second clean step confirms it.
        recurred: the last step was a recurrent outlier.
    """

    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    recent: int = 0
    hot: bool = False
    clean: int = 0
    age: int = 0
    run: int = 0
    excess: float = 0.0
    seen: int = 0
    lone: tuple[tuple[int, float], ...] = ()
    maybe_lone: float = 0.0
    recurred: bool = False


@quick
@dataclass(frozen=True, slots=True)
class SpikeReading:
    """One step as the detector sees it.

    Attributes:
        score: z; nan when not judged.
        excess: r [ln nats]; 0 when not judged.
        level: 0 to 3, see the module docstring.
        hot: a spike step. A gradient that is not finite does not make a step hot.
        baseline: predicted loss [nats]; None when not judged.
        sigma: the spread of y; nan when not judged.
        grad_score: ln(norm) above its median, in its own spreads; nan when not judged, or when
            the norm is plainly no outlier.
        accepted_level: this was the last hot step that stays out: the new level is accepted.
        recurrent: far above, but no more than lone outliers of this run usually are: not hot.
    """

    status: Status
    score: float = _NAN
    excess: float = 0.0
    level: int = 0
    hot: bool = False
    baseline: float | None = None
    sigma: float = _NAN
    grad_score: float = _NAN
    accepted_level: bool = False
    recurrent: bool = False


_ABSENT = SpikeReading(Status.ABSENT)


def observe(
    state: SpikeState, loss: float | None, grad_norm: float | None, config: SpikeConfig
) -> tuple[SpikeState, SpikeReading]:
    """Judge this step against the steps before it, then remember it.

    Args:
        state: `SpikeState()` at the start of a run, else what the last call returned.
        loss: mean training loss of one optimizer step, reduced across ranks; None: not measured.
        grad_norm: global norm before clipping; None: not measured.
        config: the detector's settings.

    Returns:
        The next state and this step's reading. Without a loss the state stays as it was.
    """
    if loss is None:
        return state, _ABSENT
    if not -_INF < loss < _INF:
        return _nonfinite_loss(state, config)

    y = to_log(loss, config.loss_floor)
    grad_finite = True
    log_norm = None
    if grad_norm is not None:
        if 0.0 < grad_norm < _INF:
            log_norm = math.log(grad_norm)
        elif grad_norm != 0.0:  # a norm of exactly 0 (nothing had a gradient) says nothing
            grad_finite = False

    seen = state.losses
    if len(seen) < config.warmup:
        return _warm_up(state, y, log_norm, grad_finite, config)

    predicted, sigma, signed = _baseline(seen, config)
    r = (to_plain(loss, config.loss_floor) if signed else y) - predicted
    z = r / sigma

    norms = state.norms
    grad_score = _NAN
    outlier = False
    # The median is at least the lowest norm: up to `grad_factor` times that nothing is an outlier,
    # and the sort, a third of this function, is saved. The margin is for rounding.
    if (
        log_norm is not None
        and len(norms) >= config.warmup
        and log_norm > min(norms) + math.log(config.grad_factor) - 1e-9
    ):
        ordered = sorted(norms)
        centre = median(ordered)
        spread = max(MAD_TO_STD * mad(ordered, centre), config.grad_sigma_floor)
        grad_score = (log_norm - centre) / spread
        if grad_score > config.z_grad:
            assert grad_norm is not None
            outlier = grad_norm > config.grad_factor * math.exp(centre)
            if outlier:
                log_norm = centre + config.z_grad * spread

    far = (z > config.z_hot and r > config.r_hot) or (
        state.hot and z > config.z_stay and r > config.r_stay
    )
    with_norm = outlier and z > config.z_with_grad and r > config.r_with_grad
    recurrent = far and not with_norm and _recurs(state, r, config)
    if (far or with_norm) and not recurrent:
        expected = _loss(predicted, signed, config)
        return _hot(state, expected, r, z, sigma, grad_score, grad_finite, config)

    clean = state.clean + 1
    lone, maybe_lone = state.lone, 0.0
    if recurrent:
        lone = (*lone, (state.seen, r))[-LONE_KEPT:]
    else:
        if clean == 1 and 0 < state.run <= LONE_RUN:
            maybe_lone = state.excess / state.run
        elif state.maybe_lone > 0.0:
            lone = (*lone, (state.seen, state.maybe_lone))[-LONE_KEPT:]
        if len(seen) >= config.window:
            seen = seen[1:]
        seen = (*seen, y)
        if log_norm is not None:
            if len(norms) >= config.window:
                norms = norms[1:]
            norms = (*norms, log_norm)
    staying = state.hot and clean < config.rearm
    return (
        SpikeState(
            seen,
            norms,
            (state.recent << 1) & ((1 << config.persist_window) - 1),
            staying,
            clean,
            state.age if staying else 0,
            0,
            0.0,
            state.seen + 1,
            lone,
            maybe_lone,
            recurrent,
        ),
        SpikeReading(
            Status.NORMAL if grad_finite else Status.NONFINITE,
            z,
            r,
            0 if grad_finite else 3,
            False,
            _loss(predicted, signed, config),
            sigma,
            grad_score,
            False,
            recurrent,
        ),
    )


@dataclass(frozen=True, slots=True)
class SpikeLimits:
    """Above `loss`, or above both of the others, the next step is hot.

    Attributes:
        sigma: the spread of y; nan while warming up.
    """

    loss: float = LARGEST
    norm_with_loss: float = LARGEST
    loss_with_norm: float = LARGEST
    sigma: float = _NAN


def limits(state: SpikeState, config: SpikeConfig) -> SpikeLimits:
    """What observe() will find hot; only for a state that is not hot already."""
    assert not state.hot
    seen, floor = state.losses, config.loss_floor
    if len(seen) < config.warmup:
        return SpikeLimits()
    predicted, sigma, signed = _baseline(seen, config)
    scale = to_plain if signed else to_log

    def far(loss: float) -> bool:
        r = scale(loss, floor) - predicted
        return r / sigma > config.z_hot and r > config.r_hot and not _recurs(state, r, config)

    def far_enough(loss: float) -> bool:
        r = scale(loss, floor) - predicted
        return r / sigma > config.z_with_grad and r > config.r_with_grad

    r = max(config.z_hot * sigma, config.r_hot)
    if _recurs(state, r, config):
        usual = sorted(x for at, x in state.lone if state.seen - at < config.recur_window)
        r = config.recur_margin * median(usual)
    loss = last_below(far, _loss(predicted + r, signed, config))
    norms = state.norms
    if len(norms) < config.warmup:
        return SpikeLimits(loss, sigma=sigma)
    ordered = sorted(norms)
    centre = median(ordered)
    spread = max(MAD_TO_STD * mad(ordered, centre), config.grad_sigma_floor)
    least, usual_norm = min(norms) + math.log(config.grad_factor) - 1e-9, math.exp(centre)

    def outlier(norm: float) -> bool:
        log_norm = math.log(norm) if norm > 0.0 else -_INF
        return (
            log_norm > least
            and (log_norm - centre) / spread > config.z_grad
            and norm > config.grad_factor * usual_norm
        )

    guess = math.exp(min(centre + config.z_grad * spread, 709.0))
    r = max(config.z_with_grad * sigma, config.r_with_grad)
    return SpikeLimits(
        loss,
        last_below(outlier, max(guess, config.grad_factor * usual_norm)),
        last_below(far_enough, _loss(predicted + r, signed, config)),
        sigma,
    )


def restart(state: SpikeState) -> SpikeState:
    """Forget the baseline (a new level was accepted) and warm up anew."""
    return SpikeState()


def adrift(reading: SpikeReading, shift: ShiftReading) -> SpikeReading:
    """The same reading where the loss has crept away: hot, and measured from the lowest level."""
    return SpikeReading(
        Status.SPIKE if reading.level < 3 else reading.status,
        shift.score,
        shift.excess,
        max(reading.level, 2),
        True,
        shift.baseline,
        reading.sigma,
        reading.grad_score,
        reading.accepted_level,
    )


def _recurs(state: SpikeState, r: float, config: SpikeConfig) -> bool:
    """Whether lone outliers of this size are what this run has been showing all along."""
    if config.recur_count == 0 or len(state.lone) < config.recur_count:
        return False
    if state.clean == 0 or state.recurred:  # two in a row are not lone
        return False
    usual = sorted(x for at, x in state.lone if state.seen - at < config.recur_window)
    return len(usual) >= config.recur_count and r <= config.recur_margin * median(usual)


def _hot(
    state: SpikeState,
    expected: float,
    r: float,
    z: float,
    sigma: float,
    grad_score: float,
    grad_finite: bool,
    config: SpikeConfig,
) -> tuple[SpikeState, SpikeReading]:
    """A spike step: it stays out of the baseline, for a bounded time."""
    recent = ((state.recent << 1) | 1) & ((1 << config.persist_window) - 1)
    run = state.run + 1
    excess = state.excess + r
    age = state.age + 1
    if not grad_finite:
        level = 3
    elif recent.bit_count() >= config.persist_hot or (
        run >= config.persist_run and excess >= config.persist_excess
    ):
        level = 2
    else:
        level = 1
    accepted = age >= config.accept_after
    reading = SpikeReading(
        Status.SPIKE if grad_finite else Status.NONFINITE,
        z,
        r,
        level,
        True,
        expected,
        sigma,
        grad_score,
        accepted,
    )
    if accepted:
        return SpikeState(), reading
    return (
        SpikeState(
            state.losses,
            state.norms,
            recent,
            True,
            0,
            age,
            run,
            excess,
            state.seen + 1,
            state.lone,
        ),
        reading,
    )


def _nonfinite_loss(state: SpikeState, config: SpikeConfig) -> tuple[SpikeState, SpikeReading]:
    """A loss that is no number: hot, but no evidence of where the level is now."""
    recent = ((state.recent << 1) | 1) & ((1 << config.persist_window) - 1)
    return (
        SpikeState(
            state.losses,
            state.norms,
            recent,
            True,
            0,
            state.age,
            state.run + 1,
            state.excess,
            state.seen,
            state.lone,
        ),
        SpikeReading(Status.NONFINITE, level=3, hot=True),
    )


def _warm_up(
    state: SpikeState, y: float, log_norm: float | None, grad_finite: bool, config: SpikeConfig
) -> tuple[SpikeState, SpikeReading]:
    """Too few losses to judge: every finite one is taken for the baseline."""
    clean = state.clean + 1
    norms = state.norms
    if log_norm is not None:
        norms = (*norms, log_norm)[-config.window :]
    recent = (state.recent << 1) & ((1 << config.persist_window) - 1)
    hot = state.hot and clean < config.rearm
    if grad_finite:
        reading = SpikeReading(Status.WARMING_UP)
    else:
        reading = SpikeReading(Status.NONFINITE, level=3)
    return SpikeState(
        (*state.losses, y), norms, recent, hot, clean, state.age if hot else 0
    ), reading


def _loss(y: float, signed: bool, config: SpikeConfig) -> float:
    """The loss that y stands for on the scale in force."""
    return (from_plain if signed else to_loss)(y, config.loss_floor)


def _baseline(seen: tuple[float, ...], config: SpikeConfig) -> tuple[float, float, bool]:
    """(predicted y of the next step, spread about the line, y is linear), from the accepted y."""
    floor = config.loss_floor
    lowest = min(seen)
    signed = lowest < to_log(0.0, floor)
    if signed:
        kink = math.log(floor)
        seen = tuple([v if v < kink else to_plain(to_loss(v, floor), floor) for v in seen])
    n = len(seen)
    h = n >> 1
    m1 = median(sorted(seen[:h]))
    m2 = median(sorted(seen[h:]))
    slope = min(0.0, (m2 - m1) / (n - h))
    if slope == 0.0:
        residuals = sorted([v - m2 for v in seen])
    else:
        residuals = sorted([v - (m2 + slope * t) for v, t in zip(seen, _offsets(n), strict=True)])
    centre = median(residuals)
    spread = MAD_TO_STD * mad(residuals, centre)
    upper = quantile(residuals, 0.9, centre) / Q90_TO_STD
    predicted = max(m2 + slope * (n - h) / 2, lowest)
    return predicted, max(spread, upper, config.sigma_floor), signed


@lru_cache(maxsize=256)
def _offsets(n: int) -> tuple[float, ...]:
    """Distance of each position from the middle of the newer half."""
    h = n >> 1
    centre = h + (n - h) / 2
    return tuple(i - centre for i in range(n))

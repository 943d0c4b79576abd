"""From one observation to readings: every detector is asked once.

    judge(stats, observation, policy) -> Judged
    judge_loss(stats, observation, policy)          the part of it that says hot or cool
    learn(stats, observation, judged, policy, ...) -> Stats

Judging does not depend on what is done with the step afterwards; learning does (a norm is
"accepted" only if its step was applied), so it waits until the outcome is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sentinel.core import advice
from sentinel.core.advice import AdviceState, Advised
from sentinel.core.detectors import (
    attention_logit,
    grad_norm,
    level_shift,
    nonfinite,
    norm_band,
    spike,
    update_ratio,
)
from sentinel.core.detectors.level_shift import ShiftReading, ShiftState
from sentinel.core.detectors.spike import SpikeReading, SpikeState
from sentinel.core.policy import Policy
from sentinel.core.quick import quick
from sentinel.core.state import Stats
from sentinel.core.types import (
    LAYER_ATTENTION_MAX_LOGIT,
    LAYER_UPDATE_RATIO,
    Observation,
    Reading,
    Severity,
)

# A changed batch regime must last this long before it reopens the norm rule's warm-up: the last,
# smaller batch of an epoch, or sequences padded to their longest, are no new regime.
REGIME_STEPS = 8


@quick
@dataclass(frozen=True, slots=True)
class Judged:
    """What the detectors say of one step, and their states after it."""

    spike_state: SpikeState
    spike: SpikeReading
    shift_state: ShiftState
    shift: ShiftReading
    norm: Reading
    nonfinite: tuple[str, ...]
    hot_logits: tuple[int, ...]
    odd_updates: tuple[int, ...]
    band: Severity | None
    advice_state: AdviceState
    advice: Advised


def judge_loss(
    stats: Stats, observation: Observation, policy: Policy
) -> tuple[SpikeState, SpikeReading, ShiftState, ShiftReading]:
    """What the loss says of this step: a sudden excess makes it hot, and so does a slow one."""
    blind = observation.blind
    loss = None if blind else observation.loss
    norm = None if blind else observation.grad_norm
    spike_state, reading = spike.observe(stats.spike, loss, norm, policy.spike)
    shift_state, shift = level_shift.observe(stats.shift, loss, reading.sigma, policy.level_shift)
    if shift.away and not reading.hot:
        reading = spike.adrift(reading, shift)
    return spike_state, reading, shift_state, shift


def judge(stats: Stats, observation: Observation, policy: Policy) -> Judged:
    """Ask every detector about this step; a blind observation counts as unmeasured."""
    blind = observation.blind
    norm = None if blind else observation.grad_norm
    spike_state, spike_reading, shift_state, shift_reading = judge_loss(stats, observation, policy)
    columns = observation.columns
    hot_logits: tuple[int, ...] = ()
    odd_updates: tuple[int, ...] = ()
    if columns and not blind:
        column = columns.get(LAYER_ATTENTION_MAX_LOGIT)
        if column is not None:
            hot_logits = attention_logit.judge(column, policy.attention_logit)
        column = columns.get(LAYER_UPDATE_RATIO)
        if column is not None:
            odd_updates = update_ratio.judge(column, policy.update_ratio)
    advice_state, advised = advice.observe(stats.advice, observation, policy)
    return Judged(
        spike_state,
        spike_reading,
        shift_state,
        shift_reading,
        grad_norm.judge(stats.norm, norm, policy.grad_norm),
        () if blind else nonfinite.judge(observation),
        hot_logits,
        odd_updates,
        norm_band.judge(norm, policy.norm_band).severity,
        advice_state,
        advised,
    )


def learn(
    stats: Stats,
    observation: Observation,
    judged: Judged,
    policy: Policy,
    *,
    accept_norm: bool,
    accept_level: bool,
    restart_norm: bool,
) -> Stats:
    """The statistics after this step.

    Args:
        accept_norm: the step was applied and nothing was wrong with its norm or loss.
        accept_level: the loss has moved for good: forget what it was, warm up anew.
        restart_norm: the gradient's scale has moved for good.
    """
    spike_state, shift_state, norm_state = judged.spike_state, judged.shift_state, stats.norm
    if accept_norm and observation.grad_norm is not None and math.isfinite(observation.grad_norm):
        norm_state = grad_norm.accept(norm_state, observation.grad_norm, policy.grad_norm)
    if accept_level:
        spike_state = spike.restart(spike_state)
    if accept_level or judged.spike.accepted_level:
        shift_state = level_shift.restart(shift_state)
    if accept_level or judged.spike.accepted_level or restart_norm:
        norm_state = grad_norm.restart(norm_state)

    shape, age = stats.shape, 0
    if observation.shape and observation.shape != shape:
        age = stats.shape_age + 1
        if not shape or age >= REGIME_STEPS:
            if shape:
                norm_state = grad_norm.restart(norm_state)
            shape, age = observation.shape, 0
    return Stats(spike_state, shift_state, norm_state, shape, age, judged.advice_state)

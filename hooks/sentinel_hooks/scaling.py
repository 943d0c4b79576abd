"""What a GradScaler has done to the gradients, and what it will do to the step.

The scaler multiplies the loss, so gradients are too large until unscale_; a fused optimizer
unscales inside its kernel, after the gate. On overflow the scaler leaves step() out, or a fused
kernel drops the step by itself.

    left = LeftToScaler(target, policy, nonfinite)
    action = left.executed(decision, observation, members, me)      PROCEED: its business

Purity:  each function but left_scale() on unscaled gradients reads a scalar from the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sentinel.core.policy import Policy
from sentinel.core.types import Action, Decision, Observation
from sentinel_hooks.target import Target

_READY = 0  # torch.amp.grad_scaler.OptState.READY: not unscaled yet


def loss_scale(scaler: Any) -> float | None:
    """The scale in force; None without a scaler that has scaled anything."""
    if scaler is None or scaler._scale is None:
        return None
    return float(scaler.get_scale())


def left_scale(target: Target, member: int) -> float | None:
    """What this optimizer's gradients are still multiplied by; None for nothing."""
    scaler = target.live_scaler
    if scaler is None:
        return None
    optimizer = target.optimizers[member]
    given = getattr(optimizer, "grad_scale", None)
    if given is not None:  # fused: the kernel will unscale
        return float(given)
    state = scaler._per_optimizer_states.get(id(optimizer))
    if state is not None and state["stage"].value != _READY:
        return None
    return loss_scale(scaler)


def kernel_will_drop(optimizer: torch.optim.Optimizer) -> bool:
    """A fused optimizer steps with found_inf set: its kernel moves nothing."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and float(found) > 0


def scaler_dropped(target: Target) -> bool:
    """The scaler has seen non-finite gradients of ours since its last update()."""
    scaler = target.live_scaler
    return any(
        float(found) > 0
        for optimizer in target.optimizers
        if (state := scaler._per_optimizer_states.get(id(optimizer))) is not None
        for found in state["found_inf_per_device"].values()
    )


def routine(observation: Observation) -> bool:
    """Should the scaler drop this step, that is the scaler at work, and no skip of ours.

    Its loss is fine; the scale was too large for its gradients.
    """
    return observation.loss is None or math.isfinite(observation.loss)


class LeftToScaler:
    """Leaves to the scaler what the scaler does by itself.

    Attributes:
        each: members of the open step may be non-finite one by one: each is looked at by itself.
    """

    def __init__(self, target: Target, policy: Policy, nonfinite: Callable[[int], bool]) -> None:
        """Nothing has overflowed.

        Args:
            nonfinite: whether the gradients of this member are not finite, on any rank.
        """
        self._target = target
        self._policy = policy
        self._nonfinite = nonfinite
        self.each = False

    def executed(
        self, decision: Decision, observation: Observation, members: Sequence[int], me: int
    ) -> Action:
        """The decision's action, unless the scaler is about to do the same by itself.

        Args:
            members: the optimizers that take part; `me` is at its gate.
        """
        executed = decision.action
        self.each = False
        # With a loss far above its baseline it is no routine: nothing of such a step is applied.
        calm = not decision.readings.spike_score > self._policy.spike.z_stay
        if executed is Action.SKIP_STEP and routine(observation):
            if any(kernel_will_drop(self._target.optimizers[m]) for m in members):
                if calm or len(members) == 1:
                    executed = Action.PROCEED  # the scaler's business: it drops the step by itself
            elif (
                calm
                and self._target.live_scaler is not None
                and len(members) > 1
                and not self._nonfinite(me)
            ):
                # Another optimizer overflowed: the scaler leaves its step() out and this one in,
                # as it does unattached. Should it come all the same, it is looked at by itself.
                executed, self.each = Action.PROCEED, True
        return executed

"""Scaler skips: steps that the gradient scaler leaves out by itself are left to it, and counted.

    skips = ScalerSkips("r7", target, policy, nonfinite)
    action = skips.executed(decision, observation, members, me)      PROCEED: its own doing
    skips.settled(observation, outcome)      each step
    skips.count                              for status()

A GradScaler starts with a scale that is too large on purpose and halves it until nothing overflows,
then doubles it every few thousand steps. These steps are its own doing: they would not have been
taken without us either. They count as `scaler` among the non-finite ones, open no incident louder
than INFO (core/engine.py), and the log has the 1st, 2nd, 4th, 8th ... of them.

Purity:  executed() reads a scalar from the device where the scaler is about to drop a step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from sentinel.core.policy import Policy
from sentinel.core.rules import scaler_dropped
from sentinel.core.types import Action, Decision, Observation, Outcome
from sentinel_hooks.scaling import kernel_will_drop
from sentinel_hooks.target import Target

logger = logging.getLogger(__name__)


class ScalerSkips:
    """Of one process.

    Attributes:
        each: members of the open step may be non-finite one by one: each is looked at by itself.
        count: steps that the scaler left out.
    """

    def __init__(
        self, run: str, target: Target, policy: Policy, nonfinite: Callable[[int], bool]
    ) -> None:
        """Nothing was skipped.

        Args:
            nonfinite: whether the gradients of this member are not finite, on any rank.
        """
        self._run = run
        self._target = target
        self._policy = policy
        self._nonfinite = nonfinite
        self.each = False
        self.count = 0

    def executed(
        self,
        decision: Decision,
        observation: Observation,
        members: Sequence[int],
        me: int,
        *,
        left_out: bool = False,
    ) -> Action:
        """The decision's action, unless the scaler does the same by itself.

        Args:
            members: the optimizers that take part; `me` is at its gate.
            left_out: the scaler has not taken the step, and no gate was reached.
        """
        executed = decision.action
        self.each = False
        # With a loss far above its baseline it is no routine: nothing of such a step is applied.
        calm = not decision.readings.spike_score > self._policy.spike.z_stay
        if executed is Action.SKIP_STEP and _routine(observation):
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
            if left_out:
                executed = Action.PROCEED
        return executed

    def settled(self, observation: Observation, outcome: Outcome) -> None:
        """A step is over."""
        if observation.loss_scale is None or not scaler_dropped(observation, outcome):
            return
        self.count += 1
        if self.count & (self.count - 1) == 0:
            logger.info(
                "the gradient scaler left a step out, its gradients overflowed run=%s step=%s "
                "loss_scale=%g so_far=%s",
                self._run,
                observation.step,
                observation.loss_scale,
                self.count,
            )


def _routine(observation: Observation) -> bool:
    """Should the scaler drop this step, that is the scaler at work, and no skip of ours.

    Its loss is fine; the scale was too large for its gradients.
    """
    return observation.loss is None or math.isfinite(observation.loss)

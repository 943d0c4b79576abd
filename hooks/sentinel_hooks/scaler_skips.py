"""Scaler skips: what is said of steps that the gradient scaler leaves out by itself.

    skips = ScalerSkips("r7")
    skips.settled(observation, outcome)      each step
    skips.count                              for status()

A GradScaler starts with a scale that is too large on purpose and halves it until nothing overflows,
then doubles it every few thousand steps. These steps are its own doing: they would not have been
taken without us either. They count as `scaler` among the non-finite ones, open no incident louder
than INFO (core/engine.py), and the log has the 1st, 2nd, 4th, 8th ... of them.
"""

from __future__ import annotations

import logging

from sentinel.core.rules import scaler_dropped
from sentinel.core.types import Observation, Outcome

logger = logging.getLogger(__name__)


class ScalerSkips:
    """Of one process.

    Attributes:
        count: steps that the scaler left out.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self.count = 0

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

"""One logical step from its decision to its outcome.

    step = OpenStep(observation, decision, source, executed, gate_s)
    step.tell(run, in_a_row)                 a step that is held back is told in the log
    step.applied, step.complete = ...        set when optimizer.step() has run
    step.outcome                             what the engine's state moves on

The decision is what was asked for; `executed` and `applied` are what was done, and they may differ:
a scaler drops a step by itself, a device decides before the host, an actuator fails.

Threads: the training thread.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass

from sentinel.core import advice
from sentinel.core.state import State
from sentinel.core.types import Action, Decision, Observation, Outcome, Source
from sentinel_hooks.layers import LayerTable

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class OpenStep:
    """A decided step.

    Attributes:
        source: whose decision it is.
        executed: what was made of it.
        gate_s: how long the gate took.
        applied: the weights have moved.
        complete: optimizer.step() has run.
    """

    observation: Observation
    decision: Decision
    source: Source
    executed: Action
    gate_s: float
    applied: bool = False
    complete: bool = False

    @property
    def outcome(self) -> Outcome:
        """What was really done."""
        return Outcome(self.observation.step, self.executed, self.applied, self.source)

    def tell(self, run: str, in_a_row: int) -> None:
        """Log a step that is held back.

        Of a long row of skips the 1st, 2nd, 4th, 8th ... is told: it may go on for days.
        """
        executed, decision = self.executed, self.decision
        if executed is Action.PROCEED:
            return
        if executed is not Action.SKIP_STEP or in_a_row & (in_a_row - 1) == 0:
            logger.warning(
                "%s run=%s step=%s rule=%s reason=%s",
                executed.name.lower(),
                run,
                decision.step,
                decision.rule,
                decision.reason,
            )


def with_layers(observation: Observation, layers: LayerTable, state: State) -> Observation:
    """What the engine must know of the layers, once: it travels and is recorded as columns."""
    if not observation.columns or not advice.wants_layers(state.stats.advice):
        return observation
    columns = {**observation.columns, **layers.columns()}
    return dataclasses.replace(observation, columns=columns)

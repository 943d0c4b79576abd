"""Chronicle: everybody who is told what became of a run, each by its own file or wire.

    chronicle = Chronicle(run=..., keeper=keeper, link=link, outlets=outlets, ...)
    chronicle.open(target, ...)                    from here on with a trace on the disk
    chronicle.step(open_step, before, state)       a step was settled: `before` is the ledger it met
    chronicle.event(event, before, state)          something happened between two steps
    chronicle.restated(state)                      the run goes on with another state
    chronicle.close("finished", state)

In this order: the ledger file (what a restarted process must know, so before a rollback or a halt
is carried out), the outlets, the trace, the sidecar, the log. With several ranks only rank 0 has
files and wires; the others' chronicle tells nobody.

Threads: the training thread.
Errors:  a trace that cannot be written is told once and tried at every step, and it is told when it
         is written again; `trouble` and `lost` say what is missing. The keeper keeps its own.
"""

from __future__ import annotations

import logging
import weakref
from pathlib import Path

from sentinel.core.events import Event, Restored, RestoreFailed
from sentinel.core.policy import Policy
from sentinel.core.state import Ledger, State
from sentinel.core.types import Mode, Severity
from sentinel.traces.recorder import Recorder
from sentinel_hooks import configuration, telling
from sentinel_hooks.guard import Guard
from sentinel_hooks.layers import LayerTable
from sentinel_hooks.ledger_file import Keeper
from sentinel_hooks.link import Link, Says
from sentinel_hooks.outlets import Outlets, settled
from sentinel_hooks.parts.open_step import OpenStep
from sentinel_hooks.snapshots import Snapshots
from sentinel_hooks.target import Target

logger = logging.getLogger(__name__)


class Chronicle:
    """Tells what became of one run.

    Attributes:
        recorder: writes the trace; None: nobody does.
        trouble: why it cannot be written; "" while it can.
    """

    def __init__(
        self,
        *,
        run: str,
        policy: Policy,
        layers: LayerTable,
        keeper: Keeper,
        link: Link,
        outlets: Outlets | None,
        guard: Guard,
        logs_flags: bool = True,
    ) -> None:
        """Nothing is written yet.

        Args:
            logs_flags: write flags that begin to fire to the log; one rank does.
        """
        self._run = run
        self._policy = policy
        self._layers = layers
        self._keeper = keeper
        self._link = link
        self._outlets = outlets
        self._guard = guard
        self._logs_flags = logs_flags
        self.recorder: Recorder | None = None
        self.trouble = ""

    @property
    def lost(self) -> int:
        """Records that are missing in the trace."""
        return self.recorder.lost_records if self.recorder is not None else 0

    def open(
        self,
        directory: Path,
        target: Target,
        snapshots: Snapshots,
        state: State,
        *,
        incarnation: str,
    ) -> None:
        """Begin, or go on with, the trace in `directory`."""
        rows = self._layers.rows()
        self.recorder = Recorder(
            directory,
            run=self._run,
            policy=self._policy,
            state=state,
            incarnation=incarnation,
            layers=rows,
            config=configuration.describe(
                target,
                rows,
                self._policy,
                run=self._run,
                incarnation=incarnation,
                snapshots=snapshots,
            ),
        )
        if self.recorder.trouble:
            self._failed(OSError(self.recorder.trouble))

    def step(self, step: OpenStep, before: Ledger, state: State) -> None:
        """`step` was settled; `before` is the ledger as it was, `state` what it has become."""
        observation, decision, outcome = step.observation, step.decision, step.outcome
        self._keeper.settled(observation, decision, outcome)
        self._keeper.moved(before, state)  # before a restore or a halt is carried out
        if self._outlets is not None:
            self._outlets.step(observation, decision, state, self._guard.counts)
            self._outlets.moved(before, state)
            if self._policy.mode is not Mode.OBSERVE and before.automation:  # else nothing is lost
                self._outlets.unguarded(decision)
        if self.recorder is not None:
            try:
                self.recorder.step(observation, decision, outcome, state, gate_s=step.gate_s)
                if self.trouble:
                    self._healed(state)
            except OSError as error:
                self._failed(error)
        self._link.settled(observation, decision, outcome)
        if state.ledger is not before and self._logs_flags:
            for line in telling.flags(before, state.ledger, self._layers.layers):
                logger.warning("flag run=%s step=%s %s", self._run, observation.step, line)

    def ask(self, says: Says) -> None:
        """What the outside hears of the protection between two steps: a session's own method.

        It is held weakly: threads ask it, and must not keep the user's model alive.
        """
        method = weakref.WeakMethod(says)

        def asked() -> tuple[str, str]:
            alive = method()
            return ("", "") if alive is None else alive()

        self._link.ask(asked)
        if self._outlets is not None:
            self._outlets.ask(asked)

    def event(self, event: Event, before: Ledger, state: State) -> None:
        """Something happened between two steps."""
        self._keeper.moved(before, state)
        if self._outlets is not None:
            self._outlets.moved(before, state)
            step = settled(state)
            if isinstance(event, Restored):
                text = f"rolled back to step {event.target}"
                self._outlets.tell("rollback", Severity.CRITICAL, step, text)
            elif isinstance(event, RestoreFailed):
                text = f"a rollback was not possible: {event.reason}"
                self._outlets.tell("rollback_failed", Severity.CRITICAL, step, text)
        if self.recorder is not None:
            try:
                self.recorder.event(event, state)
            except OSError as error:
                self._failed(error)
        self._link.event(event)

    def restated(self, state: State) -> None:
        """The run was restarted, and this is what it goes on with."""
        if self.recorder is not None:
            try:
                self.recorder.restate(state)
            except OSError as error:
                self._failed(error)

    def close(self, how: str, state: State) -> None:
        """Say goodbye; the ledger file is closed by whoever knows the weights.

        Args:
            how: finished, halted, or lost: it crashed.
        """
        self._guard.run("link", self._link.close, how, state)
        if self._outlets is not None:
            self._guard.run("outlets", self._outlets.close, how, state)
        if self.recorder is not None:
            try:
                self.recorder.close()
            except OSError as error:
                self._failed(error)

    def _failed(self, error: OSError) -> None:
        if not self.trouble:
            logger.warning("the trace cannot be written run=%s reason=%s", self._run, error)
        self.trouble = str(error)

    def _healed(self, state: State) -> None:
        logger.info(
            "the trace is written again run=%s step=%s missing=%s",
            self._run,
            state.step,
            self.lost,
        )
        self.trouble = ""

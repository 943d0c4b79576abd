"""reads="late": the device decides on a calm step, and what it measured is read at the next gate.

    late = LateReads(policy, target, ...)
    late.send(members, loss, ...)    at the gate: the numbers are on their way, or None: read it now
    late.stepped(plan)               optimizer.step() has run
    late.sent                        until the next gate nobody has heard of this step
    open_step = late.hear()          there: what it was, and what the device did with it

The device gets limits (core/ahead.py) under which the engine would let the step pass, whatever
else is measured. What this process knows besides the engine (a person's order, a clip in parts,
optimizer state that is being made) is asked first: then the step is read at once, as without
reads="late", and the reason is counted for status().

One process only, and without a sidecar: attach() refuses the others.

Threads: the training thread.
Errors:  those of the observer; the caller's guard ends them, and the step is read at once.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from dataclasses import dataclass

from torch import Tensor

from sentinel.core import engine
from sentinel.core.ahead import Ahead, Limits
from sentinel.core.orders import due
from sentinel.core.policy import Policy
from sentinel.core.types import Action, Command, Observation
from sentinel_hooks.canary import Canary
from sentinel_hooks.guard import Guard
from sentinel_hooks.late import Ready
from sentinel_hooks.layers import LayerTable
from sentinel_hooks.link import Link
from sentinel_hooks.observe import Letter, Observer
from sentinel_hooks.parts.open_step import OpenStep, with_layers
from sentinel_hooks.parts.pausing import PauseFile
from sentinel_hooks.saving import Host, Saving
from sentinel_hooks.seams.gate import StepPlan
from sentinel_hooks.snapshots.running import RunningStats
from sentinel_hooks.target import Target

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SentStep:
    """A logical step whose numbers are on their way: nobody has decided on it yet.

    Attributes:
        plan: what the gates do with it.
        carried: found_inf was where the optimizer looks for it.
        complete: optimizer.step() has run.
    """

    letter: Letter
    plan: StepPlan
    gate_s: float = 0.0
    carried: bool = True
    complete: bool = False


class LateReads:
    """Sends and hears the steps of one run.

    Attributes:
        sent: the step that is not heard of yet.
    """

    def __init__(
        self,
        policy: Policy,
        target: Target,
        layers: LayerTable,
        *,
        run: str,
        host: Host,
        link: Link,
        guard: Guard,
        observer: Observer,
        saving: Saving,
        pause: PauseFile,
        running: RunningStats,
        canary: Canary | None,
        asked: bool,
    ) -> None:
        """Nothing is sent yet.

        Args:
            asked: attach(reads="late") was given.
        """
        self._policy = policy
        self._layers = layers
        self._run = run
        self._host = host
        self._link = link
        self._guard = guard
        self._observer = observer
        self._saving = saving
        self._pause = pause
        self._running = running
        self._canary = canary
        self._ahead = Ahead(policy) if asked else None
        self._ready = Ready(target)
        self._orders: tuple[Command, ...] = ()  # taken from the link, not yet observed
        self._read_now: Counter[str] = Counter()
        self._read_late = 0
        self.sent: SentStep | None = None

    @property
    def on(self) -> bool:
        """Steps may be read late."""
        return self._ahead is not None

    def __str__(self) -> str:
        """For status(); "" where reads="late" was not asked for."""
        if self._ahead is None and not self._read_now:
            return ""
        at_once = ", ".join(f"{why} {n}" for why, n in self._read_now.most_common())
        return (
            f"late in {self._read_late} steps; at once in {sum(self._read_now.values())}"
            f"{f' ({at_once})' if at_once else ''}"
        )

    # -- the gate ----------------------------------------------------------------------------

    def send(self, members: list[int], pending: Tensor | None, *, checked: bool) -> SentStep | None:
        """Let the device decide on this step; None: it has to be read at once.

        Args:
            members: the optimizers whose gradients take part.
            pending: the canary's own loss, to be read with the rest.
            checked: the self-check of the first steps has its verdict.
        """
        if self._ahead is None:
            return None
        if self._pause.due:
            self._pause.look()  # the safe point had a step open
        step = self._host.now.step
        why = self._why_now(members, checked)
        limits = Limits(why)
        if not why:
            limits = self._ahead.limits(
                self._host.now,
                loss=self._observer.sees_loss,
                snapshots=self._saving.takes(step + 1),
            )
        letter: Letter | str = limits.read_now
        if not letter:
            letter = self._observer.send(step, members, pending, limits)
        if isinstance(letter, str):
            self._read_now[letter] += 1
            return None
        self._read_late += 1
        if letter.found is not None and self._running.before == step:
            self._guard.run("act", self._running.put_back_where, letter.found)
        if self._canary is not None:
            self._guard.run("canary", self._canary.set_aside)
        plan = StepPlan(lr_factor=limits.lr_factor, found=letter.found)
        self.sent = SentStep(letter, plan)
        return self.sent

    def stepped(self, plan: StepPlan) -> None:
        """optimizer.step() has run, under `plan`."""
        sent = self.sent
        if sent is not None:
            sent.complete = True
            if plan.found is None and sent.plan.found is not None:
                sent.carried = False

    def stop(self, why: str) -> None:
        """Such a loop is read as ever from now on."""
        if self._ahead is not None:
            self._ahead = None
            self._read_now[why] += 1

    def take_orders(self) -> tuple[Command, ...]:
        """People's orders for this observation; what is of a later step waits here."""
        orders, self._orders = due((*self._orders, *self._link.take_commands()))
        return orders

    def _why_now(self, members: list[int], checked: bool) -> str:
        """What this process knows, besides the engine, against deciding on the device."""
        self._orders = (*self._orders, *self._link.take_commands())
        if self._orders:
            return "a person's order"
        if not checked:
            return "the self-check of the first steps"
        if self._saving.first_due or self._saving.resume_due:
            return "the run begins"
        if self._observer.probe.clips_in_parts(members):
            return "gradients were clipped in parts"
        if self._canary is not None and self._canary.copy_waits:
            return "a large batch is kept for the canary"
        return self._ready.why_not(members)

    # -- one step later ----------------------------------------------------------------------

    def forget(self) -> None:
        """What was sent is not for this process."""
        self.sent = None

    def hear(self) -> OpenStep:
        """The step before is heard of: decide on it, and hold that to what the device did."""
        sent, self.sent = self.sent, None
        assert sent is not None
        state = self._host.now
        heard = self._guard.run("measure", self._observer.receive, sent.letter)
        if heard is None:
            observation, found, loss = Observation(state.step, blind=True), False, None
        else:
            measured, norm, found = heard
            observation = self._observer.alone(measured, state.step, ())
            observation = dataclasses.replace(observation, grad_norm=norm)
            observation = with_layers(observation, self._layers, state)
            loss = measured.canary_loss
        own = engine.decide(state, observation, self._policy)
        decision, source = self._link.decide(observation, own, state)
        held = found and sent.carried and sent.complete
        executed = Action.SKIP_STEP if held else Action.PROCEED
        if self._canary is not None:
            quiet = decision.keep_batch and not held
            self._guard.run("canary", self._canary.settle_aside, quiet, loss)
        if executed is not decision.action:
            logger.warning(
                "the device did otherwise than was decided, what it did counts run=%s step=%s "
                "done=%s decided=%s",
                self._run,
                state.step,
                executed.name.lower(),
                decision.action.name.lower(),
            )
        applied = sent.complete and not held
        step = OpenStep(observation, decision, source, executed, sent.gate_s, applied)
        step.tell(self._run, state.ledger.skip_run + 1)
        return step

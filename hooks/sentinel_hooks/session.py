"""One training process under watch: observe, decide, act; and stand aside when anything fails.

    session = sentinel.attach(model=model, optimizer=optimizer, lr_scheduler=s, grad_scaler=g)
    print(session.status())
    session.detach()                                  or: with sentinel.attach(...) as session

A step, in the order of this file: a training forward begins (on_forward); the observer collects
losses and norms (observe.py); at the gate (before_step) they become an Observation, the engine or
the sidecar answers a Decision (_decide), and the gate carries it out. What was really done, the
Outcome, moves the engine's state at the next moment that comes (_settle): safe point, next gate,
`state`, status() or detach().

The safe point is the start of the first training forward after every optimizer of the group has
stepped, with no accumulation open: only there are snapshots taken and restored. When no forward of
the watched models is ever seen (a compiled inner module), it is the moment right after the step.

Several optimizers are one logical step: one decision at the first gate, over all gradients that are
new, and the others follow it. A later gate whose gradients are newer than the decision (a GAN) is
only checked for non-finite ones and held back on its own.

The session has the step and the engine's state; everything else that has a state of its own is a
part (parts/): which optimizers have stepped, the step that is open, one process or all ranks as
one, late reads, what is due at the safe point, who is told, being on or off, blind spots.

Several ranks do the same thing in the same step: at the gate all enter one reduce, whatever has
failed on any of them, and everything from the observation on is computed from what they heard.

Threads: hooks run in the thread that trains; status() may be asked from any.
Errors:  from attach() on nothing of ours raises into the loop (guard.py), except TrainingHalted
         where a policy may halt, or where ranks have parted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from sentinel.core import engine
from sentinel.core.events import Event
from sentinel.core.policy import Policy
from sentinel.core.state import State
from sentinel.core.types import Action, Command, Decision, Protection
from sentinel.traces.ledger import HALTED
from sentinel_hooks import telling
from sentinel_hooks.errors import HALT_EXIT_CODE, AttachError, TrainingHalted
from sentinel_hooks.layers import LayerTable
from sentinel_hooks.link import EmbeddedLink
from sentinel_hooks.observe import Measured
from sentinel_hooks.parts.assembly import Given, Parts
from sentinel_hooks.parts.crashing import Ending, crashed
from sentinel_hooks.parts.open_step import OpenStep, with_layers
from sentinel_hooks.parts.registry import Registry
from sentinel_hooks.parts.turns import Mark
from sentinel_hooks.probes.grads import elements
from sentinel_hooks.ranks.council import Council
from sentinel_hooks.scaling import kernel_will_drop, scaler_dropped
from sentinel_hooks.seams.gate import StepPlan
from sentinel_hooks.seams.hooks import Hooks
from sentinel_hooks.seams.step_tap import has_no_rate
from sentinel_hooks.selfcheck import SelfCheck
from sentinel_hooks.status import Status
from sentinel_hooks.target import Target

logger = logging.getLogger(__name__)

LOOK_EVERY = 64  # steps, or forwards without one, between two looks for blind spots to log
_UNEVEN = (
    "join() lets ranks have unequal numbers of batches, and one that is through decides no more; "
    "give all ranks the same number of batches instead"
)
_PROCEED = StepPlan()
_registry: Registry[Session] = Registry()


def is_attached(optimizer: torch.optim.Optimizer) -> bool:
    """Some session watches this optimizer."""
    return optimizer in _registry


def open_sessions() -> tuple[Session, ...]:
    """Those of this process that nobody has detached."""
    return _registry.open()


class Session:
    """Lives from attach() to detach(); one for each rank.

    Attributes:
        run_id: names the run everywhere.
        directory: where its trace lies.
        policy: the one in force.
        layers: the layer table; columns follow its order.
    """

    def __init__(self, given: Given) -> None:
        """Use attach()."""
        self._attached = False
        self.run_id = given.run_id
        self.run_dir = given.run_dir
        self.directory = given.directory
        self.policy: Policy = given.link.policy
        self.layers: LayerTable = given.layers
        self._target = given.target
        self._link = given.link
        self._snapshots = given.snapshots
        self._clock = given.clock
        self._loss_fn = given.loss_fn
        self._council = given.council
        self._keeper = given.keeper
        self._state: State = given.keeper.state()

        # The step, from decision to outcome.
        self._open: OpenStep | None = None
        self._plan = _PROCEED
        self._last: Decision | None = None
        self._late_skips = 0
        self._safe_done = False  # the safe point after it was passed
        self._halted = False
        self._home = 0  # the thread that trains
        self._index = {id(o): i for i, o in enumerate(given.target.optimizers)}
        # Several ranks: how far this gate has come.
        self._gate_mark: Mark | None = None
        self._gate_ended = False
        # Models whose ranks may have unequal numbers of batches.
        self._joinable: list[Any] = [] if given.council is None else _ddp_in(given.target)

        self._ending = Ending()
        parts = Parts(given, self, self._awake, is_attached)
        self._turns = parts.turns
        self._switch, self._guard = parts.switch, parts.guard
        self._probes, self._observer = parts.probes, parts.observer
        self._running = parts.running
        self._saving = parts.saving
        self._store, self._disk = parts.saving.ram, parts.saving.disk
        self._canary = parts.canary
        self._between = parts.between
        self._voice = parts.voice
        self._scaler_skips = parts.scaler_skips
        self._late = parts.late
        self._chronicle = parts.chronicle
        self._blind = parts.blind

        self._hooks = Hooks(
            given.target, self._observer, self._probes, self._guard, parts.strangers
        )

        # Hooks last: a failure above leaves the user's objects untouched.
        self._hooks.put_in(self, self._before_update)
        self._check = SelfCheck(given.run_id, given.signals, **self._probes.found)
        if given.council is not None:
            self._check_copies(given.council)
        self._hooks.listen()
        self._attached = True
        _registry.add(self, given.target.optimizers)
        self._chronicle.ask(self._says)

    def _check_copies(self, council: Council) -> None:
        """Several ranks: do their shares add up to one model? All are asked, whatever fails."""
        world, optimizers = council.world, self._target.optimizers
        mine, whole = self._guard.run("self-check", elements, optimizers, world) or (0.0, 0)
        counted = council.copies(mine)
        if counted is not None and whole:
            self._check.copies(counted, whole, world)

    # ---------------------------------------------------------------- forward

    def listening(self) -> bool:
        """False while everything shall pass unseen: off, detached, or our own doing."""
        return self._switch.listening()

    def _awake(self) -> bool:
        """Listening, and not inside a step() that evaluates its closure again."""
        return self._switch.listening() and not self._hooks.busy()

    def on_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward tap: a training forward begins."""
        if not self._awake() or torch._C._current_graph_task_id() != -1:
            self._look_after_loss()
            return  # the second: recomputed inside a backward pass
        if self._joinable and any(m._join_config.enable for m in self._joinable):
            self._disband(_UNEVEN)
            return
        self._turns.forwards += 1
        if self._turns.forwards % LOOK_EVERY == 0:
            self._guard.run("status", self._blind.tell)
        self._reach_safe_point()
        if self._probes.pace is not None:
            self._guard.run("probe pace", self._probes.pace.on_forward, args, kwargs)
        self._observer.rows = _rows(args, kwargs)
        if self._canary is not None:
            self._guard.run("canary", self._record, module, args, kwargs, False)

    def on_output(self, module: nn.Module, output: Any) -> None:
        """Forward tap: it ended."""
        if self._canary is not None and self.listening():
            self._guard.run("canary", self._canary.end, output, module)

    def safe_point(self, *batch: Any) -> None:
        """An adapter says: one step is over, the next has not begun; `batch` is what comes next.

        For frameworks that call the model past __call__, where the forward tap sees nothing.
        """
        if not self._awake():
            return
        self._turns.forwards += 1
        self._reach_safe_point()
        if batch:
            self._observer.rows = _rows(batch, {})

    @property
    def _upcoming(self) -> int:
        """The step that is being made: the state may not have heard of the last one yet."""
        return self._state.step + (self._late.sent is not None)

    def _record(
        self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outside: bool
    ) -> None:
        canary, step = self._canary, self._upcoming
        if canary is None or self._observer.accumulating or not canary.due(step, call, outside):
            return
        canary.begin(step, call, args, kwargs, outside=outside)

    # ---------------------------------------------------------------- unasked

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Those that are watched: the innermost ones."""
        return self._target.optimizers

    @property
    def in_step(self) -> bool:
        """A watched optimizer is inside its step()."""
        return self._hooks.busy()

    @property
    def switched_off(self) -> bool:
        """It has let go of the run, and said why."""
        return bool(self._switch.off)

    def begin_within(self, stepped: Iterable[torch.optim.Optimizer]) -> None:
        """Attached in the middle of a logical step, in which `stepped` have had their turn.

        The gates of the others follow it: they hold back what is not finite, and decide nothing.
        """
        through = [self._index[id(o)] for o in stepped]
        for me in through:
            self._turns.stepped(me)
        # Their gradients were made before the loss tap was there.
        self._observer.newer |= sum(1 << m for m in self._index.values() if m not in through)

    # ---------------------------------------------------------------- the gate

    def zeroed(self, optimizer: torch.optim.Optimizer) -> None:
        """Gate: the user dropped this optimizer's gradients."""
        if self.listening():
            self._observer.zeroed(1 << self._index[id(optimizer)])

    def before_step(self, optimizer: torch.optim.Optimizer, closure: bool) -> StepPlan | None:
        """Gate: gradients are final; what shall be done with this step?"""
        self._voice.entered = self._gate_ended = False
        self._gate_mark = None
        if self._council is not None:
            self._council.begin()
        self._gate_mark = self._turns.mark()
        plan = self._before_step(optimizer, closure)
        self._gate_ended = True
        return plan

    def keep_step(self, optimizer: torch.optim.Optimizer, closure: bool) -> StepPlan | None:
        """Gate: an error of ours has ended before_step() on this rank; the others go on.

        Once more, with what the ranks have told each other so far: so this rank does what they do.
        Failing that, the reduce at least is entered.
        """
        if self._council is None or self._gate_ended or not self.listening():
            return None
        me = self._index[id(optimizer)]
        mark = self._gate_mark
        first = self._turns.back_to(mark if mark is not None else self._turns.mark(), me)
        if first and self._open is not None and not self._open.complete:
            self._open = None  # this very step; one that is complete is not settled yet
        if mark is not None:
            self._council.rewind()
        else:
            self._council.begin()
        plan = self._guard.run("again", self._before_step, optimizer, closure)
        if plan is not None or not first:
            return plan
        if not self._voice.entered and self.listening():
            self._turns.only(me)
            self._plan = _PROCEED
            if self._voice.observe(None, ()) is None:
                self._switch_off(self._council.off)
            self._guard.run("gate", self._observer.used)
        return None

    def _before_step(self, optimizer: torch.optim.Optimizer, closure: bool) -> StepPlan | None:
        began = self._clock()
        observer, me = self._observer, self._index[id(optimizer)]
        bit = 1 << me
        observer.probe.refresh()
        if not (observer.accumulating or observer.fresh or closure) and has_no_rate(optimizer):
            return None
        first = self._turns.gate(me)
        if first:
            self._plan = _PROCEED
            self._settle()
            self._decide(began, me)
        newer = observer.newer & bit
        self._turns.stepped(me)
        observer.fresh &= ~bit
        observer.newer &= ~bit
        if first:
            return self._plan
        observer.forget(bit)
        if newer:  # gradients that no limit was compared with
            self._late.stop("gradients are made between two optimizers' steps")
        looked_at = newer or self._scaler_skips.each
        if looked_at and not self._plan.hold and self._voice.nonfinite(me):
            self._late_skips += 1
            logger.warning(
                "held back one optimizer of the group, its gradients are not finite run=%s "
                "step=%s optimizer=%s",
                self.run_id,
                self._state.step,
                me,
            )
            return dataclasses.replace(self._plan, hold=True)
        return self._plan

    def after_step(self, optimizer: torch.optim.Optimizer, plan: StepPlan) -> None:
        """Gate: step() has run and everything is put back."""
        step = self._open
        if step is not None:
            if not plan.hold and not kernel_will_drop(optimizer):
                step.applied = True
                if self._plan.hold:  # it could not be carried out
                    step.executed = Action.PROCEED
            step.complete = True
        else:
            self._late.stepped(plan)
        self._safe_done = False
        if plan.halt and not self._halted:
            self._switch.asleep("ledger", self._halt, plan.halt)
        if self._turns.unseen and self._turns.all_stepped():
            self._run_safe_point(self._safe_point)

    def _before_update(self) -> None:
        """Scaler tap: on overflow step() was never called, and the step is observed here."""
        gates = self._turns.updated()
        if gates or not self._awake() or not self._observer.accumulating:
            return
        if not scaler_dropped(self._target):
            return
        began = self._clock()
        self._turns.over()
        self._settle()
        self._observer.probe.refresh()
        self._decide(began, 0, left_out=True)
        self._turns.all_left_out()
        self._observer.fresh = 0
        step = self._open
        if step is not None:
            step.complete = True
        self._safe_done = False

    # ---------------------------------------------------------------- observe and decide

    def _decide(self, began: float, me: int, *, left_out: bool = False) -> None:
        """Observe, decide, and open the step; `left_out`: the scaler has not taken it."""
        prepared = self._guard.run("gate", self._prelude, me)
        sent = self._late.sent
        if sent is not None:  # the device decides, and it is heard at the next gate
            self._plan = sent.plan
            self._observer.used()
            sent.gate_s = self._clock() - began
            return
        members, measured, commands = prepared or ([me], None, ())
        agreed = self._voice.observe(measured, commands)
        if agreed is None:
            self._stop_together()
            return
        observation, all_ready = agreed
        self._observer.used()
        if not self._check.done:
            forward = not self._turns.unseen
            self._guard.run("self-check", self._observer.hold_to, self._check, observation, forward)
        observation = with_layers(observation, self.layers, self._state)
        surely, canary = self._voice.surely, self._canary
        if surely(engine.wants_canary, self._state, observation, self.policy) and canary:
            answer = None
            if all_ready:
                answer = self._switch.asleep("canary", canary.answer, self._state.step)
                if self._council is not None:
                    answer = self._council.canary(answer)
            if answer is not None:
                observation = dataclasses.replace(observation, canary=answer)
        own = surely(engine.decide, self._state, observation, self.policy)
        decided = self._voice.ask(observation, own)
        if decided is None:
            self._stop_together()
            return
        decision, source = decided
        self._last = decision
        if canary is not None:
            loss = measured.canary_loss if measured is not None else None
            self._guard.run("canary", canary.judged, decision, loss)
        executed = self._scaler_skips.executed(
            decision, observation, members, me, left_out=left_out
        )
        held = executed is not Action.PROCEED
        if held and self._running.before == observation.step:
            self._guard.run("act", self._running.put_back)
        halt = decision.reason if executed is Action.HALT else ""
        if self._council is not None and self._council.halt:
            held, halt = True, self._council.halt
        self._plan = StepPlan(hold=held, lr_factor=decision.lr_factor, halt=halt)
        step = OpenStep(observation, decision, source, executed, self._clock() - began)
        self._open = step
        step.tell(self.run_id, self._state.ledger.skip_run + 1)

    def _prelude(self, me: int) -> tuple[list[int], Measured | None, tuple[Command, ...]]:
        """Everything before the decision that concerns this rank alone; any of it may fail."""
        self._home = threading.get_ident()
        turns = self._turns
        if (turns.steps + 1) % LOOK_EVERY == 0:
            self._guard.run("status", self._blind.tell)
        turns.begin()
        saving = self._saving
        if saving.resume_due:
            self._switch.asleep("ledger", saving.resume)
        if saving.first_due:  # lazy parameters made it wait
            self._switch.asleep("snapshot", saving.take_first)
        members = turns.taking_part(self._observer.fresh, me)
        # At this gate, or at the clip before the next one.
        self._observer.probe.check_next(turns.steps <= 3 and not self._check.compared)
        pending = self._canary.pending_loss if self._canary is not None else None
        if self._late.on:
            self._guard.run("measure", self._late.send, members, pending, checked=self._check.done)
            if self._late.sent is not None:
                return members, None, ()
        measured = self._guard.run(
            "measure", self._observer.measure, self._state.step, members, pending
        )
        return members, measured, self._late.take_orders()

    # ---------------------------------------------------------------- the state

    def _settle(self) -> None:
        """Move the state on what was done."""
        if self._late.sent is not None:
            self._open = self._late.hear()
            self._last = self._open.decision
        step = self._open
        if step is None:
            return
        self._probes.after_step(step.applied)
        decision, outcome, before = step.decision, step.outcome, self._state.ledger
        state = self._voice.surely(
            engine.apply, self._state, step.observation, decision, outcome, self.policy
        )
        # All that other ranks rely on first: what fails below is not gone through again.
        self._between.settled(decision, step.executed, step.applied)
        self._state = state
        self._open = None
        if self._council is not None:
            self._council.carried_out(
                outcome.step, outcome.executed.name, outcome.applied, decision.lr_factor
            )
        self._scaler_skips.settled(step.observation, outcome)
        self._chronicle.step(step, before, state)
        self._saving.prune()

    @property
    def state(self) -> State:
        """The engine's state, with the last step settled."""
        last = self._open or self._late.sent
        if last is None or not last.complete:
            return self._state
        if self._home == threading.get_ident():  # elsewhere it could be settled twice
            self._guard.run("settle", self._settle)
        return self._state

    @property
    def now(self) -> State:
        """The engine's state as it is; see `state`."""
        return self._state

    def note(self, event: Event) -> None:
        """Something happened between two steps: move the state on it, and tell everybody."""
        before = self._state.ledger
        self._state = self._voice.surely(engine.note, self._state, event, self.policy)
        self._chronicle.event(event, before, self._state)
        self._saving.prune()

    def adopt_state(self, state: State) -> None:
        """The run was restarted, and this is what it goes on with."""
        self._state = state
        self._chronicle.restated(state)

    # ---------------------------------------------------------------- the safe point

    def _reach_safe_point(self) -> None:
        self._run_safe_point(self._maybe_safe_point)

    def _run_safe_point(self, body: Callable[[], None]) -> None:
        """With several ranks the collectives of a safe point are entered whatever fails here."""
        council, switch = self._council, self._switch
        if council is None:
            switch.asleep("safe_point", body)
            return
        halting = bool(council.halt)
        reached = self._safe_done and body == self._maybe_safe_point  # there is nothing to do
        if not (switch.asleep("safe_point", _did, body) or reached or switch.off):
            # Once more, from the start or where it had begun: what is done already stays as it is,
            # and the others wait for this rank's vote.
            again = self._safe_point if self._safe_done else body
            switch.asleep("safe_point", again)
        if council.off and not switch.off:
            self._switch_off(council.off)
        if council.halt and not halting:
            logger.error("the ranks have parted run=%s why=%s", self.run_id, council.halt)

    def _maybe_safe_point(self) -> None:
        """A training forward begins: is this the first after the step?"""
        if self._safe_done or self._observer.accumulating:
            return
        if self._turns.steps and not self._turns.all_stepped():
            return
        self._safe_done = True
        self._safe_point()
        self._running.keep(self._upcoming)

    def _safe_point(self) -> None:
        """Between two steps: nothing of the last is pending, nothing of the next has begun."""
        hearing = self._late.sent is not None
        if hearing:
            # It is heard of at the next gate, and not before. Copies of the probes must not outlive
            # the step; what held it back, if anything did, they are told then.
            self._probes.after_step(True)
        elif self._council is None:
            self._settle()
        else:  # whatever fails in it on this rank alone, the others go on to what follows
            self._guard.run("settle", self._settle)
            if self._open is not None:
                self._guard.run("settle", self._settle)
        self._turns.over()
        self._between.work(hearing)

    # ---------------------------------------------------------------- several ranks stop

    def _stop_together(self) -> None:
        assert self._council is not None
        self._switch_off(self._council.off)

    def _switch_off(self, why: str) -> None:
        """All ranks hear it at the same step; this one goes on without us, as they do."""
        self._plan = _PROCEED
        self._open = None
        self._switch.turn_off(why)

    def _disband(self, why: str) -> None:
        """What every rank finds out for itself at this point of the step."""
        if self._council is not None:
            self._guard.run("settle", self._settle)
            self._council.disband(why)
            self._switch_off(why)

    def _look_after_loss(self) -> None:
        """The group is gone: were the ranks still alike when it went?"""
        council, switch = self._council, self._switch
        if council is None or not switch.off or switch.detached or switch.sleeping:
            return
        if council.look(self._state.step + self._turns.forwards):
            switch.asleep("ledger", self._halt, council.halt)
            raise TrainingHalted(council.halt)
        self._turns.forwards += 1

    # ---------------------------------------------------------------- for the user

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()

    @property
    def detached(self) -> bool:
        """Nothing of ours is in the loop any more."""
        return self._switch.detached

    def loss(self, *args: Any, **kwargs: Any) -> Any:
        """`loss_fn(*args, **kwargs)`, remembered so that the canary can ask the same again.

        Raises:
            AttachError: attach() was given no function as loss_fn.
        """
        if self._loss_fn is None or isinstance(self._loss_fn, nn.Module):
            raise AttachError(
                "session.loss(...) calls the function given as attach(loss_fn=...), and none was "
                "given; pass the function that computes the loss from a batch"
            )
        canary = self._canary
        if canary is None or not self._awake() or not torch.is_grad_enabled():
            return self._loss_fn(*args, **kwargs)
        self._reach_safe_point()
        self._guard.run("canary", self._record, self._loss_fn, args, kwargs, True)
        output = self._loss_fn(*args, **kwargs)
        self._guard.run("canary", canary.end, output, self._loss_fn, outside=True)
        return output

    def status(self) -> Status:
        """How the run and its protection are doing; moves nothing of the run."""
        ledger = self.state.ledger
        step = self._state.step
        protection, why = self._protection()
        incidents = telling.incidents(ledger)
        return Status(
            run_id=self.run_id,
            step=step,
            mode=self.policy.mode,
            policy=self.policy.name,
            protection=protection,
            why=why,
            blind_spots=tuple(self._blind.found()),
            canary=telling.canary(self._canary, step, off=not self._switch.on),
            candidate=next((s.step for s in ledger.snapshots if not s.healthy), None),
            healthy=tuple(s.step for s in ledger.snapshots if s.healthy),
            snapshot_bytes=self._store.size_bytes,
            on_disk=self._disk.steps,
            counters=ledger.counters,
            link=self._link.status(),
            incidents=incidents,
            layer_names=telling.layer_names(incidents, self.layers.layers),
            scaler_skips=self._scaler_skips.count,
            late_skips=self._late_skips,
            internal_errors=dict(self._guard.counts),
            directory=str(self.directory) if self._chronicle.recorder is not None else "",
            rank=self._council.rank if self._council is not None else 0,
            ranks=self._council.world if self._council is not None else 1,
            lineage=self._keeper.told,
            self_check=str(self._check),
            reads=str(self._late),
            notes=telling.notes(self._saving, self._probes),
        )

    def _says(self) -> tuple[str, str]:
        """Protection and why, where it is no longer what the last decision says; see link.Says."""
        protection, why = self._protection()
        last = self._last
        decided = Protection.WARMING if last is None else last.readings.protection
        return ("", "") if protection is decided else (str(protection), why)

    def _protection(self) -> tuple[Protection, str]:
        switch = self._switch
        return telling.protection(
            off="detached" if switch.detached and not switch.off else switch.off,
            mode=self.policy.mode,
            ledger=self._state.ledger,
            last=self._last,
            forsaken=self._blind.forsaken,
        )

    def checkpointed(self, path: str | os.PathLike[str]) -> None:
        """Say that a checkpoint of your own, of this moment between two steps, lies at `path`.

        Confirmed by quiet steps, it is something to roll back to, by Snapshots(adopt=...).

        Raises:
            AttachError: attach() was given no function that could load it.
        """
        if self._snapshots.adopt is None:
            raise AttachError(
                "session.checkpointed(path) is for checkpoints that sentinel may put back; give it "
                "the function that loads one: attach(snapshots=Snapshots(adopt=load))"
            )
        if self._awake():
            self._guard.run("snapshot", self._adopt, os.fspath(path))

    def _adopt(self, path: str) -> None:
        state, last = self.state, self._last
        quiet = (last is None or last.readings.quiet) and not self._between.going_back
        incident = "" if quiet else next((i.summary for i in state.ledger.incidents[-1:]), "")
        self._saving.adopt(path, quiet=quiet, incident=incident)

    def saved(self, path: str | os.PathLike[str]) -> None:
        """An adapter says: the trainer has just written a checkpoint of its own, between two steps.

        A process that starts from it will be recognised; with Snapshots(adopt=...) it is also
        something to roll back to.
        """
        if self._snapshots.adopt is not None:
            self.checkpointed(path)
        elif self._awake():
            self._guard.run("settle", self._settle)
            self._guard.run("ledger", self._saving.remember)

    # ---------------------------------------------------------------- the end

    def detach(self) -> None:
        """Take every hook out, close the trace, say goodbye; a second call does nothing.

        Called while an exception is on its way out of the loop, it says no goodbye: the run did not
        finish, and on-call is to hear of it.
        """
        self._detach(crashed=self._ending.is_a_crash())

    def _detach(self, *, crashed: bool) -> None:
        if self._switch.detached:
            return
        self._guard.run("settle", self._settle)
        self._switch.detached = True
        self._hooks.remove()
        if self._canary is not None:
            self._guard.run("detach", self._canary.remove)
        _registry.leave(self._target.optimizers)
        self._guard.run("snapshot", self._saving.close)
        self._saving.clear()
        self._running.clear()
        self._observer.used()
        if self._council is not None:
            self._guard.run("detach", self._council.say_leaving)
        self._close(crashed=crashed)

    def stand_aside(self, why: str) -> None:
        """Take the hooks out again: this process shall train unattached, and status() says why."""
        self._switch.off = why
        logger.error("not attached, training goes on unprotected run=%s why=%s", self.run_id, why)
        self.detach()

    def at_exit(self) -> None:
        """The interpreter ends: close what is open, and leave the hooks."""
        if not self._switch.detached:
            self._guard.run("settle", self._settle)
            self._switch.detached = True
            self._guard.run("snapshot", self._saving.close)
            # Set for what nobody caught, when its traceback was printed.
            self._close(crashed=crashed(getattr(sys, "last_value", None)))

    def _close(self, *, crashed: bool) -> None:
        if self._council is not None:
            self._council.close()
        self._guard.run("ledger", self._close_ledger)
        how = "halted" if self._halted else "lost" if crashed else "finished"
        self._chronicle.close(how, self._state)

    def _close_ledger(self) -> None:
        try:
            if self._turns.steps and not self._saving.resume_due:
                self._saving.remember()
                self._keeper.save(self._state, sync=True)
        finally:
            self._keeper.close()

    def _halt(self, reason: str) -> None:
        """Before TrainingHalted is raised: the ledger, the marker, and what a person will want."""
        self._settle()
        self._halted = True
        try:
            self._keeper.halt(self._state, reason, exit_code=HALT_EXIT_CODE)
        finally:
            logger.error(
                "halted run=%s step=%s reason=%s marker=%s",
                self.run_id,
                self._state.step - 1,
                reason,
                self.directory / HALTED,
            )
            if self._disk.enabled:
                self._guard.run("snapshot", self._saving.save_evidence)

    def __del__(self) -> None:
        """The user let go of model, optimizer and session: so do we."""
        if self._attached and not self._switch.detached:
            with contextlib.suppress(Exception):
                self._detach(crashed=False)

    # ---------------------------------------------------------------- copies and forks

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled with whatever holds it, it is None: no other process has these hooks."""
        return type(None), ()

    def __copy__(self) -> Session:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        return self

    def forked(self) -> None:
        """In a forked child: trace, ledger, sidecar and snapshots are the parent's."""
        self._switch.off = "this process was forked from the one that is watched"
        self._switch.detached = True
        self._open = self._council = None
        self._link = EmbeddedLink(self.policy)
        self._late.forget()
        self._between.forget()
        self._chronicle.recorder = None


def _did(body: Callable[[], None]) -> bool:
    body()
    return True


def _rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Rows of the batch: the first tensor's first dimension; -1 if there is none."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return int(value.shape[0]) if value.dim() else 1
    return -1


def _ddp_in(target: Target) -> list[Any]:
    ddp = nn.parallel.DistributedDataParallel
    return [m for model in target.models for m in model.modules() if isinstance(m, ddp)]

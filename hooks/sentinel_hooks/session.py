"""One training process under watch: observe, decide, act; and stand aside when anything fails.

    session = sentinel.attach(model=model, optimizer=optimizer, lr_scheduler=s, grad_scaler=g)
    print(session.status())
    session.detach()                                  or: with sentinel.attach(...) as session

A step: the observer collects losses and norms (observe.py); at the gate they become an Observation,
the engine (or the sidecar) answers a Decision, the gate carries it out. What was really done, the
Outcome, moves the engine's state at the next moment that comes: safe point, next gate, `state`,
status() or detach().

The safe point is the start of the first training forward after every optimizer of the group has
stepped, with no accumulation open: only there are snapshots taken and restored. When no forward of
the watched models is ever seen (a compiled inner module), it is the moment right after the step.

Several optimizers are one logical step: one decision at the first gate, over all gradients that are
new, and the others follow it. A later gate whose gradients are newer than the decision (a GAN) is
only checked for non-finite ones and held back on its own. An optimizer that has not stepped for
DORMANT steps is not waited for.

Errors:  from attach() on nothing of ours raises into the loop (guard.py), except TrainingHalted
         where a policy may halt.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from sentinel.core import engine
from sentinel.core.events import (
    AutomationSet,
    Event,
    Restored,
    RestoreFailed,
    SnapshotLost,
    SnapshotTaken,
)
from sentinel.core.policy import CanaryMode, Policy
from sentinel.core.state import State, Stats
from sentinel.core.types import (
    Action,
    CanaryAnswer,
    Decision,
    Mode,
    Observation,
    Outcome,
    Protection,
    Source,
)
from sentinel.traces.ledger import HALTED
from sentinel.traces.recorder import Recorder
from sentinel_hooks import configuration
from sentinel_hooks.canary import Canary
from sentinel_hooks.errors import HALT_EXIT_CODE, AttachError
from sentinel_hooks.guard import Guard
from sentinel_hooks.layers import LayerTable
from sentinel_hooks.ledger_file import Keeper, Resumed, fingerprint
from sentinel_hooks.link import EmbeddedLink, Link
from sentinel_hooks.observe import Faint, Observer
from sentinel_hooks.scaling import kernel_will_drop, scaler_dropped
from sentinel_hooks.seams.clip_tap import CLIP_TAP
from sentinel_hooks.seams.gate import Gate, ScalerTap, StepPlan
from sentinel_hooks.seams.loss_tap import LOSS_TAP
from sentinel_hooks.seams.safe_point import ForwardTap
from sentinel_hooks.signals import Signals
from sentinel_hooks.snapshots import Snapshots
from sentinel_hooks.snapshots.disk import Adopted, DiskStore, Failed
from sentinel_hooks.snapshots.ram import NotReadyError, RamStore, SnapshotError
from sentinel_hooks.snapshots.running import RunningStats
from sentinel_hooks.status import BlindSpot, Status
from sentinel_hooks.target import Target

logger = logging.getLogger(__name__)

DORMANT = 16
PAUSE_FILE = "PAUSE"  # in run_dir or the run's own directory: automation is paused while it exists
LOOK_EVERY = 64  # steps, or forwards without one, between two looks for blind spots to log
PAUSE_EVERY = 8  # steps between two looks for it
# What may fail again and again without the protection being gone.
TOLERATED = frozenset(
    {"measure", "backward", "clip", "canary", "snapshot", "link", "detach", "ledger"}
    | {"batch_id", "norm_fn"}  # the user's own functions
)

_PROCEED = StepPlan()
_attached: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def is_attached(optimizer: torch.optim.Optimizer) -> bool:
    """Some session watches this optimizer."""
    return optimizer in _attached


def open_sessions() -> tuple[Session, ...]:
    """Those of this process that nobody has detached."""
    return tuple(s for s in _sessions if not s.detached)


@dataclass(slots=True)
class _OpenStep:
    """A logical step from its decision to its outcome."""

    observation: Observation
    decision: Decision
    source: Source
    executed: Action
    gate_s: float
    applied: bool = False
    complete: bool = False


class Session:
    """Lives from attach() to detach(); one for each rank.

    Attributes:
        run_id: names the run everywhere.
        directory: where its trace lies.
        policy: the one in force.
        layers: the layer table; columns follow its order.
    """

    def __init__(
        self,
        target: Target,
        table: LayerTable,
        *,
        run_id: str,
        run_dir: Path,
        link: Link,
        incarnation: str,
        signals: Signals,
        snapshots: Snapshots,
        keeper: Keeper | None = None,
        record: bool = True,
        loss_fn: Any = None,
        batch_id: Callable[[], str] | None = None,
        norm_fn: Callable[[], Any] | None = None,
        blind_spots: Sequence[BlindSpot] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Use attach()."""
        self.run_id = run_id
        self.run_dir = run_dir
        self.directory = run_dir / run_id
        self.policy: Policy = link.policy
        self.layers = table
        self._target = target
        self._link = link
        self._snapshots = snapshots
        self._given_spots = tuple(blind_spots)
        self._clock = clock
        self._loss_fn = loss_fn
        self._keeper = keeper or Keeper(
            self.directory,
            run=run_id,
            incarnation=incarnation,
            policy=self.policy,
            enabled=record,
        )
        self._state: State = self._keeper.state()
        self._guard = Guard(run_id, on_error=link.count_error, on_broken=self._broken)
        self._observer = Observer(
            target,
            table,
            self._guard,
            self._awake,
            signals=signals,
            batch_id=batch_id,
            norm_fn=norm_fn,
        )
        self._store = RamStore(target, snapshots)
        self._running = RunningStats(target.models)
        self._running_of = -1  # the step before which they were kept
        self._disk = DiskStore(
            target,
            snapshots,
            self.directory,
            run=run_id,
            policy=self.policy,
            incarnation=incarnation,
            first_step=self._state.step,
        )
        self._canary = (
            Canary(target.models, self.policy.canary.age, loss_fn)
            if self.policy.canary.mode is CanaryMode.ON
            else None
        )

        self._off = ""
        self._detached = False
        self._masked = 0
        # The logical step.
        self._open: _OpenStep | None = None
        self._plan = _PROCEED
        self._last: Decision | None = None
        self._steps = 0  # decided
        self._home = 0  # the thread that trains
        self._done: set[int] = set()  # optimizers that stepped in it
        self._stepped = [0] * len(target.optimizers)  # ... and when each did last
        self._gates_since_update = 0
        self._late_skips = 0
        self._told: set[str] = set()  # kinds of blind spot that were logged
        self._each = False  # members of the open step may be non-finite one by one
        # The safe point.
        self._safe_done = False
        self._forwards = 0  # since the last gate
        self._forwards_usual = 0  # most of one step so far
        self._unseen = 0  # steps in a row without any
        self._first_snapshot_due = snapshots.ram or self._disk.enabled
        self._snapshot_due = False
        self._snapshot_trouble = ""
        self._restore_due: Decision | None = None
        self._resume_due = True  # the weights are compared with those that the run has known
        self._halted = False
        self._pause_looked = self._state.step - PAUSE_EVERY
        self._record_trouble = ""
        self._recorder = self._open_recorder(incarnation) if record else None

        # Hooks last: a failure above leaves the user's objects untouched.
        self._gates = [Gate(o, self, self._guard) for o in target.optimizers]
        self._index = {id(o): i for i, o in enumerate(target.optimizers)}
        self._scaler_tap = (
            ScalerTap(target.scaler, self._before_update, self._guard)
            if target.live_scaler is not None
            else None
        )
        self._forward_tap = ForwardTap(target.models, self)
        self._faint = Faint(self._observer)
        LOSS_TAP.subscribe(self._faint)
        CLIP_TAP.subscribe(self._faint)
        _attached.update(target.optimizers)
        _sessions.add(self)

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
        self._off = "this process was forked from the one that is watched"
        self._detached = True
        self._open = self._recorder = self._restore_due = None
        self._link = EmbeddedLink(self.policy)

    def __del__(self) -> None:
        """The user let go of model, optimizer and session: so do we."""
        if not getattr(self, "_detached", True) and hasattr(self, "_faint"):
            with contextlib.suppress(Exception):
                self.detach()

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
        return self._detached

    @property
    def state(self) -> State:
        """The engine's state, with the last step settled."""
        if self._open is None or not self._open.complete:
            return self._state
        if self._home == threading.get_ident():  # elsewhere it could be settled twice
            self._guard.run("settle", self._settle)
        return self._state

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
        self._masked_run("safe_point", self._maybe_safe_point)
        self._guard.run("canary", self._record, self._loss_fn, args, kwargs, True)
        output = self._loss_fn(*args, **kwargs)
        self._guard.run("canary", canary.end, output, self._loss_fn, outside=True)
        return output

    def status(self) -> Status:
        """How the run and its protection are doing; moves nothing of the run."""
        ledger = self.state.ledger
        step = self._state.step
        protection, why = self._protection()
        canary = self._canary
        return Status(
            run_id=self.run_id,
            step=step,
            mode=self.policy.mode,
            policy=self.policy.name,
            protection=protection,
            why=why,
            blind_spots=tuple(self._blind_spots()),
            canary="off by policy" if canary is None else canary.availability(step),
            candidate=next((s.step for s in ledger.snapshots if not s.healthy), None),
            healthy=tuple(s.step for s in ledger.snapshots if s.healthy),
            snapshot_bytes=self._store.size_bytes,
            on_disk=self._disk.steps,
            counters=ledger.counters,
            link=self._link.status(),
            incidents=ledger.incidents[-3:],
            late_skips=self._late_skips,
            internal_errors=dict(self._guard.counts),
            directory=str(self.directory) if self._recorder is not None else "",
            lineage=self._keeper.told,
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

    def saved(self, path: str | os.PathLike[str]) -> None:
        """An adapter says: the trainer has just written a checkpoint of its own, between two steps.

        A process that starts from it will be recognised; with Snapshots(adopt=...) it is also
        something to roll back to.
        """
        if self._snapshots.adopt is not None:
            self.checkpointed(path)
        elif self._awake():
            self._guard.run("settle", self._settle)
            self._guard.run("ledger", self._remember)

    def detach(self) -> None:
        """Take every hook out, close the trace, say goodbye; a second call does nothing."""
        if self._detached:
            return
        self._guard.run("settle", self._settle)
        self._detached = True
        for gate in self._gates:
            self._guard.run("detach", gate.remove)
        if self._scaler_tap is not None:
            self._guard.run("detach", self._scaler_tap.remove)
        self._guard.run("detach", self._forward_tap.remove)
        LOSS_TAP.unsubscribe(self._faint)
        CLIP_TAP.unsubscribe(self._faint)
        if self._canary is not None:
            self._guard.run("detach", self._canary.remove)
        for optimizer in self._target.optimizers:
            _attached.discard(optimizer)
        self._guard.run("snapshot", self._close_disk)
        self._store.clear()
        self._running.clear()
        self._observer.used()
        self._close()

    # ---------------------------------------------------------------- forward

    def listening(self) -> bool:
        """False while everything shall pass unseen: off, detached, or our own doing."""
        return not (self._off or self._masked or self._detached)

    def _awake(self) -> bool:
        """Listening, and not inside a step() that evaluates its closure again."""
        return self.listening() and not any(gate.busy() for gate in self._gates)

    def on_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward tap: a training forward begins."""
        if not self._awake() or torch._C._current_graph_task_id() != -1:
            return  # the second: recomputed inside a backward pass
        self._forwards += 1
        if self._forwards % LOOK_EVERY == 0:
            self._guard.run("status", self._tell_blind_spots)
        self._masked_run("safe_point", self._maybe_safe_point)
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
        self._forwards += 1
        self._masked_run("safe_point", self._maybe_safe_point)
        if batch:
            self._observer.rows = _rows(batch, {})

    def _record(
        self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outside: bool
    ) -> None:
        canary, step = self._canary, self._state.step
        if canary is None or self._observer.accumulating or not canary.due(step, call, outside):
            return
        canary.begin(step, call, args, kwargs, outside=outside)

    # ---------------------------------------------------------------- the gate

    def zeroed(self, optimizer: torch.optim.Optimizer) -> None:
        """Gate: the user dropped this optimizer's gradients."""
        if self.listening():
            self._observer.zeroed(1 << self._index[id(optimizer)])

    def before_step(self, optimizer: torch.optim.Optimizer, closure: bool) -> StepPlan | None:
        """Gate: gradients are final; what shall be done with this step?"""
        began = self._clock()
        observer, me = self._observer, self._index[id(optimizer)]
        bit = 1 << me
        observer.probe.refresh()
        if not (observer.accumulating or observer.fresh or closure) and _has_no_rate(optimizer):
            return None  # torch.distributed.checkpoint makes optimizer state by a step with lr 0
        self._gates_since_update += 1
        if me in self._done:  # it steps again: the last logical step is over, whoever is missing
            self._done.clear()
        first = not self._done
        if first:
            self._plan = _PROCEED
            self._settle()
            self._decide(began, me)
        newer = observer.newer & bit
        self._done.add(me)
        self._stepped[me] = self._steps
        observer.fresh &= ~bit
        observer.newer &= ~bit
        if first:
            return self._plan
        observer.forget(bit)
        if (newer or self._each) and not self._plan.hold and observer.late_nonfinite(me):
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
        open_ = self._open
        if open_ is not None:
            if not plan.hold and not kernel_will_drop(optimizer):
                open_.applied = True
                if self._plan.hold:  # it could not be carried out
                    open_.executed = Action.PROCEED
            open_.complete = True
        self._safe_done = False
        if plan.halt:
            self._masked_run("ledger", self._halt, plan.halt)
        if self._unseen and self._all_stepped():
            self._masked_run("safe_point", self._safe_point)

    def _decide(self, began: float, me: int) -> None:
        """Observe, decide, and open the step."""
        self._home = threading.get_ident()
        self._steps += 1
        if self._steps % LOOK_EVERY == 0:
            self._guard.run("status", self._tell_blind_spots)
        self._unseen = 0 if self._forwards else self._unseen + 1
        self._forwards_usual = max(self._forwards_usual, self._forwards)
        self._forwards = 0
        if self._resume_due:
            self._masked_run("ledger", self._resume)
        if self._first_snapshot_due:  # lazy parameters made it wait
            self._masked_run("snapshot", self._take_first)
        members = self._taking_part(me)
        canary = self._canary
        measured = self._guard.run(
            "measure",
            self._observer.observe,
            self._state.step,
            self._state.ledger.attempt,
            members,
            canary.pending_loss if canary is not None else None,
            self._link.take_commands(),
        )
        # Measuring failed: say so, and decide on nothing.
        observation, canary_loss = measured or (Observation(self._state.step, blind=True), None)
        self._observer.used()
        if engine.wants_canary(self._state, observation, self.policy) and canary is not None:
            answer: CanaryAnswer | None = self._masked_run(
                "canary", canary.answer, self._state.step
            )
            if answer is not None:
                observation = dataclasses.replace(observation, canary=answer)
        own = engine.decide(self._state, observation, self.policy)
        decision, source = self._link.decide(observation, own, self._state)
        self._last = decision
        if canary is not None:
            self._guard.run("canary", _keep_batch, canary, decision, canary_loss)
        executed = decision.action
        self._each = False
        # With a loss far above its baseline it is no routine: nothing of such a step is applied.
        calm = not decision.readings.spike_score > self.policy.spike.z_stay
        if executed is Action.SKIP_STEP and _routine_overflow(observation):
            if any(kernel_will_drop(self._target.optimizers[m]) for m in members):
                if calm or len(members) == 1:
                    executed = Action.PROCEED  # the scaler's business: it drops the step by itself
            elif (
                calm
                and self._target.live_scaler is not None
                and len(members) > 1
                and not self._observer.late_nonfinite(me)
            ):
                # Another optimizer overflowed: the scaler leaves its step() out and this one in,
                # as it does unattached. Should it come all the same, it is looked at by itself.
                executed, self._each = Action.PROCEED, True
        held = executed is not Action.PROCEED
        if held and self._running_of == observation.step:
            self._guard.run("act", self._running.put_back)
        halt = decision.reason if executed is Action.HALT else ""
        self._plan = StepPlan(hold=held, lr_factor=decision.lr_factor, halt=halt)
        self._open = _OpenStep(observation, decision, source, executed, self._clock() - began)
        in_a_row = self._state.ledger.skip_run + 1
        # Of a long row of skips the 1st, 2nd, 4th, 8th ... is told: it may go on for days.
        if held and (executed is not Action.SKIP_STEP or in_a_row & (in_a_row - 1) == 0):
            logger.warning(
                "%s run=%s step=%s rule=%s reason=%s",
                executed.name.lower(),
                self.run_id,
                decision.step,
                decision.rule,
                decision.reason,
            )

    def _taking_part(self, me: int) -> list[int]:
        """Optimizers whose gradients belong to this decision."""
        if len(self._gates) == 1:
            return [0]
        bits = self._observer.fresh | (1 << me)
        return [
            m
            for m in range(len(self._gates))
            if bits >> m & 1 and (m == me or not self._dormant(m))
        ]

    def _dormant(self, member: int) -> bool:
        return self._steps - self._stepped[member] > DORMANT

    def _all_stepped(self) -> bool:
        """Every optimizer that still takes part has stepped in this logical step."""
        return len(self._done) == len(self._gates) or all(
            m in self._done or self._dormant(m) for m in range(len(self._gates))
        )

    def _before_update(self) -> None:
        """Scaler tap: on overflow step() was never called, and the step is observed here."""
        gates, self._gates_since_update = self._gates_since_update, 0
        if gates or not self._awake() or not self._observer.accumulating:
            return
        if not scaler_dropped(self._target):
            return
        began = self._clock()
        self._done.clear()
        self._settle()
        self._observer.probe.refresh()
        self._decide(began, 0)
        self._done = set(range(len(self._gates)))
        self._stepped = [self._steps] * len(self._gates)
        self._observer.fresh = 0
        open_ = self._open
        if open_ is not None:
            if open_.executed is Action.SKIP_STEP and _routine_overflow(open_.observation):
                open_.executed = Action.PROCEED
            open_.complete = True
        self._safe_done = False

    def _masked_run(self, where: str, body: Callable[..., Any], *args: Any) -> Any:
        """Run `body` guarded and with all of our own seams asleep."""
        self._masked += 1
        try:
            with torch.no_grad():
                return self._guard.run(where, body, *args)
        finally:
            self._masked -= 1

    # ---------------------------------------------------------------- settle and safe point

    def _settle(self) -> None:
        """Move the state on what was done."""
        open_, self._open = self._open, None
        if open_ is None:
            return
        observation, decision = open_.observation, open_.decision
        outcome = Outcome(observation.step, open_.executed, open_.applied, open_.source)
        before = self._state.ledger
        self._state = engine.apply(self._state, observation, decision, outcome, self.policy)
        self._keeper.settled(observation, decision, outcome)
        self._keeper.moved(before, self._state)  # before a restore or a halt is carried out
        self._snapshot_due = decision.take_snapshot and open_.applied
        if open_.executed is Action.ROLLBACK:
            self._restore_due = decision
        if self._recorder is not None:
            try:
                self._recorder.step(
                    observation, decision, outcome, self._state, gate_s=open_.gate_s
                )
                if self._record_trouble:
                    self._trace_healed()
            except OSError as error:
                self._trace_failed(error)
        self._link.settled(observation, decision, outcome)
        self._prune()

    def _note(self, event: Event) -> None:
        before = self._state.ledger
        self._state = engine.note(self._state, event, self.policy)
        self._keeper.moved(before, self._state)
        if self._recorder is not None:
            try:
                self._recorder.event(event, self._state)
            except OSError as error:
                self._trace_failed(error)
        self._link.event(event)
        self._prune()

    def _prune(self) -> None:
        self._store.keep_only(s.step for s in self._state.ledger.snapshots)
        self._disk.follow(self._state.ledger)

    def _maybe_safe_point(self) -> None:
        """A training forward begins: is this the first after the step?"""
        if self._safe_done or self._observer.accumulating:
            return
        if self._steps and not self._all_stepped():
            return
        self._safe_done = True
        self._safe_point()
        self._running.keep()
        self._running_of = self._state.step

    def _safe_point(self) -> None:
        """Between two steps: nothing of the last is pending, nothing of the next has begun."""
        self._settle()
        self._done.clear()
        if self._resume_due:
            self._guard.run("ledger", self._resume)
        if self._state.step - self._pause_looked >= PAUSE_EVERY:
            self._look_for_pause()
        self._poll_disk()
        if self._first_snapshot_due:
            self._take_first()
        elif self._restore_due is not None:
            decision, self._restore_due = self._restore_due, None
            self._restore(decision.target, decision.rule)
        elif self._snapshot_due:
            self._snapshot_due = False
            self._take()

    def _resume(self) -> None:
        """The user's weights are loaded: whose are they, and what is left of the snapshots?"""
        try:
            print_ = fingerprint(self._target)
        except NotReadyError:
            return  # lazy parameters; it is tried again
        except Exception as error:  # noqa: BLE001  tensors of a kind that we do not know
            self._guard.note("ledger", error)
            print_ = ""
        self._resume_due = False
        resumed = self._keeper.recognise(print_, self._state)
        if self._keeper.found is None:
            self._keeper.mark(print_, self._state)
            self._keeper.save(self._state, sync=True)
            return
        self._state = self._with_copies(resumed)
        if self._recorder is not None:
            try:
                self._recorder.restate(self._state)
            except OSError as error:
                self._trace_failed(error)
        self._keep_what_is_left(resumed)
        self._keeper.mark(print_, self._state)
        self._keeper.save(self._state, sync=True)

    def _with_copies(self, resumed: Resumed) -> State:
        """The state, its registry with the healthy copies on disk that RAM had outlived."""
        state, ledger = resumed.state, resumed.state.ledger
        if not (resumed.same_model and self._disk.enabled):
            return state
        known = {s.step: s for s in ledger.snapshots}
        for copy in self._disk.healthy_copies(state.step):
            target, undone = ledger.last_target, ledger.last_rollback
            if target is None or undone is None or not target < copy.step <= undone:
                known.setdefault(copy.step, copy)
        registry = tuple(known[step] for step in sorted(known))
        return dataclasses.replace(state, ledger=dataclasses.replace(ledger, snapshots=registry))

    def _keep_what_is_left(self, resumed: Resumed) -> None:
        """Snapshots of the processes before; and a rollback that they decided and did not do."""
        step, at, ledger = self._state.step, resumed.from_step, self._state.ledger
        on_disk: tuple[int, ...] = ()
        if resumed.same_model and self._disk.enabled:
            on_disk = self._disk.find(s.step for s in ledger.snapshots)
        pending, rule = ledger.pending_restore, ledger.pending_rule
        done = at is not None and any(s.step == at and s.healthy for s in ledger.snapshots)
        if pending is not None and at is not None and done and at <= pending:
            # Started from the snapshot that it was to be rolled back to: that is the rollback.
            self._note(Restored(step, at, resumed.state.stats))
            pending = None
        for snapshot in self._state.ledger.snapshots:
            reason = ""
            if snapshot.step not in on_disk:
                reason = "it was in the memory of a process that has ended"
            elif not snapshot.healthy and (at is None or at < snapshot.step):
                reason = "it was not confirmed before the process ended"
            if reason and snapshot.step != pending:
                self._note(SnapshotLost(step, snapshot.step, reason))
        if pending is None:
            return
        if pending in on_disk and at is not None and at > pending:
            self._restore(pending, rule)
            return
        why = "the process ended before it was restored"
        if pending in on_disk:
            why += ", and was started again with other weights, which are left as they are"
        self._note(RestoreFailed(step, pending, why))

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
                self._guard.run("snapshot", self._save_evidence)

    def _save_evidence(self) -> None:
        """The weights as they are now, on disk for whoever looks into it; no rollback target."""
        self._disk.wait()
        self._poll_disk()
        if self._disk.ready:
            step = self._state.step
            self._store.take(step, self._state.stats)
            self._disk.offer(self._store.image(step), self._state.ledger)
            self._disk.wait()
            self._poll_disk()
            self._disk.follow(self._state.ledger, again=True)

    def _take_first(self) -> None:
        """What training starts from. Not at attach(): a checkpoint may be loaded after it."""
        self._first_snapshot_due = False
        try:
            self._take()
        except NotReadyError:
            self._first_snapshot_due = True

    def _take(self) -> None:
        step, on_disk = self._state.step, self._disk.due(self._state.step)
        if not (self._snapshots.ram or on_disk):
            return
        try:
            self._store.take(step, self._state.stats)
        except NotReadyError:
            raise
        except SnapshotError as error:
            if not self._snapshot_trouble:
                logger.warning(
                    "no snapshot could be taken run=%s step=%s reason=%s", self.run_id, step, error
                )
            self._snapshot_trouble = str(error)
            return
        self._snapshot_trouble = ""
        self._guard.run("ledger", self._remember)
        if on_disk:
            image, ledger = self._store.image(step), self._state.ledger
            on_disk = bool(self._guard.run("snapshot", self._disk.offer, image, ledger))
        if self._snapshots.ram:
            self._note(SnapshotTaken(step))
            return
        self._store.clear()  # the save in flight holds it
        if on_disk:
            self._note(SnapshotTaken(step, "disk"))

    def _remember(self) -> None:
        """A restarted process can recognise these weights."""
        self._keeper.mark(fingerprint(self._target), self._state)

    def _poll_disk(self) -> None:
        """What has become of saves in the background."""
        for ended in self._disk.poll():
            step, target = self._state.step, ended.step
            if all(s.step != target for s in self._state.ledger.snapshots):
                continue
            if target in self._disk.steps:
                self._note(SnapshotTaken(target, "disk"))
            elif target not in self._store.steps and isinstance(ended, Failed):
                self._note(SnapshotLost(step, target, ended.reason))

    def _adopt(self, path: str) -> None:
        state, last = self.state, self._last
        quiet = (last is None or last.readings.quiet) and self._restore_due is None
        self._guard.run("ledger", self._remember)
        self._disk.adopt(path, state.step, state.stats, state.ledger, quiet=quiet)
        if quiet and self._disk.enabled:
            self._note(SnapshotTaken(state.step, "disk"))

    def _close_disk(self) -> None:
        self._disk.close()
        self._poll_disk()

    def _restore(self, decided: int | None, rule: str) -> None:
        step, target = self._state.step, decided
        began = self._clock()
        if target is None:
            self._note(RestoreFailed(step, None, "there is no healthy snapshot"))
            return
        reason = ""
        while target is not None:
            try:
                stats, interrupt = self._put_back_wholly(target)
                break
            except Exception as error:
                known = isinstance(error, SnapshotError)
                reason = str(error) if known else f"{type(error).__name__}: {error}"
                logger.error(
                    "a snapshot cannot be used run=%s step=%s target=%s reason=%s",
                    self.run_id,
                    step,
                    target,
                    reason,
                )
                if not known:  # it may be half done
                    self._note(RestoreFailed(step, target, reason))
                    raise
            self._note(SnapshotLost(step, target, reason))
            older = [s.step for s in self._state.ledger.snapshots if s.healthy and s.step < target]
            target = max(older, default=None)
        else:
            self._note(RestoreFailed(step, decided, reason))
            return
        self._note(Restored(step, target, stats))
        logger.info(
            "rolled back run=%s from_step=%s to_step=%s rule=%s took_s=%.3f",
            self.run_id,
            step,
            target,
            rule,
            self._clock() - began,
        )
        if interrupt is not None:
            raise interrupt

    def _put_back_wholly(self, target: int) -> tuple[Stats, KeyboardInterrupt | None]:
        """An interrupt waits until it is done: half a restore would be saved by the handler."""
        try:
            return self._put_back(target), None
        except KeyboardInterrupt as interrupt:
            return self._put_back(target), interrupt

    def _put_back(self, target: int) -> Stats:
        """From RAM, or from the disk when RAM has it not; a save in flight is awaited."""
        if target in self._store.steps or not self._disk.enabled:
            return self._store.restore(target)
        found = self._disk.load(target)
        if isinstance(found, Adopted):
            return self._disk.put_back(found)
        return self._store.put_back(found)

    def _look_for_pause(self) -> None:
        """A file pauses automation without any sidecar."""
        self._pause_looked = self._state.step
        found = any(os.path.exists(place / PAUSE_FILE) for place in (self.run_dir, self.directory))
        if found != self._keeper.paused_by_file:
            self._keeper.paused_by_file = found
            self._note(AutomationSet(self._state.step, found, f"file {PAUSE_FILE}"))

    # ---------------------------------------------------------------- failing and closing

    def _broken(self, where: str) -> None:
        """Guard: it failed again and again at one place."""
        if self._off or where in TOLERATED:
            return
        self._off = f"sentinel failed at {where} again and again: {self._guard.last}"
        logger.error(
            "sentinel switched itself off, training goes on unprotected run=%s why=%s",
            self.run_id,
            self._off,
        )

    def _open_recorder(self, incarnation: str) -> Recorder:
        rows = self.layers.rows()
        recorder = Recorder(
            self.directory,
            run=self.run_id,
            policy=self.policy,
            state=self._state,
            incarnation=incarnation,
            layers=rows,
            config=configuration.describe(
                self._target,
                rows,
                self.policy,
                run=self.run_id,
                incarnation=incarnation,
                snapshots=self._snapshots,
            ),
        )
        if recorder.trouble:
            self._trace_failed(OSError(recorder.trouble))
        return recorder

    def _trace_failed(self, error: OSError) -> None:
        if not self._record_trouble:
            logger.warning("the trace cannot be written run=%s reason=%s", self.run_id, error)
        self._record_trouble = str(error)

    def _trace_healed(self) -> None:
        logger.info(
            "the trace is written again run=%s step=%s missing=%s",
            self.run_id,
            self._state.step,
            self._recorder.lost_records if self._recorder is not None else 0,
        )
        self._record_trouble = ""

    def _trace_spots(self) -> list[BlindSpot]:
        lost = self._recorder.lost_records if self._recorder is not None else 0
        if self._record_trouble:
            what = f"the trace has holes: {self._record_trouble}"
            return [BlindSpot(what, f"{lost} records are missing so far; it is tried every step")]
        if lost:
            what = f"the trace has holes: {lost} records are missing"
            return [BlindSpot(what, "the disk had failed; it is written again")]
        return []

    def _close(self) -> None:
        self._guard.run("ledger", self._close_ledger)
        how = "halted" if self._halted else "finished"
        self._guard.run("link", self._link.close, how, self._state)
        if self._recorder is not None:
            try:
                self._recorder.close()
            except OSError as error:
                self._trace_failed(error)

    def _close_ledger(self) -> None:
        try:
            if self._steps and not self._resume_due:
                self._remember()
                self._keeper.save(self._state, sync=True)
        finally:
            self._keeper.close()

    def at_exit(self) -> None:
        """The interpreter ends: close what is open, and leave the hooks."""
        if not self._detached:
            self._guard.run("settle", self._settle)
            self._detached = True
            self._guard.run("snapshot", self._close_disk)
            self._close()

    # ---------------------------------------------------------------- telling

    def _protection(self) -> tuple[Protection, str]:
        if self._off:
            return Protection.OFF, self._off
        if self._detached:
            return Protection.OFF, "detached"
        ledger = self._state.ledger
        if self.policy.mode is Mode.OBSERVE:
            return Protection.OFF, "observing: decisions are made and recorded, nothing is done"
        if not ledger.automation:
            return Protection.OFF, "a person paused automation"
        if ledger.stopped:
            return Protection.OFF, "the rollback budget is spent; a person is needed"
        if self._last is None:
            return Protection.WARMING, "no step seen yet"
        if self._forsaken():
            return Protection.BLIND, "training goes on, but no watched optimizer steps any more"
        protection = self._last.readings.protection
        if protection is Protection.BLIND:
            return protection, "neither loss nor gradient norm was measured at the last step"
        if protection is Protection.WARMING:
            return protection, (
                "baselines are warming up; non-finite gradients and losses are already acted on"
            )
        return protection, "every rule has its baseline"

    def _tell_blind_spots(self) -> None:
        """Each kind of blind spot is logged once: who never asks for the status shall know too."""
        for spot in self._blind_spots():
            kind = "".join(c for c in spot.what if not c.isdigit())
            if kind not in self._told:
                self._told.add(kind)
                logger.warning(
                    "blind spot run=%s step=%s what=%s way_out=%s",
                    self.run_id,
                    self._state.step,
                    spot.what,
                    spot.way_out,
                )

    def _forsaken(self) -> bool:
        return self._steps > 0 and self._forwards > 4 * self._forwards_usual + 16

    def _blind_spots(self) -> list[BlindSpot]:
        spots = list(self._given_spots)
        if self._forsaken():
            spots.append(
                BlindSpot(
                    f"{self._forwards} training forwards since a watched optimizer stepped",
                    "was the optimizer made anew? detach(), and attach() the one that is stepped",
                )
            )
        if self._observer.steps_without_loss:
            spots.append(
                BlindSpot(
                    "the loss of the last step was not seen",
                    "it must come from a scalar's backward(); torch.autograd.grad loops hide it",
                )
            )
        if self._unseen and self._steps > 1:
            spots.append(
                BlindSpot(
                    "no training forward of the watched model is seen (compiled inside, in eval "
                    "mode, or called past __call__): snapshots are taken right after the step",
                    "attach the object that the loop calls, for example the compiled wrapper",
                )
            )
        if not self._snapshots.ram and not self._disk.enabled:
            spots.append(
                BlindSpot("no snapshots: nothing to roll back to", "use Snapshots(ram=True)")
            )
        elif self._snapshot_trouble:
            spots.append(BlindSpot(f"snapshots fail: {self._snapshot_trouble}", ""))
        if self._keeper.trouble:
            spots.append(
                BlindSpot(
                    f"the ledger cannot be written: {self._keeper.trouble}",
                    "a restarted process will not know what was done",
                )
            )
        if self._keeper.strange:
            spots.append(
                BlindSpot(f"after the restart {self._keeper.told}; statistics started cold", "")
            )
        if self._disk.trouble:
            spots.append(BlindSpot(f"no snapshot reaches the disk: {self._disk.trouble}", ""))
        spots += self._trace_spots()
        if self._observer.probe.unlisted:
            spots.append(
                BlindSpot(
                    f"{self._observer.probe.unlisted} parameters belong to no listed layer: they "
                    "count in the global norm only",
                    "attach when the model is complete",
                )
            )
        return spots


def _after_fork() -> None:
    for session in list(_sessions):
        session.forked()


os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _close_all() -> None:
    for session in list(_sessions):
        session.at_exit()


def _keep_batch(canary: Canary, decision: Decision, loss: float | None) -> None:
    if decision.drop_canaries:
        canary.clear()
    if decision.keep_batch and decision.action is Action.PROCEED:
        canary.keep(loss)
    else:
        canary.drop_current()


def _rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Rows of the batch: the first tensor's first dimension; -1 if there is none."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return int(value.shape[0]) if value.dim() else 1
    return -1


def _has_no_rate(optimizer: torch.optim.Optimizer) -> bool:
    return all(float(group.get("lr", 1.0)) == 0.0 for group in optimizer.param_groups)


def _routine_overflow(observation: Observation) -> bool:
    """A step that the scaler drops while its loss is fine: the scaler at work, no skip of ours."""
    return observation.loss is None or math.isfinite(observation.loss)

"""One training process under watch: observe, decide, act; and stand aside when anything fails.

    session = sentinel.attach(model=model, optimizer=optimizer, lr_scheduler=s, grad_scaler=g)
    print(session.status())
    session.detach()                                  or: with sentinel.attach(...) as session

A step: the observer collects losses and norms (observe.py); at the gate they become an Observation,
the engine (or the sidecar) answers a Decision, the gate carries it out. What was really done, the
Outcome, moves the engine's state at the next moment that comes: safe point, next gate, `state`,
status() or detach(). With reads="late" the device decides on a calm step by limits that it is given
ahead (core/ahead.py), and observing and deciding come at the next gate, with what it did.

The safe point is the start of the first training forward after every optimizer of the group has
stepped, with no accumulation open: only there are snapshots taken and restored. When no forward of
the watched models is ever seen (a compiled inner module), it is the moment right after the step.

Several optimizers are one logical step: one decision at the first gate, over all gradients that are
new, and the others follow it. A later gate whose gradients are newer than the decision (a GAN) is
only checked for non-finite ones and held back on its own. An optimizer that has not stepped for
DORMANT steps is not waited for.

Several ranks do the same thing in the same step (ranks/): at the gate all enter one reduce,
whatever has failed on any of them, and everything from the observation on is computed from what
they heard, which is equal everywhere. Rank 0 alone records, keeps the ledger and asks the sidecar.

Errors:  from attach() on nothing of ours raises into the loop (guard.py), except TrainingHalted
         where a policy may halt, or where ranks have parted.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from sentinel.core import advice, engine
from sentinel.core.ahead import Ahead, Limits
from sentinel.core.events import AutomationSet, Event, Restored, RestoreFailed
from sentinel.core.policy import CanaryMode, Policy
from sentinel.core.state import State
from sentinel.core.types import (
    Action,
    Command,
    Decision,
    Mode,
    Observation,
    Outcome,
    Protection,
    Severity,
    Source,
)
from sentinel.traces.ledger import HALTED
from sentinel.traces.recorder import Recorder
from sentinel.wire import codec
from sentinel_hooks import configuration, telling
from sentinel_hooks.canary import Canary
from sentinel_hooks.errors import HALT_EXIT_CODE, AttachError, TrainingHalted
from sentinel_hooks.guard import Guard
from sentinel_hooks.late import Ready
from sentinel_hooks.layers import LayerTable
from sentinel_hooks.ledger_file import Keeper, fingerprint
from sentinel_hooks.link import EmbeddedLink, Link
from sentinel_hooks.observe import Faint, Letter, Measured, Observer
from sentinel_hooks.outlets import Outlets, settled
from sentinel_hooks.probes.grads import local, share
from sentinel_hooks.probes.together import Probes
from sentinel_hooks.ranks.council import Council, Note
from sentinel_hooks.saving import Saving
from sentinel_hooks.scaler_skips import ScalerSkips
from sentinel_hooks.scaling import kernel_will_drop, scaler_dropped
from sentinel_hooks.seams.clip_tap import CLIP_TAP
from sentinel_hooks.seams.gate import Gate, ScalerTap, StepPlan
from sentinel_hooks.seams.loss_tap import LOSS_TAP
from sentinel_hooks.seams.safe_point import ForwardTap
from sentinel_hooks.selfcheck import SelfCheck
from sentinel_hooks.signals import Signals
from sentinel_hooks.snapshots import Snapshots, shards
from sentinel_hooks.snapshots.running import RunningStats
from sentinel_hooks.status import BlindSpot, Status
from sentinel_hooks.target import Target

logger = logging.getLogger(__name__)

DORMANT = 16
PAUSE_FILE = "PAUSE"  # in run_dir or the run's own directory: automation is paused while it exists
LOOK_EVERY = 64  # steps, or forwards without one, between two looks for blind spots to log
PAUSE_EVERY = 8  # steps between two looks for it
_UNEVEN = (
    "join() lets ranks have unequal numbers of batches, and one that is through decides no more; "
    "give all ranks the same number of batches instead"
)
# What may fail again and again without the protection being gone.
TOLERATED = frozenset(
    {"self-check", "measure", "backward", "clip", "canary", "snapshot", "link", "detach", "ledger"}
    | {"batch_id", "norm_fn"}  # the user's own functions
)

_PROCEED = StepPlan()
_P = ParamSpec("_P")
_R = TypeVar("_R")
_attached: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def is_attached(optimizer: torch.optim.Optimizer) -> bool:
    """Some session watches this optimizer."""
    return optimizer in _attached


def open_sessions() -> tuple[Session, ...]:
    """Those of this process that nobody has detached."""
    return tuple(s for s in _sessions if not s.detached)


@dataclass(slots=True)
class _SentStep:
    """A logical step whose numbers are on their way: nobody has decided on it yet."""

    letter: Letter
    lr_factor: float
    gate_s: float
    carried: bool = True  # found_inf was where the optimizer looks for it
    complete: bool = False


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
        council: Council | None = None,
        outlets: Outlets | None = None,
        first_save: int = 0,
        sharers: int = 1,
        late: bool = False,
    ) -> None:
        """Use attach().

        Args:
            council: with several ranks, this one's seat.
            outlets: where things are told without a sidecar.
            first_save: number of the first save to disk, equal on all ranks.
            sharers: ranks on this machine.
            late: read what a step measured one step later, where the policy allows it.
        """
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
        self._council = council
        self._outlets = outlets
        self._keeper = keeper or Keeper(
            self.directory,
            run=run_id,
            incarnation=incarnation,
            policy=self.policy,
            enabled=record,
        )
        self._state: State = self._keeper.state()
        self._guard = Guard(run_id, on_error=link.count_error, on_broken=self._broken)
        world = council.world if council is not None else 1
        self._probes = Probes.of(
            signals,
            target,
            table,
            threshold=self.policy.attention_logit.threshold,
            clock=clock,
            guard=self._guard,
            share=(lambda p: share(p, world)) if world > 1 else None,
        )
        self._observer = Observer(
            target,
            table,
            self._guard,
            self._awake,
            signals=signals,
            batch_id=batch_id,
            norm_fn=norm_fn,
            world=world,
            probes=self._probes,
        )
        self._running = RunningStats(target.models)
        self._running_of = -1  # the step before which they were kept
        self._saving = Saving(
            target,
            snapshots,
            self.directory,
            self,
            self._guard,
            self._keeper,
            run=run_id,
            policy=self.policy,
            incarnation=incarnation,
            first_step=self._state.step,
            council=council,
            sharers=sharers,
            first_number=first_save,
            clock=clock,
        )
        self._store, self._disk = self._saving.ram, self._saving.disk
        self._canary = (
            Canary(target.models, self.policy.canary.age, loss_fn)
            if self.policy.canary.mode is CanaryMode.ON
            else None
        )

        self._off = ""
        self._detached = False
        # Training may be started by somebody who is dealing with an earlier error.
        self._handled = _recognised(sys.exc_info()[1])
        self._masked = 0
        # The logical step.
        self._open: _OpenStep | None = None
        self._sent: _SentStep | None = None  # reads="late": before it is heard of
        self._ahead = Ahead(self.policy) if late else None
        self._ready = Ready(target)
        self._orders: tuple[Command, ...] = ()  # taken from the link, not yet observed
        self._read_now: Counter[str] = Counter()
        self._read_late = 0
        self._plan = _PROCEED
        self._last: Decision | None = None
        self._steps = 0  # decided
        self._home = 0  # the thread that trains
        self._done: set[int] = set()  # optimizers that stepped in it
        self._stepped = [0] * len(target.optimizers)  # ... and when each did last
        self._gates_since_update = 0
        self._late_skips = 0
        self._scaler_skips = ScalerSkips(run_id)
        self._left_out = False  # this step was not taken by the scaler, and no gate was reached
        # Models whose ranks may have unequal numbers of batches.
        self._joinable: list[Any] = [] if council is None else _ddp_in(target)
        self._told: set[str] = set()  # kinds of blind spot that were logged
        self._each = False  # members of the open step may be non-finite one by one
        # The safe point.
        self._safe_done = False
        self._forwards = 0  # since the last gate
        self._forwards_usual = 0  # most of one step so far
        self._unseen = 0  # steps in a row without any
        self._snapshot_due = False
        self._restore_due: Decision | None = None
        self._deferred: tuple[int, str] | None = None  # a rollback of the processes before
        self._halted = False
        # Several ranks: whether this gate has entered the reduce, and has run to its end.
        self._entered = False
        self._gate_begun = self._gate_ended = False
        self._gate_before: tuple[set[int], int, int, int, int] = (set(), 0, 0, 0, 0)
        self._pause_looked = self._state.step - PAUSE_EVERY
        self._paused = self._keeper.paused_by_file
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
        self._probes.attach()
        self._check = SelfCheck(run_id, signals, **self._probes.found)
        if council is not None:
            mine, whole = self._guard.run("self-check", _elements, target, world) or (0.0, 0)
            counted = council.copies(mine)
            if counted is not None and whole:
                self._check.copies(counted, whole, world)
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
        self._open = self._sent = self._recorder = self._restore_due = None
        self._link = EmbeddedLink(self.policy)
        self._council = self._outlets = None

    def stand_aside(self, why: str) -> None:
        """Take the hooks out again: this process shall train unattached, and status() says why."""
        self._off = why
        logger.error("not attached, training goes on unprotected run=%s why=%s", self.run_id, why)
        self.detach()

    def __del__(self) -> None:
        """The user let go of model, optimizer and session: so do we."""
        if not getattr(self, "_detached", True) and hasattr(self, "_faint"):
            with contextlib.suppress(Exception):
                self._detach(crashed=False)

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
        last = self._open or self._sent
        if last is None or not last.complete:
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
        canary = self._canary
        incidents = telling.incidents(ledger)
        return Status(
            run_id=self.run_id,
            step=step,
            mode=self.policy.mode,
            policy=self.policy.name,
            protection=protection,
            why=why,
            blind_spots=tuple(self._blind_spots()),
            canary=telling.canary(canary, step, off=bool(self._off or self._detached)),
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
            directory=str(self.directory) if self._recorder is not None else "",
            rank=self._council.rank if self._council is not None else 0,
            ranks=self._council.world if self._council is not None else 1,
            lineage=self._keeper.told,
            self_check=str(self._check),
            reads=self._reads(),
            notes=telling.notes(self._saving, self._probes),
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
            self._guard.run("ledger", self._saving.remember)

    def detach(self) -> None:
        """Take every hook out, close the trace, say goodbye; a second call does nothing.

        Called while an exception is on its way out of the loop, it says no goodbye: the run did not
        finish, and on-call is to hear of it.
        """
        error = sys.exc_info()[1]
        self._detach(crashed=_crashed(error) and _recognised(error) != self._handled)

    def _detach(self, *, crashed: bool) -> None:
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
        self._guard.run("detach", self._probes.detach)
        for optimizer in self._target.optimizers:
            _attached.discard(optimizer)
        self._guard.run("snapshot", self._saving.close)
        self._saving.clear()
        self._running.clear()
        self._observer.used()
        if self._council is not None:
            self._guard.run("detach", self._council.say_leaving)
        self._close(crashed=crashed)

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
            self._look_after_loss()
            return  # the second: recomputed inside a backward pass
        if self._joinable and any(m._join_config.enable for m in self._joinable):
            self._disband(_UNEVEN)
            return
        self._forwards += 1
        if self._forwards % LOOK_EVERY == 0:
            self._guard.run("status", self._tell_blind_spots)
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
        self._forwards += 1
        self._reach_safe_point()
        if batch:
            self._observer.rows = _rows(batch, {})

    @property
    def _upcoming(self) -> int:
        """The step that is being made: the state may not have heard of the last one yet."""
        return self._state.step + (self._sent is not None)

    def _record(
        self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outside: bool
    ) -> None:
        canary, step = self._canary, self._upcoming
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
        self._entered = self._gate_ended = False
        self._gate_before = (
            set(self._done),
            self._steps,
            self._forwards,
            self._unseen,
            self._gates_since_update,
        )
        self._gate_begun = False
        if self._council is not None:
            self._council.begin()
        self._gate_begun = True
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
        done, self._steps, self._forwards, self._unseen, gates = self._gate_before
        self._gates_since_update = gates
        first = not done or me in done
        self._done = set() if first else set(done)
        if first and self._open is not None and not self._open.complete:
            self._open = None  # this very step; one that is complete is not settled yet
        if self._gate_begun:
            self._council.rewind()
        else:
            self._council.begin()
        plan = self._guard.run("again", self._before_step, optimizer, closure)
        if plan is not None or not first:
            return plan
        if not self._entered and self.listening():
            self._done = {me}
            self._plan = _PROCEED
            self._agree(None, ())
            self._guard.run("gate", self._observer.used)
        return None

    def _before_step(self, optimizer: torch.optim.Optimizer, closure: bool) -> StepPlan | None:
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
        if newer and self._ahead is not None:
            # Gradients that no limit was compared with: such a loop is read as ever.
            self._ahead = None
            self._read_now["gradients are made between two optimizers' steps"] += 1
        if (newer or self._each) and not self._plan.hold and self._late_nonfinite(me):
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
        elif self._sent is not None:
            self._sent.complete = True
            if plan.found is None and self._plan.found is not None:
                self._sent.carried = False
        self._safe_done = False
        if plan.halt and not self._halted:
            self._masked_run("ledger", self._halt, plan.halt)
        if self._unseen and self._all_stepped():
            self._run_safe_point(self._safe_point)

    def _decide(self, began: float, me: int) -> None:
        """Observe, decide, and open the step."""
        prepared = self._guard.run("gate", self._prelude, me)
        if self._sent is not None:
            self._observer.used()
            self._sent.gate_s = self._clock() - began
            return
        members, measured, commands = prepared or ([me], None, ())
        if self._council is None:
            observation = (
                self._observer.alone(measured, self._state.step, commands)
                if measured is not None
                # Measuring failed: say so, and decide on nothing.
                else Observation(self._state.step, commands=commands, blind=True)
            )
            ready = True
        else:
            agreed = self._agree(measured, commands)
            if agreed is None:
                return
            observation, ready = agreed
        self._observer.used()
        if not self._check.done:
            self._guard.run("self-check", self._check_step, observation)
        observation = self._with_layers(observation)
        canary = self._canary
        if self._surely(engine.wants_canary, self._state, observation, self.policy) and canary:
            answer = None
            if ready:
                answer = self._masked_run("canary", canary.answer, self._state.step)
                if self._council is not None:
                    answer = self._council.canary(answer)
            if answer is not None:
                observation = dataclasses.replace(observation, canary=answer)
        own = self._surely(engine.decide, self._state, observation, self.policy)
        decided = self._ask(observation, own)
        if decided is None:
            return
        decision, source = decided
        self._last = decision
        if canary is not None:
            loss = measured.canary_loss if measured is not None else None
            self._guard.run("canary", _keep_batch, canary, decision, loss)
        executed = self._executed(decision, observation, members, me)
        held = executed is not Action.PROCEED
        if held and self._running_of == observation.step:
            self._guard.run("act", self._running.put_back)
        halt = decision.reason if executed is Action.HALT else ""
        if self._council is not None and self._council.halt:
            held, halt = True, self._council.halt
        self._plan = StepPlan(hold=held, lr_factor=decision.lr_factor, halt=halt)
        self._open = _OpenStep(observation, decision, source, executed, self._clock() - began)
        self._tell_held(executed, decision)

    def _tell_held(self, executed: Action, decision: Decision) -> None:
        held = executed is not Action.PROCEED
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

    def _with_layers(self, observation: Observation) -> Observation:
        """What the engine must know of the layers, once: it travels and is recorded as columns."""
        if not observation.columns or not advice.wants_layers(self._state.stats.advice):
            return observation
        columns = {**observation.columns, **self.layers.columns()}
        return dataclasses.replace(observation, columns=columns)

    def _check_step(self, observation: Observation) -> None:
        checked, self._observer.probe.checked = self._observer.probe.checked, []
        if checked:
            self._check.norms(checked)
        if self._check.saw(
            loss=observation.loss is not None,
            forward=not self._unseen,
            columns=observation.columns.keys(),
        ):
            self._observer.failed_checks = len(self._check.failures)

    def _prelude(self, me: int) -> tuple[list[int], Measured | None, tuple[Command, ...]]:
        """Everything before the decision that concerns this rank alone; any of it may fail."""
        self._home = threading.get_ident()
        self._steps += 1
        if self._steps % LOOK_EVERY == 0:
            self._guard.run("status", self._tell_blind_spots)
        self._unseen = 0 if self._forwards else self._unseen + 1
        self._forwards_usual = max(self._forwards_usual, self._forwards)
        self._forwards = 0
        saving = self._saving
        if saving.resume_due:
            self._masked_run("ledger", saving.resume)
        if saving.first_due:  # lazy parameters made it wait
            self._masked_run("snapshot", saving.take_first)
        members = self._taking_part(me)
        # At this gate, or at the clip before the next one.
        self._observer.probe.check_next(self._steps <= 3 and not self._check.compared)
        pending = self._canary.pending_loss if self._canary is not None else None
        if self._ahead is not None:
            self._guard.run("measure", self._send, self._ahead, members, pending)
            if self._sent is not None:
                return members, None, ()
        measured = self._guard.run(
            "measure", self._observer.measure, self._state.step, members, pending
        )
        orders, self._orders = self._orders, ()
        return members, measured, (*orders, *self._link.take_commands())

    # ---------------------------------------------------------------- reads="late"

    def _send(self, ahead: Ahead, members: list[int], pending: Tensor | None) -> None:
        """Let the device decide on this step, and read what it measured at the next gate."""
        if self._state.step - self._pause_looked >= PAUSE_EVERY:
            self._look_for_pause()  # the safe point had a step open
        why = self._why_now(members)
        limits = Limits(why)
        if not why:
            limits = ahead.limits(
                self._state,
                loss=self._observer.sees_loss,
                snapshots=self._saving.takes(self._state.step + 1),
            )
        letter: Letter | str = limits.read_now
        if not letter:
            letter = self._observer.send(self._state.step, members, pending, limits)
        if isinstance(letter, str):
            self._read_now[letter] += 1
            return
        self._read_late += 1
        if letter.found is not None and self._running_of == self._state.step:
            self._guard.run("act", self._running.put_back_where, letter.found)
        if self._canary is not None:
            self._guard.run("canary", self._canary.set_aside)
        self._plan = StepPlan(lr_factor=limits.lr_factor, found=letter.found)
        self._sent = _SentStep(letter, limits.lr_factor, 0.0)

    def _why_now(self, members: list[int]) -> str:
        """What this process knows, besides the engine, against deciding on the device."""
        self._orders = (*self._orders, *self._link.take_commands())
        if self._orders:
            return "a person's order"
        if not self._check.done:
            return "the self-check of the first steps"
        if self._saving.first_due or self._saving.resume_due:
            return "the run begins"
        if self._observer.probe.clips_in_parts(members):
            return "gradients were clipped in parts"
        if self._canary is not None and self._canary.copy_waits:
            return "a large batch is kept for the canary"
        return self._ready.why_not(members)

    def _hear(self, sent: _SentStep) -> None:
        """The step before is heard of: decide on it, and hold that to what the device did."""
        step = self._state.step
        heard = self._guard.run("measure", self._observer.receive, sent.letter)
        if heard is None:
            observation, found, loss = Observation(step, blind=True), False, None
        else:
            measured, norm, found = heard
            observation = self._observer.alone(measured, step, ())
            observation = self._with_layers(dataclasses.replace(observation, grad_norm=norm))
            loss = measured.canary_loss
        own = self._surely(engine.decide, self._state, observation, self.policy)
        decision, source = self._link.decide(observation, own, self._state)
        self._last = decision
        held = found and sent.carried and sent.complete
        executed = Action.SKIP_STEP if held else Action.PROCEED
        if self._canary is not None:
            quiet = decision.keep_batch and not held
            self._guard.run("canary", self._canary.settle_aside, quiet, loss)
        if executed is not decision.action:
            logger.warning(
                "the device did otherwise than was decided, what it did counts run=%s step=%s "
                "done=%s decided=%s",
                self.run_id,
                step,
                executed.name.lower(),
                decision.action.name.lower(),
            )
        self._tell_held(executed, decision)
        self._open = _OpenStep(
            observation, decision, source, executed, sent.gate_s, sent.complete and not held
        )

    def _reads(self) -> str:
        """For status(); "" where reads="late" was not asked for."""
        if self._ahead is None and not self._read_now:
            return ""
        at_once = ", ".join(f"{why} {n}" for why, n in self._read_now.most_common())
        return (
            f"late in {self._read_late} steps; at once in {sum(self._read_now.values())}"
            f"{f' ({at_once})' if at_once else ''}"
        )

    # ---------------------------------------------------------------- several ranks

    def _agree(
        self, measured: Measured | None, commands: tuple[Command, ...]
    ) -> tuple[Observation, bool] | None:
        """Several ranks: the observation that all share; None: they have stopped, all of them."""
        council, saving = self._council, self._saving
        assert council is not None
        self._entered = True
        ready = self._canary is not None and self._canary.ready(self._state.step)
        note = Note()
        if council.rank == 0:
            if measured is not None:
                note = Note(
                    lr=measured.lr,
                    scale=measured.loss_scale,
                    shape=measured.shape,
                    batch=measured.batch_id,
                    scalars={k: v for k, v in measured.scalars.items() if k in advice.SCALARS},
                )
            note.orders = commands
            note.paused = self._paused
            note = saving.add_to(note)
        heard_note = council.step(
            measured,
            saving.facts(ready=ready),
            note,
            attempt=self._state.ledger.attempt,
            state=lambda: codec.state_hash(self._state),
        )
        if heard_note is None:
            self._switch_off(council.off)
            return None
        heard, note = heard_note
        if note.state:
            told = council.state(saving.restarted(), note.state)
            if told is None:
                self._switch_off(council.off)
                return None
            if council.rank:
                self._surely(saving.follow_rank_0, codec.decode_state(told))
        elif not heard.same_digest:
            told = council.one_state(lambda: codec.encode_state(self._state))
            if told is None:
                self._switch_off(council.off)
                return None
            if council.rank:
                self._surely(self.adopt_state, codec.decode_state(told))
        if note.restore is not None:
            self._deferred = note.restore
        self._surely(saving.heard, heard, note)
        if note.paused != self._keeper.paused_by_file:
            self._keeper.paused_by_file = note.paused
            self.note(AutomationSet(self._state.step, note.paused, f"file {PAUSE_FILE}"))
        observation = self._surely(self._observer.together, heard, note, self._state.step)
        if council.rank == 0 and measured is not None and measured.scalars:
            # The others only for the record: nothing is decided or advised on them.
            known = {k: v for k, v in measured.scalars.items() if k not in advice.SCALARS}
            scalars = {**known, **observation.scalars}
            observation = dataclasses.replace(observation, scalars=scalars)
        return observation, heard.ready == heard.ranks

    def _ask(self, observation: Observation, own: Decision) -> tuple[Decision, Source] | None:
        """The sidecar's answer, or the own decision; None: the ranks have stopped together."""
        council = self._council
        if council is None:
            return self._link.decide(observation, own, self._state)
        decision, source = own, Source.TRAINER
        if council.rank == 0:
            asked = self._guard.run("link", self._link.decide, observation, own, self._state)
            if asked is not None:
                decision, source = asked
        if not council.sidecar:
            return decision, source
        payload = None
        if council.rank == 0 and decision is not own and decision != own:
            payload = codec.encode_decision(decision)
        told = council.answer(payload, source is Source.SIDECAR)
        if told is None:
            self._switch_off(council.off)
            return None
        decided, other = told
        if other is not None:
            return codec.decode_decision(other), Source.SIDECAR
        return own, Source.SIDECAR if decided else Source.TRAINER

    def _executed(
        self, decision: Decision, observation: Observation, members: list[int], me: int
    ) -> Action:
        """The decision's action, unless the scaler is about to do the same by itself."""
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
                and not self._late_nonfinite(me)
            ):
                # Another optimizer overflowed: the scaler leaves its step() out and this one in,
                # as it does unattached. Should it come all the same, it is looked at by itself.
                executed, self._each = Action.PROCEED, True
            if self._left_out:
                executed = Action.PROCEED
        return executed

    def _late_nonfinite(self, me: int) -> bool:
        """On any rank."""
        mine = self._observer.late_nonfinite(me)
        return mine if self._council is None else not self._council.all_finite(not mine)

    def _surely(self, body: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """A pure function of what all ranks share: if it fails here, it is asked again.

        What fails on one rank alone (no memory for a moment) must not make this rank act alone.
        """
        try:
            return body(*args, **kwargs)
        except Exception as error:
            if self._council is None:
                raise
            self._guard.note("again", error)
        try:
            return body(*args, **kwargs)
        except Exception:
            self._council.want_off(self._guard.last)
            raise

    def _switch_off(self, why: str) -> None:
        """All ranks hear it at the same step; this one goes on without us, as they do."""
        self._plan = _PROCEED
        self._open = None
        if self._off:
            return
        self._off = why
        step = self._state.step
        self._tell_off()
        if self._council is not None:
            self._council.carried_out(step, Action.PROCEED.name, True, 1.0)
        logger.error(
            "sentinel switched itself off, training goes on unprotected run=%s step=%s why=%s",
            self.run_id,
            step,
            why,
        )

    def _disband(self, why: str) -> None:
        """What every rank finds out for itself at this point of the step."""
        if self._council is not None:
            self._guard.run("settle", self._settle)
            self._council.disband(why)
            self._switch_off(why)

    def _tell_off(self) -> None:
        if self._outlets is not None:
            text = f"protection is off, training goes on: {self._off}"
            self._outlets.tell("off", Severity.CRITICAL, settled(self._state), text)

    def _look_after_loss(self) -> None:
        """The group is gone: were the ranks still alike when it went?"""
        council = self._council
        if council is None or not self._off or self._detached or self._masked:
            return
        if council.look(self._state.step + self._forwards):
            self._masked_run("ledger", self._halt, council.halt)
            raise TrainingHalted(council.halt)
        self._forwards += 1

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
        self._left_out = True
        try:
            self._decide(began, 0)
        finally:
            self._left_out = False
        self._done = set(range(len(self._gates)))
        self._stepped = [self._steps] * len(self._gates)
        self._observer.fresh = 0
        open_ = self._open
        if open_ is not None:
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
        sent, self._sent = self._sent, None
        if sent is not None:
            self._hear(sent)
        open_ = self._open
        if open_ is None:
            return
        self._probes.after_step(open_.applied)
        observation, decision = open_.observation, open_.decision
        outcome = Outcome(observation.step, open_.executed, open_.applied, open_.source)
        before = self._state.ledger
        self._state = self._surely(
            engine.apply, self._state, observation, decision, outcome, self.policy
        )
        # All that other ranks rely on first: what fails below is not gone through again.
        self._open = None
        self._snapshot_due = decision.take_snapshot and open_.applied
        if open_.executed is Action.ROLLBACK:
            self._restore_due = decision
        if self._council is not None:
            self._council.carried_out(
                observation.step, outcome.executed.name, outcome.applied, decision.lr_factor
            )
        self._scaler_skips.settled(observation, outcome)
        self._keeper.settled(observation, decision, outcome)
        self._keeper.moved(before, self._state)  # before a restore or a halt is carried out
        if self._outlets is not None:
            self._outlets.step(observation, decision, self._state, self._guard.counts)
            self._outlets.moved(before, self._state)
            if self.policy.mode is not Mode.OBSERVE and before.automation:  # else nothing is lost
                self._outlets.unguarded(decision)
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
        if self._state.ledger is not before and (self._council is None or not self._council.rank):
            for line in telling.flags(before, self._state.ledger, self.layers.layers):
                logger.warning("flag run=%s step=%s %s", self.run_id, observation.step, line)
        self._prune()

    @property
    def now(self) -> State:
        """The engine's state as it is; see `state`."""
        return self._state

    def adopt_state(self, state: State) -> None:
        """The run was restarted, and this is what it goes on with."""
        self._state = state
        if self._recorder is not None:
            try:
                self._recorder.restate(state)
            except OSError as error:
                self._trace_failed(error)

    def note(self, event: Event) -> None:
        """Something happened between two steps: move the state on it, and tell everybody."""
        before = self._state.ledger
        self._state = self._surely(engine.note, self._state, event, self.policy)
        self._keeper.moved(before, self._state)
        if self._outlets is not None:
            self._outlets.moved(before, self._state)
            step = settled(self._state)
            if isinstance(event, Restored):
                text = f"rolled back to step {event.target}"
                self._outlets.tell("rollback", Severity.CRITICAL, step, text)
            elif isinstance(event, RestoreFailed):
                text = f"a rollback was not possible: {event.reason}"
                self._outlets.tell("rollback_failed", Severity.CRITICAL, step, text)
        if self._recorder is not None:
            try:
                self._recorder.event(event, self._state)
            except OSError as error:
                self._trace_failed(error)
        self._link.event(event)
        self._prune()

    def _prune(self) -> None:
        self._saving.prune()

    def _reach_safe_point(self) -> None:
        self._run_safe_point(self._maybe_safe_point)

    def _run_safe_point(self, body: Callable[[], None]) -> None:
        """With several ranks the collectives of a safe point are entered whatever fails here."""
        council = self._council
        if council is None:
            self._masked_run("safe_point", body)
            return
        halting = bool(council.halt)
        reached = self._safe_done and body == self._maybe_safe_point  # there is nothing to do
        if not (self._masked_run("safe_point", _did, body) or reached or self._off):
            # Once more, from the start or where it had begun: what is done already stays as it is,
            # and the others wait for this rank's vote.
            again = self._safe_point if self._safe_done else body
            self._masked_run("safe_point", again)
        if council.off and not self._off:
            self._switch_off(council.off)
        if council.halt and not halting:
            logger.error("the ranks have parted run=%s why=%s", self.run_id, council.halt)

    def _maybe_safe_point(self) -> None:
        """A training forward begins: is this the first after the step?"""
        if self._safe_done or self._observer.accumulating:
            return
        if self._steps and not self._all_stepped():
            return
        self._safe_done = True
        self._safe_point()
        self._running.keep()
        self._running_of = self._upcoming

    def _safe_point(self) -> None:
        """Between two steps: nothing of the last is pending, nothing of the next has begun."""
        saving, council = self._saving, self._council
        if self._sent is not None:
            # It is heard of at the next gate, and not before. Copies of the probes must not outlive
            # the step; what held it back, if anything did, they are told then.
            self._probes.after_step(True)
        elif council is None:
            self._settle()
        else:  # whatever fails in it on this rank alone, the others go on to what follows
            self._guard.run("settle", self._settle)
            if self._open is not None:
                self._guard.run("settle", self._settle)
        self._done.clear()
        if council is not None:
            # After an evaluation parameters may still be gathered: nothing below reads those.
            self._guard.run("safe_point", shards.reshard, self._target.models)
            council.compare(self._digest)
        if saving.resume_due and (council is None or council.rank == 0):
            self._guard.run("ledger", saving.resume)
        if self._state.step - self._pause_looked >= PAUSE_EVERY and self._sent is None:
            self._look_for_pause()
        saving.poll()
        if saving.first_due:
            saving.take_first()
        elif self._restore_due is not None:
            decision = self._restore_due
            if council is None:
                self._restore_due = None  # what was half done is not begun again
            saving.restore(decision)
            self._restore_due = None
        elif self._deferred is not None:
            saving.restore_deferred(*self._deferred)
            self._deferred = None
        elif self._snapshot_due and self._sent is None:  # else it would hold an unheard step
            self._snapshot_due = False
            saving.take()

    def _digest(self) -> bytes:
        return bytes.fromhex(fingerprint(self._target).partition("-")[2])

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

    def _adopt(self, path: str) -> None:
        state, last = self.state, self._last
        quiet = (last is None or last.readings.quiet) and self._restore_due is None
        incident = "" if quiet else next((i.summary for i in state.ledger.incidents[-1:]), "")
        self._saving.adopt(path, quiet=quiet, incident=incident)

    def _look_for_pause(self) -> None:
        """A file pauses automation without any sidecar."""
        self._pause_looked = self._state.step
        if self._council is not None and self._council.rank:
            return  # rank 0 says it
        found = any(os.path.exists(place / PAUSE_FILE) for place in (self.run_dir, self.directory))
        if self._council is not None:
            self._paused = found  # told to all at the next gate
        elif found != self._keeper.paused_by_file:
            self._keeper.paused_by_file = found
            self.note(AutomationSet(self._state.step, found, f"file {PAUSE_FILE}"))

    # ---------------------------------------------------------------- failing and closing

    def _broken(self, where: str) -> None:
        """Guard: it failed again and again at one place."""
        if self._off or where in TOLERATED or where.startswith("probe "):
            return
        if self._council is not None:
            self._council.want_off(self._guard.last)
            return
        self._off = f"sentinel failed at {where} again and again: {self._guard.last}"
        self._tell_off()
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

    def _close(self, *, crashed: bool) -> None:
        if self._council is not None:
            self._council.close()
        self._guard.run("ledger", self._close_ledger)
        how = "halted" if self._halted else "lost" if crashed else "finished"
        self._guard.run("link", self._link.close, how, self._state)
        if self._outlets is not None:
            self._guard.run("outlets", self._outlets.close, how, self._state)
        if self._recorder is not None:
            try:
                self._recorder.close()
            except OSError as error:
                self._trace_failed(error)

    def _close_ledger(self) -> None:
        try:
            if self._steps and not self._saving.resume_due:
                self._saving.remember()
                self._keeper.save(self._state, sync=True)
        finally:
            self._keeper.close()

    def at_exit(self) -> None:
        """The interpreter ends: close what is open, and leave the hooks."""
        if not self._detached:
            self._guard.run("settle", self._settle)
            self._detached = True
            self._guard.run("snapshot", self._saving.close)
            # Set for what nobody caught, when its traceback was printed.
            self._close(crashed=_crashed(getattr(sys, "last_value", None)))

    # ---------------------------------------------------------------- telling

    def _protection(self) -> tuple[Protection, str]:
        return telling.protection(
            off="detached" if self._detached and not self._off else self._off,
            mode=self.policy.mode,
            ledger=self._state.ledger,
            last=self._last,
            forsaken=self._forsaken(),
        )

    def _forsaken(self) -> bool:
        # Off, nobody counts steps: then forwards without one are no news.
        usual = 4 * self._forwards_usual + 16
        on = not (self._off or self._detached)
        return on and self._steps > 0 and self._forwards > usual

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

    def _blind_spots(self) -> list[BlindSpot]:
        return [
            *self._given_spots,
            *telling.of_the_probes(self._probes),
            *telling.of_the_depth(self.layers, self.policy),
            *telling.of_the_loop(
                forsaken=self._forwards if self._forsaken() else 0,
                loss_unseen=bool(self._observer.steps_without_loss),
                forward_unseen=bool(self._unseen and self._steps > 1),
                unlisted=self._observer.probe.unlisted,
            ),
            *telling.of_saving(self._saving, self._snapshots, self._keeper),
            *telling.of_the_trace(
                self._record_trouble,
                self._recorder.lost_records if self._recorder is not None else 0,
            ),
        ]


def _did(body: Callable[[], None]) -> bool:
    body()
    return True


def _after_fork() -> None:
    for session in list(_sessions):
        session.forked()


os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _close_all() -> None:
    for session in list(_sessions):
        session.at_exit()


def _elements(target: Target, world: int) -> tuple[float, int]:
    """This rank's share of the trained elements, and how many there are; (0, 0) if not known."""
    mine, whole = 0.0, 0
    for optimizer in target.optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if nn.parameter.is_lazy(p):
                    return 0.0, 0
                mine += share(p, world) * local(p.detach()).numel()
                whole += p.numel()
    return mine, whole


def _crashed(error: BaseException | None) -> bool:
    """It ends training, and not because somebody wanted it to end."""
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    wanted = KeyboardInterrupt | StopIteration | GeneratorExit
    return error is not None and not isinstance(error, wanted)


def _recognised(error: BaseException | None) -> tuple[object, ...] | None:
    """What tells an error from others. Keeping it would keep its frames, and their tensors, alive.

    Its id alone does not: once it is gone, the next error may lie at the same address.
    """
    if error is None:
        return None
    trace = error.__traceback__
    where = (None, 0) if trace is None else (trace.tb_frame.f_code, trace.tb_lineno)
    return (id(error), type(error), *where)


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


def _ddp_in(target: Target) -> list[Any]:
    ddp = nn.parallel.DistributedDataParallel
    return [m for model in target.models for m in model.modules() if isinstance(m, ddp)]


def _has_no_rate(optimizer: torch.optim.Optimizer) -> bool:
    return all(float(group.get("lr", 1.0)) == 0.0 for group in optimizer.param_groups)


def _routine_overflow(observation: Observation) -> bool:
    """A step that the scaler drops while its loss is fine: the scaler at work, no skip of ours."""
    return observation.loss is None or math.isfinite(observation.loss)

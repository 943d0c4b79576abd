"""One training process under watch: observe, decide, act; and stand aside when anything fails.

    session = sentinel.attach(model=model, optimizer=optimizer, lr_scheduler=s, grad_scaler=g)
    print(session.status())
    session.detach()                                  or: with sentinel.attach(...) as session

A step: the seams collect losses and norms; at the gate they become an Observation, the engine (or
the sidecar) answers a Decision, the gate carries it out. What was really done, the Outcome, moves
the engine's state at the next moment that comes: safe point, next gate, status() or detach().
Snapshots are taken and restored only at the safe point: the start of the first training forward
after every optimizer of the group has stepped, with no accumulation open; or, when no forward of
the watched models is ever seen (a compiled inner module), right after the step.

Several optimizers are one logical step: one decision at the first gate, over all gradients that are
there, and the others follow it. A later gate whose gradients are newer than the decision (a GAN)
is only checked for non-finite ones and held back on its own. The loss of a step is the sum of its
backward roots: loops that accumulate divide each by their number, as gradients add up.

Errors:  attach() raises AttachError or ConfigError for what it cannot watch. From then on nothing
         of ours raises into the loop (guard.py), except TrainingHalted where a policy may halt.
"""

from __future__ import annotations

import atexit
import dataclasses
import datetime as dt
import logging
import math
import os
import secrets
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sentinel.core import engine
from sentinel.core.policy import CanaryMode, Policy
from sentinel.core.state import State
from sentinel.core.types import (
    LAYER_GRAD_NORM,
    NO_COLUMNS,
    Action,
    AutomationSet,
    CanaryAnswer,
    Column,
    Decision,
    Event,
    Mode,
    Observation,
    Outcome,
    Protection,
    Restored,
    RestoreFailed,
    SnapshotTaken,
    Source,
)
from sentinel.traces.recorder import Recorder
from sentinel.wire.messages import Layer
from sentinel_hooks import reduce
from sentinel_hooks.adapters import plain
from sentinel_hooks.canary import Canary
from sentinel_hooks.errors import AttachError
from sentinel_hooks.guard import Guard
from sentinel_hooks.layers import LayerTable
from sentinel_hooks.link import Link, make_link
from sentinel_hooks.probes.grads import GradProbe, tensor_norms
from sentinel_hooks.probes.read import read
from sentinel_hooks.seams.clip_tap import CLIP_TAP
from sentinel_hooks.seams.gate import Gate, ScalerTap, StepPlan
from sentinel_hooks.seams.loss_tap import LOSS_TAP
from sentinel_hooks.seams.safe_point import ForwardTap
from sentinel_hooks.signals import Signals
from sentinel_hooks.snapshots import Snapshots
from sentinel_hooks.snapshots.ram import NotReadyError, RamStore, SnapshotError
from sentinel_hooks.status import BlindSpot, Status
from sentinel_hooks.target import Target

logger = logging.getLogger(__name__)

DORMANT = 16  # steps of the group after which an optimizer that did not step is not waited for
PAUSE_FILE = "PAUSE"  # in run_dir or the run's own directory: automation is paused while it exists
PAUSE_EVERY = 8  # steps between two looks for it
READY_STAGE = 0  # GradScaler: gradients are still multiplied by the scale

_PROCEED = StepPlan()
_attached: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


@dataclass(slots=True)
class _OpenStep:
    """A logical step from its decision to its outcome."""

    observation: Observation
    decision: Decision
    source: Source
    executed: Action
    applied: bool = False
    complete: bool = False
    gate_s: float = 0.0


@dataclass(slots=True)
class _Root:
    """One backward root, detached; `members` (bits) are the optimizers whose gradients it moved."""

    value: Tensor
    members: int


class Session:
    """Lives from attach() to detach(); one for each rank."""

    def __init__(
        self,
        target: Target,
        *,
        run_id: str,
        run_dir: Path,
        policy: Policy,
        link: Link,
        record: bool,
        incarnation: str,
        loss_fn: Any = None,
        signals: Signals | None = None,
        snapshots: Snapshots | None = None,
        batch_id: Callable[[], str] | None = None,
        norm_fn: Callable[[], Any] | None = None,
        blind_spots: Sequence[BlindSpot] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Use attach()."""
        self._target = target
        self.run_id = run_id
        self.run_dir = run_dir
        self.directory = run_dir / run_id
        self.policy = policy
        self._link = link
        self._signals = signals if signals is not None else Signals()
        self._snapshots = snapshots if snapshots is not None else Snapshots()
        self._batch_id = batch_id
        self._norm_fn = norm_fn
        self._given_spots = tuple(blind_spots)
        self._clock = clock
        self._loss_fn = loss_fn
        self.guard = Guard(run_id, on_error=link.count_error, on_broken=self._broken)
        self._state: State = engine.initial()
        self.layers = LayerTable.of(target.models)
        self._probe = GradProbe(target.optimizers, self.layers)
        self._store = RamStore(target, self._snapshots)
        self._canary = (
            Canary(target.models, policy.canary.age, loss_fn)
            if policy.canary.mode is CanaryMode.ON
            else None
        )
        self._reduce: reduce.Reducer = reduce.alone

        self._off = ""
        self._detached = False
        self._masked = 0
        self._roots: list[_Root] = []
        self._fresh = 0  # bits: members whose gradients moved since their last gate
        self._after_decision = 0  # bits: ... since the decision of this logical step
        self._done: set[int] = set()
        self._last_stepped = [0] * len(target.optimizers)
        self._groups_steps = 0
        self._open: _OpenStep | None = None
        self._plan = _PROCEED  # of the logical step, for every optimizer of the group
        self._seq = 0
        self._safe_done = False
        self._forwards = 0
        self._unseen = 0
        self._rows = -1
        self._saw_loss = False
        self._steps_without_loss = 0
        self._first_snapshot = self._snapshots.ram
        self._snapshot_due = False
        self._snapshot_trouble = ""
        self._restore_due: Decision | None = None
        self._gates_since_update = 0
        self._late_skips = 0
        self._last: Decision | None = None
        self._pause_looked = 0
        self._record_trouble = ""
        self._recorder: Recorder | None = None
        if record:
            try:
                self._recorder = Recorder(
                    self.directory,
                    run=run_id,
                    policy=policy,
                    state=self._state,
                    incarnation=incarnation,
                    layers=self.layers.rows(),
                )
            except OSError as error:
                self._trace_failed(error)

        # Hooks last: a failure above leaves the user's objects untouched.
        self._gates = [Gate(o, self, self.guard) for o in target.optimizers]
        self._gate_of = {id(g.optimizer): i for i, g in enumerate(self._gates)}
        self._scaler_tap = (
            ScalerTap(target.scaler, self._before_update, self.guard)
            if target.live_scaler is not None
            else None
        )
        self._forward_tap = ForwardTap(target.models, self)
        LOSS_TAP.subscribe(self)
        CLIP_TAP.subscribe(self)
        _attached.update(target.optimizers)
        atexit.register(self._at_exit)

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

    def loss(self, *args: Any, **kwargs: Any) -> Any:
        """`loss_fn(*args, **kwargs)`, remembered so that the canary can ask the same again."""
        if self._loss_fn is None or isinstance(self._loss_fn, nn.Module):
            raise AttachError(
                "session.loss(...) calls the function given as attach(loss_fn=...), and none was "
                "given; pass the function that computes the loss from a batch"
            )
        watch = self.listening() and self._canary is not None and torch.is_grad_enabled()
        if watch:
            self._masked_run("safe_point", self._maybe_safe_point)
            self.guard.run("canary", self._record, self._loss_fn, args, kwargs, outside=True)
        output = self._loss_fn(*args, **kwargs)
        if watch and self._canary is not None:
            self.guard.run("canary", self._canary.end, output, outside=True)
        return output

    @property
    def state(self) -> State:
        """The engine's state, with the last step settled."""
        if self._open is not None and self._open.complete:
            self.guard.run("settle", self._settle)
        return self._state

    def status(self) -> Status:
        """How the run and its protection are doing; moves nothing of the run."""
        ledger = self.state.ledger
        protection, why = self._protection()
        return Status(
            run_id=self.run_id,
            step=self._state.step,
            mode=self.policy.mode,
            policy=self.policy.name,
            protection=protection,
            why=why,
            blind_spots=tuple(self._blind_spots()),
            canary=(
                "off by policy"
                if self._canary is None
                else self._canary.availability(self._state.step)
            ),
            candidate=next((s.step for s in ledger.snapshots if not s.healthy), None),
            healthy=tuple(s.step for s in ledger.snapshots if s.healthy),
            snapshot_bytes=self._store.size_bytes,
            counters=ledger.counters,
            link=self._link.status(),
            incidents=ledger.incidents[-3:],
            late_skips=self._late_skips,
            internal_errors=dict(self.guard.counts),
            directory=str(self.directory) if self._recorder is not None else "",
        )

    def detach(self) -> None:
        """Take every hook out, close the trace, say goodbye; a second call does nothing."""
        if self._detached:
            return
        self.guard.run("settle", self._settle)
        self._detached = True
        atexit.unregister(self._at_exit)
        for gate in self._gates:
            self.guard.run("detach", gate.remove)
        if self._scaler_tap is not None:
            self.guard.run("detach", self._scaler_tap.remove)
        self.guard.run("detach", self._forward_tap.remove)
        LOSS_TAP.unsubscribe(self)
        CLIP_TAP.unsubscribe(self)
        if self._canary is not None:
            self.guard.run("detach", self._canary.remove)
        for optimizer in self._target.optimizers:
            _attached.discard(optimizer)
        self._store.clear()
        self._probe.forget_clips()
        self._roots = []
        self._close("finished")

    # ---------------------------------------------------------------- seams: backward

    def listening(self) -> bool:
        """False while everything shall pass unseen."""
        return not (self._off or self._masked or self._detached)

    def before_backward(self) -> Any:
        """Loss tap: the gradients as they are now."""
        if not self.listening() or any(g.stepping for g in self._gates):
            return None
        return self.guard.run("backward", self._mark)

    def after_backward(self, roots: Sequence[Tensor], mark: Any) -> None:
        """Loss tap: which gradients moved, and the loss that moved them."""
        if mark is not None and self.listening():
            self.guard.run("backward", self._collect, roots, mark)

    def _mark(self) -> list[list[tuple[int, int] | None]]:
        self._probe.refresh()
        self._probe.forget_clips()  # clipped, and now the gradients move again
        marks: list[list[tuple[int, int] | None]] = []
        empty = True
        for member in self._probe.members:
            mark = [
                (id(g), g._version) if (g := p.grad) is not None else None
                for p in member.parameters
            ]
            if empty and any(m is not None for m in mark):
                empty = False
            marks.append(mark)
        if empty and self._roots:
            self._roots = []  # all gradients were dropped since: a new accumulation
            self._fresh = 0
        return marks

    def _collect(self, roots: Sequence[Tensor], marks: list[list[tuple[int, int] | None]]) -> None:
        moved = 0
        for m, (member, mark) in enumerate(zip(self._probe.members, marks, strict=True)):
            for p, before in zip(member.parameters, mark, strict=True):
                g = p.grad
                if g is None:
                    if before is None:
                        continue
                elif before is not None and (id(g), g._version) == before:
                    continue
                moved |= 1 << m
                break
        if not moved:
            return
        self._fresh |= moved
        self._after_decision |= moved
        for root in roots:
            self._roots.append(_Root(root, moved))

    def zeroed(self, optimizer: torch.optim.Optimizer) -> None:
        """Gate: the user dropped this optimizer's gradients."""
        if not self.listening():
            return
        bit = 1 << self._gate_of[id(optimizer)]
        self._fresh &= ~bit
        if self._roots:
            for root in self._roots:
                root.members &= ~bit
            self._roots = [r for r in self._roots if r.members]
        self._probe.forget_clips()

    def on_clip(
        self, parameters: Sequence[Tensor], grads: Sequence[Tensor], norms: Tensor | None
    ) -> None:
        """Clip tap: the gradients are about to be scaled."""
        if self.listening() and parameters:
            self.guard.run("clip", self._clipped, parameters, grads, norms)

    def _clipped(
        self, parameters: Sequence[Tensor], grads: Sequence[Tensor], norms: Tensor | None
    ) -> None:
        if self._target.live_scaler is not None:
            for m, member in enumerate(self._probe.members):
                if any(parameters[0] is p for p in member.parameters):
                    scale = self._left_scale(m)
                    if scale is not None:
                        if norms is None:
                            norms = torch.stack([n.cpu() for n in tensor_norms(grads)])
                        norms = norms / scale
                    break
        self._probe.clipped(parameters, grads, norms)

    # ---------------------------------------------------------------- seams: forward

    def on_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward tap: a training forward begins."""
        if not self.listening() or any(g.stepping for g in self._gates):
            return
        if torch._C._current_graph_task_id() != -1:
            return  # recomputed inside a backward pass
        self._forwards += 1
        self._masked_run("safe_point", self._maybe_safe_point)
        self._rows = _rows(args, kwargs)
        if self._canary is not None:
            self.guard.run("canary", self._record, module, args, kwargs)

    def on_output(self, module: nn.Module, output: Any) -> None:
        """Forward tap: it ended."""
        if self._canary is not None and self.listening():
            self.guard.run("canary", self._canary.end, output)

    def _record(
        self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, outside: bool = False
    ) -> None:
        canary = self._canary
        if canary is not None and not self._roots and canary.due(self._state.step, outside):
            canary.begin(self._state.step, call, args, kwargs, outside=outside)

    # ---------------------------------------------------------------- seams: the gate

    def before_step(self, optimizer: torch.optim.Optimizer, closure: bool) -> StepPlan | None:
        """Gate: gradients are final; what shall be done with this step?"""
        began = self._clock()
        me = self._gate_of[id(optimizer)]
        self._probe.refresh()
        if not self._roots and not self._fresh and not closure and _dummy(optimizer):
            return None  # torch.distributed.checkpoint makes optimizer state by a step with lr 0
        self._gates_since_update += 1
        if me in self._done:  # it steps again: the last logical step is over, whoever is missing
            self._done.clear()
        if not self._done:
            self._plan = _PROCEED
            self._settle()
            self._decide(began, me)
        self._done.add(me)
        self._last_stepped[me] = self._groups_steps
        bit = 1 << me
        newer = self._after_decision & bit
        self._fresh &= ~bit
        self._after_decision &= ~bit
        plan = self._plan
        if len(self._done) > 1:
            self._roots = [r for r in self._roots if r.members & ~bit]
            if newer and not plan.hold and self._late_nonfinite(me):
                self._late_skips += 1
                return dataclasses.replace(plan, hold=True)
        return plan

    def after_step(self, optimizer: torch.optim.Optimizer, plan: StepPlan) -> None:
        """Gate: step() has run and everything is put back."""
        open_ = self._open
        if open_ is not None:
            if not plan.hold and not _overflowed(optimizer):
                open_.applied = True
            open_.complete = True
        self._safe_done = False
        if self._unseen and self._all_stepped():
            self._masked_run("safe_point", self._safe_point)

    def _decide(self, began: float, me: int) -> None:
        """Observe, decide, and keep the open step."""
        self._groups_steps += 1
        self._unseen = 0 if self._forwards else self._unseen + 1
        self._forwards = 0
        if self._first_snapshot:
            self._masked_run("snapshot", self._take_first)
        members = self._taking_part(me)
        observation = self.guard.run("measure", self._observe, members)
        if observation is None:  # measuring failed: say so, and decide on nothing
            observation = Observation(step=self._state.step, blind=True)
        self._roots = []
        self._after_decision = 0
        self._probe.forget_clips()
        if engine.wants_canary(self._state, observation, self.policy):
            answer = self._ask_canary()
            if answer is not None:
                observation = dataclasses.replace(observation, canary=answer)
        own = engine.decide(self._state, observation, self.policy)
        decision, source = self._link.decide(observation, own, self._state)
        self._last = decision
        self._keep_batch(decision)
        dropped = self._dropped_by_scaler(members)
        executed = decision.action
        if dropped and executed is Action.SKIP_STEP and _routine_overflow(observation):
            executed = Action.PROCEED
        hold = executed is not Action.PROCEED
        self._plan = StepPlan(
            hold=hold,
            lr_factor=decision.lr_factor,
            halt=decision.reason if decision.action is Action.HALT else "",
        )
        self._open = _OpenStep(observation, decision, source, executed)
        self._open.gate_s = self._clock() - began
        if hold or executed is not Action.PROCEED:
            self._tell(decision)

    def _taking_part(self, me: int) -> list[int]:
        """Members whose gradients belong to this decision."""
        if len(self._gates) == 1:
            return [0]
        bits = self._fresh | (1 << me)
        return [m for m in range(len(self._gates)) if bits >> m & 1]

    # ---------------------------------------------------------------- measuring

    def _observe(self, members: Sequence[int]) -> Observation:
        """One packed vector, reduced, as an Observation."""
        scales = {m: self._left_scale(m) for m in members} if self._target.live_scaler else None
        pending = self._probe.measure(members, scales)
        scaler = self._target.live_scaler
        canary_loss = self._canary.pending_loss if self._canary is not None else None
        lr = self._target.optimizers[0].param_groups[0]["lr"] if self._groups_ok() else None

        losses = [r.value for r in self._roots]
        extra: list[Tensor] = []
        if canary_loss is not None:
            extra.append(canary_loss)
        if isinstance(lr, Tensor):
            extra.append(lr)
        values, rest = read(pending.norms, [*losses, *extra])
        norms = self._probe.resolve(pending, values)
        rest_iter = iter(rest[len(losses) :])
        self._canary_value = next(rest_iter) if canary_loss is not None else None
        lr_value = next(rest_iter) if isinstance(lr, Tensor) else lr

        scale = self._scale()
        loss = None
        if losses:
            loss = (
                math.fsum(rest[: len(losses)])
                if _finite(rest[: len(losses)])
                else sum(rest[: len(losses)])
            )
            loss = loss / scale if scale is not None else loss
        params_bad = loss is not None and not math.isfinite(loss) and not self._params_finite()
        checked = loss is not None and not math.isfinite(loss)

        self._seq += 1
        part = reduce.Part(
            attempt=self._state.ledger.attempt,
            seq=self._seq,
            loss=loss,
            total_sq=norms.total_sq if norms is not None else None,
            layer_sq_L=norms.layer_sq_L if norms is not None else None,
            params_bad=params_bad,
        )
        together = reduce.unpack(self._reduce(reduce.pack(part, len(self.layers))))

        self._steps_without_loss = 0 if loss is not None else self._steps_without_loss + 1
        norm: float | None = None
        columns: dict[str, Column] | Any = NO_COLUMNS
        if together.total_sq is not None and together.layer_sq_L is not None:
            norm = math.sqrt(together.total_sq)
            if self._signals.layer_grad_norm:
                columns = {LAYER_GRAD_NORM: np.sqrt(together.layer_sq_L).astype(np.float32)}
        if self._norm_fn is not None:
            norm = float(self._norm_fn())
        return Observation(
            step=self._state.step,
            loss=together.loss,
            grad_norm=norm,
            lr=float(lr_value) if lr_value is not None else None,
            loss_scale=scale if scaler is not None else None,
            params_finite=not together.params_bad if checked else None,
            shape=(len(losses), self._rows) if self._rows >= 0 else (len(losses),),
            commands=self._link.take_commands(),
            blind=together.blind,
            batch_id=str(self._batch_id()) if self._batch_id is not None else "",
            columns=columns,
        )

    def _groups_ok(self) -> bool:
        groups = self._target.optimizers[0].param_groups
        return bool(groups) and "lr" in groups[0]

    def _params_finite(self) -> bool:
        """Only asked when the loss is not finite: one pass over all parameters."""
        parameters = [p.detach() for m in self._target.models for p in m.parameters()]
        dense = [p for p in parameters if p.is_floating_point() and not nn.parameter.is_lazy(p)]
        values, _ = read([n.reshape(1) for n in tensor_norms(dense)], [])
        for p, value in zip(dense, values, strict=True):
            if not math.isfinite(value[0]) and not bool(torch.isfinite(p).all()):
                return False
        return True

    def _scale(self) -> float | None:
        """The loss scale, None without a scaler that has scaled."""
        scaler = self._target.live_scaler
        if scaler is None or scaler._scale is None:
            return None
        return float(scaler.get_scale())

    def _left_scale(self, member: int) -> float | None:
        """What this member's gradients are still multiplied by; None: nothing."""
        scaler = self._target.live_scaler
        if scaler is None:
            return None
        optimizer = self._target.optimizers[member]
        given = getattr(optimizer, "grad_scale", None)
        if given is not None:  # fused: the kernel will unscale
            return float(given)
        state = scaler._per_optimizer_states.get(id(optimizer))
        if state is not None and state["stage"].value != READY_STAGE:
            return None
        return self._scale()

    def _dropped_by_scaler(self, members: Sequence[int]) -> bool:
        """A fused optimizer steps with found_inf set: its kernel will drop the step by itself."""
        return any(_overflowed(self._target.optimizers[m]) for m in members)

    def _late_nonfinite(self, member: int) -> bool:
        pending = self._probe.measure([member], {member: self._left_scale(member)})
        values, _ = read(pending.norms, [])
        norms = self._probe.resolve(pending, values)
        if norms is None or math.isfinite(norms.total_sq):
            return False
        logger.warning(
            "held back one optimizer of the group, its gradients are not finite run=%s step=%s "
            "optimizer=%s",
            self.run_id,
            self._state.step,
            member,
        )
        return True

    def _before_update(self) -> None:
        """Scaler tap: on overflow step() was never called; the step is observed here."""
        gates, self._gates_since_update = self._gates_since_update, 0
        if gates or not self.listening() or not self._roots:
            return
        scaler = self._target.live_scaler
        overflow = any(
            any(float(t) > 0 for t in state["found_inf_per_device"].values())
            for o in self._target.optimizers
            if (state := scaler._per_optimizer_states.get(id(o))) is not None
        )
        if not overflow:
            return
        began = self._clock()
        self._done.clear()
        self._settle()
        self._probe.refresh()
        self._decide(began, 0)
        self._done = set(range(len(self._gates)))
        self._last_stepped = [self._groups_steps] * len(self._gates)
        self._fresh = 0
        open_ = self._open
        if open_ is not None:
            if open_.executed is Action.SKIP_STEP and _routine_overflow(open_.observation):
                open_.executed = Action.PROCEED
            open_.complete = True
        self._safe_done = False

    # ---------------------------------------------------------------- canary

    def _keep_batch(self, decision: Decision) -> None:
        canary = self._canary
        if canary is None:
            return
        if decision.drop_canaries:
            canary.clear()
        if decision.keep_batch and decision.action is Action.PROCEED:
            self.guard.run("canary", canary.keep, self._canary_value)
        else:
            canary.drop_current()
        self._canary_value = None

    _canary_value: float | None = None

    def _ask_canary(self) -> CanaryAnswer | None:
        canary = self._canary
        if canary is None:
            return None
        answer: CanaryAnswer | None = self._masked_run("canary", canary.answer, self._state.step)
        return answer

    def _masked_run(self, where: str, body: Callable[..., Any], *args: Any) -> Any:
        """Run `body` guarded and with all of our own seams asleep."""
        self._masked += 1
        try:
            with torch.no_grad():
                return self.guard.run(where, body, *args)
        finally:
            self._masked -= 1

    # ---------------------------------------------------------------- settle and safe point

    def _settle(self) -> None:
        """Move the state on what was done."""
        open_, self._open = self._open, None
        if open_ is None:
            return
        outcome = Outcome(
            step=open_.observation.step,
            executed=open_.executed,
            applied=open_.applied,
            source=open_.source,
        )
        self._state = engine.apply(
            self._state, open_.observation, open_.decision, outcome, self.policy
        )
        self._snapshot_due = open_.decision.take_snapshot and open_.applied
        if open_.executed is Action.ROLLBACK:
            self._restore_due = open_.decision
        if self._recorder is not None:
            try:
                self._recorder.step(
                    open_.observation, open_.decision, outcome, self._state, gate_s=open_.gate_s
                )
            except OSError as error:
                self._trace_failed(error)
        self._link.settled(open_.observation, open_.decision, outcome)
        self._prune()

    def _note(self, event: Event) -> None:
        self._state = engine.note(self._state, event, self.policy)
        if self._recorder is not None:
            try:
                self._recorder.event(event, self._state)
            except OSError as error:
                self._trace_failed(error)
        self._link.event(event)
        self._prune()

    def _prune(self) -> None:
        self._store.keep_only(s.step for s in self._state.ledger.snapshots)

    def _all_stepped(self) -> bool:
        """Every optimizer that still takes part has stepped in this logical step."""
        if len(self._done) == len(self._gates):
            return True
        return all(
            m in self._done or self._groups_steps - last >= DORMANT
            for m, last in enumerate(self._last_stepped)
        )

    def _maybe_safe_point(self) -> None:
        if self._safe_done or self._roots:
            return
        if self._groups_steps and not self._all_stepped():
            return
        if self._open is not None and not self._open.complete:
            return
        self._safe_done = True
        self._safe_point()

    def _safe_point(self) -> None:
        """Between two steps: nothing of the last is pending, nothing of the next has begun."""
        self._settle()
        self._done.clear()
        if self._state.step - self._pause_looked >= PAUSE_EVERY or not self._state.step:
            self._look_for_pause()
        if self._first_snapshot and self._state.step == 0:
            self._take_first()
        elif self._restore_due is not None:
            decision, self._restore_due = self._restore_due, None
            self._restore(decision)
        elif self._snapshot_due:
            self._snapshot_due = False
            self._take()

    def _take_first(self) -> None:
        """Snapshot of the state that training starts from; lazy parameters make it wait."""
        try:
            self._store.take(self._state.step, self._state.stats)
        except NotReadyError:
            return
        except SnapshotError as error:
            self._first_snapshot = False
            self._snapshot_failed(error)
            return
        self._first_snapshot = False
        self._note(SnapshotTaken(self._state.step))

    def _take(self) -> None:
        try:
            self._store.take(self._state.step, self._state.stats)
        except SnapshotError as error:
            self._snapshot_failed(error)
            return
        self._snapshot_trouble = ""
        self._note(SnapshotTaken(self._state.step))

    def _restore(self, decision: Decision) -> None:
        step, target = self._state.step, decision.target
        began = self._clock()
        if target is None:
            self._note(RestoreFailed(step, None, "there is no healthy snapshot"))
            return
        try:
            stats = self._store.restore(target)
        except SnapshotError as error:
            self._note(RestoreFailed(step, target, str(error)))
            logger.error(
                "could not roll back run=%s step=%s target=%s reason=%s",
                self.run_id,
                step,
                target,
                error,
            )
            return
        except Exception as error:
            self._note(RestoreFailed(step, target, f"{type(error).__name__}: {error}"))
            raise
        self._note(Restored(step, target, stats))
        logger.info(
            "rolled back run=%s from_step=%s to_step=%s rule=%s took_s=%.3f",
            self.run_id,
            step,
            target,
            decision.rule,
            self._clock() - began,
        )

    def _snapshot_failed(self, error: SnapshotError) -> None:
        if not self._snapshot_trouble:
            logger.warning(
                "no snapshot could be taken run=%s step=%s reason=%s",
                self.run_id,
                self._state.step,
                error,
            )
        self._snapshot_trouble = str(error)

    def _look_for_pause(self) -> None:
        """A file pauses automation without any sidecar."""
        self._pause_looked = self._state.step
        paused = any(os.path.exists(place / PAUSE_FILE) for place in (self.run_dir, self.directory))
        if paused == self._state.ledger.automation and paused != self._paused_by_file:
            self._note(AutomationSet(self._state.step, paused, f"file {PAUSE_FILE}"))
        elif not paused and self._paused_by_file:
            self._note(AutomationSet(self._state.step, False, f"file {PAUSE_FILE} is gone"))
        self._paused_by_file = paused

    _paused_by_file = False

    # ---------------------------------------------------------------- failing, closing, telling

    def _broken(self, where: str) -> None:
        """Guard: it failed again and again at one place."""
        if self._off or where in ("canary", "snapshot", "detach"):
            return
        self._off = f"sentinel failed at {where} again and again: {self.guard.last}"
        logger.error(
            "sentinel switched itself off, training goes on unprotected run=%s why=%s",
            self.run_id,
            self._off,
        )

    def _trace_failed(self, error: OSError) -> None:
        if not self._record_trouble:
            logger.warning("the trace cannot be written run=%s reason=%s", self.run_id, error)
        self._record_trouble = str(error)

    def _close(self, how: str) -> None:
        self.guard.run("link", self._link.close, how)
        if self._recorder is not None:
            try:
                self._recorder.close()
            except OSError as error:
                self._trace_failed(error)

    def _at_exit(self) -> None:
        if not self._detached:
            self._detached = True
            self.guard.run("settle", self._settle)
            self._close("finished")

    def _tell(self, decision: Decision) -> None:
        logger.warning(
            "%s run=%s step=%s rule=%s reason=%s",
            decision.action.name.lower(),
            self.run_id,
            decision.step,
            decision.rule,
            decision.reason,
        )

    def _protection(self) -> tuple[Protection, str]:
        if self._detached:
            return Protection.OFF, "detached"
        if self._off:
            return Protection.OFF, self._off
        ledger = self._state.ledger
        if self.policy.mode is Mode.OBSERVE:
            return Protection.OFF, "observing: decisions are made and recorded, nothing is done"
        if not ledger.automation:
            return Protection.OFF, "a person paused automation"
        if ledger.stopped:
            return Protection.OFF, "the rollback budget is spent; a person is needed"
        if self._last is None:
            return Protection.WARMING, "no step seen yet"
        protection = self._last.readings.protection
        if protection is Protection.BLIND:
            return protection, "neither loss nor gradient norm was measured at the last step"
        if protection is Protection.WARMING:
            return protection, (
                "baselines are warming up; non-finite gradients and losses are already acted on"
            )
        return protection, "every rule has its baseline"

    def _blind_spots(self) -> list[BlindSpot]:
        spots = list(self._given_spots)
        if self._steps_without_loss and self._state.step:
            spots.append(
                BlindSpot(
                    "the loss of the last step was not seen",
                    "it must come from a scalar's backward(); torch.autograd.grad loops hide it",
                )
            )
        if self._unseen and self._groups_steps > 1:
            spots.append(
                BlindSpot(
                    "no training forward of the watched model is seen (compiled inside, in eval "
                    "mode, or called past __call__): snapshots are taken right after the step",
                    "attach the object that the loop calls, for example the compiled wrapper",
                )
            )
        if not self._snapshots.ram:
            spots.append(BlindSpot("no snapshots: nothing to roll back to", "Snapshots(ram=True)"))
        elif self._snapshot_trouble:
            spots.append(BlindSpot(f"snapshots fail: {self._snapshot_trouble}", ""))
        if self._record_trouble:
            spots.append(BlindSpot(f"the trace has holes: {self._record_trouble}", "free the disk"))
        if self._probe.unlisted:
            spots.append(
                BlindSpot(
                    f"{self._probe.unlisted} parameters belong to no listed layer: they count in "
                    "the global norm only",
                    "attach after the model is complete",
                )
            )
        return spots


# ---------------------------------------------------------------- attach


def attach(
    trainer: Any = None,
    *,
    model: Any = None,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    grad_scaler: Any = None,
    loss_fn: Any = None,
    policy: str | Path | Policy = "default",
    mode: Mode | str | None = None,
    sidecar: str | None = "auto",
    decide: str | None = None,
    run_id: str | None = None,
    run_dir: str | Path = "sentinel-runs",
    record: bool = True,
    signals: Signals | None = None,
    snapshots: Snapshots | None = None,
    extra_state: Sequence[Any] = (),
    batch_id: Callable[[], str] | None = None,
    norm_fn: Callable[[], Any] | None = None,
) -> Session:
    """Watch a training loop, and undo the step that breaks it.

    Args:
        trainer: not supported yet; give the objects.
        model: the module(s) the loop calls: the compiled or DDP wrapper, not the inside.
        optimizer: the optimizer(s) the loop steps; several of one loop are one logical step.
        lr_scheduler: never touched; named in the status.
        grad_scaler: the GradScaler, if the loop has one. Without it losses look scaled.
        loss_fn: lets the canary tell bad data from bad weights when the model does not return its
            loss: a loss module that the loop calls, or a function that it calls as
            session.loss(batch).
        policy: a shipped policy's name, a TOML file, or a Policy.
        mode: "act" or "observe"; default what the policy says.
        sidecar: "auto" ($SENTINEL_SIDECAR, else the standard socket, else none), None, or a URL.
        decide: "sidecar" (wait for it, up to the deadline) or "trainer" (never wait).
        run_id: default $SENTINEL_RUN_ID, else a new one.
        run_dir: the trace is written to run_dir/run_id.
        record: write the trace.
        extra_state: objects with state_dict() and load_state_dict() that a rollback puts back.
        batch_id: called once a step; names the batch in reports.
        norm_fn: called at the gate, returns the global gradient norm, where ours would be wrong.

    Raises:
        AttachError: something is missing, of the wrong type, or already attached.
        ConfigError: the policy or another setting makes no sense.
    """
    if trainer is not None:
        raise AttachError(
            f"attach(trainer) cannot take {type(trainer).__name__} yet; pass the objects: "
            "attach(model=..., optimizer=..., lr_scheduler=..., grad_scaler=...)"
        )
    target = plain.collect(model, optimizer, lr_scheduler, grad_scaler, extra_state)
    for number, item in enumerate(target.optimizers):
        if item in _attached:
            raise AttachError(
                f"optimizer {number} is attached already; detach() the other session first, or use "
                "the one that is there"
            )
    if loss_fn is not None and not callable(loss_fn):
        raise AttachError(f"loss_fn must be callable, got {type(loss_fn).__name__}")
    for name, value in (("batch_id", batch_id), ("norm_fn", norm_fn)):
        if value is not None and not callable(value):
            raise AttachError(f"{name} must be a function without arguments, got {value!r}")
    spots: list[BlindSpot] = []
    ranks = _ranks()
    if ranks > 1:
        mode = Mode.OBSERVE
        spots.append(
            BlindSpot(
                f"{ranks} ranks: this version only observes, because ranks that decide alone could "
                "act differently",
                "",
            )
        )
    chosen = Policy.load(policy).with_mode(mode)
    run = run_id or os.environ.get("SENTINEL_RUN_ID") or _new_run_id()
    if "/" in run or run in (".", ".."):
        raise AttachError(f"run_id must be usable as a directory name, got {run!r}")
    incarnation = secrets.token_hex(4)  # os.urandom: no global generator moves
    link = make_link(
        sidecar,
        decide,
        run=run,
        incarnation=incarnation,
        policy=chosen,
        pinned=policy != "default",
        mode=None if mode is None else chosen.mode,
        layers=[
            Layer(layer.name, layer.kind, block=layer.block, attention=layer.attention)
            for layer in LayerTable.of(target.models).layers
        ],
        info={
            "host": socket.gethostname(),
            "pid": str(os.getpid()),
            "torch": str(torch.__version__),
        },
    )
    session = Session(
        target,
        run_id=run,
        run_dir=Path(run_dir),
        policy=link.policy,
        link=link,
        record=record,
        incarnation=incarnation,
        loss_fn=loss_fn,
        signals=signals,
        snapshots=snapshots,
        batch_id=batch_id,
        norm_fn=norm_fn,
        blind_spots=spots,
    )
    logger.info(
        "attached run=%s policy=%s mode=%s layers=%s optimizers=%s",
        run,
        session.policy.name,
        session.policy.mode,
        len(session.layers),
        len(target.optimizers),
    )
    return session


def _new_run_id() -> str:
    now = dt.datetime.now(dt.UTC)
    return f"r{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def _ranks() -> int:
    dist = torch.distributed
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Rows of the batch: the first tensor's first dimension; -1 if there is none."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return int(value.shape[0]) if value.dim() else 1
    return -1


def _dummy(optimizer: torch.optim.Optimizer) -> bool:
    return all(
        (not isinstance(g.get("lr"), Tensor) and g.get("lr") == 0.0)
        or (isinstance(g.get("lr"), Tensor) and float(g["lr"]) == 0.0)
        for g in optimizer.param_groups
    )


def _overflowed(optimizer: torch.optim.Optimizer) -> bool:
    found = getattr(optimizer, "found_inf", None)
    return found is not None and float(found) > 0


def _routine_overflow(observation: Observation) -> bool:
    """A dropped step whose loss was fine: the scaler at work, and no skip of ours."""
    return observation.loss is None or math.isfinite(observation.loss)


def _finite(values: Sequence[float]) -> bool:
    return all(map(math.isfinite, values))

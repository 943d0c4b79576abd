"""The observer: from backward passes and clips to one Observation per logical step.

    observer.before_backward(), after_backward(), on_clip(), zeroed()     the seams call these
    measured = observer.measure(members, canary_loss)    this rank's part, in one read
    observation = alone(measured, step, commands)        one process: that is all there is
    observation = together(heard, note, step)            several ranks: what all of them said
    observer.used()                                      the step was decided

    letter = observer.send(step, members, canary_loss, limits)      reads="late": nothing is read
    measured, norm, found = observer.receive(letter)                one step later

It keeps the roots of backward passes that moved gradients of ours, until they are used by a
decision or the gradients are dropped. The loss of a step is the sum of its roots: loops that
accumulate divide each by their number, as gradients add up.

With several optimizers each root and each gradient belongs to some of them (bits of an int), so
that a decision looks only at gradients newer than their optimizer's last step.

Purity:  only measure() and late_nonfinite() wait for the device; measure() once.
"""

from __future__ import annotations

import itertools
import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sentinel.core.ahead import Limits
from sentinel.core.types import (
    LAYER_GRAD_NORM,
    NO_COLUMNS,
    NO_SCALARS,
    NOT_MEASURED,
    Column,
    Command,
    Observation,
)
from sentinel_hooks.guard import Guard
from sentinel_hooks.late import Parcel, over
from sentinel_hooks.layers import LayerTable
from sentinel_hooks.probes.grads import ROWS, Float64, GradProbe, PendingNorms, local, tensor_norms
from sentinel_hooks.probes.read import read
from sentinel_hooks.probes.together import Probes
from sentinel_hooks.ranks.agreement import Heard
from sentinel_hooks.ranks.council import Note
from sentinel_hooks.scaling import left_scale, loss_scale
from sentinel_hooks.selfcheck import SelfCheck
from sentinel_hooks.signals import Signals
from sentinel_hooks.target import Target

logger = logging.getLogger(__name__)

# By member: identity and version of each gradient; None for a member that has none at all.
Mark = list[list[tuple[int, int] | None] | None]
_NO_GRADS = {type(None)}


@dataclass(slots=True)
class _Root:
    """One backward root, detached; `members` (bits) are the optimizers whose gradients it moved."""

    value: Tensor
    members: int


@dataclass(slots=True)
class Measured:
    """One rank's part of an Observation; None where nothing was measured.

    Attributes:
        canary_loss: the recorded batch's own loss, which is read with the rest.
        total_sq, layer_sq_L: squares of norms; with several ranks this rank's share of them.
        params_bad: some parameter is not finite; None when nobody looked.
        parts: of the probes, see probes/probe.py.
        scalars: of the probes, by metric name.
    """

    loss: float | None = None
    canary_loss: float | None = None
    lr: float | None = None
    loss_scale: float | None = None
    shape: tuple[int, ...] = ()
    total_sq: float | None = None
    layer_sq_L: Float64 | None = None
    params_bad: bool | None = None
    batch_id: str = ""
    parts: Mapping[str, Float64] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Letter:
    """One step's numbers on their way to the host; see late.py.

    Attributes:
        found: 1.0 on the device where the step is to be held back; None: that is not asked.
        sizes: of the vectors behind the head of the parcel.
        pending: whose norms they are; without the gradients, which will be others by then.
        known: what the host knew when it was sent.
    """

    parcel: Parcel
    found: Tensor | None
    head: int
    sizes: list[int]
    pending: PendingNorms
    known: Measured
    has_loss: bool
    has_canary: bool
    has_lr: bool


class Faint:
    """Stands for an observer in the process-wide taps, which must not keep a run alive."""

    def __init__(self, observer: Observer) -> None:
        self._observer = weakref.ref(observer)

    def before_backward(self) -> Mark | None:
        """Loss tap."""
        observer = self._observer()
        return None if observer is None else observer.before_backward()

    def after_backward(self, roots: Sequence[Tensor], mark: Mark | None) -> None:
        """Loss tap."""
        observer = self._observer()
        if observer is not None:
            observer.after_backward(roots, mark)

    def on_clip(
        self, parameters: Sequence[Tensor], grads: Sequence[Tensor], norms: Tensor | None
    ) -> None:
        """Clip tap."""
        observer = self._observer()
        if observer is not None:
            observer.on_clip(parameters, grads, norms)

    def on_scale(self, max_norm: float, total_norm: Any) -> None:
        """Clip tap."""
        observer = self._observer()
        if observer is not None:
            observer.on_scale(max_norm, total_norm)

    def on_clipped(self, grads: Sequence[Tensor]) -> None:
        """Clip tap."""
        observer = self._observer()
        if observer is not None:
            observer.on_clipped(grads)


class Observer:
    """Collects what the seams see and measures it at the gate."""

    def __init__(
        self,
        target: Target,
        table: LayerTable,
        guard: Guard,
        awake: Callable[[], bool],
        *,
        signals: Signals,
        batch_id: Callable[[], str] | None = None,
        norm_fn: Callable[[], Any] | None = None,
        world: int = 1,
        probes: Probes | None = None,
    ) -> None:
        """Watch `target`'s gradients while `awake()`."""
        self._target = target
        self._guard = guard
        self._awake = awake
        self._signals = signals
        self._batch_id = batch_id
        self._norm_fn = norm_fn
        self._world = world
        self.probes = probes
        self._roots: list[_Root] = []
        self.probe = GradProbe(target.optimizers, table, world)
        self.fresh = 0  # bits: gradients moved since the optimizer's last gate
        self.newer = 0  # bits: gradients moved since the decision of this logical step
        self.rows = -1  # of the last training forward's first tensor
        self._ages = [0] * len(self.probe.members)  # steps that used these gradients
        self.steps_without_loss = 0
        self.failed_checks: int | None = None  # of the self-check, once it has a verdict
        # Attached in the middle of an accumulation: part of its loss was never seen.
        self._begun = any(
            p.grad is not None
            for optimizer in target.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        )

    # -- what the seams tell -----------------------------------------------------------------

    @property
    def accumulating(self) -> bool:
        """Gradients have been made that no step has used yet."""
        return bool(self._roots)

    def before_backward(self) -> Mark | None:
        """Loss tap: the gradients as they are now."""
        if not self._awake():
            return None
        self._phase("forward")
        return self._guard.run("backward", self._mark)

    def _phase(self, ended: str) -> None:
        if self.probes is not None and self.probes.memory is not None:
            self._guard.run("probe memory", self.probes.memory.phase, ended)

    def after_backward(self, roots: Sequence[Tensor], mark: Mark | None) -> None:
        """Loss tap: which gradients moved, and the loss that moved them."""
        if mark is not None:
            self._phase("backward")
            self._guard.run("backward", self._collect, roots, mark)

    def on_clip(
        self, parameters: Sequence[Tensor], grads: Sequence[Tensor], norms: Tensor | None
    ) -> None:
        """Clip tap: the gradients are about to be scaled."""
        if parameters and self._awake():
            self._guard.run("clip", self._clipped, parameters, grads, norms)

    def on_scale(self, max_norm: float, total_norm: Any) -> None:
        """Clip tap: by what they are scaled."""
        if self.probes is not None and self.probes.clip is not None and self._awake():
            self._guard.run("clip", self.probes.clip.on_scale, max_norm, total_norm)

    def on_clipped(self, grads: Sequence[Tensor]) -> None:
        """Clip tap: it has done with them."""
        if grads and self._awake():
            self._guard.run("clip", self.probe.left_by_clip, grads)

    def zeroed(self, bit: int) -> None:
        """The user dropped the gradients of one optimizer."""
        self.fresh &= ~bit
        self._begun = False
        for m in range(len(self._ages)):
            if bit >> m & 1:
                self._ages[m] = 0
        self.forget(bit)
        self.probe.forget_clips()

    def forget(self, bit: int) -> None:
        """Roots that moved only this optimizer's gradients are done with."""
        if self._roots:
            for root in self._roots:
                root.members &= ~bit
            self._roots = [r for r in self._roots if r.members]

    def used(self) -> None:
        """All that was collected went into a decision, or is void."""
        self._roots = []
        self._begun = False
        self.newer = 0
        self.probe.forget_clips()

    def _mark(self) -> Mark:
        self.probe.refresh()
        self.probe.forget_clips()  # clipped, and now the gradients move again
        marks: Mark = []
        empty = True
        for m, member in enumerate(self.probe.members):
            grads = [p.grad for p in member.parameters]
            if set(map(type, grads)) <= _NO_GRADS:
                self._ages[m] = 0
                marks.append(None)
                continue
            empty = False
            marks.append([(id(g), g._version) if g is not None else None for g in grads])
        if empty:  # all gradients were dropped since: a new accumulation
            self._begun = False
            if self._roots:
                self._roots = []
                self.fresh = 0
        return marks

    def _collect(self, roots: Sequence[Tensor], marks: Mark) -> None:
        moved = 0
        for m, (member, mark) in enumerate(zip(self.probe.members, marks, strict=True)):
            if mark is None:
                if any(p.grad is not None for p in member.parameters):
                    moved |= 1 << m
                continue
            for p, before in zip(member.parameters, mark, strict=True):
                g = p.grad
                if g is not None and (before is None or (id(g), g._version) != before):
                    moved |= 1 << m
                    break
        if moved:
            self.fresh |= moved
            self.newer |= moved
            self._roots += [_Root(root, moved) for root in roots]

    def _clipped(
        self, parameters: Sequence[Tensor], grads: Sequence[Tensor], norms: Tensor | None
    ) -> None:
        if self._target.live_scaler is not None:
            owner = next(
                (
                    m
                    for m, member in enumerate(self.probe.members)
                    if any(parameters[0] is p for p in member.parameters)
                ),
                None,
            )
            scale = left_scale(self._target, owner) if owner is not None else None
            if scale is not None:  # clipped without unscale_: the norms are scaled too
                if norms is None:
                    norms = torch.stack([n.to(grads[0].device) for n in tensor_norms(grads)])
                norms = norms / scale
                self.probe.clipped(parameters, grads, norms, lasting=False)
                return
        self.probe.clipped(parameters, grads, norms)

    def hold_to(self, check: SelfCheck, observation: Observation, forward: bool) -> None:
        """One of the first steps was observed: is what was promised seen?"""
        checked, self.probe.checked = self.probe.checked, []
        if checked:
            check.norms(checked)
        columns = observation.columns.keys()
        if check.saw(loss=observation.loss is not None, forward=forward, columns=columns):
            self.failed_checks = len(check.failures)

    # -- measuring ---------------------------------------------------------------------------

    def measure(self, step: int, members: Sequence[int], canary_loss: Tensor | None) -> Measured:
        """Everything about this step that this rank knows, in one read.

        Args:
            members: the optimizers whose gradients take part.
            canary_loss: to be read together with the rest.
        """
        scaler = self._target.live_scaler
        scales = {m: left_scale(self._target, m) for m in members} if scaler is not None else None
        pending = self.probe.measure(members, scales)
        lr = self._first_lr()
        scalars = [r.value for r in self._roots]
        losses = len(scalars)
        if canary_loss is not None:
            scalars.append(canary_loss)
        if isinstance(lr, Tensor):
            scalars.append(lr)
        probes, wanted = self.probes, pending.norms
        if probes is not None:
            probes.before_step(step)
            wanted = [*wanted, *probes.pending()]
        vectors, values = read(wanted, scalars)
        if isinstance(lr, Tensor):
            lr = values.pop()
        canary_value = values.pop() if canary_loss is not None else None
        scale = loss_scale(scaler)
        loss: float | None = None
        if losses and not self._begun:
            loss = sum(values)
            if scale is not None:
                # An infinite root is the scale's doing (fp16 ends at 65,504): the loss is unknown.
                loss = None if math.isinf(loss) else loss / scale
        seen = losses and not self._begun
        self.steps_without_loss = 0 if seen else self.steps_without_loss + 1

        count = len(pending.norms)
        norms = self.probe.resolve(pending, vectors[:count])
        check = loss is not None and not math.isfinite(loss)
        measured = Measured(
            loss=loss,
            canary_loss=canary_value,
            lr=float(lr) if lr is not None else None,
            loss_scale=scale,
            shape=(losses, self.rows) if self.rows >= 0 else (losses,),
            total_sq=norms.total_sq if norms is not None else None,
            layer_sq_L=norms.layer_sq_L if norms is not None else None,
            params_bad=not self._params_finite() if check else None,
            batch_id=self._named(),
            scalars=self._aged(members),
        )
        if probes is not None:
            measured.parts = probes.parts(vectors[count:])
            measured.scalars = {**measured.scalars, **probes.scalars()}
        if norms is not None:
            measured.parts = {**measured.parts, ROWS: norms.rows_L}
        if self.failed_checks is not None:
            measured.scalars = {**measured.scalars, "self_check_failures": self.failed_checks}
        if self._norm_fn is not None:
            norm = self._guard.run("norm_fn", _number, self._norm_fn)
            measured.total_sq = None if norm is None else norm * norm / self._world
        return measured

    @property
    def sees_loss(self) -> bool:
        """This step's loss will be known."""
        return bool(self._roots) and not self._begun

    def send(
        self, step: int, members: Sequence[int], canary_loss: Tensor | None, limits: Limits
    ) -> Letter | str:
        """The same as measure(), read one step later; or why it has to be measured at once.

        Only for a single process without a GradScaler, on one device. Does not wait for it.
        """
        pending = self.probe.measure(members)
        lr = self._first_lr()
        roots = [r.value for r in self._roots]
        loose = [t for t in (canary_loss, lr) if isinstance(t, Tensor)]
        if not pending.norms:
            return "there are no gradients"
        if pending.again:
            return "gradients were written after they were clipped"
        if len({t.device for t in (*pending.norms, *roots, *loose)}) != 1:
            return "its numbers lie on several devices"
        pending.grads = [[] for _ in pending.grads]
        vectors = pending.norms
        joined = vectors[0] if len(vectors) == 1 else torch.cat([v.double() for v in vectors])
        norm = torch.linalg.vector_norm(joined, dtype=torch.float64)
        seen = self.sees_loss
        if len(roots) == 1:
            loss = roots[0].reshape(()).double()
        elif roots:
            loss = torch.stack([r.reshape(()).double() for r in roots]).sum()
        if not seen:
            loss = torch.zeros_like(norm)
        found = over(norm, loss, limits) if limits.held else None
        self.steps_without_loss = 0 if seen else self.steps_without_loss + 1
        head = [norm, loss]
        if found is not None:
            head.append(found.double())
        head += [t.detach().reshape(()).double() for t in loose]
        probes = self.probes
        wanted = [*vectors]
        if probes is not None:
            probes.before_step(step)
            wanted += probes.pending()
        packed = torch.cat(
            [torch.stack(head), *(v.detach().reshape(-1).to(norm.device) for v in wanted)]
        )
        known = Measured(
            lr=None if lr is None or isinstance(lr, Tensor) else float(lr),
            shape=(len(roots), self.rows) if self.rows >= 0 else (len(roots),),
            batch_id=self._named(),
            scalars=self._aged(members),
        )
        return Letter(
            Parcel(packed),
            found,
            len(head),
            [v.numel() for v in wanted],
            pending,
            known,
            has_loss=seen,
            has_canary=canary_loss is not None,
            has_lr=isinstance(lr, Tensor),
        )

    def receive(self, letter: Letter) -> tuple[Measured, float, bool]:
        """What send() sent: this rank's part, the norm as the device compared it, its verdict."""
        values = letter.parcel.open()
        head = iter(values[: letter.head].tolist())
        measured = letter.known
        norm, loss = next(head), next(head)
        measured.loss = loss if letter.has_loss else None
        found = letter.found is not None and next(head) > 0.0
        if letter.has_canary:
            measured.canary_loss = next(head)
        if letter.has_lr:
            measured.lr = next(head)
        ends = np.cumsum([letter.head, *letter.sizes])
        vectors = [values[a:b] for a, b in itertools.pairwise(ends.tolist())]
        count = len(letter.pending.norms)
        norms = self.probe.resolve(letter.pending, vectors[:count])
        measured.layer_sq_L = norms.layer_sq_L if norms is not None else None
        probes = self.probes
        if probes is not None:
            measured.parts = probes.parts(vectors[count:])
            measured.scalars = {**measured.scalars, **probes.scalars()}
        if norms is not None:
            measured.parts = {**measured.parts, ROWS: norms.rows_L}
        if self.failed_checks is not None:
            measured.scalars = {**measured.scalars, "self_check_failures": self.failed_checks}
        return measured, norm, found

    def alone(self, measured: Measured, step: int, commands: tuple[Command, ...]) -> Observation:
        """The observation of a single process."""
        return Observation(
            step=step,
            loss=measured.loss,
            grad_norm=math.sqrt(measured.total_sq) if measured.total_sq is not None else None,
            lr=measured.lr,
            loss_scale=measured.loss_scale,
            params_finite=None if measured.params_bad is None else not measured.params_bad,
            shape=measured.shape,
            commands=commands,
            batch_id=measured.batch_id,
            columns=self._columns(measured.layer_sq_L, measured.parts),
            scalars=measured.scalars or NO_SCALARS,
        )

    def together(self, heard: Heard, note: Note, step: int) -> Observation:
        """The observation of several ranks: equal on each, as what they heard is."""
        if heard.blind:
            return Observation(step, blind=True, commands=note.orders)
        check = heard.loss is not None and not math.isfinite(heard.loss)
        return Observation(
            step=step,
            loss=heard.loss,
            grad_norm=math.sqrt(heard.total_sq) if heard.total_sq is not None else None,
            lr=note.lr,
            loss_scale=note.scale,
            params_finite=not heard.params_bad if check else None,
            shape=note.shape,
            commands=note.orders,
            batch_id=note.batch,
            columns=self._columns(heard.layer_sq_L, heard.parts),
            scalars=note.scalars or NO_SCALARS,
        )

    def _columns(
        self, layer_sq_L: Float64 | None, parts: Mapping[str, Float64]
    ) -> Mapping[str, Column]:
        columns: dict[str, Column] = {}
        if layer_sq_L is not None and self._signals.layer_grad_norm:
            column_L: Column = np.sqrt(layer_sq_L).astype(np.float32)
            rows_L = parts.get(ROWS)
            if rows_L is not None:
                column_L[(rows_L == 0.0) & (column_L == 0.0)] = NOT_MEASURED
            columns[LAYER_GRAD_NORM] = column_L
        if parts and self.probes is not None:
            columns |= self.probes.finish(parts)
        return columns or NO_COLUMNS

    def _named(self) -> str:
        named = self._batch_id
        return "" if named is None else self._guard.run("batch_id", _text, named) or ""

    def _aged(self, members: Sequence[int]) -> dict[str, float]:
        """How many steps these gradients have been adding up, this one included."""
        for m in members:
            self._ages[m] += 1
        return {"gradient_age": float(max((self._ages[m] for m in members), default=0))}

    def late_nonfinite(self, member: int) -> bool:
        """This optimizer's gradients, made after the group's decision, are not finite."""
        pending = self.probe.measure([member], {member: left_scale(self._target, member)})
        vectors, _ = read(pending.norms, [])
        norms = self.probe.resolve(pending, vectors)
        return norms is not None and not math.isfinite(norms.total_sq)

    def _first_lr(self) -> Any:
        groups = self._target.optimizers[0].param_groups
        return groups[0].get("lr") if groups else None

    def _params_finite(self) -> bool:
        """Only asked when the loss is not finite: one pass over all parameters."""
        dense = [
            local(p.detach())
            for model in self._target.models
            for p in model.parameters()
            if not nn.parameter.is_lazy(p)
            and (p.is_floating_point() or p.is_complex())
            and p.device.type != "meta"  # offloaded: not there to be looked at
        ]
        vectors, _ = read([n.reshape(1) for n in tensor_norms(dense)], [])
        return all(
            math.isfinite(value[0]) or bool(torch.isfinite(p).all())
            for p, value in zip(dense, vectors, strict=True)
        )


def _number(function: Callable[[], Any]) -> float:
    return float(function())


def _text(function: Callable[[], Any]) -> str:
    return str(function())

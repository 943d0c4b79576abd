"""Gradient probe: the L2 norm of every layer's gradient, and of all of them.

    probe = GradProbe(optimizers, table)
    pending = probe.measure(members, scales)      tensors on the device, nothing read yet
    norms = probe.resolve(pending, values)        float64 on the host

One call over the large gradients and one for each shape of the small ones (packing.py), or the
norms that the user's clip computed anyway (seams/clip_tap.py): then measuring costs nothing, or
one selection on the device where the clip's list is not the optimizer's (decay groups). fp16
and bf16 gradients are accumulated in float32: without it fp16 overflows at 65,504 and bf16 is 1e-3
off. Squares are summed in float64 on the host, where 1e38 squared still fits.

A norm that is not finite says that some gradient is not, or that finite ones were too large for
float32: only then is the tensor measured again, in float64. With gradients that the user already
clipped that is no longer possible, and the norm stays what torch's clip saw.

Gradients that were written after the clip (a tensor counts how often it was) are measured at the
gate as well, and the worse of the two counts: what is not finite, else the larger. A loop that
adds noise to clipped gradients so keeps the norms of before the clip.

With several ranks each measures what lies on it (the local shard of a DTensor) and counts it as
its share: a parameter that n ranks hold counts 1/n on each, so that sums over all ranks are right,
whatever the number of ranks.

A gradient of 0 and none at all are told apart by rows_L, which says whose gradient counts: those
of layers that have one, if only of zeros. Of the others: a layer below all blocks that have some,
for there the path is cut; and one that no optimizer holds, though they hold most of its like. Not
those that are frozen, or that no forward has used.

Shapes:  layer_sq_L float64 [L] in the order of the layer table, not yet reduced across ranks; a
         layer without gradient counts 0, nan and inf pass through. rows_L float64 [L], 0 or 1.
Purity:  measure() does not wait for the device; resolve() only in the non-finite case.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sentinel_hooks.layers import LayerTable
from sentinel_hooks.probes import packing
from sentinel_hooks.probes.packing import SMALL, Packing
from sentinel_hooks.probes.packing import tensor_norms as tensor_norms

Float64 = npt.NDArray[np.float64]

CHECKED = 1 << 22  # elements that the self-check computes again, once
ROWS = "gradient_rows"  # what rows_L is called among the parts that ranks add up
_GRAD = operator.attrgetter("grad")
_VERSION = operator.attrgetter("_version")
_NONE = type(None)
_PLAIN = {Tensor, nn.Parameter}


@dataclass(slots=True)
class Member:
    """One optimizer's parameters, cached until its groups change."""

    optimizer: torch.optim.Optimizer
    parameters: list[nn.Parameter]
    layer_P: npt.NDArray[np.intp]  # OTHER is len(table) here: bincount wants no negatives
    groups: list[list[Tensor]]  # as they were, held so that no identity is used again
    share_P: Float64 | None = None  # of each square that is this rank's; None: one process
    sharded: bool = False  # some are DTensors, be it on a mesh of one
    have: list[int] | None = None  # which of them had a gradient when last measured; None: all
    packed: _Packed | None = None  # how they were measured last
    where: _Where | None = None  # where the last clips had them


@dataclass(slots=True)
class _Packed:
    """A packing of some of a member's gradients, and what belongs to each of its norms."""

    have: list[int] | None  # which of them; None: all
    plain: bool  # none of a class of its own
    packing: Packing
    layers: list[npt.NDArray[np.intp]]
    shares: list[Float64 | None]


@dataclass(slots=True)
class _Where:
    """Where clips over just these lists have a member's parameters."""

    clipped: list[list[Tensor]]  # held so that no identity is used again
    seen: int  # the clips that this was last compared with
    touching: list[int]  # the clips that have some
    at: list[int]  # place of each parameter's norm in the vectors of those, joined; -1: nowhere
    others: list[nn.Parameter]  # those that no clip had
    picked: _Picked | None = None


@dataclass(slots=True)
class _Picked:
    """Of those that have a gradient now: which were clipped, and where their norms are."""

    have: list[int] | None
    index: Tensor
    layer_P: npt.NDArray[np.intp]
    share_P: Float64 | None
    left: list[int]  # which were not clipped


@dataclass(slots=True)
class PendingNorms:
    """Norms on the device, by member; `grads` is empty where they came from the user's clip.

    Attributes:
        places: which of `grads` each norm is of.
        again: of a member whose gradients were written after the clip: which vectors are the
            clip's, and which were taken at the gate.
        rows_L: see the module docstring.
    """

    norms: list[Tensor]
    layers: list[npt.NDArray[np.intp]]
    shares: list[Float64 | None]
    grads: list[Sequence[Tensor]]
    places: list[npt.NDArray[np.intp] | None]
    scales: list[float | None]
    again: list[tuple[range, range]] = field(default_factory=list)
    rows_L: Float64 | None = None

    def add(
        self,
        norms: Tensor,
        layers: npt.NDArray[np.intp],
        shares: Float64 | None,
        grads: Sequence[Tensor] = (),
        places: npt.NDArray[np.intp] | None = None,
        scale: float | None = None,
    ) -> None:
        """One vector more; without `grads` it came from a clip, whose tap saw to the scale."""
        self.norms.append(norms)
        self.layers.append(layers)
        self.shares.append(shares)
        self.grads.append(grads)
        self.places.append(places)
        self.scales.append(scale)


Stamp = tuple[list[int], list[int]]
"""Which tensors, and how often each was written: their ids, their versions."""


@dataclass(slots=True)
class _Clip:
    """One clip of the user's; nothing here holds a gradient.

    Attributes:
        before: as it found them, where another clip was before it.
        after: as it left them; None where that says nothing.
    """

    parameters: list[Tensor]
    norms: Tensor
    before: Stamp | None
    after: Stamp | None = None
    lasting: bool = True


@dataclass(slots=True)
class Norms:
    """What the gradients measured on this rank; squares add up across ranks, norms do not."""

    total_sq: float
    layer_sq_L: Float64
    rows_L: Float64


class GradProbe:
    """Measures the gradients of a group of optimizers."""

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], table: LayerTable, world: int = 1
    ) -> None:
        """Watch what `optimizers` hold; with `world` ranks, measure this one's share of it."""
        self._table = table
        self._world = world
        self._checks_due = False
        self._compared: list[tuple[Tensor, Tensor, bool]] = []
        self.checked: list[tuple[float, float, bool]] = []
        self._clips: list[_Clip] = []
        self._clips_seen = 0  # rises whenever they change
        self.members = [Member(o, [], np.empty(0, np.intp), []) for o in optimizers]
        self.unlisted = 0
        self._block_L = np.array([-1 if x.block is None else x.block for x in table.layers], int)
        self._forgotten: dict[int, list[nn.Parameter]] = {}
        self._rows: tuple[object, Float64] | None = None  # what they were for, and they
        self.refresh()

    def refresh(self) -> None:
        """Look again at the groups: parameters may have been added, or replaced."""
        if all(
            _same_lists(m.groups, [g["params"] for g in m.optimizer.param_groups])
            for m in self.members
        ):
            return
        seen: set[int] = set()
        self.unlisted = 0
        for member in self.members:
            fresh: list[nn.Parameter] = []
            for group in member.optimizer.param_groups:
                for p in group["params"]:
                    if id(p) not in seen:
                        seen.add(id(p))
                        fresh.append(p)
            layer_P = self._table.index(fresh)
            other = layer_P < 0
            self.unlisted += int(other.sum())
            layer_P[other] = len(self._table)
            member.parameters = fresh
            member.layer_P = layer_P
            member.packed = None
            member.where = None
            member.sharded = any(hasattr(p, "_local_tensor") for p in fresh)
            if self._world > 1:
                member.share_P = np.array([share(p, self._world) for p in fresh])
            member.groups = [list(g["params"]) for g in member.optimizer.param_groups]
        self._forgotten = self._table.forgotten(seen)
        self._rows = None

    # -- the user's clip ---------------------------------------------------------------------

    def clipped(
        self,
        parameters: Sequence[Tensor],
        grads: Sequence[Tensor],
        norms: Tensor | None,
        *,
        lasting: bool = True,
    ) -> None:
        """The user's clip is about to scale `grads`: keep (or take) their norms.

        Args:
            lasting: False: a gradient scaler will write them after the clip.
        """
        if norms is None:
            norms = _concat(tensor_norms([local(g) for g in grads]))
        if norms is not None:
            before = _stamp(grads) if self._clips else None
            self._clips.append(_Clip(list(parameters), norms, before, lasting=lasting))
            self._clips_seen += 1
            if self._checks_due:
                self._compare([local(g) for g in grads], list(norms))

    def left_by_clip(self, grads: Sequence[Tensor]) -> None:
        """That clip has scaled them: what is written from now on it has not seen."""
        if self._clips and self._clips[-1].lasting:
            self._clips[-1].after = _stamp(grads)

    def _written_since(self) -> bool:
        """Gradients were written, or replaced, after the clip that measured them."""
        for clip in self._clips:
            if clip.after is None:
                return False
            grads = list(map(_GRAD, clip.parameters))
            if list(map(id, grads)) != clip.after[0]:
                break
            if list(map(_VERSION, grads)) != clip.after[1]:
                break
        else:
            return False
        return len(self._clips) == 1 or self._written_between()

    def _written_between(self) -> bool:
        """The same where clips may have written each other's."""
        known: dict[int, int] = {}
        for clip in self._clips:
            if clip.before is not None:
                for tensor, version in zip(*clip.before, strict=True):
                    if known.get(tensor, version) != version:
                        return True
            if clip.after is not None:
                known.update(zip(*clip.after, strict=True))
        return any(
            p.grad is None or known.get(id(p.grad)) != p.grad._version
            for clip in self._clips
            for p in clip.parameters
        )

    def forget_clips(self) -> None:
        """The gradients have moved since, or were used: those norms are stale."""
        if self._clips:
            self._clips = []
            self._clips_seen += 1

    @property
    def has_clips(self) -> bool:
        """The user has clipped since the gradients last moved."""
        return bool(self._clips)

    def clips_in_parts(self, members: Sequence[int]) -> bool:
        """One of these was clipped more than once, or only some of its gradients were."""
        if not self._clips:
            return False
        for member in (self.members[m] for m in members):
            if self._clipped_exactly(member.parameters) is not None:
                continue
            where = self._located(member)
            if len(where.touching) > 1:
                return True
            if where.touching and any(p.grad is not None for p in where.others):
                return True
        return False

    def _clipped_exactly(self, owners: Sequence[Tensor]) -> Tensor | None:
        """Norms from the one clip that was over just these, in this order: the usual case."""
        if len(self._clips) != 1:
            return None
        clip = self._clips[0]
        return clip.norms if _same(clip.parameters, owners) else None

    def _located(self, member: Member) -> _Where:
        """Where the clips have this member's parameters, which hardly ever changes."""
        where = member.where
        if where is not None and where.seen == self._clips_seen:
            return where
        lists = [clip.parameters for clip in self._clips]
        if where is None or not _same_lists(where.clipped, lists):
            where = member.where = _locate(member.parameters, lists)
        where.seen = self._clips_seen
        return where

    # -- measuring ---------------------------------------------------------------------------

    def check_next(self, due: bool = True) -> None:
        """Compare some norms of the next step with a plain computation; see `checked`.

        That step waits for the device once more.
        """
        self._checks_due = due

    def _compare(self, grads: Sequence[Tensor], norms: Sequence[Tensor]) -> None:
        """Some of the tensors, the smallest first, up to CHECKED elements."""
        left = CHECKED
        for i in sorted(range(len(grads)), key=lambda i: grads[i].numel()):
            g = grads[i].detach()
            left -= g.numel()
            if left < 0:
                break
            if g.layout is torch.strided and not g.is_complex() and g.device.type != "meta":
                plain = g.double().square().sum().sqrt()
                self._compared.append((norms[i], plain, g.element_size() < 4))

    def measure(
        self, members: Sequence[int], scales: Mapping[int, float | None] | None = None
    ) -> PendingNorms:
        """Norms of the gradients that `members` (indices) hold now.

        Args:
            scales: what a member's gradients are still multiplied by (an unfinished unscale).
        """
        pending = PendingNorms([], [], [], [], [], [])
        again = bool(self._clips) and self._written_since()
        for m in members:
            member = self.members[m]
            scale = scales.get(m) if scales else None
            first = len(pending.norms)
            exact = self._clipped_exactly(member.parameters)
            if exact is not None:
                pending.add(exact, member.layer_P, member.share_P)
                member.have = None  # a clip leaves out those without
            else:
                self._add_measured(pending, member, scale, clips=bool(self._clips))
            if again:
                then = len(pending.norms)
                self._add_measured(pending, member, scale, clips=False)
                pending.again.append((range(first, then), range(then, len(pending.norms))))
        pending.rows_L = self._whose(members)
        return pending

    def _whose(self, members: Sequence[int]) -> Float64:
        """rows_L of what was just measured; hardly ever another than in the step before."""
        forgotten = [
            row for row, own in self._forgotten.items() if any(p.requires_grad for p in own)
        ]
        key = ([(m, self.members[m].have) for m in members], forgotten)
        if self._rows is not None and self._rows[0] == key:
            return self._rows[1]
        made, idle = np.zeros((2, len(self._table) + 1), bool)
        for member in (self.members[m] for m in members):
            have = member.have
            made[member.layer_P if have is None else member.layer_P[have]] = True
            if have is not None:
                wanting = [i for i, p in enumerate(member.parameters) if p.requires_grad]
                idle[member.layer_P[wanting]] = True
        made, idle = made[:-1], idle[:-1]
        depth_L = self._block_L
        reached = depth_L[made & (depth_L >= 0)]
        if reached.size:
            made |= idle & (depth_L >= 0) & (depth_L < reached.min())
        made[forgotten] = True
        rows_L = made.astype(np.float64)
        self._rows = (key, rows_L)
        return rows_L

    def _add_measured(
        self, pending: PendingNorms, member: Member, scale: float | None, *, clips: bool
    ) -> None:
        """The norms of this member's gradients; with `clips`, of what no clip has measured."""
        grads: list[Tensor] = list(map(_GRAD, member.parameters))
        have: list[int] | None = None
        kinds = set(map(type, grads))
        if _NONE in kinds:
            kinds.discard(_NONE)
            have = [i for i, g in enumerate(grads) if g is not None]
        member.have = have
        if clips and kinds:
            have = self._add_clipped(pending, member, have)
        if have is not None:
            grads = [grads[i] for i in have]
        if not grads:
            return
        if member.sharded:
            grads = [local(g) for g in grads]
        packed = _packed(member, have, kinds <= _PLAIN)
        for k, norms in enumerate(packed.packing.norms(grads)):
            places = packed.packing.places[k]
            pending.add(norms, packed.layers[k], packed.shares[k], grads, places, scale)
            if self._checks_due:
                self._compare([grads[i] for i in places.tolist()], list(norms))

    def _add_clipped(
        self, pending: PendingNorms, member: Member, have: list[int] | None
    ) -> list[int] | None:
        """What clips have measured of this member; the places that are left (None: all)."""
        where = self._located(member)
        if not where.touching:
            return have
        vectors = [self._clips[k].norms.detach() for k in where.touching]
        norms = vectors[0]
        if len(vectors) > 1:
            norms = torch.cat([v.to(norms.device) for v in vectors])
        picked = where.picked
        if picked is None or picked.have != have or picked.index.device != norms.device:
            picked = where.picked = _picked_of(member, where, have, norms.device)
        if len(picked.layer_P):
            pending.add(norms.index_select(0, picked.index), picked.layer_P, picked.share_P)
        return picked.left

    def resolve(self, pending: PendingNorms, values: Sequence[Float64]) -> Norms | None:
        """The squares, from the norms' values on the host; None without any gradient."""
        if self._compared:
            compared, self._compared = self._compared, []
            self.checked += [(float(a), float(b), narrow) for a, b, narrow in compared]
        if not values:
            return None
        layer_sq_L = np.zeros(len(self._table) + 1)
        total_sq = 0.0
        squares: list[Float64] = []
        totals: list[float] = []
        for i, value_P in enumerate(values):
            sq_P = np.square(value_P)
            total = float(sq_P.sum())
            if not math.isfinite(total) and pending.grads[i]:
                sq_P = np.square(_confirmed(value_P, pending.grads[i], pending.places[i]))
                total = float(sq_P.sum())
            share_P = pending.shares[i]
            if share_P is not None:
                sq_P = sq_P * share_P
                total = float(sq_P.sum())
            scale = pending.scales[i]
            if scale is not None:
                sq_P = sq_P / (scale * scale)
                total /= scale * scale
            squares.append(sq_P)
            totals.append(total)
        void: set[int] = set()
        for clips, gates in pending.again:
            clip, gate = (sum(totals[i] for i in which) for which in (clips, gates))
            void |= set(clips if gate > clip or not math.isfinite(gate) else gates)
        for i, (sq_P, total) in enumerate(zip(squares, totals, strict=True)):
            if i in void:
                continue
            total_sq += total
            layer_sq_L += np.bincount(
                pending.layers[i], weights=sq_P, minlength=len(self._table) + 1
            )
        rows_L = pending.rows_L
        if rows_L is None:  # not of measure()
            rows_L = np.ones(len(self._table))
        return Norms(total_sq, layer_sq_L[:-1], rows_L)


def _stamp(tensors: Sequence[Tensor]) -> Stamp:
    return list(map(id, tensors)), list(map(_VERSION, tensors))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    part = getattr(tensor, "_local_tensor", None)
    return tensor if part is None else part


def share(parameter: Tensor, world: int) -> float:
    """How much of its square this rank adds: one over the number of ranks that hold the same part.

    Raises:
        ValueError: it is a sum that has not been made yet (Partial); nobody holds a part.
    """
    mesh: Any = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return 1.0 / world
    copies = world / int(mesh.size())
    for dimension, placement in enumerate(parameter.placements):  # type: ignore[attr-defined]
        if placement.is_partial():
            raise ValueError("a parameter with Partial placement has no norm of its own")
        if placement.is_replicate():
            copies *= int(mesh.size(dimension))
    return 1.0 / copies


def elements(optimizers: Iterable[torch.optim.Optimizer], world: int) -> tuple[float, int]:
    """This rank's share of the trained elements, and how many there are; (0, 0) if not known."""
    mine, whole = 0.0, 0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if nn.parameter.is_lazy(p):
                    return 0.0, 0
                mine += share(p, world) * local(p.detach()).numel()
                whole += p.numel()
    return mine, whole


def _picked(share_P: Float64 | None, places: list[int]) -> Float64 | None:
    return None if share_P is None else share_P[places]


def _locate(parameters: Sequence[nn.Parameter], lists: list[list[Tensor]]) -> _Where:
    own = {id(p): i for i, p in enumerate(parameters)}
    at = [-1] * len(parameters)
    touching: list[int] = []
    start = 0
    for k, clipped in enumerate(lists):
        touched = False
        for j, p in enumerate(clipped):
            i = own.get(id(p))
            if i is not None:
                touched = True
                if at[i] < 0:  # the first clip saw the unclipped gradient
                    at[i] = start + j
        if touched:
            touching.append(k)
            start += len(clipped)
    others = [p for p, place in zip(parameters, at, strict=True) if place < 0]
    return _Where(lists, -1, touching, at, others)


def _picked_of(
    member: Member, where: _Where, have: list[int] | None, device: torch.device
) -> _Picked:
    among = have if have is not None else range(len(member.parameters))
    places = [i for i in among if where.at[i] >= 0]
    return _Picked(
        have,
        torch.tensor([where.at[i] for i in places], dtype=torch.long, device=device),
        member.layer_P[places],
        _picked(member.share_P, places),
        [i for i in among if where.at[i] < 0],
    )


def _packed(member: Member, have: list[int] | None, plain: bool) -> _Packed:
    """The packing for these gradients, which hardly ever are others than in the step before."""
    known = member.packed
    if known is not None and known.plain == plain and known.have == have:
        return known
    layer_P, share_P = member.layer_P, member.share_P
    owners: Sequence[Tensor] = member.parameters
    if have is not None:
        owners = [owners[i] for i in have]
        layer_P, share_P = layer_P[have], _picked(share_P, have)
    # A tensor of a class of its own may do anything when it is concatenated.
    packable = plain and not member.sharded
    way = Packing([local(p.detach()) for p in owners], SMALL if packable else 0)
    made = _Packed(
        have,
        plain,
        way,
        [layer_P[places] for places in way.places],
        [None if share_P is None else share_P[places] for places in way.places],
    )
    member.packed = made
    return made


def _confirmed(
    value_P: Float64, grads: Sequence[Tensor], places: npt.NDArray[np.intp] | None
) -> Float64:
    """Measure non-finite ones again in float64: finite entries may have been too large."""
    value_P = value_P.copy()
    for i in np.flatnonzero(~np.isfinite(value_P)).tolist():
        grad = grads[i if places is None else int(places[i])]
        value_P[i] = float(packing.norm(grad.detach(), torch.float64))
    return value_P


def _concat(norms: Sequence[Tensor]) -> Tensor | None:
    if not norms:
        return None
    first = norms[0].device
    return torch.stack([n.to(first) for n in norms])


def _same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return len(left) == len(right) and all(map(operator.is_, left, right))


def _same_lists(left: Sequence[Sequence[Tensor]], right: Sequence[Sequence[Tensor]]) -> bool:
    return len(left) == len(right) and all(map(_same, left, right))

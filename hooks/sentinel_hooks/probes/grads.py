"""Gradient probe: the L2 norm of every layer's gradient, and of all of them.

    probe = GradProbe(optimizers, table)
    pending = probe.measure(members, scales)      tensors on the device, nothing read yet
    norms = probe.resolve(pending, values)        float64 on the host

One call over the large gradients and one for each shape of the small ones (packing.py), or the
norms that the user's clip computed anyway (seams/clip_tap.py): then measuring costs nothing. fp16
and bf16 gradients are accumulated in float32: without it fp16 overflows at 65,504 and bf16 is 1e-3
off. Squares are summed in float64 on the host, where 1e38 squared still fits.

A norm that is not finite says that some gradient is not, or that finite ones were too large for
float32: only then is the tensor measured again, in float64. With gradients that the user already
clipped that is no longer possible, and the norm stays what torch's clip saw.

With several ranks each measures what lies on it (the local shard of a DTensor) and counts it as
its share: a parameter that n ranks hold counts 1/n on each, so that sums over all ranks are right,
whatever the number of ranks.

Shapes:  layer_sq_L float64 [L] in the order of the layer table, not yet reduced across ranks; a
         layer without gradient counts 0, nan and inf pass through.
Purity:  measure() does not wait for the device; resolve() only in the non-finite case.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
_GRAD = operator.attrgetter("grad")
_NONE = type(None)
_PLAIN = {Tensor, nn.Parameter}


@dataclass(slots=True)
class Member:
    """One optimizer's parameters, cached until its groups change."""

    optimizer: torch.optim.Optimizer
    parameters: list[nn.Parameter]
    layer_P: npt.NDArray[np.intp]  # OTHER is len(table) here: bincount wants no negatives
    signature: tuple[int, ...]
    share_P: Float64 | None = None  # of each square that is this rank's; None: one process
    sharded: bool = False  # some are DTensors, be it on a mesh of one
    packed: _Packed | None = None  # how they were measured last


@dataclass(slots=True)
class _Packed:
    """A packing of some of a member's gradients, and what belongs to each of its norms."""

    have: list[int] | None  # which of them; None: all
    plain: bool  # none of a class of its own
    packing: Packing
    layers: list[npt.NDArray[np.intp]]
    shares: list[Float64 | None]


@dataclass(slots=True)
class PendingNorms:
    """Norms on the device, by member; `grads` is empty where they came from the user's clip.

    Attributes:
        places: which of `grads` each norm is of.
    """

    norms: list[Tensor]
    layers: list[npt.NDArray[np.intp]]
    shares: list[Float64 | None]
    grads: list[Sequence[Tensor]]
    places: list[npt.NDArray[np.intp] | None]
    scales: list[float | None]

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


@dataclass(slots=True)
class Norms:
    """What the gradients measured on this rank; squares add up across ranks, norms do not."""

    total_sq: float
    layer_sq_L: Float64


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
        self._clips: list[tuple[list[Tensor], Tensor]] = []
        self.members = [Member(o, [], np.empty(0, np.intp), ()) for o in optimizers]
        self.unlisted = 0
        self.refresh()

    def refresh(self) -> None:
        """Look again at the groups: parameters may have been added, or replaced."""
        if all(m.signature == _signature(m.optimizer) for m in self.members):
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
            member.sharded = any(hasattr(p, "_local_tensor") for p in fresh)
            if self._world > 1:
                member.share_P = np.array([share(p, self._world) for p in fresh])
            member.signature = _signature(member.optimizer)

    # -- the user's clip ---------------------------------------------------------------------

    def clipped(
        self, parameters: Sequence[Tensor], grads: Sequence[Tensor], norms: Tensor | None
    ) -> None:
        """The user's clip is about to scale `grads`: keep (or take) their norms."""
        if norms is None:
            norms = _concat(tensor_norms([local(g) for g in grads]))
        if norms is not None:
            self._clips.append((list(parameters), norms))
            if self._checks_due:
                self._compare([local(g) for g in grads], list(norms))

    def forget_clips(self) -> None:
        """The gradients have moved since, or were used: those norms are stale."""
        if self._clips:
            self._clips = []

    @property
    def has_clips(self) -> bool:
        """The user has clipped since the gradients last moved."""
        return bool(self._clips)

    def clips_in_parts(self, members: Sequence[int]) -> bool:
        """The user has clipped, but not just these: measure() must look at each norm by itself."""
        return bool(self._clips) and any(
            self._clipped_exactly(self.members[m].parameters) is None for m in members
        )

    def _clipped_exactly(self, owners: Sequence[Tensor]) -> Tensor | None:
        """Norms from the one clip that was over just these, in this order: the usual case."""
        if len(self._clips) != 1:
            return None
        clipped, norms = self._clips[0]
        same = len(clipped) == len(owners) and all(map(operator.is_, clipped, owners))
        return norms if same else None

    def _clipped_in_parts(self, owners: Sequence[Tensor]) -> tuple[Tensor, list[int]] | None:
        """Norms from any clips, and the places of those owners that were clipped."""
        where: dict[int, Tensor] = {}
        for clipped, norms in self._clips:
            for p, norm in zip(clipped, norms.cpu(), strict=True):
                where.setdefault(id(p), norm)  # the first clip saw the unclipped gradient
        places = [i for i, p in enumerate(owners) if id(p) in where]
        if not places:
            return None
        return torch.stack([where[id(owners[i])] for i in places]), places

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
        for m in members:
            member = self.members[m]
            exact = self._clipped_exactly(member.parameters)
            if exact is not None:
                pending.add(exact, member.layer_P, member.share_P)
                continue
            grads: list[Tensor] = list(map(_GRAD, member.parameters))
            have: list[int] | None = None
            kinds = set(map(type, grads))
            if _NONE in kinds:
                kinds.discard(_NONE)
                have = [i for i, g in enumerate(grads) if g is not None]
            if self._clips and kinds:
                have = self._add_clipped(pending, member, have)
            if have is not None:
                grads = [grads[i] for i in have]
            if grads:
                if member.sharded:
                    grads = [local(g) for g in grads]
                packed = _packed(member, have, kinds <= _PLAIN)
                scale = scales.get(m) if scales else None
                for k, norms in enumerate(packed.packing.norms(grads)):
                    places = packed.packing.places[k]
                    pending.add(norms, packed.layers[k], packed.shares[k], grads, places, scale)
                    if self._checks_due:
                        self._compare([grads[i] for i in places.tolist()], list(norms))
        return pending

    def _add_clipped(
        self, pending: PendingNorms, member: Member, have: list[int] | None
    ) -> list[int]:
        """What clips have measured of this member; the places that are left."""
        left = have if have is not None else list(range(len(member.parameters)))
        parts = self._clipped_in_parts([member.parameters[i] for i in left])
        if parts is None:
            return left
        norms, among = parts
        places = [left[i] for i in among]
        pending.add(norms, member.layer_P[places], _picked(member.share_P, places))
        return sorted(set(left).difference(places))

    def resolve(self, pending: PendingNorms, values: Sequence[Float64]) -> Norms | None:
        """The squares, from the norms' values on the host; None without any gradient."""
        if self._compared:
            compared, self._compared = self._compared, []
            self.checked += [(float(a), float(b), narrow) for a, b, narrow in compared]
        if not values:
            return None
        layer_sq_L = np.zeros(len(self._table) + 1)
        total_sq = 0.0
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
            total_sq += total
            layer_sq_L += np.bincount(
                pending.layers[i], weights=sq_P, minlength=len(self._table) + 1
            )
        return Norms(total_sq, layer_sq_L[:-1])


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


def _picked(share_P: Float64 | None, places: list[int]) -> Float64 | None:
    return None if share_P is None else share_P[places]


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


def _signature(optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
    """Changes when parameters are added, removed or replaced wholesale."""
    signature: list[int] = []
    for group in optimizer.param_groups:
        params = group["params"]
        signature += (len(params), id(params[0]) if params else 0, id(params[-1]) if params else 0)
    return tuple(signature)

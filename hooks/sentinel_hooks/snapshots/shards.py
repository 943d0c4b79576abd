"""Which part of a tensor this rank holds: DTensors (FSDP2) as local shards with global offsets.

    reshard(models)             first at a safe point, on every rank alike
    part, cut = split(tensor)   what is in this rank's memory, sharing it; None for a plain tensor
    whole = rebuild(part, cut)  a DTensor around a local part, no message sent

Nothing here is a collective; everything is arithmetic on the mesh. Offsets follow torch.chunk, as
DTensor's Shard does, and are compared with the shape that the rank really holds: a placement that
they do not describe (Partial, FSDP2 with tensor parallelism) has no offsets. Such a tensor can be
kept in RAM and put back on the same rank, and is refused for the disk.

reshard(): after an evaluation, or with reshard_after_forward=False, an FSDP2 module still holds the
gathered parameters, plain tensors that the next forward would use instead of what was put back.
Which modules do is the same on every rank, and the gathering that the next forward has to do again
is a collective: so all ranks call it at the same safe point, or none.

Shapes:  size is the whole tensor's, offsets and shape are this rank's part of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_ORDINARY = frozenset({Tensor, nn.Parameter})


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's part of a DTensor.

    Attributes:
        size, stride: of the whole tensor.
        shape: of the part.
        offsets: where the part begins in the whole; None where that cannot be told.
        mesh: the DeviceMesh it is spread over.
        placements: one for each dimension of the mesh.
        owner: of all ranks that hold the same part, this is the one that writes it.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    shape: tuple[int, ...]
    offsets: tuple[int, ...] | None
    mesh: Any
    placements: tuple[Any, ...]
    owner: bool

    def same_part(self, other: Cut) -> bool:
        """The same part of a tensor of the same size, spread in the same way."""
        return (self.size, self.shape, self.offsets, self.placements) == (
            other.size,
            other.shape,
            other.offsets,
            other.placements,
        )

    def __str__(self) -> str:
        return (
            f"the part {list(self.shape)} at {list(self.offsets or ())} of {list(self.size)}, "
            f"placed {', '.join(map(str, self.placements))}"
        )


def is_sharded(tensor: Tensor) -> bool:
    """A DTensor."""
    if type(tensor) in _ORDINARY:  # thousands of them in each snapshot
        return False
    # Nobody can have made one before this module was imported; importing it here takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part, detached, in the same memory."""
    if not is_sharded(tensor):
        return tensor.detach()
    with torch.no_grad():
        part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
        return part.detach()


def split(tensor: Tensor) -> tuple[Tensor, Cut | None]:
    """(local(tensor), cut_of(tensor))."""
    if not is_sharded(tensor):
        return tensor.detach(), None
    return local(tensor), cut_of(tensor)


def cut_of(tensor: Tensor) -> Cut | None:
    """Which part it is; None for a plain tensor."""
    if not is_sharded(tensor):
        return None
    spread: Any = tensor
    cut = make_cut(tuple(tensor.shape), spread.device_mesh, spread.placements, tensor.stride())
    shape = tuple(local(tensor).shape)
    if cut.shape == shape:
        return cut
    return Cut(cut.size, cut.stride, shape, None, cut.mesh, cut.placements, owner=False)


def make_cut(
    size: Sequence[int],
    mesh: Any,
    placements: Iterable[Any],
    stride: Sequence[int] | None = None,
) -> Cut:
    """This rank's part of a tensor of `size` that is spread so over `mesh`."""
    placements = tuple(placements)
    where = mesh.get_coordinate()
    shape, offsets = list(size), [0] * len(size)
    known, owner = True, where is not None
    if where is None:  # this rank takes no part in the mesh
        shape = [0] * len(size)
    for dimension, placement in enumerate(placements):
        if where is None:
            break
        if placement.is_replicate():
            owner = owner and where[dimension] == 0
        elif type(placement).__name__ == "Shard":
            at, count = placement.dim, mesh.size(dimension)
            step = -(-shape[at] // count)
            begin = min(step * where[dimension], shape[at])
            shape[at] = min(step, shape[at] - begin)
            offsets[at] += begin
        else:
            known = False
    return Cut(
        tuple(size),
        tuple(stride) if stride is not None else contiguous(size),
        tuple(shape),
        tuple(offsets) if known else None,
        mesh,
        placements,
        owner,
    )


def contiguous(size: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for length in reversed(size):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def rebuild(part: Tensor, cut: Cut) -> Tensor:
    """A DTensor whose local part is `part`; nothing is sent or compared."""
    from torch.distributed.tensor import DTensor

    made: Tensor = DTensor.from_local(
        part,
        cut.mesh,
        cut.placements,
        run_check=False,
        shape=torch.Size(cut.size),
        stride=cut.stride,
    )
    return made


def spell(placements: Iterable[Any]) -> list[list[Any]] | None:
    """Placements as plain values, for files; None for kinds that have no offsets."""
    words: list[list[Any]] = []
    for placement in placements:
        if placement.is_replicate():
            words.append(["replicate"])
        elif type(placement).__name__ == "Shard":
            words.append(["shard", placement.dim])
        else:
            return None
    return words


def unspell(words: Iterable[Sequence[Any]]) -> tuple[Any, ...]:
    """Inverse of spell()."""
    from torch.distributed.tensor import Replicate, Shard

    return tuple(Shard(word[1]) if word[0] == "shard" else Replicate() for word in words)


def reshard(models: Iterable[nn.Module]) -> None:
    """Let FSDP2 modules give up gathered parameters; on all ranks alike, or on none."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None:
        return
    for model in models:
        for module in model.modules():
            if isinstance(module, kind):
                module.reshard()

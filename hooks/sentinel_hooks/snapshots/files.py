"""One snapshot's files: from an image in host memory to torch.distributed.checkpoint and back.

    rest = capture(target)                          what only the disk copy holds, in milliseconds
    names = write(directory, image, rest, attempt=0)     slow, needs no live object: in a thread
    image, rest = read(directory, places(target))   into host memory; nothing of the run moves
    put_back_all(target, rest)                      for a restarted process: schedules, RNG

Tensors go through torch.distributed.checkpoint (parts.py), under the names that people expect:
`model.<name>` (`model_1.` for a second model), `optimizer.state.<parameter>.<key>`, and
`outside.<optimizer>.<group>.<index>` for parameters that only an optimizer knows. Everything else
is a plain dict in rank-<rank>.pt, in which a tensor is named by {"__tensor__": name, ...}.

With several ranks each writes, without a word to the others, its own parts of DTensors and its own
rank-<rank>.pt; rank 0 writes the plain tensors of models and optimizers, which are equal on all
ranks. Plain tensors of the user's own objects may differ and stay in each rank's dict. merge()
makes the whole of it. Reading needs no equal number of ranks: the live model says which slices this
rank wants. What cannot be cut anew (RNG, schedules, the user's objects) comes from the same rank's
dict if there is one; Image.notes says what could not be had.

Errors:  write() and read() raise whatever the disk, torch or an unpicklable object of the user's
         raises; checksums are the business of sentinel.traces.snapshots.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sentinel.wire import codec
from sentinel_hooks.snapshots import shards
from sentinel_hooks.snapshots.ram import (
    HostTensor,
    Image,
    SnapshotError,
    freeze,
    has_data,
    inner,
    live_tensors,
    plain_name,
    thaw,
)
from sentinel_hooks.snapshots.shards import Cut
from sentinel_hooks.target import Target

if TYPE_CHECKING:
    from sentinel_hooks.snapshots.parts import Item, Source

FORMAT = 1
METADATA = ".metadata"
_TENSOR = "__tensor__"


@dataclass(frozen=True, slots=True)
class Rest:
    """What only the disk copy holds.

    Attributes:
        names: for each optimizer, the name of its parameter at (group, index).
        groups: for each optimizer, its parameter groups without the parameters: rates included.
        schedulers: their state_dicts.
        rng: of torch, cuda (by device), python and numpy; empty: this rank's was not saved.
    """

    names: list[dict[tuple[int, int], str]] = field(default_factory=list)
    groups: list[list[dict[str, Any]]] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    rng: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Place:
    """A live tensor that a snapshot's values are meant for."""

    size: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    cut: Cut | None


@dataclass(frozen=True, slots=True)
class Places:
    """Where everything goes on this rank.

    Attributes:
        tensors: as the image names them.
        optimizers: for each, the parameter at (group, index).
        layout: hash of names, shapes and types.
        extra: for each of the user's objects its live state, with a Place for each tensor; None
            where nothing is sharded, so that nothing has to be cut.
        devices: that live tensors are on.
    """

    tensors: dict[tuple[Any, ...], Place]
    optimizers: list[dict[tuple[int, int], Place]]
    layout: str
    extra: list[Any]
    devices: tuple[torch.device, ...]

    def device(self, saved: str, near: Place | None) -> torch.device:
        """The saved device, or this rank's own of the same kind."""
        device = torch.device(saved)
        if near is not None and near.device.type == device.type:
            return near.device
        if device in self.devices:
            return device
        return next((own for own in self.devices if own.type == device.type), device)

    def mesh(self, dimensions: int) -> Any:
        """A mesh of so many dimensions that something live is spread over; None without one."""
        for place in self.tensors.values():
            if place.cut is not None and len(place.cut.placements) == dimensions:
                return place.cut.mesh
        return None


def rest_file(rank: int) -> str:
    """File of a rank's dict."""
    return f"rank-{rank}.pt"


# ---------------------------------------------------------------- between steps


def capture(target: Target) -> Rest:
    """Copy what an image of the RAM tier does not hold; draws nothing, moves nothing."""
    known = {
        id(parameter): plain_name(name) if m == 0 else f"{m}.{plain_name(name)}"
        for m, model in enumerate(map(inner, target.models))
        for name, parameter in model.named_parameters()
    }
    return Rest(
        names=[
            {
                (g, p): known.get(id(parameter), f"{g}.{p}")
                for g, group in enumerate(optimizer.param_groups)
                for p, parameter in enumerate(group["params"])
            }
            for optimizer in target.optimizers
        ],
        groups=[
            [
                {k: freeze(v) for k, v in group.items() if k != "params"}
                for group in optimizer.param_groups
            ]
            for optimizer in target.optimizers
        ],
        schedulers=[
            freeze(s.state_dict()) if hasattr(s, "state_dict") else None for s in target.schedulers
        ],
        rng=_dice(target),
    )


def places(target: Target) -> Places:
    """Where a snapshot's values would go now; call it on the trainer's thread, on all ranks."""
    shards.reshard(target.models)
    live = dict(live_tensors(target))
    sharded = any(map(shards.is_sharded, live.values()))
    return Places(
        {key: _place_of(tensor) for key, tensor in live.items()},
        [
            {
                (g, p): _place_of(parameter)
                for g, group in enumerate(optimizer.param_groups)
                for p, parameter in enumerate(group["params"])
            }
            for optimizer in target.optimizers
        ],
        _layout((key, tensor.shape, tensor.dtype) for key, tensor in live.items()),
        [_form(thing.state_dict()) if sharded else None for thing in target.extra_state],
        tuple(dict.fromkeys(tensor.device for tensor in live.values())),
    )


def _form(value: Any) -> Any:
    """A tree with places in it, as far as there are tensors."""
    if isinstance(value, Tensor):
        return _place_of(value)
    if isinstance(value, dict):
        return {k: _form(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_form(v) for v in value]
    return None


def _below(near: Any, key: Any) -> Any:
    """What is near to a part of a tree: a parameter is, to all of its state."""
    if isinstance(near, Place):
        return near
    if isinstance(near, dict):
        return near.get(key)
    if isinstance(near, list) and isinstance(key, int) and key < len(near):
        return near[key]
    return None


def _place_of(tensor: Tensor) -> Place:
    return Place(tuple(tensor.shape), tensor.dtype, tensor.device, shards.cut_of(tensor))


def _dice(target: Target) -> dict[str, Any]:
    devices = _cuda_devices(target)
    kind, keys, *position = np.random.get_state()  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "cuda": {index: torch.cuda.get_rng_state(index) for index in devices},
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.array(keys, dtype=np.int64)), *position),
    }


def _cuda_devices(target: Target) -> list[int]:
    return sorted({t.device.index or 0 for _, t in live_tensors(target) if t.device.type == "cuda"})


def put_back_all(target: Target, rest: Rest) -> None:
    """Schedules, rates and RNG, for a process that starts again where the snapshot was taken."""
    for optimizer, groups in zip(target.optimizers, rest.groups, strict=True):
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            for key, value in saved.items():
                now, new = group.get(key), thaw(value)
                if isinstance(now, Tensor) and isinstance(new, Tensor):
                    now.detach().copy_(new)  # a compiled step holds on to it
                else:
                    group[key] = new
    for scheduler, state in zip(target.schedulers, rest.schedulers, strict=True):
        if state is not None:
            scheduler.load_state_dict(thaw(state))
    rng = rest.rng
    if not rng:
        return
    torch.set_rng_state(rng["torch"])
    saved, here = rng["cuda"], _cuda_devices(target)
    # Another rank count or order of devices: one for one, where there are as many.
    targets = dict(zip(saved, here, strict=True)) if len(saved) == len(here) else {}
    for index, state in saved.items():
        torch.cuda.set_rng_state(state, targets.get(index, index))
    random.setstate(rng["python"])
    kind, keys, *position = rng["numpy"]
    np.random.set_state(  # noqa: NPY002
        (kind, keys.numpy().astype(np.uint32), *position)
    )


def layout(image: Image) -> str:
    """Hash of the names, shapes and types of the parameters and buffers; of the whole tensors."""
    return _layout(
        (key, saved.cut.size if saved.cut is not None else saved.data.shape, saved.data.dtype)
        for key, saved in image.tensors.items()
    )


def live_layout(target: Target) -> str:
    """The same of the live model: equal when a snapshot can be put back."""
    return _layout((key, tensor.shape, tensor.dtype) for key, tensor in live_tensors(target))


def weights_hash(image: Image) -> str:
    """Hash of the values of the parameters and buffers, of this rank's parts of them."""
    h = hashlib.blake2b(digest_size=16)
    for saved in image.tensors.values():
        data = saved.data
        if data.layout is torch.strided and data.numel() and has_data(data):
            h.update(data.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return h.hexdigest()


def _layout(items: Iterable[tuple[Any, Sequence[int], torch.dtype]]) -> str:
    h = hashlib.blake2b(digest_size=16)
    for key, shape, dtype in items:
        h.update(f"{key} {tuple(shape)} {dtype}\n".encode())
    return h.hexdigest()


# ---------------------------------------------------------------- writing


def write(
    directory: Path, image: Image, rest: Rest, *, attempt: int, rank: int = 0, world: int = 1
) -> list[str]:
    """Write everything of this rank into an existing directory and sync it; the files' names.

    Raises:
        FileExistsError: this rank has written there before.
    """
    from sentinel_hooks.snapshots import parts

    packer = _Packer(rank, world)
    models = [(list(key), packer.put(saved, *_place(key))) for key, saved in image.tensors.items()]
    optimizers = [
        _pack_optimizer(packer, number, kept, rest.names[number] if rest.names else {})
        for number, kept in enumerate(image.optimizers)
    ]
    record = {
        "format": FORMAT,
        "step": image.step,
        "attempt": attempt,
        "rank": rank,
        "world": world,
        "stats": codec.encode_stats(image.stats),
        "size_bytes": image.size_bytes,
        "tensors": models,
        "optimizers": optimizers,
        "scaler": image.scaler,
        "extra": [packer.own(value, f"extra_{i}") for i, value in enumerate(image.extra)],
        "names": rest.names,
        "groups": [packer.own(g, f"groups_{i}") for i, g in enumerate(rest.groups)],
        "schedulers": [packer.own(s, f"scheduler_{i}") for i, s in enumerate(rest.schedulers)],
        "rng": rest.rng,
    }
    with open(directory / rest_file(rank), "xb") as file:
        torch.save(record, file)
        file.flush()
        os.fsync(file.fileno())
    parts.save(directory, packer.items, rank=rank, world=world, borrowed=packer.borrowed)
    if world == 1:
        return sorted(entry.name for entry in os.scandir(directory))
    names = [rest_file(rank), parts.part_name(rank)]
    return names + sorted(e.name for e in os.scandir(directory) if e.name.startswith(f"__{rank}_"))


def merge(directory: Path, world: int) -> str:
    """Make one index of what all ranks have written; its file's name.

    Raises:
        ValueError: together it is not whole.
    """
    from sentinel_hooks.snapshots import parts

    parts.merge(directory, world)
    return METADATA


def total_bytes(image: Image, world: int) -> int:
    """About what all ranks together will write."""
    own = sum(_host_bytes(e, sharded=False) + _host_bytes(e, sharded=True) for e in image.extra)
    cut = _host_bytes([image.tensors, image.optimizers], sharded=True)
    return image.size_bytes + (world - 1) * (own + cut)


def _host_bytes(value: Any, *, sharded: bool) -> int:
    if isinstance(value, HostTensor):
        held = value.data.numel() * value.data.element_size() if has_data(value.data) else 0
        return held if (value.cut is not None) is sharded else 0
    if isinstance(value, dict):
        return sum(_host_bytes(v, sharded=sharded) for v in value.values())
    if isinstance(value, list | tuple):
        return sum(_host_bytes(v, sharded=sharded) for v in value)
    return 0


def _place(key: tuple[Any, ...]) -> tuple[str, ...]:
    """Where a tensor of the image stands among the names on disk."""
    if key[0] == "optimizer":
        return "outside", ".".join(map(str, key[1:4]))
    model, _, name = key
    return "model" if model == 0 else f"model_{model}", name


def _pack_optimizer(
    packer: _Packer, number: int, kept: dict[str, Any], names: Mapping[tuple[int, int], str]
) -> dict[str, Any]:
    root = "optimizer" if number == 0 else f"optimizer_{number}"
    return {
        "state": {
            key: packer.tree(value, root, "state", names.get(key, f"{key[0]}.{key[1]}"))
            for key, value in kept["state"].items()
        },
        "others": packer.own(kept["others"], root, "others"),
        "groups": packer.own(kept["groups"], root, "groups"),
    }


class _Packer:
    """Collects tensors under names; what is left of a tree refers to them."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._names: set[tuple[str, ...]] = set()
        self.items: list[Item] = []
        self.borrowed: list[str] = []  # rank 0 writes them

    def put(self, saved: HostTensor, *path: str) -> Any:
        from sentinel_hooks.snapshots.parts import Item

        data, cut = saved.data, saved.cut
        if data.layout is not torch.strided or not has_data(data):  # DCP cannot: in the tree
            return self._inline(saved)
        while path in self._names:
            path = (*path[:-1], path[-1] + "_")
        self._names.add(path)
        name = ".".join(path)
        ref = {_TENSOR: name, "device": str(saved.device), "stride": tuple(data.stride())}
        if cut is None:
            if self._rank == 0:
                self.items.append(Item(path, data))
            else:
                self.borrowed.append(name)
            return ref
        words = shards.spell(cut.placements)
        if cut.offsets is None or words is None:
            raise SnapshotError(
                f"{name} is placed {', '.join(map(str, cut.placements))}: such a tensor can be "
                "kept in RAM, not on disk; switch the disk off with Snapshots(disk=False)"
            )
        # An empty part has nothing to say, unless the whole tensor is empty.
        if cut.owner and (data.numel() or (0 in cut.size and self._rank == 0)):
            self.items.append(Item(path, data, cut.size, cut.offsets))
        else:
            self.borrowed.append(name)
        spread = {"shape": cut.shape, "offsets": cut.offsets, "placements": words}
        return {**ref, "cut": spread}

    def own(self, value: Any, *path: str) -> Any:
        """A tree whose plain tensors may differ from rank to rank."""
        return self.tree(value, *path, own=self._world > 1)

    def tree(self, value: Any, *path: str, own: bool = False) -> Any:
        if isinstance(value, HostTensor):
            return self._inline(value) if own and value.cut is None else self.put(value, *path)
        if isinstance(value, dict):
            return {k: self.tree(v, *path, _plain(k), own=own) for k, v in value.items()}
        if isinstance(value, list):
            return [self.tree(v, *path, str(i), own=own) for i, v in enumerate(value)]
        if type(value) is tuple:
            return tuple(self.tree(v, *path, str(i), own=own) for i, v in enumerate(value))
        return value

    def _inline(self, saved: HostTensor) -> Any:
        return {_TENSOR: "", "data": saved.data, "device": str(saved.device)}


def _plain(key: Any) -> str:
    return str(key) if isinstance(key, str | int) else "key"


# ---------------------------------------------------------------- reading


def read(
    directory: Path,
    places: Places,
    *,
    rank: int = 0,
    world: int = 1,
    saved_by: int = 1,
    check: Callable[[Iterable[str]], None] = lambda names: None,
) -> tuple[Image, Rest]:
    """What this rank needs of a snapshot that `saved_by` ranks have written, in host memory.

    Args:
        check: compares the checksums of these files, or raises; called before they are read.
    """
    from sentinel_hooks.snapshots.parts import Source

    of = rank if rank < saved_by else 0
    check([rest_file(of), METADATA])
    # Pickles: written by this run, found unchanged, and read with the rights of their own user.
    record: dict[str, Any] = torch.load(
        directory / rest_file(of),
        map_location="cpu",
        weights_only=False,
    )
    if record["format"] != FORMAT:
        raise ValueError(f"{rest_file(of)} is of format {record['format']}, this reads {FORMAT}")
    source = Source(directory)
    unpack = _Unpacker(source, places)
    image = Image(record["step"], codec.decode_stats(record["stats"]))
    image.tensors = {
        tuple(key): unpack.tree(ref, places.tensors.get(tuple(key)))
        for key, ref in record["tensors"]
    }
    for number, kept in enumerate(record["optimizers"]):
        near = places.optimizers[number] if number < len(places.optimizers) else {}
        image.optimizers.append(
            {
                "state": {k: unpack.tree(v, near.get(k)) for k, v in kept["state"].items()},
                "others": unpack.tree(kept["others"]),
                "groups": unpack.tree(kept["groups"]),
            }
        )
    image.scaler = record["scaler"]
    image.extra = [unpack.tree(e, _below(places.extra, i)) for i, e in enumerate(record["extra"])]
    rest = Rest(
        record["names"],
        [unpack.tree(g) for g in record["groups"]],
        [unpack.tree(s) for s in record["schedulers"]],
        record["rng"] if of == rank else {},
    )
    image.notes = _notes(rank, world, saved_by)
    image.size_bytes = sum(
        _host_bytes([image.tensors, image.optimizers, image.extra], sharded=s)
        for s in (True, False)
    )
    check(source.files)
    source.load()
    return image, rest


def _notes(rank: int, world: int, saved_by: int) -> tuple[str, ...]:
    if world == saved_by:
        return ()
    notes = [f"it was saved by {_ranks(saved_by)} and is put back on {_ranks(world)}"]
    if rank >= saved_by:
        notes.append(
            f"rank {rank} was not among them: schedules and extra_state are those of rank 0, "
            "its RNG is left as it is"
        )
    elif world < saved_by:
        left = f"rank {world}" if saved_by == world + 1 else f"ranks {world} to {saved_by - 1}"
        notes.append(f"RNG, schedules and extra_state of {left} are not used")
    return tuple(notes)


def _ranks(number: int) -> str:
    return "one rank" if number == 1 else f"{number} ranks"


class _Unpacker:
    """Turns references into tensors to be filled, each of the size that this rank wants."""

    def __init__(self, source: Source, places: Places) -> None:
        self._source = source
        self._places = places

    def tree(self, value: Any, near: Any = None) -> Any:
        """`near`: the parameter that this belongs to, or places in the form of this tree."""
        if isinstance(value, dict):
            if _TENSOR in value:
                return self._tensor(value, near if isinstance(near, Place) else None)
            return {k: self.tree(v, _below(near, k)) for k, v in value.items()}
        if isinstance(value, list):
            return [self.tree(v, _below(near, i)) for i, v in enumerate(value)]
        if type(value) is tuple:
            return tuple(self.tree(v, _below(near, i)) for i, v in enumerate(value))
        return value

    def _tensor(self, ref: Mapping[str, Any], near: Place | None) -> HostTensor:
        device = self._places.device(ref["device"], near)
        name = ref[_TENSOR]
        if not name:
            return self._inline(ref["data"], device, near)
        size, dtype = self._source.about(name)
        cut = self._cut(size, ref, near)
        stride = tuple(ref["stride"])
        if cut is None:
            if "cut" in ref:
                stride = shards.contiguous(size)
            data = torch.empty_strided(size, stride, dtype=dtype)
            self._source.want(name, data, [0] * len(size))
            return HostTensor(data, device)
        if cut.offsets is None:
            raise SnapshotError(f"{name}: the live one is {cut}, which has no offsets")
        if tuple(ref.get("cut", {}).get("shape", ())) != cut.shape:
            stride = shards.contiguous(cut.shape)
        data = torch.empty_strided(cut.shape, stride, dtype=dtype)
        self._source.want(name, data, cut.offsets)
        return HostTensor(data, device, cut)

    def _inline(self, data: Tensor, device: torch.device, near: Place | None) -> HostTensor:
        cut = near.cut if near is not None and near.size == tuple(data.shape) else None
        if cut is None or cut.offsets is None:
            return HostTensor(data, device)
        for dimension, (begin, length) in enumerate(zip(cut.offsets, cut.shape, strict=True)):
            data = data.narrow(dimension, begin, length)
        return HostTensor(data.contiguous(), device, cut)

    def _cut(self, size: tuple[int, ...], ref: Mapping[str, Any], near: Place | None) -> Cut | None:
        """As what is near is cut where it is of the same size, else as it was when saved."""
        if near is not None and near.size == size and size:
            return near.cut
        if "cut" not in ref:
            return None
        placements = shards.unspell(ref["cut"]["placements"])
        mesh = self._places.mesh(len(placements))
        return shards.make_cut(size, mesh, placements) if mesh is not None else None


__all__ = [
    "METADATA",
    "Place",
    "Places",
    "Rest",
    "capture",
    "layout",
    "live_layout",
    "merge",
    "places",
    "put_back_all",
    "read",
    "rest_file",
    "total_bytes",
    "weights_hash",
    "write",
]

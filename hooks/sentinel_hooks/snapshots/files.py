"""One snapshot's files: from an image in host memory to torch.distributed.checkpoint and back.

    rest = capture(target)                          what only the disk copy holds, in milliseconds
    names = write(directory, image, rest, target)   slow, needs no live object: in the background
    image, rest = read(directory)                   into host memory; nothing of the run moves
    put_back_all(target, rest)                      for a restarted process: schedules, RNG

Tensors go through torch.distributed.checkpoint, under the names that people expect:
`model.<name>` (`model_1.` for a second model), `optimizer.state.<parameter>.<key>`, and
`outside.<optimizer>.<group>.<index>` for parameters that only an optimizer knows. Everything else
is a plain dict in rank-0.pt, in which a tensor is named by {"__tensor__": name, "device": ...}.

DCP's planner and writer are driven here one by one, as its save() drives them in one process:
save() warns when torch.distributed is not initialised, and with it would talk to other ranks from a
thread. That also keeps its CheckpointException, which no `except Exception` catches, out of here.

Errors:  write() and read() raise whatever the disk, torch or an unpicklable object of the user's
         raises; checksums are the business of sentinel.traces.snapshots.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from sentinel.wire import codec
from sentinel_hooks.snapshots.ram import HostTensor, Image, freeze, live_tensors, thaw
from sentinel_hooks.target import Target

FORMAT = 1
REST_FILE = "rank-0.pt"
_TENSOR = "__tensor__"


@dataclass(frozen=True, slots=True)
class Rest:
    """What only the disk copy holds.

    Attributes:
        names: for each optimizer, the name of its parameter at (group, index).
        groups: for each optimizer, its parameter groups without the parameters: rates included.
        schedulers: their state_dicts.
        rng: of torch, cuda (by device), python and numpy.
    """

    names: list[dict[tuple[int, int], str]] = field(default_factory=list)
    groups: list[list[dict[str, Any]]] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    rng: dict[str, Any] = field(default_factory=dict)


# ---------------------------------------------------------------- between steps


def capture(target: Target) -> Rest:
    """Copy what an image of the RAM tier does not hold; draws nothing, moves nothing."""
    known = {
        id(parameter): name if m == 0 else f"{m}.{name}"
        for m, model in enumerate(target.models)
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


def _dice(target: Target) -> dict[str, Any]:
    devices = sorted(
        {t.device.index or 0 for _, t in live_tensors(target) if t.device.type == "cuda"}
    )
    kind, keys, *position = np.random.get_state()  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "cuda": {index: torch.cuda.get_rng_state(index) for index in devices},
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.array(keys, dtype=np.int64)), *position),
    }


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
    torch.set_rng_state(rng["torch"])
    for index, state in rng["cuda"].items():
        torch.cuda.set_rng_state(state, index)
    random.setstate(rng["python"])
    kind, keys, *position = rng["numpy"]
    np.random.set_state(  # noqa: NPY002
        (kind, keys.numpy().astype(np.uint32), *position)
    )


def layout(image: Image) -> str:
    """Hash of the names, shapes and types of the parameters and buffers."""
    return _layout((key, saved.data) for key, saved in image.tensors.items())


def live_layout(target: Target) -> str:
    """The same of the live model: equal when a snapshot can be put back."""
    return _layout(live_tensors(target))


def weights_hash(image: Image) -> str:
    """Hash of the values of the parameters and buffers."""
    h = hashlib.blake2b(digest_size=16)
    for saved in image.tensors.values():
        data = saved.data
        if data.layout is torch.strided and data.numel():
            h.update(data.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return h.hexdigest()


def _layout(items: Any) -> str:
    h = hashlib.blake2b(digest_size=16)
    for key, tensor in items:
        h.update(f"{key} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
    return h.hexdigest()


# ---------------------------------------------------------------- writing


def write(directory: Path, image: Image, rest: Rest, *, attempt: int) -> list[str]:
    """Write everything into an existing empty directory and sync it; the files' names."""
    packer = _Packer()
    models = [(list(key), packer.put(saved, *_place(key))) for key, saved in image.tensors.items()]
    optimizers = [
        _pack_optimizer(packer, number, kept, rest.names[number] if rest.names else {})
        for number, kept in enumerate(image.optimizers)
    ]
    record = {
        "format": FORMAT,
        "step": image.step,
        "attempt": attempt,
        "stats": codec.encode_stats(image.stats),
        "size_bytes": image.size_bytes,
        "tensors": models,
        "optimizers": optimizers,
        "scaler": image.scaler,
        "extra": [packer.tree(value, f"extra_{i}") for i, value in enumerate(image.extra)],
        "names": rest.names,
        "groups": [packer.tree(g, f"groups_{i}") for i, g in enumerate(rest.groups)],
        "schedulers": [packer.tree(s, f"scheduler_{i}") for i, s in enumerate(rest.schedulers)],
        "rng": rest.rng,
    }
    with open(directory / REST_FILE, "xb") as file:
        torch.save(record, file)
        file.flush()
        os.fsync(file.fileno())
    _dcp_save(directory, packer.tensors)
    return sorted(entry.name for entry in os.scandir(directory))


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
        "others": packer.tree(kept["others"], root, "others"),
        "groups": packer.tree(kept["groups"], root, "groups"),
    }


class _Packer:
    """Collects tensors under names; what is left of a tree refers to them."""

    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}

    def put(self, saved: HostTensor, *path: str) -> Any:
        data = saved.data
        if data.layout is not torch.strided:  # DCP cannot: it stays in the tree
            return {_TENSOR: "", "data": data, "device": str(saved.device)}
        name, place = self._free(path)
        place[name] = data
        return {
            _TENSOR: ".".join((*path[:-1], name)),
            "device": str(saved.device),
            "stride": tuple(data.stride()),
        }

    def _free(self, path: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
        place = self.tensors
        for part in path[:-1]:
            place = place.setdefault(part, {})
        name = path[-1]
        while name in place:
            name += "_"
        return name, place

    def tree(self, value: Any, *path: str) -> Any:
        if isinstance(value, HostTensor):
            return self.put(value, *path)
        if isinstance(value, dict):
            return {k: self.tree(v, *path, _plain(k)) for k, v in value.items()}
        if isinstance(value, list):
            return [self.tree(v, *path, str(i)) for i, v in enumerate(value)]
        if type(value) is tuple:
            return tuple(self.tree(v, *path, str(i)) for i, v in enumerate(value))
        return value


def _plain(key: Any) -> str:
    return str(key) if isinstance(key, str | int) else "key"


def _flat(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for key, value in nested.items():
        if isinstance(value, Tensor):
            yield prefix + key, value
        else:
            yield from _flat(value, f"{prefix}{key}.")


def _dcp_save(directory: Path, tensors: dict[str, Any]) -> None:
    # Imported late: it takes 1.6 s.
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    # No copy-ahead: it would wake CUDA in this thread, for tensors that are in host memory anyway.
    writer = FileSystemWriter(directory, per_thread_copy_ahead=0)
    planner = DefaultSavePlanner()
    planner.set_up_planner(tensors, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    plan = writer.prepare_global_plan(plans)[0]
    written = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [written])


# ---------------------------------------------------------------- reading


def read(directory: Path) -> tuple[Image, Rest]:
    """The whole snapshot in host memory; check its checksums first, nothing here does."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    # A pickle: written by this run, found unchanged, and read with the rights of its own user.
    record: dict[str, Any] = torch.load(
        directory / REST_FILE,
        map_location="cpu",
        weights_only=False,
    )
    if record["format"] != FORMAT:
        raise ValueError(f"{REST_FILE} is of format {record['format']}, this reads {FORMAT}")
    wanted: dict[str, Tensor] = {}
    reader = FileSystemReader(directory)
    metadata = reader.read_metadata()
    known = metadata.state_dict_metadata

    def unpack(value: Any) -> Any:
        if isinstance(value, dict):
            if _TENSOR not in value:
                return {k: unpack(v) for k, v in value.items()}
            device = torch.device(value["device"])
            name = value[_TENSOR]
            if not name:
                return HostTensor(value["data"], device)
            about = cast(Any, known[name])
            wanted[name] = torch.empty_strided(
                tuple(about.size), value["stride"], dtype=about.properties.dtype
            )
            return HostTensor(wanted[name], device)
        if isinstance(value, list):
            return [unpack(v) for v in value]
        if type(value) is tuple:
            return tuple(unpack(v) for v in value)
        return value

    image = Image(record["step"], codec.decode_stats(record["stats"]))
    image.tensors = {tuple(key): unpack(ref) for key, ref in record["tensors"]}
    image.optimizers = [unpack(o) for o in record["optimizers"]]
    image.scaler = record["scaler"]
    image.extra = [unpack(e) for e in record["extra"]]
    image.size_bytes = record["size_bytes"]
    rest = Rest(
        record["names"],
        [unpack(g) for g in record["groups"]],
        [unpack(s) for s in record["schedulers"]],
        record["rng"],
    )
    planner = DefaultLoadPlanner()
    planner.set_up_planner(cast("dict[str, Any]", wanted), metadata, True)
    reader.set_up_storage_reader(metadata, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    plan = reader.prepare_global_plan(planner.create_global_plan([plan]))[0]
    reader.read_data(planner.finish_plan(plan), planner).wait()
    return image, rest


__all__ = [
    "REST_FILE",
    "Rest",
    "capture",
    "layout",
    "live_layout",
    "put_back_all",
    "read",
    "weights_hash",
    "write",
]

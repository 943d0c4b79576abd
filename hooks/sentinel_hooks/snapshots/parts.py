"""Tensors to torch.distributed.checkpoint's files and back, each rank by itself.

    save(directory, items, rank=0, world=1)      this rank's tensors; with one rank .metadata too
    merge(directory, world)                      one .metadata of the parts of all ranks
    source = open_source(directory)              what is there
    source.want(name, data, offsets)             which slice goes where
    source.files, source.load()                  the files that this touches; read them

Writer and reader of torch.distributed.checkpoint are driven by hand, with plans made here: its own
save() and load() would talk to other ranks, from a background thread, and warn without a process
group. What comes out is what they write and read: `dcp.load` of the directory works.

Import this late: it takes 1.6 s.

Files:   __<rank>_0.distcp; part-<rank>.pickle, what this rank wrote, until merge() has read it
         (it stays, for whoever looks into a torn save); .metadata.
Errors:  ValueError where parts do not make a whole; OSError and torch's own from below.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor, or this rank's part of one.

    Attributes:
        path: its name is this, joined by dots.
        data: in host memory.
        size, offsets: of the whole tensor, and where the part begins; None for a plain tensor.
    """

    path: tuple[str, ...]
    data: Tensor
    size: tuple[int, ...] | None = None
    offsets: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """What it is called on disk."""
        return ".".join(self.path)


@dataclass(slots=True)
class _Part:
    """What one rank has written."""

    tensors: dict[str, TensorStorageMetadata] = field(default_factory=dict)
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    results: list[Any] = field(default_factory=list)
    borrowed: list[str] = field(default_factory=list)


class _Giver(DefaultSavePlanner):
    """Hands the writer the tensors by name."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.tensors = tensors

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.tensors[index.fqn]


class _Taker(DefaultLoadPlanner):
    """Tells the reader where a named tensor's values go."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.tensors = tensors

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.tensors[index.fqn]


def part_name(rank: int) -> str:
    """File that says what a rank has written."""
    return f"part-{rank}.pickle"


# ---------------------------------------------------------------- writing


def save(
    directory: Path,
    items: Sequence[Item],
    *,
    rank: int = 0,
    world: int = 1,
    borrowed: Iterable[str] = (),
) -> None:
    """Write and sync `items`; `borrowed` are names that some other rank has to write."""
    part = _Part(borrowed=sorted(borrowed))
    # No copy-ahead: it would wake CUDA in this thread, for tensors that are in host memory anyway.
    writer = FileSystemWriter(directory, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(True)
    plan = SavePlan([_write_item(item, part) for item in items])
    if items:
        plan = writer.prepare_local_plan(plan)
        # The place in the list gives the file its name.
        plan = writer.prepare_global_plan([SavePlan([])] * rank + [plan])[rank]
        planner = _Giver({item.name: item.data for item in items})
        part.results = list(writer.write_data(plan, planner).wait())
    if world == 1:
        _finish(writer, [part])
        return
    with open(directory / part_name(rank), "xb") as file:
        pickle.dump(part, file)
        file.flush()
        os.fsync(file.fileno())


def _write_item(item: Item, part: _Part) -> WriteItem:
    sharded = item.offsets is not None
    size = torch.Size(item.size if item.size is not None else item.data.shape)
    offsets = torch.Size(item.offsets if item.offsets is not None else [0] * item.data.dim())
    chunk = ChunkStorageMetadata(offsets=offsets, sizes=item.data.shape)
    properties = TensorProperties.create_from_tensor(item.data)
    part.tensors[item.name] = TensorStorageMetadata(properties, size, [chunk])
    part.paths[item.name] = item.path
    return WriteItem(
        index=MetadataIndex(item.name, offsets),
        type=WriteItemType.SHARD if sharded else WriteItemType.TENSOR,
        tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
    )


def merge(directory: Path, world: int) -> None:
    """Make .metadata of the parts of all ranks.

    Raises:
        ValueError: together they are not whole.
    """
    parts = []
    for rank in range(world):
        with open(directory / part_name(rank), "rb") as file:
            parts.append(pickle.load(file))  # noqa: S301  this run's own, checked before
    _finish(FileSystemWriter(directory), parts)


def _finish(writer: FileSystemWriter, parts: Sequence[_Part]) -> None:
    whole: dict[str, TensorStorageMetadata] = {}
    owners: dict[MetadataIndex, int] = {}
    for rank, part in enumerate(parts):
        for name, about in part.tensors.items():
            known = whole.setdefault(name, replace(about, chunks=[]))
            if (known.size, known.properties.dtype) != (about.size, about.properties.dtype):
                raise ValueError(
                    f"rank {rank} holds {name} as {about.properties.dtype} {tuple(about.size)}, "
                    f"another one as {known.properties.dtype} {tuple(known.size)}"
                )
            for chunk in about.chunks:
                other = owners.setdefault(MetadataIndex(name, chunk.offsets), rank)
                if other != rank:
                    raise ValueError(f"ranks {other} and {rank} hold the same part of {name}")
            known.chunks.extend(about.chunks)
    for name, about in whole.items():
        held = sum(math.prod(chunk.sizes) for chunk in about.chunks)
        if held != math.prod(about.size):
            raise ValueError(
                f"the ranks' parts of {name} hold {held} of its {math.prod(about.size)} values"
            )
    for rank, part in enumerate(parts):
        missing = [name for name in part.borrowed if name not in whole]
        if missing:
            raise ValueError(
                f"rank {rank} holds {missing[0]} for itself ({len(missing)} such tensors): only "
                "what is equal on all ranks, or a DTensor, can be written"
            )
    metadata = Metadata(dict(whole), planner_data={k: v for p in parts for k, v in p.paths.items()})
    writer.finish(metadata, [part.results for part in parts])


# ---------------------------------------------------------------- reading


class Source:
    """A directory's tensors, read by slices."""

    def __init__(self, directory: Path) -> None:
        """Reads .metadata, a pickle: check it first."""
        self._reader = FileSystemReader(directory)
        self._metadata = self._reader.read_metadata()
        self._items: list[ReadItem] = []
        self._targets: dict[str, Tensor] = {}

    def about(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Size and type of a tensor.

        Raises:
            ValueError: there is none of this name.
        """
        about = self._metadata.state_dict_metadata.get(name)
        if not isinstance(about, TensorStorageMetadata):
            raise ValueError(f"{METADATA} does not know {name}")
        return tuple(about.size), about.properties.dtype

    def want(self, name: str, data: Tensor, offsets: Sequence[int]) -> None:
        """Fill `data` with the slice of this tensor that begins at `offsets`.

        Raises:
            ValueError: not all of it is there.
        """
        about: Any = self._metadata.state_dict_metadata[name]
        if not data.numel():
            return
        chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=data.shape)
        items = create_read_items_for_chunk_list(name, about, [chunk])
        held = sum(math.prod(item.lengths) for item in items)
        if held != data.numel():
            raise ValueError(f"{held} of {data.numel()} values of {name} are there")
        self._items += items
        self._targets[name] = data

    @property
    def files(self) -> list[str]:
        """The files that the wanted slices are in."""
        stored = self._metadata.storage_data
        return sorted({str(stored[item.storage_index].relative_path) for item in self._items})

    def load(self) -> None:
        """Read what is wanted."""
        self._reader.set_up_storage_reader(self._metadata, True)
        self._reader.read_data(LoadPlan(self._items), _Taker(self._targets)).wait()

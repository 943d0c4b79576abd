"""The group: sentinel's own gloo connections between all ranks, on the host.

    group = Group.make(store, rank, world, timeout_s)
    total = group.reduce(vector)           the sum over all ranks, the same bytes everywhere
    payload = group.tell(payload)          rank 0's bytes, of a fixed size
    group.close()                          the others notice at once

Made of ProcessGroupGloo itself, not by torch.distributed.new_group: the user's groups are counted
and named by it, and one that only some ranks make would break every later one.

Shapes:  vectors float64 [n], n equal on all ranks.
Errors:  LostError, once and for ever: a group that failed in one collective is out of step.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sentinel.core.errors import SentinelError

Float64 = npt.NDArray[np.float64]


class LostError(SentinelError, RuntimeError):
    """The ranks cannot talk to each other any more."""


class Group:
    """All ranks of one run."""

    def __init__(self, backend: Any, rank: int, world: int, timeout_s: float = 1800.0) -> None:
        """Use make()."""
        self._backend = backend
        self.rank = rank
        self.world = world
        self.collectives = 0
        self.completed = 0
        self.timeout_s = timeout_s
        self.told = b""  # by the last tell() that was completed
        self.why_lost = ""

    @classmethod
    def make(cls, store: Any, rank: int, world: int, timeout_s: float) -> Group:
        """Connect every rank to every other; all must call it.

        Raises:
            RuntimeError: they did not all come within the timeout.
        """
        gloo = torch.distributed.ProcessGroupGloo
        backend = gloo(store, rank, world, timedelta(seconds=timeout_s))
        return cls(backend, rank, world, timeout_s)

    @property
    def lost(self) -> bool:
        """Nothing can be agreed on any more."""
        return self._backend is None

    def reduce(self, vector: Float64) -> Float64:
        """The sum over all ranks; overwrites and returns `vector`.

        Raises:
            LostError: a rank is gone, or did not come within the timeout.
        """
        options: Any = torch.distributed.AllreduceOptions()
        options.reduceOp = torch.distributed.ReduceOp.SUM
        self._run("allreduce", [torch.from_numpy(vector)], options)
        return vector

    def tell(self, payload: bytes | None, size: int) -> bytes:
        """Rank 0's `size` bytes, padded with zeros.

        Raises:
            LostError: as reduce().
        """
        buffer = np.zeros(size, dtype=np.uint8)
        if self.rank == 0 and payload:
            buffer[: len(payload)] = np.frombuffer(payload, dtype=np.uint8)
        options: Any = torch.distributed.BroadcastOptions()
        options.rootRank = 0
        completed = self.completed
        try:
            self._run("broadcast", [torch.from_numpy(buffer)], options)
        finally:
            if self.completed > completed:
                self.told = buffer.tobytes()
        return self.told

    def tell_any(self, payload: bytes | None) -> bytes:
        """Rank 0's bytes, however many; two broadcasts.

        Raises:
            LostError: as reduce().
        """
        told = self.tell((len(payload or b"")).to_bytes(8, "little"), 8)
        size = int.from_bytes(told, "little")
        return self.tell(payload, size) if size else b""

    def _run(self, name: str, tensors: list[torch.Tensor], options: Any) -> None:
        if self._backend is None:
            raise LostError(self.why_lost or "the group is closed")
        self.collectives += 1
        try:
            getattr(self._backend, name)(tensors, options).wait()
        except Exception as error:
            self.close(f"{name}: {str(error).splitlines()[0][:200]}")
            raise LostError(self.why_lost) from error
        self.completed += 1

    def close(self, why: str = "the group is closed") -> None:
        """Let go: connections break, and whoever waits for this rank hears of it at once."""
        self.why_lost = self.why_lost or why
        self._backend = None

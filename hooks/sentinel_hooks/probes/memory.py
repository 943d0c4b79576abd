"""Memory probe: bytes by kind, from tensor sizes and the allocator's own counters.

    probe = MemoryProbe(models, optimizers, every=10)
    probe.phase("forward"); probe.before_step(step); probe.scalars()["memory_bytes/weights"]

Weights, gradients and optimizer state are summed from the storages that the tensors lie in, each
once: views of one buffer are that buffer, and an expanded tensor is as large as what it repeats.
On a CUDA device the allocator says the rest: `activations` is what is held at the end of the
forward beyond the three, `other` what is held at the gate beyond them, `peak` the most so far (its
counter is the user's too, so it is read and never reset), `headroom` the share of the device that
neither this process nor another one has taken. By phase: what was held when it ended.
On a CPU nobody knows these, and they are left out.

CUDA: written for it, and never run there.

Units:   bytes; headroom [share of the device].
Purity:  host counters only; does not wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sentinel_hooks.probes.probe import Quiet

_PLAIN = (Tensor, nn.Parameter)
KEPT = 10  # samples for which the sizes of weights and optimizer state are believed
PHASES = ("forward", "backward", "optimizer")


class MemoryProbe(Quiet):
    """Watches what `models` and `optimizers` hold."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        every: int = 10,
        device: torch.device | None = None,
        counters: Any = torch.cuda,
    ) -> None:
        """Sample every `every` steps.

        Args:
            device: whose allocator is asked; None: that of the first parameter.
            counters: torch.cuda, or what answers like it.
        """
        self._models = tuple(models)
        self._optimizers = tuple(optimizers)
        self._every = every
        self._counters = counters
        self._device = device or next(
            (p.device for m in models for p in m.parameters() if p.device.type != "meta"),
            torch.device("cpu"),
        )
        self._held: dict[str, int] = {}
        self._found: dict[str, float] = {}
        self._due = True
        self._samples = 0
        self._states = -1
        self._lasting = (0, 0)

    def phase(self, name: str) -> None:
        """A phase of PHASES has just ended."""
        if self._due and self._device.type == "cuda":
            held = int(self._counters.memory_allocated(self._device))
            self._held[name] = max(held, self._held.get(name, 0))

    def before_step(self, step: int) -> None:
        """Sum up, if this step is sampled."""
        due, self._due = step % self._every == 0, (step + 1) % self._every == 0
        if not due:
            self._held = {}
            return
        states = sum(len(o.state) for o in self._optimizers)
        if self._samples % KEPT == 0 or states != self._states:
            self._lasting = self._sum_lasting()
            self._states = states
        self._samples += 1
        weights, optimizer = self._lasting
        gradients = _bytes(
            p.grad
            for o in self._optimizers
            for g in o.param_groups
            for p in g["params"]
            if p.grad is not None
        )
        found = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
        known = weights + gradients + optimizer
        self._found = {f"memory_bytes/{kind}": float(n) for kind, n in found.items()}
        if self._device.type == "cuda":
            held = int(self._counters.memory_allocated(self._device))
            peak = int(self._counters.max_memory_allocated(self._device))
            free, total = self._counters.mem_get_info(self._device)
            more = {"other": max(held - known, 0), "peak": peak}
            if "forward" in self._held:
                # At that moment the gradients of earlier micro-batches may be there or not.
                more["activations"] = max(self._held["forward"] - weights - optimizer, 0)
            self._found |= {f"memory_bytes/{kind}": float(n) for kind, n in more.items()}
            self._found |= {f"memory_phase_bytes/{k}": float(n) for k, n in self._held.items()}
            reserved = int(self._counters.memory_reserved(self._device))
            self._found["memory_headroom"] = (free + reserved - held) / total
        self._held = {}

    def _sum_lasting(self) -> tuple[int, int]:
        """Weights and optimizer state, which hardly ever change their size."""
        # Frozen parameters are weights too; a tied one is one.
        weights = _bytes(t for m in self._models for t in (*m.parameters(), *m.buffers()))
        optimizer = _bytes(
            value
            for o in self._optimizers
            for state in o.state.values()
            for value in _tensors(state)
        )
        return weights, optimizer

    def scalars(self) -> dict[str, float]:
        """The newest sample."""
        return dict(self._found)


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages, each once; a sharded tensor is its shard."""
    sizes: dict[int, int] = {}
    for t in tensors:
        if type(t) not in _PLAIN:
            if nn.parameter.is_lazy(t):
                continue
            local: Callable[[], Tensor] | None = getattr(t, "to_local", None)
            t = local() if local is not None else t
        if t.layout is not torch.strided:
            t = t._values() if t.is_sparse else t.values()
        if t.device.type != "meta":  # offloaded weights: nothing is held for them
            try:
                storage = t.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
            except (RuntimeError, NotImplementedError):  # a device that keeps no storage
                sizes[t.data_ptr()] = t.nbytes
    return sum(sizes.values())


def _tensors(state: Any) -> Iterable[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _tensors(value)

"""RAM tier: copies of everything a rollback puts back, in host memory.

    store = RamStore(target, Snapshots())
    store.take(step, stats)            copy now; raises SnapshotError when that cannot be done
    stats = store.restore(step)        all of it, or nothing and SnapshotError
    store.keep_only(steps)             forget the others; their buffers serve the next take()

Held: parameters and buffers of the models (a tied weight once), parameters that only the optimizers
know, optimizer state (tensors, counters, lists as LBFGS has them), the scaler, the user's
`extra_state`, and the engine's statistics of that moment. Not held: learning rates and momenta in
the groups (a schedule drives them), RNG, data position: a rollback goes on with later data.

Tensors are copied one by one, never through state_dict(): those alias live tensors, so that
"restored" moments would be the damaged ones. Restoring copies in place, so that whoever holds on to
a parameter or a moment (compiled steps, DDP buckets) still has the right one. Shapes are compared
before the first byte is copied.

Space:   sized against free host memory before it is used; buffers are reused from the snapshot that
         was dropped last (302 MB: 41 ms instead of 180 ms).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sentinel.core.errors import SentinelError
from sentinel.core.state import Stats
from sentinel_hooks.snapshots import Snapshots
from sentinel_hooks.snapshots.host_memory import available_bytes
from sentinel_hooks.target import Target

# Group entries that a schedule drives: they follow attempted steps and are not rolled back.
SCHEDULED = frozenset(
    {
        "params",
        "lr",
        "initial_lr",
        "base_lr",
        "max_lr",
        "min_lr",
        "swa_lr",
        "momentum",
        "initial_momentum",
        "base_momentum",
        "max_momentum",
        "betas",
        "weight_decay",
    }
)
_PLAIN = (int, float, bool, str, bytes, type(None), complex)


class SnapshotError(SentinelError, RuntimeError):
    """A snapshot could not be taken or put back; nothing was changed."""


class NotReadyError(SnapshotError):
    """Parameters are still without a shape (lazy modules); try again after the first forward."""


@dataclass(slots=True)
class HostTensor:
    """A tensor's copy in host memory and the device it came from."""

    data: Tensor
    device: torch.device


@dataclass(slots=True)
class Image:
    """One snapshot."""

    step: int
    stats: Stats
    tensors: dict[tuple[Any, ...], HostTensor] = field(default_factory=dict)
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    scaler: Any = None
    extra: list[Any] = field(default_factory=list)
    size_bytes: int = 0
    readers: int = 0  # saves to disk that still read these buffers: they may not be written over


class RamStore:
    """Snapshots in host memory, by step."""

    def __init__(
        self,
        target: Target,
        config: Snapshots,
        *,
        available: Callable[[], int | None] = available_bytes,
    ) -> None:
        self._target = target
        self._config = config
        self._available = available
        self._images: dict[int, Image] = {}
        self._spare: Image | None = None

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that can be restored, oldest first."""
        return tuple(sorted(self._images))

    @property
    def size_bytes(self) -> int:
        """Host memory held, the spare buffers included."""
        spare = self._spare.size_bytes if self._spare is not None else 0
        return spare + sum(image.size_bytes for image in list(self._images.values()))

    @torch.no_grad()
    def take(self, step: int, stats: Stats) -> int:
        """Copy everything now; the size in bytes.

        Raises:
            NotReadyError: some parameter has no shape yet.
            SnapshotError: it does not fit, or copying failed.
        """
        live = dict(live_tensors(self._target))
        self._check_room(live)
        spare, self._spare = self._spare, None
        copier = _Copier(pin=self._config.pin)
        image = Image(step, stats)
        try:
            old = spare.tensors if spare is not None else {}
            for key, tensor in live.items():
                image.tensors[key] = copier.tensor(tensor, old.get(key))
            for i, optimizer in enumerate(self._target.optimizers):
                reuse = spare.optimizers[i] if spare is not None else None
                image.optimizers.append(_save_optimizer(optimizer, copier, reuse))
            scaler = self._target.live_scaler
            if scaler is not None:
                image.scaler = copy.deepcopy(scaler.state_dict())
            for thing in self._target.extra_state:
                image.extra.append(copier.tree(thing.state_dict(), None))
            copier.flush()
        except (RuntimeError, MemoryError) as error:
            raise SnapshotError(f"copying failed: {error}") from error
        image.size_bytes = copier.size_bytes
        self._images[step] = image
        return image.size_bytes

    @torch.no_grad()
    def restore(self, step: int) -> Stats:
        """Copy the snapshot of `step` back; the statistics kept with it.

        Raises:
            SnapshotError: there is none, or the model has another shape now.
        """
        image = self._images.get(step)
        if image is None:
            raise SnapshotError(f"there is no snapshot of step {step}; there are {self.steps}")
        return self.put_back(image)

    @torch.no_grad()
    def put_back(self, image: Image) -> Stats:
        """Copy an image back, wherever it came from; see restore()."""
        live = dict(live_tensors(self._target))
        for key, saved in image.tensors.items():
            tensor = live.get(key)
            if tensor is None or tensor.shape != saved.data.shape:
                now = "gone" if tensor is None else f"of shape {tuple(tensor.shape)}"
                raise SnapshotError(
                    f"{key[-1]} was of shape {tuple(saved.data.shape)} and is {now}"
                )
        pairs = [(live[key], saved.data) for key, saved in image.tensors.items()]
        for optimizer, kept in zip(self._target.optimizers, image.optimizers, strict=True):
            _load_optimizer(optimizer, kept, pairs)
        _copy_back(pairs)
        scaler = self._target.live_scaler
        if scaler is not None and image.scaler is not None:
            scaler.load_state_dict(copy.deepcopy(image.scaler))
        for thing, state in zip(self._target.extra_state, image.extra, strict=True):
            thing.load_state_dict(thaw(state))
        return image.stats

    def keep_only(self, steps: Iterable[int]) -> None:
        """Forget all snapshots but these."""
        wanted = set(steps)
        if len(wanted) >= len(self._images) and wanted.issuperset(self._images):
            return
        for step in [s for s in self._images if s not in wanted]:
            self.drop(step)

    def image(self, step: int) -> Image:
        """What is held of `step`, to be read only."""
        return self._images[step]

    def drop(self, step: int) -> None:
        """Forget one snapshot; its buffers serve the next, unless somebody still reads them."""
        image = self._images.pop(step)
        if not image.readers:
            self._spare = image

    def clear(self) -> None:
        """Let go of all memory."""
        self._images = {}
        self._spare = None

    def _check_room(self, live: dict[tuple[Any, ...], Tensor]) -> None:
        need = sum(t.numel() * t.element_size() for t in live.values())
        for optimizer in self._target.optimizers:
            need += _tree_bytes(list(optimizer.state.values()))
        if self._spare is not None:
            need -= self._spare.size_bytes
        available = self._available()
        if available is not None and need > available * self._config.memory_share:
            raise SnapshotError(
                f"a snapshot needs {need / 2**20:.0f} MiB of host memory and only "
                f"{self._config.memory_share:.0%} of the free {available / 2**20:.0f} MiB may be "
                "used; free memory, raise Snapshots(memory_share=...), or switch it off with "
                "Snapshots(ram=False)"
            )


# ---------------------------------------------------------------- what there is


def live_tensors(target: Target) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Every tensor of the models, then parameters that only an optimizer knows; each once."""
    seen: set[int] = set()
    for m, model in enumerate(target.models):
        for kind, named in (
            ("parameter", model.named_parameters()),
            ("buffer", model.named_buffers()),
        ):
            for name, tensor in named:
                if id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                if nn.parameter.is_lazy(tensor):
                    raise NotReadyError(f"{name} has no shape yet: a lazy module that has not run")
                yield (m, kind, name), tensor.detach()
    for o, optimizer in enumerate(target.optimizers):
        for g, group in enumerate(optimizer.param_groups):
            for p, parameter in enumerate(group["params"]):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield (
                        ("optimizer", o, g, p, f"optimizer {o} parameter {g}.{p}"),
                        (parameter.detach()),
                    )


def _tree_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(_tree_bytes(v) for v in value.values())
    if isinstance(value, list | tuple):
        return sum(_tree_bytes(v) for v in value)
    return 0


# ---------------------------------------------------------------- copying out


def freeze(value: Any) -> Any:
    """A copy in host memory of nested dicts, lists and tuples; thaw() makes live ones of it."""
    copier = _Copier(pin=False)
    frozen = copier.tree(value, None)
    copier.flush()
    return frozen


class _Copier:
    """Collects copies and does them together."""

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self.size_bytes = 0

    def tensor(self, live: Tensor, reuse: Any) -> HostTensor:
        live = live.detach()
        if live.layout is not torch.strided:
            return HostTensor(live.clone().cpu(), live.device)
        buffer = reuse.data if isinstance(reuse, HostTensor) else None
        if (
            buffer is None
            or buffer.shape != live.shape
            or buffer.dtype != live.dtype
            or buffer.stride() != live.stride()
        ):
            pin = self._pin and live.device.type == "cuda"
            buffer = torch.empty_like(live, device="cpu", requires_grad=False, pin_memory=pin)
        self._pairs.append((buffer, live))
        self.size_bytes += buffer.numel() * buffer.element_size()
        return HostTensor(buffer, live.device)

    def tree(self, value: Any, reuse: Any) -> Any:
        """A copy of nested dicts, lists and tuples that shares nothing with the original."""
        if isinstance(value, Tensor):
            return self.tensor(value, reuse)
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, dict):
            old = reuse if isinstance(reuse, dict) else {}
            return {k: self.tree(v, old.get(k)) for k, v in value.items()}
        if isinstance(value, list):
            return [self.tree(v, None) for v in value]
        if type(value) is tuple:
            return tuple(self.tree(v, None) for v in value)
        return copy.deepcopy(value)

    def flush(self) -> None:
        host = [(b, t) for b, t in self._pairs if t.device.type == "cpu"]
        if host:
            torch._foreach_copy_([b for b, _ in host], [t for _, t in host])
        devices = set()
        for buffer, tensor in self._pairs:
            if tensor.device.type != "cpu":
                buffer.copy_(tensor, non_blocking=buffer.is_pinned())
                devices.add(tensor.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        self._pairs = []


def _save_optimizer(
    optimizer: torch.optim.Optimizer, copier: _Copier, reuse: dict[str, Any] | None
) -> dict[str, Any]:
    state = optimizer.state
    old = reuse["state"] if reuse is not None else {}
    kept: dict[Any, Any] = {}
    known: set[int] = set()
    for g, group in enumerate(optimizer.param_groups):
        for p, parameter in enumerate(group["params"]):
            known.add(id(parameter))
            if parameter in state:
                kept[(g, p)] = copier.tree(dict(state[parameter]), old.get((g, p)))
    others = {key: copier.tree(value, None) for key, value in state.items() if id(key) not in known}
    groups = [
        {k: copier.tree(v, None) for k, v in group.items() if k not in SCHEDULED}
        for group in optimizer.param_groups
    ]
    return {"state": kept, "others": others, "groups": groups}


# ---------------------------------------------------------------- copying back


def _load_optimizer(
    optimizer: torch.optim.Optimizer, kept: dict[str, Any], pairs: list[tuple[Tensor, Tensor]]
) -> None:
    """Put counters and lists back now, and tensors that are still there into `pairs`."""
    state = optimizer.state
    known: set[int] = set()
    for g, group in enumerate(optimizer.param_groups):
        for p, parameter in enumerate(group["params"]):
            known.add(id(parameter))
            saved = kept["state"].get((g, p))
            if saved is None:
                state.pop(parameter, None)
                continue
            live = state.get(parameter)
            if not isinstance(live, dict):
                state[parameter] = thaw(saved)
                continue
            for key in [k for k in live if k not in saved]:
                del live[key]
            for key, value in saved.items():
                now = live.get(key)
                if isinstance(now, Tensor) and _fits(now, value):
                    pairs.append((now.detach(), value.data))
                else:
                    live[key] = thaw(value)
    for key in [k for k in state if id(k) not in known and k not in kept["others"]]:
        del state[key]
    for key, value in kept["others"].items():
        state[key] = thaw(value)
    for group, values in zip(optimizer.param_groups, kept["groups"], strict=False):
        for key, value in values.items():
            now = group.get(key)
            if isinstance(now, Tensor) and _fits(now, value):
                pairs.append((now.detach(), value.data))
            else:
                group[key] = thaw(value)


def _fits(live: Tensor, saved: Any) -> bool:
    return (
        isinstance(saved, HostTensor)
        and live.layout is torch.strided
        and live.shape == saved.data.shape
        and live.dtype == saved.data.dtype
    )


def thaw(value: Any) -> Any:
    """A live copy: the snapshot may be restored again."""
    if isinstance(value, HostTensor):
        return value.data.detach().clone().to(value.device)
    if isinstance(value, dict):
        return {k: thaw(v) for k, v in value.items()}
    if isinstance(value, list):
        return [thaw(v) for v in value]
    if type(value) is tuple:
        return tuple(thaw(v) for v in value)
    return value if isinstance(value, _PLAIN) else copy.deepcopy(value)


def _copy_back(pairs: list[tuple[Tensor, Tensor]]) -> None:
    host = [(live, saved) for live, saved in pairs if live.device.type == "cpu"]
    if host:
        torch._foreach_copy_([live for live, _ in host], [saved for _, saved in host])
    for live, saved in pairs:
        if live.device.type != "cpu":
            live.copy_(saved)

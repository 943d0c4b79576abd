"""The canary: a quiet batch, kept to tell bad data from bad weights.

    canary.begin(step, module, args, kwargs)    a training forward begins: record it, if one is due
    canary.end(output, module)                  ... its own loss
    canary.keep(step)                           the step was quiet: keep the recorded batch
    canary.answer(step) -> CanaryAnswer | None  recompute an old one's loss with today's weights

Recorded is one micro-batch with its own loss: the call's arguments, the RNG state at its start (so
that dropout draws the same masks again), train/eval flags and autocast. Recomputing runs under
no_grad and puts back RNG (torch CPU and CUDA, python, numpy, generators that modules hold), buffers
(BatchNorm statistics) and flags: asking moves nothing. What it cannot undo: the user's own forward
hooks fire once more, and a compiled model is compiled once more for no_grad.

Where the loss comes from, in this order:
* the module returns it: a scalar, an object with `.loss` or a "loss" key, or a tuple that starts
  with it. HF and Lightning modules do.
* `loss_fn=` is a module (nn.CrossEntropyLoss()): its call is watched; what it is given must be the
  model's output or a view of it.
* `loss_fn=` is a function, called as `session.loss(batch)` instead of `loss_fn(batch)`: arguments
  and answer are seen right there. Any signature will do; it calls the model itself.
* `loss_fn=` is a function that is never called so: then it is asked as
  `loss_fn(output, *args, **kwargs)` with the model's output and inputs. Right for losses that need
  nothing else (an autoencoder); a function that cannot be called like this is not asked again.

Units:   loss [nats]; age [steps].
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from sentinel.core.types import Action, CanaryAnswer, Decision
from sentinel_hooks.seams.safe_point import Hook

PARK_BYTES = 2**20  # larger tensors of a kept batch are copied off the device
SPACING = 4  # a new batch is kept this often: the one that is asked is hardly older than `age`


# ---------------------------------------------------------------- random numbers


@dataclass(frozen=True, slots=True)
class RngState:
    """Every generator that a forward pass may draw from: the global ones, and the modules' own."""

    cpu: Tensor
    cuda: tuple[Tensor, ...]
    python: Any
    numpy: Any
    own: tuple[tuple[torch.Generator, Tensor], ...] = ()

    @classmethod
    def capture(cls, own: Sequence[torch.Generator] = ()) -> RngState:
        """The state now."""
        cuda = _cuda_in_use()
        return cls(
            torch.get_rng_state(),
            tuple(torch.cuda.get_rng_state_all()) if cuda else (),
            random.getstate(),
            np.random.get_state(),  # noqa: NPY002  the global one is what user code draws from
            tuple((g, g.get_state()) for g in own),
        )

    def put(self) -> None:
        """Make it the state."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002
        for generator, state in self.own:
            generator.set_state(state)


# ---------------------------------------------------------------- one recorded call


@dataclass(slots=True)
class Criterion:
    """A watched loss module's call; places in `leaves` that came from the model's output."""

    module: nn.Module
    leaves: list[Any]
    spec: Any
    views: dict[int, tuple[int, tuple[int, ...], tuple[int, ...], int]]


@dataclass(slots=True)
class Recording:
    """One call that made a loss, as it can be made again."""

    step: int
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rng: RngState
    training: list[bool]
    autocast: dict[str, tuple[bool, torch.dtype]]
    versions: list[tuple[Tensor, int]] = field(default_factory=list)
    loss: Tensor | None = None
    loss_value: float | None = None
    output: Any = None
    ended: bool = False  # stays False when the call raised
    criterion: Criterion | None = None
    of_output: bool = False  # the loss is loss_fn(output, *args, **kwargs)

    def unchanged(self) -> bool:
        """Nobody wrote into the inputs since."""
        return all(t._version == version for t, version in self.versions)


def loss_of(output: Any) -> Tensor | None:
    """The scalar loss that a module returned, if it did."""
    found: Any = output
    if isinstance(output, dict):
        found = output.get("loss")
    elif not isinstance(output, Tensor):
        found = getattr(output, "loss", None)
        if found is None and isinstance(output, tuple) and output:
            found = output[0]
    if isinstance(found, Tensor) and found.numel() == 1 and found.is_floating_point():
        return found
    return None


class Canary:
    """Keeps quiet batches and asks them."""

    def __init__(self, models: Sequence[nn.Module], age: int, loss_fn: Any = None) -> None:
        """A canary for `models`.

        Args:
            age: steps that a batch must be old before it is asked.
            loss_fn: as the user gave it to attach().
        """
        self._models = tuple(models)
        self._modules = [m for model in self._models for m in model.modules()]
        self._own = self._generators()
        self._age = age
        self._loss_fn = loss_fn
        self._kept: deque[Recording] = deque(maxlen=age // SPACING + 3)
        self._current: Recording | None = None
        self._aside: Recording | None = None
        self._outside = False
        self._seen_call = False
        self._seen_output = False
        self._cannot_ask = False
        self._why_not = ""
        self._handles: list[Any] = []
        if isinstance(loss_fn, nn.Module):
            self._handles = [
                loss_fn.register_forward_hook(Hook(self._on_criterion), with_kwargs=True)
            ]

    def remove(self) -> None:
        """Let go of batches and hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.clear()

    def clear(self) -> None:
        """The data changed lawfully: batches kept so far are no canaries any more."""
        self._kept.clear()
        self._current = self._aside = None

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps whose batches are kept, oldest first."""
        return tuple(r.step for r in self._kept)

    def availability(self, step: int) -> str:
        """One line for status(): "available", or why not and the way out."""
        if any(step - r.step >= self._age for r in self._kept):
            return "available"
        if self._kept:
            return f"warming: the first quiet batch must be {self._age} steps old"
        if self._why_not:
            return f"unavailable: {self._why_not}"
        if self._seen_output:
            if self._loss_fn is None:
                return (
                    "unavailable: the model does not return its loss; pass loss_fn= to attach() "
                    "(a loss module, or a function that the loop calls as session.loss(batch))"
                )
            if not isinstance(self._loss_fn, nn.Module) and not self._seen_call:
                return (
                    "unavailable: loss_fn= was given but never called through the session, and "
                    "loss_fn(output, *inputs) gives no scalar; in the loop, write "
                    "session.loss(batch) instead of loss_fn(batch)"
                )
        return "warming: no quiet batch yet"

    # -- recording ---------------------------------------------------------------------------

    def due(self, step: int, call: Callable[..., Any], outside: bool = False) -> bool:
        """A batch is to be recorded at this step."""
        current = self._current
        if current is not None and current.call is call and not current.ended:
            self._current = current = None  # it raised: its batch has no loss
        free = current is None or (outside and not self._outside)
        last = self._aside or (self._kept[-1] if self._kept else None)
        return free and (last is None or step - last.step >= SPACING)

    def begin(
        self,
        step: int,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        outside: bool = False,
    ) -> None:
        """A call that may make a loss begins; `outside`: it is session.loss(), not the model."""
        if self._current is not None and (self._outside or not outside):
            return
        self._outside = outside
        if outside:
            self._seen_call = True
        leaves, _ = tree_flatten((args, kwargs))
        self._current = Recording(
            step=step,
            call=call,
            args=args,
            kwargs=kwargs,
            rng=RngState.capture(self._own),
            training=[m.training for m in self._modules],
            autocast=_autocast_now(),
            versions=[(t, t._version) for t in leaves if isinstance(t, Tensor)],
        )

    def end(self, output: Any, call: Callable[..., Any], *, outside: bool = False) -> None:
        """A call ended; only the recorded one's output belongs to the recorded batch."""
        recording = self._current
        if recording is not None and recording.call is not call:
            self._seen_output = self._seen_output or not outside
            return
        if recording is not None:
            recording.ended = True
        if recording is None or recording.loss is not None or outside is not self._outside:
            if not outside:
                self._seen_output = True
            return
        if recording.output is not None:
            return  # a second micro-batch of the same step
        self._seen_output = True
        loss = loss_of(output)
        if loss is not None:
            recording.loss = loss.detach()
        elif outside or self._loss_fn is None:
            return
        elif isinstance(self._loss_fn, nn.Module):
            recording.output = output
        elif not self._seen_call and not self._cannot_ask:
            self._ask_of_output(recording, output)

    def _ask_of_output(self, recording: Recording, output: Any) -> None:
        try:
            with self._nothing_moves():
                detached = tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, output)
                loss = loss_of(self._loss_fn(detached, *recording.args, **recording.kwargs))
        except Exception:  # noqa: BLE001  the user's function, in a way he may not have meant
            loss = None
        if loss is None:
            self._cannot_ask = True
            return
        recording.loss = loss.detach().clone()
        recording.of_output = True

    def _on_criterion(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if not torch.is_grad_enabled():
            return
        recording = self._current
        if recording is None or recording.loss is not None or recording.output is None:
            return
        loss = loss_of(output)
        if loss is None:
            return
        made = [t for t in tree_flatten(recording.output)[0] if isinstance(t, Tensor)]
        leaves, spec = tree_flatten((args, kwargs))
        views: dict[int, tuple[int, tuple[int, ...], tuple[int, ...], int]] = {}
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            for j, source in enumerate(made):
                if leaf is source or _is_view(leaf, source):
                    offset = int(leaf.storage_offset() - source.storage_offset())
                    views[i] = (j, tuple(leaf.shape), tuple(leaf.stride()), offset)
                    break
        recording.output = None
        if not views:
            self._why_not = (
                "loss_fn is not given the model's output or a view of it; pass a function instead "
                "and call session.loss(batch)"
            )
            self._current = None
            return
        recording.loss = loss.detach()
        recording.versions += [
            (t, t._version)
            for i, t in enumerate(leaves)
            if i not in views and isinstance(t, Tensor)
        ]
        recording.criterion = Criterion(
            module, [None if i in views else leaf for i, leaf in enumerate(leaves)], spec, views
        )

    @property
    def pending_loss(self) -> Tensor | None:
        """The recorded batch's own loss, to be read together with the step's other scalars."""
        return self._current.loss if self._current is not None else None

    def judged(self, decision: Decision, loss_value: float | None) -> None:
        """The step was decided on: its batch becomes a canary, or not."""
        if decision.drop_canaries:
            self.clear()
        if decision.keep_batch and decision.action is Action.PROCEED:
            self.keep(loss_value)
        else:
            self.drop_current()

    def keep(self, loss_value: float | None) -> None:
        """The step was quiet: its batch becomes a canary. Copies it: the user may reuse buffers."""
        recording, self._current = self._current, None
        if loss_value is not None:
            self._file(self._copied(recording), loss_value)

    def set_aside(self) -> None:
        """The step will be judged later: copy its batch now, for the user may reuse buffers."""
        recording, self._current = self._current, None
        self._aside = None  # also when copying fails
        self._aside = self._copied(recording)

    def settle_aside(self, quiet: bool, loss_value: float | None) -> None:
        """It was judged: the batch set aside becomes a canary, or not."""
        recording, self._aside = self._aside, None
        if quiet and loss_value is not None:
            self._file(recording, loss_value)

    def _copied(self, recording: Recording | None) -> Recording | None:
        """The same, with a batch of our own; None: there is no loss, or it was written into."""
        if recording is None or recording.loss is None:
            return None
        if not recording.unchanged():
            self._why_not = "the loop writes into the batch after the forward pass"
            return None
        recording.versions = []
        recording.loss = recording.output = None
        recording.args, recording.kwargs = _parked((recording.args, recording.kwargs))
        if recording.criterion is not None:
            recording.criterion.leaves = _parked(recording.criterion.leaves)
        return recording

    def _file(self, recording: Recording | None, loss_value: float) -> None:
        if recording is None:
            return
        recording.loss_value = loss_value
        self._why_not = ""
        self._kept.append(recording)

    @property
    def copy_waits(self) -> bool:
        """Keeping this step's batch means to copy it to the host, and that waits for the device."""
        recording = self._current
        if recording is None or recording.loss is None:
            return False
        leaves = tree_flatten((recording.args, recording.kwargs))[0]
        if recording.criterion is not None:
            leaves = [*leaves, *recording.criterion.leaves]
        return any(
            isinstance(leaf, Tensor)
            and leaf.device.type != "cpu"
            and leaf.numel() * leaf.element_size() > PARK_BYTES
            for leaf in leaves
        )

    def drop_current(self) -> None:
        """The step was not quiet."""
        self._current = None

    # -- asking ------------------------------------------------------------------------------

    def ready(self, step: int) -> bool:
        """A batch is kept that is old enough to be asked."""
        return any(step - recording.step >= self._age for recording in self._kept)

    def answer(self, step: int) -> CanaryAnswer | None:
        """Recompute the newest batch that is old enough; None if there is none."""
        for recording in reversed(self._kept):
            if step - recording.step >= self._age:
                assert recording.loss_value is not None
                self._own = self._generators()  # some may have come since
                now = self._recompute(recording)
                return CanaryAnswer(recording.step, recording.loss_value, now)
        return None

    def _recompute(self, recording: Recording) -> float:
        args, kwargs = _fetched((recording.args, recording.kwargs))
        with self._nothing_moves(), contextlib.ExitStack() as stack:
            recording.rng.put()
            for module, training in zip(self._modules, recording.training, strict=True):
                module.training = training
            for device, (enabled, dtype) in recording.autocast.items():
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            output = recording.call(*args, **kwargs)
            if recording.criterion is not None:
                output = _ask_criterion(recording.criterion, output)
            elif recording.of_output:
                output = self._loss_fn(output, *args, **kwargs)
            loss = loss_of(output)
            if loss is None:
                raise RuntimeError("the recomputed call returned no scalar loss")
            return float(loss)

    def _generators(self) -> list[torch.Generator]:
        """Generators that modules hold as attributes (noise, stochastic depth); each once."""
        found = {
            id(value): value
            for module in self._modules
            for value in vars(module).values()
            if isinstance(value, torch.Generator)
        }
        return list(found.values())

    @contextlib.contextmanager
    def _nothing_moves(self) -> Iterator[None]:
        rng = RngState.capture(self._own)
        training = [m.training for m in self._modules]
        buffers = [(b, b.detach().clone()) for model in self._models for b in model.buffers()]
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            with torch.no_grad():
                for buffer, kept in buffers:
                    buffer.copy_(kept)
            for module, flag in zip(self._modules, training, strict=True):
                module.training = flag
            rng.put()


def _ask_criterion(criterion: Criterion, output: Any) -> Any:
    made = [t for t in tree_flatten(output)[0] if isinstance(t, Tensor)]
    leaves = _fetched(criterion.leaves)
    for i, (j, shape, stride, offset) in criterion.views.items():
        source = made[j]
        leaves[i] = source.as_strided(shape, stride, source.storage_offset() + offset)
    args, kwargs = tree_unflatten(leaves, criterion.spec)
    return criterion.module(*args, **kwargs)


def _is_view(leaf: Tensor, source: Tensor) -> bool:
    """`leaf` shows elements of `source`, and nothing else."""
    if leaf.layout is not torch.strided or source.layout is not torch.strided:
        return False
    if leaf.dtype != source.dtype or leaf.device != source.device:
        return False
    return leaf.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()


@dataclass(frozen=True, slots=True)
class _Parked:
    """A tensor waiting in host memory: kept batches must not fill the device."""

    data: Tensor
    device: torch.device


def _parked(tree: Any) -> Any:
    """A copy to keep; what is large goes to host memory."""

    def park(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = leaf.detach()
        if leaf.device.type == "cpu" or leaf.numel() * leaf.element_size() <= PARK_BYTES:
            return leaf.clone()
        return _Parked(leaf.cpu(), leaf.device)

    return tree_map(park, tree)


def _fetched(tree: Any) -> Any:
    """A copy to use: the model may write into it."""

    def fetch(leaf: Any) -> Any:
        if isinstance(leaf, _Parked):
            return leaf.data.to(leaf.device)
        return leaf.clone() if isinstance(leaf, Tensor) else leaf

    return tree_map(fetch, tree)


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _autocast_now() -> dict[str, tuple[bool, torch.dtype]]:
    devices = ["cpu"]
    if _cuda_in_use():
        devices.append("cuda")
    return {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices}

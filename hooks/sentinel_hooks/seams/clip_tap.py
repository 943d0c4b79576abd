"""Clip tap: the per-tensor norms before clipping, which clipping computes anyway.

    CLIP_TAP.subscribe(listener)       listener.on_clip(parameters, norms, grads)
    CLIP_TAP.unsubscribe(listener)

Wraps `_get_total_norm` and `_clip_grads_with_norm_` of torch.nn.utils.clip_grad and their public
names. They are looked up at call time, so that an early `from ... import clip_grad_norm_` is
covered too. In the usual case (2-norm, plain float32 or float64 tensors on one device) the wrapper
does what torch does and keeps the norms: bitwise equal, and cheaper by the grouping, and by the
multiplication where the factor is 1. It scales from the last tensor to the first. Every
other case goes to torch's own code, and the listener measures before the gradients are scaled.

`clip_grad_value_` hides the norm; it is measured before, if the name is looked up at call time. A
loop that imported this one name before attach() is clipped unseen, and the norm is the one after.

`error_if_nonfinite=True` raises as the user asked, before any gate could skip the step: that is an
explicit wish, and stays one.

Shapes:  norms float32 or float64 [n], one for each parameter that has a gradient, not yet read.
Purity:  does not wait for the device, except where torch does (error_if_nonfinite).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from sentinel_hooks.seams.patch import Patch

_FAST_DTYPES = (torch.float32, torch.float64)
_FAST_TYPES = {Tensor, torch.nn.Parameter}
_FAST_DEVICES = ("cpu", "cuda")
_DTYPE = operator.attrgetter("dtype")


class ClipListener(Protocol):
    """What the tap needs of a session; must not raise."""

    def on_clip(
        self, parameters: Sequence[Tensor], grads: Sequence[Tensor], norms: Tensor | None
    ) -> None:
        """Called before `grads` (of `parameters`) are scaled; norms None: measure them now."""
        ...

    def on_scale(self, max_norm: float, total_norm: Any) -> None:
        """They are about to be scaled by min(1, max_norm / total_norm)."""
        ...

    def on_clipped(self, grads: Sequence[Tensor]) -> None:
        """The clip has done with them: whatever changes from now on is not its doing."""
        ...


class ClipTap:
    """The process-wide wrapper of torch's clipping, there while somebody listens."""

    def __init__(self) -> None:
        self._listeners: list[ClipListener] = []
        self._patches: list[Patch] = []
        self._measured: tuple[list[Tensor], Tensor] | None = None

    def subscribe(self, listener: ClipListener) -> None:
        """Tell `listener` of every clip from now on."""
        if not self._listeners and not self._patches:
            self._install()
        self._listeners.append(listener)

    def unsubscribe(self, listener: ClipListener) -> None:
        """Stop telling `listener`; the last one to go takes the wrappers with it."""
        self._listeners = [other for other in self._listeners if other is not listener]
        if not self._listeners:
            self._measured = None
            self._patches = [p for p in self._patches if not p.remove()]

    def _install(self) -> None:
        total_norm = clip_grad._get_total_norm
        clip = clip_grad._clip_grads_with_norm_

        @functools.wraps(total_norm)  # so that it is pickled by name, as torch's own
        def get_total_norm(
            tensors: Any,
            norm_type: float = 2.0,
            error_if_nonfinite: bool = False,
            foreach: bool | None = None,
        ) -> Tensor:
            self._measured = None
            if self._listeners and foreach is not False and float(norm_type) == 2.0:
                tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
                fast = _fast_norms(tensors)
                if fast is not None:
                    total: Tensor = torch.linalg.vector_norm(fast, 2.0)
                    if not error_if_nonfinite or bool(torch.isfinite(total)):
                        self._measured = (tensors, fast)
                        return total
            stock: Tensor = total_norm(tensors, norm_type, error_if_nonfinite, foreach)
            return stock

        @functools.wraps(clip)
        def clip_grads_with_norm_(
            parameters: Any,
            max_norm: float,
            total_norm: Tensor,
            foreach: bool | None = None,
        ) -> None:
            measured, self._measured = self._measured, None
            if self._listeners:
                parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
                owners = [p for p in parameters if p.grad is not None]
                grads = [p.grad for p in owners]
                norms = None
                if measured is not None and _same(measured[0], grads):
                    norms = measured[1]
                for listener in self._listeners:
                    listener.on_clip(owners, grads, norms)
                    listener.on_scale(max_norm, total_norm)
                if norms is not None and foreach is not False:
                    _fast_clip(grads, max_norm, total_norm)
                else:
                    clip(parameters, max_norm, total_norm, foreach)
                for listener in self._listeners:
                    listener.on_clipped(grads)
                return None
            return clip(parameters, max_norm, total_norm, foreach)

        by_value = clip_grad.clip_grad_value_

        @functools.wraps(by_value)
        def clip_grad_value_(
            parameters: Any, clip_value: float, foreach: bool | None = None
        ) -> None:
            if self._listeners:
                parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
                owners = [p for p in parameters if p.grad is not None]
                grads = [p.grad for p in owners]
                for listener in self._listeners:
                    listener.on_clip(owners, grads, None)
                by_value(parameters, clip_value, foreach)
                for listener in self._listeners:
                    listener.on_clipped(grads)
                return
            by_value(parameters, clip_value, foreach)

        public = torch.nn.utils
        self._patches = [
            Patch(clip_grad, "_get_total_norm", get_total_norm),
            Patch(clip_grad, "_clip_grads_with_norm_", clip_grads_with_norm_),
            Patch(clip_grad, "clip_grad_value_", clip_grad_value_),
            Patch(public, "get_total_norm", get_total_norm),
            Patch(public, "clip_grad_value_", clip_grad_value_),
            Patch(public, "clip_grads_with_norm_", clip_grads_with_norm_),
        ]


@torch.no_grad()
def _fast_norms(tensors: list[Tensor]) -> Tensor | None:
    """The 2-norms as torch's foreach path computes them, shape [n]; None when it would not."""
    if not tensors:
        return None
    first = tensors[0]
    if (
        not set(map(type, tensors)) <= _FAST_TYPES
        or first.device.type not in _FAST_DEVICES
        or first.dtype not in _FAST_DTYPES
        or len(set(map(_DTYPE, tensors))) > 1
        or len(set(map(Tensor.get_device, tensors))) > 1
    ):
        return None
    try:
        return torch.stack(torch._foreach_norm(tensors, 2.0))
    except (RuntimeError, NotImplementedError):
        return None  # sparse, say: torch's own code raises its own error


@torch.no_grad()
def _fast_clip(grads: list[Tensor], max_norm: float, total_norm: Tensor) -> None:
    """Scale tensors that _fast_norms took, as torch's foreach path does."""
    clamped = torch.clamp(float(max_norm) / (total_norm + 1e-6), max=1.0)
    if clamped.device.type == "cpu" and float(clamped) == 1.0:
        return  # times one changes no bit, and is a pass over all gradients (a GPU would wait)
    # Each tensor is scaled by itself, so the order is free: the last that the norms were taken of
    # are still in the cache. One eighth less than from the front (10 M parameters, CPU).
    torch._foreach_mul_([*reversed(grads)], clamped.to(grads[0].device))


def _same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return len(left) == len(right) and all(map(operator.is_, left, right))


CLIP_TAP = ClipTap()

"""Loss tap: the training loss, from the root of every backward pass.

    LOSS_TAP.subscribe(listener)       listener.before_backward() -> mark
                                       listener.after_backward(roots, mark)
    LOSS_TAP.unsubscribe(listener)

Wraps `torch.autograd.backward`, which Tensor.backward, accelerate, HF and Lightning all pass
through. The listener compares its gradients before and after, and so takes only the losses that
moved them. Nested calls (activation checkpointing recomputes inside backward) are let through
unseen, so that a loss is counted once. Losses behind torch.autograd.grad never come by here.

Purity:  does not wait for the device; keeps no graph alive (roots are handed on detached).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sentinel_hooks.seams.patch import Patch


class BackwardListener(Protocol):
    """What the tap needs of a session; both methods must not raise."""

    def before_backward(self) -> Any:
        """Called before gradients are computed; the answer comes back afterwards."""
        ...

    def after_backward(self, roots: Sequence[Tensor], mark: Any) -> None:
        """`roots` are detached scalars; called when the gradients are there."""
        ...


class LossTap:
    """The process-wide wrapper of torch.autograd.backward, there while somebody listens."""

    def __init__(self) -> None:
        self._listeners: list[BackwardListener] = []
        self._patch: Patch | None = None

    def subscribe(self, listener: BackwardListener) -> None:
        """Tell `listener` of every outermost backward pass from now on."""
        if not self._listeners and self._patch is None:
            self._install()
        self._listeners.append(listener)

    def unsubscribe(self, listener: BackwardListener) -> None:
        """Stop telling `listener`; the last one to go takes the wrapper with it."""
        self._listeners = [other for other in self._listeners if other is not listener]
        if not self._listeners and self._patch is not None and self._patch.remove():
            self._patch = None

    def _install(self) -> None:
        original = torch.autograd.backward

        @functools.wraps(original)  # so that it is pickled by name, as torch's own
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            listeners = self._listeners
            if not listeners or torch._C._current_graph_task_id() != -1:
                return original(tensors, *args, **kwargs)
            marks = [(listener, listener.before_backward()) for listener in listeners]
            if not isinstance(tensors, Tensor):
                tensors = tuple(tensors)  # a generator can be read only once
            original(tensors, *args, **kwargs)
            all_roots = (tensors,) if isinstance(tensors, Tensor) else tensors
            roots = [t.detach() for t in all_roots if isinstance(t, Tensor) and t.numel() == 1]
            for listener, mark in marks:
                listener.after_backward(roots, mark)
            return None

        self._patch = Patch(torch.autograd, "backward", backward)


LOSS_TAP = LossTap()

"""Forward tap: a training forward pass of a watched model begins, and ends.

    tap = ForwardTap(models, listener)
    tap.remove()

The beginning of the first training forward after all optimizers have stepped is the safe point:
optimizer, scaler and scheduler are done, no graph is alive, no accumulation is open. Whether it is
one is for the session to say. Hooks sit on the objects that the user calls; put them on the
compiled wrapper, not on the module inside: while torch.compile traces, they do nothing and are
compiled away, and the session falls back to the moment right after optimizer.step().
torch.jit.script refuses every module that has such hooks; script it before attach().

Calls that torch.jit.trace records, and those inside of torch.func's transforms, pass unseen.

Purity:  changes neither inputs nor outputs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn


class ForwardListener(Protocol):
    """What the tap needs of a session; must not raise."""

    def on_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A training forward of `module` is about to begin."""
        ...

    def on_output(self, module: nn.Module, output: Any) -> None:
        """It ended."""
        ...


# What a hook becomes in a copy of its module: takes anything, returns None, and is found by a
# process that loads the pickle and knows nothing of us.
INERT = functools.partial(sys.audit, "torch_sentinel.inert_hook")

# Calls that are none of training: what jit.trace records must hold nothing of ours, and inside of
# torch.func's transforms tensors and parameters are others, which end with the transform.
is_tracing: Callable[[], bool] = torch._C._is_tracing
is_transforming: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", bool)


class Hook:
    """A hook that does not travel: in a deep copy (EMA) or a pickle of the module it is inert."""

    def __init__(self, body: Callable[..., None]) -> None:
        self._body = body

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if not (torch.compiler.is_compiling() or is_tracing() or is_transforming()):
            self._body(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return INERT

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (INERT.func, *INERT.args)


class ForwardTap:
    """Forward hooks on the root models."""

    def __init__(self, models: Sequence[nn.Module], listener: ForwardListener) -> None:
        self._listener = listener
        self._handles = []
        for model in models:
            self._handles += [
                model.register_forward_pre_hook(Hook(self._before), prepend=True, with_kwargs=True),
                model.register_forward_hook(Hook(self._after), with_kwargs=True),
            ]

    def remove(self) -> None:
        """Take the hooks out."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            self._listener.on_forward(module, args, kwargs)

    def _after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if module.training and torch.is_grad_enabled():
            self._listener.on_output(module, output)

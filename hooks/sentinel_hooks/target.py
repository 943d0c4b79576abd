"""What is watched: the user's own objects, found, unwrapped and checked.

    target = Target(models=..., optimizers=..., schedulers=..., scaler=..., extra_state=...)

An adapter's whole work is to find these objects; everything else works on a Target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be taken and put back."""

    def state_dict(self) -> dict[str, Any]:
        """Its state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Put a state back."""
        ...


@dataclass(frozen=True, slots=True)
class Target:
    """The objects of one training run.

    Attributes:
        models: roots, as the loop calls them (the compiled or DDP wrapper, not the inside).
        optimizers: innermost ones, whose step() really moves parameters.
        schedulers: LR schedulers; never touched, kept so that status can name them.
        scaler: a GradScaler that is enabled, or None.
        extra_state: further objects that a rollback puts back.
    """

    models: tuple[nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    schedulers: tuple[Any, ...] = ()
    scaler: Any = None
    extra_state: tuple[Stateful, ...] = ()

    @property
    def live_scaler(self) -> Any:
        """The scaler, if it scales."""
        scaler = self.scaler
        return scaler if scaler is not None and scaler.is_enabled() else None

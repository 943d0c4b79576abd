"""Actuators: leave this step out, or multiply its learning rate; and put everything back.

    held = HeldBack(optimizer)         remembers
    held.take()                        no gradient is left: optimizer.step() moves nothing
    held.give_back()                   gradients and optimizer state as they were, bit for bit

    cut = ScaledLr(optimizer, 0.5)     remembers
    cut.cut()                          every group's lr times 0.5
    cut.undo()                         the very objects that were there before

    found = Found(optimizer, flag)     a fused kernel moves nothing where flag is 1.0
    found.take_back()

Remembering comes first and acting may be done twice: after an error in the middle of it nothing is
lost, and a second try does not cut what is cut already.

A step without gradients is the only skip that every torch optimizer honours: zeroed gradients
still move momentum and weight decay, and an update times zero is NaN where the gradient was. Some
optimizers touch counters or make state even then (LBFGS, fused ones at their first step): the
state dictionaries are kept by reference and put back.

Purity:  neither waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HeldBack:
    """One optimizer's gradients, taken away for the length of one step().

    The caller must give them back after it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._grads = [
            (p, p.grad) for g in optimizer.param_groups for p in g["params"] if p.grad is not None
        ]
        self._groups = [
            {k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups
        ]
        self._state = {
            key: dict(value) if isinstance(value, dict) else value
            for key, value in optimizer.state.items()
        }

    def take(self) -> None:
        """Leave no gradient."""
        for p, _ in self._grads:
            p.grad = None

    def give_back(self) -> None:
        """Gradients, group entries and state as they were."""
        for p, grad in self._grads:
            p.grad = grad
        for group, kept in zip(self._optimizer.param_groups, self._groups, strict=True):
            for key, value in kept.items():
                if group.get(key) is not value:
                    group[key] = value
        state = self._optimizer.state
        for owner in [k for k in state if k not in self._state]:
            del state[owner]
        for owner, entries in self._state.items():
            live = state.get(owner)
            if isinstance(live, dict) and isinstance(entries, dict):
                live.clear()
                live.update(entries)
            elif live is not entries:
                state[owner] = entries


class ScaledLr:
    """One optimizer's learning rates, multiplied for the length of one step().

    The caller must undo it after it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        self._factor = factor
        self._groups: list[tuple[dict[str, Any], Any, Tensor | None]] = []
        for group in optimizer.param_groups:
            lr = group["lr"]
            kept = lr.detach().clone() if isinstance(lr, Tensor) else None
            self._groups.append((group, lr, kept))

    @torch.no_grad()
    def cut(self) -> None:
        """Multiply."""
        for group, original, kept in self._groups:
            if kept is not None:
                # In place: a captured or compiled step holds on to this very tensor.
                original.copy_(kept).mul_(self._factor)
            else:
                group["lr"] = original * self._factor

    @torch.no_grad()
    def undo(self) -> None:
        """The original value, put back and never divided out."""
        for group, original, kept in self._groups:
            if kept is not None:
                original.copy_(kept)
            group["lr"] = original


class Found:
    """`found_inf` of one fused optimizer, for the length of one step()."""

    def __init__(self, optimizer: torch.optim.Optimizer, flag: Tensor) -> None:
        self._optimizer: Any = optimizer
        optimizer.found_inf = flag  # type: ignore[attr-defined]

    def take_back(self) -> None:
        """As if it had never been there."""
        del self._optimizer.found_inf

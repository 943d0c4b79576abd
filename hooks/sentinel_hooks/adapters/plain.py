"""Adapter for a plain loop: the user hands over the objects; here they are checked and unwrapped.

    target = collect(model, optimizer, lr_scheduler, grad_scaler, extra_state)

Errors:  AttachError says what is wrong with which argument, and the way out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from sentinel_hooks.errors import AttachError
from sentinel_hooks.target import Stateful, Target

_INNER = ("optimizer", "_optimizer", "optim", "base_optimizer")


def collect(
    model: Any,
    optimizer: Any,
    lr_scheduler: Any = None,
    grad_scaler: Any = None,
    extra_state: Sequence[Any] = (),
) -> Target:
    """The objects of a plain loop; single ones or lists.

    Raises:
        AttachError: something is missing, of the wrong type, or does not belong together.
    """
    models = _many(model, "model", "the module(s) that the loop calls: attach(model=..., ...)")
    for item in models:
        if not isinstance(item, nn.Module):
            raise AttachError(
                f"model must be a torch.nn.Module or a list of them, got {_type(item)}"
            )
    optimizers = tuple(
        unwrap(item)
        for item in _many(optimizer, "optimizer", "the torch optimizer(s) that the loop steps")
    )
    if len({id(o) for o in optimizers}) != len(optimizers):
        raise AttachError("optimizer holds the same optimizer twice; give each one once")
    _check_shared(models, optimizers)
    scaler = _scaler(grad_scaler)
    for thing in extra_state:
        if not isinstance(thing, Stateful):
            raise AttachError(
                "extra_state must hold objects with state_dict() and load_state_dict(), "
                f"got {_type(thing)}"
            )
    schedulers = () if lr_scheduler is None else _flat(lr_scheduler)
    return Target(models, optimizers, schedulers, scaler, tuple(extra_state))


def unwrap(optimizer: Any) -> torch.optim.Optimizer:
    """The innermost torch optimizer: wrappers (accelerate, Lightning) refuse hooks or skip them.

    Raises:
        AttachError: there is none inside.
    """
    seen: set[int] = set()
    found: torch.optim.Optimizer | None = None
    current = optimizer
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, torch.optim.Optimizer):
            found = current
        inside = getattr(current, "__dict__", {})
        current = next(
            (
                inside[name]
                for name in _INNER
                if name in inside and inside[name] is not current and hasattr(inside[name], "step")
            ),
            None,
        )
    if found is None:
        raise AttachError(
            "optimizer must be a torch.optim.Optimizer, an object that holds one as .optimizer, "
            f"or a list of them, got {_type(optimizer)}"
        )
    return found


def _check_shared(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    owned = {id(p) for m in models for p in m.parameters()}
    if not owned:
        raise AttachError("model has no parameters: there is nothing to watch")
    held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    if held and owned.isdisjoint(held):
        raise AttachError(
            "optimizer and model share no parameter: was the model replaced (moved, compiled with "
            "copies, loaded anew) after the optimizer was made? Build the optimizer from the model "
            "that is trained"
        )


def _scaler(scaler: Any) -> Any:
    if scaler is None:
        return None
    if not all(callable(getattr(scaler, name, None)) for name in ("update", "step", "is_enabled")):
        raise AttachError(f"grad_scaler must be a torch.amp.GradScaler, got {_type(scaler)}")
    return scaler


def _many(value: Any, name: str, what: str) -> tuple[Any, ...]:
    if value is None:
        raise AttachError(f"{name} is missing: pass {what}")
    found = _flat(value)
    if not found:
        raise AttachError(f"{name} is an empty list: pass {what}")
    return found


def _flat(value: Any) -> tuple[Any, ...]:
    if isinstance(value, nn.ModuleList | list | tuple):
        return tuple(value)
    if isinstance(value, dict) and not isinstance(value, nn.Module):
        return tuple(value.values())
    if isinstance(value, Iterable) and not isinstance(value, nn.Module | torch.optim.Optimizer):
        return tuple(value) if not hasattr(value, "step") else (value,)
    return (value,)


def _type(value: Any) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"

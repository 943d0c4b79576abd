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
                f"model must be a torch.nn.Module or a list of them, got {_got(item)}; give the "
                "object that the loop calls"
            )
    if len({id(m) for m in models}) != len(models):
        raise AttachError("model holds the same module twice; give each one once")
    optimizers = tuple(
        unwrap(item)
        for item in _many(optimizer, "optimizer", "the torch optimizer(s) that the loop steps")
    )
    if len({id(o) for o in optimizers}) != len(optimizers):
        raise AttachError("optimizer holds the same optimizer twice; give each one once")
    _check_shared(models, optimizers)
    scaler = _scaler(grad_scaler)
    extra = collect_extra(extra_state)
    schedulers = () if lr_scheduler is None else _flat(lr_scheduler)
    for item in schedulers:
        _check_scheduler(item, optimizers)
    return Target(models, optimizers, schedulers, scaler, extra)


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
            f"or a list of them, got {_got(optimizer)}; give the object that the loop steps"
        )
    return found


def _check_shared(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    owned = {id(p) for m in models for p in m.parameters()}
    if not owned:
        raise AttachError(
            "model has no parameters: there is nothing to watch; give the module that is trained"
        )
    held: dict[int, int] = {}
    for number, item in enumerate(optimizers):
        mine = [p for group in item.param_groups for p in group["params"]]
        if not mine:
            raise AttachError(
                f"optimizer {number} has no parameters: attach after it was given some "
                "(add_param_group), or leave it out"
            )
        for p in mine:
            other = held.setdefault(id(p), number)
            if other != number:
                raise AttachError(
                    f"{_name(models, p)} is a parameter of optimizer {other} and of optimizer "
                    f"{number}: one step would move it twice; attach the one that is stepped now, "
                    "and detach() and attach() when the loop changes over to the other"
                )
    if owned.isdisjoint(held):
        raise AttachError(
            "optimizer and model share no parameter: was the model replaced (moved, compiled with "
            "copies, loaded anew) after the optimizer was made? Build the optimizer from the model "
            "that is trained"
        )


def _scaler(scaler: Any) -> Any:
    if scaler is None:
        return None
    methods = all(callable(getattr(scaler, m, None)) for m in ("update", "step", "is_enabled"))
    if not methods or isinstance(scaler, type):
        raise AttachError(
            f"grad_scaler must be a torch.amp.GradScaler, got {_got(scaler)}; give the object that "
            "the loop calls step() and update() on, or leave it out"
        )
    return scaler


def _check_scheduler(scheduler: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    if isinstance(scheduler, type) or not callable(getattr(scheduler, "step", None)):
        raise AttachError(
            f"lr_scheduler must be an object with step(), got {_got(scheduler)}; give the "
            "scheduler that the loop steps, or leave it out"
        )
    try:
        mine = unwrap(getattr(scheduler, "optimizer", None))
    except AttachError:
        return  # a kind that does not say whose rate it moves
    if not any(mine is o for o in optimizers):
        raise AttachError(
            f"lr_scheduler ({_type(scheduler)}) moves the rate of an optimizer that is not given: "
            "give that one as optimizer=, or the scheduler that was made for the one given"
        )


def collect_extra(extra_state: Any) -> tuple[Stateful, ...]:
    """The objects that a rollback puts back besides.

    Raises:
        AttachError: one of them has no state to take or to put back.
    """
    if not isinstance(extra_state, list | tuple):
        raise AttachError(
            "extra_state must be a list of objects with state_dict() and load_state_dict(), "
            f"got {_got(extra_state)}; for a single one: extra_state=[it]"
        )
    for thing in extra_state:
        if not isinstance(thing, Stateful) or isinstance(thing, type):
            raise AttachError(
                "extra_state must hold objects with state_dict() and load_state_dict(), "
                f"got {_got(thing)}; wrap what has other names in an object with these two"
            )
    return tuple(extra_state)


def _name(models: Sequence[nn.Module], parameter: torch.Tensor) -> str:
    names = (n for m in models for n, p in m.named_parameters() if p is parameter)
    return next(names, f"a tensor of shape {tuple(parameter.shape)}")


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


def _got(value: Any) -> str:
    """A class given for its object is the commonest slip."""
    return f"the class {value.__qualname__}" if isinstance(value, type) else _type(value)

"""What a step belongs to: found among the objects of this process.

    found = find(optimizer, *others)
    found.models        the outermost modules that hold the optimizers' parameters
    found.optimizers    these, and others whose parameters are of the same models
    parameters_of(o)    what an optimizer moves
    found.scaler        a GradScaler that is enabled

Outermost: a module that no other live module holds. Of two wrappers that share their parameters and
do not hold each other (a compiled module and its original, an old DDP and a new one) the one that
holds the other's inside is taken; when several are left, all but one would be wrong, and none is.

Purity:  reads attributes only; calls no method of the user's objects but Module's own.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


class NotFoundError(LookupError):
    """Nothing that could be watched, and why."""


@dataclass(frozen=True, slots=True)
class Found:
    """The objects of one loop."""

    models: tuple[nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    scaler: Any = None

    def __str__(self) -> str:
        models = ", ".join(
            f"{type(m).__name__} ({sum(p.numel() for p in m.parameters()):,} parameters)"
            for m in self.models
        )
        text = f"{models}; {', '.join(type(o).__name__ for o in self.optimizers)}"
        return f"{text}; {type(self.scaler).__name__}" if self.scaler is not None else text


def find(*stepping: torch.optim.Optimizer) -> Found:
    """The objects that the steps of these optimizers belong to.

    Raises:
        NotFoundError: no module holds the parameters of one, or it cannot be told which one is
            called.
    """
    wanted = {p for o in stepping for p in parameters_of(o)}
    modules, optimizers, scalers = _alive()
    holders = [m for m in modules if any(id(p) in wanted for p in m.parameters(recurse=False))]
    held = {id(p) for m in holders for p in m.parameters(recurse=False)}
    for optimizer in stepping:
        if held.isdisjoint(parameters_of(optimizer)):
            raise NotFoundError(
                "no torch.nn.Module in this process holds the parameters of "
                f"{type(optimizer).__name__}"
            )
    parents: dict[int, list[nn.Module]] = {}
    for module in modules:
        for child in module.children():
            parents.setdefault(id(child), []).append(module)
    roots: dict[int, nn.Module] = {}
    for holder in holders:
        for root in _roots(holder, parents):
            roots[id(root)] = root
    models = _that_are_called(list(roots.values()), wanted)
    owned = {id(p) for m in models for p in m.parameters()}
    together = [o for o in optimizers if parameters_of(o) and parameters_of(o) <= owned - wanted]
    live = [s for s in scalers if s.is_enabled()]
    return Found(
        tuple(models), (*stepping, *_disjoint(together)), live[0] if len(live) == 1 else None
    )


def _alive() -> tuple[list[nn.Module], list[torch.optim.Optimizer], list[Any]]:
    modules: list[nn.Module] = []
    optimizers: list[torch.optim.Optimizer] = []
    scalers: list[Any] = []
    for thing in gc.get_objects():
        kind = type(thing)  # isinstance() would ask proxies for their class
        if issubclass(kind, nn.Module):
            if "_modules" in vars(thing):  # else its __init__ has not been run
                modules.append(thing)
        elif issubclass(kind, torch.optim.Optimizer):
            if "param_groups" in vars(thing):
                optimizers.append(thing)
        elif issubclass(kind, torch.amp.GradScaler):
            scalers.append(thing)
    return modules, optimizers, scalers


def parameters_of(optimizer: torch.optim.Optimizer) -> set[int]:
    """The ids of what it moves."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _roots(module: nn.Module, parents: dict[int, list[nn.Module]]) -> list[nn.Module]:
    """The modules at the top of every way up from this one."""
    seen: set[int] = set()
    tops: dict[int, nn.Module] = {}
    ways = [module]
    while ways:
        one = ways.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        above = [p for p in parents.get(id(one), ()) if p is not one]
        if above:
            ways += above
        else:
            tops[id(one)] = one
    return list(tops.values())


def _that_are_called(roots: list[nn.Module], wanted: set[int]) -> list[nn.Module]:
    """One root for each parameter: two that share one cannot be told apart."""
    chosen: list[nn.Module] = []
    taken: dict[int, nn.Module] = {}
    # Losses and metrics may hold a model too; who holds most of what is trained comes first.
    for root in sorted(roots, key=lambda m: -sum(id(p) in wanted for p in m.parameters())):
        mine = {id(p) for p in root.parameters()} & wanted
        other = next((taken[p] for p in mine if p in taken), None)
        if other is None:
            chosen.append(root)
            taken.update(dict.fromkeys(mine, root))
        elif mine - set(taken) or _size(root) == _size(other):
            raise NotFoundError(
                f"both {type(other).__name__} and {type(root).__name__} hold the trained "
                "parameters, and it cannot be told which one the loop calls"
            )
    return chosen


def _size(module: nn.Module) -> int:
    return sum(1 for _ in module.parameters())


def _disjoint(optimizers: list[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Of optimizers that share a parameter (one was made anew) none can be told to be in use."""
    counts: dict[int, int] = {}
    for one in optimizers:
        for p in parameters_of(one):
            counts[p] = counts.get(p, 0) + 1
    return [o for o in optimizers if all(counts[p] == 1 for p in parameters_of(o))]

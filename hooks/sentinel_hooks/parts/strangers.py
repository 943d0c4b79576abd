"""Strangers: optimizers that step in this process while no session watches them.

    strangers = Strangers(optimizers, turns=turns, guard=guard, awake=awake, watched=..., tell=...)
    strangers.on_step(optimizer)          before any step of the process (seams/step_tap.py)
    strangers.found()                     ("Adam, 114 parameters",): those that step at present

A stranger moves parameters that no optimizer of this session moves: a wrapper around a watched one,
or the optimizers inside of one, are none, and neither are those of another session. What a stranger
does is not judged, held back or measured: it may be an inner loop or an evaluation, and is only
named. One that has not stepped for FORGOTTEN logical steps is named no more.

Units:   parameters are elements; steps are logical steps of the session.
Threads: those that step; a dict is changed in one operation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from sentinel_hooks.guard import Guard
from sentinel_hooks.parts.turns import Turns
from sentinel_hooks.seams.step_tap import has_no_rate

FORGOTTEN = 64
KINDS = 64  # that are remembered: an inner loop may make one of another size every time


class Strangers:
    """Those of one session."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        turns: Turns,
        guard: Guard,
        awake: Callable[[], bool],
        watched: Callable[[torch.optim.Optimizer], bool],
        tell: Callable[[], None],
    ) -> None:
        """None seen yet.

        Args:
            optimizers: the session's own.
            awake: False inside of a watched step(), and while nothing is watched.
            watched: some session watches it.
            tell: called when one of a new kind steps.
        """
        self._own = weakref.WeakSet(optimizers)
        self._turns = turns
        self._guard = guard
        self._awake = awake
        self._watched = watched
        self._tell = tell
        # The name of each that was looked at; "" for one that moves only what is watched.
        self._names: weakref.WeakKeyDictionary[torch.optim.Optimizer, str] = (
            weakref.WeakKeyDictionary()
        )
        self._seen: dict[str, int] = {}  # kinds, and the step at which one stepped last

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step tap: it is about to step."""
        if optimizer not in self._own:
            self._guard.run("status", self._look, optimizer)

    def found(self) -> tuple[str, ...]:
        """Those that step at present, each kind once, the newest last."""
        least = self._turns.steps - FORGOTTEN
        now = [(step, name) for name, step in self._seen.copy().items() if step >= least]
        return tuple(name for _, name in sorted(now, key=lambda one: one[0]))

    def _look(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._awake() or self._watched(optimizer):
            return
        name = self._names.get(optimizer)
        if name is None:
            if has_no_rate(optimizer):
                return
            name = self._names[optimizer] = self._name(optimizer)
        if not name:
            return
        new = name not in self._seen
        if new and len(self._seen) >= KINDS:
            self._seen.pop(min(self._seen, key=self._seen.__getitem__))
        self._seen[name] = self._turns.steps
        if new:
            self._tell()

    def _name(self, optimizer: torch.optim.Optimizer) -> str:
        own = {id(p) for o in self._own for group in o.param_groups for p in group["params"]}
        count = sum(
            p.numel()
            for group in optimizer.param_groups
            for p in group["params"]
            if id(p) not in own
        )
        return f"{type(optimizer).__name__}, {count:,} parameters" if count else ""

"""Step tap: every optimizer step of the process, also of optimizers that nobody watches.

    STEP_TAP.subscribe(listener)       listener.on_step(optimizer), before the step
    STEP_TAP.unsubscribe(listener)
    STEP_TAP.carried()                 `sentinel run --attach` calls on_step() from its own hook

One of torch's global step pre-hooks, there while somebody listens. Inside a compiled step() it is
traced to nothing, so that it breaks no graph: such a step is not told.

torch goes through its hooks while they run, and whoever changes them then breaks off the user's
step. So a session that ends in the garbage collector, which may come at any moment, leaves the hook
where it is, idle, until the next one comes or goes.

Purity:  listeners are known weakly and kept alive by nobody here.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any, Protocol

import torch
from torch.optim import optimizer as torch_optimizer
from torch.utils.hooks import RemovableHandle


class StepListener(Protocol):
    """What the tap needs of a session; must not raise."""

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        """It is about to step."""
        ...


class StepTap:
    """The process-wide hook."""

    def __init__(self) -> None:
        self._listeners: list[weakref.ref[StepListener]] = []
        self._handle: RemovableHandle | None = None
        self._carried = False

    def subscribe(self, listener: StepListener) -> None:
        """Tell `listener` of every step from now on."""
        self._listeners = [*self._living(), weakref.ref(listener)]
        if self._handle is None and not self._carried:
            self._handle = torch_optimizer.register_optimizer_step_pre_hook(self._hook)

    def unsubscribe(self, listener: StepListener) -> None:
        """Stop telling `listener`; the last one to go takes the hook with it."""
        self._listeners = [other for other in self._living() if other() is not listener]
        if not self._listeners and self._handle is not None and not _steps_are_running():
            self._handle.remove()
            self._handle = None

    def carried(self) -> None:
        """From now on somebody else's hook calls on_step(): none of ours is put in any more."""
        self._carried = True

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Tell everybody."""
        for reference in self._listeners:
            listener = reference()
            if listener is not None:
                listener.on_step(optimizer)

    def _hook(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self.on_step(optimizer)

    def _living(self) -> list[weakref.ref[StepListener]]:
        return [r for r in self._listeners if r() is not None]


def _steps_are_running() -> bool:
    """Some thread is inside of a step(), and perhaps going through the hooks."""
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            code = frame.f_code
            if code.co_name == "wrapper" and code.co_filename == torch_optimizer.__file__:
                return True
            frame = frame.f_back
    return False


STEP_TAP = StepTap()


def has_no_rate(optimizer: torch.optim.Optimizer) -> bool:
    """All learning rates are 0: torch.distributed.checkpoint steps so to make optimizer state."""
    return all(float(group.get("lr", 1.0)) == 0.0 for group in optimizer.param_groups)

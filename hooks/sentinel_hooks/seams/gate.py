"""The gate: the last moment before an optimizer moves, and the first after it.

    gate = Gate(optimizer, driver)        hooks in
    gate.remove()                         hooks out

Step pre- and post-hook on the innermost optimizer. The pre-hook asks the driver for a plan and
carries it out: take the gradients away (skip), or multiply the learning rate; the post-hook puts
everything back. `optimizer.step()` itself always runs, so that LR schedulers, GradScaler and every
rank's collectives see an ordinary step.

With a closure (LBFGS, Lightning) the hook fires before the backward pass: the closure is run here,
once, and step() is handed its result. An error of the user's closure is the user's: it passes.

Also wraps `optimizer.zero_grad` (an accumulation that is thrown away is no step) and
`scaler.update` (on overflow the scaler never calls step(), so no hook fires).

Purity:  hooks run with grad enabled: everything of ours here runs under no_grad.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor

from sentinel_hooks.actuators import Found, HeldBack, ScaledLr
from sentinel_hooks.errors import TrainingHalted
from sentinel_hooks.guard import Guard
from sentinel_hooks.seams.patch import Patch, Stand


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What is to be done with one optimizer's step.

    Attributes:
        hold: take the gradients away.
        lr_factor: multiply the learning rates by it, unless held.
        halt: raise TrainingHalted with this message after the step; "" for no.
        found: the device's own verdict for a fused optimizer, 1.0 for not stepping; see late.py.
    """

    hold: bool = False
    lr_factor: float = 1.0
    halt: str = ""
    found: Tensor | None = field(default=None, compare=False)


class StepDriver(Protocol):
    """What the gate needs of a session."""

    def listening(self) -> bool:
        """False: let everything pass unseen (off, detached, or masked)."""
        ...

    def before_step(self, optimizer: torch.optim.Optimizer, closure: bool) -> StepPlan | None:
        """Gradients are final: what shall be done? Runs under the guard and no_grad."""
        ...

    def keep_step(self, optimizer: torch.optim.Optimizer, closure: bool) -> StepPlan | None:
        """before_step() has failed, or ended: other ranks must not wait for this one in vain."""
        ...

    def after_step(self, optimizer: torch.optim.Optimizer, plan: StepPlan) -> None:
        """step() has run and everything is put back. Runs under the guard and no_grad.

        It is called once more if it failed.
        """
        ...

    def zeroed(self, optimizer: torch.optim.Optimizer) -> None:
        """The user dropped the gradients."""
        ...


class Gate:
    """One optimizer's hooks."""

    def __init__(self, optimizer: torch.optim.Optimizer, driver: StepDriver, guard: Guard) -> None:
        self.optimizer = optimizer
        self._driver = driver
        self._guard = guard
        self._plan: StepPlan | None = None
        self._held: HeldBack | None = None
        self._lr: ScaledLr | None = None
        self._found: Found | None = None
        self.stepping = False  # between the hooks; left True by a step() that raised
        self._nested = 0
        # Inside a compiled step() the hooks run as they are, between two graphs.
        self._handles = [
            optimizer.register_step_pre_hook(_uncompiled(self._before)),
            optimizer.register_step_post_hook(_uncompiled(self._after)),
            # A step() that raised may have left a cut rate: it must not get into a checkpoint.
            optimizer.register_state_dict_pre_hook(self._before_state_dict),
        ]
        zero_grad = optimizer.zero_grad

        def watched_zero_grad(*args: Any, **kwargs: Any) -> None:
            if not torch.compiler.is_compiling():
                self.busy()
                guard.run("zero_grad", driver.zeroed, optimizer)
            zero_grad(*args, **kwargs)

        self._zero_grad = Patch(
            optimizer, "zero_grad", Stand(optimizer, "zero_grad", watched_zero_grad)
        )

    def remove(self) -> None:
        """Take the hooks out; whatever is still held back is given back first."""
        self._put_back()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._zero_grad.remove()

    def busy(self) -> bool:
        """Inside step(), evaluating the closure again perhaps. Clears up after one that raised."""
        if self.stepping and not _steps_on_the_stack(self.optimizer):
            self._put_back()
        return self.stepping

    def _before_state_dict(self, optimizer: torch.optim.Optimizer) -> None:
        self.busy()

    # -- hooks -------------------------------------------------------------------------------

    def _before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self._driver.listening():
            return None
        if self.stepping:
            if _steps_on_the_stack(optimizer) > 1:  # super().step(): the hooks fire again
                self._nested += 1
                return None
            self._put_back()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        call: _OnceRun | None = None
        if callable(closure):
            call = _OnceRun(closure)
            if "closure" in kwargs:
                kwargs = {**kwargs, "closure": call}
            else:
                args = (args[0], call, *args[2:])
            if not self._driver.listening():  # detached by the closure
                return args, kwargs
        with torch.no_grad():
            plan = self._guard.run("gate", self._driver.before_step, optimizer, call is not None)
            if plan is None:
                plan = self._driver.keep_step(optimizer, call is not None)
            if plan is not None:
                # Once more: what one rank alone fails to do makes the ranks part.
                if not (
                    self._guard.run("act", self._act, plan)
                    or self._guard.run("act", self._act, plan)
                ):
                    plan = StepPlan(halt=plan.halt)  # nothing could be done: the step goes on
                self._plan = plan
                if call is not None and plan.hold:
                    call.freeze()
        self.stepping = True
        return (args, kwargs) if call is not None else None

    def _act(self, plan: StepPlan) -> bool:
        if plan.hold:
            if self._held is None:
                self._held = HeldBack(self.optimizer)
            self._held.take()
        elif plan.lr_factor != 1.0:
            if self._lr is None:
                self._lr = ScaledLr(self.optimizer, plan.lr_factor)
            self._lr.cut()
        if plan.found is not None and not plan.hold and self._found is None:
            self._found = Found(self.optimizer, plan.found)
        return True

    def _after(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._nested:
            self._nested -= 1
            return
        plan = self._plan
        if plan is None:
            self.stepping = False
            return
        self._put_back()
        with torch.no_grad():
            # Once more: a rank that has not noted its own step no longer decides as the others do.
            if not self._guard.run("gate_after", self._stepped, optimizer, plan):
                self._guard.run("gate_after", self._stepped, optimizer, plan)
        if plan.halt:
            raise TrainingHalted(plan.halt)

    def _stepped(self, optimizer: torch.optim.Optimizer, plan: StepPlan) -> bool:
        self._driver.after_step(optimizer, plan)
        return True

    def _put_back(self) -> None:
        self.stepping = False
        self._nested = 0
        self._plan = None
        with torch.no_grad():
            if self._held is not None:
                held, self._held = self._held, None
                self._guard.run("give_back", held.give_back)
            if self._lr is not None:
                lr, self._lr = self._lr, None
                self._guard.run("undo_lr", lr.undo)
            if self._found is not None:
                found, self._found = self._found, None
                self._guard.run("give_back", found.take_back)


def _uncompiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    disabled: Callable[..., Any] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return disabled


def _steps_on_the_stack(optimizer: torch.optim.Optimizer) -> int:
    """How many wrappers of this optimizer's step() are running: more than one are nested."""
    found = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "wrapper" and frame.f_locals.get("self") is optimizer:
            found += 1
        frame = frame.f_back
    return found


class _OnceRun:
    """The user's closure, run once ahead of step(); later calls really call it (line search)."""

    def __init__(self, closure: Callable[[], Any]) -> None:
        self._closure = closure
        with torch.enable_grad():
            self._first = closure()
        self._fresh = True
        self._frozen = False

    def freeze(self) -> None:
        """The step is skipped: never evaluate again."""
        self._frozen = True

    def __call__(self) -> Any:
        if self._frozen or self._fresh:
            self._fresh = False
            return self._first
        return self._closure()


class ScalerTap:
    """Wraps `scaler.update`, where every step of a scaled loop arrives, overflow or not.

    A scaler may outlive the model that it scaled, and go on with the next: it holds neither the
    session, whose method before_update is, nor its guard.
    """

    def __init__(self, scaler: Any, before_update: Callable[[], None], guard: Guard) -> None:
        update = scaler.update
        method, holder = weakref.WeakMethod(before_update), weakref.ref(guard)

        def watched_update(*args: Any, **kwargs: Any) -> Any:
            body, guarded = method(), holder()
            if body is not None and guarded is not None:
                with torch.no_grad():
                    guarded.run("scaler", body)
            return update(*args, **kwargs)

        self._patch = Patch(scaler, "update", Stand(scaler, "update", watched_update))

    def remove(self) -> None:
        """Give the scaler its own update back."""
        self._patch.remove()

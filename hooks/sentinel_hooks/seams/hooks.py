"""All hooks of one session, put in and taken out together.

    hooks = Hooks(target, observer, probes, guard, strangers)
    hooks.put_in(session, before_update)      on the user's objects
    hooks.listen()                            in the whole process
    hooks.busy()                              inside some optimizer's step()
    hooks.remove()                            all of them

On the user's own objects: gates, the scaler's update, the forward tap, the probes. In the whole
process: loss tap and clip tap, which only know a Faint of the observer, and step tap, which knows
its listeners weakly: none keeps a run alive.

Threads: put in and taken out by whoever attaches and detaches.
Errors:  of taking out: each is counted by the guard, and the others come out all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sentinel_hooks.guard import Guard
from sentinel_hooks.observe import Faint, Observer
from sentinel_hooks.probes.together import Probes
from sentinel_hooks.seams.clip_tap import CLIP_TAP
from sentinel_hooks.seams.gate import Gate, ScalerTap, StepDriver
from sentinel_hooks.seams.loss_tap import LOSS_TAP
from sentinel_hooks.seams.safe_point import ForwardListener, ForwardTap
from sentinel_hooks.seams.step_tap import STEP_TAP, StepListener
from sentinel_hooks.target import Target


class Driver(StepDriver, ForwardListener, Protocol):
    """What the hooks need of a session."""


class Hooks:
    """The hooks of one session.

    Attributes:
        faint: what the taps of the process know of the observer.
    """

    def __init__(
        self,
        target: Target,
        observer: Observer,
        probes: Probes,
        guard: Guard,
        strangers: StepListener,
    ) -> None:
        """Nothing is put in yet.

        Args:
            strangers: told of every optimizer that steps.
        """
        self._strangers = strangers
        self._target = target
        self._probes = probes
        self._guard = guard
        self._gates: list[Gate] = []
        self._taps: list[ScalerTap | ForwardTap] = []
        self.faint = Faint(observer)

    def put_in(self, driver: Driver, before_update: Callable[[], None]) -> None:
        """Into the user's objects.

        Args:
            before_update: called where the scaler updates.
        """
        target, guard = self._target, self._guard
        self._gates = [Gate(o, driver, guard) for o in target.optimizers]
        if target.live_scaler is not None:
            self._taps.append(ScalerTap(target.scaler, before_update, guard))
        self._taps.append(ForwardTap(target.models, driver))
        self._probes.attach()

    def listen(self) -> None:
        """To backward passes, clips and steps, anywhere in the process."""
        LOSS_TAP.subscribe(self.faint)
        CLIP_TAP.subscribe(self.faint)
        STEP_TAP.subscribe(self._strangers)

    def busy(self) -> bool:
        """Inside a step(), which may evaluate its closure again."""
        return any(gate.busy() for gate in self._gates)

    def remove(self) -> None:
        """Take them out."""
        run = self._guard.run
        for gate in self._gates:
            run("detach", gate.remove)
        for tap in self._taps:
            run("detach", tap.remove)
        LOSS_TAP.unsubscribe(self.faint)
        CLIP_TAP.unsubscribe(self.faint)
        STEP_TAP.unsubscribe(self._strangers)
        run("detach", self._probes.detach)

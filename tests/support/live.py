"""A trainer that lives: the simulated one, with the real link to a sidecar, in a thread.

    with LiveTrainer(url, "r7", layers=8, pause_s=0.01) as trainer:
        trainer.spoil(NanGradient(trainer.step + 5))
        wait_until(lambda: trainer.acted("skip_step"))

Nothing of it is torch's, but `sentinel_hooks` imports it.
"""

from __future__ import annotations

import threading
import uuid
from dataclasses import dataclass, field, replace
from typing import Any

from sentinel.core import engine
from sentinel.core.events import Event
from sentinel.core.policy import Policy
from sentinel.core.state import State
from sentinel.core.types import Action, Decision, Observation
from sentinel.wire.messages import Layer
from sentinel_hooks.link import Breaker, Link, make_link
from tests.support.simulated import Fault, SimulatedTrainer


@dataclass
class _Linked(SimulatedTrainer):
    link: Link = field(kw_only=True)

    def __post_init__(self) -> None:
        self.decider = self._decide
        super().__post_init__()

    def _observe(self, step: int) -> tuple[Observation, float]:
        observation, batch = super()._observe(step)
        return replace(observation, commands=self.link.take_commands()), batch

    def _decide(self, state: State, observation: Observation, policy: Policy) -> Decision:
        own = engine.decide(state, observation, policy)
        return self.link.decide(observation, own, state)[0]

    def _note(self, event: Event) -> None:
        super()._note(event)
        self.link.event(event)


class LiveTrainer:
    """See the module docstring; `options` go to SimulatedTrainer."""

    def __init__(
        self,
        url: str,
        run: str,
        *,
        token: str = "",
        decide: str = "sidecar",
        pause_s: float = 0.01,
        steps: int | None = None,
        deadline_s: float = 5.0,
        **options: Any,
    ) -> None:
        layers = options.get("layers", 0)
        self.link = make_link(
            url,
            decide,
            run=run,
            incarnation=uuid.uuid4().hex,
            policy=options.get("policy", Policy()),
            layers=[
                Layer(f"transformer.h.{n}.attn", block=n, attention=True) for n in range(layers)
            ],
            info={"host": "gpu-17"},
            token=token,
            deadline_s=deadline_s,
            # Here the sidecar may be slow, and answers may be lost by the dozen.
            breaker=Breaker(misses=10**6, floor_s=60.0),
        )
        self.sim = _Linked(link=self.link, **options)
        self.error: BaseException | None = None
        self._pause_s, self._steps = pause_s, steps
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._train, daemon=True)

    def __enter__(self) -> LiveTrainer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)
        if self.error is not None:
            raise self.error

    @property
    def step(self) -> int:
        """The step that comes next."""
        return self.sim.state.step

    def spoil(self, *faults: Fault) -> None:
        """More faults."""
        self.sim.faults = [*self.sim.faults, *faults]

    def acted(self, action: str = "", rule: str = "") -> list[int]:
        """Steps at which that was done."""
        return [
            s.observation.step
            for s in list(self.sim.steps)
            if s.decision.action is not Action.PROCEED
            and action in ("", s.decision.action.name.lower())
            and rule in ("", s.decision.rule)
        ]

    def obeyed(self) -> list[str]:
        """Ids of the orders obeyed, in order, once for each time."""
        return [c.id for s in list(self.sim.steps) for c in s.observation.commands]

    def _train(self) -> None:
        try:
            while not self._stop.is_set() and not self.sim.halted:
                if self._steps is not None and self.step >= self._steps:
                    break
                self.sim.step()
                last = self.sim.steps[-1]
                self.link.settled(last.observation, last.decision, last.outcome)
                self._stop.wait(self._pause_s)
            self.link.close("halted" if self.sim.halted else "finished", self.sim.state)
        except BaseException as error:
            self.error = error

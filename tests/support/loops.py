"""A training loop without a model: the real engine and link over a made-up loss series."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from sentinel.core import engine
from sentinel.core.events import Event, Restored, RestoreFailed, SnapshotTaken
from sentinel.core.policy import Policy
from sentinel.core.state import State, Stats
from sentinel.core.types import Action, Decision, Observation, Outcome, Source
from sentinel_hooks.link import Link


@dataclass(frozen=True, slots=True)
class Step:
    """What was executed at one step, and by whose decision."""

    step: int
    action: Action
    rule: str
    target: int | None
    lr_factor: float
    source: Source


def series(steps: int, seed: int, faults: Iterable[int] = ()) -> list[tuple[float, float]]:
    """(loss, norm) of a falling, noisy curve; from each fault on 6 steps are bad."""
    rng = random.Random(seed)
    curve = [
        (
            2.0 + 2.0 * math.exp(-i / 60) + rng.gauss(0, 0.01),
            1.0 + 0.5 * math.exp(-i / 30) + abs(rng.gauss(0, 0.05)),
        )
        for i in range(steps)
    ]
    for number, fault in enumerate(faults):
        for i in range(fault, min(fault + 6, steps)):
            loss, norm = curve[i]
            curve[i] = (
                (loss, math.nan if number % 3 == 0 else 40 * norm)
                if number % 3 != 2
                else (loss + 3.0, norm)
            )
            if number % 3 != 2:
                break
    return curve


class Loop:
    """attach, then step after step what the session does; snapshots hold statistics only."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.policy: Policy = link.policy
        self.state: State = engine.initial()
        self.kept: dict[int, Stats] = {}
        self.done: list[Step] = []
        self.waits: list[float] = []
        self.commands: list[str] = []
        self._take = True

    def _note(self, event: Event) -> None:
        self.state = engine.note(self.state, event, self.policy)
        self.link.event(event)

    def step(self, loss: float | None, norm: float | None) -> Step:
        number = self.state.step
        if self._take:
            self.kept[number] = self.state.stats
            self._note(SnapshotTaken(number))
            self._take = False
        commands = self.link.take_commands()
        self.commands += [c.id for c in commands]
        observation = Observation(number, loss, norm, 1e-3, commands=commands)
        own = engine.decide(self.state, observation, self.policy)
        before = time.perf_counter()
        decision, source = self.link.decide(observation, own, self.state)
        self.waits.append(time.perf_counter() - before)
        return self._carry_out(observation, decision, source)

    def _carry_out(self, observation: Observation, decision: Decision, source: Source) -> Step:
        applied = decision.action is Action.PROCEED
        outcome = Outcome(observation.step, decision.action, applied, source)
        self.state = engine.apply(self.state, observation, decision, outcome, self.policy)
        self.link.settled(observation, decision, outcome)
        if decision.action is Action.ROLLBACK:
            target = decision.target
            if target is None or target not in self.kept:
                self._note(RestoreFailed(observation.step + 1, target, "no snapshot"))
            else:
                self._note(Restored(observation.step + 1, target, self.kept[target]))
        known = {s.step for s in self.state.ledger.snapshots}
        self.kept = {k: v for k, v in self.kept.items() if k in known}
        self._take = decision.take_snapshot and applied
        done = Step(
            observation.step,
            decision.action,
            decision.rule,
            decision.target,
            decision.lr_factor,
            source,
        )
        self.done.append(done)
        return done

    def run(
        self,
        curve: Iterable[tuple[float, float]],
        *,
        pause_s: float = 0.0,
        at: dict[int, Callable[[], None]] | None = None,
    ) -> list[Step]:
        for number, (loss, norm) in enumerate(curve):
            if at and number in at:
                at[number]()
            self.step(loss, norm)
            if pause_s:
                time.sleep(pause_s)
        return self.done


def actions(done: Iterable[Step]) -> list[Step]:
    """What was executed, without whose decision it was."""
    return [replace(step, source=Source.TRAINER) for step in done]

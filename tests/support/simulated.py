"""A trainer without torch: a loss that falls, noise, faults, and weights that can be damaged.

    trainer = SimulatedTrainer(seed=3, faults=[NanGradient(300), Garbage(600, 20)])
    steps = trainer.run(2000)
    trainer.level(), trainer.state, steps[-1].decision

It closes the loop that the engine lives in: what is decided is carried out (skipped, restored, the
learning rate cut), and that changes what is measured next. The "model" is three numbers: the
progress made so far, the excess loss that damage to the weights causes (it lasts until training
heals it slowly or a rollback undoes it), and whether the weights hold NaN.

The order within a step is the one of design.md section 3: restore or snapshot at the safe point,
observe, ask the canary, decide, act, apply. Nothing here reads a clock or global randomness: the
same arguments give the same run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sentinel.core import engine
from sentinel.core.events import Event, Restored, RestoreFailed, SnapshotTaken
from sentinel.core.policy import Policy
from sentinel.core.state import State, Stats
from sentinel.core.types import (
    LAYER_ATTENTION_MAX_LOGIT,
    LAYER_GRAD_NORM,
    LAYER_UPDATE_RATIO,
    NO_COLUMNS,
    Action,
    CanaryAnswer,
    Column,
    Command,
    Decision,
    Observation,
    Outcome,
)
from sentinel.traces.recorder import Recorder

# As the session keeps them: every 4th quiet batch, a few old enough to be asked; a restore lets
# them be.
CANARY_SPACING, CANARIES_KEPT = 4, 5


# ---- faults: each says what it does to the step it hits ---------------------------------------


@dataclass(frozen=True, slots=True)
class NanGradient:
    """A finite loss with a NaN gradient; applied, it makes the weights NaN."""

    step: int
    length: int = 1


@dataclass(frozen=True, slots=True)
class BigGradient:
    """A finite gradient `factor` times its size; applied, it damages the weights a little."""

    step: int
    factor: float = 20.0
    length: int = 1


@dataclass(frozen=True, slots=True)
class Garbage:
    """A block of garbage batches; each one that is applied damages the weights."""

    step: int
    length: int = 20
    excess: float = 3.0


@dataclass(frozen=True, slots=True)
class Damage:
    """Weights corrupted between two steps: `excess` nats until healed or rolled back."""

    step: int
    excess: float = 1.5
    length: int = 1


@dataclass(frozen=True, slots=True)
class LearningRate:
    """The learning rate times `factor`: every applied step damages the weights."""

    step: int
    length: int = 5
    factor: float = 30.0


@dataclass(frozen=True, slots=True)
class NanLoss:
    """The loss is NaN without the weights being so."""

    step: int
    length: int = 1


@dataclass(frozen=True, slots=True)
class Shift:
    """The data change lawfully and for good: `excess` nats more, whatever the weights."""

    step: int
    excess: float = 0.6
    length: int = 10**9


@dataclass(frozen=True, slots=True)
class LogitGrowth:
    """Attention logits of layer 0 above the threshold; needs layers."""

    step: int
    length: int = 30
    logit: float = 80.0


@dataclass(frozen=True, slots=True)
class Blind:
    """Measuring fails."""

    step: int
    length: int = 1


@dataclass(frozen=True, slots=True)
class Order:
    """A person's command at that step."""

    step: int
    command: Command
    length: int = 1


Fault = (
    NanGradient
    | BigGradient
    | Garbage
    | Damage
    | LearningRate
    | NanLoss
    | Shift
    | LogitGrowth
    | Blind
    | Order
)


def ten_faults(steps: int = 2000) -> list[Fault]:
    """Ten faults of different kinds, spread over a run of that many steps."""
    at = [steps * share // 100 for share in (9, 17, 26, 35, 44, 53, 62, 72, 82, 92)]
    return [
        NanGradient(at[0]),
        BigGradient(at[1]),
        Damage(at[2], 1.5),
        Garbage(at[3], 20),
        NanLoss(at[4], 2),
        LogitGrowth(at[5]),
        LearningRate(at[6], 6),
        Garbage(at[7], 2),
        Blind(at[8], 3),
        Damage(at[9], 4.0),
    ]


# ---- the model ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Weights:
    """The model in three numbers; immutable, so that a snapshot is a reference."""

    progress: float = 0.0
    damage: float = 0.0
    nan: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One finished step, for the tests to look at."""

    before: State
    observation: Observation
    decision: Decision
    outcome: Outcome
    after: State
    weights: Weights
    events: tuple[Event, ...]


@dataclass
class SimulatedTrainer:
    """See the module docstring.

    Attributes:
        layers: number of layers; 0: no columns.
        canary: whether a canary can be had.
        restores: False: every restore fails.
        noise: standard deviation of ln(loss).
        decider: who decides; by default the engine.
    """

    seed: int = 0
    faults: Sequence[Fault] = ()
    policy: Policy = field(default_factory=Policy)
    layers: int = 0
    canary: bool = True
    restores: bool = True
    noise: float = 0.015
    norm_noise: float = 0.12
    recorder: Recorder | None = None
    decider: Callable[[State, Observation, Policy], Decision] = engine.decide
    state: State = field(default_factory=State)
    weights: Weights = Weights()
    keep_steps: bool = True

    def __post_init__(self) -> None:
        self._snapshots: dict[int, tuple[Weights, Stats]] = {}
        self._canaries: list[tuple[int, float, float]] = []  # (step, recorded loss, batch noise)
        self._take = False
        self._restore: int | None = None
        self._restore_due = False
        self._events: list[Event] = []
        self.steps: list[Step] = []
        self.halted = False
        if self.state.step == 0:
            self._snapshot()

    # -- what the model does ----------------------------------------------------------------

    def level(self, weights: Weights | None = None) -> float:
        """The loss without noise [nats]."""
        w = self.weights if weights is None else weights
        if w.nan:
            return math.nan
        return 1.8 + 2.6 * (1.0 + w.progress / 60.0) ** -0.6 + w.damage

    def _active(self, step: int) -> list[Fault]:
        return [f for f in self.faults if f.step <= step < f.step + f.length]

    def _observe(self, step: int) -> tuple[Observation, float]:
        """What is measured, and the batch's own noise."""
        rng = random.Random(self.seed * 1_000_003 + step)
        batch = rng.gauss(0.0, self.noise)
        jitter = rng.gauss(0.0, self.norm_noise)
        loss = self.level() * math.exp(batch)
        w = self.weights
        norm = (0.5 + 1.5 * (1.0 + w.progress / 20.0) ** -0.5) * math.exp(jitter)
        norm = math.nan if w.nan else norm * (1.0 + 1.5 * min(w.damage, 4.0))
        blind, logit = False, 6.0
        commands: list[Command] = []
        for fault in self._active(step):
            match fault:
                case NanGradient():
                    norm = math.nan
                case BigGradient(factor=factor):
                    norm *= factor
                case Garbage(excess=excess):
                    loss, norm = loss + excess, norm * 4.0
                case Shift(excess=excess):
                    loss += excess
                case NanLoss():
                    loss, norm = math.nan, math.nan
                case LogitGrowth(logit=value):
                    logit = value
                case Blind():
                    blind = True
                case Order(command=command):
                    commands.append(command)
                case Damage() | LearningRate():
                    pass
        observation = Observation(
            step,
            loss=loss,
            grad_norm=norm,
            lr=1e-3,
            params_finite=not w.nan if step % 10 == 0 else None,
            shape=(1, 8),
            commands=tuple(commands),
            blind=blind,
            batch_id=f"batch-{step}",
            columns=self._columns(step, norm, logit) if self.layers else NO_COLUMNS,
        )
        return observation, batch

    def _columns(self, step: int, norm: float, logit: float) -> dict[str, Column]:
        rng = np.random.default_rng((self.seed, step))
        logits = rng.normal(6.0, 1.0, self.layers).astype(np.float32)
        logits[0] = logit
        share = (norm / math.sqrt(self.layers)) * np.exp(rng.normal(0.0, 0.1, self.layers))
        columns = {
            LAYER_GRAD_NORM: share.astype(np.float32),
            LAYER_ATTENTION_MAX_LOGIT: logits,
        }
        if step % 10 == 0:
            columns[LAYER_UPDATE_RATIO] = (1e-3 * np.exp(rng.normal(0, 0.2, self.layers))).astype(
                np.float32
            )
        return columns

    def _update(self, step: int, lr_factor: float) -> None:
        """The optimizer steps on this step's gradient."""
        w = self.weights
        damage = w.damage * 0.997
        nan = w.nan
        for fault in self._active(step):
            match fault:
                case NanGradient() | NanLoss():
                    nan = True
                case BigGradient():
                    damage += 0.15 * lr_factor
                case Garbage():
                    damage += 0.25 * lr_factor
                case LearningRate(factor=factor):
                    damage += 0.02 * factor * lr_factor
                case _:
                    pass
        self.weights = Weights(w.progress + lr_factor, damage, nan)

    # -- the loop -----------------------------------------------------------------------------

    def run(self, steps: int) -> list[Step]:
        """So many steps more, or until a HALT; returns all steps so far."""
        for _ in range(steps):
            if self.halted:
                break
            self.step()
        return self.steps

    def step(self) -> None:
        """One step, see the module docstring."""
        self._safe_point()
        step = self.state.step
        for fault in self._active(step):
            if isinstance(fault, Damage):
                self.weights = replace(self.weights, damage=self.weights.damage + fault.excess)
        observation, batch = self._observe(step)
        if engine.wants_canary(self.state, observation, self.policy):
            observation = replace(observation, canary=self._ask_canary(step))
        before = self.state
        decision = self.decider(before, observation, self.policy)
        applied = decision.action is Action.PROCEED
        if applied:
            self._update(step, decision.lr_factor)
        self._take = decision.take_snapshot and applied
        self._restore_due = decision.action is Action.ROLLBACK
        self._restore = decision.target
        self.halted = decision.action is Action.HALT
        if decision.drop_canaries:
            self._canaries.clear()
        kept = self._canaries
        if decision.keep_batch and observation.loss is not None:
            if not kept or step - kept[-1][0] >= CANARY_SPACING:
                kept.append((step, observation.loss, batch))
                del kept[:-CANARIES_KEPT]
        outcome = Outcome(step, decision.action, applied)
        self.state = engine.apply(before, observation, decision, outcome, self.policy)
        self._drop()
        if self.recorder is not None:
            self.recorder.step(observation, decision, outcome, self.state)
        if self.keep_steps:
            events, self._events = tuple(self._events), []
            self.steps.append(
                Step(before, observation, decision, outcome, self.state, self.weights, events)
            )

    def _ask_canary(self, step: int) -> CanaryAnswer | None:
        old = [c for c in self._canaries if c[0] <= step - self.policy.canary.age]
        if not self.canary or not old:
            return None
        kept, recorded, batch = old[-1]
        return CanaryAnswer(kept, recorded, self.level() * math.exp(batch))

    def _safe_point(self) -> None:
        if self._restore_due:
            self._restore_due = False
            self._do_restore()
        elif self._take:
            self._snapshot()
        self._take = False

    def _do_restore(self) -> None:
        step, target = self.state.step, self._restore
        if not self.restores or target is None or target not in self._snapshots:
            self._note(RestoreFailed(step, target, "the snapshot cannot be read"))
            return
        self.weights, stats = self._snapshots[target]
        self._note(Restored(step, target, stats))

    def _snapshot(self) -> None:
        step = self.state.step
        self._snapshots[step] = (self.weights, self.state.stats)
        self._note(SnapshotTaken(step))

    def note(self, event: Event) -> None:
        """Something else happens at the safe point."""
        self._note(event)

    def _note(self, event: Event) -> None:
        self.state = engine.note(self.state, event, self.policy)
        self._events.append(event)
        self._drop()
        if self.recorder is not None:
            self.recorder.event(event, self.state)

    def _drop(self) -> None:
        """Snapshots that left the registry are forgotten."""
        kept = {s.step for s in self.state.ledger.snapshots}
        self._snapshots = {s: v for s, v in self._snapshots.items() if s in kept}


def actions(steps: Sequence[Step]) -> list[tuple[int, str, str]]:
    """(step, action, rule) of every step that was not let through."""
    return [
        (s.observation.step, s.decision.action.name, s.decision.rule)
        for s in steps
        if s.decision.action is not Action.PROCEED
    ]

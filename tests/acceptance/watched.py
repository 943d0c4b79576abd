"""The runs a user would write, with sentinel attached, and what it said about them.

Everything of ours that the acceptance tests touch goes through here; the oracles do not import it.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import sentinel_hooks
from sentinel.core.policy import Policy
from sentinel.core.types import Action, Decision, Observation, Outcome
from sentinel.traces.reader import Reader
from tests.acceptance.oracle import Job, Saved, Step, World
from tests.acceptance.worlds import Batch


def drawn(title: str, seed: int) -> random.Random:
    """The faults' own dice; the seed is printed, so that a red test can be thrown again."""
    print(f"{title}: fault seed {seed}")
    return random.Random(f"{title}-{seed}")


def policy(toml: str, name: str = "acceptance") -> Policy:
    return Policy.parse(toml, name)


def job_session(job: Job, rules: Policy, run_dir: Path, **options: Any) -> Any:
    return sentinel_hooks.attach(
        model=job.model,
        optimizer=job.optimizer,
        lr_scheduler=job.scheduler,
        grad_scaler=job.scaler,
        policy=rules,
        sidecar=None,
        run_dir=run_dir,
        **options,
    )


def world_session(world: World, rules: Policy, run_dir: Path, **options: Any) -> Any:
    one = len(world.optimizers) == 1
    return sentinel_hooks.attach(
        model=world.forward if world.forward is not None else world.model,
        optimizer=world.optimizers[0] if one else world.optimizers,
        lr_scheduler=world.schedulers[0] if one else world.schedulers,
        grad_scaler=world.scaler,
        policy=rules,
        sidecar=None,
        run_dir=run_dir,
        **options,
    )


@dataclass
class Trail:
    """What the loop itself saw around each optimizer step; nothing here asks sentinel.

    Attributes:
        held: per step, whether parameters and optimizer state kept their hash over step().
    """

    held: list[bool] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    consumed: list[int] = field(default_factory=list)
    before: dict[int, str] = field(default_factory=dict)
    after: dict[int, str] = field(default_factory=dict)


def train_job(job: Job, data: Sequence[Step], each: Callable[[int], None] | None = None) -> Trail:
    """An ordinary loop over `data`; compares hashes around optimizer.step()."""
    trail = Trail()
    for t, step in enumerate(data):
        job.optimizer.zero_grad()
        if job.spec.case.closure:
            before = job.fragile()
            job.optimizer.step(job.closure(step))
        else:
            for micro in step:
                job.backward(micro)
            before = job.fragile()
            if job.scaler is not None:
                job.scaler.step(job.optimizer)
            else:
                job.optimizer.step()
        trail.held.append(job.fragile() == before)
        if job.scaler is not None:
            job.scaler.update()
        with warnings.catch_warnings():
            if job.scaler is not None:
                # torch's own complaint when the scaler drops the very first step
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            job.scheduler.step()
        if each is not None:
            each(t)
    return trail


def decisions(session: Any) -> list[tuple[Observation, Decision, Outcome]]:
    """What the run's own trace says of each step; to be called after detach()."""
    return [
        (record.observation, record.decision, record.outcome)
        for record in Reader(session.directory)
        if hasattr(record, "decision")
    ]


def skipped(session: Any) -> dict[str, int]:
    """Our counter: steps skipped, by rule."""
    return dict(session.state.ledger.counters.skipped)


def rollbacks(session: Any) -> dict[str, int]:
    """Our counter: rollbacks, by rule/outcome."""
    return dict(session.state.ledger.counters.rollbacks)


def actions(session: Any) -> dict[int, tuple[Action, str, str]]:
    """step -> (executed action, rule, reason) of every step that was not simply let through."""
    return {
        observation.step: (outcome.executed, decision.rule, decision.reason)
        for observation, decision, outcome in decisions(session)
        if outcome.executed is not Action.PROCEED or decision.rule
    }


Hook = Callable[[int, World], None]


def train_world(
    world: World,
    batches: Sequence[Sequence[Batch]],
    *,
    damage: dict[int, Callable[[World], None]] | None = None,
    spoil_rate: dict[int, float] | None = None,
    between: Hook | None = None,
    seen: Callable[[int, World], None] | None = None,
) -> Trail:
    """An ordinary loop with faults.

    Args:
        damage: done to the weights between the previous step and this one's forward.
        spoil_rate: the user's own loop multiplies this step's learning rate (the fault).
        between: called after each step, where a user would evaluate or log.
        seen: called after each step's backward and before its optimizer.step().
    """
    trail = Trail()
    for t, step in enumerate(batches):
        if damage and t in damage:
            damage[t](world)
        for optimizer in world.optimizers:
            optimizer.zero_grad()
        parts = []
        for part in step:
            trail.consumed.append(part.number)
            parts.append(world.backward(part, 1 / len(step)))
        trail.losses.append(float(torch.stack(parts).sum()))
        if world.scaler is not None:
            for optimizer in world.optimizers:
                world.scaler.unscale_(optimizer)
        if world.clip is not None:
            torch.nn.utils.clip_grad_norm_(world.model.parameters(), world.clip)
        if seen is not None:
            seen(t, world)
        trail.before[t] = world.fragile()
        factor = (spoil_rate or {}).get(t, 1.0)
        for optimizer in world.optimizers:
            rates = [group["lr"] for group in optimizer.param_groups]
            if factor != 1.0:
                for group in optimizer.param_groups:
                    group["lr"] = group["lr"] * factor
            if world.scaler is not None:
                world.scaler.step(optimizer)
            else:
                optimizer.step()
            if factor != 1.0:  # otherwise hands off: what sentinel leaves behind must show
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate
        trail.after[t] = world.fragile()
        trail.held.append(trail.after[t] == trail.before[t])
        if world.scaler is not None:
            world.scaler.update()
        for scheduler in world.schedulers:
            scheduler.step()
        if between is not None:
            between(t, world)
    return trail


class Copies:
    """The test's own copies of a world at each training-mode forward, made inside that forward.

    Attach it after sentinel: its hook then runs behind ours, and sees what the forward will see.
    """

    def __init__(self, world: World) -> None:
        self.at: dict[int, Saved] = {}
        self.step = 0
        self._world = world
        module = world.forward if world.forward is not None else world.model
        self._handle = module.register_forward_pre_hook(self._copy)

    def _copy(self, module: torch.nn.Module, args: Any) -> None:
        if module.training and self.step not in self.at:
            self.at[self.step] = self._world.restorable()

    def next(self, t: int, world: World) -> None:
        """To be called between steps."""
        self.step = t + 1

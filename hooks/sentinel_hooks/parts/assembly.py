"""The parts of a session, put together in the order in which they need each other.

    given = Given(target=..., layers=..., link=..., ...)      what attach() has found and checked
    parts = Parts(given, host, awake, watched)                nothing of the user's is touched yet

Each part has state of its own and is told by name what it works with; none knows the session, but
as a Host (saving.py): the engine's state, and what moves it. Later parts know earlier ones only.

Errors:  of the disk, for what cannot be made at all; what can be done without is a blind spot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sentinel.core.policy import CanaryMode
from sentinel_hooks.canary import Canary
from sentinel_hooks.layers import LayerTable
from sentinel_hooks.ledger_file import Keeper
from sentinel_hooks.link import Link
from sentinel_hooks.observe import Observer
from sentinel_hooks.outlets import Outlets
from sentinel_hooks.parts.agreeing import Alone, Together, Voice
from sentinel_hooks.parts.between import Between
from sentinel_hooks.parts.blind_spots import BlindSpots
from sentinel_hooks.parts.chronicle import Chronicle
from sentinel_hooks.parts.late_reads import LateReads
from sentinel_hooks.parts.pausing import PauseFile
from sentinel_hooks.parts.strangers import Strangers
from sentinel_hooks.parts.switch import Switch
from sentinel_hooks.parts.turns import Turns
from sentinel_hooks.probes.grads import share
from sentinel_hooks.probes.together import Probes
from sentinel_hooks.ranks.council import Council
from sentinel_hooks.saving import Host, Saving
from sentinel_hooks.scaler_skips import ScalerSkips
from sentinel_hooks.signals import Signals
from sentinel_hooks.snapshots import Snapshots
from sentinel_hooks.snapshots.running import RunningStats
from sentinel_hooks.status import BlindSpot
from sentinel_hooks.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a session begins with.

    Attributes:
        layers: the layer table.
        incarnation: names this process among those of the run.
        record: write a trace and a ledger.
        council: with several ranks, this one's seat.
        outlets: where things are told without a sidecar.
        first_save: number of the first save to disk, equal on all ranks.
        sharers: ranks on this machine.
        late: read what a step measured one step later, where the policy allows it.
    """

    target: Target
    layers: LayerTable
    run_id: str
    run_dir: Path
    link: Link
    keeper: Keeper
    incarnation: str
    signals: Signals
    snapshots: Snapshots
    record: bool = True
    loss_fn: Any = None
    batch_id: Callable[[], str] | None = None
    norm_fn: Callable[[], Any] | None = None
    blind_spots: Sequence[BlindSpot] = ()
    clock: Callable[[], float] = time.perf_counter
    council: Council | None = None
    outlets: Outlets | None = None
    first_save: int = 0
    sharers: int = 1
    late: bool = False

    @property
    def directory(self) -> Path:
        """The run's own."""
        return self.run_dir / self.run_id


class Parts:
    """Those of one session; each attribute is one, named as its class."""

    def __init__(
        self,
        given: Given,
        host: Host,
        awake: Callable[[], bool],
        watched: Callable[[torch.optim.Optimizer], bool],
    ) -> None:
        """Put them together, and begin the trace.

        Args:
            awake: False while the user's calls shall pass unseen.
            watched: some session of this process watches this optimizer.
        """
        target, layers, council = given.target, given.layers, given.council
        link, keeper, policy = given.link, given.keeper, given.link.policy
        world = council.world if council is not None else 1
        self.turns = Turns(len(target.optimizers))
        self.switch = Switch(
            given.run_id,
            host=host,
            on_error=link.count_error,
            council=council,
            outlets=given.outlets,
        )
        self.guard = self.switch.guard
        self.probes = Probes.of(
            given.signals,
            target,
            layers,
            threshold=policy.attention_logit.threshold,
            clock=given.clock,
            guard=self.guard,
            share=(lambda p: share(p, world)) if world > 1 else None,
        )
        self.observer = Observer(
            target,
            layers,
            self.guard,
            awake,
            signals=given.signals,
            batch_id=given.batch_id,
            norm_fn=given.norm_fn,
            world=world,
            probes=self.probes,
        )
        self.running = RunningStats(target.models)
        self.saving = Saving(
            target,
            given.snapshots,
            given.directory,
            host,
            self.guard,
            keeper,
            run=given.run_id,
            policy=policy,
            incarnation=given.incarnation,
            first_step=host.now.step,
            council=council,
            sharers=given.sharers,
            first_number=given.first_save,
            clock=given.clock,
        )
        self.canary = (
            Canary(target.models, policy.canary.age, given.loss_fn)
            if policy.canary.mode is CanaryMode.ON
            else None
        )
        self.pause = PauseFile(
            (given.run_dir, given.directory),
            host,
            keeper,
            rank=council.rank if council is not None else None,
        )
        self.between = Between(target, self.saving, self.pause, self.guard, council)
        self.voice = self._voice(given, host)
        self.scaler_skips = ScalerSkips(given.run_id, target, policy, self.voice.nonfinite)
        self.late = LateReads(
            policy,
            target,
            layers,
            run=given.run_id,
            host=host,
            link=link,
            guard=self.guard,
            observer=self.observer,
            saving=self.saving,
            pause=self.pause,
            running=self.running,
            canary=self.canary,
            asked=given.late,
        )
        self.chronicle = Chronicle(
            run=given.run_id,
            policy=policy,
            layers=layers,
            keeper=keeper,
            link=link,
            outlets=given.outlets,
            guard=self.guard,
            logs_flags=council is None or not council.rank,
        )
        self.strangers = Strangers(
            target.optimizers,
            turns=self.turns,
            guard=self.guard,
            awake=awake,
            watched=watched,
            tell=lambda: self.blind.tell(),
        )
        self.blind = BlindSpots(
            given.run_id,
            given.blind_spots,
            host=host,
            policy=policy,
            layers=layers,
            probes=self.probes,
            observer=self.observer,
            turns=self.turns,
            strangers=self.strangers,
            switch=self.switch,
            saving=self.saving,
            snapshots=given.snapshots,
            keeper=keeper,
            chronicle=self.chronicle,
        )
        if given.record:
            self.chronicle.open(
                given.directory,
                target,
                given.snapshots,
                host.now,
                incarnation=given.incarnation,
            )

    def _voice(self, given: Given, host: Host) -> Voice:
        if given.council is None:
            return Alone(self.observer, given.link, host)
        return Together(
            given.council,
            self.observer,
            given.link,
            host,
            guard=self.guard,
            saving=self.saving,
            between=self.between,
            pause=self.pause,
            canary=self.canary,
        )

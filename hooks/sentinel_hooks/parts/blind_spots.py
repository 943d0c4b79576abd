"""Blind spots: what this session does not see or cannot do, for status() and once for the log.

    blind = BlindSpots("r7", given, host=host, turns=turns, ...)
    blind.found()         all there are at this moment, as status() lists them
    blind.tell()          each kind is logged once: who never asks for the status shall know too
    blind.forsaken        training goes on, and no watched optimizer steps any more

Nothing is measured here: each part of a session keeps its own troubles, telling.py has the words.

Threads: the training thread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sentinel.core.policy import Policy
from sentinel_hooks import telling
from sentinel_hooks.layers import LayerTable
from sentinel_hooks.ledger_file import Keeper
from sentinel_hooks.observe import Observer
from sentinel_hooks.parts.chronicle import Chronicle
from sentinel_hooks.parts.strangers import Strangers
from sentinel_hooks.parts.switch import Switch
from sentinel_hooks.parts.turns import Turns
from sentinel_hooks.probes.together import Probes
from sentinel_hooks.saving import Host, Saving
from sentinel_hooks.snapshots import Snapshots
from sentinel_hooks.status import BlindSpot

logger = logging.getLogger(__name__)


class BlindSpots:
    """Asks the parts of one session."""

    def __init__(
        self,
        run: str,
        given: Sequence[BlindSpot],
        *,
        host: Host,
        policy: Policy,
        layers: LayerTable,
        probes: Probes,
        observer: Observer,
        turns: Turns,
        strangers: Strangers,
        switch: Switch,
        saving: Saving,
        snapshots: Snapshots,
        keeper: Keeper,
        chronicle: Chronicle,
    ) -> None:
        """Nothing was told yet.

        Args:
            given: those that attach() knows of.
        """
        self._run = run
        self._given = tuple(given)
        self._host = host
        self._policy = policy
        self._layers = layers
        self._probes = probes
        self._observer = observer
        self._turns = turns
        self._strangers = strangers
        self._switch = switch
        self._saving = saving
        self._snapshots = snapshots
        self._keeper = keeper
        self._chronicle = chronicle
        self._told: set[str] = set()  # kinds

    @property
    def forsaken(self) -> bool:
        """Off, nobody counts steps: then forwards without one are no news."""
        return self._switch.on and self._turns.forsaken

    def found(self) -> list[BlindSpot]:
        """All of this moment."""
        turns = self._turns
        return [
            *self._given,
            *telling.of_the_probes(self._probes),
            *telling.of_the_depth(self._layers, self._policy),
            *telling.of_the_loop(
                forsaken=turns.forwards if self.forsaken else 0,
                loss_unseen=bool(self._observer.steps_without_loss),
                forward_unseen=bool(turns.unseen and turns.steps > 1),
                unlisted=self._observer.probe.unlisted,
            ),
            *telling.of_strangers(self._strangers.found()),
            *telling.of_saving(self._saving, self._snapshots, self._keeper),
            *telling.of_the_trace(self._chronicle.trouble, self._chronicle.lost),
        ]

    def tell(self) -> None:
        """Log those of a kind that was not logged yet."""
        for spot in self.found():
            kind = "".join(c for c in spot.what if not c.isdigit())
            if kind not in self._told:
                self._told.add(kind)
                logger.warning(
                    "blind spot run=%s step=%s what=%s way_out=%s",
                    self._run,
                    self._host.now.step,
                    spot.what,
                    spot.way_out,
                )

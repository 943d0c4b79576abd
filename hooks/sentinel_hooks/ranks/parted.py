"""After the group was lost: did the ranks act differently, and have their weights parted?

    parted = Parted(store, rank, world)
    parted.publish(log)                  what this rank carried out at its last steps
    verdict = parted.look(step)          None: not known yet; "": they agree; else what differs

Without a group nobody can be waited for: each rank leaves a note in the training run's own store
and looks from time to time whether all are there. Steps that several ranks report must have been
carried out alike. A rank that is gone for ever never reports: the verdict then stays open, and the
run, which has lost a rank anyway, is the user's.

When they differ, rank 0 names a step a little ahead at which all halt together: ranks that train in
step are never more than one step apart.

Threads: the training one. Units: steps.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

logger = logging.getLogger(__name__)

LOOKS = 512  # forwards after which a rank that has not reported will not
AHEAD = 2  # steps


class Done(msgspec.Struct, frozen=True, array_like=True):
    """What one rank carried out at one step."""

    step: int
    action: str
    applied: bool
    lr_factor: float


class Parted:
    """One rank's view of whether all ranks still hold the same weights."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store = store
        self._rank = rank
        self._world = world
        self._looks = 0
        self._said = False
        self.halt_at: int | None = None
        self.why = ""
        self.settled = False

    def publish(self, log: Sequence[Done]) -> None:
        """Tell the others; may raise what the store raises."""
        self._store.set(f"parted/{self._rank}", msgspec.json.encode(list(log)).decode())

    def look(self, step: int) -> bool:
        """Whether this step is to be halted; never waits."""
        if self.settled:
            return False
        try:
            return self._look(step)
        except Exception as error:  # noqa: BLE001  the store may be gone with rank 0
            logger.warning("the ranks cannot be compared: %s", error)
            self.settled = True
            return False

    def _look(self, step: int) -> bool:
        if self.halt_at is not None:
            self.settled = step >= self.halt_at
            return self.settled
        self._looks += 1
        if self._store.check(["parted/halt"]):
            text = bytes(self._store.get("parted/halt")).decode()
            at, _, self.why = text.partition(" ")
            self.halt_at = int(at)
            return self._look(step)
        keys = [f"parted/{r}" for r in range(self._world)]
        if self._store.check(keys):
            logs = [msgspec.json.decode(bytes(self._store.get(k)), type=list[Done]) for k in keys]
            why = difference(logs)
            if not why:
                self.settled = True
            elif self._rank == 0 and not self._said:
                self._said = True
                self._store.set("parted/halt", f"{step + AHEAD} {why}")
        elif self._looks >= LOOKS:
            self.settled = True
        return False


def difference(logs: Sequence[Sequence[Done]]) -> str:
    """The first step that two ranks carried out differently, in words; "" if there is none."""
    seen: dict[int, tuple[int, Done]] = {}
    for rank, log in enumerate(logs):
        for done in log:
            first, before = seen.setdefault(done.step, (rank, done))
            if (before.applied, before.lr_factor) != (done.applied, done.lr_factor):
                return (
                    f"step {done.step} was {_told(before)} on rank {first} and {_told(done)} on "
                    f"rank {rank}"
                )
    return ""


def _told(done: Done) -> str:
    rate = f" with learning rate x{done.lr_factor:g}" if done.lr_factor != 1.0 else ""
    return ("applied" if done.applied else "not applied") + rate

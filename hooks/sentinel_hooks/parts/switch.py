"""The switch: whether sentinel is in the loop of one run, asleep in it, or off, and why.

    switch = Switch("r7", on_error=link.count_error, host=host, council=council, outlets=outlets)
    switch.guard.run(place, body)         every hook body; see guard.py
    switch.listening()                    False: let everything pass unseen
    switch.asleep(place, body, *args)     the same, and our own doing is not watched by us
    switch.turn_off(why)                  for good: training goes on unprotected

It goes off when one place of ours fails again and again, unless what is lost by that can be spared
(TOLERATED). With several ranks none goes off alone: it asks for it, and all do at the next step.

Threads: the training thread; listening() may be asked from any.
Errors:  none gets out of guard.run() and asleep().
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from sentinel.core.types import Action, Severity
from sentinel_hooks.guard import Guard
from sentinel_hooks.outlets import Outlets, settled
from sentinel_hooks.ranks.council import Council
from sentinel_hooks.saving import Host

logger = logging.getLogger(__name__)

# What may fail again and again without the protection being gone.
TOLERATED = frozenset(
    {"self-check", "measure", "backward", "clip", "canary", "snapshot", "link", "detach", "ledger"}
    | {"batch_id", "norm_fn"}  # the user's own functions
)


class Switch:
    """On, asleep or off.

    Attributes:
        off: why nothing is watched any more; "" while it is.
        detached: the hooks are out, or another process's.
        guard: where errors of ours end.
    """

    def __init__(
        self,
        run: str,
        *,
        host: Host,
        on_error: Callable[[str], None],
        council: Council | None = None,
        outlets: Outlets | None = None,
    ) -> None:
        """On.

        Args:
            on_error: told the place of each error.
        """
        self._run = run
        self._host = host
        self._council = council
        self._outlets = outlets
        self._asleep = 0
        self.off = ""
        self.detached = False
        self.guard = Guard(run, on_error=on_error, on_broken=self._broken)

    @property
    def on(self) -> bool:
        """Neither off nor detached."""
        return not (self.off or self.detached)

    def listening(self) -> bool:
        """False while everything shall pass unseen: off, detached, or our own doing."""
        return not (self.off or self._asleep or self.detached)

    def asleep(self, where: str, body: Callable[..., Any], *args: Any) -> Any:
        """Run `body` guarded and with all of our own seams asleep."""
        self._asleep += 1
        try:
            with torch.no_grad():
                return self.guard.run(where, body, *args)
        finally:
            self._asleep -= 1

    @property
    def sleeping(self) -> bool:
        """Inside of asleep()."""
        return self._asleep > 0

    def turn_off(self, why: str) -> None:
        """Several ranks: all hear it at the same step, and each goes on without us."""
        if self.off:
            return
        self.off = why
        step = self._host.now.step
        self._tell()
        if self._council is not None:
            self._council.carried_out(step, Action.PROCEED.name, True, 1.0)
        logger.error(
            "sentinel switched itself off, training goes on unprotected run=%s step=%s why=%s",
            self._run,
            step,
            why,
        )

    def _broken(self, where: str) -> None:
        """Guard: it failed again and again at one place."""
        if self.off or where in TOLERATED or where.startswith("probe "):
            return
        if self._council is not None:
            self._council.want_off(self.guard.last)
            return
        self.off = f"sentinel failed at {where} again and again: {self.guard.last}"
        self._tell()
        logger.error(
            "sentinel switched itself off, training goes on unprotected run=%s why=%s",
            self._run,
            self.off,
        )

    def _tell(self) -> None:
        if self._outlets is not None:
            text = f"protection is off, training goes on: {self.off}"
            self._outlets.tell("off", Severity.CRITICAL, settled(self._host.now), text)

"""Keeps what sentinel owns in a Grafana as it should be, without ever waiting for that Grafana.

    keeper = Reconciler(connect, want)
    keeper.begin()                       a turn, in a thread of its own; returns at once
    keeper.up, keeper.left_alone         what the turns so far have found

A turn compares and writes what is missing, or was written by an earlier release. What somebody
has changed by hand is left alone and reported, unless `overwrite`; so is what a later release has
written (seal.py tells them apart). Several sidecars may keep the same Grafana: whoever comes
second finds nothing to do.

Trouble is logged once when it begins, and once when it is over; so is each thing that is left
alone. A turn that hangs keeps its thread, and no other begins: only this class waits.

Units:   `timer` gives monotonic seconds.
Threads: begin() from any one thread; turns in one thread, which ends with the process. Attributes
         are replaced whole, so that they may be read at any time.
Errors:  none; they are counted in `failures` by status ("0": no answer).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from sentinel.core.errors import SentinelError
from sentinel.dashboards import push
from sentinel.dashboards.grafana import GrafanaError
from sentinel.dashboards.push import Change, Plan, Wanted
from sentinel.dashboards.seal import Owner

logger = logging.getLogger(__name__)

STUCK_S = 120.0


class Port(push.Grafana, Protocol):
    """What a turn needs of dashboards.grafana.GrafanaPort."""

    def close(self) -> None: ...


class Reconciler:
    """See the module docstring.

    Attributes:
        up: whether Grafana answered, and took what was written, in the newest turn; None before
            the first has ended.
        trouble: why not; "" when all is well.
        left_alone: what differs and is not ours to change: {"dashboard sentinel-run": "edited"}.
        writes: how many things were written.
        failures: turns that failed, by HTTP status.
        turns: turns that have ended.
    """

    def __init__(
        self,
        connect: Callable[[], Port],
        want: Callable[[Port], Wanted],
        *,
        timer: Callable[[], float],
        overwrite: bool = False,
    ) -> None:
        """Make one.

        Args:
            want: what Grafana shall hold; may ask it, for its data source for example.
            overwrite: put back what was changed by hand, too.
        """
        self._connect = connect
        self._want = want
        self._timer = timer
        self._overwrite = overwrite
        self._status = ""  # of the trouble; "" while there is none
        self._thread: threading.Thread | None = None
        self._began = 0.0
        self.up: bool | None = None
        self.trouble = ""
        self.left_alone: Mapping[str, str] = {}
        self.writes = 0
        self.failures: Mapping[str, int] = {}
        self.turns = 0

    def begin(self) -> None:
        """Begin a turn, unless one is under way."""
        if self._thread is not None and self._thread.is_alive():
            waited = self._timer() - self._began
            if waited > STUCK_S:
                self._troubled("0", f"Grafana does not come to an end within {waited:.0f} s")
            return
        self._began = self._timer()
        self._thread = threading.Thread(target=self.turn, name="sentinel-grafana", daemon=True)
        self._thread.start()

    def turn(self) -> None:
        """Compare, and write what is to be written."""
        try:
            port = self._connect()
            try:
                self._turn(port)
            finally:
                port.close()
        except GrafanaError as error:
            self._troubled(str(error.status), str(error))
        except SentinelError as error:
            self._troubled("0", str(error))
        except Exception as error:  # whatever Grafana says: it is the next turn's affair
            logger.debug("a turn failed", exc_info=True)
            self._troubled("0", f"{type(error).__name__}: {error}")
        else:
            if self.trouble:
                logger.warning("Grafana is kept again")
            self.up, self.trouble, self._status = True, "", ""
        self.turns += 1

    def _turn(self, port: Port) -> None:
        plan = push.compare(port, self._want(port))
        mine, theirs = self._divided(plan)
        before, self.left_alone = self.left_alone, theirs
        for name in sorted(theirs.items() - before.items()):
            logger.warning("left alone in Grafana, though it differs what=%s why=%s", *name)
        for change in push.apply(port, mine):
            self.writes += 1
            logger.info("written in Grafana what=%s name=%s", change.what, change.name)

    def _divided(self, plan: Plan) -> tuple[Plan, dict[str, str]]:
        """What is written now, and what is left alone, with why."""
        mine: list[Change] = []
        theirs: dict[str, str] = {}
        for change in plan.changes:
            by_hand = change.owner is Owner.EDITED and self._overwrite
            if change.owner is Owner.OURS or by_hand:
                mine.append(change)
            else:
                theirs[f"{change.what} {change.name}"] = str(change.owner)
        return Plan(tuple(mine), plan.equal, plan.folder), theirs

    def _troubled(self, status: str, why: str) -> None:
        # The same trouble is told once, another one anew.
        if status != self._status:
            logger.warning("Grafana is not kept as it should be: %s", why)
        self.up, self.trouble, self._status = False, why, status
        self.failures = {**self.failures, status: self.failures.get(status, 0) + 1}

"""Between two steps: what is due at the safe point, and done there and nowhere else.

    between.settled(decision, executed, applied)     a step is over: what does it ask for?
    between.put_off(rollback)                        one that a process before had decided
    between.work(hearing)                            the safe point: do what is due

At most one of: the first snapshot, a rollback, a snapshot. Before it the ranks compare their
parameters where they may have parted, a restarted run's weights are recognised, the file PAUSE is
looked for, and saves in the background are asked how they ended.

With several ranks its collectives are entered whatever fails on one of them: work() may be called a
second time, and what is done already stays as it is.

Threads: the training thread, with our own seams asleep.
Errors:  those of what it does; the caller's guard ends them.
"""

from __future__ import annotations

from sentinel.core.types import Action, Decision
from sentinel_hooks.guard import Guard
from sentinel_hooks.ledger_file import fingerprint
from sentinel_hooks.parts.pausing import PauseFile
from sentinel_hooks.ranks.council import Council
from sentinel_hooks.saving import Saving
from sentinel_hooks.snapshots import shards
from sentinel_hooks.target import Target


class Between:
    """What is due between two steps of one run."""

    def __init__(
        self,
        target: Target,
        saving: Saving,
        pause: PauseFile,
        guard: Guard,
        council: Council | None = None,
    ) -> None:
        """Nothing is due but what saving itself knows of."""
        self._target = target
        self._saving = saving
        self._pause = pause
        self._guard = guard
        self._council = council
        self._snapshot = False
        self._restore: Decision | None = None
        self._put_off: tuple[int, str] | None = None

    @property
    def going_back(self) -> bool:
        """A rollback was decided, and is not done yet."""
        return self._restore is not None

    def settled(self, decision: Decision, executed: Action, applied: bool) -> None:
        """A step is over; asked twice for the same, it makes no difference."""
        self._snapshot = decision.take_snapshot and applied
        if executed is Action.ROLLBACK:
            self._restore = decision

    def put_off(self, rollback: tuple[int, str]) -> None:
        """Several ranks: (target, rule) of a rollback that the processes before had decided."""
        self._put_off = rollback

    def forget(self) -> None:
        """No rollback is due: this process is not the one that is watched."""
        self._restore = None

    def work(self, hearing: bool) -> None:
        """Do what is due.

        Args:
            hearing: the numbers of the last step are still on their way (late_reads.py).
        """
        saving, council = self._saving, self._council
        if council is not None:
            # After an evaluation parameters may still be gathered: nothing below reads those.
            self._guard.run("safe_point", shards.reshard, self._target.models)
            council.compare(self._digest)
        if saving.resume_due and (council is None or council.rank == 0):
            self._guard.run("ledger", saving.resume)
        if self._pause.due and not hearing:
            self._pause.look()
        saving.poll()
        if saving.first_due:
            saving.take_first()
        elif self._restore is not None:
            decision = self._restore
            if council is None:
                self._restore = None  # what was half done is not begun again
            saving.restore(decision)
            self._restore = None
        elif self._put_off is not None:
            saving.restore_deferred(*self._put_off)
            self._put_off = None
        elif self._snapshot and not hearing:  # else it would hold an unheard step
            self._snapshot = False
            saving.take()

    def _digest(self) -> bytes:
        return bytes.fromhex(fingerprint(self._target).partition("-")[2])

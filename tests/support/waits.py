"""How long each step waited, and how much of that the machine had no core for us.

    link = Metered(make_link(...))
    link.longest            the longest wait that is ours, in seconds

On a busy machine a thread that is ready may stand in the queue for a core for longer than any
deadline; no program can promise against that. The kernel counts it: the second number of
/proc/self/task/*/schedstat. What is left of a wait without it is ours, and can be asserted
strictly. All threads of this process count, since one that stands in the queue may hold Python's
lock. On an idle machine nothing is taken off.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sentinel.core.state import State
from sentinel.core.types import Decision, Observation, Source
from sentinel_hooks.link import Link


@dataclass(frozen=True, slots=True)
class Wait:
    """One step's wait, in seconds."""

    wall: float
    queued: float  # in which a thread of this process was ready and had no core

    @property
    def ours(self) -> float:
        return self.wall - self.queued


class Metered:
    """A link whose decide() is timed; everything else is the link's own."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.waits: list[Wait] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def decide(
        self, observation: Observation, own: Decision, state: State
    ) -> tuple[Decision, Source]:
        queued, start = queued_s(), time.perf_counter()
        try:
            return self._link.decide(observation, own, state)
        finally:
            wall = time.perf_counter() - start
            self.waits.append(Wait(wall, since(queued)))

    @property
    def longest(self) -> float:
        """The longest wait that is ours."""
        worst = max(self.waits, key=lambda wait: wait.ours)
        wall = max(self.waits, key=lambda wait: wait.wall)
        print(
            f"longest wait: ours {worst.ours * 1e3:.1f} ms, on the wall {wall.wall * 1e3:.1f} ms "
            f"(all threads: {wall.queued * 1e3:.1f} ms without a core)"
        )
        return worst.ours

    @property
    def mean(self) -> float:
        """The mean wait that is ours."""
        return sum(wait.ours for wait in self.waits) / len(self.waits)


def queued_s() -> dict[str, float]:
    """Seconds that each thread of this process has been ready without a core, so far."""
    found = {}
    for thread in os.listdir("/proc/self/task"):
        try:
            text = Path(f"/proc/self/task/{thread}/schedstat").read_text()
            found[thread] = int(text.split()[1]) * 1e-9
        except (OSError, IndexError):
            continue  # it has ended
    return found


def since(before: dict[str, float]) -> float:
    """Seconds that the threads which are there now have been so since `before`."""
    return sum(now - before.get(thread, 0.0) for thread, now in queued_s().items())

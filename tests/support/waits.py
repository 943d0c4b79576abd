"""How long each step waited, and how much of that the machine had no core for us.

    link = Metered(make_link(...))
    link.longest            the longest wait that is ours, in seconds

On a busy machine a thread that is ready may stand in the queue for a core for longer than any
deadline; no program can promise against that. The kernel counts it: the second number of
/proc/self/task/*/schedstat. What is left of a wait without it is ours, and can be asserted
strictly. All threads of this process count, since one that stands in the queue may hold Python's
lock. On an idle machine nothing is taken off.

A virtual machine may stand still as a whole, which that number does not show. So another process,
which has nothing to do with us, sleeps 10 ms at a time and says when it overslept: such moments
are taken off too.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sentinel.core.state import State
from sentinel.core.types import Decision, Observation, Source
from sentinel_hooks.link import Link
from sentinel_hooks.runqueue import RunQueue


@dataclass(frozen=True, slots=True)
class Wait:
    """One step's wait, in seconds."""

    wall: float
    queued: float  # in which a thread of this process was ready and had no core

    theirs: float = 0.0  # in which the sidecar was ready and had no core, if its pid was given

    start: float = 0.0  # perf_counter, which all processes share

    @property
    def ours(self) -> float:
        return self.wall - max(self.queued, stood_still_s(self.start, self.start + self.wall))


_SLEEPER = """
import time
from collections.abc import Callable
while True:
    before = time.perf_counter()
    time.sleep(0.01)
    now = time.perf_counter()
    if now - before > 0.03:
        print(before + 0.01, now, flush=True)
"""
_stalls: list[str] = []


def watch_the_machine() -> None:
    """Start the other process, once."""
    if _stalls:
        return
    handle, path = tempfile.mkstemp(prefix="stalls-")
    process = subprocess.Popen([sys.executable, "-c", _SLEEPER], stdout=handle)
    os.close(handle)
    _stalls.append(path)

    def end() -> None:
        process.kill()
        process.wait()
        os.unlink(path)

    atexit.register(end)


def stood_still_s(start: float, end: float) -> float:
    """Seconds between two moments in which the other process overslept."""
    if not _stalls or end - start < 0.1:
        return 0.0
    rows = [line.split() for line in Path(_stalls[0]).read_text().splitlines()]
    spans = [(float(a), float(b)) for a, b in (row for row in rows if len(row) == 2)]
    return sum(max(0.0, min(b, end) - max(a, start)) for a, b in spans)


class Metered:
    """A link whose decide() is timed; everything else is the link's own.

    Args:
        sidecar: pid of its sidecar. The breaker then takes off what that stood in the queue too,
            so that a crowded machine is not taken for a slow sidecar; on an idle one it is 0.
    """

    def __init__(self, link: Link, sidecar: int | None = None) -> None:
        self._link = link
        self._sidecar = sidecar
        self.waits: list[Wait] = []
        watch_the_machine()
        if sidecar is not None:
            link._queue = BothQueues(sidecar)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def decide(
        self, observation: Observation, own: Decision, state: State
    ) -> tuple[Decision, Source]:
        theirs = queued_s(self._sidecar) if self._sidecar else {}
        queued, start = queued_s(), time.perf_counter()
        try:
            return self._link.decide(observation, own, state)
        finally:
            wall = time.perf_counter() - start
            lost = since(theirs, self._sidecar) if self._sidecar else 0.0
            self.waits.append(Wait(wall, since(queued), lost, start))

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


class BothQueues:
    """A RunQueue that adds the sidecar's own."""

    def __init__(self, sidecar: int) -> None:
        self._sidecar = sidecar
        self._own = RunQueue()

    def waited_s(self) -> float:
        return self._own.waited_s() + sum(queued_s(self._sidecar).values())

    def close(self) -> None:
        self._own.close()


def queued_s(pid: int | None = None) -> dict[str, float]:
    """Seconds that each thread of a process (this one) has been ready without a core, so far."""
    tasks = f"/proc/{pid or 'self'}/task"
    found = {}
    for thread in os.listdir(tasks):
        try:
            text = Path(f"{tasks}/{thread}/schedstat").read_text()
            found[thread] = int(text.split()[1]) * 1e-9
        except (OSError, IndexError):
            continue  # it has ended
    return found


def since(before: dict[str, float], pid: int | None = None) -> float:
    """Seconds that the threads which are there now have been so since `before`."""
    return sum(now - before.get(thread, 0.0) for thread, now in queued_s(pid).items())


def until(holds: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait for what another thread or process does; AssertionError when it does not come."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.005)

"""Live events: what happens, told to whoever listens, without ever waiting for them.

    hub.publish("decision", "r7", {...})               from the event loop; never blocks
    hub.steps("r7", row)                               only kept when somebody listens
    listener = hub.listen(run="r7", after="9x-41")     then: await listener.next(15.0)

Events are numbered "<boot>-<n>"; the newest RING of them are kept, so that a client that comes
back with Last-Event-ID misses nothing. One that missed more, or comes from before a restart, is
told `lost` and reads the state anew. Steps are no events of their own: a listener gets the rows
since its last turn in one `steps`, which has no number, since the series holds them.

Threads: the event loop's.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass
from typing import Any

RING = 2048
QUEUE = 256  # events that wait for one client
ROWS = 512  # rows of steps that wait for one client, each run
MOST_LISTENERS = 64


@dataclass(frozen=True, slots=True)
class Event:
    """One of them; `id` is "" for those that are not numbered."""

    id: str
    kind: str
    run: str
    data: Any


class Listener:
    """One client's view: a bounded queue, and the rows of steps since it last looked."""

    def __init__(self, run: str | None) -> None:
        self.run = run
        self.lost = 0
        self.over = False  # its client has to come in anew
        self._events: deque[Event] = deque()
        self._rows: dict[str, deque[Any]] = {}
        self._wake = asyncio.Event()

    def wants(self, run: str) -> bool:
        """Whether it listens to that run."""
        return self.run is None or self.run == run

    def put(self, event: Event) -> None:
        """Queue an event; the oldest makes room."""
        if len(self._events) >= QUEUE:
            self._events.popleft()
            self.lost += 1
        self._events.append(event)
        self._wake.set()

    def row(self, run: str, row: Any) -> None:
        """Note a step."""
        rows = self._rows.get(run)
        if rows is None:
            rows = self._rows[run] = deque(maxlen=ROWS)
        rows.append(row)
        self._wake.set()

    async def next(self, timeout_s: float) -> list[Event]:
        """What has come since the last call; empty after `timeout_s` of silence."""
        if not self._wake.is_set():
            try:
                await asyncio.wait_for(self._wake.wait(), timeout_s)
            except TimeoutError:
                return []
        self._wake.clear()
        found = []
        if self.lost:
            found.append(Event("", "lost", self.run or "", {"events": self.lost}))
            self.lost = 0
        found += self._events
        self._events.clear()
        rows, self._rows = self._rows, {}
        found += [Event("", "steps", run, {"rows": list(kept)}) for run, kept in rows.items()]
        return found


class Hub:
    """See the module docstring."""

    def __init__(self, boot: str) -> None:
        """`boot` differs between any two starts."""
        self._boot = boot
        self._number = itertools.count(1)
        self._ring: deque[Event] = deque(maxlen=RING)
        self.listeners: set[Listener] = set()

    def publish(self, kind: str, run: str, data: Any) -> None:
        """Tell everybody who listens to that run."""
        event = Event(f"{self._boot}-{next(self._number)}", kind, run, data)
        self._ring.append(event)
        for listener in self.listeners:
            if listener.wants(run):
                listener.put(event)

    def steps(self, run: str, row: Any) -> None:
        """Tell of one step."""
        for listener in self.listeners:
            if listener.wants(run):
                listener.row(run, row)

    def listen(self, run: str | None, after: str = "") -> Listener:
        """A new listener; what came after event `after` is in its queue already."""
        listener = Listener(run)
        if after:
            missed = self._after(after)
            if missed is None:
                listener.lost = 1
                listener._wake.set()
            else:
                for event in missed:
                    if listener.wants(event.run):
                        listener.put(event)
        self.listeners.add(listener)
        return listener

    def dismiss(self) -> None:
        """Everybody's stream ends; who may, comes back and misses nothing."""
        for listener in self.listeners:
            listener.over = True
            listener._wake.set()

    def forget(self, listener: Listener) -> None:
        """It has gone."""
        self.listeners.discard(listener)

    def _after(self, id_: str) -> list[Event] | None:
        """The events after that one; None when they are not all here any more."""
        boot, _, number = id_.rpartition("-")
        if boot != self._boot or not number.isdigit():
            return None
        first = int(self._ring[0].id.rpartition("-")[2]) if self._ring else 1
        if int(number) + 1 < first:
            return None
        return [e for e in self._ring if int(e.id.rpartition("-")[2]) > int(number)]

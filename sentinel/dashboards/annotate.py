"""Marks in Grafana for what was done to a run, written without ever holding up who reports it.

    writer = writer_from(os.environ)           # None when no Grafana is configured
    writer.acted(run="r7", step=412, action=Action.ROLLBACK, rule="loss_spike", reason=..., now=now)
    writer.decided("r7", row)                  # the same, from what the sidecar tells of a decision
    writer.close()

A call is cheap and takes every action; PROCEED is ignored. A thread of its own writes. While
Grafana cannot be reached it tries again, ever more slowly, and the queue fills; when it is full
the oldest mark goes and is counted. A mark that Grafana refuses is dropped at once. Trouble is
logged once when it begins and once when it is over.

Units:   `now` in Unix seconds.
Threads: acted() and close() from any thread; one worker, which ends with the process.
Errors:  none from acted(); writer_from() raises ConfigError for a half configuration.
"""

from __future__ import annotations

import html
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sentinel.core.types import Action
from sentinel.dashboards.grafana import (
    URL_VARIABLE,
    GrafanaError,
    GrafanaPort,
    Target,
)

logger = logging.getLogger(__name__)

CAPACITY = 256
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0

_WORDS = {Action.SKIP_STEP: "skip", Action.ROLLBACK: "rollback", Action.HALT: "halt"}


@dataclass(frozen=True, slots=True)
class Mark:
    """One annotation."""

    at: float
    text: str
    tags: tuple[str, ...]


class Sink(Protocol):
    """What a worker needs of dashboards.grafana.GrafanaPort."""

    def annotate(self, at: float, text: str, tags: Sequence[str]) -> None: ...
    def close(self) -> None: ...


class AnnotationWriter:
    """See the module docstring.

    Attributes:
        written, dropped: how many marks were written, and how many will never be.
    """

    def __init__(
        self,
        connect: Callable[[], Sink],
        *,
        capacity: int = CAPACITY,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        self._connect = connect
        self._first_pause_s = first_pause_s
        self._capacity = capacity
        self._queue: deque[Mark] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._in_trouble = False
        self.written = 0
        self.dropped = 0

    def acted(
        self, *, run: str, step: int, action: Action, rule: str, reason: str, now: float
    ) -> None:
        """Note what was done at a step; returns at once."""
        word = _WORDS.get(action)
        if word is None:
            return
        # Grafana shows an annotation's text as HTML.
        about = html.escape(reason or rule, quote=False)
        mark = Mark(
            now,
            f"<b>{word}</b> at step {step}: {about}",
            ("sentinel", word, f"rule:{rule}", f"run:{run}"),
        )
        with self._changed:
            if self._closing:
                return
            if len(self._queue) >= self._capacity:
                self._queue.popleft()
                self.dropped += 1
            self._queue.append(mark)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="sentinel-annotations", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def decided(self, run: str, row: Mapping[str, Any]) -> None:
        """The same, from the sidecar's row of an executed decision: `Settings.on_decision`."""
        self.acted(
            run=run,
            step=row["step"],
            action=Action[row["action"].upper()],
            rule=row["rule"],
            reason=row["reason"],
            now=row["at"],
        )

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what is waiting if that is quick, then stop."""
        with self._changed:
            self._closing = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    # ---- the worker -----------------------------------------------------------------

    def _work(self) -> None:
        sink: Sink | None = None
        pause = self._first_pause_s
        try:
            while True:
                with self._changed:
                    while not self._queue and not self._closing:
                        self._changed.wait()
                    if not self._queue:
                        return
                    mark = self._queue.popleft()
                try:
                    sink = sink or self._connect()
                    sink.annotate(mark.at, mark.text, mark.tags)
                except GrafanaError as error:
                    self._trouble(error)
                    if not error.transient:
                        self.dropped += 1
                    elif not self._put_back(mark, pause):
                        return
                    else:
                        pause = min(pause * 2, LONGEST_PAUSE_S)
                except Exception as error:  # noqa: BLE001 (a mark is never worth a crash)
                    self._trouble(error)
                    self.dropped += 1
                else:
                    self.written += 1
                    pause = self._first_pause_s
                    if self._in_trouble:
                        self._in_trouble = False
                        logger.info("annotations are written again dropped=%s", self.dropped)
        finally:
            if sink is not None:
                sink.close()

    def _put_back(self, mark: Mark, pause: float) -> bool:
        """Keep it for later and wait; False when there is no later."""
        with self._changed:
            if not self._closing:
                if len(self._queue) < self._capacity:
                    self._queue.appendleft(mark)
                else:
                    self.dropped += 1
                self._changed.wait_for(lambda: self._closing, pause)
                return True
            self.dropped += 1 + len(self._queue)
            self._queue.clear()
            return False

    def _trouble(self, error: Exception) -> None:
        if not self._in_trouble:
            self._in_trouble = True
            logger.warning("annotations cannot be written: %s", error)


def writer_from(environment: Mapping[str, str]) -> AnnotationWriter | None:
    """A writer for the Grafana that the environment names; None when it names none.

    Raises:
        ConfigError: a URL without a usable token.
        GrafanaError: grafana-api is not installed.
    """
    if not environment.get(URL_VARIABLE):
        return None
    target = Target.from_environment(environment)
    GrafanaPort(target).close()  # what is missing shows now, not at the first rollback
    return AnnotationWriter(lambda: GrafanaPort(target))

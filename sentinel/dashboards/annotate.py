"""Marks in Grafana for what was done to a run, written without ever holding up who reports it.

    writer = writer_from(os.environ)           # None when no Grafana is configured
    writer.acted(run="r7", step=412, action=Action.ROLLBACK, rule="loss_spike", reason=..., now=now)
    writer.decided("r7", row, key=41)          # the same, from what the sidecar tells of a decision
    writer.close()

A call is cheap and takes every action; PROCEED is ignored. A thread of its own writes. While
Grafana cannot be reached, or takes no token of ours, it tries again, ever more slowly, and the
queue fills; when it is full the oldest mark goes. A mark that Grafana refuses for its own sake is
dropped at once. Trouble is logged once when it begins and once when it is over.

Each mark once: after a request that failed nobody knows whether it was carried out, so that
Grafana is asked before the mark is written again. Likewise for a mark that an earlier process may
have written (`again`). A mark with a key is somebody else's to remember: `on_done` is told the key
when it is written or refused, and of one that the queue had no room for it is not told.

Units:   `now` in Unix seconds.
Threads: acted() and close() from any thread; one worker, which ends with the process.
Errors:  none from acted(); writer_from() raises ConfigError for a half configuration.
"""

from __future__ import annotations

import html
import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from sentinel.core.errors import ConfigError
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

# About the mark itself. Whatever else it says may be over, or be mended, some day.
_FOR_ITS_OWN_SAKE = (400, 409, 412, 413, 422)
_WORDS = {Action.SKIP_STEP: "skip", Action.ROLLBACK: "rollback", Action.HALT: "halt"}


@dataclass(frozen=True, slots=True)
class Mark:
    """One annotation."""

    at: float
    text: str
    tags: tuple[str, ...]
    key: Hashable = None
    again: bool = False  # it may be there already


class Sink(Protocol):
    """What a worker needs of dashboards.grafana.GrafanaPort."""

    def annotated(self, at: float, text: str, tags: Sequence[str]) -> bool: ...
    def annotate(self, at: float, text: str, tags: Sequence[str]) -> None: ...
    def close(self) -> None: ...


class AnnotationWriter:
    """See the module docstring.

    Attributes:
        written, dropped: how many marks were written, and how many will never be by this writer.
        trouble: why none is written now; "" when nothing is wrong.
        on_done: told of the key of a mark that needs no more work; from the worker's thread.
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
        self._keys: set[Hashable] = set()  # in the queue or in work
        self.trouble = ""
        self.written = 0
        self.dropped = 0
        self.on_done: Callable[[Any], None] = lambda key: None

    @property
    def waiting(self) -> int:
        """Marks in the queue."""
        return len(self._queue)

    @property
    def room(self) -> int:
        """How many more the queue takes without dropping any."""
        return self._capacity - len(self._queue)

    def acted(
        self,
        *,
        run: str,
        step: int,
        action: Action,
        rule: str,
        reason: str,
        now: float,
        key: Hashable = None,
        again: bool = False,
    ) -> None:
        """Note what was done at a step; returns at once. A key that waits already changes nothing.

        Args:
            key: what on_done is told; None for nothing.
            again: an earlier process may have written it.
        """
        word = _WORDS.get(action)
        if word is None:
            return
        # Grafana shows an annotation's text as HTML.
        about = html.escape(reason or rule, quote=False)
        mark = Mark(
            now,
            f"<b>{word}</b> at step {step}: {about}",
            ("sentinel", word, f"rule:{rule}"[:100], f"run:{run}"[:100]),
            key,
            again,
        )
        with self._changed:
            if self._closing or key in self._keys:
                return
            if len(self._queue) >= self._capacity:
                self._drop(self._queue.popleft())
            self._queue.append(mark)
            if key is not None:
                self._keys.add(key)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="sentinel-annotations", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def decided(
        self, run: str, row: Mapping[str, Any], *, key: Hashable = None, again: bool = False
    ) -> None:
        """The same, from the sidecar's row of an executed decision."""
        self.acted(
            run=run,
            step=row["step"],
            action=Action[row["action"].upper()],
            rule=row["rule"],
            reason=row["reason"],
            now=row["at"],
            key=key,
            again=again,
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
                    if not (mark.again and sink.annotated(mark.at, mark.text, mark.tags)):
                        sink.annotate(mark.at, mark.text, mark.tags)
                except (GrafanaError, ConfigError) as error:
                    self._trouble(error)
                    _closed(sink)
                    sink = None  # the next one reads the token anew
                    if isinstance(error, GrafanaError) and error.status in _FOR_ITS_OWN_SAKE:
                        self._done(mark, written=False)
                    elif not self._put_back(replace(mark, again=True), pause):
                        return
                    else:
                        pause = min(pause * 2, LONGEST_PAUSE_S)
                except Exception as error:  # noqa: BLE001 (a mark is never worth a crash)
                    self._trouble(error)
                    self._done(mark, written=False)
                else:
                    self._done(mark, written=True)
                    pause = self._first_pause_s
                    if self.trouble:
                        self.trouble = ""
                        logger.info("annotations are written again dropped=%s", self.dropped)
        finally:
            _closed(sink)

    def _put_back(self, mark: Mark, pause: float) -> bool:
        """Keep it for later and wait; False when there is no later."""
        with self._changed:
            if not self._closing:
                if len(self._queue) < self._capacity:
                    self._queue.appendleft(mark)
                else:
                    self._drop(mark)
                self._changed.wait_for(lambda: self._closing, pause)
                return True
            self.dropped += sum(m.key is None for m in (mark, *self._queue))
            self._queue.clear()
            return False

    def _done(self, mark: Mark, *, written: bool) -> None:
        """No more work for it."""
        if mark.key is not None:
            self.on_done(mark.key)
        with self._changed:
            self._keys.discard(mark.key)
            self.written += written
            self.dropped += not written

    def _drop(self, mark: Mark) -> None:
        """No room; under the lock. Who gave it a key brings it again."""
        self._keys.discard(mark.key)
        self.dropped += mark.key is None

    def _trouble(self, error: Exception) -> None:
        if not self.trouble:
            logger.warning("annotations cannot be written: %s", error)
        self.trouble = str(error)


def _closed(sink: Sink | None) -> None:
    if sink is not None:
        sink.close()


def writer_from(
    environment: Mapping[str, str], *, url: str = "", token_file: str = ""
) -> AnnotationWriter | None:
    """A writer for the Grafana that arguments or environment name; None when they name none.

    Raises:
        ConfigError: a URL without a usable token.
        GrafanaError: grafana-api is not installed.
    """
    connect = connector(environment, url=url, token_file=token_file)
    return None if connect is None else AnnotationWriter(connect)


def connector(
    environment: Mapping[str, str], *, url: str = "", token_file: str = ""
) -> Callable[[], GrafanaPort] | None:
    """How to reach Grafana; each call reads the token anew. See writer_from()."""
    if not (url or environment.get(URL_VARIABLE)):
        return None

    def connect() -> GrafanaPort:
        return GrafanaPort(Target.from_environment(environment, url=url, token_file=token_file))

    connect().close()  # what is missing shows now, not at the first rollback
    return connect

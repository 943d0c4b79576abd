"""Outlets: what a run tells the outside world when no sidecar does.

    outlets = Outlets.of(run="r7", run_dir=Path("sentinel-runs"), textfile=page, webhook=url)
    outlets.step(observation, decision, state)     at every settled step
    outlets.moved(before, state)                   incidents that fire or end
    outlets.unguarded(decision)                    a rollback that is due and cannot be
    outlets.tell("rollback", severity, step, text) something that a person wants to hear of
    outlets.close("finished", state)

A .prom file in run_dir, for node_exporter's textfile collector (--collector.textfile.directory),
written anew every TEXTFILE_S; and one webhook, which is posted a small JSON object for each thing
that happened (its "text" is what chat services show). One thread of its own does all of it: the
training thread hands over references.

Threads: step(), moved(), unguarded(), tell() and close() are the training thread's.
Units:   seconds; timestamps are Unix seconds.
Errors:  a disk or a receiver that fails is told once in the log; training never waits for either.
         The webhook's address may hold a secret: only its host is ever logged.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import http.client
import json
import logging
import os
import ssl
import threading
import urllib.parse
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sentinel.core.errors import ConfigError
from sentinel.core.exposition import Textfile
from sentinel.core.state import Ledger, State
from sentinel.core.types import Action, Decision, IncidentState, Observation, Severity

logger = logging.getLogger(__name__)

WEBHOOK_VARIABLE = "SENTINEL_WEBHOOK"
TEXTFILE_S = 15.0
OLD_S = 24 * 3600.0  # files of runs that ended that long ago are taken away
POST_S = 5.0
TRIES = 3
QUEUE = 64
CLOSE_S = 3.0
NO_SNAPSHOT, BUDGET_SPENT = "no_snapshot", "budget_spent"  # the engine's findings


def webhook_address(given: str | None) -> str:
    """The argument, else the environment's, checked; "" for none.

    Raises:
        ConfigError: it is no http or https address.
    """
    source, url = "webhook", given
    if url is None:
        source, url = f"${WEBHOOK_VARIABLE}", os.environ.get(WEBHOOK_VARIABLE, "")
    if not url:
        return ""
    parts = urllib.parse.urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"{source} must be an address like https://host/path that takes a POST of JSON, got "
            f"{_kind_of(url)}; leave it out for none"
        )
    return str(url)


def settled(state: State) -> int:
    """The last step that is over: `state.step` is the one that comes next."""
    return max(state.step - 1, 0)


class Outlets:
    """The outlets of one run; none of them is open in a process that was forked."""

    def __init__(self, run: str, path: Path | None, page: Textfile | None, webhook: str) -> None:
        """Use of()."""
        self._run = run
        self._path = path
        self._page = page
        self._webhook = webhook
        self._wake = threading.Condition()
        self._queue: deque[dict[str, Any]] = deque()
        self._dropped = 0
        self._state: State | None = None
        self._run_state = "running"
        self._off = ""
        self._known: dict[tuple[int, int], IncidentState] = {}
        self._errors: dict[str, int] = {}
        self._says: Callable[[], tuple[str, str]] = lambda: ("", "")
        self._closing = False
        self._trouble: set[str] = set()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._work, name="sentinel-outlets", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, *, run: str, run_dir: Path, page: Textfile | None, webhook: str) -> Outlets | None:
        """Those that are wanted; None for none."""
        if page is None and not webhook:
            return None
        name = urllib.parse.quote(run, safe="")
        return cls(
            run, run_dir / f"sentinel-{name}.prom" if page is not None else None, page, webhook
        )

    # ---------------------------------------------------------------- the training thread

    def ask(self, says: Callable[[], tuple[str, str]]) -> None:
        """Whom to ask for the protection, at every writing of the file; see link.Says."""
        self._says = says

    def step(
        self, observation: Observation, decision: Decision, state: State, errors: dict[str, int]
    ) -> None:
        """A step was settled."""
        self._state, self._errors = state, errors
        if self._page is not None:
            self._page.note(observation, decision, _now())

    def moved(self, before: Ledger, state: State) -> None:
        """The ledger has moved: incidents that began to fire or ended are told."""
        ledger, step = state.ledger, settled(state)
        if not self._webhook or ledger.incidents is before.incidents:
            return
        for incident in ledger.incidents:
            key = (incident.number, incident.opened)
            was, now = self._known.get(key), incident.state
            if was is now or incident.severity is Severity.INFO:
                continue
            self._known[key] = now
            if now is IncidentState.FIRING:
                self.tell("incident", incident.severity, step, incident.summary)
            elif now is IncidentState.RESOLVED and was is not None and incident.fired is not None:
                text = f"over: {incident.summary}"
                self.tell("resolved", Severity.INFO, step, text)
        self._known = {
            k: v
            for k, v in self._known.items()
            if k in {(i.number, i.opened) for i in ledger.incidents}
        }

    def unguarded(self, decision: Decision) -> None:
        """A step was decided: is there a rollback that cannot be, or will none be done any more?

        The incident is open for long then, and nothing of it would be told.
        """
        found = {finding.key for finding in decision.findings}
        if NO_SNAPSHOT in found:
            text = "a rollback was due, and there is no usable snapshot to go back to"
            self.tell("rollback_failed", Severity.CRITICAL, decision.step, text)
        if BUDGET_SPENT in found and decision.action is not Action.HALT:  # that is told by itself
            text = (
                "the rollback budget is spent: no rollback is done any more, only steps that are "
                "not finite and extreme norms are still skipped; a person is needed"
            )
            self.tell("off", Severity.CRITICAL, decision.step, text)

    def tell(self, event: str, severity: Severity, step: int, text: str) -> None:
        """One thing that happened; `step` is the last that was settled, as incidents list it."""
        if not self._webhook or os.getpid() != self._pid:
            return
        told = {
            "schema": 1,
            "run": self._run,
            "step": step,
            "event": event,
            "severity": str(severity),
            "at": _now(),
            "text": f"sentinel {self._run} step {step}: {event}: {text}",
        }
        with self._wake:
            if len(self._queue) >= QUEUE:
                self._queue.popleft()
                self._dropped += 1
            self._queue.append(told)
            self._wake.notify()

    def close(self, how: str, state: State) -> None:
        """Say the last, and end; waits a moment for it."""
        if self._closing or os.getpid() != self._pid:
            return
        self._state, self._run_state = state, how
        if how == "halted":
            self.tell("halted", Severity.CRITICAL, settled(state), "training was stopped")
        elif how == "lost":
            text = "an exception ended training"
            self.tell("crashed", Severity.CRITICAL, settled(state), text)
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(CLOSE_S)

    # ---------------------------------------------------------------- the thread

    def _work(self) -> None:
        self._take_old_away()
        while True:
            with self._wake:
                if not self._queue and not self._closing:
                    self._wake.wait(TEXTFILE_S)
                told = list(self._queue)
                self._queue.clear()
                closing = self._closing
            if self._path is not None:
                self._guarded("textfile", self._write)
            for one in told:
                self._guarded("webhook", self._post, one)
            if closing:
                return

    def _guarded(self, what: str, body: Any, *args: Any) -> None:
        try:
            body(*args)
        except Exception as error:  # noqa: BLE001  nobody else would hear of it
            if what not in self._trouble:
                self._trouble.add(what)
                logger.warning(
                    "the %s fails run=%s reason=%s: %s",
                    what,
                    self._run,
                    type(error).__name__,
                    _harmless(error, self._webhook),
                )
        else:
            self._trouble.discard(what)

    def _write(self) -> None:
        if self._page is None or self._path is None:
            return
        text = self._page.render(
            self._state,
            run_state=self._run_state,
            now=_now(),
            gauges=self._page.observation.scalars if self._page.observation is not None else None,
            internal_errors=self._errors,
            said=self._says()[0],
        )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # node_exporter reads *.prom only: a half-written one has another name.
        fresh = self._path.with_suffix(".prom.new")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(self._path)

    def _take_old_away(self) -> None:
        if self._path is None:
            return
        with contextlib.suppress(OSError):
            for other in self._path.parent.glob("sentinel-*.prom"):
                if other != self._path and _now() - other.stat().st_mtime > OLD_S:
                    other.unlink()

    def _post(self, told: dict[str, Any]) -> None:
        if self._dropped:
            told["dropped"], self._dropped = self._dropped, 0
        body = json.dumps(told).encode()
        parts = urllib.parse.urlsplit(self._webhook)
        last: Exception | None = None
        for _ in range(TRIES):
            connection: http.client.HTTPConnection
            if parts.scheme == "https":
                connection = http.client.HTTPSConnection(
                    parts.hostname or "",
                    parts.port,
                    timeout=POST_S,
                    context=ssl.create_default_context(),
                )
            else:
                connection = http.client.HTTPConnection(
                    parts.hostname or "", parts.port, timeout=POST_S
                )
            try:
                target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
                headers = {"content-type": "application/json", "user-agent": "torch-sentinel"}
                connection.request("POST", target, body, headers)
                answer = connection.getresponse()
                answer.read()
                if answer.status < 500:
                    if answer.status >= 400:
                        raise ValueError(f"{parts.hostname} answered {answer.status}")
                    return
                last = ValueError(f"{parts.hostname} answered {answer.status}")
            except (OSError, http.client.HTTPException) as error:
                last = error
            finally:
                connection.close()
        if last is not None:
            raise last


def _kind_of(url: Any) -> str:
    """What was given, without the secret that an address may hold."""
    if not isinstance(url, str):
        return repr(url)
    scheme, found, _ = url.partition("://")
    return f"{scheme}://..." if found else "one without https://"


def _now() -> float:
    return dt.datetime.now(dt.UTC).timestamp()


def _harmless(error: Exception, address: str) -> str:
    text = str(error)
    return text.replace(address, "(its address)") if address else text

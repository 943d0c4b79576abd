"""Who writes a run: a process registers, and any other is kept out while it lives.

    writers.register(message, now) -> Registered
    old = writers.admit(name, incarnation, fence, now)      for whoever registers otherwise
    writers.enter(new, old, again=..., first=...)

The highest fence writes: a process that was replaced is refused, and so is a second one while the
first is alive. The same process may register again, for example after its connection was cut; what
is known of it goes on. A sidecar of another engine version only records.

Units:   `now` in Unix seconds.
Errors:  RefusedError: a bad name, no room, or another live process; ProtocolError for a message
         that makes no sense.
"""

from __future__ import annotations

import logging

from sentinel.core.errors import ProtocolError
from sentinel.core.policy import Policy
from sentinel.core.state import ENGINE_VERSION
from sentinel.sidecar.runs.bounds import (
    MOST_INFO,
    MOST_NAME,
    apart,
    check_layers,
    check_step,
)
from sentinel.sidecar.runs.chronicle import Chronicle
from sentinel.sidecar.runs.recording import Recording
from sentinel.sidecar.runs.refusal import RefusedError
from sentinel.sidecar.runs.registry import Registry
from sentinel.sidecar.runs.run import Run
from sentinel.sidecar.settings import Settings
from sentinel.wire import codec, messages
from sentinel.wire.messages import Register, Registered

logger = logging.getLogger(__name__)


class Writers:
    """See the module docstring."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        recording: Recording,
        chronicle: Chronicle,
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._recording = recording
        self._chronicle = chronicle
        self._handed = None if settings.policy is None else codec.encode_policy(settings.policy)

    def register(self, message: Register, now: float) -> Registered:
        """Take a process as the writer of its run.

        Raises:
            RefusedError: a bad name, no room, or another live process writes this run.
        """
        reason = ""
        if message.engine_version != ENGINE_VERSION:
            reason = (
                f"the trainer runs engine version {message.engine_version}, this sidecar "
                f"{ENGINE_VERSION}: recording only; install the same torch-sentinel on both sides"
            )
        check_layers(message.layers)
        if not 1 <= len(message.incarnation) <= 128 or "\0" in message.incarnation:
            raise ProtocolError("incarnation must have 1 to 128 characters, none of them NUL")
        check_step("fence", message.fence)
        check_step("first", message.first)
        data = message.policy if message.pinned or self._handed is None else self._handed
        try:
            policy = codec.decode_policy(data)
        except ProtocolError as error:
            policy = self._settings.policy or Policy()
            reason = reason or f"{error}: recording only"
        old = self.admit(message.run, message.incarnation, message.fence, now)
        again = old is not None and old.incarnation == message.incarnation
        new = Run(
            name=message.run,
            incarnation=message.incarnation,
            fence=next_fence(old, message.fence, again=again),
            policy=policy,
            policy_bytes=data,
            policy_hash=codec.digest(data),
            engine_version=message.engine_version,
            layers=apart(message.layers),
            info={k[:MOST_NAME]: v[:MOST_NAME] for k, v in list(message.info.items())[:MOST_INFO]},
            registered=now,
            max_layers=self._settings.max_layers,
            reason=reason,
            last_report=now,
            last_heard=now,
        )
        self.enter(new, old, again=again, first=message.first)
        return Registered(
            run=new.name,
            fence=new.fence,
            policy=data,
            decides=new.decides,
            reason=reason,
        )

    def admit(self, name: str, incarnation: str, fence: int, now: float) -> Run | None:
        """The run that is replaced, None if there is none; raises RefusedError."""
        if not messages.RUN_NAME.fullmatch(name):
            raise RefusedError(
                "malformed",
                "run must be 1 to 128 letters, digits and ._:@+- and start with a letter or "
                f"digit, got {name!r}",
                422,
            )
        run = self._registry.find(name)
        if run is None:
            self._registry.make_room()
            return None
        if run.incarnation != incarnation and run.live(now, self._settings.lost_after_s):
            who = ", ".join(f"{key} {value}" for key, value in sorted(run.info.items()))
            detail = (
                f"run {name!r} is written by another live process ({who or run.incarnation}), "
                f"last heard {now - run.last_heard:.1f} s ago; give this one another run_id, or "
                f"wait until the other has been silent for "
                f"{run.patience(self._settings.lost_after_s):g} s"
            )
            self._chronicle.refused(run, incarnation, detail)
            raise RefusedError("fenced", detail)
        if run.incarnation == incarnation and fence and fence < run.fence:
            raise RefusedError("fenced", f"run {name!r} has a newer writer")
        return run

    def enter(self, new: Run, old: Run | None, *, again: bool, first: int) -> None:
        """From now on `new` is the run of its name.

        Args:
            old: what was there.
            again: it is the same process once more.
            first: the oldest report that may still come, if nothing of it is on disk.
        """
        new.orders = self._registry.claim_orders(new.name)
        if not again:
            new.orders.cut_off()
        if old is not None:
            new.silenced, new.refused = old.silenced, old.refused
            if again:
                new.mirror, new.figures, new.kept = old.mirror.again(), old.figures, old.kept
                new.registered, new.interval_s = old.registered, old.interval_s
                new.last_report, new.saved_incidents = old.last_report, old.saved_incidents
        if new.session is not None:
            self._recording.close(new)  # its own is opened at its first step
        elif new.kept.record is None:
            self._recording.open(new, first)
        self._registry.runs[new.name] = new
        self._chronicle.changed(new, "registered" if old is None else "registered again")
        logger.info(
            "run registered run=%s incarnation=%s fence=%s decides=%s policy=%s",
            new.name,
            new.incarnation,
            new.fence,
            new.decides,
            new.policy.name,
        )


def next_fence(old: Run | None, given: int, *, again: bool) -> int:
    """The fence of whoever registers now."""
    if old is None:
        return max(given, 1)
    return max(old.fence, given) + (0 if again else 1)

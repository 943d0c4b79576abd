"""The runs a sidecar knows: its copy of each engine state, and what it answers.

    runs = Runs(settings, timer, store, hub)
    runs.load(now)                                     what an earlier start has left
    runs.register(message, now) -> Registered          runs.steps(message, now) -> Reply
    runs.hand_over(message, now), runs.close(message, now)
    runs.command(run, order, now), runs.expire(now)

The trainer's state is the only truth. The copy here follows the moves that each frame carries and
is compared by hash before every decision; whatever does not fit is answered with `need_state`. A
sidecar of another engine version only records. The highest fence writes: a process that was
replaced is refused, and so is a second live one.

A report is on disk before it is answered. Where the disk fails the decision is still given, the
reply says that it was not recorded, and late reports are refused until it heals: their trainer
keeps them.

Units:   `now` in Unix seconds; `timer` gives monotonic seconds, for durations only.
Purity:  no clock; writes through its store only. One thread (the event loop) calls it.
Errors:  RefusedError, which the routes turn into a Refused message.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from sentinel.core import engine
from sentinel.core.catalog import DECISIONS_S, PROTECTIONS
from sentinel.core.errors import ProtocolError, SentinelError, StateError
from sentinel.core.events import Event, Restored, SnapshotTaken
from sentinel.core.exposition import WindowMax
from sentinel.core.policy import Policy
from sentinel.core.state import ENGINE_VERSION, Incident, State, Stats
from sentinel.core.types import (
    LAYER_ATTENTION_MAX_LOGIT,
    Action,
    Column,
    Command,
    Decision,
    IncidentState,
    Observation,
    Outcome,
    Source,
)
from sentinel.sidecar.exemplars import Exemplars
from sentinel.sidecar.hub import Hub
from sentinel.sidecar.marks import Marks
from sentinel.sidecar.settings import Settings
from sentinel.sidecar.store.models import DecisionRow, RunRow
from sentinel.sidecar.store.record import (
    DECIDED,
    LATE,
    Record,
    Seen,
    acted,
    newest_chapter,
    newest_steps,
    reports_on_disk,
)
from sentinel.sidecar.store.store import Store
from sentinel.traces.records import StepRecord
from sentinel.wire import codec, messages, sense
from sentinel.wire.codec import WireDecision, WireEvent
from sentinel.wire.messages import (
    Close,
    Counts,
    Frame,
    HandOver,
    Layer,
    Move,
    Register,
    Registered,
    Reply,
    Steps,
    WireOutcome,
)

logger = logging.getLogger(__name__)

SHOWN_AT_ONCE = 32  # lost and halted runs whose last step is read at the start: 20 ms each
RECENT = 256  # rows of the newest steps, for people; the series are on disk
COMMAND_TTL_S = 600.0
CADENCES = 10.0  # a run is lost after so many of its own usual intervals, if that is longer
MOST_SIZE = 2**63
MOST_JUMP = 10_000_000  # reports that a trainer may have made while it reached nobody
MOST_LAYERS = 100_000
MOST_NAME = 512
MOST_NUMBER = 2**53  # steps and report numbers beyond it are nonsense
MAX_COMMANDS = 256
MOST_REFUSED = 16  # reasons in one answer; the first says what the others are like
MOST_REJECTED = 4096
MOST_EVENTS = 64
MOST_TEXT = 4096
MOST_WHY = 500  # letters of a sentence that people are shown
MOST_KINDS = 256  # different reasons, places or gauges that a trainer counts
MOST_INFO = 64
ENDED = ("finished", "halted")
OPEN_ORDER = ("pending", "delivered")


class RefusedError(SentinelError):
    """A request that cannot be served as asked; `code` and `status` go into the answer."""

    def __init__(self, code: str, detail: str, status: int = 409) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.status = status


@dataclass(slots=True)
class Histogram:
    """Prometheus's histogram of seconds."""

    bounds: tuple[float, ...] = DECISIONS_S
    counts: list[int] = field(default_factory=list)
    total: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        """Note one duration."""
        if not self.counts:
            self.counts = [0] * len(self.bounds)
        for at, bound in enumerate(self.bounds):
            if seconds <= bound:
                self.counts[at] += 1
                break
        self.total += seconds
        self.count += 1


@dataclass(slots=True)
class Order:
    """A person's command and what became of it: pending, delivered, taken, expired."""

    command: Command
    issued: float
    expires: float
    state: str = "pending"
    taken_step: int | None = None

    @property
    def open(self) -> bool:
        """Whether the trainer is still to be told."""
        return self.state in OPEN_ORDER


@dataclass(frozen=True, slots=True)
class Row:
    """One step, for people."""

    seq: int
    step: int
    attempt: int
    loss: float | None
    grad_norm: float | None
    action: Action | None
    rule: str
    late: bool


@dataclass(slots=True)
class Run:
    """One run: its writer, the copy of its state, what it reported."""

    name: str
    incarnation: str
    fence: int
    policy: Policy
    policy_bytes: bytes
    policy_hash: bytes
    engine_version: int
    layers: tuple[Layer, ...]
    info: dict[str, str]
    registered: float
    max_layers: int = 512  # layers with series of their own
    reason: str = ""  # why it is only recorded; "" when decided
    json: bool = False  # a trainer without an engine: the state lives here alone
    first: int | None = None  # the step at which such a one said that it begins

    state: State | None = None
    known: bool = False  # `state` is what frame `next_seq` is to be decided on, after its moves
    next_seq: int = 0
    handed: bool = False  # `state` was handed over for next_seq: its moves are in it already
    observation: Observation | None = None
    decision: Decision | None = None
    undecided: bool = False  # the newest decision has no outcome yet
    reply: Reply | None = None
    before: State | None = None  # before the events that came with the newest frame, if known
    theirs: WireDecision | None = None  # what the trainer decided, of the newest frame
    record: Record | None = None  # None: nobody writes it now
    stats_kept: dict[int, Stats] = field(default_factory=dict)

    run_state: str = "running"
    last_report: float = 0.0  # the newest frame
    last_heard: float = 0.0  # the newest sign of life: a long step or evaluation sends no frame
    columns: dict[str, Column] = field(default_factory=dict)
    decided: dict[str, int] = field(default_factory=dict)
    own: dict[str, int] = field(default_factory=dict)  # skipped by rule, when only recording
    counts: Counts = field(default_factory=Counts)
    said: str = ""  # by its trainer, of the protection since the newest decision; "": as decided
    said_why: str = ""
    late: int = 0
    handovers: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    interval_s: float | None = None  # usual time between two reports
    saved_at: float = 0.0  # last_heard as the database has it
    watched: bool = False  # an embedded run, seen in its folder: read-only
    ended: float | None = None  # when it was closed or lost
    unwritten: int = 0  # reports that no disk took
    rejected: int = 0  # reports that made no sense
    rejects: set[int] = field(default_factory=set)  # hashes of the newest of them
    saved_incidents: tuple[Incident, ...] = ()
    unrevived: bool = False  # the same for the state of a run that has no engine of its own
    unread: bool = False  # from an earlier start: what is on disk of it was not looked at yet
    earlier: Observation | None = None  # its newest step of an earlier start
    seen: Seen = field(default_factory=Seen)
    lines: dict[Any, str] = field(default_factory=dict)  # the exporter's, laid out once
    top: dict[str, npt.NDArray[np.intp]] = field(default_factory=dict)  # layers it shows
    recent: deque[Row] = field(default_factory=lambda: deque(maxlen=RECENT))
    orders: dict[str, Order] = field(default_factory=dict)
    silenced: dict[tuple[int, int], float] = field(default_factory=dict)  # (number, opened): until
    duration: Histogram = field(default_factory=Histogram)
    exemplars: Exemplars = field(default_factory=Exemplars)
    scalars: Mapping[str, float] = field(default_factory=dict)  # of the newest step with any
    norm_max: WindowMax = field(default_factory=WindowMax)
    score_max: WindowMax = field(default_factory=WindowMax)
    logit_max: WindowMax = field(default_factory=WindowMax)

    @property
    def gauges(self) -> Mapping[str, float]:
        """What the trainer measures besides, by metric name: with its step, or by itself."""
        return self.scalars or self.counts.gauges

    @property
    def decides(self) -> bool:
        """Whether the sidecar may decide for this run."""
        return not self.reason

    def live(self, now: float, lost_after_s: float) -> bool:
        """Whether its process is to be taken for alive."""
        return self.run_state == "running" and now - self.last_heard <= self.patience(lost_after_s)

    def patience(self, lost_after_s: float) -> float:
        """How long it may be silent: a trainer without signs of life may have long steps."""
        return max(lost_after_s, CADENCES * (self.interval_s or 0.0))

    def heard(self, now: float, *, report: bool) -> None:
        """It said something just now."""
        if report:
            gap = now - self.last_report
            if self.interval_s is None:
                self.interval_s = gap
            else:  # a pause (evaluation, a checkpoint) moves it little
                self.interval_s += 0.1 * (min(gap, 10.0 * self.interval_s + 0.1) - self.interval_s)
            self.last_report = now
        self.last_heard = now


class Runs:
    """All runs, by name."""

    def __init__(
        self, settings: Settings, timer: Callable[[], float], store: Store, hub: Hub
    ) -> None:
        self.settings = settings
        self.runs: dict[str, Run] = {}
        self.refused_writers = 0
        # Told of every change of an order; and the open orders of runs that have not come back yet.
        self.on_order: Callable[[str, Order], None] = lambda run, order: None
        self.parked: dict[str, dict[str, Order]] = {}
        self._timer = timer
        self._store = store
        self._hub = hub
        self._marks = Marks(settings.grafana, store)
        self._handed = None if settings.policy is None else codec.encode_policy(settings.policy)

    def get(self, name: str) -> Run:
        """The run of that name; raises RefusedError."""
        run = self.runs.get(name)
        if run is None:
            raise RefusedError(
                "unknown_run", f"run {name!r} is not registered here: PUT /v1/runs/{name}", 404
            )
        if run.unread:
            run.unread = False
            place = self._store.run_directory(name)
            run.seen = reports_on_disk(place, run.incarnation)
            if run.earlier is None:  # ended ones are many: not read before somebody asks
                self._look_back(run)
        return run

    @property
    def marks(self) -> Marks:
        """What Grafana is told."""
        return self._marks

    def _look_back(self, run: Run) -> None:
        found = newest_steps(self._store.run_directory(run.name), run.incarnation)
        run.earlier = found[-1].observation if found else None

    def let_go(self, run: Run) -> None:
        """Close the files of a run that has been lost for long; a report opens them again."""
        run.record = None
        self._store.close_record(run.name)

    def forget(self, name: str) -> None:
        """A run whose series are gone is not listed any more."""
        self.runs.pop(name, None)

    def load(self, now: float) -> None:
        """Take up the runs of an earlier start; their trainers hand their states over."""
        try:
            rows = self._store.known_runs(self.settings.max_runs)
        except SentinelError as error:
            logger.error("earlier runs cannot be read error=%s", error)
            return
        for row in rows:
            try:
                run = _of_row(row, now, self.settings.max_layers)
            except (ProtocolError, msgspec.ValidationError) as error:
                logger.warning("an earlier run cannot be read run=%s error=%s", row.name, error)
                continue
            self.runs[run.name] = run
            if run.run_state == "running":
                self._reconcile(run)
        troubled = [r for r in self.runs.values() if r.run_state in ("lost", "halted")]
        for run in sorted(troubled, key=lambda r: r.last_heard)[-SHOWN_AT_ONCE:]:
            self._look_back(run)

    # ---- trainers ----------------------------------------------------------------

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
        _check_layers(message.layers)
        if not 1 <= len(message.incarnation) <= 128 or "\0" in message.incarnation:
            raise ProtocolError("incarnation must have 1 to 128 characters, none of them NUL")
        _check_step("fence", message.fence)
        _check_step("first", message.first)
        data = message.policy if message.pinned or self._handed is None else self._handed
        try:
            policy = codec.decode_policy(data)
        except ProtocolError as error:
            policy = self.settings.policy or Policy()
            reason = reason or f"{error}: recording only"
        run = self._admit(message.run, message.incarnation, message.fence, now)
        again = run is not None and run.incarnation == message.incarnation
        new = Run(
            name=message.run,
            incarnation=message.incarnation,
            fence=_fence(run, message.fence, again),
            policy=policy,
            policy_bytes=data,
            policy_hash=codec.digest(data),
            engine_version=message.engine_version,
            layers=_apart(message.layers),
            info={k[:MOST_NAME]: v[:MOST_NAME] for k, v in list(message.info.items())[:MOST_INFO]},
            registered=now,
            max_layers=self.settings.max_layers,
            reason=reason,
            last_report=now,
            last_heard=now,
        )
        self._enter(new, run, again, message.first)
        return Registered(
            run=new.name,
            fence=new.fence,
            policy=data,
            decides=new.decides,
            reason=reason,
        )

    def steps(self, message: Steps, now: float) -> Reply:
        """Record the frames and decide the newest, if it can be decided.

        Raises:
            RefusedError: unknown run, or another process writes it.
            ProtocolError: a frame cannot be read.
        """
        run = self._writer(message.run, message.incarnation, message.fence)
        if message.counts is not None:
            _check_counts(message.counts)
        frames, refused = self._sound(run, message)
        run.heard(now, report=bool(frames))
        self._is_back(run, now)
        if message.counts is not None:
            run.counts = message.counts
        known = message.protection in PROTECTIONS  # a newer trainer may have others
        run.said, run.said_why = (message.protection, message.why[:MOST_WHY]) if known else ("", "")
        if not frames:
            orders = self._pending(run, now)
            return Reply(
                run=run.name,
                incarnation=run.incarnation,
                seq=-1,
                step=-1,
                commands=orders,
                expires_in_s=_left(run, orders, now),
                refused=refused,
            )
        reply, kept = None, True
        for frame in frames:
            if message.late:
                self._late(run, frame, now)
                reply = self._answer(run, frame, now, recorded_only="late")
            else:
                reply = self._live(run, frame, message, now)
                if reply.need_state:
                    break
                kept = kept and reply.recorded
        assert reply is not None
        if not kept or refused:
            reply = msgspec.structs.replace(reply, recorded=kept, refused=refused)
        return reply

    def _sound(self, run: Run, message: Steps) -> tuple[list[Frame], tuple[str, ...]]:
        """The frames that can be taken, and what is wrong with each of the others.

        One that comes alone to be decided is refused as a whole: its trainer is there to hear it.
        Among others, late, or for the second time, it is answered like one that was taken: else its
        trainer would bring it, and what comes behind it, again and again. The answer says what is
        wrong with it.

        Raises:
            ProtocolError: the only frame of a live message cannot be taken.
        """
        frames: list[Frame] = []
        refused: list[str] = []
        count = len(message.frames)
        for at, raw in enumerate(message.frames):
            try:
                frame = messages.decode_frame(raw)
                _check_frame(run, frame)
            except ProtocolError as error:
                if not run.rejected:
                    logger.warning("reports refused run=%s why=%s", run.name, str(error)[:500])
                first = _reject(run, bytes(raw))
                if count == 1 and not message.late and first:
                    raise
                refused.append(f"frame {at + 1} of {count}: {error}")
            else:
                frames.append(frame)
        return frames, tuple(refused[:MOST_REFUSED])

    def hand_over(self, message: HandOver, now: float) -> None:
        """Take the trainer's state; raises RefusedError or ProtocolError."""
        run = self._writer(message.run, message.incarnation, message.fence)
        run.last_heard = now
        if not run.decides or (run.known and message.seq < run.next_seq):
            return  # overtaken: the copy is beyond it
        run.state = codec.decode_state(message.state)
        run.known = run.handed = True
        run.next_seq = message.seq
        run.undecided = False
        run.handovers += 1
        self._acknowledge(run, run.state.ledger.commands)
        self._note_incidents(run, now)
        logger.info("state handed over run=%s step=%s", run.name, run.state.step)

    def close(self, message: Close, now: float) -> None:
        """The run is over; raises RefusedError."""
        run = self._writer(message.run, message.incarnation, message.fence)
        run.last_heard = now
        if message.counts is not None:
            run.counts = message.counts
        if run.run_state in ENDED:
            return  # our answer was lost on the way
        self._count(run, message.moves)
        self._outcomes(run, message.moves, now)
        self._after(run, message.moves)
        if run.known and not run.handed:
            self._follow(run, message.moves)
        self._note_incidents(run, now)
        self._ends(run, "halted" if message.state == "halted" else "finished", now)
        run.record = None
        self._store.close_record(run.name)

    def _live(self, run: Run, frame: Frame, message: Steps, now: float) -> Reply:
        last = run.reply
        if last is not None and last.seq == frame.seq and frame.seq == run.next_seq - 1:
            # The same question again: our answer was lost on the way, or no disk took the report.
            if frame.seq not in run.seen:
                attempt, data = frame.attempt, last.decision or b""
                kept = self._write(run, frame, data, run.decision, now, attempt, None, DECIDED)
                last = run.reply = msgspec.structs.replace(last, recorded=kept)
            orders = self._pending(run, now)
            return msgspec.structs.replace(
                last, commands=orders, expires_in_s=_left(run, orders, now)
            )
        if frame.seq in run.seen:
            return self._answer(run, frame, now, recorded_only="this frame was recorded before")
        if frame.seq < run.next_seq:
            # Overtaken on the way by a later frame: its step is over.
            self._late(run, frame, now)
            return self._answer(run, frame, now, recorded_only="late")
        observation = codec.core_observation(frame.observation)
        reason = run.reason
        if not reason and message.engine_version != run.engine_version:
            reason = f"engine version {message.engine_version} is not the registered one"
        if not reason and message.policy_hash != run.policy_hash:
            reason = "the trainer runs another policy than it registered: register again"
        if reason:
            kept = self._record(run, frame, observation, None, now, frame.attempt)
            return self._answer(run, frame, now, recorded_only=reason, recorded=kept)
        if not self._synchronised(run, frame, observation):
            run.known = False
            return self._answer(run, frame, now, need_state=True)
        assert run.state is not None
        started = self._timer()
        try:
            decision = engine.decide(run.state, observation, run.policy)
        except Exception:  # whatever it is, the trainer's own engine has decided already
            logger.exception("cannot decide run=%s step=%s", run.name, observation.step)
            run.errors["decide"] = run.errors.get("decide", 0) + 1
            run.known = False
            kept = self._record(run, frame, observation, None, now, run.state.ledger.attempt)
            return self._answer(
                run, frame, now, recorded_only="the sidecar failed to decide", recorded=kept
            )
        run.duration.add(self._timer() - started)
        handed, before = run.handed, run.before
        if handed:
            before = run.state
        run.known, run.handed, run.undecided = True, False, True
        run.next_seq = frame.seq + 1
        data = codec.encode_decision(decision)
        attempt = run.state.ledger.attempt
        kept = self._record(
            run, frame, observation, decision, now, attempt, data, before, handed=handed
        )
        run.reply = self._answer(run, frame, now, decision=data, recorded=kept)
        return run.reply

    def _synchronised(self, run: Run, frame: Frame, observation: Observation) -> bool:
        """Bring the copy up to this frame; False when only the trainer can."""
        if not run.known or run.state is None or frame.seq != run.next_seq:
            return False
        if not run.handed and not self._follow(run, frame.moves):
            return False
        if codec.state_hash(run.state) != frame.state_hash:
            return False
        return run.state.step == observation.step

    def _follow(self, run: Run, moves: Iterable[Move]) -> bool:
        """Apply what the trainer did to the copy; False when that does not fit."""
        run.before = run.state
        try:
            for move in moves:
                self._move(run, _core_move(move))
                if isinstance(move, WireOutcome):
                    run.before = run.state
        except (StateError, ProtocolError, ValueError) as error:
            logger.warning("cannot follow the trainer's state run=%s error=%s", run.name, error)
            run.known = False
            return False
        return True

    def _move(self, run: Run, move: Outcome | Event) -> None:
        assert run.state is not None
        if not isinstance(move, Outcome):
            run.state = engine.note(run.state, move, run.policy)
            return
        if not run.undecided or run.observation is None or run.decision is None:
            raise StateError(f"an outcome of step {move.step} without a decision of it")
        if move.step != run.observation.step:
            raise StateError(
                f"outcome.step must be the decided step ({run.observation.step}), got {move.step}"
            )
        run.undecided = False
        run.state = engine.apply(run.state, run.observation, run.decision, move, run.policy)

    def _count(self, run: Run, moves: Iterable[Move]) -> None:
        """Count whose decisions were carried out, and what an only recorded run did."""
        for move in moves:
            if not isinstance(move, WireOutcome):
                continue
            run.decided[move.source] = run.decided.get(move.source, 0) + 1
            if not run.decides and move.executed is Action.SKIP_STEP:
                rule = "trainer" if run.decision is None else run.decision.rule
                run.own[rule] = run.own.get(rule, 0) + 1

    def _late(self, run: Run, frame: Frame, now: float) -> None:
        if frame.seq in run.seen:
            return
        own = frame.own
        if not self._write(
            run,
            frame,
            b"" if own is None else codec.encode(own),
            None if own is None else codec.core_decision(own),
            now,
            frame.attempt,
            None,
            LATE,
        ):
            raise RefusedError(
                "unavailable", f"the disk takes no reports now: {self._store.trouble}", 503
            )
        run.late += 1
        self._count(run, frame.moves)
        seen = frame.observation
        row = Row(
            frame.seq,
            seen.step,
            frame.attempt,
            seen.loss,
            seen.grad_norm,
            None if own is None else own.action,
            "" if own is None else own.rule,
            True,
        )
        run.recent.append(row)
        self._acknowledge(run, (c.id for c in seen.commands), seen.step)

    def _record(
        self,
        run: Run,
        frame: Frame,
        observation: Observation,
        decision: Decision | None,
        now: float,
        attempt: int,
        data: bytes = b"",
        before: State | None = None,
        *,
        handed: bool = False,
        skipped: bool = False,
    ) -> bool:
        """Note a live report; whether it is on disk now."""
        run.theirs = frame.own
        flags = 0 if decision is None else DECIDED
        if decision is None and frame.own is not None:
            decision, data = codec.core_decision(frame.own), codec.encode(frame.own)
        kept = self._write(
            run,
            frame,
            data,
            decision,
            now,
            attempt,
            before,
            flags,
            handed=handed,
            skipped=skipped,
        )
        self._count(run, frame.moves)
        self._note_incidents(run, now)
        if run.state is not None:
            run.exemplars.note(run.name, run.state, now)
        self._note_step(run, frame.seq, observation, decision, now, attempt)
        run.observation = observation
        if decision is not None:
            run.decision = decision
        return kept

    def _write(
        self,
        run: Run,
        frame: Frame,
        data: bytes,
        decision: Decision | None,
        now: float,
        attempt: int,
        before: State | None,
        flags: int,
        *,
        handed: bool = False,
        skipped: bool = False,
    ) -> bool:
        """Put a report on disk; False when the disk fails."""
        self._outcomes(run, frame.moves, now)
        events = [codec.encode(move) for move in frame.moves if not isinstance(move, WireOutcome)]
        executed = None if decision is None else decision.action
        record = self._record_of(run)
        try:
            record.report(
                frame,
                data,
                executed,
                attempt=attempt,
                events=events,
                before=before,
                handed=handed,
                skipped=skipped,
                flags=flags,
            )
        except OSError as error:
            if not run.unwritten:
                logger.error("reports cannot be recorded run=%s error=%s", run.name, error)
            run.unwritten = record.refused.count
            return False
        if decision is not None and decision.action is not Action.PROCEED:
            source = Source.SIDECAR if flags & DECIDED else Source.TRAINER
            self._save_decision(run, decision, attempt, source, now, live=not flags & LATE)
        return True

    def _outcomes(self, run: Run, moves: Iterable[Move], now: float) -> None:
        """Correct the record where something else was done than was decided."""
        for move in moves:
            if not isinstance(move, WireOutcome):
                continue
            outcome = Outcome(move.step, move.executed, move.applied, Source(move.source))
            try:
                corrected = self._record_of(run).outcome(outcome)
            except OSError:
                continue  # shown; the step stands with what was decided until a disk takes it
            if not corrected:
                continue
            if move.executed is Action.PROCEED:
                self._store.drop_decision(run.name, run.incarnation, move.step)
                continue
            own = None if run.theirs is None else codec.core_decision(run.theirs)
            for decision in (own, run.decision):
                if decision is not None and (decision.step, decision.action) == (
                    move.step,
                    move.executed,
                ):
                    attempt = 0 if run.state is None else run.state.ledger.attempt
                    self._save_decision(run, decision, attempt, outcome.source, now, live=False)
                    break

    def _after(self, run: Run, moves: Iterable[Move]) -> None:
        """Keep what happened after the last report: a snapshot, or the end of a rollback."""
        events = [codec.encode(move) for move in moves if not isinstance(move, WireOutcome)]
        if events and run.record is not None:
            try:
                run.record.after(events)
            except OSError as error:
                logger.warning("the end is not recorded run=%s error=%s", run.name, error)

    def _record_of(self, run: Run) -> Record:
        """Where its reports are written; opened again when a late one follows its end."""
        if run.record is None:
            self._open(run, run.seen.start)
        assert run.record is not None
        return run.record

    def _open(self, run: Run, first: int) -> None:
        run.record = self._store.open_record(
            run=run.name,
            incarnation=run.incarnation,
            policy=run.policy,
            state=run.before if run.json else None,
            layers=run.layers,
            engine_version=run.engine_version,
            first=first,
        )
        run.seen = run.record.seen

    def _save_decision(
        self,
        run: Run,
        decision: Decision,
        attempt: int,
        source: Source,
        now: float,
        *,
        live: bool,
        found: bool = False,
    ) -> None:
        """Write an executed action down.

        Args:
            live: it is told to everybody, now.
            found: on disk, of the time before a restart: Grafana has not heard of it either.
        """
        row = {
            "step": decision.step,
            "attempt": attempt,
            "action": decision.action.name.lower(),
            "rule": decision.rule,
            "reason": decision.reason,
            "target": decision.target,
            "source": str(source),
            "at": now,
        }
        self._store.save_decision(
            DecisionRow(run=run.name, incarnation=run.incarnation, **row),
            mark=(live or found) and self._marks.wanted,
        )
        if live:
            self._hub.publish("decision", run.name, row)
            self._marks.decided(run.name, run.incarnation, row)

    def _note_incidents(self, run: Run, now: float) -> None:
        """Write incidents that have changed."""
        if run.state is None:
            return
        incidents, before = run.state.ledger.incidents, run.saved_incidents
        if incidents is before:
            return
        changed = [i for i in incidents if i not in before]
        run.saved_incidents = incidents
        if not changed:
            return
        self._store.save_incidents(run.name, changed, now)
        for incident in changed:
            self._hub.publish("incident", run.name, incident)

    def _reconcile(self, run: Run) -> None:
        """Actions of the newest segment that a killed sidecar had no time to write down."""
        found = newest_steps(self._store.run_directory(run.name), run.incarnation)
        run.earlier = found[-1].observation if found else None
        for record in acted(found):
            decision = record.decision
            if decision.action is not record.outcome.executed:
                continue
            self._save_decision(
                run,
                decision,
                record.attempt,
                record.outcome.source,
                record.at or 0.0,
                live=False,
                found=record.at is not None,
            )

    def _is_back(self, run: Run, now: float) -> None:
        if run.run_state == "lost":
            run.run_state, run.ended = "running", None
            logger.info("run is back run=%s", run.name)
            self._changed(run, "back")

    def _ends(self, run: Run, state: str, now: float) -> None:
        run.run_state, run.ended = state, now
        logger.info("run closed run=%s state=%s", run.name, run.run_state)
        for order in run.orders.values():
            if order.open:  # a later life of the run must not obey what was meant for this one
                order.state = "expired"
                self.on_order(run.name, order)
        self._changed(run)

    def _changed(self, run: Run, what: str = "") -> None:
        """Its state changed: write that down and tell."""
        self.save(run)
        told = {"state": run.run_state, "what": what or run.run_state, "run": run.name}
        self._hub.publish("run", run.name, told | {"incarnation": run.incarnation})

    def save(self, run: Run) -> None:
        """Write what is known of a run into the database."""
        self._store.save(
            RunRow(
                name=run.name,
                incarnation=run.incarnation,
                fence=run.fence,
                state=run.run_state,
                engine_version=run.engine_version,
                policy=run.policy_bytes,
                reason=run.reason,
                json=run.json,
                layers=msgspec.to_builtins(run.layers),
                info=dict(run.info),
                refused=list(run.refused),
                registered_at=run.registered,
                heard_at=run.last_heard,
                ended_at=run.ended,
                last_step=None if run.observation is None else run.observation.step,
            )
        )

    def _note_step(
        self,
        run: Run,
        seq: int,
        observation: Observation,
        decision: Decision | None,
        now: float,
        attempt: int,
    ) -> None:
        run.columns.update(observation.columns)
        run.norm_max.add(observation.grad_norm, now)
        if observation.scalars:
            run.scalars = observation.scalars
        logits = observation.columns.get(LAYER_ATTENTION_MAX_LOGIT)
        if logits is not None and logits.size:
            run.logit_max.add(float(logits.max()), now)
        if decision is not None:
            run.score_max.add(decision.readings.spike_score, now)
        run.recent.append(
            Row(
                seq,
                observation.step,
                attempt,
                observation.loss,
                observation.grad_norm,
                None if decision is None else decision.action,
                "" if decision is None else decision.rule,
                False,
            )
        )
        if self._hub.listeners:
            self._hub.steps(run.name, run.recent[-1])
        self._acknowledge(run, (c.id for c in observation.commands), observation.step)

    def _answer(
        self,
        run: Run,
        frame: Frame,
        now: float,
        *,
        decision: bytes | None = None,
        need_state: bool = False,
        recorded_only: str = "",
        recorded: bool = True,
    ) -> Reply:
        orders = self._pending(run, now)
        return Reply(
            run=run.name,
            incarnation=run.incarnation,
            seq=frame.seq,
            step=frame.observation.step,
            decision=decision,
            need_state=need_state,
            recorded_only=recorded_only,
            recorded=recorded,
            commands=orders,
            expires_in_s=_left(run, orders, now),
        )

    # ---- trainers without an engine ------------------------------------------------

    def register_json(
        self, name: str, layers: tuple[Layer, ...], now: float, first: int | None = None
    ) -> Run:
        """Register a run whose state lives here: its trainer posts JSON and obeys.

        Args:
            first: it begins anew at this step, from a checkpoint; None: it goes on, if it has not
                ended.

        Raises:
            RefusedError: a bad name, no room, another process writes this run, or it goes on with
                other layers.
        """
        _check_layers(layers)
        if first is not None:
            _check_step("first_step", first)
        old = self.runs.get(name)
        run: Run | None
        if old is not None and old.json and old.run_state not in ENDED:
            self._revive(old)
            fresh = old.observation is None and old.state is None
            if first is None or fresh:
                table = _apart(layers) or old.layers
                if not fresh:
                    _same_layers(old, table)
                old.layers = table
                old.first = first if fresh else old.first
                old.heard(now, report=False)
                self._is_back(old, now)
                return old
            run = old
        else:
            run = self._admit(name, "json", 0, now)
        policy = self.settings.policy or Policy.load("default")
        data = codec.encode_policy(policy)
        fence = _fence(run, 0, False)
        new = Run(
            name=name,
            incarnation=f"json-{fence}",
            fence=fence,
            policy=policy,
            policy_bytes=data,
            policy_hash=codec.digest(data),
            engine_version=ENGINE_VERSION,
            layers=_apart(layers),
            info={},
            registered=now,
            max_layers=self.settings.max_layers,
            json=True,
            first=first,
            last_report=now,
            last_heard=now,
        )
        self._enter(new, run, False, 0)
        return new

    def step_json(
        self,
        name: str,
        observation: Observation,
        outcome: Outcome | None,
        events: tuple[Event, ...],
        now: float,
    ) -> Decision:
        """Decide one observation of such a run.

        Args:
            outcome: what was done at the step before; None: what was decided.

        Raises:
            RefusedError: not such a run, or not the step that comes next.
        """
        run = self.get(name)
        if not run.json:
            raise RefusedError("fenced", f"run {name!r} is written by a trainer with an engine")
        if run.run_state in ENDED:
            raise RefusedError(
                "over",
                f"run {name!r} is {run.run_state}: PUT /v1/runs/{name} begins it anew, with "
                "whatever step comes next",
            )
        self._revive(run)
        _check_step("observation.step", observation.step)
        _check_columns(run, observation.columns)
        if outcome is not None:
            _check_step("outcome.step", outcome.step)
        if len(events) > MOST_EVENTS:
            raise ProtocolError(f"events may be {MOST_EVENTS} at one step, got {len(events)}")
        for at, event in enumerate(events):
            _check_event(f"events[{at}]", event)
        asked = run.decision if run.undecided else None
        if asked is not None and observation.step == asked.step:
            run.heard(now, report=True)
            self._is_back(run, now)
            return asked  # the same question again
        due = next_step(run)
        hole = 0 if due is None else observation.step - due
        _check_hole(name, hole, observation.step)
        done = None if asked is None else _done(asked, outcome, observation.step)
        # Nothing refuses from here on: a refused step has settled nothing.
        run.heard(now, report=True)
        self._is_back(run, now)
        moves: list[Move] = []
        if done is not None:
            self._move(run, done)
            moves.append(messages.wire_outcome(done))
        state = run.state or engine.initial(observation.step)
        run.state = run.before = replace(state, step=observation.step)
        for event in events:
            noted = self._with_stats(run, event)
            run.state = engine.note(run.state, noted, run.policy)
            moves.append(codec.wire_event(noted))
        observation = replace(observation, commands=self._pending(run, now))
        started = self._timer()
        decision = engine.decide(run.state, observation, run.policy)
        run.duration.add(self._timer() - started)
        frame = Frame(
            seq=run.next_seq + hole,
            observation=codec.wire_observation(observation),
            moves=tuple(moves),
        )
        run.next_seq = frame.seq + 1
        run.undecided = True
        attempt = run.state.ledger.attempt
        self._record(
            run,
            frame,
            observation,
            decision,
            now,
            attempt,
            codec.encode_decision(decision),
            run.before,
            skipped=hole > 0 and run.record is not None,
        )
        return decision

    def newest_kept(self, name: str) -> bool:
        """Whether a disk took the newest report of such a run."""
        run = self.get(name)
        return run.next_seq - 1 in run.seen

    def close_json(self, name: str, state: str, now: float) -> str:
        """Such a run is over; how it has ended, which may have been before.

        Raises:
            RefusedError: not such a run.
        """
        run = self.get(name)
        if not run.json:
            raise RefusedError("fenced", f"run {name!r} is written by a trainer with an engine")
        if run.run_state in ENDED:
            return run.run_state
        self._revive(run)
        run.last_heard = now
        if run.undecided and run.decision is not None:
            done = _done(run.decision, None, run.decision.step + 1)
            self._move(run, done)
            self._count(run, (messages.wire_outcome(done),))
            self._note_incidents(run, now)
        self._ends(run, state, now)
        run.record = None
        self._store.close_record(name)
        return run.run_state

    def _revive(self, run: Run) -> None:
        """After a restart of the sidecar: the state of such a run, computed again from its series.

        Statistics of snapshots taken before the newest segment are gone: a restore of one of them
        starts with cold ones.
        """
        if not run.unrevived:
            return
        run.unrevived = False
        self.get(run.name)
        run.next_seq = run.seen.spans[-1][1] + 1 if run.seen.count else 0
        state: State | None = None
        last = False
        try:
            for item in newest_chapter(self._store.run_directory(run.name), run.incarnation):
                if isinstance(item, State):
                    state = item
                elif isinstance(item, StepRecord):
                    seen = item.observation
                    if state is None:
                        state = engine.initial(item.step)
                    decision = engine.decide(state, seen, run.policy)
                    run.state, run.observation, run.decision, last = state, seen, decision, True
                    state = engine.apply(state, seen, decision, item.outcome, run.policy)
                elif state is not None:
                    run.state, last = state, False
                    kept = self._with_stats(run, item)
                    # A recorded restore brings the statistics that it restored.
                    noted = item if isinstance(item, Restored) else kept
                    state = engine.note(state, noted, run.policy)
        except (SentinelError, OSError) as error:
            logger.error("cannot take up a run again run=%s error=%s", run.name, error)
            run.errors["revive"] = run.errors.get("revive", 0) + 1
            run.state, run.undecided = None, False
            return
        if not last:
            run.state = state
        run.undecided = last
        if run.state is not None:
            logger.info("taken up again run=%s step=%s", run.name, run.state.step)

    def _with_stats(self, run: Run, event: Event) -> Event:
        """Keep and give back the statistics that belong to a JSON trainer's snapshots."""
        assert run.state is not None
        kept = run.stats_kept
        if isinstance(event, SnapshotTaken):
            kept[event.step] = run.state.stats
        elif isinstance(event, Restored):
            return replace(event, stats=kept.get(event.target, Stats()))
        known = {s.step for s in run.state.ledger.snapshots}
        for step in [s for s in kept if s not in known and s != event.step]:
            del kept[step]
        return event

    # ---- people --------------------------------------------------------------------

    def command(self, name: str, command: Command, ttl_s: float, now: float) -> Order:
        """Take a person's order; the same id again changes nothing.

        Raises:
            RefusedError: unknown run, or too many orders are open.
        """
        run = self.get(name)
        known = run.orders.get(command.id)
        if known is not None:
            return known
        if len(run.orders) >= MAX_COMMANDS:
            done = [key for key, order in run.orders.items() if not order.open]
            if not done:
                raise RefusedError("full", f"run {name!r} has {MAX_COMMANDS} open orders", 429)
            del run.orders[done[0]]
        order = Order(command, now, now + ttl_s)
        run.orders[command.id] = order
        logger.info(
            "order taken run=%s id=%s kind=%s by=%s",
            name,
            command.id,
            command.kind,
            command.issued_by,
        )
        self.on_order(run.name, order)
        return order

    def expire(self, now: float) -> None:
        """Mark silent runs lost and old orders expired."""
        for run in self.runs.values():
            if run.run_state == "running" and not run.live(now, self.settings.lost_after_s):
                run.run_state, run.ended = "lost", now
                logger.warning("run lost run=%s silent_s=%.0f", run.name, now - run.last_heard)
                self._changed(run)
            self._pending(run, now, telling=False)

    def _pending(self, run: Run, now: float, *, telling: bool = True) -> tuple[Command, ...]:
        if not run.orders:
            return ()
        open_: list[Command] = []
        for order in run.orders.values():
            if not order.open:
                continue
            if now >= order.expires:
                order.state = "expired"
                logger.info("order expired run=%s id=%s", run.name, order.command.id)
                self.on_order(run.name, order)
                continue
            if telling and order.state == "pending":
                order.state = "delivered"
                self.on_order(run.name, order)
            open_.append(order.command)
        return tuple(open_)

    def _acknowledge(self, run: Run, ids: Iterable[str], step: int | None = None) -> None:
        if not run.orders:
            return
        for key in ids:
            order = run.orders.get(key)
            if order is not None and order.state != "taken":
                order.state, order.taken_step = "taken", step
                logger.info("order obeyed run=%s id=%s step=%s", run.name, key, step)
                self.on_order(run.name, order)

    # ---- who writes ------------------------------------------------------------------

    def _admit(self, name: str, incarnation: str, fence: int, now: float) -> Run | None:
        """The run that is replaced, None if there is none; raises RefusedError."""
        if not messages.RUN_NAME.fullmatch(name):
            raise RefusedError(
                "malformed",
                "run must be 1 to 128 letters, digits and ._:@+- and start with a letter or "
                f"digit, got {name!r}",
                422,
            )
        run = self.runs.get(name)
        if run is None:
            self._make_room()
            return None
        if run.incarnation != incarnation and run.live(now, self.settings.lost_after_s):
            who = ", ".join(f"{key} {value}" for key, value in sorted(run.info.items()))
            detail = (
                f"run {name!r} is written by another live process ({who or run.incarnation}), "
                f"last heard {now - run.last_heard:.1f} s ago; give this one another run_id, or "
                f"wait until the other has been silent for "
                f"{run.patience(self.settings.lost_after_s):g} s"
            )
            run.refused = [*run.refused[-15:], incarnation]
            self.refused_writers += 1
            self._hub.publish("refused", name, {"incarnation": incarnation, "detail": detail})
            self.save(run)
            logger.warning("second writer refused run=%s incarnation=%s", name, incarnation)
            raise RefusedError("fenced", detail)
        if run.incarnation == incarnation and fence and fence < run.fence:
            raise RefusedError("fenced", f"run {name!r} has a newer writer")
        return run

    def _writer(self, name: str, incarnation: str, fence: int) -> Run:
        run = self.get(name)
        if run.incarnation != incarnation or run.fence != fence:
            raise RefusedError(
                "fenced",
                f"run {name!r} is written by incarnation {run.incarnation} (fence {run.fence}), "
                f"not by {incarnation} (fence {fence})",
            )
        return run

    def _enter(self, new: Run, old: Run | None, again: bool, first: int) -> None:
        new.orders = self.parked.pop(new.name, {})
        if old is not None:
            new.orders = old.orders
            new.silenced = old.silenced
            new.refused = old.refused
            if again:
                # The same process once more, for example after its connection was cut.
                new.seen, new.recent, new.reply = old.seen, old.recent, old.reply
                new.decided, new.late, new.handovers = old.decided, old.late, old.handovers
                new.counts, new.errors, new.duration = old.counts, old.errors, old.duration
                new.state, new.observation, new.decision = old.state, old.observation, old.decision
                new.columns, new.exemplars = old.columns, old.exemplars
                new.registered, new.interval_s = old.registered, old.interval_s
                new.record, new.theirs = old.record, old.theirs
                new.last_report, new.unwritten = old.last_report, old.unwritten
                new.rejected, new.rejects = old.rejected, old.rejects
                new.saved_incidents = old.saved_incidents
        if new.json:
            self._store.close_record(new.name)  # its own is opened at its first step
        elif new.record is None:
            self._open(new, first)
        self.runs[new.name] = new
        self._changed(new, "registered" if old is None else "registered again")
        logger.info(
            "run registered run=%s incarnation=%s fence=%s decides=%s policy=%s",
            new.name,
            new.incarnation,
            new.fence,
            new.decides,
            new.policy.name,
        )

    def _make_room(self) -> None:
        if len(self.runs) < self.settings.max_runs:
            return
        over = [r for r in self.runs.values() if r.run_state != "running"]
        if not over:
            raise RefusedError("full", f"{self.settings.max_runs} runs are running here", 429)
        oldest = min(over, key=lambda r: r.last_heard)
        self._store.close_record(oldest.name)
        del self.runs[oldest.name]


def _reject(run: Run, raw: bytes) -> bool:
    """Count a report that makes no sense; False when its trainer brings it again."""
    key = hash(raw)
    if key in run.rejects:
        return False
    if len(run.rejects) >= MOST_REJECTED:
        run.rejects.clear()
    run.rejects.add(key)
    run.rejected += 1
    return True


def _left(run: Run, orders: tuple[Command, ...], now: float) -> tuple[float, ...]:
    """How long each of the orders may still be obeyed [s]."""
    return tuple(run.orders[c.id].expires - now for c in orders) if orders else ()


def _fence(old: Run | None, given: int, again: bool) -> int:
    if old is None:
        return max(given, 1)
    return max(old.fence, given) + (0 if again else 1)


def _done(decided: Decision, told: Outcome | None, observed: int) -> Outcome:
    """What was done at the newest step of a trainer without an engine.

    Raises:
        ProtocolError: it tells of another step.
    """
    action = decided.action
    as_decided = Outcome(decided.step, action, action is Action.PROCEED, Source.SIDECAR)
    if told is None or decided.step < told.step < observed:
        return as_decided  # nobody asked about a step in a hole: it is not in the record
    if told.step != decided.step:
        raise ProtocolError(
            f"outcome.step must be the step that was decided last ({decided.step}), got {told.step}"
        )
    return replace(told, source=Source.SIDECAR)


def next_step(run: Run) -> int | None:
    """The step that a trainer without an engine is expected to report; None: any."""
    return run.first if run.state is None else run.state.step + run.undecided


def _check_hole(name: str, hole: int, step: int) -> None:
    """Raise RefusedError for a step that cannot come now."""
    if 0 <= hole <= MOST_JUMP:
        return
    due = step - hole
    bound = "" if hole < 0 else f" to {due + MOST_JUMP}"
    raise RefusedError(
        "malformed",
        f"observation.step must be the next step ({due}) or a later one{bound}, got {step}; a "
        f'trainer that begins again elsewhere says so: PUT /v1/runs/{name} with {{"first_step": '
        f"{step}}}",
        422,
    )


def _same_layers(run: Run, table: tuple[Layer, ...]) -> None:
    """Raise RefusedError where a run that goes on is given another layer table."""
    names, had = ([layer.name for layer in which] for which in (table, run.layers))
    if names == had:
        return
    at = next((i for i, (a, b) in enumerate(zip(names, had, strict=False)) if a != b), None)
    where = (
        f"{len(names)} layers instead of {len(had)}"
        if at is None
        else f"layers[{at}] is {names[at][:64]!r} instead of {had[at][:64]!r}"
    )
    raise RefusedError(
        "conflict",
        f"run {run.name!r} goes on and has other layers: {where}; leave them out to go on, or "
        'begin anew with "first_step"',
    )


def _apart(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """The layer table with names that differ: two equal series would spoil the whole page."""
    seen: dict[str, int] = {}
    found: list[Layer] = []
    for layer in layers:
        times = seen[layer.name] = seen.get(layer.name, 0) + 1
        if times > 1:
            layer = msgspec.structs.replace(layer, name=f"{layer.name}#{times}")
        found.append(layer)
    return tuple(found)


def _of_row(row: RunRow, now: float, max_layers: int) -> Run:
    """A run of an earlier start; raises ProtocolError or ValidationError."""
    return Run(
        name=row.name,
        incarnation=row.incarnation,
        fence=row.fence,
        policy=codec.decode_policy(row.policy),
        policy_bytes=row.policy,
        policy_hash=codec.digest(row.policy),
        engine_version=row.engine_version,
        layers=msgspec.convert(row.layers, tuple[Layer, ...]),
        info={str(key): str(value) for key, value in row.info.items()},
        registered=row.registered_at,
        max_layers=max_layers,
        reason=row.reason,
        json=row.json,
        run_state=row.state,
        last_report=row.heard_at,
        last_heard=now if row.state == "running" else row.heard_at,  # we were away, not the run
        ended=row.ended_at,
        refused=[str(name) for name in row.refused],
        unread=True,
        unrevived=row.json,
    )


_SOURCES = tuple(str(source) for source in Source)


def _check_step(what: str, value: int) -> None:
    if not 0 <= value < MOST_NUMBER:
        raise ProtocolError(f"{what} must lie between 0 and 2**53, got {value}")


def _check_layers(layers: tuple[Layer, ...]) -> None:
    """Raise ProtocolError for a layer table that nobody can mean."""
    if len(layers) > MOST_LAYERS:
        raise ProtocolError(f"layers may be {MOST_LAYERS}, got {len(layers)}")
    for layer in layers:
        if not 1 <= len(layer.name) <= MOST_NAME or "\0" in layer.name:
            raise ProtocolError(
                f"a layer's name must have 1 to {MOST_NAME} characters, none of them NUL, got "
                f"{layer.name[:64]!r}"
            )
        if any(not 0 <= size < MOST_SIZE for size in layer.shape) or not (
            layer.block is None or -1 <= layer.block < MOST_NUMBER
        ):
            raise ProtocolError(f"the shape and block of layer {layer.name[:64]!r} must be sizes")


def _check_frame(run: Run, frame: Frame) -> None:
    """Raise ProtocolError for a frame that can be read and cannot be."""
    seen = frame.observation
    if not 0 <= frame.seq <= run.seen.highest + MOST_JUMP:
        raise ProtocolError(
            f"frame.seq must lie between 0 and {run.seen.highest + MOST_JUMP} (the highest so far "
            f"and {MOST_JUMP} more), got {frame.seq}"
        )
    _check_step("frame.step", seen.step)
    _check_step("frame.attempt", frame.attempt)
    try:
        sense.check_numbers(seen)
        if seen.columns:
            for name, data in seen.columns.items():
                _check_column_name(name)
                if len(data) != 4 * len(run.layers):
                    raise ProtocolError(
                        f"column {name!r} must hold a float32 for each of the {len(run.layers)} "
                        f"layers that were registered, got {len(data)} bytes"
                    )
            sense.check_column_bytes(seen.columns)
    except ProtocolError as error:
        raise ProtocolError(f"step {seen.step}: {error}") from None
    for move in frame.moves:
        if not isinstance(move, WireOutcome):
            _check_event("move", move)
            continue
        _check_step("move.step", move.step)
        if move.source not in _SOURCES:
            raise ProtocolError(
                f"outcome.source must be one of {', '.join(_SOURCES)}, got {move.source!r}"
            )


def _check_event(what: str, event: Event | WireEvent) -> None:
    _check_step(f"{what}.step", event.step)
    target = getattr(event, "target", None)
    if target is not None:
        _check_step(f"{what}.target", target)
    for name in ("reason", "by"):
        if len(getattr(event, name, "")) > MOST_TEXT:
            raise ProtocolError(f"{what}.{name} must have at most {MOST_TEXT} characters")


def _check_counts(counts: Counts) -> None:
    """Raise ProtocolError for counters that are none: they become series of /metrics."""
    whole = [("mismatches", counts.mismatches), ("dropped", counts.dropped)]
    for name, table in (
        ("misses", counts.misses),
        ("internal_errors", counts.internal_errors),
        ("gauges", counts.gauges),
    ):
        if len(table) > MOST_KINDS:
            raise ProtocolError(f"counts.{name} may be {MOST_KINDS} numbers, got {len(table)}")
        for key, value in table.items():
            if len(key) > MOST_NAME:
                raise ProtocolError(
                    f"a name in counts.{name} must have at most {MOST_NAME} characters, got "
                    f"{key[:64]!r}..."
                )
            if isinstance(value, int):
                whole.append((f"{name}[{key!r}]", value))
    for name, value in whole:
        _check_step(f"counts.{name}", value)
    if not counts.longest_wait_s >= 0.0:
        raise ProtocolError(
            f"counts.longest_wait_s must be 0 or more, got {counts.longest_wait_s:g}"
        )


_COLUMN_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


def _check_column_name(name: str) -> None:
    if not _COLUMN_NAME.fullmatch(name):
        raise ProtocolError(
            "a column's name must have 1 to 64 lower case letters, digits and underscores, got "
            f"{name[:64]!r}"
        )


def _check_columns(run: Run, columns: Mapping[str, Column]) -> None:
    for name, column in columns.items():
        _check_column_name(name)
        if column.size != len(run.layers):
            raise ProtocolError(
                f"columns.{name} must hold one number for each of the {len(run.layers)} layers "
                f"that were registered, got {column.size}"
            )


def _core_move(move: Move) -> Outcome | Event:
    if isinstance(move, WireOutcome):
        return Outcome(move.step, move.executed, move.applied, Source(move.source))
    return codec.core_event(move)


# ---- views, for people ---------------------------------------------------------------


def summary(run: Run, now: float) -> dict[str, Any]:
    """One line of the list of runs."""
    seen, decision = run.observation or run.earlier, run.decision
    protection = None if decision is None else str(decision.readings.protection)
    if seen is None:
        protection = "off"  # nobody has measured anything
    elif decision is not None and run.said:
        protection = run.said
    return {
        "run": run.name,
        "state": run.run_state,
        "step": None if seen is None else seen.step,
        "loss": None if seen is None else seen.loss,
        "grad_norm": None if seen is None else seen.grad_norm,
        "protection": protection,
        "protection_why": run.said_why,
        "decides": run.decides,
        "reason": run.reason,
        "watched": run.watched,
        "policy": run.policy.name,
        "mode": str(run.policy.mode),
        "open_incidents": None
        if run.state is None
        else sum(i.state is not IncidentState.RESOLVED for i in run.state.ledger.incidents),
        "last_report_s_ago": round(max(now - run.last_report, 0.0), 3),
        "registered_at": run.registered,
        "ended_at": run.ended,
    }


def details(run: Run, now: float) -> dict[str, Any]:
    """Everything about one run that a person may want to see."""
    ledger = None if run.state is None else run.state.ledger
    return summary(run, now) | {
        "incarnation": run.incarnation,
        "fence": run.fence,
        "info": run.info,
        "engine_version": run.engine_version,
        "policy_hash": run.policy_hash,
        "layers": [layer.name for layer in run.layers],
        "decision": run.decision,
        "ledger": ledger,
        "record": {
            "frames": run.seen.count,
            "late": run.late,
            "holes": run.seen.missing,
            "dropped": run.counts.dropped,
        },
        "missing_reports": run.seen.holes(),
        "unwritten_reports": run.unwritten,
        "refused_reports": run.rejected,
        "decided": run.decided,
        "misses": run.counts.misses,
        "mismatches": run.counts.mismatches,
        "longest_wait_s": run.counts.longest_wait_s,
        "gauges": run.gauges,
        "state_handovers": run.handovers,
        "second_writers_refused": run.refused,
        "orders": [
            {
                "command": order.command,
                "state": order.state,
                "taken_step": order.taken_step,
                "issued_at": order.issued,
                "expires_at": order.expires,
            }
            for order in run.orders.values()
        ],
        "recent": list(run.recent)[-64:],
    }

"""The runs a sidecar knows: its copy of each engine state, and what it answers.

    runs = Runs(settings, timer)
    runs.register(message, now) -> Registered          runs.steps(message, now) -> Reply
    runs.hand_over(message, now), runs.close(message, now)
    runs.command(run, order, now), runs.expire(now)

The trainer's state is the only truth. The copy here follows the moves that each frame carries and
is compared by hash before every decision; whatever does not fit is answered with `need_state`. A
sidecar of another engine version only records. The highest fence writes: a process that was
replaced is refused, and so is a second live one.

Units:   `now` in Unix seconds; `timer` gives monotonic seconds, for durations only.
Purity:  no clock, no I/O; logging only. One thread (the event loop) calls it.
Errors:  RefusedError, which the routes turn into a Refused message.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from sentinel.core import engine
from sentinel.core.catalog import DECISIONS_S
from sentinel.core.errors import ProtocolError, SentinelError, StateError
from sentinel.core.events import Event, Restored, SnapshotTaken
from sentinel.core.policy import Policy
from sentinel.core.state import ENGINE_VERSION, State, Stats
from sentinel.core.types import (
    LAYER_ATTENTION_MAX_LOGIT,
    Action,
    Column,
    Command,
    Decision,
    Observation,
    Outcome,
    Source,
)
from sentinel.sidecar.settings import Settings
from sentinel.wire import codec, messages
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

RECENT = 4096  # rows of the newest steps, for people
WINDOW_S = 60.0  # window maxima cover one to two of these
COMMAND_TTL_S = 600.0
MAX_COMMANDS = 256


class RefusedError(SentinelError):
    """A request that cannot be served as asked; `code` and `status` go into the answer."""

    def __init__(self, code: str, detail: str, status: int = 409) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.status = status


class Seen:
    """Which frame numbers have arrived: intervals, so that a long run stays small."""

    def __init__(self, start: int = 0) -> None:
        self._start = start
        self._spans: list[list[int]] = []  # [first, last], ascending, apart

    def add(self, seq: int) -> bool:
        """Note `seq`; False when it was there already."""
        spans = self._spans
        at = len(spans)
        while at and spans[at - 1][0] > seq:
            at -= 1
        before = spans[at - 1] if at else None
        if before is not None and seq <= before[1]:
            return False
        after = spans[at] if at < len(spans) else None
        joins_before = before is not None and before[1] == seq - 1
        joins_after = after is not None and after[0] == seq + 1
        if joins_before and joins_after and before is not None and after is not None:
            before[1] = after[1]
            del spans[at]
        elif joins_before and before is not None:
            before[1] = seq
        elif joins_after and after is not None:
            after[0] = seq
        else:
            spans.insert(at, [seq, seq])
        return True

    def __contains__(self, seq: int) -> bool:
        return any(first <= seq <= last for first, last in self._spans)

    @property
    def count(self) -> int:
        """How many have arrived."""
        return sum(last - first + 1 for first, last in self._spans)

    @property
    def missing(self) -> int:
        """Holes: numbers from the start to the highest one that have not arrived."""
        if not self._spans:
            return 0
        return max(self._spans[-1][1] + 1 - self._start - self.count, 0)


class WindowMax:
    """The largest value of the last one to two windows; NaN counts as nothing."""

    def __init__(self) -> None:
        self._window = -1
        self._now = self._before = -math.inf

    def add(self, value: float | None, now: float) -> None:
        """Note a value."""
        self._turn(now)
        if value is not None and value > self._now:
            self._now = value

    def value(self, now: float) -> float | None:
        """The maximum, None when nothing came."""
        self._turn(now)
        most = max(self._now, self._before)
        return None if most == -math.inf else most

    def _turn(self, now: float) -> None:
        window = int(now // WINDOW_S)
        if window == self._window:
            return
        self._before = self._now if window == self._window + 1 else -math.inf
        self._now = -math.inf
        self._window = window


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
    """A person's command and what became of it: pending, taken, expired."""

    command: Command
    issued: float
    expires: float
    state: str = "pending"
    taken_step: int | None = None


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

    state: State | None = None
    known: bool = False  # `state` is what frame `next_seq` is to be decided on, after its moves
    next_seq: int = 0
    handed: bool = False  # `state` was handed over for next_seq: its moves are in it already
    observation: Observation | None = None
    decision: Decision | None = None
    undecided: bool = False  # the newest decision has no outcome yet
    reply: Reply | None = None
    answer: Any = None  # the newest answer to a JSON trainer
    stats_kept: dict[int, Stats] = field(default_factory=dict)

    run_state: str = "running"
    last_report: float = 0.0  # the newest frame
    last_heard: float = 0.0  # the newest sign of life: a long step or evaluation sends no frame
    columns: dict[str, Column] = field(default_factory=dict)
    decided: dict[str, int] = field(default_factory=dict)
    own: dict[str, int] = field(default_factory=dict)  # skipped by rule, when only recording
    counts: Counts = field(default_factory=Counts)
    late: int = 0
    handovers: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    seen: Seen = field(default_factory=Seen)
    recent: deque[Row] = field(default_factory=lambda: deque(maxlen=RECENT))
    orders: dict[str, Order] = field(default_factory=dict)
    duration: Histogram = field(default_factory=Histogram)
    norm_max: WindowMax = field(default_factory=WindowMax)
    score_max: WindowMax = field(default_factory=WindowMax)
    logit_max: WindowMax = field(default_factory=WindowMax)

    @property
    def decides(self) -> bool:
        """Whether the sidecar may decide for this run."""
        return not self.reason

    def live(self, now: float, lost_after_s: float) -> bool:
        """Whether its process is to be taken for alive."""
        return self.run_state == "running" and now - self.last_heard <= lost_after_s


class Runs:
    """All runs, by name."""

    def __init__(self, settings: Settings, timer: Callable[[], float]) -> None:
        self.settings = settings
        self.runs: dict[str, Run] = {}
        self._timer = timer
        self._handed = None if settings.policy is None else codec.encode_policy(settings.policy)

    def get(self, name: str) -> Run:
        """The run of that name; raises RefusedError."""
        run = self.runs.get(name)
        if run is None:
            raise RefusedError(
                "unknown_run", f"run {name!r} is not registered here: PUT /v1/runs/{name}", 404
            )
        return run

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
            info=dict(message.info),
            registered=now,
            max_layers=self.settings.max_layers,
            reason=reason,
            seen=Seen(message.first),
            last_report=now,
            last_heard=now,
        )
        self._enter(new, run, again)
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
        frames = [messages.decode_frame(raw) for raw in message.frames]
        run.last_heard = now
        if run.run_state == "lost":
            run.run_state = "running"
            logger.info("run is back run=%s", run.name)
        if message.counts is not None:
            run.counts = message.counts
        if not frames:
            orders = self._pending(run, now)
            return Reply(
                run=run.name, incarnation=run.incarnation, seq=-1, step=-1, commands=orders
            )
        run.last_report = now
        reply = None
        for frame in frames:
            if message.late:
                self._late(run, frame)
                reply = self._answer(run, frame, now, recorded_only="late")
            else:
                reply = self._live(run, frame, message, now)
                if reply.need_state:
                    break
        assert reply is not None
        return reply

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
        logger.info("state handed over run=%s step=%s", run.name, run.state.step)

    def close(self, message: Close, now: float) -> None:
        """The run is over; raises RefusedError."""
        run = self._writer(message.run, message.incarnation, message.fence)
        run.last_heard = now
        if message.counts is not None:
            run.counts = message.counts
        self._count(run, message.moves)
        if run.known and not run.handed:
            self._follow(run, message.moves)
        run.run_state = "halted" if message.state == "halted" else "finished"
        logger.info("run closed run=%s state=%s", run.name, run.run_state)

    def _live(self, run: Run, frame: Frame, message: Steps, now: float) -> Reply:
        if frame.seq in run.seen:
            # The same question again: our answer was lost on the way.
            last = run.reply
            if last is not None and last.seq == frame.seq:
                return msgspec.structs.replace(last, commands=self._pending(run, now))
            return self._answer(run, frame, now, recorded_only="this frame was recorded before")
        if frame.seq < run.next_seq:
            # Overtaken on the way by a later frame: its step is over.
            self._late(run, frame)
            return self._answer(run, frame, now, recorded_only="late")
        observation = codec.core_observation(frame.observation)
        reason = run.reason
        if not reason and message.engine_version != run.engine_version:
            reason = f"engine version {message.engine_version} is not the registered one"
        if not reason and message.policy_hash != run.policy_hash:
            reason = "the trainer runs another policy than it registered: register again"
        if reason:
            self._record(run, frame, observation, None, now, frame.attempt)
            return self._answer(run, frame, now, recorded_only=reason)
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
            self._record(run, frame, observation, None, now, run.state.ledger.attempt)
            return self._answer(run, frame, now, recorded_only="the sidecar failed to decide")
        run.duration.add(self._timer() - started)
        run.known, run.handed, run.undecided = True, False, True
        run.next_seq = frame.seq + 1
        self._record(run, frame, observation, decision, now, run.state.ledger.attempt)
        run.reply = self._answer(run, frame, now, decision=codec.encode_decision(decision))
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
        try:
            for move in moves:
                self._move(run, _core_move(move))
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

    def _late(self, run: Run, frame: Frame) -> None:
        if not run.seen.add(frame.seq):
            return
        run.late += 1
        self._count(run, frame.moves)
        seen = frame.observation
        own = frame.own
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

    def _record(
        self,
        run: Run,
        frame: Frame,
        observation: Observation,
        decision: Decision | None,
        now: float,
        attempt: int,
    ) -> None:
        run.seen.add(frame.seq)
        if decision is None and frame.own is not None:
            decision = codec.core_decision(frame.own)
        self._count(run, frame.moves)
        self._note_step(run, frame.seq, observation, decision, now, attempt)
        run.observation = observation
        if decision is not None:
            run.decision = decision

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
    ) -> Reply:
        return Reply(
            run=run.name,
            incarnation=run.incarnation,
            seq=frame.seq,
            step=frame.observation.step,
            decision=decision,
            need_state=need_state,
            recorded_only=recorded_only,
            commands=self._pending(run, now),
        )

    # ---- trainers without an engine ------------------------------------------------

    def register_json(self, name: str, layers: tuple[Layer, ...], now: float) -> Run:
        """Register a run whose state lives here: its trainer posts JSON and obeys."""
        old = self.runs.get(name)
        if old is not None and old.json and old.run_state in ("running", "lost"):
            old.layers = layers or old.layers
            old.last_heard = now
            return old
        run = self._admit(name, "json", 0, now)
        policy = self.settings.policy or Policy.load("default")
        data = codec.encode_policy(policy)
        new = Run(
            name=name,
            incarnation="json",
            fence=_fence(run, 0, False),
            policy=policy,
            policy_bytes=data,
            policy_hash=codec.digest(data),
            engine_version=ENGINE_VERSION,
            layers=_apart(layers),
            info={},
            registered=now,
            max_layers=self.settings.max_layers,
            json=True,
            last_report=now,
            last_heard=now,
        )
        self._enter(new, run, False)
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
        run.last_report = run.last_heard = now
        run.run_state = "running"
        if run.undecided and run.observation is not None and run.decision is not None:
            if observation.step == run.observation.step:
                return run.decision  # the same question again
            action = run.decision.action
            done = outcome or Outcome(
                run.observation.step, action, action is Action.PROCEED, Source.SIDECAR
            )
            run.decided["sidecar"] = run.decided.get("sidecar", 0) + 1
            try:
                self._move(run, replace(done, source=Source.SIDECAR))
            except StateError as error:
                raise RefusedError("malformed", str(error), 422) from error
        if run.state is None:
            run.state = engine.initial(observation.step)
        for event in events:
            run.state = engine.note(run.state, self._with_stats(run, event), run.policy)
        orders = self._pending(run, now)
        observation = replace(observation, commands=orders)
        started = self._timer()
        try:
            decision = engine.decide(run.state, observation, run.policy)
        except StateError as error:
            raise RefusedError("malformed", str(error), 422) from error
        run.duration.add(self._timer() - started)
        run.observation, run.decision, run.undecided = observation, decision, True
        run.seen.add(run.next_seq)
        self._note_step(run, run.next_seq, observation, decision, now, run.state.ledger.attempt)
        run.next_seq += 1
        return decision

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
            done = [key for key, order in run.orders.items() if order.state != "pending"]
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
        return order

    def expire(self, now: float) -> None:
        """Mark silent runs lost and old orders expired."""
        for run in self.runs.values():
            if run.run_state == "running" and now - run.last_heard > self.settings.lost_after_s:
                run.run_state = "lost"
                logger.warning("run lost run=%s silent_s=%.0f", run.name, now - run.last_heard)
            self._pending(run, now)

    def _pending(self, run: Run, now: float) -> tuple[Command, ...]:
        if not run.orders:
            return ()
        open_: list[Command] = []
        for order in run.orders.values():
            if order.state != "pending":
                continue
            if now >= order.expires:
                order.state = "expired"
                logger.info("order expired run=%s id=%s", run.name, order.command.id)
            else:
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
                f"wait until the other has been silent for {self.settings.lost_after_s:g} s"
            )
            run.refused = [*run.refused[-15:], incarnation]
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

    def _enter(self, new: Run, old: Run | None, again: bool) -> None:
        if old is not None:
            new.orders = old.orders
            new.refused = old.refused
            if again:
                # The same process once more, for example after its connection was cut.
                new.seen, new.recent, new.reply = old.seen, old.recent, old.reply
                new.decided, new.late, new.handovers = old.decided, old.late, old.handovers
                new.counts, new.errors, new.duration = old.counts, old.errors, old.duration
                new.state, new.observation, new.decision = old.state, old.observation, old.decision
                new.columns = old.columns
                new.registered = old.registered
        self.runs[new.name] = new
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
        del self.runs[oldest.name]


def _fence(old: Run | None, given: int, again: bool) -> int:
    if old is None:
        return max(given, 1)
    return max(old.fence, given) + (0 if again else 1)


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


def _core_move(move: Move) -> Outcome | Event:
    if isinstance(move, WireOutcome):
        return Outcome(move.step, move.executed, move.applied, Source(move.source))
    return codec.core_event(move)


# ---- views, for people ---------------------------------------------------------------


def summary(run: Run, now: float) -> dict[str, Any]:
    """One line of the list of runs."""
    seen, decision = run.observation, run.decision
    return {
        "run": run.name,
        "state": run.run_state,
        "step": None if seen is None else seen.step,
        "loss": None if seen is None else seen.loss,
        "grad_norm": None if seen is None else seen.grad_norm,
        "protection": "off" if decision is None else str(decision.readings.protection),
        "decides": run.decides,
        "reason": run.reason,
        "policy": run.policy.name,
        "mode": str(run.policy.mode),
        "last_report_s_ago": round(max(now - run.last_report, 0.0), 3),
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
        "decided": run.decided,
        "misses": run.counts.misses,
        "mismatches": run.counts.mismatches,
        "longest_wait_s": run.counts.longest_wait_s,
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

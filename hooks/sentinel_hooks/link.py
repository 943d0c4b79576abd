"""The link: whose decision is carried out at this step, and what the sidecar is told.

    link = make_link(sidecar, decide, run=..., incarnation=..., policy=..., pinned=...)
    link.policy                                        the policy this run shall use
    link.decide(observation, own, state) -> (decision, source)

The trainer's own engine has decided already when `decide` is called, so the link never has to
answer: a sidecar that is slow, dead or talks nonsense costs at most the deadline and a count. A
step that was missed is delivered later by a thread of its own: it fills the sidecar's record, and
decides nothing any more.

Threads: the training thread calls everything but RemoteLink._work, which is the one thread here;
         each has a connection of its own. The lock is held for list operations only.
Units:   seconds.
Errors:  make_link raises ConfigError for an address that is none. Nothing raises into the loop.
"""

from __future__ import annotations

import enum
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from sentinel.client import DEADLINE_S, Client, MissError
from sentinel.core.errors import ConfigError, ProtocolError
from sentinel.core.events import Event
from sentinel.core.orders import due
from sentinel.core.policy import Policy
from sentinel.core.state import State
from sentinel.core.types import Command, Decision, Mode, Observation, Outcome, Source
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
)
from sentinel_hooks.runqueue import RunQueue

logger = logging.getLogger(__name__)

SIDECAR_VARIABLE = "SENTINEL_SIDECAR"
STANDARD_SOCKET = "/run/sentinel/sentinel.sock"
REGISTER_DEADLINE_S = 2.0
LATE_DEADLINE_S = 2.0  # of the thread's own calls: nobody waits for them
CLOSE_DEADLINE_S = 2.0
RETRY_S = 30.0
FLOOR_S = 0.003  # what steps shorter than 300 ms may wait on average
HEARTBEAT_S = 15.0  # a sidecar takes a run for lost after 60 s; steps may be longer than that
BUFFER_FRAMES = 10_000
BUFFER_BYTES = 64 * 2**20
BATCH_FRAMES = 64
BATCH_BYTES = 2**20
GATHER_S = 0.05  # the thread wakes no oftener than this for frames that nobody waits for
ORDERS_KEPT = 1024


class Decide(enum.StrEnum):
    """Whose decision is carried out when a sidecar is there."""

    SIDECAR = "sidecar"  # wait for it, at most until the deadline
    TRAINER = "trainer"  # never wait; the sidecar is told afterwards


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """The link in plain values, for `session.status()`.

    Attributes:
        state: embedded, connected, recording_only, connecting, breaker_open, refused, closed; on
            another rank than 0: rank_0_asks.
        detail: one sentence when there is something to say.
        decided: steps by whose decision was carried out.
        misses: steps on which the sidecar was asked in vain, by reason.
        mismatches: answers that differed from the trainer's own decision.
        dropped: frames lost because the buffer was full.
        buffered: frames that wait to be delivered.
        longest_wait_s: the longest that one step waited for the sidecar, or for a core after it.
    """

    url: str = ""
    decide: Decide = Decide.TRAINER
    state: str = "embedded"
    detail: str = ""
    decided: Mapping[str, int] = field(default_factory=dict)
    misses: Mapping[str, int] = field(default_factory=dict)
    mismatches: int = 0
    dropped: int = 0
    buffered: int = 0
    longest_wait_s: float = 0.0


Says = Callable[[], tuple[str, str]]
"""The protection now and why, where it is not what the last decision says; else two times ""."""


class Link(Protocol):
    """What the session needs; every method returns promptly and never raises.

    Order of calls: event() for what happens before the first step (snapshot 0); then for each
    step decide(), settled() when its outcome has been applied to the state, and event() for each
    event noted after it. `state` at decide() is the state that `own` was decided on.
    """

    @property
    def policy(self) -> Policy:
        """The policy this run shall use; final once make_link has returned."""
        ...

    def decide(
        self, observation: Observation, own: Decision, state: State
    ) -> tuple[Decision, Source]:
        """The decision to carry out, and whose it is."""
        ...

    def settled(self, observation: Observation, decision: Decision, outcome: Outcome) -> None:
        """`outcome` was applied to the state."""
        ...

    def event(self, event: Event) -> None:
        """`event` was noted in the state."""
        ...

    def take_commands(self) -> tuple[Command, ...]:
        """People's orders that arrived since the last call, for the next observation."""
        ...

    def ask(self, says: Says) -> None:
        """Whom to ask what each sign of life says of the protection; in any thread."""
        ...

    def count_error(self, where: str) -> None:
        """An error of sentinel's own was caught in the trainer: the sidecar shall show it."""
        ...

    def status(self) -> LinkStatus:
        """How the link is doing."""
        ...

    def close(self, how: str = "finished", state: State | None = None) -> None:
        """Deliver what can be delivered within two seconds and let go.

        Args:
            how: finished, halted, or lost: it crashed, and no goodbye is said.
            state: the final state, for a sidecar that missed something.
        """
        ...


class EmbeddedLink:
    """No sidecar: the trainer's own engine decides, nothing is sent."""

    def __init__(self, policy: Policy, *, asked_by_rank_0: str = "") -> None:
        """`asked_by_rank_0`: on another rank, the address of the sidecar that rank 0 has."""
        self._policy = policy
        self._url = asked_by_rank_0
        self._decided = 0

    @property
    def policy(self) -> Policy:
        return self._policy

    def decide(
        self, observation: Observation, own: Decision, state: State
    ) -> tuple[Decision, Source]:
        self._decided += 1
        return own, Source.TRAINER

    def settled(self, observation: Observation, decision: Decision, outcome: Outcome) -> None:
        pass

    def event(self, event: Event) -> None:
        pass

    def take_commands(self) -> tuple[Command, ...]:
        return ()

    def ask(self, says: Says) -> None:
        pass

    def count_error(self, where: str) -> None:
        pass

    def status(self) -> LinkStatus:
        if self._url:
            return LinkStatus(self._url, state="rank_0_asks", detail="its status() says how it is")
        return LinkStatus(decided={str(Source.TRAINER): self._decided})

    def close(self, how: str = "finished", state: State | None = None) -> None:
        pass


class Breaker:
    """When to stop asking: 3 misses in a row, or waiting too much over 100 steps.

    An answer that took more than half of the deadline counts among the misses in a row: a sidecar
    that always answers at 45 ms is left after three. Too much is more than max(1 % of the step
    time, 3 ms) a step, over the last 100 steps, those that did not ask included. It opens for 30 s,
    and for as long as the last 100 steps waited more than half of that; then one step asks again,
    and a prompt answer closes it. So no 100 steps ever wait for more than the bound and one answer.

    Judged is what the sidecar made the trainer wait: its caller takes off the time in which the
    answer may have been there and the trainer had no core. Why 3 ms and not less:
    docs/decisions/2026-11-29-breaker.md.
    """

    def __init__(
        self,
        *,
        misses: int = 3,
        over: int = 100,
        share: float = 0.01,
        floor_s: float = FLOOR_S,
        slow_s: float = DEADLINE_S / 2,
        retry_s: float = RETRY_S,
    ) -> None:
        self._limit = misses
        self._share = share
        self._floor_s = floor_s
        self._slow_s = slow_s
        self._retry_s = retry_s
        self._in_a_row = 0
        self._waits: deque[float] = deque([0.0], maxlen=over)  # the last is of the step going on
        self._steps: deque[float] = deque(maxlen=over)
        self._opened: float | None = None
        self.why = ""

    @property
    def open(self) -> bool:
        """Whether it is open; a trial step may be due all the same."""
        return self._opened is not None

    def allows(self, now: float) -> bool:
        """Whether this step may ask."""
        if self._opened is None:
            return True
        return now - self._opened >= self._retry_s and self._average() <= 0.5 * self._bound()

    def step(self, seconds: float) -> None:
        """A step begins, so long after the one before, from decision to decision."""
        self._steps.append(seconds)
        self._waits.append(0.0)

    def answered(self, waited: float, now: float) -> None:
        """An answer came after `waited`."""
        if waited > self._slow_s:
            self._bad(waited, now, f"{self._limit} misses or late answers in a row")
            return
        self._in_a_row = 0
        self._opened = None
        self._wait(waited, now)

    def missed(self, waited: float, now: float) -> None:
        """None came, or none that counts."""
        self._bad(waited, now, f"{self._limit} misses in a row")

    def _bad(self, waited: float, now: float, why: str) -> None:
        self._in_a_row += 1
        self._wait(waited, now)
        if self._opened is not None:
            self._opened = now  # the trial failed
        elif self._in_a_row >= self._limit:
            self._opened, self.why = now, why

    def _wait(self, waited: float, now: float) -> None:
        self._waits[-1] += waited
        average, bound = self._average(), self._bound()
        if self._opened is None and average > bound:
            self._opened = now
            self.why = (
                f"waited {average * 1e3:.1f} ms a step on average, above {bound * 1e3:.1f} ms"
            )

    def _average(self) -> float:
        """Over a whole window: the steps before the first one waited for nothing."""
        return sum(self._waits) / (self._waits.maxlen or 1)

    def _bound(self) -> float:
        step = sum(self._steps) / len(self._steps) if self._steps else 0.0
        return max(self._share * step, self._floor_s)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A frame that waits to be delivered."""

    seq: int
    raw: bytes


class RemoteLink:
    """A sidecar at the other end; see make_link."""

    def __init__(
        self,
        url: str,
        decide: Decide,
        *,
        run: str,
        incarnation: str,
        policy: Policy,
        pinned: bool,
        mode: Mode | None,
        layers: Sequence[Layer],
        info: Mapping[str, str],
        token: str | None,
        deadline_s: float,
        breaker: Breaker | None,
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._fast = Client(url, token=token, clock=clock)
        self._slow = Client(url, token=token, clock=clock)
        self._url = url
        self._mode = decide
        self._run = run
        self._incarnation = incarnation
        self._layers = tuple(layers)
        self._info = dict(info)
        self._deadline_s = deadline_s
        self._breaker = breaker or Breaker(slow_s=deadline_s / 2)
        self._queue = RunQueue()
        self._stood_s = 0.0  # the queue's sum when this step began to ask

        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._buffer: deque[_Kept] = deque()
        self._buffered_bytes = 0
        self._orders: deque[tuple[Command, float]] = deque()  # and until when each may be obeyed
        self._known_orders: dict[str, None] = {}
        self._latest: tuple[int, State] | None = None  # of the newest frame, for a hand-over
        self._live_from = 0  # the thread's frames before it are late: the state is beyond them

        self._seq = 0
        self._fence = 0
        self._moves: list[Move] = []
        self._last_decide: float | None = None
        self._decided = {str(Source.SIDECAR): 0, str(Source.TRAINER): 0}
        self._misses: dict[str, int] = {}
        self._errors: dict[str, int] = {}
        self._mismatches = 0
        self._dropped = 0
        self._longest_wait_s = 0.0
        self._told: Counts | None = None  # the counts that the sidecar knows
        self._says: Says = lambda: ("", "")

        self._ready = False
        self._decides = True
        self._detail = "not registered yet"
        self._refused = False
        self._retry_at = 0.0
        self._closing: str | None = None
        self._closed = False
        self._final: State | None = None
        self._heartbeat_at = clock() + HEARTBEAT_S

        self._policy = policy
        self._policy_bytes = codec.encode_policy(policy)
        self._policy_hash = codec.digest(self._policy_bytes)
        self._first_registration(pinned, mode)
        self._thread = threading.Thread(target=self._work, name="sentinel-link", daemon=True)
        self._thread.start()

    # ---- the training thread ---------------------------------------------------------

    @property
    def policy(self) -> Policy:
        return self._policy

    def decide(
        self, observation: Observation, own: Decision, state: State
    ) -> tuple[Decision, Source]:
        start = self._clock()
        try:
            if self._last_decide is not None:
                self._breaker.step(start - self._last_decide)
            self._last_decide = start
            decision = self._ask(observation, own, state, start)
        except Exception as error:  # noqa: BLE001 (whatever it is, the own decision stands)
            self._caught("link", error)
            decision = None
        source = Source.TRAINER if decision is None else Source.SIDECAR
        self._decided[str(source)] += 1
        return own if decision is None else decision, source

    def settled(self, observation: Observation, decision: Decision, outcome: Outcome) -> None:
        self._moves.append(messages.wire_outcome(outcome))

    def event(self, event: Event) -> None:
        self._moves.append(codec.wire_event(event))

    def take_commands(self) -> tuple[Command, ...]:
        if not self._orders:
            return ()
        now = self._clock()
        with self._lock:
            waiting = {order.id: (order, until) for order, until in self._orders if now < until}
            taken, later = due([order for order, _ in waiting.values()])
            self._orders = deque(waiting[order.id] for order in later)
        return taken

    def ask(self, says: Says) -> None:
        self._says = says

    def count_error(self, where: str) -> None:
        self._errors[where] = self._errors.get(where, 0) + 1

    def status(self) -> LinkStatus:
        with self._lock:
            buffered = len(self._buffer)
        if self._closed:
            state, detail = "closed", ""
        elif self._refused:
            state, detail = "refused", self._detail
        elif not self._ready:
            state, detail = "connecting", self._detail
        elif not self._decides:
            state, detail = "recording_only", self._detail
        elif self._breaker.open:
            state, detail = "breaker_open", self._breaker.why
        else:
            state, detail = "connected", ""
        return LinkStatus(
            url=self._url,
            decide=self._mode,
            state=state,
            detail=detail,
            decided=dict(self._decided),
            misses=dict(self._misses),
            mismatches=self._mismatches,
            dropped=self._dropped,
            buffered=buffered,
            longest_wait_s=self._longest_wait_s,
        )

    def close(self, how: str = "finished", state: State | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        self._final = state
        with self._wake:
            self._closing = how
            self._wake.notify()
        self._thread.join(CLOSE_DEADLINE_S + 0.5)
        self._fast.close()
        self._queue.close()

    def _ask(
        self, observation: Observation, own: Decision, state: State, start: float
    ) -> Decision | None:
        """The sidecar's decision; None when the trainer's own one stands."""
        seq, moves = self._seq, tuple(self._moves)
        self._seq += 1
        self._moves.clear()
        raw = messages.encode_frame(
            Frame(
                seq=seq,
                attempt=state.ledger.attempt,
                observation=codec.wire_observation(observation),
                moves=moves,
                state_hash=codec.state_hash(state),
                own=codec.wire_decision(own),
            )
        )
        waits = self._mode is Decide.SIDECAR and self._decides
        with self._lock:
            self._latest = (seq, state)
        if not waits:
            self._keep(seq, raw)
            return None
        if not self._ready:
            self._miss("refused" if self._refused else "unregistered")
        elif not self._breaker.allows(start):
            self._miss("breaker_open")
        else:
            self._stood_s = self._queue.waited_s()
            try:
                reply = self._exchange(seq, raw, state, start + self._deadline_s)
                decision = self._judge(reply, own, observation.step)
            except MissError as error:
                self._missed(error, start)
            else:
                self._answered(start)
                if not reply.recorded:
                    self._keep(seq, raw)  # its disk fails: it is told again until it heals
                if decision is not None:
                    return decision
                self._miss("recorded_only")
                return None  # it is in the record already
        self._keep(seq, raw)
        return None

    def _exchange(self, seq: int, raw: bytes, state: State, until: float) -> Reply:
        """Post one frame, and the state if it is asked for; raises MissError."""
        for attempt in range(2):
            counts = self._news()
            asked = self._clock()
            reply = self._fast.post_steps(
                self._steps((raw,), late=False, counts=counts), deadline_s=until - self._clock()
            )
            self._told = counts or self._told
            if (reply.run, reply.incarnation, reply.seq) != (self._run, self._incarnation, seq):
                raise MissError("garbled", f"an answer to frame {reply.seq}, not {seq}")
            self._take_orders(reply, asked)
            if not reply.need_state:
                return reply
            if attempt == 0:
                self._fast.put_state(
                    HandOver(
                        run=self._run,
                        incarnation=self._incarnation,
                        fence=self._fence,
                        seq=seq,
                        state=codec.encode_state(state),
                    ),
                    deadline_s=until - self._clock(),
                )
        raise MissError("need_state", "it asks for the state that it was just given")

    def _judge(self, reply: Reply, own: Decision, step: int) -> Decision | None:
        """The decision in an answer; None when the sidecar only recorded."""
        if reply.step != step:
            raise MissError("garbled", f"an answer to step {reply.step}, not {step}")
        if reply.decision is None:
            self._detail = reply.recorded_only
            return None
        if reply.decision == codec.encode_decision(own):
            return own  # with its memo, which saves computing it again
        try:
            decision = codec.decode_decision(reply.decision)
        except ProtocolError as error:
            raise MissError("garbled", str(error)) from error
        if decision.step != step:
            raise MissError("garbled", f"a decision of step {decision.step}, not {step}")
        self._mismatches += 1
        if self._mismatches == 1:
            logger.warning(
                "the sidecar decides otherwise than the trainer run=%s step=%s sidecar=%s own=%s",
                self._run,
                step,
                decision.action.name,
                own.action.name,
            )
        return decision

    def _answered(self, start: float) -> None:
        was_open = self._breaker.open
        self._breaker.answered(*self._waited(start))
        if was_open and not self._breaker.open:
            logger.info("the sidecar answers again run=%s url=%s", self._run, self._url)
        self._say_if_opened(was_open)

    def _missed(self, error: MissError, start: float) -> None:
        self._fast.close()
        self._miss(error.reason)
        self._detail = str(error)
        was_open = self._breaker.open
        if error.reason == "unknown_run":
            self._breaker.answered(*self._waited(start))  # it is there, and only has to be told
        else:
            self._breaker.missed(*self._waited(start))
        self._say_if_opened(was_open)
        if error.reason in ("unknown_run", "fenced"):
            self._lose_registration(error)

    def _waited(self, start: float) -> tuple[float, float]:
        """(how long the sidecar made this step wait, now): without the wait for a core."""
        now = self._clock()
        waited = now - start
        self._longest_wait_s = max(self._longest_wait_s, waited)
        return max(waited - max(self._queue.waited_s() - self._stood_s, 0.0), 0.0), now

    def _say_if_opened(self, was_open: bool) -> None:
        if self._breaker.open and not was_open:
            logger.warning(
                "stopped asking the sidecar, the trainer decides run=%s url=%s why=%s last=%s",
                self._run,
                self._url,
                self._breaker.why,
                self._detail,
            )

    def _miss(self, reason: str) -> None:
        self._misses[reason] = self._misses.get(reason, 0) + 1

    def _caught(self, where: str, error: Exception) -> None:
        if where not in self._errors:
            logger.error("error in sentinel's own code, going on run=%s", self._run, exc_info=error)
        self.count_error(where)

    # ---- both threads ----------------------------------------------------------------

    def _keep(self, seq: int, raw: bytes) -> None:
        """Buffer a frame for delivery; the oldest make room, and are counted."""
        with self._wake:
            self._buffer.append(_Kept(seq, raw))
            self._buffered_bytes += len(raw)
            while len(self._buffer) > BUFFER_FRAMES or self._buffered_bytes > BUFFER_BYTES:
                self._buffered_bytes -= len(self._buffer.popleft().raw)
                self._dropped += 1
            self._wake.notify()

    def _steps(self, frames: Sequence[bytes], *, late: bool, counts: Counts | None) -> Steps:
        # A frame speaks for itself: whoever brings one has just stepped.
        protection, why = ("", "") if frames else self._protection()
        return Steps(
            run=self._run,
            incarnation=self._incarnation,
            fence=self._fence,
            policy_hash=self._policy_hash,
            late=late,
            counts=counts,
            protection=protection,
            why=why,
            frames=tuple(msgspec.Raw(raw) for raw in frames),
        )

    def _protection(self) -> tuple[str, str]:
        try:
            return self._says()
        except Exception as error:  # noqa: BLE001 (the sign of life is worth more)
            self._caught("protection", error)
            return "", ""

    def _news(self) -> Counts | None:
        """The trainer's counters when the sidecar does not know them yet."""
        counts = self._counts()
        return None if counts == self._told else counts

    def _counts(self) -> Counts:
        return Counts(
            misses=dict(self._misses),
            internal_errors=dict(self._errors),
            mismatches=self._mismatches,
            dropped=self._dropped,
            longest_wait_s=self._longest_wait_s,
        )

    def _take_orders(self, reply: Reply, asked: float) -> None:
        """Keep the orders for the next step; `asked`: when the question was sent.

        What is left of an order counts from then, so that it never lasts longer here than by the
        sidecar's clock, however long the answer was on its way or the step takes.
        """
        if not reply.commands:
            return
        left = reply.expires_in_s
        with self._lock:
            for at, order in enumerate(reply.commands):
                if order.id not in self._known_orders:
                    self._known_orders[order.id] = None
                    until = asked + left[at] if at < len(left) else math.inf
                    self._orders.append((order, until))
            while len(self._known_orders) > ORDERS_KEPT:
                del self._known_orders[next(iter(self._known_orders))]

    def _lose_registration(self, error: MissError) -> None:
        """Register again: at once when it forgot us, later when another writes this run."""
        with self._wake:
            self._ready = False
            self._refused = error.reason == "fenced"
            self._retry_at = self._clock() + (RETRY_S if self._refused else 0.0)
            self._wake.notify()

    # ---- registration ----------------------------------------------------------------

    def _first_registration(self, pinned: bool, mode: Mode | None) -> None:
        """Meet the sidecar while the user still waits for attach, and hear its policy."""
        try:
            answer = self._register(self._slow, pinned)
            if not pinned:
                handed = codec.decode_policy(answer.policy).with_mode(mode)
                self._policy, self._policy_bytes = handed, codec.encode_policy(handed)
                self._policy_hash = codec.digest(self._policy_bytes)
                if self._policy_bytes != answer.policy:
                    self._register(self._slow, True)
        except MissError as error:
            self._unregistered(error)
        except ProtocolError as error:
            self._unregistered(MissError("garbled", str(error)))
        except Exception as error:  # noqa: BLE001 (attach goes on, and the trainer decides)
            self._caught("link", error)
            self._unregistered(MissError("internal", f"{type(error).__name__}: {error}"))

    def _register(self, client: Client, pinned: bool) -> Registered:
        with self._lock:
            first = self._buffer[0].seq if self._buffer else self._seq
        answer = client.register(
            Register(
                run=self._run,
                incarnation=self._incarnation,
                fence=self._fence,
                policy=self._policy_bytes,
                pinned=pinned,
                first=first,
                layers=self._layers,
                info=self._info,
            ),
            deadline_s=REGISTER_DEADLINE_S,
        )
        if answer.run != self._run:
            raise MissError("garbled", f"an answer about run {answer.run!r}")
        self._fast.share(client)  # a step never looks a name up
        self._fence = answer.fence
        self._decides = answer.decides
        self._detail = answer.reason
        self._refused = False
        self._told = None
        self._ready = True
        if not answer.decides:
            logger.warning("the sidecar only records run=%s why=%s", self._run, answer.reason)
        return answer

    def _unregistered(self, error: MissError) -> None:
        first = self._detail != str(error)
        self._detail = str(error)
        self._ready = False
        self._refused = error.reason == "fenced"
        self._retry_at = self._clock() + RETRY_S
        if first:
            logger.warning(
                "not registered with the sidecar, the trainer decides run=%s url=%s why=%s",
                self._run,
                self._url,
                error,
            )

    # ---- the thread ------------------------------------------------------------------

    def _work(self) -> None:
        """Register again, deliver what was missed, say goodbye."""
        while True:
            try:
                with self._wake:
                    pause = self._pause()
                    if pause > 0.0 and self._closing is None:
                        self._wake.wait(pause)
                    if self._closing is None and (
                        self._mode is Decide.TRAINER or not self._decides or self._breaker.open
                    ):
                        self._wake.wait_for(lambda: self._closing is not None, GATHER_S)
                    closing = self._closing
                if closing is not None:
                    self._finish(closing)
                    break
                self._turn(LATE_DEADLINE_S)
            except Exception as error:  # noqa: BLE001 (counted; the trainer needs nobody)
                self._caught("link_thread", error)
                if self._closing is not None:
                    break
                self._retry_at = self._clock() + RETRY_S
        self._slow.close()

    def _pause(self) -> float:
        """How long there is nothing to do."""
        now = self._clock()
        if self._retry_at > now:
            return self._retry_at - now
        if not self._ready:
            return 0.0
        return 0.0 if self._buffer else self._heartbeat_at - now

    def _turn(self, deadline_s: float) -> bool:
        """One round of work; False when the sidecar does not play along."""
        try:
            if self._clock() < self._retry_at:
                return False
            if not self._ready:
                self._register(self._slow, True)
                logger.info("registered with the sidecar run=%s url=%s", self._run, self._url)
            self._deliver(deadline_s)
        except MissError as error:
            if not self._ready or error.reason == "fenced":
                self._unregistered(error)
            elif error.reason == "unknown_run":
                self._lose_registration(error)
            else:
                self._detail = str(error)
                self._retry_at = self._clock() + 1.0
            if error.reason in ("unreachable", "timeout"):
                self._look_up_again()
            return False
        return True

    def _look_up_again(self) -> None:
        """A sidecar that was started anew may have another address under its name."""
        try:
            self._slow.resolve(anew=True)
        except MissError:
            return  # as unreachable as before
        self._fast.share(self._slow)

    def _deliver(self, deadline_s: float) -> None:
        """Send one batch from the front of the buffer; raises MissError."""
        batch: list[_Kept] = []
        with self._lock:
            size, late = 0, True
            for kept in self._buffer:
                is_late = kept.seq < self._live_from
                if batch and (is_late != late or size + len(kept.raw) > BATCH_BYTES):
                    break
                late = is_late
                batch.append(kept)
                size += len(kept.raw)
                if len(batch) == BATCH_FRAMES:
                    break
        if not batch and self._clock() < self._heartbeat_at:
            return
        self._heartbeat_at = self._clock() + HEARTBEAT_S
        counts = self._news()
        asked = self._clock()
        reply = self._slow.post_steps(
            self._steps([kept.raw for kept in batch], late=late, counts=counts),
            deadline_s=deadline_s,
        )
        if (reply.run, reply.incarnation) != (self._run, self._incarnation):
            raise MissError("garbled", f"an answer about run {reply.run!r}")
        self._told = counts or self._told
        self._take_orders(reply, asked)
        if reply.refused:  # it does not want them again; the trace on disk has them
            logger.error(
                "the sidecar refuses reports that make no sense run=%s reports=%d first=%s",
                self._run,
                len(reply.refused),
                reply.refused[0],
            )
        if not batch:
            return
        if not reply.recorded:
            raise MissError("refused", "its disk takes no reports now")  # told again in a second
        done = batch[-1].seq
        if reply.need_state:
            try:
                self._hand_over_latest(deadline_s)
            except MissError as error:
                if error.reason != "refused":
                    raise
                # It cannot read our state: let it have the record at least.
                self._live_from = self._seq
                self._detail = str(error)
            done = reply.seq - 1
        with self._lock:
            while self._buffer and self._buffer[0].seq <= done:
                self._buffered_bytes -= len(self._buffer.popleft().raw)

    def _hand_over_latest(self, deadline_s: float) -> None:
        """Give the newest state; what lies between is late."""
        with self._lock:
            latest = self._latest
        if latest is None:
            raise MissError("need_state", "there is no state to hand over yet")
        seq, state = latest
        self._hand_over(seq, state, deadline_s)
        self._live_from = seq

    def _hand_over(self, seq: int, state: State, deadline_s: float) -> None:
        self._slow.put_state(
            HandOver(
                run=self._run,
                incarnation=self._incarnation,
                fence=self._fence,
                seq=seq,
                state=codec.encode_state(state),
            ),
            deadline_s=deadline_s,
        )

    def _finish(self, how: str) -> None:
        until = self._clock() + CLOSE_DEADLINE_S
        self._retry_at = 0.0
        while self._buffer and self._clock() < until:
            if not self._turn(until - self._clock()):
                break
        if not self._ready or self._clock() >= until or how == "lost":
            return  # no goodbye from a run that crashed: the sidecar will miss it, and say so
        try:
            if self._final is not None:
                # Whatever was late or lost on the way: the totals end exact.
                self._hand_over(self._seq, self._final, max(until - self._clock(), 0.0))
        except MissError as error:
            logger.info("the final state did not arrive run=%s why=%s", self._run, error)
        try:
            self._slow.post_close(
                Close(
                    run=self._run,
                    incarnation=self._incarnation,
                    fence=self._fence,
                    state=how,
                    moves=tuple(self._moves),
                    counts=self._counts(),
                ),
                deadline_s=max(until - self._clock(), 0.0),
            )
        except MissError as error:
            logger.info("could not say goodbye run=%s why=%s", self._run, error)


def sidecar_url(sidecar: Any) -> str | None:
    """The address that `sidecar` means; None for the embedded engine."""
    if sidecar in (None, False, ""):
        return None
    if not isinstance(sidecar, str):
        raise ConfigError(
            "sidecar must be 'auto', None, http://host:port or unix:///path/to/socket, "
            f"got {sidecar!r}"
        )
    if sidecar != "auto":
        return sidecar
    given = os.environ.get(SIDECAR_VARIABLE)
    if given:
        return given
    return f"unix://{STANDARD_SOCKET}" if Path(STANDARD_SOCKET).is_socket() else None


def make_link(
    sidecar: str | None,
    decide: str | None = None,
    *,
    run: str,
    incarnation: str,
    policy: Policy,
    pinned: bool = True,
    mode: Mode | None = None,
    layers: Sequence[Layer] = (),
    info: Mapping[str, str] | None = None,
    token: str | None = None,
    deadline_s: float = DEADLINE_S,
    breaker: Breaker | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Link:
    """A link to the sidecar at `sidecar`, or the embedded one.

    Waits up to two seconds for the registration; a sidecar that is not there is tried again every
    30 s, and until then the trainer decides.

    Args:
        sidecar: "auto" ($SENTINEL_SIDECAR, else the standard socket if it is there, else
            embedded), None (embedded), or http://host:port or unix:///path.
        decide: "sidecar" (default) or "trainer".
        incarnation: unique to this attach, for example uuid4().hex.
        pinned: the user chose `policy`; otherwise the sidecar may hand the run another one.
        mode: the user's mode, which a handed policy has to take on.
        layers: the layer table, in the order of the columns.
        info: host, pid, versions: for people.
        token: shared secret over TCP; default $SENTINEL_TOKEN.

    Raises:
        ConfigError: `sidecar` or `decide` is none of these.
    """
    try:
        chosen = Decide.SIDECAR if decide is None else Decide(decide)
    except ValueError:
        raise ConfigError(f"decide must be 'sidecar' or 'trainer', got {decide!r}") from None
    url = sidecar_url(sidecar)
    if url is None:
        return EmbeddedLink(policy)
    return RemoteLink(
        url,
        chosen,
        run=run,
        incarnation=incarnation,
        policy=policy,
        pinned=pinned,
        mode=mode,
        layers=layers,
        info=info or {},
        token=token,
        deadline_s=deadline_s,
        breaker=breaker,
        clock=clock,
    )

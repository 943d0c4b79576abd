"""The link: whose decision is carried out, when it stops asking, what it delivers later."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sentinel.client import Client, MissError
from sentinel.core import engine
from sentinel.core.errors import ConfigError
from sentinel.core.policy import Policy
from sentinel.core.state import State
from sentinel.core.types import (
    Action,
    Command,
    CommandKind,
    Decision,
    Observation,
    Outcome,
    Source,
)
from sentinel.wire import codec, messages
from sentinel.wire.messages import (
    Accepted,
    Close,
    Frame,
    HandOver,
    Register,
    Registered,
    Reply,
    Steps,
)
from sentinel_hooks import link as link_module
from sentinel_hooks.link import (
    Breaker,
    EmbeddedLink,
    Link,
    RemoteLink,
    make_link,
    sidecar_url,
)
from sentinel_hooks.runqueue import RunQueue
from tests.support.waits import until

pytestmark = pytest.mark.torch  # sentinel_hooks imports it

POLICY = Policy.load("default")


class Sidecar:
    """A scripted sidecar in place of the HTTP client of one link."""

    def __init__(self) -> None:
        self.down: MissError | None = None
        self.cannot_read: MissError | None = None
        self.registrations: list[Register] = []
        self.handed: list[HandOver] = []
        self.frames: list[tuple[Frame, bool]] = []
        self.closed: list[Close] = []
        self.answers: list[Any] = []  # overrides for the next live frames
        self.orders: tuple[Command, ...] = ()
        self.left: tuple[float, ...] = ()
        self.policy: bytes | None = None
        self.decides = True
        self.heartbeats = 0
        self.said: list[tuple[str, str]] = []  # protection and why, of each message
        self.lookups = 0
        self.shared = 0
        self.on_steps: Callable[[], object] = lambda: None
        self.lock = threading.Lock()

    def answer(self, frame: Frame, **changes: Any) -> Reply:
        seen = codec.core_observation(frame.observation)
        assert frame.own is not None
        given: dict[str, Any] = {
            "run": "r",
            "incarnation": "i",
            "seq": frame.seq,
            "step": seen.step,
            "decision": codec.encode(frame.own),
            "commands": self.orders,
            "expires_in_s": self.left,
        }
        return Reply(**(given | changes))


class FakeClient:
    """What the link uses of sentinel.client.Client."""

    def __init__(self, sidecar: Sidecar) -> None:
        self.sidecar = sidecar

    def _up(self) -> None:
        if self.sidecar.down is not None:
            raise self.sidecar.down

    def resolve(self, *, anew: bool = False) -> None:
        self.sidecar.lookups += anew

    def share(self, other: object) -> None:
        self.sidecar.shared += 1

    def register(self, message: Register, *, deadline_s: float) -> Registered:
        self._up()
        self.sidecar.registrations.append(message)
        policy = message.policy if message.pinned else self.sidecar.policy or message.policy
        return Registered(
            run="r", fence=1, policy=policy, decides=self.sidecar.decides, reason="why"
        )

    def post_steps(self, message: Steps, *, deadline_s: float) -> Reply:
        assert deadline_s > 0.0
        self._up()
        sidecar = self.sidecar
        sidecar.on_steps()
        with sidecar.lock:
            frames = [messages.decode_frame(raw) for raw in message.frames]
            sidecar.said.append((message.protection, message.why))
            if not frames:
                sidecar.heartbeats += 1
                return Reply(run="r", incarnation="i", seq=-1, step=-1, commands=sidecar.orders)
            sidecar.frames += [(frame, message.late) for frame in frames]
            if message.late:
                return sidecar.answer(frames[-1], decision=None, recorded_only="late")
            if sidecar.answers:
                answer = sidecar.answers.pop(0)
                if isinstance(answer, Exception):
                    raise answer
                return sidecar.answer(frames[-1], **answer)
            return sidecar.answer(frames[-1])

    def put_state(self, message: HandOver, *, deadline_s: float) -> Accepted:
        self._up()
        if self.sidecar.cannot_read is not None:
            raise self.sidecar.cannot_read
        self.sidecar.handed.append(message)
        return Accepted(run="r")

    def post_close(self, message: Close, *, deadline_s: float) -> Accepted:
        self._up()
        self.sidecar.closed.append(message)
        return Accepted(run="r")

    def close(self) -> None:
        pass


@contextmanager
def linked(
    monkeypatch: pytest.MonkeyPatch, sidecar: Sidecar, decide: str = "sidecar", **options: Any
) -> Iterator[RemoteLink]:
    monkeypatch.setattr(link_module, "Client", lambda *_, **__: FakeClient(sidecar))
    given: dict[str, Any] = {"run": "r", "incarnation": "i", "policy": POLICY} | options
    link = make_link("http://127.0.0.1:1", decide, **given)
    assert isinstance(link, RemoteLink)
    try:
        yield link
    finally:
        link.close()


class Loop:
    """decide and settle, step after step, on a quiet series."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.state: State = engine.initial()

    def step(self, **seen: Any) -> tuple[Decision, Source]:
        observation = Observation(self.state.step, 2.0, 1.0, **seen)
        own = engine.decide(self.state, observation, POLICY)
        decision, source = self.link.decide(observation, own, self.state)
        outcome = Outcome(
            observation.step, decision.action, decision.action is Action.PROCEED, source
        )
        self.state = engine.apply(self.state, observation, decision, outcome, POLICY)
        self.link.settled(observation, decision, outcome)
        return decision, source


class TestEmbedded:
    def test_without_a_sidecar_the_trainers_own_decision_is_carried_out(self) -> None:
        link = make_link(None, run="r", incarnation="i", policy=POLICY)
        loop = Loop(link)
        assert loop.step()[1] is Source.TRAINER
        assert link.status().state == "embedded"
        assert link.take_commands() == ()
        assert isinstance(link, EmbeddedLink)
        link.close()

    def test_auto_means_the_variable_then_the_standard_socket_then_none(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        import socket

        path = tmp_path / "s.sock"
        monkeypatch.setattr(link_module, "STANDARD_SOCKET", str(path))
        monkeypatch.delenv("SENTINEL_SIDECAR", raising=False)
        assert sidecar_url("auto") is None
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(path))
            assert sidecar_url("auto") == f"unix://{path}"
            monkeypatch.setenv("SENTINEL_SIDECAR", "http://h:1")
            assert sidecar_url("auto") == "http://h:1"
        assert sidecar_url(None) is None

    def test_arguments_that_make_no_sense_are_refused(self) -> None:
        for sidecar, decide in (("ftp://x", None), ("http://127.0.0.1:1", "both")):
            with pytest.raises(ConfigError, match=r"sidecar must be|decide must be"):
                make_link(sidecar, decide, run="r", incarnation="i", policy=POLICY)


class TestDeciding:
    def test_an_equal_decision_is_the_sidecars_and_keeps_the_own_memo(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with linked(monkeypatch, Sidecar()) as link:
            decision, source = Loop(link).step()
            assert source is Source.SIDECAR
            assert decision.memo is not None

    def test_another_decision_is_obeyed_and_counted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sidecar = Sidecar()
        with linked(monkeypatch, sidecar) as link:
            observation = Observation(0, 2.0, 1.0)
            own = engine.decide(engine.initial(), observation, POLICY)
            other = codec.encode_decision(replace(own, action=Action.SKIP_STEP, rule="x"))
            sidecar.answers = [{"decision": other}]
            decision, source = Loop(link).step()
            assert (decision.action, source) == (Action.SKIP_STEP, Source.SIDECAR)
            assert link.status().mismatches == 1

    @pytest.mark.parametrize(
        ("answer", "reason"),
        [
            ({"seq": 41}, "garbled"),
            ({"step": 41}, "garbled"),
            ({"run": "other"}, "garbled"),
            ({"incarnation": "other"}, "garbled"),
            ({"decision": b"\xc1"}, "garbled"),
            ({"decision": None, "recorded_only": "why"}, "recorded_only"),
            (MissError("timeout", "no answer"), "timeout"),
            (RuntimeError("a bug"), None),
        ],
    )
    def test_an_answer_that_does_not_fit_leaves_the_own_decision_in_force(
        self, answer: Any, reason: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sidecar = Sidecar()
        with linked(monkeypatch, sidecar) as link:
            loop = Loop(link)
            loop.step()
            sidecar.answers = [answer]
            decision, source = loop.step()
            assert (decision.action, source) == (Action.PROCEED, Source.TRAINER)
            assert link.status().misses == ({reason: 1} if reason else {})
            assert loop.step()[1] is Source.SIDECAR

    def test_the_decision_of_another_step_is_not_obeyed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sidecar = Sidecar()
        with linked(monkeypatch, sidecar) as link:
            loop = Loop(link)
            loop.step()
            own = engine.decide(engine.initial(), Observation(0, 2.0, 1.0), POLICY)
            wrong = codec.encode_decision(replace(own, step=0, action=Action.HALT))
            sidecar.answers = [{"decision": wrong}]
            assert loop.step()[1] is Source.TRAINER

    def test_need_state_is_answered_within_the_same_step(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sidecar = Sidecar()
        with linked(monkeypatch, sidecar) as link:
            sidecar.answers = [{"decision": None, "need_state": True}]
            loop = Loop(link)
            before = codec.encode_state(loop.state)
            assert loop.step()[1] is Source.SIDECAR
            assert [(h.seq, h.state) for h in sidecar.handed] == [(0, before)]

    def test_asking_for_the_state_twice_is_a_miss(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sidecar = Sidecar()
        with linked(monkeypatch, sidecar) as link:
            sidecar.answers = [{"decision": None, "need_state": True}] * 2
            assert Loop(link).step()[1] is Source.TRAINER
            assert link.status().misses == {"need_state": 1}

    def test_each_frame_carries_the_moves_since_the_one_before_and_the_states_hash(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sidecar = Sidecar()
        with linked(monkeypatch, sidecar) as link:
            loop = Loop(link)
            loop.step()
            loop.step()
            digest = codec.state_hash(loop.state)
            loop.step()
        frames = [frame for frame, _ in sidecar.frames]
        assert frames[0].moves == ()
        assert frames[2].moves == (messages.WireOutcome(1, Action.PROCEED, True, "sidecar"),)
        assert frames[2].state_hash == digest
        assert [frame.seq for frame in frames] == [0, 1, 2]

    def test_a_sidecar_that_only_records_is_not_waited_for(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sidecar = Sidecar()
        sidecar.decides = False
        with linked(monkeypatch, sidecar) as link:
            assert Loop(link).step()[1] is Source.TRAINER
            assert (link.status().state, link.status().detail) == ("recording_only", "why")
            until(lambda: len(sidecar.frames) == 1)


class TestPolicy:
    STRICT = Policy.parse("[grad_norm]\nfactor = 2.0\n", "strict")

    def test_a_handed_policy_is_taken_by_who_chose_none(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sidecar = Sidecar()
        sidecar.policy = codec.encode_policy(self.STRICT)
        with linked(monkeypatch, sidecar, pinned=False) as link:
            assert link.policy == self.STRICT

    def test_and_not_by_who_chose_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sidecar = Sidecar()
        sidecar.policy = codec.encode_policy(self.STRICT)
        with linked(monkeypatch, sidecar, pinned=True) as link:
            assert link.policy == POLICY

    def test_the_users_mode_goes_over_the_handed_policys(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from sentinel.core.types import Mode

        sidecar = Sidecar()
        sidecar.policy = codec.encode_policy(self.STRICT)
        with linked(monkeypatch, sidecar, pinned=False, mode=Mode.OBSERVE) as link:
            assert link.policy == self.STRICT.with_mode("observe")
        assert codec.decode_policy(sidecar.registrations[-1].policy) == link.policy

    def test_a_sidecar_that_comes_later_gets_the_policy_that_is_run(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sidecar = Sidecar()
        sidecar.policy = codec.encode_policy(self.STRICT)
        sidecar.down = MissError("unreachable", "nobody there")
        monkeypatch.setattr(link_module, "RETRY_S", 0.05)
        with linked(monkeypatch, sidecar, pinned=False) as link:
            assert link.policy == POLICY
            assert link.status().state == "connecting"
            loop = Loop(link)
            assert loop.step()[1] is Source.TRAINER
            sidecar.down = None
            until(lambda: link.status().state == "connected")
            assert loop.step()[1] is Source.SIDECAR
            assert sidecar.registrations[-1].pinned
            assert link.policy == POLICY


class TestDelivery:
    def test_missed_frames_are_delivered_afterwards_and_in_order(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sidecar = Sidecar()
        with linked(monkeypatch, sidecar) as link:
            loop = Loop(link)
            sidecar.down = MissError("timeout", "")
            loop.step()
            loop.step()
            sidecar.down = None
            until(lambda: link.status().buffered == 0)
            assert [frame.seq for frame, _ in sidecar.frames] == [0, 1]
            assert loop.step()[1] is Source.SIDECAR

    def test_the_buffer_is_bounded_and_a_hole_is_counted(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sidecar = Sidecar()
        sidecar.down = MissError("unreachable", "")
        monkeypatch.setattr(link_module, "BUFFER_FRAMES", 5)
        monkeypatch.setattr(link_module, "RETRY_S", 0.3)
        with linked(monkeypatch, sidecar) as link:
            loop = Loop(link)
            for _ in range(8):
                loop.step()
            assert (link.status().buffered, link.status().dropped) == (5, 3)
            sidecar.down = None
            until(lambda: link.status().buffered == 0)
        assert [frame.seq for frame, _ in sidecar.frames] == [3, 4, 5, 6, 7]
        assert sidecar.closed[-1].counts is not None
        assert sidecar.closed[-1].counts.dropped == 3

    def test_while_the_breaker_is_open_the_sidecar_is_told_by_the_thread(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sidecar = Sidecar()
        with linked(monkeypatch, sidecar) as link:
            loop = Loop(link)
            loop.step()
            sidecar.down = MissError("timeout", "")
            for _ in range(4):
                assert loop.step()[1] is Source.TRAINER
            assert link.status().state == "breaker_open"
            sidecar.down = None
            assert loop.step()[1] is Source.TRAINER
            until(lambda: link.status().buffered == 0)
            assert link.status().state == "breaker_open"
        assert [frame.seq for frame, _ in sidecar.frames] == [0, 1, 2, 3, 4, 5]
        assert len(sidecar.closed) == 1

    def test_decide_trainer_hands_the_newest_state_over_and_goes_on_from_there(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sidecar = Sidecar()
        with linked(monkeypatch, sidecar, "trainer") as link:
            loop = Loop(link)
            with sidecar.lock:
                sidecar.answers = [{"seq": 0, "decision": None, "need_state": True}]
                for _ in range(4):
                    assert loop.step()[1] is Source.TRAINER
            until(lambda: link.status().buffered == 0)
            loop.step()
            until(lambda: link.status().buffered == 0)
        handed = sidecar.handed[0].seq
        after = sidecar.frames[[late for _, late in sidecar.frames].index(True) :] if handed else []
        assert all(late == (frame.seq < handed) for frame, late in after)
        assert {frame.seq for frame, _ in sidecar.frames} == set(range(5))

    def test_a_sidecar_that_cannot_read_the_state_gets_the_record_all_the_same(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sidecar = Sidecar()
        sidecar.cannot_read = MissError("refused", "engine state cannot be read")
        with linked(monkeypatch, sidecar, "trainer") as link:
            sidecar.answers = [{"seq": 0, "decision": None, "need_state": True}]
            Loop(link).step()
            until(lambda: link.status().buffered == 0)
        assert [(frame.seq, late) for frame, late in sidecar.frames] == [(0, False), (0, True)]

    def test_an_unknown_run_is_registered_again_at_once(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sidecar = Sidecar()
        with linked(monkeypatch, sidecar) as link:
            loop = Loop(link)
            for n in range(4):  # being asked for a registration is no reason to stop asking
                sidecar.answers = [MissError("unknown_run", "")]
                loop.step()
                until(lambda: link.status().state == "connected")
                assert len(sidecar.registrations) == 2 + n
            assert loop.step()[1] is Source.SIDECAR

    def test_a_process_that_was_replaced_is_refused_and_says_so(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sidecar = Sidecar()
        with linked(monkeypatch, sidecar) as link:
            loop = Loop(link)
            sidecar.answers = [MissError("fenced", "another live process")]
            loop.step()
            assert loop.step()[1] is Source.TRAINER
            assert (link.status().state, link.status().detail) == (
                "refused",
                "another live process",
            )
            assert link.status().misses == {"fenced": 1, "refused": 1}

    def test_while_nothing_happens_a_sign_of_life_is_sent(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(link_module, "HEARTBEAT_S", 0.05)
        sidecar = Sidecar()
        sidecar.orders = (Command("c", CommandKind.PAUSE),)
        with linked(monkeypatch, sidecar) as link:
            until(lambda: sidecar.heartbeats >= 2)
            assert [order.id for order in link.take_commands()] == ["c"]

    def test_a_sign_of_life_says_how_the_run_is_guarded_and_a_frame_speaks_for_itself(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(link_module, "HEARTBEAT_S", 0.05)
        sidecar = Sidecar()
        with linked(monkeypatch, sidecar) as link:
            loop = Loop(link)
            link.ask(lambda: ("blind", "nobody steps"))
            until(lambda: ("blind", "nobody steps") in sidecar.said)
            sent = len(sidecar.said)
            loop.step()
            assert ("", "") in sidecar.said[sent:]

    def test_a_sign_of_life_is_sent_though_nobody_can_say_how_the_run_is_guarded(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(link_module, "HEARTBEAT_S", 0.05)
        sidecar = Sidecar()
        with linked(monkeypatch, sidecar) as link:
            link.ask(lambda: ("blind", str(1 / 0)))
            until(lambda: sidecar.heartbeats >= 3)
            assert set(sidecar.said) == {("", "")}

    def test_the_final_state_is_handed_over_at_the_end(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sidecar = Sidecar()
        with linked(monkeypatch, sidecar) as link:
            loop = Loop(link)
            loop.step()
            link.close("finished", loop.state)
        assert [(h.seq, h.state) for h in sidecar.handed] == [(1, codec.encode_state(loop.state))]

    def test_goodbye_carries_the_last_outcome(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sidecar = Sidecar()
        with linked(monkeypatch, sidecar) as link:
            Loop(link).step()
            link.close("halted")
        assert sidecar.closed[0].state == "halted"
        assert sidecar.closed[0].moves == (
            messages.WireOutcome(0, Action.PROCEED, True, "sidecar"),
        )

    def test_an_order_that_expired_on_its_way_is_not_obeyed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sidecar, clock = Sidecar(), FakeClock()
        with linked(monkeypatch, sidecar, clock=clock) as link:
            loop = Loop(link)
            sidecar.orders = (Command("late", CommandKind.HALT), Command("due", CommandKind.PAUSE))
            sidecar.left = (30.0, 90.0)
            loop.step()
            clock.now += 60.0  # a long step
            assert [order.id for order in link.take_commands()] == ["due"]
            assert link.take_commands() == ()

    def test_two_orders_to_skip_are_for_two_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sidecar, clock = Sidecar(), FakeClock()
        one, two, three = (Command(key, CommandKind.SKIP_NEXT) for key in "123")
        pause = Command("p", CommandKind.PAUSE)
        with linked(monkeypatch, sidecar, clock=clock) as link:
            sidecar.orders, sidecar.left = (one, two, pause, three), (90.0, 90.0, 90.0, 30.0)
            Loop(link).step()
            assert link.take_commands() == (one, pause)
            clock.now += 60.0
            assert link.take_commands() == (two,)
            assert link.take_commands() == ()

    def test_orders_arrive_once_however_often_they_are_sent(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sidecar = Sidecar()
        order = Command("c", CommandKind.SKIP_NEXT)
        with linked(monkeypatch, sidecar) as link:
            loop = Loop(link)
            sidecar.orders = (order,)
            loop.step()
            loop.step()
            assert link.take_commands() == (order,)
            loop.step()
            assert link.take_commands() == ()


class TestBreaker:
    def test_it_opens_on_the_third_miss_in_a_row(self) -> None:
        breaker = Breaker()
        breaker.missed(0.0, 0.0)
        breaker.missed(0.0, 0.0)
        breaker.answered(0.0, 0.0)
        breaker.missed(0.0, 0.0)
        breaker.missed(0.0, 0.0)
        assert breaker.allows(0.0)
        breaker.missed(0.0, 0.0)
        assert not breaker.allows(0.0)
        assert breaker.why == "3 misses in a row"

    def test_it_tries_again_after_30_seconds_and_one_answer_closes_it(self) -> None:
        breaker = Breaker()
        for _ in range(3):
            breaker.missed(0.0, 100.0)
        assert not breaker.allows(129.9)
        assert breaker.allows(130.0)
        breaker.missed(0.0, 130.0)
        assert not breaker.allows(159.9)
        assert breaker.allows(160.0)
        breaker.answered(0.0, 160.0)
        assert not breaker.open

    @pytest.mark.parametrize(
        ("step_s", "wait_s", "opens"),
        [(0.01, 0.0029, False), (0.01, 0.0031, True), (1.0, 0.009, False), (1.0, 0.011, True)],
    )
    def test_it_opens_on_waiting_more_than_a_hundredth_of_the_step_and_three_milliseconds(
        self, step_s: float, wait_s: float, opens: bool
    ) -> None:
        breaker = Breaker()
        for n in range(100):
            assert not breaker.open or n > 90
            breaker.step(step_s)
            breaker.answered(wait_s, 0.0)
        assert breaker.open is opens

    def test_one_slow_answer_in_fifty_does_not_open_it(self) -> None:
        breaker = Breaker()
        for n in range(1000):
            breaker.step(0.1)
            breaker.answered(0.05 if n % 50 == 0 else 0.0015, 0.0)
        assert not breaker.open

    def test_three_answers_in_a_row_at_more_than_half_the_deadline_open_it(self) -> None:
        breaker = Breaker()
        for n in range(3):
            assert not breaker.open, n
            breaker.step(10.0)
            breaker.answered(0.026, 0.0)
        assert breaker.open
        assert breaker.why == "3 misses or late answers in a row"

    def test_a_trial_that_is_answered_late_leaves_it_open(self) -> None:
        breaker = Breaker()
        for _ in range(3):
            breaker.step(0.1)
            breaker.missed(0.0, 0.0)
        breaker.answered(0.03, 30.0)
        assert breaker.open
        assert not breaker.allows(59.9)
        breaker.answered(0.01, 60.0)
        assert not breaker.open

    def test_after_long_waits_it_stays_open_until_half_of_them_is_a_hundred_steps_ago(self) -> None:
        breaker = Breaker()
        n = 0
        while not breaker.open:
            breaker.step(1.0)
            breaker.answered(0.0201, float(n))
            n += 1
        assert n == 50  # 100 steps of a second may wait for one second in all
        while not breaker.allows(float(n)):
            breaker.step(1.0)
            n += 1
        assert n == 126

    @pytest.mark.parametrize("step_s", [0.01, 0.1, 1.0, 3.0])
    @pytest.mark.parametrize("steps", [100, 240, 3000])
    def test_against_a_steady_45_ms_a_run_waits_less_than_a_hundredth_and_two_milliseconds(
        self, step_s: float, steps: int
    ) -> None:
        waits = waits_of([0.045] * steps, step_s)
        assert sum(waits) / steps < max(0.01 * step_s, 0.002)
        assert [w > 0.0 for w in waits[:4]] == [True, True, True, False]

    @pytest.mark.parametrize("step_s", [0.01, 0.1, 0.3, 1.0, 3.0])
    @pytest.mark.parametrize(
        "answers",
        [
            pytest.param([0.0449, 0.0015], id="every other one late"),
            pytest.param([0.045, 0.045, 0.0015], id="two of three late"),
            pytest.param([0.0249], id="all just in time"),
            pytest.param([0.045] * 2 + [0.0015] * 20, id="bursts"),
        ],
    )
    def test_no_hundred_steps_wait_for_more_than_the_bound_and_one_answer(
        self, answers: list[float], step_s: float
    ) -> None:
        given = (answers * 1000)[:1000]
        waits = waits_of(given, step_s)
        most = max(sum(waits[n : n + 100]) for n in range(len(waits) - 99))
        bound = max(0.01 * (step_s + 0.05), 0.003)
        assert most <= 100 * bound + max(answers) + 1e-9

    def test_the_wait_for_a_core_is_not_charged_to_the_sidecar(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        queue, now = FakeQueue(), FakeClock()
        monkeypatch.setattr(link_module, "RunQueue", lambda: queue)
        for stolen, opens in ((0.0, True), (0.028, False)):
            sidecar = Sidecar()
            sidecar.on_steps = lambda stolen=stolen: (now.add(0.03), queue.add(stolen))
            with linked(monkeypatch, sidecar, clock=now) as link:
                loop = Loop(link)
                for _ in range(10):
                    loop.step()
                assert (link.status().state == "breaker_open") is opens
                assert link.status().longest_wait_s == pytest.approx(0.03)


def waits_of(answers: list[float], step_s: float) -> list[float]:
    """What each step of a run waits when the sidecar would answer after so long."""
    breaker, now, waits = Breaker(), 0.0, []
    for answer in answers:
        waited = 0.0
        if breaker.allows(now):
            waited = answer
            breaker.answered(waited, now + waited)
        now += step_s + waited
        waits.append(waited)
        breaker.step(step_s + waited)
    return waits


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def add(self, seconds: float) -> None:
        self.now += seconds


class FakeQueue:
    """A run queue in which the thread has waited for so long."""

    def __init__(self) -> None:
        self.total = 0.0
        self.closed = False

    def waited_s(self) -> float:
        return self.total

    def add(self, seconds: float) -> None:
        self.total += seconds

    def close(self) -> None:
        self.closed = True


class TestRunQueue:
    def test_a_thread_that_competes_for_its_core_has_waited(self) -> None:
        before = os.sched_getaffinity(0)
        queue = RunQueue()
        other = None
        try:
            os.sched_setaffinity(0, {min(before)})
            other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            until(lambda: queue.waited_s() > 0.05 or sum(range(100_000)) < 0)
        finally:
            os.sched_setaffinity(0, before)
            if other is not None:
                other.kill()
                other.wait()
        queue.close()

    def test_each_thread_reads_its_own(self) -> None:
        queue, seen = RunQueue(), []
        queue.waited_s()
        thread = threading.Thread(target=lambda: seen.append(queue.waited_s()))
        thread.start()
        thread.join()
        assert 0.0 <= seen[0] < 1.0
        queue.close()

    @pytest.mark.parametrize("text", [None, "", "1", "a b c"])
    def test_where_there_is_no_such_file_nothing_was_waited(
        self, text: str | None, tmp_path: Path
    ) -> None:
        path = tmp_path / "schedstat"
        if text is not None:
            path.write_text(text)
        queue = RunQueue(str(path))
        assert queue.waited_s() == 0.0
        queue.close()

    def test_it_gives_its_file_back(self) -> None:
        queue = RunQueue()
        before = len(os.listdir("/proc/self/fd"))
        queue.waited_s()
        assert len(os.listdir("/proc/self/fd")) == before + 1
        queue.close()
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_step_uses_the_address_that_the_registration_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sidecar = Sidecar()
    sidecar.down = MissError("unreachable", "no such name")
    monkeypatch.setattr(link_module, "RETRY_S", 0.05)
    with linked(monkeypatch, sidecar) as link:
        assert sidecar.shared == 0
        sidecar.down = None
        until(lambda: link.status().state == "connected")
        assert sidecar.shared == 1


def test_a_sidecar_that_cannot_be_reached_is_looked_up_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sidecar = Sidecar()
    with linked(monkeypatch, sidecar) as link:
        sidecar.down = MissError("unreachable", "it moved")
        Loop(link).step()
        until(lambda: sidecar.lookups > 0)
        until(lambda: sidecar.shared > 1)


def test_the_deadline_of_the_real_client_is_what_the_link_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[float] = []
    real = Client.post_steps

    def post(self: Client, message: Steps, *, deadline_s: float) -> Reply:
        seen.append(deadline_s)
        return real(self, message, deadline_s=deadline_s)

    monkeypatch.setattr(Client, "post_steps", post)
    monkeypatch.setattr(
        Client, "register", lambda self, message, **_: Registered(run="r", fence=1, policy=b"")
    )
    link = make_link("http://127.0.0.1:1", run="r", incarnation="i", policy=POLICY)
    Loop(link).step()
    link.close()
    assert 0.0 < seen[0] <= 0.05

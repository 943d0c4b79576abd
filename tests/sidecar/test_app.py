"""The sidecar's HTTP side: trainers in msgpack, people in JSON, metrics, orders, who may steer."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import anyio
import httpx
import msgspec
import numpy as np
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plaintext

from sentinel.core import engine
from sentinel.core.catalog import CATALOG, Kind
from sentinel.core.events import SnapshotTaken
from sentinel.core.policy import Policy
from sentinel.core.state import State
from sentinel.core.types import Action, Observation, Outcome, Source
from sentinel.sidecar import door
from sentinel.sidecar.app import create_app
from sentinel.sidecar.direct import Direct
from sentinel.sidecar.exporter import (
    HISTOGRAMS,
    SIDECAR,
    SIDECAR_HISTOGRAMS,
    SIGNALS,
    SOURCES,
    number,
)
from sentinel.sidecar.settings import Settings
from sentinel.wire import codec, messages
from sentinel.wire.messages import (
    Accepted,
    Close,
    Counts,
    Frame,
    HandOver,
    Layer,
    Message,
    Refused,
    Register,
    Registered,
    Reply,
    Steps,
)
from tests.support import FakeClock, require

POLICY = Policy.load("default")
LAYERS = (Layer("a"), Layer('b"\\\n', attention=True))


def run(test: Any) -> None:
    anyio.run(test)


@dataclass
class Sidecar:
    """The app, a client that comes over TCP, one that comes over the Unix socket."""

    app: Any
    tcp: httpx.AsyncClient
    uds: httpx.AsyncClient
    token: str = ""

    async def send(
        self, method: str, path: str, message: Message, *, token: str | None = None
    ) -> Any:
        key = self.token if token is None else token
        body = messages.encode_message(message)
        seal = messages.seal(key, path, body)
        got = await self.tcp.request(
            method,
            path,
            content=body,
            headers={"content-type": messages.CONTENT_TYPE, messages.SEAL_HEADER: seal},
        )
        kinds: dict[tuple[str, str], type[Message]] = {
            ("PUT", "runs"): Registered,
            ("POST", "steps"): Reply,
            ("PUT", "state"): Accepted,
            ("POST", "close"): Accepted,
        }
        what = path.rsplit("/", 1)[-1]
        kind = kinds[method, what if (method, what) in kinds else "runs"]
        answer = messages.decode_message(kind if got.status_code == 200 else Refused, got.content)
        if got.status_code != 401:
            given = got.headers[messages.SEAL_HEADER]
            assert messages.sealed(key, path, got.content, given, seal)
        return answer


@asynccontextmanager
async def sidecar(clock: FakeClock | None = None, **settings: Any) -> AsyncIterator[Sidecar]:
    app = create_app(Settings(**settings), clock=clock or FakeClock(), timer=lambda: 0.0)
    async with app.router.lifespan_context(app):
        tcp = httpx.ASGITransport(app=app)
        uds = httpx.ASGITransport(app=app, client=None)  # type: ignore[arg-type]
        async with (
            httpx.AsyncClient(transport=tcp, base_url="http://t") as a,
            httpx.AsyncClient(transport=uds, base_url="http://t") as b,
        ):
            yield Sidecar(app, a, b, settings.get("token", ""))


class Trainer:
    """One incarnation of a run, with an engine of its own."""

    def __init__(self, at: Sidecar, run: str = "r", incarnation: str = "i", **options: Any) -> None:
        self.at, self.run, self.incarnation, self.options = at, run, incarnation, options
        self.policy = options.pop("local", POLICY)
        self.fence = 0
        self.seq = 0
        self.state: State = engine.initial()
        self.moves: list[Any] = []

    async def register(self) -> Any:
        answer = await self.at.send(
            "PUT",
            f"/v1/runs/{self.run}",
            Register(
                run=self.run,
                incarnation=self.incarnation,
                policy=codec.encode_policy(self.policy),
                layers=LAYERS,
                **self.options,
            ),
        )
        if isinstance(answer, Registered):
            self.fence = answer.fence
        return answer

    def frame(self, observation: Observation) -> Frame:
        own = engine.decide(self.state, observation, self.policy)
        return Frame(
            seq=self.seq,
            observation=codec.wire_observation(observation),
            moves=tuple(self.moves),
            state_hash=codec.state_hash(self.state),
            own=codec.wire_decision(own),
        )

    async def post(self, *frames: Frame, late: bool = False, **options: Any) -> Any:
        given: dict[str, Any] = {"policy_hash": codec.policy_hash(self.policy)} | options
        return await self.at.send(
            "POST",
            f"/v1/runs/{self.run}/steps",
            Steps(
                run=self.run,
                incarnation=self.incarnation,
                fence=self.fence,
                late=late,
                frames=tuple(msgspec.Raw(messages.encode_frame(f)) for f in frames),
                **given,
            ),
        )

    async def hand_over(self) -> Any:
        return await self.at.send(
            "PUT",
            f"/v1/runs/{self.run}/state",
            HandOver(
                run=self.run,
                incarnation=self.incarnation,
                fence=self.fence,
                seq=self.seq,
                state=codec.encode_state(self.state),
            ),
        )

    def carry_out(self, observation: Observation, action: Action | None = None) -> None:
        own = engine.decide(self.state, observation, self.policy)
        done = own.action if action is None else action
        outcome = Outcome(observation.step, done, done is Action.PROCEED, Source.SIDECAR)
        self.state = engine.apply(self.state, observation, own, outcome, self.policy)
        self.moves = [messages.wire_outcome(outcome)]
        self.seq += 1

    async def step(self, loss: float = 2.0, norm: float = 1.0, **more: Any) -> Reply:
        observation = Observation(self.state.step, loss, norm, 1e-3, **more)
        reply = await self.post(self.frame(observation))
        if isinstance(reply, Reply) and reply.need_state:
            assert await self.hand_over() == Accepted(run=self.run)
            reply = await self.post(self.frame(observation))
        self.carry_out(observation)
        assert isinstance(reply, Reply), reply
        return reply

    async def about(self) -> Any:
        return json.loads((await self.at.tcp.get(f"/v1/runs/{self.run}")).content)


class TestTrainers:
    def test_a_first_frame_is_decided_after_the_state_was_handed_over(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                trainer = Trainer(at)
                assert (await trainer.register()).decides
                first = await trainer.post(trainer.frame(Observation(0, 2.0, 1.0)))
                assert first.need_state
                assert first.decision is None
                reply = await trainer.step()
                own = engine.decide(engine.initial(), Observation(0, 2.0, 1.0, 1e-3), POLICY)
                assert reply.decision == codec.encode_decision(own)

        run(test)

    def test_from_then_on_it_follows_the_moves_and_asks_no_more(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                trainer = Trainer(at)
                await trainer.register()
                trainer.state = engine.note(trainer.state, SnapshotTaken(0), POLICY)
                for i in range(80):
                    reply = await trainer.step(2.0 + 0.01 * math.sin(i), 1.0)
                    assert reply.decision is not None
                nan = await trainer.step(2.0, math.nan)
                assert codec.decode_decision(nan.decision or b"").action is Action.SKIP_STEP
                assert (await trainer.about())["state_handovers"] == 1

        run(test)

    @pytest.mark.parametrize("doctored", ["hash", "seq", "outcome"])
    def test_what_does_not_fit_is_answered_with_need_state(self, doctored: str) -> None:
        async def test() -> None:
            async with sidecar() as at:
                trainer = Trainer(at)
                await trainer.register()
                await trainer.step()
                frame = trainer.frame(Observation(1, 2.0, 1.0))
                if doctored == "hash":
                    frame = msgspec.structs.replace(frame, state_hash=bytes(16))
                elif doctored == "seq":
                    frame = msgspec.structs.replace(frame, seq=7)
                else:
                    other = messages.WireOutcome(5, Action.SKIP_STEP, False)
                    frame = msgspec.structs.replace(frame, moves=(other,))
                reply = await trainer.post(frame)
                assert reply.need_state
                assert reply.decision is None

        run(test)

    def test_an_executed_action_other_than_the_decided_one_is_followed(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                trainer = Trainer(at)
                await trainer.register()
                await trainer.step()
                observation = Observation(1, 2.0, math.nan, 1e-3)
                await trainer.post(trainer.frame(observation))
                trainer.carry_out(observation, Action.PROCEED)
                reply = await trainer.post(trainer.frame(Observation(2, 2.0, 1.0)))
                assert reply.decision is not None

        run(test)

    def test_the_same_frame_twice_is_recorded_once_and_answered_alike(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                trainer = Trainer(at)
                await trainer.register()
                await trainer.step()
                frame = trainer.frame(Observation(1, 2.0, 1.0))
                first, second = await trainer.post(frame), await trainer.post(frame)
                assert first.decision == second.decision is not None
                assert (await trainer.about())["record"]["frames"] == 2

        run(test)

    def test_late_frames_fill_the_record_and_decide_nothing(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                trainer = Trainer(at)
                await trainer.register()
                missed = []
                for _ in range(3):
                    observation = Observation(trainer.state.step, 2.0, math.nan)
                    missed.append(trainer.frame(observation))
                    trainer.carry_out(observation)
                await trainer.step()
                assert (await trainer.about())["record"]["holes"] == 3
                before = (await trainer.about())["decision"]
                reply = await trainer.post(*missed, late=True)
                assert reply.decision is None
                about = await trainer.about()
                assert about["decision"] == before
                assert about["record"] == {"frames": 4, "late": 3, "holes": 0, "dropped": 0}

        run(test)

    def test_a_restarted_sidecar_does_not_miss_what_it_was_told_before(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                trainer = Trainer(at, first=500)
                trainer.seq = 500
                await trainer.register()
                await trainer.step()
                trainer.seq += 2
                await trainer.step()
                assert (await trainer.about())["record"]["holes"] == 2

        run(test)

    def test_a_frame_that_was_overtaken_does_not_disturb_the_newer_one(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                trainer = Trainer(at)
                await trainer.register()
                await trainer.step()
                observation = Observation(1, 2.0, 1.0, 1e-3)
                slow = trainer.frame(observation)
                trainer.carry_out(observation)
                await trainer.step()
                reply = await trainer.post(slow)
                assert (reply.decision, reply.need_state) == (None, False)
                assert not (await trainer.post(trainer.frame(Observation(3, 2.0, 1.0)))).need_state

        run(test)

    def test_another_engine_version_is_recorded_only_and_told_so(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                trainer = Trainer(at, engine_version=engine.ENGINE_VERSION + 1)
                answer = await trainer.register()
                assert not answer.decides
                assert f"engine version {engine.ENGINE_VERSION + 1}" in answer.reason
                reply = await trainer.step(2.0, math.nan)
                assert reply.decision is None
                assert reply.recorded_only == answer.reason
                await trainer.step()
                assert (await trainer.about())["record"]["frames"] == 2
                text = (await at.tcp.get("/metrics")).text
                assert 'sentinel_skipped_steps_total{run="r",rule="nonfinite_grad"} 1.0' in text

        run(test)

    def test_another_policy_than_the_registered_one_is_recorded_only(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                trainer = Trainer(at)
                await trainer.register()
                frame = trainer.frame(Observation(0, 2.0, 1.0))
                reply = await trainer.post(frame, policy_hash=bytes(16))
                assert reply.decision is None
                assert "policy" in reply.recorded_only

        run(test)

    def test_the_sidecars_policy_is_handed_to_who_did_not_choose_one(self) -> None:
        async def test() -> None:
            strict = Policy.parse("[grad_norm]\nfactor = 2.0\n", "strict")
            async with sidecar(policy=strict) as at:
                free = await Trainer(at, pinned=False).register()
                chosen = await Trainer(at, "r2", pinned=True).register()
                assert codec.decode_policy(free.policy) == strict
                assert codec.decode_policy(chosen.policy) == POLICY

        run(test)

    def test_a_second_live_process_is_refused_and_shown(self) -> None:
        async def test() -> None:
            clock = FakeClock()
            async with sidecar(clock, lost_after_s=60.0) as at:
                first, second = Trainer(at), Trainer(at, incarnation="j")
                await first.register()
                refused = await second.register()
                assert isinstance(refused, Refused)
                assert refused.code == "fenced"
                assert "another live process" in refused.detail
                assert (await first.about())["second_writers_refused"] == ["j"]
                clock.advance(61.0)
                assert (await second.register()).fence == first.fence + 1
                reply = await first.post(first.frame(Observation(0, 2.0, 1.0)))
                assert isinstance(reply, Refused)
                assert reply.code == "fenced"

        run(test)

    def test_a_finished_run_may_be_taken_over_at_once(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                first = Trainer(at)
                await first.register()
                await first.step()
                last = Close(
                    run="r",
                    incarnation="i",
                    fence=first.fence,
                    moves=tuple(first.moves),
                    counts=Counts(misses={"timeout": 2}),
                )
                assert await at.send("POST", "/v1/runs/r/close", last) == Accepted(run="r")
                about = await first.about()
                assert about["state"] == "finished"
                assert about["ledger"]["counters"]["steps"] == 1
                assert about["misses"] == {"timeout": 2}
                assert (await Trainer(at, incarnation="j").register()).fence == first.fence + 1

        run(test)

    def test_a_silent_run_is_lost_and_comes_back_with_its_next_frame(self) -> None:
        async def test() -> None:
            clock = FakeClock()
            async with sidecar(clock, lost_after_s=60.0) as at:
                trainer = Trainer(at)
                await trainer.register()
                await trainer.step()
                clock.advance(61.0)
                at.app.state.runs.expire(clock())
                assert (await trainer.about())["state"] == "lost"
                await trainer.step()
                assert (await trainer.about())["state"] == "running"

        run(test)

    def test_a_sign_of_life_keeps_a_run_that_sends_no_frames(self) -> None:
        async def test() -> None:
            clock = FakeClock()
            async with sidecar(clock, lost_after_s=60.0) as at:
                trainer = Trainer(at)
                await trainer.register()
                for _ in range(3):
                    clock.advance(50.0)
                    assert (await trainer.post()).seq == -1
                    at.app.state.runs.expire(clock())
                about = await trainer.about()
                assert (about["state"], about["last_report_s_ago"]) == ("running", 150.0)
                assert isinstance(await Trainer(at, incarnation="j").register(), Refused)

        run(test)

    def test_what_a_sign_of_life_says_of_the_protection_holds_until_the_next_step(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                trainer = Trainer(at)
                await trainer.register()
                await trainer.post(protection="blind", why="too early")
                assert (await trainer.about())["protection"] == "off", "nothing was measured yet"
                await trainer.step()
                decided = (await trainer.about())["protection"]
                assert decided == "warming"
                for said, shown in (
                    ("blind", ("blind", "nobody steps")),
                    ("of a newer version", (decided, "")),
                    ("off", ("off", "nobody steps")),
                    ("", (decided, "")),
                    ("blind", ("blind", "nobody steps")),
                ):
                    why = "nobody steps" if said else ""
                    assert (await trainer.post(protection=said, why=why)).seq == -1
                    about = await trainer.about()
                    assert (about["protection"], about["protection_why"]) == shown
                    text = (await at.tcp.get("/metrics")).text
                    line = f'sentinel_protection{{run="r",state="{shown[0]}"}} 1.0'
                    assert line in text
                await trainer.step()
                assert (await trainer.about())["protection"] == decided

        run(test)

    def test_a_state_that_was_overtaken_is_not_taken_back(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                trainer = Trainer(at)
                await trainer.register()
                for _ in range(3):
                    await trainer.step()
                late = HandOver(
                    run="r",
                    incarnation="i",
                    fence=trainer.fence,
                    seq=1,
                    state=codec.encode_state(engine.initial()),
                )
                assert await at.send("PUT", "/v1/runs/r/state", late) == Accepted(run="r")
                assert not (await trainer.post(trainer.frame(Observation(3, 2.0, 1.0)))).need_state

        run(test)

    def test_an_unknown_run_is_told_how_to_become_known(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                trainer = Trainer(at)
                answer = await trainer.post(trainer.frame(Observation(0, 2.0, 1.0)))
                assert isinstance(answer, Refused)
                assert answer.code == "unknown_run"
                assert "PUT /v1/runs/r" in answer.detail

        run(test)

    def test_a_message_that_was_garbled_on_the_way_is_refused(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                body = messages.encode_message(Accepted(run="r"))
                got = await at.tcp.put(
                    "/v1/runs/r/state",
                    content=body + b"\0",
                    headers={
                        "content-type": messages.CONTENT_TYPE,
                        messages.SEAL_HEADER: messages.seal("", "/v1/runs/r/state", body),
                    },
                )
                assert got.status_code == 400
                assert messages.decode_message(Refused, got.content).code == "garbled"

        run(test)

    def test_a_bad_run_name_is_refused_by_its_rule(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                message = Register(run="-x", incarnation="i", policy=codec.encode_policy(POLICY))
                answer = await at.send("PUT", "/v1/runs/-x", message)
                assert "run must be 1 to 128 letters" in answer.detail

        run(test)

    def test_a_body_above_the_bound_is_refused(self) -> None:
        async def test() -> None:
            async with sidecar(max_body_bytes=1000) as at:
                got = await at.tcp.post(
                    "/v1/runs/r/steps",
                    content=b"x" * 1001,
                    headers={"content-type": "application/json"},
                )
                assert got.status_code == 413

        run(test)


class TestPeople:
    JSON = {"content-type": "application/json"}  # noqa: RUF012

    @pytest.mark.parametrize(("then", "status"), [("gone", 400), ("silent", 408)])
    def test_a_body_that_never_ends_is_no_error_of_ours(
        self, monkeypatch: pytest.MonkeyPatch, then: str, status: int
    ) -> None:
        monkeypatch.setattr(door, "BODY_S", 0.05)

        async def test() -> None:
            async with sidecar() as at:
                sent: list[Any] = []
                waiting = [{"type": "http.request", "body": b"{", "more_body": True}]

                async def receive() -> Any:
                    if waiting:
                        return waiting.pop()
                    if then == "silent":
                        await anyio.sleep(10.0)
                    return {"type": "http.disconnect"}

                async def send(message: Any) -> None:
                    sent.append(message)

                scope = {
                    "type": "http",
                    "method": "POST",
                    "path": "/v1/runs/r/steps",
                    "raw_path": b"/v1/runs/r/steps",
                    "query_string": b"",
                    "headers": [(b"host", b"t"), (b"content-type", b"application/json")],
                    "client": ("127.0.0.1", 1),
                    "http_version": "1.1",
                    "scheme": "http",
                    "root_path": "",
                }
                await at.app(scope, receive, send)
                assert sent[0]["status"] == status

        run(test)

    def test_a_trainer_in_another_language_posts_json_and_obeys(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                await at.tcp.put("/v1/runs/js", json={"layers": ["a", "b"]})
                actions = []
                for step in range(4):
                    seen = {"step": step, "loss": 2.0, "grad_norm": "nan" if step == 2 else 1.0}
                    got = await at.tcp.post("/v1/runs/js/steps", json=seen)
                    assert got.status_code == 200, got.text
                    actions.append(got.json()["decision"]["action"])
                assert actions == ["proceed", "proceed", "skip_step", "proceed"]
                about = (await at.tcp.get("/v1/runs/js")).json()
                assert about["ledger"]["counters"]["skipped"] == [["nonfinite_grad", 1]]

        run(test)

    def test_its_statistics_come_back_with_the_snapshot_that_it_restores(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                await at.tcp.put("/v1/runs/js", json={})

                async def step(number: int, loss: float, *events: Any) -> str:
                    body = {
                        "observation": {"step": number, "loss": loss, "grad_norm": 1.0},
                        "events": list(events),
                    }
                    got = await at.tcp.post("/v1/runs/js/steps", json=body)
                    assert got.status_code == 200, got.text
                    return str(got.json()["decision"]["action"])

                for i in range(70):
                    taken = [{"kind": "snapshot_taken", "step": 20}] if i == 20 else []
                    await step(i, 2.0 + 0.001 * (i % 5), *taken)
                hot = [await step(70 + i, 9.0) for i in range(4)]
                assert hot == ["skip_step"] * 3 + ["rollback"]
                await step(74, 2.0, {"kind": "restored", "step": 74, "target": 20})
                ledger = (await at.tcp.get("/v1/runs/js")).json()["ledger"]
                assert ledger["attempt"] == 1
                stats = at.app.state.runs.get("js").state.stats
                assert len(stats.spike.losses) == 20

        run(test)

    def test_a_step_that_is_over_is_refused_with_the_step_that_is_due(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                await at.tcp.put("/v1/runs/js", json={})
                await at.tcp.post("/v1/runs/js/steps", json={"step": 5, "loss": 2.0})
                got = await at.tcp.post("/v1/runs/js/steps", json={"step": 4, "loss": 2.0})
                assert got.status_code == 422
                assert "next step (6)" in got.json()["detail"]

        run(test)

    def test_a_web_page_cannot_post_as_plain_text(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                got = await at.tcp.post(
                    "/v1/runs/js/steps", content=b"{}", headers={"content-type": "text/plain"}
                )
                assert got.status_code == 415

        run(test)

    def test_numbers_that_are_not_finite_are_words_and_never_null(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                trainer = Trainer(at)
                await trainer.register()
                await trainer.step(math.inf, math.nan)
                row = (await at.tcp.get("/v1/runs")).json()["runs"][0]
                assert (row["loss"], row["grad_norm"]) == ("inf", "nan")

        run(test)

    def test_health_and_readiness(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                assert (await at.tcp.get("/healthz")).status_code == 200
                assert (await at.tcp.get("/readyz")).status_code == 200
                app = create_app(Settings(), clock=FakeClock(), timer=lambda: 0.0)
                async with httpx.AsyncClient(
                    transport=httpx.ASGITransport(app=app), base_url="http://t"
                ) as early:
                    assert (await early.get("/readyz")).status_code == 503

        run(test)


class TestOrders:
    async def _order(self, client: httpx.AsyncClient, **order: Any) -> httpx.Response:
        headers = order.pop("headers", {})
        return await client.post("/v1/runs/r/commands", json=order, headers=headers)

    def test_an_order_is_delivered_until_it_was_obeyed(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                trainer = Trainer(at)
                await trainer.register()
                await trainer.step()
                got = await self._order(at.uds, kind="skip_next", id="c1", issued_by="ann")
                assert got.status_code == 202
                first = await trainer.step()
                again = await trainer.step()
                assert [c.id for c in first.commands] == [c.id for c in again.commands] == ["c1"]
                obeyed = await trainer.step(commands=again.commands)
                decision = codec.decode_decision(obeyed.decision or b"")
                assert decision.action is Action.SKIP_STEP
                assert obeyed.commands == ()
                order = (await trainer.about())["orders"][0]
                assert (order["state"], order["taken_step"]) == ("taken", 3)
                assert order["command"]["issued_by"] == "ann"

        run(test)

    def test_the_same_id_again_is_the_same_order(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                trainer = Trainer(at)
                await trainer.register()
                await trainer.step()
                await self._order(at.uds, kind="pause", headers={"idempotency-key": "k"})
                await self._order(at.uds, kind="pause", headers={"idempotency-key": "k"})
                assert len((await trainer.step()).commands) == 1

        run(test)

    def test_an_order_expires_by_the_sidecars_clock(self) -> None:
        async def test() -> None:
            clock = FakeClock()
            async with sidecar(clock) as at:
                trainer = Trainer(at)
                await trainer.register()
                await trainer.step()
                await self._order(at.uds, kind="halt", id="c", expires_in_s=30)
                clock.advance(31.0)
                assert (await trainer.step()).commands == ()
                assert (await trainer.about())["orders"][0]["state"] == "expired"

        run(test)

    @pytest.mark.parametrize(
        ("order", "detail"),
        [
            ({"kind": "scale_lr", "value": 0}, "command.value must lie above 0 and at most 10"),
            ({"kind": "scale_lr", "value": 11}, "got 11"),
            ({"kind": "ack"}, "command.target must be the number"),
            ({"kind": "explode"}, "Invalid enum value 'explode'"),
            ({"kind": "pause", "expires_in_s": 0}, "command.expires_in_s must lie"),
        ],
    )
    def test_an_order_that_makes_no_sense_is_refused(self, order: Any, detail: str) -> None:
        async def test() -> None:
            async with sidecar() as at:
                await Trainer(at).register()
                got = await self._order(at.uds, **order)
                assert got.status_code == 422
                assert detail in got.json()["detail"]

        run(test)

    def test_over_tcp_orders_need_a_token(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                await Trainer(at).register()
                got = await self._order(at.tcp, kind="halt")
                assert got.status_code == 403
                assert "SENTINEL_TOKEN" in got.json()["detail"]

        run(test)


class TestToken:
    def test_with_a_token_only_messages_sealed_with_it_are_served_over_tcp(self) -> None:
        async def test() -> None:
            async with sidecar(token="secret") as at:
                message = Register(run="r", incarnation="i", policy=codec.encode_policy(POLICY))
                for wrong in ("", "other"):
                    answer = await at.send("PUT", "/v1/runs/r", message, token=wrong)
                    assert isinstance(answer, Refused)
                    assert answer.code == "unauthorized"
                assert isinstance(await at.send("PUT", "/v1/runs/r", message), Registered)

        run(test)

    def test_people_bring_it_as_a_bearer_token(self) -> None:
        async def test() -> None:
            async with sidecar(token="secret") as at:
                await Trainer(at).register()
                good = {"authorization": "Bearer secret"}
                assert (await at.tcp.get("/v1/runs")).status_code == 401
                assert (await at.tcp.get("/v1/runs", headers=good)).status_code == 200
                assert (await at.uds.get("/v1/runs")).status_code == 200
                for header, status in ((good, 202), ({"authorization": "Bearer x"}, 401)):
                    got = await at.tcp.post(
                        "/v1/runs/r/commands", json={"kind": "pause"}, headers=header
                    )
                    assert got.status_code == status
                assert (await at.tcp.get("/metrics")).status_code == 200

        run(test)


async def _busy(at: Sidecar) -> Trainer:
    trainer = Trainer(at)
    await trainer.register()
    columns = {
        "layer_grad_norm": np.array([1.0, math.nan], np.float32),
        "layer_attention_max_logit": np.array([math.inf, 3.0], np.float32),
    }
    trainer.state = engine.note(trainer.state, SnapshotTaken(0), POLICY)
    for i in range(70):
        await trainer.step(2.0 + 0.01 * math.sin(i), 1.0, columns=columns, loss_scale=65536.0)
    for loss in (math.nan, 9.0, math.inf, 9.0):
        await trainer.step(loss, math.nan, columns=columns)
    own = replace(Observation(trainer.state.step, 2.0, 1.0, 1e-3), columns=columns)
    counts = Counts(misses={"timeout": 3}, internal_errors={"probe": 1}, longest_wait_s=0.04)
    await trainer.post(trainer.frame(own), counts=counts)
    return trainer


class TestMetrics:
    def test_both_formats_parse_and_agree(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                await _busy(at)
                plain_ = (await at.tcp.get("/metrics")).text
                wanted = {"accept": "application/openmetrics-text; version=1.0.0"}
                got = await at.tcp.get("/metrics", headers=wanted)
                assert got.headers["content-type"].startswith("application/openmetrics-text")
                one = {
                    (s.name, tuple(sorted(s.labels.items()))): number(s.value)
                    for family in plaintext(plain_)
                    for s in family.samples
                    if not s.name.startswith("sentinel_sidecar_")  # the scrape itself counts
                }
                other = {
                    (s.name, tuple(sorted(s.labels.items()))): number(s.value)
                    for family in openmetrics(got.text)
                    for s in family.samples
                    if not s.name.startswith("sentinel_sidecar_")
                }
                assert one == other
                assert len(one) > 60

        run(test)

    def test_what_is_exported_is_what_was_measured_and_counted(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                trainer = await _busy(at)
                lines = (await at.tcp.get("/metrics")).text.splitlines()
                counters = trainer.state.ledger.counters
                spikes = float(counters.spike_steps)
                for line in (
                    'sentinel_loss{run="r"} 2.0',
                    'sentinel_step{run="r"} 74.0',
                    'sentinel_layer_grad_norm{run="r",layer="a"} 1',
                    'sentinel_layer_grad_norm{run="r",layer="b\\"\\\\\\n"} NaN',
                    'sentinel_layer_attention_max_logit{run="r",layer="a"} +Inf',
                    'sentinel_attention_max_logit_window_max{run="r"} +Inf',
                    'sentinel_steps_total{run="r"} 74.0',
                    f'sentinel_loss_spike_steps_total{{run="r"}} {spikes}',
                    'sentinel_nonfinite_steps_total{run="r",signal="grad"} 4.0',
                    'sentinel_decision_misses_total{run="r",reason="timeout"} 3.0',
                    'sentinel_internal_errors_total{run="r",where="probe"} 1.0',
                    'sentinel_decision_longest_wait_seconds{run="r"} 0.04',
                    'sentinel_run_state{run="r",state="running"} 1.0',
                    'sentinel_decision_duration_seconds_count{run="r"} 75.0',
                    'sentinel_last_good_snapshot_step{run="r"} 0.0',
                ):
                    assert line in lines, line

        run(test)

    def test_what_was_not_measured_has_no_sample(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                trainer = Trainer(at)
                await trainer.register()
                await trainer.step()
                text = (await at.tcp.get("/metrics")).text
                assert "sentinel_loss_scale{" not in text
                assert "sentinel_grad_norm_baseline{" not in text
                assert "sentinel_layer_grad_norm{" not in text

        run(test)

    def test_promtool_has_nothing_to_say(self) -> None:
        promtool = shutil.which("promtool")
        require(promtool, "promtool (apt-get install prometheus)")

        async def test() -> None:
            async with sidecar() as at:
                await _busy(at)
                text = (await at.tcp.get("/metrics")).content
                done = subprocess.run(
                    [str(promtool), "check", "metrics"],
                    input=text,
                    capture_output=True,
                    check=False,
                )
                assert (done.returncode, done.stdout + done.stderr) == (0, b"")

        run(test)

    def test_every_metric_of_the_catalogue_has_a_source_and_no_other_has(self) -> None:
        fed = {s.name for s in CATALOG if not s.reserved}
        per_run = {s.name for s in CATALOG if not s.reserved and s.per_run}
        histograms = {s.name for s in CATALOG if s.kind is Kind.HISTOGRAM and not s.reserved}
        of_layers = {*SIGNALS, "layers_left_out"}
        assert set(SOURCES) | of_layers == per_run - histograms
        assert set(SIDECAR) | {"build_info"} == fed - per_run - histograms
        assert set(HISTOGRAMS) | set(SIDECAR_HISTOGRAMS) == histograms

    def test_a_large_model_gets_a_bounded_number_of_series(self) -> None:
        async def test() -> None:
            async with sidecar(max_layers=1) as at:
                await _busy(at)
                text = (await at.tcp.get("/metrics")).text
                assert text.count("sentinel_layer_grad_norm{") == 1
                assert 'sentinel_layers_left_out{run="r"} 1.0' in text

        run(test)

    def test_a_layer_name_that_comes_twice_does_not_break_the_page(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                message = Register(
                    run="r",
                    incarnation="i",
                    policy=codec.encode_policy(POLICY),
                    layers=(Layer("a"), Layer("a")),
                )
                await at.send("PUT", "/v1/runs/r", message)
                trainer = Trainer(at)
                trainer.fence = 1
                column = np.array([1.0, 2.0], np.float32)
                await trainer.step(columns={"layer_grad_norm": column})
                text = (await at.tcp.get("/metrics")).text
                assert 'sentinel_layer_grad_norm{run="r",layer="a"} 1\n' in text
                assert 'sentinel_layer_grad_norm{run="r",layer="a#2"} 2\n' in text

        run(test)


class TestDirect:
    """Steps take the short way in a real server; both ways answer the same."""

    def test_both_ways_answer_byte_for_byte_the_same(self) -> None:
        async def test() -> None:
            answers = []
            for short in (False, True):
                async with sidecar(token="t") as at:
                    app = Direct(at.app, at.app.state.service) if short else at.app
                    transport = httpx.ASGITransport(app=app)
                    async with httpx.AsyncClient(transport=transport, base_url="http://t") as tcp:
                        at.tcp = tcp
                        trainer = Trainer(at)
                        await trainer.register()
                        await trainer.step()
                        good = Steps(
                            run="r",
                            incarnation="i",
                            fence=trainer.fence,
                            policy_hash=codec.policy_hash(POLICY),
                            frames=(),
                        )
                        said = []
                        for run, token, body in (
                            ("r", "t", messages.encode_message(good)),
                            ("r", "wrong", messages.encode_message(good)),
                            ("other", "t", messages.encode_message(good)),
                            ("r", "t", b"\xff"),
                            ("a%2Fb", "t", b"\xff"),
                            ("", "t", b"\xff"),
                        ):
                            path = f"/v1/runs/{run}/steps"
                            got = await tcp.post(
                                path,
                                content=body,
                                headers={
                                    "content-type": messages.CONTENT_TYPE,
                                    messages.SEAL_HEADER: messages.seal(token, path, body),
                                },
                            )
                            said.append((got.status_code, sorted(got.headers.items()), got.content))
                        assert at.app.state.service.health.requests["steps", "2xx"] >= 2
                        answers.append(said)
            assert answers[0] == answers[1]
            assert [status for status, _, _ in answers[0]][:4] == [200, 401, 422, 422]

        run(test)

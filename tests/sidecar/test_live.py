"""What happens by the clock and what is told live: jobs, events, restarts of JSON trainers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from sentinel.core import engine
from sentinel.core.policy import Policy
from sentinel.core.types import Action, Observation, Outcome
from sentinel.sidecar import hub as hubs
from sentinel.sidecar import jobs
from sentinel.sidecar.app import create_app
from sentinel.sidecar.hub import Hub
from sentinel.sidecar.routes import read
from sentinel.sidecar.service import Service
from sentinel.sidecar.settings import Settings
from sentinel.sidecar.store import record as records
from tests.support import FakeClock
from tests.support.reports import Reporter
from tests.support.simulated import Damage, NanGradient, SimulatedTrainer


@pytest.fixture
def service(clock: FakeClock) -> Iterator[Service]:
    service = Service(Settings(), clock=clock, timer=lambda: 0.0)
    yield service
    service.close()


class TestHub:
    def test_a_listener_hears_what_happens_after_it_came(self) -> None:
        async def test() -> None:
            hub = Hub("b")
            hub.publish("decision", "r", {"step": 1})
            listener = hub.listen(None)
            one = hub.listen("other")
            hub.publish("decision", "r", {"step": 2})
            hub.steps("r", [3, 2.0])
            hub.steps("r", [4, 2.1])
            found = await listener.next(0.0)
            assert [(e.kind, e.data) for e in found] == [
                ("decision", {"step": 2}),
                ("steps", {"rows": [[3, 2.0], [4, 2.1]]}),
            ]
            assert found[0].id == "b-2"
            assert found[1].id == ""
            assert await one.next(0.0) == []
            assert await listener.next(0.0) == []

        asyncio.run(test())

    def test_one_that_comes_back_gets_what_it_missed_and_nothing_twice(self) -> None:
        async def test() -> None:
            hub = Hub("b")
            for step in range(10):
                hub.publish("decision", "r" if step % 2 else "s", {"step": step})
            found = await hub.listen("r", after="b-4").next(0.0)
            assert [e.data["step"] for e in found] == [5, 7, 9]
            assert await hub.listen("r", after="b-10").next(0.0) == []

        asyncio.run(test())

    @pytest.mark.parametrize("after", ["old-3", "b-x", "x", "b-1"])
    def test_one_that_missed_too_much_is_told_so(
        self, after: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(hubs, "RING", 5)

        async def test() -> None:
            hub = Hub("b")
            for step in range(10):
                hub.publish("decision", "r", {"step": step})
            found = await hub.listen("r", after=after).next(0.0)
            assert [e.kind for e in found] == ["lost"]

        asyncio.run(test())

    def test_one_that_does_not_listen_costs_a_bounded_queue(self) -> None:
        async def test() -> None:
            hub = Hub("b")
            listener = hub.listen(None)
            for step in range(10_000):
                hub.publish("decision", "r", {"step": step})
                hub.steps("r", [step])
            found = await listener.next(0.0)
            assert found[0].data == {"events": 10_000 - hubs.QUEUE}
            assert len(found) == hubs.QUEUE + 2
            assert len(found[-1].data["rows"]) == hubs.ROWS
            assert found[-2].data == {"step": 9_999}

        asyncio.run(test())


def told(chunk: bytes) -> list[tuple[str, str, dict[str, Any]]]:
    """(id, event, data) of a piece of a stream."""
    found = []
    for block in chunk.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "event" in fields:
            found.append((fields.get("id", ""), fields["event"], json.loads(fields["data"])))
    return found


class TestStream:
    def test_a_stream_tells_decisions_incidents_and_steps(
        self, service: Service, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(read, "STEPS_EVERY_S", 0.0)
        service.ready = True
        trainer = SimulatedTrainer(seed=3, faults=[NanGradient(5), Damage(80, 3.0)])
        reporter = Reporter(service, trainer)
        reporter.register()

        async def test() -> None:
            stream = read._stream(service, "r", "")
            assert (await anext(stream)).startswith(b"retry:")
            got: list[tuple[str, str, dict[str, Any]]] = []
            pending = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            reporter.steps(120)
            while not any(kind == "steps" for _, kind, _ in got):
                got += told(await pending)
                pending = asyncio.ensure_future(anext(stream))
            kinds = [kind for _, kind, _ in got]
            assert kinds.count("decision") == sum(
                s.decision.action is not Action.PROCEED for s in trainer.steps
            )
            assert "incident" in kinds
            rows = next(data["rows"] for _, kind, data in got if kind == "steps")
            assert [row["step"] for row in rows] == list(range(120))
            assert rows[5]["grad_norm"] == "nan"
            assert all(data["run"] == "r" for _, _, data in got)
            service.ready = False  # it is told to stop: the stream ends by itself
            with pytest.raises(StopAsyncIteration):
                await pending
            assert not service.hub.listeners

        asyncio.run(test())

    def test_late_reports_are_told_to_nobody(self, service: Service) -> None:
        reporter = Reporter(service, SimulatedTrainer(seed=3, faults=[NanGradient(5)]))
        reporter.register()
        frames = reporter.move(20)

        async def test() -> None:
            listener = service.hub.listen(None)
            reporter.post(*frames, late=True)
            assert await listener.next(0.0) == []

        asyncio.run(test())

    def test_a_trainer_that_comes_back_is_told_from_one_that_is_new(
        self, service: Service, clock: FakeClock
    ) -> None:
        async def test() -> None:
            listener = service.hub.listen("r")

            def began(incarnation: str) -> Reporter:
                trainer = SimulatedTrainer(seed=3)
                reporter = Reporter(service, trainer, incarnation=incarnation)
                reporter.register()
                return reporter

            first = began("one")
            clock.advance(1000.0)
            service.runs.expire(clock.now)
            first.steps(1)
            clock.advance(100_000.0)
            service.runs.expire(clock.now)
            second = began("two")
            second.steps(1)
            second.close()
            told = [e.data for e in await listener.next(0.0) if e.kind == "run"]
            assert [(t["what"], t["state"], t["incarnation"]) for t in told] == [
                ("registered", "running", "one"),
                ("lost", "lost", "one"),
                ("back", "running", "one"),
                ("lost", "lost", "one"),
                ("registered again", "running", "two"),
                ("finished", "finished", "two"),
            ]

        asyncio.run(test())

    def test_a_quiet_stream_sends_a_comment(
        self, service: Service, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(read, "TURN_S", 0.01)
        monkeypatch.setattr(read, "SILENCE_S", 0.03)
        service.ready = True

        async def test() -> None:
            stream = read._stream(service, None, "")
            await anext(stream)
            assert (await anext(stream)).startswith(b":")
            await stream.aclose()

        asyncio.run(test())


class TestJobs:
    def test_a_run_is_lost_by_its_own_cadence(self, service: Service, clock: FakeClock) -> None:
        fast = Reporter(service, SimulatedTrainer(seed=1), run="fast")
        slow = Reporter(service, SimulatedTrainer(seed=1), run="slow")
        for reporter in (fast, slow):
            reporter.register()
        for _ in range(30):
            clock.advance(30.0)  # a trainer without signs of life between its long steps
            fast.steps(1)
            slow.steps(1)
        for _ in range(300):
            clock.advance(1.0)
            fast.steps(1)
        service.runs.expire(clock.now)
        assert service.runs.get("slow").run_state == "lost"
        slow.steps(1)
        assert service.runs.get("slow").run_state == "running"
        interval = service.runs.get("slow").interval_s
        assert interval is not None
        assert interval > 25.0
        clock.advance(200.0)
        service.runs.expire(clock.now)
        states = {name: service.runs.get(name).run_state for name in ("fast", "slow")}
        assert states == {"fast": "lost", "slow": "running"}

    def test_files_of_a_run_that_is_lost_for_long_are_closed_until_it_comes_back(
        self, service: Service, clock: FakeClock
    ) -> None:
        reporter = Reporter(service, SimulatedTrainer(seed=1))
        reporter.register()
        reporter.steps(5)
        clock.advance(100.0)
        service.runs.expire(clock.now)
        job = jobs.Jobs(service)
        asyncio.run(job.retain())
        assert service.runs.get("r").kept.record is not None
        clock.advance(4000.0)
        asyncio.run(job.retain())
        assert service.runs.get("r").kept.record is None
        assert not service.store.records
        reporter.steps(5)
        assert service.runs.get("r").run_state == "running"
        assert reporter.curves("loss")["series"]["loss"]["step"] == list(range(10))

    def test_what_runs_say_is_saved_and_jobs_are_drained(
        self, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(jobs, "SAVE_S", 0.05)
        done: list[str] = []

        async def slowly(self: Any) -> None:
            done.append("begun")
            await asyncio.sleep(0.3)
            done.append("ended")

        monkeypatch.setattr(jobs.Jobs, "save", slowly)

        async def test() -> None:
            service = Service(Settings(), clock=clock, timer=lambda: 0.0)
            async with jobs.running(service):
                assert service.ready
                while not done:
                    await asyncio.sleep(0.01)
            assert not service.ready
            assert done[-1] == "ended"
            assert done.count("begun") == done.count("ended")

        asyncio.run(test())

    def test_a_job_that_fails_is_counted_and_tried_again(
        self, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(jobs, "SAVE_S", 0.03)

        def broken(self: Any) -> None:
            raise OSError("the disk is gone")

        async def test() -> None:
            service = Service(Settings(), clock=clock, timer=lambda: 0.0)
            monkeypatch.setattr(type(service.store), "probe", broken)
            async with jobs.running(service):
                while service.health.job_errors.get("save", 0) < 2:
                    await asyncio.sleep(0.01)

        asyncio.run(test())

    def test_readiness_tells_of_a_disk_that_fails(self, tmp_path: Path, clock: FakeClock) -> None:
        app = create_app(Settings(data_dir=tmp_path / "d"), clock=clock, timer=lambda: 0.0)
        service: Service = app.state.service
        with TestClient(app, base_url="http://localhost") as client:
            assert client.get("/readyz").text == "ready\n"
            service.store.disk_trouble = "[Errno 28] No space left on device"
            answer = client.get("/readyz")
            assert answer.status_code == 200  # it still decides
            assert "degraded: [Errno 28] No space" in answer.text
            assert "sentinel_sidecar_store_trouble 1.0" in client.get("/metrics").text


class JsonTrainer:
    """A trainer in another language: JSON, and no engine of its own."""

    def __init__(self, client: TestClient) -> None:
        self.client = client

    def step(self, observation: Observation) -> dict[str, Any]:
        norm = observation.grad_norm
        body = {
            "step": observation.step,
            "loss": observation.loss,
            "grad_norm": "nan" if norm != norm else norm,
            "shape": list(observation.shape),
        }
        answer = self.client.post("/v1/runs/go/steps", json=body)
        assert answer.status_code == 200, answer.text
        decision: dict[str, Any] = answer.json()["decision"]
        return decision


@pytest.fixture
def living(tmp_path: Path, clock: FakeClock) -> Callable[[], Any]:
    def start() -> TestClient:
        app = create_app(Settings(data_dir=tmp_path / "d"), clock=clock, timer=lambda: 0.0)
        return TestClient(app, base_url="http://localhost")

    return start


@pytest.mark.parametrize("segment_bytes", [2**21, 6_000])
def test_a_json_trainer_goes_on_where_it_was_when_the_sidecar_is_restarted(
    living: Callable[[], TestClient], monkeypatch: pytest.MonkeyPatch, segment_bytes: int
) -> None:
    real = records.Record.__init__
    monkeypatch.setattr(
        records.Record,
        "__init__",
        lambda self, *a, **k: real(self, *a, **(k | {"segment_bytes": segment_bytes})),
    )
    simulated = SimulatedTrainer(seed=4, faults=[NanGradient(70), Damage(130, 2.0)], canary=False)
    simulated.run(170)
    seen = [step.observation for step in simulated.steps]
    policy, state = Policy.load("default"), engine.initial()
    expected = []
    for observation in seen:
        decision = engine.decide(state, observation, policy)
        outcome = Outcome(observation.step, decision.action, decision.action is Action.PROCEED)
        state = engine.apply(state, observation, decision, outcome, policy)
        expected.append((decision.action.name.lower(), decision.rule, decision.reason))
    got = []
    client = living()
    client.put("/v1/runs/go", json={})
    for at, observation in enumerate(seen):
        if at in (40, 71, 72, 134, 150):
            client.app.state.service.close()  # type: ignore[attr-defined]
            client = living()
            if at == 72:  # the answer before was lost: the same question again
                again = JsonTrainer(client).step(seen[at - 1])
                assert again["action"] == expected[at - 1][0]
        answer = JsonTrainer(client).step(observation)
        got.append((answer["action"], answer["rule"], answer["reason"]))
    assert got == expected
    assert {"skip_step"} <= {action for action, _, _ in got}
    about = client.get("/v1/runs/go").json()
    assert about["record"] == {"frames": 170, "late": 0, "holes": 0, "dropped": 0}
    client.app.state.service.close()  # type: ignore[attr-defined]

"""Orders of people: who may give them, that each is carried out once, that all is written down."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from sentinel.core import engine
from sentinel.core.events import SnapshotTaken
from sentinel.core.state import Incident, Ledger, State
from sentinel.core.types import Action, IncidentState, Severity
from sentinel.sidecar.people import Known
from sentinel.sidecar.security import Role
from sentinel.wire.messages import Close
from tests.sidecar.test_app import POLICY, Sidecar, Trainer, run, sidecar
from tests.support import FakeClock

CONTROL, READ, INGEST = "control-0123456789", "reader-0123456789", "ingest-0123456789"


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def order(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    headers = body.pop("headers", {})
    name = body.pop("run", "r")
    return await client.post(f"/v1/runs/{name}/commands", json=body, headers=headers)


async def log(at: Sidecar, name: str = "") -> list[dict[str, Any]]:
    got = await at.uds.get(f"/v1/audit?run={name}")
    return list(reversed(json.loads(got.content)["audit"]))


async def started(at: Sidecar, steps: int = 3) -> Trainer:
    trainer = Trainer(at)
    await trainer.register()
    for _ in range(steps):
        await trainer.step()
    return trainer


@pytest.fixture
def token_files(tmp_path: Path) -> tuple[tuple[Role, Path], ...]:
    files = []
    for role, text in (
        (Role.CONTROL, f"ann {CONTROL}"),
        (Role.READ, READ),
        (Role.INGEST, INGEST),
    ):
        path = tmp_path / role.value
        path.write_text(text)
        files.append((role, path))
    return tuple(files)


class TestRoles:
    @pytest.mark.parametrize(
        ("token", "reads", "orders"),
        [(CONTROL, 200, 202), (READ, 200, 403), (INGEST, 403, 403), ("wrong", 401, 401)],
    )
    def test_each_role_does_its_own_and_no_more(
        self, token_files: Any, token: str, reads: int, orders: int
    ) -> None:
        async def test() -> None:
            async with sidecar(token_files=token_files) as at:
                at.token = INGEST
                trainer = await started(at, 0)
                trainer.state = engine.note(trainer.state, SnapshotTaken(0, "ram"), POLICY)
                headers = bearer(token)
                got = await at.tcp.get("/v1/runs", headers=headers)
                assert got.status_code == reads
                got = await order(at.tcp, kind="pause", headers=headers)
                assert got.status_code == orders
                assert "Bearer" not in got.text or orders == 401

        run(test)

    @pytest.mark.parametrize("token", [CONTROL, READ, "", "wrong"])
    def test_only_a_token_of_role_ingest_seals_a_trainers_message(
        self, token_files: Any, token: str
    ) -> None:
        async def test() -> None:
            async with sidecar(token_files=token_files) as at:
                at.token = token
                refused = await Trainer(at).register()
                assert refused.code == "unauthorized"

        run(test)

    def test_the_socket_needs_no_token(self, token_files: Any) -> None:
        async def test() -> None:
            async with sidecar(token_files=token_files) as at:
                at.token = INGEST
                await started(at)
                assert (await order(at.uds, kind="pause")).status_code == 202

        run(test)

    def test_access_says_what_this_caller_may_do(self, token_files: Any) -> None:
        async def test() -> None:
            async with sidecar(token_files=token_files) as at:
                found = {}
                for token in (CONTROL, READ):
                    got = await at.tcp.get("/v1/access", headers=bearer(token))
                    found[token] = json.loads(got.content)
                assert found[CONTROL]["orders"] is True
                assert found[CONTROL]["name"] == "ann"
                assert found[READ]["orders"] is False
                assert "not of role control" in found[READ]["why"]
                stranger = json.loads((await at.tcp.get("/v1/access")).content)
                assert (stranger["known"], stranger["orders"]) == (False, False)
                assert stranger["name"] is None
            async with sidecar() as at:
                said = json.loads((await at.tcp.get("/v1/access")).content)
                assert (said["tokens"], said["known"], said["orders"]) == (False, True, False)
                assert "--token-file control=FILE" in said["why"]

        run(test)

    @pytest.mark.parametrize(
        ("host", "status"),
        [
            ("localhost:8123", 200),
            ("127.0.0.1:8123", 200),
            ("[::1]:8123", 200),
            ("sidecar", 200),
            ("evil.example:8123", 421),
            ("127.0.0.1.evil.example", 421),
        ],
    )
    def test_without_a_token_a_public_name_is_refused(self, host: str, status: int) -> None:
        async def test() -> None:
            async with sidecar() as at:
                got = await at.tcp.get("/v1/runs", headers={"host": host})
                assert got.status_code == status

        run(test)

    def test_too_many_requests_of_one_address_are_told_to_wait(
        self, token_files: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sentinel.sidecar.door.REQUESTS_AT_ONCE", 3)

        async def test() -> None:
            async with sidecar() as at:
                got = [(await at.tcp.get("/v1/runs")).status_code for _ in range(4)]
                assert got == [200, 200, 200, 429]
                late = await at.tcp.get("/v1/runs")
                assert int(late.headers["retry-after"]) >= 1
                assert (await at.uds.get("/v1/runs")).status_code == 200

        run(test)


class TestOrders:
    def test_an_order_goes_from_pending_to_delivered_to_obeyed(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                trainer = await started(at)
                got = json.loads((await order(at.uds, kind="skip_next", id="a")).content)
                assert (got["state"], got["recorded"]) == ("pending", True)
                told = (await trainer.step()).commands
                states = [o["state"] for o in (await trainer.about())["orders"]]
                assert states == ["delivered"]
                decided = engine.decide(
                    trainer.state,
                    engine_observation(trainer, told),
                    POLICY,
                )
                assert decided.action is Action.SKIP_STEP
                await trainer.step(commands=told)
                assert [o["state"] for o in (await trainer.about())["orders"]] == ["taken"]
                lines = [(e["action"], e["outcome"]) for e in await log(at, "r")]
                assert lines == [("command", "accepted"), ("command", "acknowledged")]

        run(test)

    def test_the_same_id_for_another_order_is_a_conflict(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                await started(at)
                assert (await order(at.uds, kind="pause", id="a")).status_code == 202
                assert (await order(at.uds, kind="pause", id="a")).status_code == 202
                got = await order(at.uds, kind="halt", id="a")
                assert got.status_code == 409
                assert "a new order needs a new id" in got.text

        run(test)

    @pytest.mark.parametrize(
        ("body", "status", "said"),
        [
            ({"kind": "rollback"}, 409, "no healthy snapshot to roll back to yet"),
            ({"kind": "ack", "target": 7}, 404, "no incident 7"),
            ({"kind": "rollback", "target": -1}, 422, "must be a step from 0 on"),
            ({"kind": "pause", "id": "x" * 129}, 422, "at most 128 printable"),
            ({"kind": "pause", "issued_by": "a\u0000b"}, 422, "printable"),
            ({"kind": "dance"}, 422, "command cannot be read"),
            ({"kind": "pause", "run": "other"}, 404, "not registered"),
        ],
    )
    def test_what_cannot_come_to_anything_is_refused_and_audited(
        self, body: dict[str, Any], status: int, said: str
    ) -> None:
        async def test() -> None:
            async with sidecar() as at:
                await started(at)
                got = await order(at.uds, **dict(body))
                assert got.status_code == status, got.text
                assert said in got.text
                (line,) = await log(at)
                assert line["outcome"] == "refused"
                assert said in line["detail"]["why"]

        run(test)

    def test_a_rollback_names_the_snapshots_there_are(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                trainer = Trainer(at)
                await trainer.register()
                trainer.state = engine.note(trainer.state, SnapshotTaken(0, "ram"), POLICY)
                await trainer.step()
                got = await order(at.uds, kind="rollback", target=5)
                assert got.status_code == 409
                assert "healthy snapshot (0), got 5" in got.text
                assert (await order(at.uds, kind="rollback", target=0)).status_code == 202

        run(test)

    def test_a_run_takes_so_many_orders_a_minute_and_hears_the_same_one_again(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                await started(at)
                got = [
                    (await order(at.uds, kind="pause", id=f"c{n}")).status_code for n in range(21)
                ]
                assert got == [202] * 20 + [429]
                assert (await order(at.uds, kind="pause", id="c3")).status_code == 202

        run(test)

    def test_a_body_of_64_kib_is_the_most(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                await started(at)
                got = await order(at.uds, kind="pause", issued_by="x" * 70_000)
                assert got.status_code == 413

        run(test)

    def test_an_ended_run_takes_no_order(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                trainer = await started(at)
                at.app.state.service.runs.runs["r"].run_state = "finished"
                got = await order(at.uds, kind="halt")
                assert (got.status_code, trainer.run) == (409, "r")
                assert "is finished: nobody would hear it" in got.text

        run(test)

    def test_a_halted_run_needs_its_marker_cleared_first_and_the_refusal_says_how(self) -> None:
        async def test() -> None:
            async with sidecar() as at:
                await started(at)
                known = at.app.state.service.runs.runs["r"]
                known.run_state = "halted"
                got = await order(at.uds, kind="resume")
                assert got.status_code == 409
                assert "`sentinel resume RUN`, then start the run again" in got.text
                known.run_state = "finished"
                assert "sentinel resume" not in (await order(at.uds, kind="resume")).text

        run(test)

    @pytest.mark.parametrize(
        ("state", "latched", "said"),
        [
            ("running", False, "it ends by itself when the run is quiet"),
            ("running", True, "the trainer ends it with its next step"),
            ("finished", False, "the run is finished, so that it stays open as it was at the end"),
            ("halted", True, "the run is halted, so that it stays open as it was at the end"),
            ("lost", False, "the run is lost: it stays open until its trainer returns"),
        ],
    )
    def test_an_acknowledgement_says_what_becomes_of_the_incident(
        self, state: str, latched: bool, said: str
    ) -> None:
        async def test() -> None:
            async with sidecar() as at:
                await started(at)
                service = at.app.state.service
                known = service.runs.runs["r"]
                incident = Incident(
                    number=1,
                    key="instability",
                    state=IncidentState.FIRING,
                    severity=Severity.CRITICAL,
                    opened=1,
                    last=1,
                    summary="",
                    latched=latched,
                )
                known.mirror.state = State(ledger=Ledger(incidents=(incident,)))
                known.run_state = state
                found = Known("r", 1, 1, None, incident, incident.key)
                assert await service.people.acknowledge(found, "ada") == f"noted; {said}"

        run(test)

    def test_an_order_for_a_lost_run_is_taken_and_says_until_when_it_would_act(self) -> None:
        clock = FakeClock(1_000_000.0)

        async def test() -> None:
            async with sidecar(clock) as at:
                trainer = await started(at)
                said = (await order(at.uds, kind="skip_next", id="now")).json()
                assert said["detail"] == "the trainer hears of it with its next report"
                clock.advance(45.0)
                said = (await order(at.uds, kind="pause", id="silent")).json()
                assert said["run_state"] == "running"
                assert "is silent (no sign of life for 45 s)" in said["detail"]
                clock.advance(300.0)
                at.app.state.service.runs.expire(clock())
                got = await order(at.uds, kind="pause", id="lost")
                said = got.json()
                assert (got.status_code, said["run_state"], said["state"]) == (
                    202,
                    "lost",
                    "pending",
                )
                # 1,000,000 s is 13:46:40; 345 s and ten minutes later:
                assert said["detail"] == (
                    "run 'r' is lost (no sign of life for 345 s): it acts on this only if its "
                    "trainer returns before 14:02:25 UTC; otherwise nothing happens"
                )
                assert (await log(at, "r"))[-1]["detail"]["run_state"] == "lost"
                told = (await trainer.step()).commands
                assert [c.id for c in told] == ["now", "silent", "lost"]
                assert (await trainer.about())["state"] == "running"

        run(test)

    def test_one_for_a_lost_run_that_comes_back_too_late_never_acts(self) -> None:
        clock = FakeClock(1_000_000.0)

        async def test() -> None:
            async with sidecar(clock) as at:
                trainer = await started(at)
                clock.advance(300.0)
                at.app.state.service.runs.expire(clock())
                await order(at.uds, kind="halt", id="late", expires_in_s=60)
                clock.advance(61.0)
                assert (await trainer.step()).commands == ()
                said = (await order(at.uds, kind="halt", id="late", expires_in_s=60)).json()
                assert said["state"] == "expired"
                assert "never acted on; a new order needs a new id" in said["detail"]

        run(test)

    @pytest.mark.parametrize("state", ["finished", "halted"])
    def test_what_nobody_heard_before_the_end_is_not_kept_for_another_life(
        self, state: str
    ) -> None:
        async def test() -> None:
            async with sidecar() as at:
                trainer = await started(at)
                await order(at.uds, kind="rollback", id="x")
                await order(at.uds, kind="pause", id="y")
                await at.send(
                    "POST",
                    "/v1/runs/r/close",
                    Close(run="r", incarnation="i", fence=trainer.fence, state=state),
                )
                states = {o["command"]["id"]: o["state"] for o in (await trainer.about())["orders"]}
                assert set(states.values()) == {"expired"}
                again = Trainer(at, incarnation="j")
                await again.register()
                assert (await again.step()).commands == ()
                outcomes = [(e["detail"].get("id"), e["outcome"]) for e in await log(at, "r")]
                assert ("y", "expired") in outcomes

        run(test)

    def test_the_token_says_who_it_was_whatever_name_was_given(self, token_files: Any) -> None:
        async def test() -> None:
            async with sidecar(token_files=token_files) as at:
                at.token = INGEST
                trainer = await started(at)
                got = await order(at.tcp, kind="pause", issued_by="bob", headers=bearer(CONTROL))
                assert got.status_code == 202
                told = (await trainer.step()).commands
                assert [c.issued_by for c in told] == ["bob (ann)"]
                line = (await log(at, "r"))[0]
                assert (line["actor"], line["role"]) == ("ann", "control")

        run(test)


class TestAudit:
    @pytest.mark.parametrize(
        ("token", "status", "actor"), [("guess", 401, "unknown"), (READ, 403, "read")]
    )
    def test_an_unauthorised_order_is_refused_and_audited_up_to_a_limit(
        self, token_files: Any, token: str, status: int, actor: str
    ) -> None:
        async def test() -> None:
            async with sidecar(token_files=token_files) as at:
                for _ in range(80):
                    got = await order(at.tcp, kind="halt", headers=bearer(token))
                    assert got.status_code == status
                lines = await log(at, "r")
                assert {(e["actor"], e["outcome"]) for e in lines} == {(actor, "refused")}
                assert len(lines) == 50

        run(test)

    def test_no_token_is_in_any_log(
        self, token_files: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def test() -> None:
            async with sidecar(token_files=token_files) as at:
                at.token = INGEST
                await started(at)
                for token in (CONTROL, READ, "wrong-but-secret"):
                    await order(at.tcp, kind="pause", headers=bearer(token))
                    await at.tcp.get(f"/v1/runs?token={token}", headers=bearer(token))
                text = caplog.text + json.dumps(await log(at))
                for token in (CONTROL, READ, INGEST, "wrong-but-secret"):
                    assert token not in text
                assert "audit action=command" in caplog.text

        with caplog.at_level(logging.DEBUG, logger="sentinel"):
            run(test)


class TestRestart:
    def test_an_open_order_is_told_again_after_a_restart_and_an_old_one_is_not(
        self, tmp_path: Path
    ) -> None:
        clock = FakeClock(1000.0)

        async def before() -> None:
            async with sidecar(clock, data_dir=tmp_path) as at:
                await started(at)
                await order(at.uds, kind="pause", id="long", expires_in_s=600)
                await order(at.uds, kind="halt", id="short", expires_in_s=5)

        async def after() -> None:
            clock.advance(60.0)
            async with sidecar(clock, data_dir=tmp_path) as at:
                trainer = Trainer(at, incarnation="j")
                at.app.state.service.runs.runs["r"].run_state = "lost"
                await trainer.register()
                reply = await trainer.step()
                assert [c.id for c in reply.commands] == ["long"]
                states = {o["command"]["id"]: o["state"] for o in (await trainer.about())["orders"]}
                assert states == {"long": "delivered", "short": "expired"}
                outcomes = [(e["detail"].get("id"), e["outcome"]) for e in await log(at, "r")]
                assert ("short", "expired") in outcomes

        run(before)
        run(after)


def engine_observation(trainer: Trainer, commands: Any) -> Any:
    from sentinel.core.types import Observation

    return Observation(trainer.state.step, 2.0, 1.0, 1e-3, commands=commands)

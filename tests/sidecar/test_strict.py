"""What makes no sense is refused with its field, keeps nothing else out, and spoils nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from sentinel.core.errors import ProtocolError
from sentinel.core.policy import Policy
from sentinel.sidecar import exporter
from sentinel.sidecar.app import create_app
from sentinel.sidecar.runs import details
from sentinel.sidecar.service import Service
from sentinel.sidecar.settings import Settings
from sentinel.wire import codec
from sentinel.wire.messages import Counts, Frame, Register, Steps
from tests.sidecar.test_app import run, sidecar
from tests.support import FakeClock
from tests.support.reports import Reporter
from tests.support.simulated import SimulatedTrainer

# ---- JSON ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "body", "said"),
    [
        ("PUT", "", {"layer": ["a"]}, "no field 'layer'; did you mean 'layers'?"),
        (
            "PUT",
            "",
            {"layers": ["a", {"name": "b", "atention": True}]},
            "no field 'atention' in layers[1]; did you mean 'attention'?",
        ),
        ("POST", "/steps", {"step": 1, "gradnorm": 1}, "did you mean 'grad_norm'?"),
        ("POST", "/steps", {"step": 1, "grad_norm": -1}, "observation.grad_norm must be 0 or more"),
        ("POST", "/steps", {"step": -1}, "observation.step must lie between 0 and 2**53, got -1"),
        ("POST", "/steps", {"step": 2**53}, "observation.step must lie between 0 and 2**53"),
        ("POST", "/steps", {"step": 1, "lr": -0.1}, "observation.lr must be 0 or more"),
        ("POST", "/steps", {"step": 1, "outcome": {}}, "step.outcome stands beside the observat"),
        (
            "POST",
            "/steps",
            {"observation": {"step": 1}, "outcome": {"step": 0, "executed": "skip_step"}},
            "missing required field `applied` - at `$.outcome`",
        ),
        (
            "POST",
            "/steps",
            {
                "observation": {"step": 1},
                "outcome": {"step": 0, "executed": "skip", "applied": False},
            },
            "outcome.executed must be one of proceed, skip_step, rollback, halt, got 'skip'",
        ),
        (
            "POST",
            "/steps",
            {"observation": {"step": 1}, "events": [{"kind": "restored", "step": 1, "to": 0}]},
            "no field 'to' in events[...]; there are: kind, step, target, reason, paused",
        ),
        (
            "POST",
            "/steps",
            {
                "observation": {"step": 1},
                "events": [
                    {"kind": "snapshot_taken", "step": 1},
                    {"kind": "restored", "step": 1, "target": -4},
                ],
            },
            "events[1].target must lie between 0 and 2**53, got -4",
        ),
        ("POST", "/close", {"state": "lost"}, "Invalid enum value 'lost'"),
        ("POST", "/close", {"status": "finished"}, "did you mean 'state'?"),
        ("POST", "/commands", {"kind": "pause", "expires": 9}, "did you mean 'expires_in_s'?"),
    ],
)
def test_json_is_read_strictly_and_a_refused_step_spoils_nothing(
    method: str, path: str, body: dict[str, Any], said: str
) -> None:
    async def test() -> None:
        async with sidecar() as at:
            await at.uds.put("/v1/runs/j", json={"layers": ["a"]})
            await at.uds.post("/v1/runs/j/steps", json={"step": 0, "loss": 2.0, "grad_norm": 1})
            before = (await at.uds.get("/v1/runs/j")).json()
            got = await at.uds.request(method, f"/v1/runs/j{path}", json=body)
            assert got.status_code == 422
            assert got.json()["code"] == "malformed"
            assert said in got.json()["detail"].replace("events[0]", "events[...]")
            after = (await at.uds.get("/v1/runs/j")).json()
            assert after["record"]["frames"] == 1
            assert (after["state"], after["ledger"]) == (before["state"], before["ledger"])
            next_ = {"step": 1, "loss": 2.0, "grad_norm": "inf"}
            taken = (await at.uds.post("/v1/runs/j/steps", json=next_)).json()
            assert taken["decision"]["action"] == "skip_step"

    run(test)


def test_nan_as_python_writes_it_is_answered_with_how_it_is_written_here() -> None:
    async def test() -> None:
        async with sidecar() as at:
            await at.uds.put("/v1/runs/j", json={})
            got = await at.uds.post(
                "/v1/runs/j/steps",
                content=b'{"step": 0, "loss": NaN}',
                headers={"content-type": "application/json"},
            )
            assert got.status_code == 422
            assert 'write "nan", "inf" or "-inf", in quotes' in got.json()["detail"]

    run(test)


# ---- frames --------------------------------------------------------------------------------


@pytest.fixture
def service() -> Iterator[Service]:
    app = create_app(Settings(), clock=FakeClock(), timer=lambda: 0.0)
    found: Service = app.state.service
    yield found
    found.close()


@pytest.fixture
def reporter(service: Service) -> Reporter:
    found = Reporter(service, SimulatedTrainer(seed=1, layers=3))
    found.register()
    found.steps(5)
    return found


def spoiled(frame: Frame, **more: Any) -> Frame:
    seen = msgspec.structs.replace(frame.observation, **more)
    return msgspec.structs.replace(frame, observation=seen)


def negative_row() -> dict[str, Any]:
    column = codec.column_bytes(np.array([1.0, -2.0, 3.0], np.float32))
    return {"columns": {"layer_grad_norm": column}}


def about(service: Service) -> Any:
    return details(service.runs.get("r"), service.now())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"grad_norm": -1.0}, r"step 5: observation\.grad_norm must be 0 or more.*got -1"),
        (negative_row(), r"step 5: observation\.columns\.layer_grad_norm\[1\] must be 0 or more"),
        ({"columns": {"layer_grad_norm": b"1234"}}, r"step 5: column 'layer_grad_norm' must hold"),
        ({"shape": (-1,)}, r"step 5: observation\.shape\[0\]"),
        ({"lr": -1.0}, r"step 5: observation\.lr"),
    ],
)
def test_a_step_that_makes_no_sense_is_refused_and_the_true_one_taken(
    service: Service, reporter: Reporter, more: dict[str, Any], said: str
) -> None:
    (frame,) = reporter.move(1)
    with pytest.raises(ProtocolError, match=said):
        reporter.post(spoiled(frame, **more))
    again = reporter.post(spoiled(frame, **more), late=True)  # as the link brings it later
    assert len(again.refused) == 1
    found = about(service)
    assert (found["refused_reports"], found["record"]["frames"]) == (1, 5)
    reply = reporter.post(frame)
    assert (reply.decision is not None, reply.refused) == (True, ())
    assert about(service)["record"]["frames"] == 6


def test_one_row_of_a_late_batch_that_makes_no_sense_does_not_keep_the_others_out(
    service: Service, reporter: Reporter
) -> None:
    batch = reporter.move(5)
    batch[2] = spoiled(batch[2], **negative_row())
    reply = reporter.post(*batch, late=True)
    (why,) = reply.refused
    assert why.startswith("frame 3 of 5: step 7: observation.columns.layer_grad_norm[1] must be")
    assert (reply.seq, reply.recorded) == (9, True)
    found = about(service)
    assert found["record"] == {"frames": 9, "late": 4, "holes": 1, "dropped": 0}
    assert found["missing_reports"] == [(7, 7)]
    assert found["refused_reports"] == 1
    exported = asyncio.run(exporter.render(service, "1")).decode()
    assert 'sentinel_reports_dropped_total{run="r",reason="refused"} 1.0' in exported
    assert reporter.curves()["series"]["loss"]["step"] == [0, 1, 2, 3, 4, 5, 6, 8, 9]


def test_a_late_batch_of_nothing_but_nonsense_is_answered_so_that_it_does_not_come_again(
    service: Service, reporter: Reporter
) -> None:
    batch = [spoiled(frame, grad_norm=-1.0) for frame in reporter.move(30)]
    reply = reporter.post(*batch, late=True)
    assert (len(reply.refused), reply.seq, reply.need_state) == (16, -1, False)
    assert about(service)["refused_reports"] == 30
    assert about(service)["record"]["frames"] == 5


def test_a_frame_that_cannot_be_read_at_all_is_told_by_its_place(
    service: Service, reporter: Reporter
) -> None:
    first, second = reporter.move(2)
    message = Steps(
        run="r",
        incarnation="i",
        fence=reporter.fence,
        policy_hash=reporter.policy_hash,
        late=True,
        frames=(msgspec.Raw(msgspec.msgpack.encode("x")), msgspec.Raw(codec.encode(second))),
    )
    reply = service.runs.steps(message, 0.0)
    assert reply.refused[0].startswith("frame 1 of 2: frame cannot be read: Expected `object`")
    assert about(service)["missing_reports"] == [(5, 5)]
    assert first.seq == 5


def test_among_live_ones_the_next_sound_frame_asks_for_the_state(
    service: Service, reporter: Reporter
) -> None:
    batch = reporter.move(4)
    batch[1] = spoiled(batch[1], loss_scale=-1.0)
    reply = reporter.post(*batch)
    assert reply.seq == 8
    assert reply.decision is not None  # after it was handed over
    assert about(service)["record"] == {"frames": 8, "late": 0, "holes": 1, "dropped": 0}
    assert about(service)["state_handovers"] == 2


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (Counts(dropped=-1), r"counts\.dropped must lie between 0 and 2\*\*53, got -1"),
        (Counts(misses={"timeout": -3}), r"counts\.misses\['timeout'\] must lie between"),
        (Counts(misses={str(n): 1 for n in range(257)}), r"counts\.misses may be 256 numbers"),
        (Counts(internal_errors={"x" * 513: 1}), r"at most 512 characters"),
        (Counts(longest_wait_s=float("nan")), r"counts\.longest_wait_s must be 0 or more"),
    ],
)
def test_counters_that_are_none_reach_no_metric(
    service: Service, reporter: Reporter, counts: Counts, said: str
) -> None:
    message = Steps(
        run="r",
        incarnation="i",
        fence=reporter.fence,
        policy_hash=reporter.policy_hash,
        counts=counts,
        frames=(),
    )
    with pytest.raises(ProtocolError, match=said):
        service.runs.steps(message, 0.0)
    assert about(service)["misses"] == {}


def test_what_people_are_told_of_a_process_is_bounded(service: Service) -> None:
    told = {f"{n:03}": "x" * 100_000 for n in range(500)}
    service.runs.register(
        Register(
            run="s", incarnation="i", policy=codec.encode_policy(Policy.load("default")), info=told
        ),
        0.0,
    )
    info = service.runs.get("s").info
    assert (len(info), len(info["000"])) == (64, 512)

"""Frames that are not what they should be: refused, never a 5xx, and nothing is spoiled by them.

The mutated messages are sealed as they are, so that they get past the seal to the code behind it.
"""

from __future__ import annotations

import asyncio
import math
import random
import resource
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from sentinel.core.state import ENGINE_VERSION
from sentinel.sidecar.app import create_app
from sentinel.sidecar.runs.bounds import MOST_JUMP
from sentinel.sidecar.runs.reports import MOST_REFUSED
from sentinel.sidecar.service import Service
from sentinel.sidecar.settings import Settings
from sentinel.traces.reader import Reader
from sentinel.wire import codec, messages
from sentinel.wire.messages import Frame, Steps
from tests.support import FakeClock
from tests.support.reports import Reporter
from tests.support.simulated import Damage, NanGradient, SimulatedTrainer

ODD: tuple[Any, ...] = (
    -1, 0, 1, 2**31, 2**53, 2**63 - 1, -(2**63), 2**64 - 1, 0.0, -0.0, 1e308, 1e-320, math.nan,
    math.inf, -math.inf, True, False, None, "", "nan", "\x00", "ü" * 300, "../../x", b"",
    b"\xff" * 7, b"\x00" * 12, [], {}, [[]], {"a": 1}, {"": None}, [0] * 50,
)  # fmt: skip


def mutated(value: Any, chance: random.Random) -> Any:
    """The same with one thing changed somewhere inside."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        what = chance.random()
        if what < 0.08:
            return {k: v for k, v in value.items() if k != key}
        if what < 0.12:
            return {**value, chance.choice(["x", "", "step", "layer_new", "é"]): chance.choice(ODD)}
        if what < 0.16:
            return {(str(k) + "x" if k == key else k): v for k, v in value.items()}
        return {**value, key: mutated(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        at = chance.randrange(len(value))
        what = chance.random()
        if what < 0.1:
            return value[:at] + value[at + 1 :]
        if what < 0.2:
            return [*value, value[at]]
        return [*value[:at], mutated(value[at], chance), *value[at + 1 :]]
    if isinstance(value, bytes) and value and chance.random() < 0.7:
        return flipped(value, chance)
    if isinstance(value, int) and not isinstance(value, bool) and chance.random() < 0.3:
        return value + chance.choice([-2, -1, 1, 2, 1000])
    return chance.choice(ODD)


def flipped(data: bytes, chance: random.Random) -> bytes:
    """Some bits turned, or a piece cut out or doubled."""
    found = bytearray(data)
    for _ in range(chance.randrange(1, 4)):
        found[chance.randrange(len(found))] ^= 1 << chance.randrange(8)
    at = chance.randrange(len(found))
    what = chance.random()
    if what < 0.15:
        del found[at:]
    elif what < 0.3:
        found[at:at] = found[: chance.randrange(16)]
    return bytes(found)


class Wire:
    """Sends bytes to the application as a server would, without one."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def send(self, method: str, path: str, body: bytes, seal: str) -> tuple[int, bytes]:
        said: dict[str, Any] = {"status": 0, "body": b""}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [
                (b"content-type", messages.CONTENT_TYPE.encode()),
                (messages.SEAL_HEADER.encode(), seal.encode()),
                (b"host", b"localhost"),
            ],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "state": {},
        }

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def taking(message: Any) -> None:
            if message["type"] == "http.response.start":
                said["status"] = message["status"]
            else:
                said["body"] += message.get("body", b"")

        await self.app(scope, receive, taking)
        return said["status"], said["body"]


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param(1_500, id="some"),
        pytest.param(
            100_000,
            id="many",
            marks=[pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(1800)],
        ),
    ],
)
def test_mutated_frames_are_refused_or_make_sense(
    tmp_path: Path, clock: FakeClock, frames: int, caplog: pytest.LogCaptureFixture
) -> None:
    chance = random.Random(frames)
    app = create_app(Settings(data_dir=tmp_path), clock=clock, timer=lambda: 0.0)
    service: Service = app.state.service
    wire = Wire(app)
    faults = [NanGradient(60), Damage(90, 2.0)]
    good = Reporter(service, SimulatedTrainer(seed=1, layers=3, faults=faults), run="good")
    victim = Reporter(service, SimulatedTrainer(seed=2, layers=3, faults=faults), run="victim")
    for reporter in (good, victim):
        reporter.register()
        reporter.steps(100)
    plain = [msgspec.msgpack.decode(messages.encode_frame(frame)) for frame in victim.frames]
    answers: Counter[int] = Counter()

    def message() -> bytes:
        newest = service.runs.get("victim").mirror.next_seq
        frame = dict(chance.choice(plain))
        if chance.random() < 0.7:  # as if it came next
            frame["seq"] = newest
            frame["observation"] = {**frame["observation"], "step": newest}
            state = service.runs.get("victim").state
            if state is not None:
                frame["state_hash"] = codec.state_hash(state)
        raw = msgspec.msgpack.encode(mutated(frame, chance))
        if chance.random() < 0.2:
            raw = flipped(raw, chance)
        whole = {
            "v": 1,
            "run": "victim",
            "incarnation": "i",
            "fence": victim.fence,
            "engine_version": ENGINE_VERSION,
            "policy_hash": victim.policy_hash,
            "late": chance.random() < 0.3,
            "frames": [msgspec.Raw(raw)],
        }
        if chance.random() < 0.1:
            whole = mutated(whole, chance)
        return msgspec.msgpack.encode(whole)

    async def one(body: bytes) -> None:
        path = "/v1/runs/victim/steps"
        status, answer = await wire.send("POST", path, body, messages.seal("", path, body))
        answers[status] += 1
        assert status < 500, (status, answer, body)
        if status != 200:
            messages.decode_message(messages.Refused, answer)
            return
        reply = messages.decode_message(messages.Reply, answer)
        if reply.decision is not None:
            codec.decode_decision(reply.decision)
        sent = messages.decode_message(Steps, body).frames
        not_taken = {int(why.split()[1]) - 1 for why in reply.refused}
        answers[-1] += len(not_taken)
        if len(not_taken) == MOST_REFUSED:
            return  # there may be more of them
        for at, raw in enumerate(sent):  # what was taken can be read, and a run can hold it
            if at in not_taken:
                continue
            taken: Frame = messages.decode_frame(raw)
            seen = taken.observation
            for measured in (seen.grad_norm, seen.lr, seen.loss_scale):
                assert measured is None or not measured < 0.0
            norms = np.frombuffer(seen.columns.get("layer_grad_norm", b""), "<f4")
            assert not ((norms < 0.0) & (norms > -np.inf)).any()
            assert all(0 <= size < 2**63 for size in seen.shape)
            assert 0 <= taken.seq < 2 * MOST_JUMP
            assert 0 <= taken.observation.step < 2**53
            assert all(len(c) == 12 for c in taken.observation.columns.values())

    async def all_of_them(count: int) -> None:
        for _ in range(count):
            await one(message())

    asyncio.run(all_of_them(frames // 3))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    asyncio.run(all_of_them(frames - frames // 3))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown
    print(f"{dict(sorted(answers.items()))}, grown by {grown / 1024:.1f} MB")
    assert answers[422] > frames // 20
    assert answers[-1] > frames // 50  # late ones: refused one by one
    assert service.runs.get("victim").kept.seen.missing < MOST_JUMP * 2
    assert grown < 100 * 1024
    assert not [r for r in caplog.records if r.message.startswith("request failed")]

    # Everybody else goes on, and everything can still be read.
    assert good.steps(50).decision is not None
    about = asyncio.run(_get(wire, "/v1/runs/victim"))
    assert msgspec.json.decode(about)["run"] == "victim"
    text = asyncio.run(_get(wire, "/metrics")).decode()
    assert list(parse(text))
    for run in ("good", "victim"):
        place = service.series_directory(run)
        service.store.series.curves(place, ("loss", "spike_score"), None, None, 100)
        service.store.series.layers(place, "layer_grad_norm", None, None, 100)
        reader = Reader(place)
        assert sum(1 for _ in reader.steps(columns=True)) >= 100
        assert reader.damage == ()
    service.close()


async def _get(wire: Wire, path: str) -> bytes:
    status, body = await wire.send("GET", path, b"", "")
    assert status == 200
    return body

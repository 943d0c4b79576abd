"""What trainers say: register, steps, state, close.

Trainers speak msgpack (wire.messages) through raw-body routes, since a pydantic body model costs
ten times as much and turns NaN into null. Trainers in other languages speak JSON, in which
non-finite numbers are the words "nan", "inf" and "-inf", and find the decision in the reply. JSON
is read strictly, since a field with a slip in its name would count as not measured; frames are not,
since a trainer of a later version may send more (wire.messages).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response

from sentinel.core.errors import ProtocolError
from sentinel.core.events import (
    AutomationSet,
    Event,
    Restored,
    RestoreFailed,
    SnapshotLost,
    SnapshotTaken,
)
from sentinel.core.state import Stats
from sentinel.core.types import Action, Outcome
from sentinel.sidecar.door import read_json
from sentinel.sidecar.runs import SESSION_HEADER, Claim, next_step
from sentinel.sidecar.service import Service
from sentinel.wire import codec
from sentinel.wire.messages import (
    Accepted,
    Close,
    HandOver,
    Layer,
    Message,
    Register,
    Steps,
)


class _JsonLayer(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    kind: str = ""
    shape: tuple[int, ...] = ()
    block: int | None = None
    attention: bool = False


class _JsonRegister(msgspec.Struct, forbid_unknown_fields=True):
    layers: tuple[_JsonLayer | str, ...] = ()
    first_step: int | None = None
    exclusive: bool = False
    take_over: bool = False


class _JsonEvent(msgspec.Struct, forbid_unknown_fields=True):
    kind: str
    step: int
    target: int | None = None
    reason: str = ""
    paused: bool = False


class _JsonOutcome(msgspec.Struct, forbid_unknown_fields=True):
    step: int
    executed: str
    applied: bool


class _JsonClose(msgspec.Struct, forbid_unknown_fields=True):
    state: Literal["finished", "halted"] = "finished"


class _JsonStep(msgspec.Struct, forbid_unknown_fields=True):
    observation: msgspec.Raw
    outcome: _JsonOutcome | None = None
    events: tuple[_JsonEvent, ...] = ()


def router(service: Service) -> APIRouter:
    """See the module docstring."""
    routes, runs, door, now = APIRouter(), service.runs, service.door, service.now

    @routes.put("/v1/runs/{run}")
    async def register(run: str, request: Request) -> Response:
        def of_person(body: bytes) -> tuple[int, Any]:
            asked = read_json(_JsonRegister, body or b"{}", "registration")
            layers = tuple(map(_layer, asked.layers))
            claim = Claim(_carried(request), asked.exclusive, asked.take_over)
            taken = runs.json.register(run, layers, now(), asked.first_step, claim)
            return 200, {
                "run": run,
                "policy": taken.policy.to_dict(),
                "next_step": next_step(taken),
                "session": None if taken.session is None else taken.session.id or None,
            }

        def of_trainer(message: Register) -> Message:
            return runs.register(message, now())

        return await door.either(request, Register, run, of_trainer, of_person)

    async def steps(request: Request) -> Response:
        run: str = request.path_params["run"]

        def of_person(body: bytes) -> tuple[int, Any]:
            asked = _json_step(body)
            outcome = None
            if asked.outcome is not None:
                outcome = _outcome(asked.outcome)
            events = tuple(_event(e) for e in asked.events)
            observation = codec.observation_from_json(bytes(asked.observation))
            carried = _carried(request)
            decision = runs.json.step(run, observation, outcome, events, now(), carried)
            kept = runs.json.newest_kept(run)
            return 200, {"run": run, "decision": decision, "recorded": kept}

        def of_trainer(message: Steps) -> Message:
            return runs.steps(message, now())

        return await door.either(request, Steps, run, of_trainer, of_person)

    # A plain route: FastAPI's own would look for parameters to inject at every step.
    routes.add_route("/v1/runs/{run}/steps", steps, methods=["POST"])

    @routes.put("/v1/runs/{run}/state")
    async def state(run: str, request: Request) -> Response:
        def of_trainer(message: HandOver) -> Message:
            runs.hand_over(message, now())
            return Accepted(run=run)

        return await door.sealed(request, HandOver, run, of_trainer)

    @routes.post("/v1/runs/{run}/close")
    async def close(run: str, request: Request) -> Response:
        def of_person(body: bytes) -> tuple[int, Any]:
            asked = read_json(_JsonClose, body or b"{}", "close")
            ended = runs.json.close(run, asked.state, now(), _carried(request))
            return 200, {"run": run, "state": ended}

        def of_trainer(message: Close) -> Message:
            runs.close(message, now())
            return Accepted(run=run)

        return await door.either(request, Close, run, of_trainer, of_person)

    return routes


def _json_step(body: bytes) -> _JsonStep:
    """A step as {"observation": {...}, ...}, or the bare observation."""
    table = read_json(dict[str, msgspec.Raw], body, "step")
    if "observation" in table:
        return read_json(_JsonStep, body, "step")
    beside = [name for name in ("outcome", "events") if name in table]
    if beside:
        raise ProtocolError(
            f"step.{beside[0]} stands beside the observation, not in it: "
            f'{{"observation": {{"step": 7, ...}}, "{beside[0]}": ...}}'
        )
    return _JsonStep(observation=msgspec.Raw(body))


def _carried(request: Request) -> str:
    """The session that a JSON trainer was given; "" when it carries none."""
    return request.headers.get(SESSION_HEADER, "")


def _layer(asked: _JsonLayer | str) -> Layer:
    if isinstance(asked, str):
        return Layer(asked)
    return Layer(asked.name, asked.kind, asked.shape, asked.block, asked.attention)


def _outcome(asked: _JsonOutcome) -> Outcome:
    names = {action.name.lower(): action for action in Action}
    if asked.executed not in names:
        raise ProtocolError(
            f"outcome.executed must be one of {', '.join(names)}, got {asked.executed!r}"
        )
    return Outcome(asked.step, names[asked.executed], asked.applied)


def _event(asked: _JsonEvent) -> Event:
    def target() -> int:
        if asked.target is None:
            raise ProtocolError(f"event.target must be given for {asked.kind!r}")
        return asked.target

    match asked.kind:
        case "snapshot_taken":
            return SnapshotTaken(asked.step, "trainer")
        case "restored":
            return Restored(asked.step, target(), Stats())
        case "restore_failed":
            return RestoreFailed(asked.step, asked.target, asked.reason)
        case "snapshot_lost":
            return SnapshotLost(asked.step, target(), asked.reason)
        case "automation_set":
            return AutomationSet(asked.step, asked.paused, "trainer")
    raise ProtocolError(
        "event.kind must be one of snapshot_taken, restored, restore_failed, snapshot_lost, "
        f"automation_set, got {asked.kind!r}"
    )

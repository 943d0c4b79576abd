"""Orders of people: POST /v1/runs/{run}/commands."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from sentinel.core.errors import ProtocolError
from sentinel.core.types import Command, CommandKind
from sentinel.sidecar.door import read_json, speaks_json
from sentinel.sidecar.runs import COMMAND_TTL_S
from sentinel.sidecar.security import Role
from sentinel.sidecar.service import Service


class _JsonCommand(msgspec.Struct):
    kind: CommandKind
    id: str = ""
    value: float = 1.0
    target: int | None = None
    issued_by: str = ""
    expires_in_s: float = COMMAND_TTL_S


def router(service: Service) -> APIRouter:
    """See the module docstring."""
    routes, runs, door = APIRouter(), service.runs, service.door

    @routes.post("/v1/runs/{run}/commands")
    async def commands(run: str, request: Request) -> Response:
        def serve(body: bytes) -> tuple[int, Any]:
            speaks_json(request)
            asked = read_json(_JsonCommand, body, "command")
            order = runs.command(
                run,
                _command(asked, request.headers.get("idempotency-key", "")),
                asked.expires_in_s,
                service.now(),
            )
            return 202, {
                "id": order.command.id,
                "kind": order.command.kind,
                "state": order.state,
                "taken_step": order.taken_step,
            }

        return await door.for_people(request, serve, role=Role.CONTROL)

    return routes


def _command(asked: _JsonCommand, key: str) -> Command:
    if asked.kind is CommandKind.SCALE_LR and not 0.0 < asked.value <= 10.0:
        raise ProtocolError(f"command.value must lie above 0 and at most 10, got {asked.value:g}")
    if asked.kind is CommandKind.ACK and asked.target is None:
        raise ProtocolError("command.target must be the number of the incident to acknowledge")
    if not 0.0 < asked.expires_in_s <= 86_400.0:
        raise ProtocolError(
            f"command.expires_in_s must lie above 0 and at most 86400, got {asked.expires_in_s:g}"
        )
    chosen = asked.id or key or uuid.uuid4().hex
    return Command(chosen, asked.kind, asked.value, asked.target, asked.issued_by)

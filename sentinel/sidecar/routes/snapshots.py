"""What reading the snapshots on disk again has shown.

    GET /v1/runs/{run}/snapshots       the newest first; `seen` is false where no file can be seen

Errors:  {"code", "detail"}.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from sentinel.sidecar import copies
from sentinel.sidecar.service import Service


def router(service: Service) -> APIRouter:
    """See the module docstring."""
    routes, door = APIRouter(), service.door

    @routes.get("/v1/runs/{run}/snapshots")
    async def snapshots(run: str, request: Request) -> Response:
        def serve(_: bytes) -> tuple[int, Any]:
            known = service.run(run)
            found = {} if service.verifier is None else service.verifier.found.get(run, {})
            rows = [
                {
                    "name": one.name,
                    "step": one.step,
                    "attempt": one.attempt,
                    "result": one.result,
                    "reason": one.reason,
                    "size_bytes": one.size_bytes,
                    "checked_at": one.checked_at,
                }
                for one in found.values()
            ]
            rows.sort(key=lambda row: (row["step"], row["attempt"], row["name"]), reverse=True)
            why = copies.unseen(known, service.verifier, service.settings)
            return 200, {"run": run, "seen": bool(rows), "why": why, "snapshots": rows}

        return await door.for_people(request, serve)

    return routes

"""What is known of the runs, for people: JSON in which non-finite numbers are words."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from sentinel.sidecar.runs import details, summary
from sentinel.sidecar.service import Service


def router(service: Service) -> APIRouter:
    """See the module docstring."""
    routes, runs, door = APIRouter(), service.runs, service.door

    @routes.get("/v1/runs")
    async def list_runs(request: Request) -> Response:
        def serve(_: bytes) -> tuple[int, Any]:
            return 200, {"runs": [summary(run, service.now()) for run in runs.runs.values()]}

        return await door.for_people(request, serve)

    @routes.get("/v1/runs/{run}")
    async def one_run(run: str, request: Request) -> Response:
        def serve(_: bytes) -> tuple[int, Any]:
            return 200, details(runs.get(run), service.now())

        return await door.for_people(request, serve)

    return routes

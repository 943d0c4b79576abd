"""Alive, ready, and what there is to ask for: /healthz, /readyz and /openapi.json."""

from __future__ import annotations

import json

from fastapi import APIRouter, Response

from sentinel import __version__
from sentinel.sidecar.openapi import document
from sentinel.sidecar.service import Service
from sentinel.sidecar.unserved import error


def router(service: Service) -> APIRouter:
    """See the module docstring."""
    routes = APIRouter()

    @routes.get("/healthz")
    async def healthz() -> Response:
        return Response("ok\n", media_type="text/plain")

    @routes.get("/readyz")
    async def readyz() -> Response:
        if not service.ready:
            return error(503, "not_ready", "the sidecar is starting, or on its way down")
        trouble = service.store.trouble
        # Deciding needs no disk: a sidecar that cannot keep its record still serves its trainers.
        said = "ready\n" if not trouble else f"ready\ndegraded: {trouble}\n"
        return Response(said, media_type="text/plain")

    @routes.get("/openapi.json")
    async def openapi() -> Response:
        return Response(json.dumps(document(__version__)), media_type="application/json")

    return routes

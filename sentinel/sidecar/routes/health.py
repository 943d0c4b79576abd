"""Alive, and ready: /healthz and /readyz."""

from __future__ import annotations

from fastapi import APIRouter, Response

from sentinel.sidecar.service import Service


def router(service: Service) -> APIRouter:
    """See the module docstring."""
    routes = APIRouter()

    @routes.get("/healthz")
    async def healthz() -> Response:
        return Response("ok\n", media_type="text/plain")

    @routes.get("/readyz")
    async def readyz() -> Response:
        return Response(
            "ready\n" if service.ready else "not ready\n",
            status_code=200 if service.ready else 503,
            media_type="text/plain",
        )

    return routes

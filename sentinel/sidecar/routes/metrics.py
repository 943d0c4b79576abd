"""/metrics: Prometheus text, or OpenMetrics when asked for."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from sentinel import __version__
from sentinel.sidecar import exporter
from sentinel.sidecar.service import Service


def router(service: Service) -> APIRouter:
    """See the module docstring."""
    routes = APIRouter()

    @routes.get("/metrics")
    async def metrics(request: Request) -> Response:
        openmetrics = "application/openmetrics-text" in request.headers.get("accept", "")
        text = exporter.render(service.runs, service.now(), __version__, openmetrics=openmetrics)
        kind = exporter.OPENMETRICS if openmetrics else exporter.TEXT
        return Response(text, headers={"content-type": kind})

    return routes

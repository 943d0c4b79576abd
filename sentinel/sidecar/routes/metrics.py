"""/metrics: Prometheus text, or OpenMetrics when asked for; `?layers=all` for every layer."""

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
        asked = request.query_params.get("layers", "")
        layers = exporter.Layers.ALL if asked == "all" else exporter.Layers.TOP
        text = await exporter.render(service, __version__, openmetrics=openmetrics, layers=layers)
        kind = exporter.OPENMETRICS if openmetrics else exporter.TEXT
        return Response(text, headers={"content-type": kind})

    return routes

"""/metrics: Prometheus text, or OpenMetrics when asked for; `?layers=all` for every layer."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from sentinel import __version__
from sentinel.sidecar import exporter
from sentinel.sidecar.service import Service


def wants_openmetrics(accept: str) -> bool:
    """Whether it is asked for by name, and the text format is not asked for more."""
    wanted = _weight(accept, "application/openmetrics-text")
    return wanted > 0.0 and wanted >= _weight(accept, "text/plain")


def _weight(accept: str, kind: str) -> float:
    """The largest q of that media type in an Accept header; 0 where it is not named."""
    found = 0.0
    for one in accept.split(","):
        name, *parameters = (part.strip().lower() for part in one.split(";"))
        if name != kind:
            continue
        given = [p.partition("=")[2] for p in parameters if p.startswith("q=")]
        try:
            found = max(found, float(given[-1]) if given else 1.0)
        except ValueError:
            continue  # no number: as if it had not been named
    return found


def router(service: Service) -> APIRouter:
    """See the module docstring."""
    routes = APIRouter()

    @routes.get("/metrics")
    async def metrics(request: Request) -> Response:
        openmetrics = wants_openmetrics(request.headers.get("accept", ""))
        asked = request.query_params.get("layers", "")
        layers = exporter.Layers.ALL if asked == "all" else exporter.Layers.TOP
        text = await exporter.render(service, __version__, openmetrics=openmetrics, layers=layers)
        kind = exporter.OPENMETRICS if openmetrics else exporter.TEXT
        return Response(text, headers={"content-type": kind})

    return routes

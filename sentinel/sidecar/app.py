"""The sidecar's HTTP side: a FastAPI application, built by a factory that is given its clocks.

    app = create_app(Settings(), clock=time.time, timer=time.perf_counter)
    app.state.service                      its parts, see service.py

A new concern is a module in routes/ with `router(service) -> APIRouter` and a line in ROUTERS.

Threads: one event loop; every route runs in it, start to end.
Errors:  a request that cannot be served gets a Refused message or {"code", "detail"},
         also where there is no route for it (unserved.py).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.routing import APIRoute

from sentinel import __version__
from sentinel.sidecar import exporter, jobs, page, unserved
from sentinel.sidecar.middleware import Headers, Timed
from sentinel.sidecar.routes import control, health, ingest, metrics, read, snapshots
from sentinel.sidecar.service import Service
from sentinel.sidecar.settings import Settings

ROUTERS = (
    ingest.router,
    read.router,
    snapshots.router,
    control.router,
    metrics.router,
    health.router,
    page.router,
)


def create_app(
    settings: Settings, *, clock: Callable[[], float], timer: Callable[[], float]
) -> FastAPI:
    """Build the sidecar.

    Args:
        clock: Unix seconds, for what people see and for expiry.
        timer: monotonic seconds, for durations.
    """
    service = Service(settings, clock=clock, timer=timer)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        now = service.now()
        shown = [run for run in service.runs.runs.values() if exporter.exported(run, now)]
        async with jobs.running(service), service.past.at_hand(shown):
            yield

    app = FastAPI(
        title="sentinel",
        version=__version__,
        lifespan=lifespan,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    app.state.runs = service.runs
    unserved.install(app)
    app.add_middleware(unserved.Caught)
    app.add_middleware(Timed, health=service.health, timer=timer)
    app.add_middleware(Headers)
    for router in ROUTERS:
        made = router(service)
        for route in made.routes:
            if isinstance(route, APIRoute) and unserved.heads(route.path, route.methods or ()):
                route.methods = {*(route.methods or ()), "HEAD"}  # the server leaves out the body
        app.include_router(made)
    return app

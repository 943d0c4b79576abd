"""How the sidecar itself is doing: durations of requests, lag of its event loop, failing jobs.

    health = Health()
    health.request("steps", 200, 0.0004)

Units:   seconds.
Threads: the event loop's.
"""

from __future__ import annotations

from sentinel.core.catalog import DURATIONS_S
from sentinel.core.exposition import WindowMax
from sentinel.sidecar.runs import Histogram

ROUTES = ("steps", "register", "state", "close", "commands", "metrics", "read", "other")


class Health:
    """Numbers for /metrics."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str], int] = {}
        self.durations = {route: Histogram(DURATIONS_S) for route in ROUTES}
        self.lag = WindowMax()
        self.job_errors: dict[str, int] = {}

    def request(self, route: str, status: int, seconds: float) -> None:
        """Note one request."""
        key = (route, f"{status // 100}xx")
        self.requests[key] = self.requests.get(key, 0) + 1
        self.durations[route].add(seconds)


def route_of(method: str, path: str) -> str:
    """Which of ROUTES a request goes to."""
    if path == "/metrics":
        return "metrics"
    if not path.startswith("/v1/"):
        return "other"
    if method in ("GET", "HEAD"):
        return "read"
    last = path.rsplit("/", 1)[-1]
    if last in ROUTES:
        return last
    return "register" if method == "PUT" else "commands"

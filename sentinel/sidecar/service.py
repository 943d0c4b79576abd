"""What the routes, the jobs and the page share: one object, made once by create_app.

    service = Service(Settings(), clock=time.time, timer=time.perf_counter)
    service.runs · service.door · service.now()

Threads: the event loop's.
"""

from __future__ import annotations

from collections.abc import Callable

from sentinel.sidecar.door import Door
from sentinel.sidecar.runs import Runs
from sentinel.sidecar.security import Access
from sentinel.sidecar.settings import Settings


class Service:
    """One sidecar's parts.

    Attributes:
        ready: it is up, and not on its way down.
    """

    def __init__(
        self, settings: Settings, *, clock: Callable[[], float], timer: Callable[[], float]
    ) -> None:
        """Put the parts together.

        Args:
            clock: Unix seconds, for what people see and for expiry.
            timer: monotonic seconds, for durations.
        """
        self.settings = settings
        self.now = clock
        self.timer = timer
        self.runs = Runs(settings, timer)
        self.access = Access.load(settings.token_files, settings.token)
        self.door = Door(settings, self.access, timer)
        self.ready = False

"""How long has this thread been ready to run without a core?

    queue = RunQueue()
    before = queue.waited_s()
    ...
    stolen = queue.waited_s() - before       seconds in which somebody else had the core

A thread that waits for an answer on a busy machine waits for a core too once the answer is there.
That time is the machine's, not the sidecar's: asked or not, the training thread shares its cores.
Linux keeps the sum for each thread (/proc/thread-self/schedstat, its second number); reading it
costs 2.5 us. Elsewhere it is always 0.

What it does not see: a core that the hypervisor took away, and waiting for Python's own lock.

Units:   seconds.
Threads: one object serves whichever thread calls, one at a time.
Errors:  none; what cannot be read is 0.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

PATH = "/proc/thread-self/schedstat"


class RunQueue:
    """Reads the calling thread's run-queue delay."""

    def __init__(self, path: str = PATH) -> None:
        self._path = path
        self._fd = -1
        self._owner: tuple[int, int] | None = None

    def waited_s(self) -> float:
        """Seconds that this thread has waited for a core since it began; 0.0 if unknown."""
        me = (os.getpid(), threading.get_ident())
        if self._owner != me:
            self._open(me)
        if self._fd < 0:
            return 0.0
        try:
            return int(os.pread(self._fd, 64, 0).split()[1]) * 1e-9
        except (OSError, ValueError, IndexError):
            return 0.0

    def close(self) -> None:
        """Give the file back; the next call opens it again."""
        fd, self._fd, self._owner = self._fd, -1, None
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)

    def _open(self, me: tuple[int, int]) -> None:
        self.close()
        self._owner = me
        with suppress(OSError):
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

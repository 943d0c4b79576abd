"""A file pauses automation, without any sidecar: PAUSE in run_dir, or in the run's own directory.

    pause = PauseFile((run_dir, directory), host, keeper)
    if pause.due: pause.look()             between two steps
    pause.found, pause.heard(paused)       several ranks: rank 0 looks and says it, all obey

While it exists, decisions are made and recorded and nothing is done; taking it away resumes.

Units:   it is looked for every PAUSE_EVERY steps.
Threads: the training thread.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from sentinel.core.events import AutomationSet
from sentinel_hooks.ledger_file import Keeper
from sentinel_hooks.saving import Host

PAUSE_FILE = "PAUSE"
PAUSE_EVERY = 8


class PauseFile:
    """Looks for the file.

    Attributes:
        found: by the last look; what it was in the run's last process, before the first.
    """

    def __init__(
        self, places: Sequence[Path], host: Host, keeper: Keeper, *, rank: int | None = None
    ) -> None:
        """Nothing is looked for yet.

        Args:
            places: the folders that it may lie in.
            rank: with several ranks, this one's number.
        """
        self._places = tuple(places)
        self._host = host
        self._keeper = keeper
        self._rank = rank
        self._looked = host.now.step - PAUSE_EVERY
        self.found = keeper.paused_by_file

    @property
    def due(self) -> bool:
        """It is time to look."""
        return self._host.now.step - self._looked >= PAUSE_EVERY

    def look(self) -> None:
        """Is it there? Several ranks hear of it at the next gate."""
        self._looked = self._host.now.step
        if self._rank:
            return  # rank 0 says it
        self.found = any(os.path.exists(place / PAUSE_FILE) for place in self._places)
        if self._rank is None:
            self.heard(self.found)

    def heard(self, paused: bool) -> None:
        """Automation is paused by the file, or no longer."""
        if paused != self._keeper.paused_by_file:
            self._keeper.paused_by_file = paused
            self._host.note(AutomationSet(self._host.now.step, paused, f"file {PAUSE_FILE}"))

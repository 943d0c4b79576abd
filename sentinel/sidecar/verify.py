"""Are the snapshots on disk still as they were written? Read again now and then, without haste.

    verifier = Verifier(every_s=86400.0, bytes_per_s=32 * 2**20, clock=...)
    verifier.begin({"r7": [Path("/runs/r7")]})       reads what is due, in a thread; returns at once
    verifier.remember(damaged)                       before that: what an earlier start has found
    verifier.news()                                  what was found since the last call
    verifier.found["r7"]                             what was found last, by the snapshot's name
    verifier.there["r7"]                             what is on disk at all, as it was last seen

A run may go back to a snapshot hours after it was written; by then a disk may have lost it. So
every whole one that may still be used is read anew every so often, bytes against checksums
(traces.snapshots), where the sidecar sees the files: below the folders that it watches. The trainer
is not told and not disturbed: it checks for itself before it goes back, and takes an older one.

Only reads. One thread of the lowest priority, so many bytes a second, and what was read leaves the
page cache again: the memory is the trainer's, and what comes from it proves nothing of the disk.
A snapshot that its trainer deletes meanwhile is gone, not damaged. Which ones there are is looked
up far more often than they are read, also while a large one is being read for hours.

Units:   seconds, bytes; `clock` gives Unix seconds.
Threads: begin(), news() and close() from the event loop; the thread ends with the process.
Errors:  none: damage is an answer, and what cannot be read is said to be so.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from sentinel.traces.snapshots import (
    COMMIT,
    DIRECTORY,
    UNHEALTHY,
    DiskSnapshot,
    Health,
    find_damage,
    inspect_snapshot,
    parse_name,
    read_manifest,
)

logger = logging.getLogger(__name__)

LOOK_S = 30.0  # how old what is known of the folders may be while one is read
YOUNG_S = 60.0  # just written: its trainer is busy, and it is still in memory
MOST_SNAPSHOTS = 1000  # of one run that are looked at
LOWEST = 19  # nice
MOST_CACHED = 64 * 2**20  # of a large snapshot in the page cache at once


class Result(StrEnum):
    """What reading it has shown."""

    SOUND = "sound"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class Checked:
    """One snapshot, as it was last read.

    Attributes:
        reason: what is damaged; "" when nothing is.
        checked_at: when it had been read.
        changed: this result differs from the one before; the first sound one does not.
    """

    run: str
    name: str
    step: int
    attempt: int
    result: Result
    reason: str
    size_bytes: int
    checked_at: float
    changed: bool = False


@dataclass(frozen=True, slots=True)
class There:
    """What is on disk of a run.

    Attributes:
        directory: the run has one where the sidecar looks.
        names: whole snapshots that may still be used, oldest first.
        adopted: of these, the user's own checkpoints: their contents are never read.
    """

    directory: bool
    names: tuple[str, ...] = ()
    adopted: frozenset[str] = frozenset()


class _StoppedError(Exception):
    """The sidecar leaves."""


class Verifier:
    """See the module docstring.

    Attributes:
        found: by run and name; replaced whole, so that it may be read at any time.
        there: by run; a run that was not looked at yet is not in it. Replaced whole too.
        read_bytes: how much was read since the start.
    """

    def __init__(self, *, every_s: float, bytes_per_s: float, clock: Callable[[], float]) -> None:
        self._every_s = every_s
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._news: deque[Checked] = deque()
        self.found: Mapping[str, Mapping[str, Checked]] = {}
        self.there: Mapping[str, There] = {}
        self.read_bytes = 0
        self._cached = 0
        self._places: Mapping[str, tuple[Path, ...]] = {}
        self._looked_at = 0.0
        self._remembered: set[tuple[str, str]] = set()

    @property
    def busy(self) -> bool:
        """Whether it reads just now."""
        return self._thread is not None and self._thread.is_alive()

    def remember(self, damaged: Iterable[Checked]) -> None:
        """What an earlier start has found damaged stays so until it is read again, at once."""
        for one in damaged:
            self.found = {**self.found, one.run: {**self.found.get(one.run, {}), one.name: one}}
            self._remembered.add((one.run, one.name))

    def begin(self, places: Mapping[str, Iterable[Path]]) -> None:
        """Read what is due; nothing when it is at it already.

        Args:
            places: by run, directories that may be its own.
        """
        if self.busy or self._stop.is_set():
            return
        given = {run: tuple(directories) for run, directories in places.items()}
        self._thread = threading.Thread(
            target=self._work, args=(given,), name="sentinel-verify", daemon=True
        )
        self._thread.start()

    def news(self) -> list[Checked]:
        """What was found since the last call."""
        found = []
        while self._news:
            found.append(self._news.popleft())
        return found

    def close(self, timeout_s: float = 1.0) -> None:
        """Stop at the next piece."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    # ---- in the thread ------------------------------------------------------------------

    def _work(self, places: Mapping[str, tuple[Path, ...]]) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
        try:
            self.turn(places)
        except _StoppedError:
            pass
        except Exception:
            logger.exception("snapshots cannot be verified")

    def turn(self, places: Mapping[str, tuple[Path, ...]]) -> None:
        """Read what is due, the newest snapshots first; see begin()."""
        self._places = places
        due: list[tuple[float, str, Path]] = []
        for run, path in self._look():
            now = self._clock()
            last = self.found[run].get(path.name)
            if last is not None and now - last.checked_at < self._every_s:
                if (run, path.name) not in self._remembered:
                    continue
            written = _written(path)
            if written is not None and not 0.0 <= now - written < YOUNG_S:
                due.append((-written, run, path))
        for _, run, path in sorted(due):
            self._verify(run, path)

    def _look(self) -> list[tuple[str, Path]]:
        """Which snapshots there are; what is not there any more is forgotten.

        Returns:
            all but the adopted ones, whose paths are of the trainer's own world: what is there is
            the user's business.
        """
        self._looked_at = self._clock()
        listed: list[tuple[str, Path]] = []
        there: dict[str, There] = {}
        for run, directories in self._places.items():
            paths = _snapshots(directories)
            before = self.there.get(run, There(directory=False))
            whole = tuple(path.name for path in paths if _written(path) is not None)
            adopted = frozenset(
                path.name
                for path in paths
                if path.name in before.adopted
                or (path.name not in before.names and not _odd_files(path) and _adopted(path))
            )
            known = any(os.path.isdir(directory) for directory in directories)
            there[run] = There(known, whole, adopted)
            listed += [(run, path) for path in paths if path.name not in adopted]
        names: dict[str, set[str]] = {run: set() for run in there}
        for run, path in listed:
            names[run].add(path.name)
        self.there = there
        self.found = {
            run: {n: c for n, c in self.found.get(run, {}).items() if n in names[run]}
            for run in there
        }
        return listed

    def _verify(self, run: str, path: Path) -> None:
        reason = _odd_files(path)
        if reason:
            about = DiskSnapshot(path, *(parse_name(path.name) or (0, 0, 0)), Health.DAMAGED)
        else:
            about = inspect_snapshot(path, run=run)
            if about.health in (Health.TORN, Health.UNHEALTHY):
                return  # never used
            _leave_cache(path)
            reason = find_damage(path, run=run, pace=partial(self._pace, path))
            _leave_cache(path)
        if reason and not (path / COMMIT).exists():
            return  # its trainer has deleted it: the COMMIT goes first
        self._note(run, about, reason)

    def _note(self, run: str, about: DiskSnapshot, reason: str) -> None:
        known = self.found.get(run, {})
        last = known.get(about.path.name)
        self._remembered.discard((run, about.path.name))
        result = Result.DAMAGED if reason else Result.SOUND
        before = Result.SOUND if last is None else last.result
        checked = Checked(
            run,
            about.path.name,
            about.step,
            about.attempt,
            result,
            reason,
            about.size_bytes,
            self._clock(),
            result is not before,
        )
        self.found = {**self.found, run: {**known, checked.name: checked}}
        self._news.append(checked)

    def _pace(self, path: Path, size: int) -> None:
        self.read_bytes += size
        self._cached += size
        if not 0.0 <= self._clock() - self._looked_at < LOOK_S:
            self._look()
        if self._cached >= MOST_CACHED:
            self._cached = 0
            _leave_cache(path)
        if self._stop.wait(size / self._bytes_per_s):
            raise _StoppedError


def _snapshots(directories: Iterable[Path]) -> list[Path]:
    """The snapshots of a run, whole or not, in the first directory that has any."""
    for directory in directories:
        try:
            entries = sorted(os.scandir(directory / DIRECTORY), key=lambda entry: entry.name)
        except OSError:
            continue
        found = [
            Path(entry.path)
            for entry in entries
            if parse_name(entry.name) is not None
            and entry.is_dir(follow_symlinks=False)
            and not os.path.exists(os.path.join(entry.path, UNHEALTHY))
        ]
        if found:
            return found[-MOST_SNAPSHOTS:]
    return []


def _written(path: Path) -> float | None:
    """When it was committed; None when it was not."""
    try:
        return (path / COMMIT).stat().st_mtime
    except OSError:
        return None


def _odd_files(path: Path) -> str:
    """Why its files must not be read: a pipe, say, would never end."""
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if not stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
                    return f"{entry.name} is no regular file"
    except OSError as error:
        return f"the directory cannot be read: {error.strerror}"
    return ""


def _adopted(path: Path) -> bool:
    """Whether it stands for one of the user's own checkpoints."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return bool(read_manifest(path).get("adopted"))
    return False


def _leave_cache(path: Path) -> None:
    """What of its files is in memory goes, where the system can do that."""
    if not hasattr(os, "posix_fadvise"):
        return
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            handle = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)

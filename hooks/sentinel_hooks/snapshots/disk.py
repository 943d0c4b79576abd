"""Disk tier: some of the RAM snapshots, written in the background, for when RAM or process is gone.

    disk = DiskStore(target, Snapshots(), run_directory, run="r7", policy=policy)
    if disk.due(step): disk.offer(image, ledger)     after the RAM copy; returns at once
    for ended in disk.poll(): ...                    what was saved, or failed, since the last call
    disk.follow(ledger)                              marks copies healthy or not, as their steps are
    ready = disk.prepare(step)                       verified, in host memory, nothing changed yet;
    stats = ready.commit()                           SnapshotError names what is wrong
    disk.close()                                     waits for a save in flight, but not for ever

One thread does all that touches the disk, in order. It reads the RAM copy, never the live objects:
the trainer pays for the RAM copy and nothing else. When a save is still running, the next one that
is due waits for a later snapshot; nothing queues up on a slow disk.

A save goes into a fresh directory, and counts only with its COMMIT (sentinel.traces.snapshots has
the format). Whether it is healthy is the engine's word: the marker follows the registry in the
ledger. Kept: those in the registry, the newest `disk_keep` healthy ones besides, the newest
candidate, and the newest unhealthy one for whoever looks into the incident.

With several ranks (`world` > 1) nothing here talks to another rank; the session carries the word:

    disk.offer(image, ledger, save=n)    on all, at one safe point; n the same on all, ever higher
    PartWritten(step) or Failed(step)    from poll(), at a moment of its own on each rank
    disk.commit(step)                    on rank 0, when all have: poll() says Saved or Failed
    disk.committed(step)                 on all, when all know of Saved: from here on it counts
    disk.abandon(step, reason)           on all, when any has failed

due(), steps and the next due step change only in these calls and are the same on all ranks. Rank 0
alone makes room, marks and deletes. All write into one directory: run_dir must be shared.

With Snapshots(adopt=load) the user's own checkpoints are the disk tier: adopt(path) notes one and
its statistics in a directory of the same form, without tensors; nothing of the user's is deleted.

Errors:  a disk that is full, read-only, slow or gone is told in `trouble` and in poll(); saving
         goes on with the next snapshot that is taken.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import os
import queue
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from sentinel.core.policy import Policy, SnapshotConfig
from sentinel.core.state import ENGINE_VERSION, Ledger, Snapshot, Stats
from sentinel.core.types import Mode
from sentinel.traces import snapshots as store
from sentinel.traces.snapshots import DiskSnapshot, Health
from sentinel.wire import codec
from sentinel_hooks.snapshots import Snapshots, files, unhealthy
from sentinel_hooks.snapshots.ram import Image, Prepared, SnapshotError, prepare
from sentinel_hooks.target import Target

logger = logging.getLogger(__name__)

CLOSE_WAIT_S = 30.0  # at detach and exit: as long as a save in flight may hold them up
LOAD_WAIT_S = 300.0  # a rollback from disk: longer than reading, shorter than a person's patience
COMMIT_WAIT_S = 10.0  # what other ranks have written may take a moment to be seen over a network
_SLACK_BYTES = 1 << 20  # manifests, markers, directory blocks


@dataclass(frozen=True, slots=True)
class Saved:
    """A snapshot is on the disk and committed."""

    step: int
    path: Path
    took_s: float


@dataclass(frozen=True, slots=True)
class PartWritten:
    """This rank's part of a snapshot is on the disk; it counts when all parts are committed."""

    step: int
    took_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """A snapshot, or this rank's part of it, did not get there; nothing of it counts."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Adopted:
    """A checkpoint of the user's own, and the statistics of its moment."""

    path: str
    stats: Stats
    token: int = 0


@dataclass(frozen=True, slots=True)
class Unprepared:
    """A checkpoint of the user's own that is there; what loading it will do cannot be tried before.

    Like Prepared, except that commit() may fail, and may have changed anything by then: it is the
    user's function. With several ranks it may even be a collective, so all ranks call it or none.

    Attributes:
        token: equal on all ranks when they are to load the same one.
    """

    step: int
    path: str
    stats: Stats
    token: int
    _load: Callable[[str], object]
    notes: tuple[str, ...] = ()

    def commit(self) -> Stats:
        """Have the user's function load it; the statistics of its moment.

        Raises:
            SnapshotError: it raised.
        """
        try:
            with torch.enable_grad():  # as the user's code is used to
                self._load(self.path)
        except Exception as error:
            raise SnapshotError(
                f"the adopted checkpoint {self.path} could not be loaded: {_say(error)}"
            ) from error
        return self.stats


@dataclass(frozen=True, slots=True)
class _Unmarked:
    """A committed snapshot could not be marked; that is tried again after the next save."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Done:
    """Something has ended: of which save, and whose buffers are free again."""

    what: Saved | Failed | PartWritten | _Unmarked
    path: Path | None = None
    image: Image | None = None


@dataclass(frozen=True, slots=True)
class _Pending:
    """A save of several ranks that is neither committed nor abandoned."""

    step: int
    attempt: int
    path: Path
    reason: str = ""
    incident: str = ""

    @property
    def number(self) -> int:
        """Of the save, in its directory's name."""
        return _number(self.path)


_INSIDE = "it was saved inside an incident"


def next_due(step: int, config: SnapshotConfig) -> int:
    """The first step after `step` from which on a snapshot is to be written to disk."""
    for at in config.disk_at:
        if at > step:
            return at
    return (step // config.disk_every + 1) * config.disk_every


def expendable(found: Sequence[DiskSnapshot], pinned: Collection[int], keep: int) -> list[Path]:
    """What may be deleted, the least useful first.

    Args:
        found: oldest first.
        pinned: steps that a rollback may still go to.
        keep: newest healthy ones kept besides.
    """
    gone: list[Path] = []
    for health, kept in (
        (Health.TORN, 0),
        (Health.DAMAGED, 0),
        (Health.UNHEALTHY, 1),
        (Health.CANDIDATE, 1),
        (Health.HEALTHY, keep),
    ):
        whole = health in store.USABLE
        some = [s for s in found if s.health is health and not (whole and s.step in pinned)]
        gone += [s.path for s in some[: max(len(some) - kept, 0)]]
    return gone


class DiskStore:
    """The snapshots of one run on disk, as one process sees them; used by one thread."""

    def __init__(
        self,
        target: Target,
        config: Snapshots,
        run_directory: Path,
        *,
        run: str,
        policy: Policy,
        incarnation: str = "",
        first_step: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        """Nothing is read or written before the first offer()."""
        self._rank, self._world = rank, world
        self._target = target
        self._config = config
        self._run_directory = run_directory
        self._root = run_directory / store.DIRECTORY
        self._schedule = policy.snapshots
        self._values = {
            "run": run,
            "incarnation": incarnation,
            "policy_hash": codec.policy_hash(policy).hex(),
            "engine_version": ENGINE_VERSION,
            "torch": torch.__version__,
        }
        self._run = run
        # Observing keeps its hands off the disk too.
        self.enabled = config.disk and policy.mode is Mode.ACT
        self.trouble = ""
        # With RAM snapshots the first waits for the schedule: a short run writes nothing.
        self._next = next_due(first_step, self._schedule) if config.ram else first_step
        self._busy: Image | None = None
        self._pending: _Pending | None = None
        self._dropped: set[Path] = set()
        self._committing = False
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done: deque[_Done] = deque()
        self._unmarked: set[int] = set()
        # What became of the copies made or found by this process; the paths of committed ones.
        self._health: dict[int, Health] = {}
        self._paths: dict[int, Path] = {}
        self._marked: dict[int, Path] = {}  # where markers go: the thread knows it first
        self._pinned: frozenset[int] = frozenset()
        self._seen: tuple[Snapshot, ...] | None = None
        self._attempt: int | None = None

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps that can be read back, oldest first."""
        return tuple(sorted(self._paths))

    # ---------------------------------------------------------------- the trainer's side

    def due(self, step: int) -> bool:
        """A snapshot taken now should be written to disk too."""
        return (
            self.enabled
            and self._config.adopt is None
            and step >= self._next
            and (self._world > 1 or self._busy is None)
            and self._pending is None
            # The thread does not follow into a fork. (Of several ranks this one alone may be one:
            # its part will fail.)
            and (self._world > 1 or os.getpid() == self._pid)
        )

    def highest_number(self) -> int:
        """The highest `save` that the run's directory knows, -1 without any; for rank 0 to ask."""
        numbers = [s.number for s in store.list_snapshots(self._run_directory)]
        return max(numbers, default=-1)

    def offer(self, image: Image, ledger: Ledger, *, save: int = 0) -> bool:
        """Write this image in the background; True, unless copying the rest of it raised.

        Its buffers are lent until poll() tells the end. With several ranks what is wrong is told
        by poll() too, and the answer is always True.

        Args:
            save: with several ranks, the number of this save in its directory's name: the same on
                all, and higher than that of any save before; start above highest_number().
        """
        if self._world > 1:
            self._offer_part(image, ledger, save)
            return True
        rest = files.capture(self._target)
        self._paths.pop(image.step, None)
        self._start()
        self._busy = image
        image.readers += 1
        self._next = next_due(image.step, self._schedule)
        self._health[image.step] = Health.CANDIDATE
        self._jobs.put(partial(self._save, image, rest, ledger))
        return True

    def _offer_part(self, image: Image, ledger: Ledger, save: int) -> None:
        path = self._begin_part(image.step, ledger.attempt, save)
        self._next = next_due(image.step, self._schedule)
        self._health[image.step] = Health.CANDIDATE
        try:
            if os.getpid() != self._pid:
                raise SnapshotError("this process was forked from the one that saves")
            rest = files.capture(self._target)
            self._start()
        except Exception as error:  # noqa: BLE001  the user's schedulers may raise anything
            self._done.append(_Done(Failed(image.step, _say(error)), path))
            return
        self._busy = image
        image.readers += 1
        self._jobs.put(partial(self._save_part, path, image, rest, ledger))

    def decline(self, step: int, ledger: Ledger, *, save: int, reason: str) -> None:
        """In place of offer() on a rank that has no image to write: its part fails."""
        path = self._begin_part(step, ledger.attempt, save)
        self._next = next_due(step, self._schedule)
        self._done.append(_Done(Failed(step, reason), path))

    def _begin_part(self, step: int, attempt: int, save: int) -> Path:
        if self._pending is not None:
            self.abandon(self._pending.step, "the next one came before it was committed")
        path = self._root / store.snapshot_name(step, attempt, save)
        self._paths.pop(step, None)
        self._marked.pop(step, None)
        self._pending = _Pending(step, attempt, path)
        return path

    def commit(self, step: int, wait_s: float = COMMIT_WAIT_S) -> None:
        """On rank 0, when all ranks have written their parts: make them one, in the background.

        Args:
            wait_s: for parts that are not to be seen yet.
        """
        pending = self._pending
        if self._rank or pending is None or pending.step != step:
            return
        self._committing = True
        self._start()
        self._jobs.put(partial(self._commit_parts, pending, wait_s))

    def committed(self, step: int) -> None:
        """On all ranks, when all know that it is committed: it can be gone back to."""
        pending = self._pending
        if pending is None or pending.step != step:
            return
        self._pending = None
        self._paths[step] = pending.path
        self._reached(step)
        if self._rank == 0:
            self._put(partial(self._rotate, pending.number))

    def abandon(self, step: int, reason: str) -> None:
        """On all ranks, when a part or the commit has failed; the next snapshot tries again."""
        pending = self._pending
        if pending is None or pending.step != step:
            return
        self._pending = None
        self._committing = False
        self._dropped.add(pending.path)
        self._health.pop(step, None)
        self._marked.pop(step, None)
        self._next = min(self._next, step + 1)
        self._complain(step, reason)
        if self._rank == 0:
            self._start()
            self._jobs.put(partial(self._drop, pending.path))

    def adopt(
        self,
        path: str,
        step: int,
        stats: Stats,
        ledger: Ledger,
        *,
        quiet: bool,
        incident: str = "",
        save: int = 0,
    ) -> None:
        """Note a checkpoint that the user has written; unhealthy when it was no quiet moment.

        Args:
            incident: which one was open, for the note beside the checkpoint.
            save: see offer(); poll(), commit() and committed() go as they do there.
        """
        if not self.enabled or (self._world == 1 and os.getpid() != self._pid):
            return
        if self._world > 1:
            self._adopt_part(path, step, stats, ledger, quiet, incident, save)
            return
        layout = files.live_layout(self._target)
        self._paths.pop(step, None)
        self._start()
        self._health[step] = Health.CANDIDATE if quiet else Health.UNHEALTHY
        self._jobs.put(partial(self._adopt, os.path.abspath(path), step, stats, ledger, layout))
        if not quiet:
            self._put(partial(self._mark, step, Health.UNHEALTHY, _INSIDE, incident))

    def _adopt_part(
        self,
        path: str,
        step: int,
        stats: Stats,
        ledger: Ledger,
        quiet: bool,
        incident: str,
        save: int,
    ) -> None:
        place = self._begin_part(step, ledger.attempt, save)
        self._health[step] = Health.CANDIDATE if quiet else Health.UNHEALTHY
        if not quiet:
            self._pending = _Pending(step, ledger.attempt, place, _INSIDE, incident)
        if self._rank:
            self._done.append(_Done(PartWritten(step, 0.0), place))
            return
        layout = files.live_layout(self._target)
        self._start()
        self._jobs.put(
            partial(self._adopt, os.path.abspath(path), step, stats, ledger, layout, place)
        )

    def put_back(self, adopted: Adopted) -> Stats:
        """Have the user's function load a checkpoint; see Unprepared.commit()."""
        return self._unprepared(-1, adopted).commit()

    def _unprepared(self, step: int, adopted: Adopted) -> Unprepared:
        assert self._config.adopt is not None
        return Unprepared(step, adopted.path, adopted.stats, adopted.token, self._config.adopt)

    def poll(self) -> list[Saved | Failed | PartWritten]:
        """What has ended since the last call."""
        if not self._done:
            return []
        ended: list[Saved | Failed | PartWritten] = []
        while self._done:
            done = self._done.popleft()
            one = done.what
            if self._busy is not None and self._busy is done.image:
                self._busy.readers -= 1
                self._busy = None
            elif done.image is not None:
                done.image.readers -= 1
            if isinstance(one, _Unmarked):
                self._complain(one.step, one.reason)
                self._unmarked.add(one.step)
                continue
            if self._world > 1:
                if self._pending is not None and self._pending.path == done.path:
                    if isinstance(one, Saved) or self._committing:
                        self._committing = False
                    ended.append(one)
                continue
            ended.append(one)
            if isinstance(one, Failed):
                self._complain(one.step, one.reason)
                self._next = min(self._next, one.step + 1)  # the next that is taken tries again
                continue
            self._reached(one.step)
        return ended

    def _complain(self, step: int, reason: str) -> None:
        if not self.trouble:
            logger.warning("no snapshot on disk run=%s step=%s reason=%s", self._run, step, reason)
        self.trouble = reason

    def _reached(self, step: int) -> None:
        """One has got there: what could not be marked is tried again."""
        if self.trouble:
            self.trouble = ""
            logger.info("snapshots reach the disk again run=%s step=%s", self._run, step)
        for unmarked in self._unmarked:
            self._health[unmarked] = Health.CANDIDATE
            self._seen = None
        self._unmarked.clear()

    @property
    def idle(self) -> bool:
        """No part of this rank is being written, and poll() has nothing to tell."""
        nothing = self._busy is None and not self._committing and not self._done
        return nothing and self._config.adopt is None

    @property
    def ready(self) -> bool:
        """Nothing is being saved."""
        return self._busy is None and self._pending is None and os.getpid() == self._pid

    def wait(self, wait_s: float = CLOSE_WAIT_S) -> None:
        """Until a save in flight, or its commit, has ended; poll() then tells how."""
        until = time.perf_counter() + wait_s
        while (
            (self._busy is not None or self._committing)
            and not self._done
            and time.perf_counter() < until
        ):
            time.sleep(0.01)

    def follow(self, ledger: Ledger, *, again: bool = False) -> None:
        """Mark the copies as the engine judges their steps; cheap when nothing has changed."""
        if ledger.snapshots is self._seen and ledger.attempt == self._attempt and not again:
            return
        rolled_back = self._attempt is not None and ledger.attempt != self._attempt
        self._seen, self._attempt = ledger.snapshots, ledger.attempt
        if not self.enabled:
            return
        registry = {s.step: s.healthy for s in ledger.snapshots}
        self._pinned = frozenset(registry)
        target = ledger.last_target if rolled_back else None
        for step, was in list(self._health.items()):
            health, reason = was, ""
            if target is not None and step > target:
                health = Health.UNHEALTHY
                reason = f"a rollback went past it, to step {target}"
            elif step in registry:
                health = Health.HEALTHY if registry[step] else Health.CANDIDATE
            elif was is Health.CANDIDATE:
                health = Health.UNHEALTHY
                reason = "trouble came before it was confirmed"
            if health is not was:
                self._health[step] = health
                self._put(partial(self._mark, step, health, reason))

    def find(self, steps: Iterable[int]) -> tuple[int, ...]:
        """Count copies of earlier processes of this run, of these steps; those that are there.

        For a run that was resumed: only its ledger knows which of them belong to its way. Each of
        several ranks looks for itself; the tokens of what they prepare tell whether it is the same.
        """
        wanted = set(steps)
        for found in store.list_snapshots(self._run_directory):
            if found.step in wanted and found.health in store.USABLE and found.run == self._run:
                self._paths[found.step] = self._marked[found.step] = found.path
                self._health[found.step] = found.health
        return tuple(s for s in sorted(wanted) if s in self._paths)

    def healthy_copies(self, upto: int) -> tuple[Snapshot, ...]:
        """Healthy copies of earlier processes of this run, of steps up to `upto`, as a registry.

        A registry names mostly RAM snapshots, which end with their process: these are what is left.
        """
        copies: dict[int, Snapshot] = {}
        for found in store.list_snapshots(self._run_directory):
            if found.health is Health.HEALTHY and found.run == self._run and found.step <= upto:
                applied = int(store.read_manifest(found.path).get("applied", 0))
                copies[found.step] = Snapshot(found.step, healthy=True, applied=applied)
        return tuple(copies[step] for step in sorted(copies))

    def prepare(self, step: int) -> Prepared | Unprepared:
        """Everything of putting back the copy of `step` that can be done with nothing changed.

        Raises:
            SnapshotError: see load(); or it does not fit what is live.
        """
        found = self.load(step)
        if isinstance(found, Adopted):
            return self._unprepared(step, found)
        for said in found.notes:
            logger.warning("another number of ranks run=%s step=%s note=%s", self._run, step, said)
        return prepare(self._target, found)

    def lost(self, step: int) -> None:
        """On all ranks, when one of them could not prepare it: it is not tried again."""
        self._paths.pop(step, None)

    def load(self, step: int) -> Image | Adopted:
        """The copy of `step` in host memory, after every checksum was compared.

        Raises:
            SnapshotError: there is none, it is damaged, or the disk does not answer.
        """
        wanted = files.places(self._target)
        answer: list[Image | Adopted | Exception] = []
        ready = threading.Event()

        def job() -> None:
            try:
                answer.append(self._load(step, wanted))
            except Exception as error:  # noqa: BLE001  raised again in the trainer's thread
                answer.append(error)
            ready.set()

        if os.getpid() != self._pid:
            raise SnapshotError("this process was forked from the one that holds the snapshots")
        self._start()
        self._jobs.put(job)
        if not ready.wait(LOAD_WAIT_S):
            raise SnapshotError(f"the disk did not answer within {LOAD_WAIT_S:g} s")
        [image] = answer
        if isinstance(image, Exception) and self._world == 1:
            self._paths.pop(step, None)  # with several ranks all must have the same: see lost()
        if isinstance(image, SnapshotError):
            raise image
        if isinstance(image, Exception):
            raise SnapshotError(f"the disk copy of step {step} cannot be read: {_say(image)}")
        return image

    def close(self, wait_s: float = CLOSE_WAIT_S) -> None:
        """Finish what was begun, within `wait_s`; a save cut off later is torn and never used."""
        thread, self._thread = self._thread, None
        if thread is None or os.getpid() != self._pid:
            return
        self._jobs.put(None)
        thread.join(wait_s)
        if thread.is_alive():
            logger.warning(
                "a save to disk is given up run=%s waited_s=%g directory=%s",
                self._run,
                wait_s,
                self._root,
            )

    def _put(self, job: Callable[[], None]) -> None:
        """Queue something small; without a thread there is nothing on disk that it could be for."""
        if self._thread is None and self._paths:
            self._start()
        if self._thread is not None:
            self._jobs.put(job)

    def _start(self) -> None:
        if self._thread is None:
            self._jobs = queue.SimpleQueue()
            # A daemon: a disk that hangs may not hold up the end of the process.
            self._thread = threading.Thread(
                target=_work, args=(self._jobs,), name="sentinel-disk", daemon=True
            )
            self._thread.start()

    # ---------------------------------------------------------------- the thread's side

    def _save(self, image: Image, rest: files.Rest, ledger: Ledger) -> None:
        began = time.perf_counter()
        try:
            path = self._write(image, rest, ledger)
        except Exception as error:  # noqa: BLE001  the user's objects and the disk may raise anything
            self._done.append(_Done(Failed(image.step, _say(error)), image=image))
            return
        self._paths[image.step] = self._marked[image.step] = path
        self._done.append(_Done(Saved(image.step, path, time.perf_counter() - began), path, image))
        self._rotate()

    def _write(self, image: Image, rest: files.Rest, ledger: Ledger) -> Path:
        attempt = ledger.attempt
        os.makedirs(self._root, exist_ok=True)
        self._make_room(image.size_bytes + _SLACK_BYTES)
        path = self._fresh(image.step, attempt)
        try:
            store.sync_directory(self._root)
            self._write_part(path, image, rest, ledger)
            store.commit(path, 1, {**self._values, "step": image.step, "attempt": attempt})
        except BaseException:
            with contextlib.suppress(OSError):
                store.delete(path)
            raise
        return path

    def _write_part(self, path: Path, image: Image, rest: files.Rest, ledger: Ledger) -> None:
        """All of this rank, its manifest last."""
        names = files.write(
            path, image, rest, attempt=ledger.attempt, rank=self._rank, world=self._world
        )
        store.write_manifest(
            path,
            self._rank,
            names,
            {
                **self._values,
                "step": image.step,
                "attempt": ledger.attempt,
                "world": self._world,
                "applied": ledger.in_weights,
                "parameters": files.layout(image),
                "weights": files.weights_hash(image),
                "saved_at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            },
        )

    def _save_part(self, path: Path, image: Image, rest: files.Rest, ledger: Ledger) -> None:
        began = time.perf_counter()
        try:
            if path in self._dropped:
                raise SnapshotError("another rank had failed before this one began")
            os.makedirs(path, exist_ok=True)
            if self._rank == 0:
                self._make_room(files.total_bytes(image, self._world) + _SLACK_BYTES, path)
                store.sync_directory(self._root)
            self._write_part(path, image, rest, ledger)
        except FileExistsError as error:
            reason = f"{path.name} holds a part of rank {self._rank} already: {error.filename}"
            self._done.append(_Done(Failed(image.step, reason), path, image))
        except Exception as error:  # noqa: BLE001  as in _save()
            self._done.append(_Done(Failed(image.step, _say(error)), path, image))
        else:
            took = time.perf_counter() - began
            self._done.append(_Done(PartWritten(image.step, took), path, image))

    def _commit_parts(self, pending: _Pending, wait_s: float) -> None:
        began = time.perf_counter()
        path, step = pending.path, pending.step
        try:
            manifest = store.read_manifest(path)
            adopted = "adopted" in manifest
            ranks = 1 if adopted else self._world
            while missing := store.missing_parts(path, ranks):
                if time.perf_counter() - began > wait_s:
                    raise SnapshotError(
                        f"{path.name}: {missing}; do all ranks see the same {self._root}?"
                    )
                time.sleep(0.05)
            names = [] if adopted else [files.merge(path, ranks)]
            store.sync_directory(path)  # COMMIT may not be on the disk before what it speaks of
            values = {**self._values, "step": step, "attempt": pending.attempt}
            store.commit(path, ranks, values, names)
        except Exception as error:  # noqa: BLE001  as in _save()
            self._done.append(_Done(Failed(step, _say(error)), path))
            return
        self._marked[step] = path
        # What was said about it while it was on its way.
        health = self._health.get(step, Health.CANDIDATE)
        if health is not Health.CANDIDATE:
            self._mark(step, health, pending.reason, pending.incident)
        self._done.append(_Done(Saved(step, path, time.perf_counter() - began), path))

    def _drop(self, path: Path) -> None:
        """What is left of an abandoned save; a rank that still writes leaves some for later."""
        if (path / store.COMMIT).exists():
            return  # one of an earlier process, whose number was used again: it is not ours
        with contextlib.suppress(OSError):
            store.delete(path)

    def _adopt(
        self,
        path: str,
        step: int,
        stats: Stats,
        ledger: Ledger,
        layout: str,
        place: Path | None = None,
    ) -> None:
        part = place is not None
        try:
            os.makedirs(place or self._root, exist_ok=True)
            place = place or self._fresh(step, ledger.attempt)
            values = {**self._values, "step": step, "attempt": ledger.attempt, "world": 1}
            more = {
                "applied": ledger.in_weights,
                "parameters": layout,
                "saved_at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
                "adopted": path,
                "stats": codec.encode_stats(stats).hex(),
            }
            store.write_manifest(place, 0, (), {**values, **more})
            if not part:
                store.commit(place, 1, values)
            unhealthy.forget(path)  # of another checkpoint that had this name
        except OSError as error:
            self._done.append(_Done(Failed(step, _say(error)), place))
            return
        if part:
            self._done.append(_Done(PartWritten(step, 0.0), place))
            return
        self._paths[step] = self._marked[step] = place
        self._done.append(_Done(Saved(step, place, 0.0), place))
        self._rotate()

    def _fresh(self, step: int, attempt: int) -> Path:
        number = 0
        while True:
            path = self._root / store.snapshot_name(step, attempt, number)
            try:
                os.mkdir(path)
            except FileExistsError:
                number += 1
            else:
                return path

    def _make_room(self, need: int, own: Path | None = None) -> None:
        """Delete what is expendable, but not `own`, until `need` bytes fit.

        Raises:
            SnapshotError: they do not.
        """
        share, bound = self._config.disk_share, self._config.disk_bytes

        def fits() -> str:
            free = shutil.disk_usage(self._root).free
            if need > free * share:
                return (
                    f"a snapshot needs {_mib(need)} and only {share:.0%} of the {_mib(free)} free "
                    f"at {self._root} may be used; free some, or raise Snapshots(disk_share=...)"
                )
            held = sum(s.size_bytes for s in store.list_snapshots(self._run_directory))
            if bound is not None and held + need > bound:
                return (
                    f"a snapshot needs {_mib(need)} and the run's hold {_mib(held)} of the "
                    f"{_mib(bound)} allowed; raise Snapshots(disk_bytes=...)"
                )
            return ""

        trouble = fits()
        if trouble:
            for path in self._expendable(1, None if own is None else _number(own) - 1):
                self._delete(path)
                trouble = fits()
                if not trouble:
                    return
            raise SnapshotError(f"{trouble}, or switch it off with Snapshots(disk=False)")

    def _rotate(self, upto: int | None = None) -> None:
        for path in self._expendable(self._config.disk_keep, upto):
            self._delete(path)

    def _expendable(self, keep: int, upto: int | None) -> list[Path]:
        """What may go; of saves that look torn only those up to this number.

        Another rank may have begun the next save already: it has a higher one.
        """
        found = [
            s
            for s in store.list_snapshots(self._run_directory)
            if s.health is not Health.TORN or upto is None or s.number <= upto
        ]
        return expendable(found, self._pinned, keep)

    def _delete(self, path: Path) -> None:
        if self._world == 1:  # of several ranks all must have the same
            for step in [s for s, known in self._paths.items() if known == path]:
                self._paths.pop(step, None)
        try:
            store.delete(path)
        except OSError as error:
            logger.warning("an old snapshot stays path=%s reason=%s", path, error)

    def _mark(self, step: int, health: Health, reason: str, incident: str = "") -> None:
        path = self._marked.get(step)
        if path is None or self._rank:
            return  # its save failed, or it is not committed yet and will be marked then
        name = store.HEALTHY if health is Health.HEALTHY else store.UNHEALTHY
        try:
            store.mark(path, name, {"step": step, **({"reason": reason} if reason else {})})
            adopted = store.read_manifest(path).get("adopted")
            if adopted and health is Health.HEALTHY:
                unhealthy.forget(adopted)
            elif adopted:
                unhealthy.note(
                    adopted,
                    run=self._run,
                    step=step,
                    incident=incident,
                    reason=reason,
                    when=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
                )
        except (OSError, ValueError) as error:
            unmarked = _Unmarked(step, f"it cannot be marked {health}: {_say(error)}")
            self._done.append(_Done(unmarked))

    def _load(self, step: int, wanted: files.Places) -> Image | Adopted:
        path = self._paths.get(step)
        if path is None:
            raise SnapshotError(f"there is no copy of step {step} on disk; there are {self.steps}")
        image, _ = _read(path, wanted, run=self._run, rank=self._rank, world=self._world)
        return image


def _read(
    path: Path, wanted: files.Places, *, run: str | None, rank: int, world: int
) -> tuple[Image | Adopted, files.Rest]:
    """A snapshot in host memory, every file compared with its checksum before it is read.

    Raises:
        SnapshotError: it may not be used.
    """
    damage = store.find_damage(path, run=run, parameters=wanted.layout, contents=False)
    if damage:
        raise SnapshotError(f"{path.name}: {damage}")
    manifest, token = store.read_manifest(path), store.token(path)
    if "adopted" in manifest:
        stats = codec.decode_stats(bytes.fromhex(manifest["stats"]))
        return Adopted(manifest["adopted"], stats, token), files.Rest()

    def check(names: Iterable[str]) -> None:
        damage = store.find_damaged_file(path, names)
        if damage:
            raise SnapshotError(f"{path.name}: {damage}")

    image, rest = files.read(
        path, wanted, rank=rank, world=world, saved_by=store.ranks_of(path), check=check
    )
    image.token = token
    return image, rest


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job()
        except Exception:
            logger.exception("sentinel failed in its disk thread, training goes on")


def _number(path: Path) -> int:
    named = store.parse_name(path.name)
    assert named is not None
    return named[2]


def _say(error: BaseException) -> str:
    # torch.save() says "unexpected pos 64 vs 0" when the disk was full: the reason lies below.
    below: BaseException | None = error
    while below is not None and not isinstance(below, OSError):
        below = below.__cause__ or below.__context__
    if below is not None and not isinstance(error, SnapshotError):
        error = below
    if isinstance(error, SnapshotError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


# ---------------------------------------------------------------- a process that starts again


def newest_healthy(run_directory: Path) -> DiskSnapshot | None:
    """The newest snapshot of a run that is healthy and, byte for byte, as it was written."""
    for found in reversed(store.list_snapshots(run_directory)):
        if (
            found.health is Health.HEALTHY
            and not found.adopted
            and not store.find_damage(found.path)
        ):
            return found
    return None


def resume(
    target: Target, path: Path, *, run: str | None = None, rank: int = 0, world: int = 1
) -> int:
    """Put everything back as it was when the snapshot was taken, RNG and schedules included.

    For a process that starts again; the loop goes on with the step that is returned. Its data
    position is the user's: an object in `extra_state` comes back with the rest. Each of several
    ranks calls this for itself, with its rank; there need not be as many as when it was saved (the
    log says then what could not come back). prepare_resume() is for ranks that vote first.

    Raises:
        SnapshotError: the snapshot is damaged, or of another run or model. Nothing was changed.
    """
    return prepare_resume(target, path, run=run, rank=rank, world=world).resume()


@dataclass(frozen=True, slots=True)
class PreparedResume:
    """A snapshot that a restarted process can go on from; nothing was changed yet."""

    prepared: Prepared
    _target: Target
    _rest: files.Rest

    def resume(self) -> int:
        """Put everything back; the step to go on with."""
        self.prepared.commit()
        files.put_back_all(self._target, self._rest)
        for note in self.prepared.notes:
            logger.warning("resumed step=%s note=%s", self.prepared.step, note)
        return self.prepared.step


def prepare_resume(
    target: Target, path: Path, *, run: str | None = None, rank: int = 0, world: int = 1
) -> PreparedResume:
    """What of resume() can fail.

    Raises:
        SnapshotError: see resume().
    """
    try:
        found, rest = _read(path, files.places(target), run=run, rank=rank, world=world)
    except SnapshotError:
        raise
    except Exception as error:
        raise SnapshotError(f"{path.name} cannot be read: {_say(error)}") from error
    if isinstance(found, Adopted):
        raise SnapshotError(
            f"{path.name} stands for {found.path}, a checkpoint of your own: load that one"
        )
    for what, now, then in (
        ("parameter groups", target.optimizers, rest.groups),
        ("schedulers", target.schedulers, rest.schedulers),
    ):
        if len(now) != len(then):
            raise SnapshotError(f"{path.name} holds {len(then)} {what}, there are {len(now)}")
    return PreparedResume(prepare(target, found), target, rest)

"""Disk tier: some of the RAM snapshots, written in the background, for when RAM or process is gone.

    disk = DiskStore(target, Snapshots(), run_directory, run="r7", policy=policy)
    if disk.due(step): disk.offer(image, ledger)     after the RAM copy; returns at once
    for ended in disk.poll(): ...                    what was saved, or failed, since the last call
    disk.follow(ledger)                              marks copies healthy or not, as their steps are
    image = disk.load(step)                          verified; SnapshotError names what is wrong
    disk.close()                                     waits for a save in flight, but not for ever

One thread does all that touches the disk, in order. It reads the RAM copy, never the live objects:
the trainer pays for the RAM copy and nothing else. When a save is still running, the next one that
is due waits for a later snapshot; nothing queues up on a slow disk.

A save goes into a fresh directory, and counts only with its COMMIT (sentinel.traces.snapshots has
the format). Whether it is healthy is the engine's word: the marker follows the registry in the
ledger. Kept: those in the registry, the newest `disk_keep` healthy ones besides, the newest
candidate, and the newest unhealthy one for whoever looks into the incident.

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
from sentinel_hooks.snapshots import Snapshots, files
from sentinel_hooks.snapshots.ram import Image, RamStore, SnapshotError
from sentinel_hooks.target import Target

logger = logging.getLogger(__name__)

CLOSE_WAIT_S = 30.0  # at detach and exit: as long as a save in flight may hold them up
LOAD_WAIT_S = 300.0  # a rollback from disk: longer than reading, shorter than a person's patience
_SLACK_BYTES = 1 << 20  # manifests, markers, directory blocks


@dataclass(frozen=True, slots=True)
class Saved:
    """A snapshot is on the disk and committed."""

    step: int
    path: Path
    took_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """A snapshot did not get there; nothing of it counts."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Adopted:
    """A checkpoint of the user's own, and the statistics of its moment."""

    path: str
    stats: Stats


@dataclass(frozen=True, slots=True)
class _Unmarked:
    """A committed snapshot could not be marked; that is tried again after the next save."""

    step: int
    reason: str


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
    ) -> None:
        """Nothing is read or written before the first offer()."""
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
        # Observing keeps its hands off the disk too. (With several ranks a run only observes.)
        self.enabled = config.disk and policy.mode is Mode.ACT
        self.trouble = ""
        # With RAM snapshots the first waits for the schedule: a short run writes nothing.
        self._next = next_due(first_step, self._schedule) if config.ram else first_step
        self._busy: Image | None = None
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done: deque[Saved | Failed | _Unmarked] = deque()
        self._unmarked: set[int] = set()
        # What became of the copies made or found by this process; the paths of committed ones.
        self._health: dict[int, Health] = {}
        self._paths: dict[int, Path] = {}
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
            and self._busy is None
            and os.getpid() == self._pid  # the thread does not follow into a fork
        )

    def offer(self, image: Image, ledger: Ledger) -> bool:
        """Write this image in the background; True, unless copying the rest of it raised.

        Its buffers are lent until poll() tells the end.
        """
        rest = files.capture(self._target)
        self._paths.pop(image.step, None)
        self._start()
        self._busy = image
        image.readers += 1
        self._next = next_due(image.step, self._schedule)
        self._health[image.step] = Health.CANDIDATE
        self._jobs.put(partial(self._save, image, rest, ledger))
        return True

    def adopt(self, path: str, step: int, stats: Stats, ledger: Ledger, *, quiet: bool) -> None:
        """Note a checkpoint that the user has written; unhealthy when it was no quiet moment."""
        if not self.enabled or os.getpid() != self._pid:
            return
        layout = files.live_layout(self._target)
        self._paths.pop(step, None)
        self._start()
        self._health[step] = Health.CANDIDATE if quiet else Health.UNHEALTHY
        self._jobs.put(partial(self._adopt, os.path.abspath(path), step, stats, ledger, layout))
        if not quiet:
            self._put(
                partial(self._mark, step, Health.UNHEALTHY, "it was saved inside an incident")
            )

    def put_back(self, adopted: Adopted) -> Stats:
        """Have the user's function load a checkpoint.

        Raises:
            SnapshotError: it raised.
        """
        assert self._config.adopt is not None
        try:
            with torch.enable_grad():  # as the user's code is used to
                self._config.adopt(adopted.path)
        except Exception as error:
            raise SnapshotError(
                f"the adopted checkpoint {adopted.path} could not be loaded: {_say(error)}"
            ) from error
        return adopted.stats

    def poll(self) -> list[Saved | Failed]:
        """What has ended since the last call."""
        if not self._done:
            return []
        ended: list[Saved | Failed] = []
        while self._done:
            one = self._done.popleft()
            if not isinstance(one, Saved):
                if not self.trouble:
                    logger.warning(
                        "no snapshot on disk run=%s step=%s reason=%s",
                        self._run,
                        one.step,
                        one.reason,
                    )
                self.trouble = one.reason
            if isinstance(one, _Unmarked):
                self._unmarked.add(one.step)
                continue
            ended.append(one)
            if self._busy is not None and self._busy.step == one.step:
                self._busy.readers -= 1
                self._busy = None
            if isinstance(one, Failed):
                self._next = min(self._next, one.step + 1)  # the next that is taken tries again
                continue
            if self.trouble:
                self.trouble = ""
                logger.info("snapshots reach the disk again run=%s step=%s", self._run, one.step)
            for step in self._unmarked:
                self._health[step] = Health.CANDIDATE
                self._seen = None
            self._unmarked.clear()
        return ended

    @property
    def ready(self) -> bool:
        """Nothing is being saved."""
        return self._busy is None and os.getpid() == self._pid

    def wait(self, wait_s: float = CLOSE_WAIT_S) -> None:
        """Until a save in flight has ended; poll() then tells how."""
        until = time.perf_counter() + wait_s
        while self._busy is not None and not self._done and time.perf_counter() < until:
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

        For a run that was resumed: only its ledger knows which of them belong to its way.
        """
        wanted = set(steps)
        for found in store.list_snapshots(self._run_directory):
            if found.step in wanted and found.health in store.USABLE and found.run == self._run:
                self._paths[found.step] = found.path
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

    def load(self, step: int) -> Image | Adopted:
        """The copy of `step` in host memory, after every checksum was compared.

        Raises:
            SnapshotError: there is none, it is damaged, or the disk does not answer.
        """
        parameters = files.live_layout(self._target)
        answer: list[Image | Adopted | Exception] = []
        ready = threading.Event()

        def job() -> None:
            try:
                answer.append(self._load(step, parameters))
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
        if isinstance(image, SnapshotError):
            self._paths.pop(step, None)
            raise image
        if isinstance(image, Exception):
            self._paths.pop(step, None)
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
            self._done.append(Failed(image.step, _say(error)))
            return
        self._paths[image.step] = path
        self._done.append(Saved(image.step, path, time.perf_counter() - began))
        self._rotate()

    def _write(self, image: Image, rest: files.Rest, ledger: Ledger) -> Path:
        attempt = ledger.attempt
        os.makedirs(self._root, exist_ok=True)
        self._make_room(image.size_bytes + _SLACK_BYTES)
        path = self._fresh(image.step, attempt)
        try:
            store.sync_directory(self._root)
            names = files.write(path, image, rest, attempt=attempt)
            values = {**self._values, "step": image.step, "attempt": attempt}
            store.write_manifest(
                path,
                0,
                names,
                {
                    **values,
                    "applied": ledger.in_weights,
                    "parameters": files.layout(image),
                    "weights": files.weights_hash(image),
                    "saved_at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
                },
            )
            store.commit(path, 1, values)
        except BaseException:
            with contextlib.suppress(OSError):
                store.delete(path)
            raise
        return path

    def _adopt(self, path: str, step: int, stats: Stats, ledger: Ledger, layout: str) -> None:
        try:
            os.makedirs(self._root, exist_ok=True)
            place = self._fresh(step, ledger.attempt)
            values = {**self._values, "step": step, "attempt": ledger.attempt}
            more = {
                "applied": ledger.in_weights,
                "parameters": layout,
                "saved_at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
                "adopted": path,
                "stats": codec.encode_stats(stats).hex(),
            }
            store.write_manifest(place, 0, (), {**values, **more})
            store.commit(place, 1, values)
        except OSError as error:
            self._done.append(Failed(step, _say(error)))
            return
        self._paths[step] = place
        self._done.append(Saved(step, place, 0.0))
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

    def _make_room(self, need: int) -> None:
        """Delete what is expendable until `need` bytes fit.

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
            for path in expendable(store.list_snapshots(self._run_directory), self._pinned, 1):
                self._delete(path)
                trouble = fits()
                if not trouble:
                    return
            raise SnapshotError(f"{trouble}, or switch it off with Snapshots(disk=False)")

    def _rotate(self) -> None:
        found = store.list_snapshots(self._run_directory)
        for path in expendable(found, self._pinned, self._config.disk_keep):
            self._delete(path)

    def _delete(self, path: Path) -> None:
        for step in [s for s, known in self._paths.items() if known == path]:
            self._paths.pop(step, None)
        try:
            store.delete(path)
        except OSError as error:
            logger.warning("an old snapshot stays path=%s reason=%s", path, error)

    def _mark(self, step: int, health: Health, reason: str) -> None:
        path = self._paths.get(step)
        if path is None:
            return  # its save failed
        name = store.HEALTHY if health is Health.HEALTHY else store.UNHEALTHY
        try:
            store.mark(path, name, {"step": step, **({"reason": reason} if reason else {})})
        except OSError as error:
            self._done.append(_Unmarked(step, f"it cannot be marked {health}: {_say(error)}"))

    def _load(self, step: int, parameters: str) -> Image | Adopted:
        path = self._paths.get(step)
        if path is None:
            raise SnapshotError(f"there is no copy of step {step} on disk; there are {self.steps}")
        damage = store.find_damage(path, run=self._run, parameters=parameters)
        if damage:
            raise SnapshotError(f"{path.name}: {damage}")
        manifest = store.read_manifest(path)
        if "adopted" in manifest:
            stats = codec.decode_stats(bytes.fromhex(manifest["stats"]))
            return Adopted(manifest["adopted"], stats)
        image, _ = files.read(path)
        return image


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job()
        except Exception:
            logger.exception("sentinel failed in its disk thread, training goes on")


def _say(error: Exception) -> str:
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


def resume(target: Target, path: Path, *, run: str | None = None) -> int:
    """Put everything back as it was when the snapshot was taken, RNG and schedules included.

    For a process that starts again; the loop goes on with the step that is returned. Its data
    position is the user's: an object in `extra_state` comes back with the rest.

    Raises:
        SnapshotError: the snapshot is damaged, or of another run or model. Nothing was changed.
    """
    damage = store.find_damage(path, run=run, parameters=files.live_layout(target))
    if damage:
        raise SnapshotError(f"{path.name}: {damage}")
    image, rest = files.read(path)
    RamStore(target, Snapshots()).put_back(image)
    files.put_back_all(target, rest)
    return image.step

"""Embedded runs, seen in their folders: `sentinel serve --watch RUN_DIR` shows them, read-only.

    watched = Watched(settings)
    await watched.look(now)                 a job's turn; reads in a thread what has changed
    watched.runs["r7"]                      a Run for the same pages as those that report here
    watched.trouble                         {"ä b": why}: those that are not shown; logged once

What a trainer without any sidecar leaves in its run_dir is enough: the newest segment of its trace
tells the newest step, its ledger what was done, HALTED that it was halted. Nothing is written there
and no lock is taken. Whether it runs is judged by its files: a trace that was closed is over, one
that was written to a short while ago, or within ten of its own usual steps, is running, any other
is lost.

A folder is a trainer's run_dir, which holds runs, or one run's own directory. Whatever looks like a
run and cannot be read is in `trouble`, with the reason; so is an entry that cannot be looked at, a
folder that cannot be listed, and one that had runs and is gone or empty now, as that of a volume
that is not mounted any more. A run that was begun a moment ago may have nothing in it yet.

Units:  `now` in Unix seconds.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from sentinel.core.errors import ProtocolError, SentinelError, TraceError
from sentinel.core.policy import Policy
from sentinel.core.state import State
from sentinel.core.types import Decision, Observation
from sentinel.sidecar.runs import CADENCES, Mirror, Run
from sentinel.sidecar.settings import Settings
from sentinel.traces import ledger as ledgers
from sentinel.traces.recorder import CONFIG, list_incarnations
from sentinel.traces.records import Header, decode_header, decode_step
from sentinel.traces.segments import SCALARS, Kind, list_segments, read_segment
from sentinel.wire import codec, messages
from sentinel.wire.messages import Layer

logger = logging.getLogger(__name__)

MOST_RUNS = 1000
MOST_TOLD = 100  # runs that are not shown
BEGUN_S = 10.0  # a trace is opened and its first record written well within
UNFIT = (
    "its id cannot be shown here; an id of 1 to 128 letters, digits and ._:@+- that starts with a "
    "letter or digit can"
)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a look at one run found."""

    stamp: tuple[int, int]
    changed_at: float
    header: Header
    observation: Observation | None
    decision: Decision | None
    state: State | None
    closed: bool
    halted: bool
    interval_s: float | None  # of its usual step


class Watched:
    """See the module docstring; its attributes are the event loop's."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._seen: dict[str, _Seen] = {}
        self._had: dict[Path, int] = {}  # how many runs were in a folder when it last had some
        self.runs: dict[str, Run] = {}
        self.directories: dict[str, Path] = {}
        self.trouble: dict[str, str] = {}

    async def look(self, now: float) -> None:
        """See what is new."""
        known = dict(self._seen)
        had = self._had
        seen, places, trouble = await asyncio.to_thread(
            _look, self._settings.watch, known, had, now
        )
        for name, why in trouble.items():
            if self.trouble.get(name) != why:
                logger.warning("a watched run is not shown run=%s why=%s", name, why)
        self.trouble, self._seen, self.directories = trouble, seen, places
        self.runs = {name: self._run(name, one, now) for name, one in seen.items()}

    def _run(self, name: str, seen: _Seen, now: float) -> Run:
        header = seen.header
        try:
            policy = codec.decode_policy(header.policy)
        except ProtocolError:
            policy = Policy()
        if seen.halted:
            state = "halted"
        elif seen.closed:
            state = "finished"
        else:
            patience = max(self._settings.lost_after_s, CADENCES * (seen.interval_s or 0.0))
            state = "running" if now - seen.changed_at <= patience else "lost"
        try:
            layers = msgspec.convert(header.layers, tuple[Layer, ...])
        except msgspec.ValidationError:
            layers = ()
        return Run(
            name=name,
            incarnation=header.incarnation,
            fence=0,
            policy=policy,
            policy_bytes=header.policy,
            policy_hash=codec.digest(header.policy),
            engine_version=header.engine_version,
            layers=layers,
            info={},
            registered=header.at or seen.changed_at,
            max_layers=self._settings.max_layers,
            reason="embedded: it does not report here and is only watched, in its folder",
            mirror=Mirror(state=seen.state, observation=seen.observation, decision=seen.decision),
            run_state=state,
            last_report=seen.changed_at,
            last_heard=seen.changed_at,
            interval_s=seen.interval_s,
            ended=None if state == "running" else seen.changed_at,
            watched=True,
        )


def _look(
    folders: tuple[Path, ...], known: dict[str, _Seen], had: dict[Path, int], now: float
) -> tuple[dict[str, _Seen], dict[str, Path], dict[str, str]]:
    """All runs below the folders; those that have not changed are not read again.

    Args:
        had: how many runs each folder had when it last had some; kept up to date here.
    """
    seen: dict[str, _Seen] = {}
    places: dict[str, Path] = {}
    trouble: dict[str, str] = {}
    for folder in folders:
        before, odd = len(seen), dict[str, str]()
        try:
            directories = _runs_in(folder, odd)
        except OSError as error:
            trouble[_told(str(folder))] = f"this folder cannot be read: {error}"
            continue
        if not directories and not odd and folder in had:
            how = "is empty" if folder.is_dir() else "is gone"
            trouble[_told(str(folder))] = (
                f"this folder {how}, {had[folder]} runs were in it: is its volume mounted?"
            )
        for name, why in odd.items():
            if len(trouble) < MOST_TOLD:
                trouble[name] = why
        for directory in directories:
            name = directory.name
            if name in seen:
                continue
            unfit = not messages.RUN_NAME.fullmatch(name)
            if unfit or len(seen) >= MOST_RUNS:
                # A run, and no folder of something else; a list without end would tell nothing.
                if len(trouble) < MOST_TOLD and _is_run(directory):
                    why = UNFIT if unfit else f"{MOST_RUNS} runs are shown already"
                    trouble[_told(name)] = why
                continue
            try:
                found = _read(directory, known.get(name))
                why = "" if found is not None else _unread(directory, now)
            except (SentinelError, OSError) as error:
                found, why = None, str(error)
            if found is not None:
                seen[name], places[name] = found, directory
            elif why and len(trouble) < MOST_TOLD:
                trouble[name] = why
        if len(seen) > before:
            had[folder] = len(seen) - before
    return seen, places, trouble


def _told(name: str) -> str:
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _runs_in(folder: Path, odd: dict[str, str]) -> list[Path]:
    """Runs, and what else is there; raises OSError unless it is only not there yet.

    Args:
        odd: is told of entries that cannot be looked at, a link that leads to itself for one.
    """
    if list_incarnations(folder):
        return [folder.absolute()]
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    if entry.is_dir():
                        found.append(Path(entry.path))
                except OSError as error:
                    odd[_told(entry.name)] = f"it cannot be looked at: {error}"
    except FileNotFoundError:
        return []
    return sorted(found)


def _is_run(directory: Path) -> bool:
    try:
        return bool(list_incarnations(directory))
    except OSError:
        return False


def _unread(directory: Path, now: float) -> str:
    """Why a directory in which no run was found is not shown; "" where there is none to show.

    Raises:
        OSError: it cannot be listed.
    """
    os.scandir(directory).close()
    paths = [p for place in list_incarnations(directory) for _, p in list_segments(place, SCALARS)]
    if not paths or now - max(path.stat().st_mtime for path in paths) <= BEGUN_S:
        return ""
    damage = read_segment(paths[-1]).damage
    what = "there is no step in it" if damage is None else f"damaged: {damage.reason}"
    return f"no file of its trace can be read; the newest, {paths[-1]}, holds no beginning ({what})"


def _read(directory: Path, known: _Seen | None) -> _Seen | None:
    """One run; None when nothing is there yet."""
    for place in reversed(list_incarnations(directory)):
        for _, path in reversed(list_segments(place, SCALARS)):
            status = path.stat()
            stamp = (status.st_size, status.st_mtime_ns)
            halted = ledgers.read_halted(directory) is not None
            if known is not None and known.stamp == stamp and known.halted == halted:
                return known
            frames = read_segment(path).frames
            if not frames or frames[0].kind is not Kind.HEADER:
                continue
            header = decode_header(frames[0].payload, str(path))
            steps = [frame for frame in frames if frame.kind is Kind.STEP]
            observation, decision = None, None
            if steps:
                record = decode_step(steps[-1].payload, str(path))
                observation = record.observation
                decision = record.decision if record.decision_bytes else None
            elif len(list_segments(place, SCALARS)) > 1:
                continue  # just opened: the one before has the newest step
            return _Seen(
                stamp=stamp,
                changed_at=status.st_mtime,
                header=header,
                observation=observation,
                decision=decision,
                state=_state(directory, header),
                closed=frames[-1].kind is Kind.TRAILER,
                halted=halted,
                interval_s=_interval(known, header, observation, status.st_mtime)
                or _mean_interval(path, len(steps), status.st_mtime),
            )
    return None


def _interval(
    known: _Seen | None, header: Header, observation: Observation | None, changed_at: float
) -> float | None:
    """How long a step takes, by what has changed since the look before; None: it cannot be told."""
    if known is None or known.observation is None or observation is None:
        return None
    steps = observation.step - known.observation.step
    if steps <= 0 or header.incarnation != known.header.incarnation:
        return known.interval_s
    each = max(changed_at - known.changed_at, 0.0) / steps
    usual = known.interval_s
    if usual is None:
        return each
    # A pause (evaluation, a checkpoint) moves it little.
    return usual + 0.1 * (min(each, 10.0 * usual + 0.1) - usual)


def _mean_interval(path: Path, steps: int, changed_at: float) -> float | None:
    """The same at the first look, by the age of what was written before its first step."""
    paths = [p for _, p in list_segments(path.parent, SCALARS)]
    at = paths.index(path) if path in paths else 0
    since = paths[at - 1] if at else path.parent / CONFIG
    try:
        took = changed_at - since.stat().st_mtime
    except OSError:
        return None
    return took / steps if steps and took > 0.0 else None


def _state(directory: Path, header: Header) -> State | None:
    """What was done, from the ledger; else from the start of the newest segment."""
    state = None
    if header.state:
        try:
            state = codec.decode_state(header.state)
        except ProtocolError:
            state = None  # another engine version wrote it
    try:
        saved = ledgers.read(directory)
    except TraceError:
        saved = None
    if saved is None:
        return state
    return replace(state or State(), ledger=saved.ledger)

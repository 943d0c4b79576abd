"""Embedded runs, seen in their folders: `sentinel serve --watch RUN_DIR` shows them, read-only.

    watched = Watched(settings)
    await watched.look(now)                 a job's turn; reads in a thread what has changed
    watched.runs["r7"]                      a Run for the same pages as those that report here
    watched.trouble                         {"ä b": why}: those that are not shown; logged once

What a trainer without any sidecar leaves in its run_dir is enough: the newest segment of its trace
tells the newest step, its ledger what was done, HALTED that it was halted. Nothing is written there
and no lock is taken. Whether it runs is judged by its files: a trace that was closed is over, one
that was written to a short while ago is running, any other is lost.

A folder is a trainer's run_dir, which holds runs, or one run's own directory.
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
from sentinel.sidecar.runs import Mirror, Run
from sentinel.sidecar.settings import Settings
from sentinel.traces import ledger as ledgers
from sentinel.traces.recorder import list_incarnations
from sentinel.traces.records import Header, decode_header, decode_step
from sentinel.traces.segments import SCALARS, Kind, list_segments, read_segment
from sentinel.wire import codec, messages
from sentinel.wire.messages import Layer

logger = logging.getLogger(__name__)

MOST_RUNS = 1000
MOST_TOLD = 100  # runs that are not shown
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


class Watched:
    """See the module docstring; its attributes are the event loop's."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._seen: dict[str, _Seen] = {}
        self.runs: dict[str, Run] = {}
        self.directories: dict[str, Path] = {}
        self.trouble: dict[str, str] = {}

    async def look(self, now: float) -> None:
        """See what is new."""
        known = dict(self._seen)
        seen, places, trouble = await asyncio.to_thread(_look, self._settings.watch, known)
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
            fresh = now - seen.changed_at <= self._settings.lost_after_s
            state = "running" if fresh else "lost"
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
            reason="embedded: it reports to no sidecar and is only watched",
            mirror=Mirror(state=seen.state, observation=seen.observation, decision=seen.decision),
            run_state=state,
            last_report=seen.changed_at,
            last_heard=seen.changed_at,
            ended=None if state == "running" else seen.changed_at,
            watched=True,
        )


def _look(
    folders: tuple[Path, ...], known: dict[str, _Seen]
) -> tuple[dict[str, _Seen], dict[str, Path], dict[str, str]]:
    """All runs below the folders; those that have not changed are not read again."""
    seen: dict[str, _Seen] = {}
    places: dict[str, Path] = {}
    trouble: dict[str, str] = {}
    for folder in folders:
        for directory in _runs_in(folder):
            name = directory.name
            if name in seen:
                continue
            unfit = not messages.RUN_NAME.fullmatch(name)
            if unfit or len(seen) >= MOST_RUNS:
                # A run, and no folder of something else; a list without end would tell nothing.
                if len(trouble) < MOST_TOLD and list_incarnations(directory):
                    told = os.fsencode(name).decode("utf-8", "backslashreplace")
                    trouble[told] = UNFIT if unfit else f"{MOST_RUNS} runs are shown already"
                continue
            try:
                found = _read(directory, known.get(name))
            except (SentinelError, OSError) as error:
                trouble[name] = str(error)
                continue
            if found is not None:
                seen[name], places[name] = found, directory
    return seen, places, trouble


def _runs_in(folder: Path) -> list[Path]:
    if list_incarnations(folder):
        return [folder.absolute()]
    try:
        return sorted(Path(entry.path) for entry in os.scandir(folder) if entry.is_dir())
    except OSError:
        return []


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
            )
    return None


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

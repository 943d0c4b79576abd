"""The recorder: every step of a run on disk, so that any decision can be recomputed later.

    recorder = Recorder(run_dir / run, run=run, incarnation=..., policy=policy, state=state,
                        layers=table)
    recorder.step(observation, decision, outcome, state_after_apply, gate_s=0.0004)
    recorder.event(event, state_after_note)
    recorder.close()

It writes `<directory>/<NNNN>-<incarnation>/`, NNNN counting the incarnations of the run (a
restarted process is the next one), with two streams of segments: scalars-*.seg holds steps and
events, layers-*.seg the per-layer columns. Segments rotate at 16 MiB; each scalars segment starts
with the engine's state, which is why step() and event() take the state that follows them.

`config.json` beside them says what was run; the caller gives its bytes.

Durability: a record is with the operating system when the call returns (no buffer of our own), so
         a killed process loses nothing; a power cut loses what the system had not yet written.
         Nothing is fsynced per step: that would be milliseconds. close() syncs.
Errors:  step(), event(), restate() and close() raise OSError when the disk fails; the caller
         catches it at its one place and goes on. Each later call tries again, in a fresh segment
         whose header says that records before it are missing; a directory that is gone is made
         again. `trouble` says what fails now (from the constructor on, which raises nothing),
         `lost_records` counts what is missing.
Slow:    a disk that holds a call up twice within PROMPT calls is left alone for REST times as long
         as it took; what is not recorded meanwhile counts as lost.
Space:   at most `limit_bytes` for the run, all incarnations together: the oldest segments of
         columns go first, then the oldest of scalars; `dropped_segments` counts them.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sentinel.core.events import Event
from sentinel.core.policy import Policy
from sentinel.core.state import ENGINE_VERSION, State
from sentinel.core.types import Decision, Observation, Outcome
from sentinel.traces.records import (
    FORMAT,
    INDEX_BYTES,
    Header,
    encode_columns,
    encode_header,
    encode_step,
)
from sentinel.traces.segments import (
    LAYERS,
    SCALARS,
    SEGMENT_BYTES,
    Kind,
    SegmentWriter,
    list_segments,
)
from sentinel.traces.snapshots import write_durably
from sentinel.traces.summary import footer
from sentinel.wire import codec

LIMIT_BYTES = 2 * 1024**3
CONFIG = "config.json"
SLOW_S = 1.0
PROMPT = 100  # calls; a disk that hesitates once in so many is not slow
REST, REST_LIMIT_S = 20.0, 600.0  # a slow disk costs at most a twentieth of the time
_INCARNATION = re.compile(r"^(\d{4,})-(.+)$")
_SAFE = re.compile(r"[^A-Za-z0-9._-]")


def list_incarnations(directory: Path) -> list[Path]:
    """The incarnation directories of a run, oldest first."""
    found = []
    try:
        entries = list(os.scandir(directory))
    except OSError:
        return []
    for entry in entries:
        match = _INCARNATION.match(entry.name)
        if match is not None and entry.is_dir() and list_segments(Path(entry.path), SCALARS):
            found.append((int(match[1]), Path(entry.path)))
    return [path for _, path in sorted(found)]


def safe_name(incarnation: str) -> str:
    """The part of an incarnation's directory that names it."""
    return _SAFE.sub("_", incarnation) or "0"


class Recorder:
    """Writes one incarnation of a run; used by one thread."""

    def __init__(
        self,
        directory: Path | str,
        *,
        run: str,
        policy: Policy,
        state: State | None,
        incarnation: str = "",
        layers: Sequence[Any] = (),
        engine_version: int = ENGINE_VERSION,
        segment_bytes: int = SEGMENT_BYTES,
        limit_bytes: int = LIMIT_BYTES,
        config: bytes = b"",
        clock: Callable[[], float] | None = None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Open a new incarnation.

        Args:
            directory: the run's own directory; made if it is not there.
            state: the engine's state before the first record; None: a sidecar may not know it.
            incarnation: id of this process's life; only names the directory.
            layers: the layer table; anything msgpack carries.
            config: what config.json shall hold; empty for no such file.
            clock: wall clock; without one the records carry no time.
            timer: seconds that only run forward; tells a slow disk.
        """
        self._run = run
        self._incarnation = incarnation
        self._layers_table = list(layers)
        self._engine_version = engine_version
        self._policy = codec.encode_policy(policy)
        self._state = state
        self._clock = clock
        self._segment_bytes = segment_bytes
        self._limit_bytes = limit_bytes
        self._run_directory = Path(directory)
        self._name = safe_name(incarnation)
        self.directory = self._run_directory / f"0000-{self._name}"  # until it is made
        self._made = False
        self._config = config
        self._timer = timer
        self._prompt = PROMPT  # calls since the last slow one
        self._rest_until: float | None = None
        self._numbers = {SCALARS: 0, LAYERS: 0}
        self._scalars: SegmentWriter | None = None
        self._layers: SegmentWriter | None = None
        self._gap = False
        self._closed = False
        self._index = bytearray()  # of the open segment's steps, for its footer
        self._spent = 0
        self._kept = 0  # steps in this directory
        self.trouble = ""
        self.lost_records = 0
        self.dropped_segments = 0
        self.written_bytes = 0
        try:
            self._open_scalars()
        except OSError as error:
            self._gap = True
            self.trouble = str(error)

    def step(
        self,
        observation: Observation,
        decision: Decision,
        outcome: Outcome,
        state: State,
        *,
        gate_s: float | None = None,
    ) -> None:
        """Record one step; `state` is the engine's state after apply().

        Raises:
            OSError: the disk failed; this step is missing from the trace.
        """
        before, self._state = self._state, state
        assert before is not None
        attempt = before.ledger.attempt
        at = self._clock() if self._clock is not None else None
        columns = bool(observation.columns)
        payload = encode_step(
            observation, decision, outcome, attempt, gate_s, at, has_columns=columns
        )
        with self._trying():
            if columns:
                # Columns first: a step on disk implies that its columns are.
                self._append_columns(encode_columns(observation.step, attempt, observation.columns))
            self._append(Kind.STEP, payload, before)
            self._index += payload[:INDEX_BYTES]
            self._kept += 1

    def event(self, event: Event, state: State) -> None:
        """Record what happened at a safe point; `state` is the engine's state after note().

        Raises:
            OSError: the disk failed; this event is missing from the trace.
        """
        before, self._state = self._state, state
        with self._trying():
            self._append(Kind.EVENT, codec.encode_event(event), before)

    def restate(self, state: State) -> None:
        """Start from another state after all: a restarted run has recognised its weights.

        Raises:
            OSError: the disk failed.
        """
        self._state = state
        writer, self._scalars = self._scalars, None
        if writer is None or self.written_bytes:
            self._gap = True  # records went before: the next segment begins with this state
        else:
            writer.close()
            with contextlib.suppress(OSError):
                writer.path.unlink()
                self._numbers[SCALARS] = 0
        try:
            self._open_scalars()
        except OSError as error:
            self.trouble = str(error)
            raise

    def close(self) -> None:
        """Summarise, sync and close the open segments; a second call does nothing.

        Raises:
            OSError: the disk failed; everything recorded so far still stands.
        """
        if self._closed:
            return
        self._closed = True
        self._look()
        try:
            self._close_scalars(sync=True)
        finally:
            self._close_layers(sync=True)

    # -- trouble -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _trying(self, records: int = 1) -> Iterator[None]:
        """One record is written, or lost and counted as so many."""
        began = self._timer()
        try:
            if self._closed:
                raise OSError(f"the recorder of {self.directory} is closed")
            self._check_rest(began)
            self._look()
            yield
        except OSError as error:
            self._gap = True
            self.lost_records += records
            self.trouble = str(error)
            raise
        else:
            self.trouble = ""
        finally:
            took = self._timer() - began
            if took < SLOW_S:
                self._prompt += self._rest_until is None
            else:
                if self._prompt < PROMPT:
                    self._rest_until = began + took + min(REST * took, REST_LIMIT_S)
                self._prompt = 0

    def _check_rest(self, now: float) -> None:
        if self._rest_until is not None:
            if now < self._rest_until:
                raise OSError(
                    f"the disk is slow: it took more than {SLOW_S:g} s for one record, twice; "
                    f"left alone for {self._rest_until - now:.0f} s"
                )
            self._rest_until = None

    def _look(self) -> None:
        """Writing to a file that nobody can find any more would lose everything silently."""
        if all(w is None or not w.vanished for w in (self._scalars, self._layers)):
            return
        if not self.directory.is_dir():
            self.lost_records += self._kept
            self._kept = 0
        elif self._scalars is not None and self._scalars.vanished:
            steps = len(self._index) // INDEX_BYTES
            self.lost_records += steps
            self._kept -= steps
        self._gap = True
        for writer in (self._scalars, self._layers):
            if writer is not None:
                with contextlib.suppress(OSError):
                    writer.close()
        self._scalars = self._layers = None
        self._index = bytearray()

    # -- segments ----------------------------------------------------------------------------

    def _append(self, kind: Kind, payload: bytes, before: State | None) -> None:
        writer = self._scalars
        if writer is None or self._gap or writer.size >= self._segment_bytes:
            self._close_scalars()
            writer = self._open_scalars(before)
        writer.append(kind, payload)
        self.written_bytes += len(payload)

    def _append_columns(self, payload: bytes) -> None:
        writer = self._layers
        if writer is None or self._gap or writer.size >= self._segment_bytes:
            self._close_layers()
            writer = self._open(LAYERS, self._header(LAYERS))
            self._layers = writer
        writer.append(Kind.COLUMNS, payload)
        self.written_bytes += len(payload)

    def _open_scalars(self, state: State | None = None) -> SegmentWriter:
        header = self._header(SCALARS)
        header.policy = self._policy
        known = self._state if state is None else state
        header.state = b"" if known is None else codec.encode_state(known)
        header.after_gap = self._gap
        self._scalars = self._open(SCALARS, header)
        self._gap = False
        return self._scalars

    def _header(self, stream: str) -> Header:
        return Header(
            format=FORMAT,
            stream=stream,
            number=self._numbers[stream],
            run=self._run,
            incarnation=self._incarnation,
            engine_version=self._engine_version,
            layers=self._layers_table,
            at=self._clock() if self._clock is not None else None,
        )

    def _open(self, stream: str, header: Header) -> SegmentWriter:
        self._begin()
        self._make_room()
        number = self._numbers[stream]
        self._numbers[stream] = number + 1  # also if it fails: a number is used once
        writer = SegmentWriter(self.directory, stream, number)
        try:
            writer.append(Kind.HEADER, encode_header(header))
        except OSError:
            writer.close()
            with contextlib.suppress(OSError):
                writer.path.unlink()
            raise
        return writer

    def _close_scalars(self, *, sync: bool = False) -> None:
        writer, self._scalars = self._scalars, None
        index, self._index = bytes(self._index), bytearray()
        if writer is None:
            return
        try:
            if not self._gap:
                for kind, payload in footer(index, writer.size):
                    writer.append(kind, payload)
        finally:
            self._spent += writer.size
            writer.close(sync=sync)

    def _close_layers(self, *, sync: bool = False) -> None:
        writer, self._layers = self._layers, None
        if writer is not None:
            self._spent += writer.size
            writer.close(sync=sync)

    # -- space -------------------------------------------------------------------------------

    def _begin(self) -> None:
        """The directory, with its config.json, is there; again, if need be."""
        if not self._made:
            self.directory = self._make_directory(self._name)
            self._made = True
            self._spent = sum(size for _, size, _ in self._all_segments())
        elif not self.directory.is_dir():
            self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / CONFIG
        if self._config and not path.exists():
            # The steps matter more: without room for it the next segment tries again.
            with contextlib.suppress(OSError):
                try:
                    write_durably(path, self._config)
                except OSError:
                    path.with_name(CONFIG + ".tmp").unlink(missing_ok=True)
                    raise

    def _make_directory(self, name: str) -> Path:
        self._run_directory.mkdir(parents=True, exist_ok=True)
        number = 0
        for entry in os.scandir(self._run_directory):
            match = _INCARNATION.match(entry.name)
            if match is not None:
                number = max(number, int(match[1]) + 1)
        while True:
            path = self._run_directory / f"{number:04d}-{name}"
            try:
                path.mkdir()
            except FileExistsError:
                number += 1
                continue
            return path

    def _all_segments(self) -> list[tuple[tuple[bool, str, str], int, Path]]:
        """Every segment of the run with its size, in the order in which they may be dropped."""
        found = []
        for entry in os.scandir(self._run_directory):
            if not (_INCARNATION.match(entry.name) and entry.is_dir()):
                continue
            for stream in (LAYERS, SCALARS):
                for _, path in list_segments(Path(entry.path), stream):
                    with contextlib.suppress(OSError):
                        key = (stream == SCALARS, entry.name, path.name)
                        found.append((key, path.stat().st_size, path))
        return sorted(found)

    def _make_room(self) -> None:
        """Drop the oldest closed segments until one more fits under the limit."""
        if self._spent + 2 * self._segment_bytes <= self._limit_bytes:
            return
        open_paths = {w.path for w in (self._scalars, self._layers) if w is not None}
        segments = self._all_segments()
        self._spent = sum(size for _, size, _ in segments)
        for _, size, path in segments:
            if self._spent + 2 * self._segment_bytes <= self._limit_bytes:
                break
            if path in open_paths:
                continue
            with contextlib.suppress(OSError):
                path.unlink()
                self._spent -= size
                self.dropped_segments += 1

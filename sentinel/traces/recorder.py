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

Durability: a record is with the operating system when the call returns (no buffer of our own), so
         a killed process loses nothing; a power cut loses what the system had not yet written.
         Nothing is fsynced per step: that would be milliseconds. close() syncs.
Errors:  the constructor, step(), event() and close() raise OSError when the disk fails. The caller
         catches it at its one place and goes on; the recorder stays usable: with the next call it
         tries again in a fresh segment, whose header says that records before it are missing.
Space:   at most `limit_bytes` for the run, all incarnations together: the oldest segments of
         columns go first, then the oldest of scalars; `dropped_segments` counts them.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
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
from sentinel.traces.summary import footer
from sentinel.wire import codec

LIMIT_BYTES = 2 * 1024**3
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


class Recorder:
    """Writes one incarnation of a run; used by one thread."""

    def __init__(
        self,
        directory: Path | str,
        *,
        run: str,
        policy: Policy,
        state: State,
        incarnation: str = "",
        layers: Sequence[Any] = (),
        engine_version: int = ENGINE_VERSION,
        segment_bytes: int = SEGMENT_BYTES,
        limit_bytes: int = LIMIT_BYTES,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Open a new incarnation.

        Args:
            directory: the run's own directory; made if it is not there.
            state: the engine's state before the first record.
            incarnation: id of this process's life; only names the directory.
            layers: the layer table; anything msgpack carries.
            clock: wall clock; without one the records carry no time.

        Raises:
            OSError: the directory or the first segment cannot be made.
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
        self.directory = self._make_directory(_SAFE.sub("_", incarnation) or "0")
        self._numbers = {SCALARS: 0, LAYERS: 0}
        self._scalars: SegmentWriter | None = None
        self._layers: SegmentWriter | None = None
        self._gap = False
        self._closed = False
        self._index = bytearray()  # of the open segment's steps, for its footer
        self._spent = sum(size for _, size, _ in self._all_segments())
        self.dropped_segments = 0
        self.written_bytes = 0
        self._open_scalars()

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
        attempt = before.ledger.attempt
        at = self._clock() if self._clock is not None else None
        columns = bool(observation.columns)
        payload = encode_step(
            observation, decision, outcome, attempt, gate_s, at, has_columns=columns
        )
        try:
            if columns:
                # Columns first: a step on disk implies that its columns are.
                self._append_columns(encode_columns(observation.step, attempt, observation.columns))
            self._append(Kind.STEP, payload, before)
        except OSError:
            self._gap = True
            raise
        self._index += payload[:INDEX_BYTES]

    def event(self, event: Event, state: State) -> None:
        """Record what happened at a safe point; `state` is the engine's state after note().

        Raises:
            OSError: the disk failed; this event is missing from the trace.
        """
        before, self._state = self._state, state
        try:
            self._append(Kind.EVENT, codec.encode_event(event), before)
        except OSError:
            self._gap = True
            raise

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
        self._open_scalars()

    def close(self) -> None:
        """Summarise, sync and close the open segments; a second call does nothing.

        Raises:
            OSError: the disk failed; everything recorded so far still stands.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._close_scalars(sync=True)
        finally:
            self._close_layers(sync=True)

    # -- segments ----------------------------------------------------------------------------

    def _append(self, kind: Kind, payload: bytes, before: State) -> None:
        writer = self._scalars
        if self._closed:
            raise OSError(f"the recorder of {self.directory} is closed")
        if writer is None or self._gap or writer.size >= self._segment_bytes:
            self._close_scalars()
            writer = self._open_scalars(before)
        writer.append(kind, payload)
        self.written_bytes += len(payload)

    def _append_columns(self, payload: bytes) -> None:
        writer = self._layers
        if self._closed:
            raise OSError(f"the recorder of {self.directory} is closed")
        if writer is None or self._gap or writer.size >= self._segment_bytes:
            self._close_layers()
            writer = self._open(LAYERS, self._header(LAYERS))
            self._layers = writer
        writer.append(Kind.COLUMNS, payload)
        self.written_bytes += len(payload)

    def _open_scalars(self, state: State | None = None) -> SegmentWriter:
        header = self._header(SCALARS)
        header.policy = self._policy
        header.state = codec.encode_state(self._state if state is None else state)
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

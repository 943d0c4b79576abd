"""The reader: a recorded run, in order, as far as the disk still tells it.

    reader = Reader("sentinel-runs/r7")         a run, or one of its incarnations
    for item in reader: ...                     StepRecord | Event, in the order they happened
    for record in reader.steps(columns=True)    with per-layer columns joined
    reader.curve()                              step, loss, norm, lr as arrays; layers are not read
    reader.overview()                           extremes of every 64 steps: a long run at a glance
    reader.configuration(incarnation)           what was run: config.json
    reader.damage                               what could not be read, filled in while reading

curve() and overview() read of a closed segment only its end (summary.py); `parsed` names those they
had to go through record by record: still open, cut off, or with a damaged end.

A torn or damaged segment is read up to its first bad byte; what follows it there is counted in
`damage` and ignored, and the next segment is read as usual. Columns lie in files of their own and
are opened only when asked for.

Units:   as in core.types.
Errors:  TraceError when there is nothing to read, or when a file was written by another version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from sentinel.core.errors import ProtocolError, TraceError
from sentinel.core.events import Event
from sentinel.core.types import Column
from sentinel.traces.recorder import CONFIG, list_incarnations
from sentinel.traces.records import (
    EXECUTED_AT,
    HAS_LOSS,
    HAS_NORM,
    INDEX_DTYPE,
    Header,
    StepRecord,
    columns_key,
    decode_columns,
    decode_header,
    decode_step,
    index_bytes,
    measured,
)
from sentinel.traces.segments import (
    LAYERS,
    SCALARS,
    Damage,
    Frame,
    Kind,
    Segment,
    list_segments,
    read_segment,
)
from sentinel.traces.summary import Summary, join, read_index, read_summary, summarise
from sentinel.wire import codec

Item: TypeAlias = StepRecord | Event


@dataclass(frozen=True, slots=True)
class Curve:
    """A run's curve: columns of shape [N], an entry a step; nan also where nothing was measured.

    Attributes:
        loss_measured, norm_measured: tell "not measured" from a measured nan.
        executed: the action carried out, as the number of its Action.
    """

    step: npt.NDArray[np.int64]
    attempt: npt.NDArray[np.int64]
    loss: npt.NDArray[np.float64]
    loss_measured: npt.NDArray[np.bool_]
    grad_norm: npt.NDArray[np.float64]
    norm_measured: npt.NDArray[np.bool_]
    lr: npt.NDArray[np.float64]
    executed: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chapter:
    """One scalars segment: where replay can start.

    Attributes:
        incarnation: directory of the process's life that wrote it.
        header: with the engine's state before its first record; None when that is damaged.
        contiguous: nothing is missing between the chapter before and this one.
    """

    incarnation: Path
    header: Header | None
    contiguous: bool
    segment: Segment = field(repr=False)
    join: _ColumnCursor | None = field(default=None, repr=False)


class Reader:
    """Reads one run; several passes are allowed, each reads the files again."""

    def __init__(self, directory: Path | str) -> None:
        """Find the run's files.

        Args:
            directory: a run's directory, or one incarnation's.

        Raises:
            TraceError: no trace lies there.
        """
        self.directory = Path(directory)
        if self.directory.is_dir() and list_segments(self.directory, SCALARS):
            self.incarnations = [self.directory]
        else:
            self.incarnations = list_incarnations(self.directory)
        if not self.incarnations:
            raise TraceError(
                f"{self.directory} holds no trace; expected a run's directory with subdirectories "
                f"like 0000-<incarnation>/{SCALARS}-00000.seg"
            )
        self._damage: dict[Path, Damage] = {}
        self.parsed: list[Path] = []

    @property
    def damage(self) -> tuple[Damage, ...]:
        """What was found damaged by the passes made so far, in order of the files."""
        return tuple(self._damage[path] for path in sorted(self._damage))

    @property
    def lost_bytes(self) -> int:
        """Bytes that could not be trusted, in all files read so far."""
        return sum(damage.lost_bytes for damage in self._damage.values())

    def chapters(self, *, columns: bool = False) -> Iterator[Chapter]:
        """The scalars segments of all incarnations, in order; go through them in that order.

        Args:
            columns: join per-layer columns when the items of a chapter are read.
        """
        for incarnation in self.incarnations:
            join = _ColumnCursor(self, incarnation) if columns else None
            previous: int | None = None
            intact = True
            for number, path in list_segments(incarnation, SCALARS):
                segment = self.read(path)
                header = self._header(segment)
                contiguous = (
                    intact
                    and previous is not None
                    and number == previous + 1
                    and header is not None
                    and not header.after_gap
                )
                yield Chapter(incarnation, header, contiguous, segment, join)
                previous, intact = number, segment.damage is None

    def items(self, chapter: Chapter) -> Iterator[Item]:
        """Steps and events of one chapter, in order."""
        where = str(chapter.segment.path)
        held: StepRecord | None = None  # until it is clear that no other outcome follows
        for frame in chapter.segment.frames:
            if frame.kind is Kind.OUTCOME:
                if held is not None:
                    held = _corrected(held, bytes(frame.payload), where)
                continue
            if held is not None and frame.kind in (Kind.STEP, Kind.EVENT):
                yield held
                held = None
            if frame.kind is Kind.STEP:
                record = decode_step(frame.payload, where)
                if chapter.join is not None and record.has_columns:
                    columns = chapter.join.find(record.step, record.attempt)
                    if columns is not None:
                        record = record.with_columns(columns)
                held = record
            elif frame.kind is Kind.EVENT:
                try:
                    yield codec.decode_event(bytes(frame.payload))
                except ProtocolError as error:
                    raise TraceError(f"{where}: {error}") from error
        if held is not None:
            yield held

    def __iter__(self) -> Iterator[Item]:
        for chapter in self.chapters():
            yield from self.items(chapter)

    def steps(self, *, columns: bool = False) -> Iterator[StepRecord]:
        """Steps only, in order."""
        for chapter in self.chapters(columns=columns):
            for item in self.items(chapter):
                if isinstance(item, StepRecord):
                    yield item

    def curve(self) -> Curve:
        """Step, loss, norm, rate and action of the whole run."""
        self.parsed = []
        parts = []
        for path in self._scalars():
            part = read_index(path)
            parts.append(self._parse(path) if part is None else part)
        return _curve(parts)

    def overview(self) -> Summary:
        """Extremes of every 64 steps of the whole run; closed segments are not read for it."""
        self.parsed = []
        parts = []
        for path in self._scalars():
            part = read_summary(path)
            if part is None:
                curve = _curve([self._parse(path)])
                part = summarise(curve.step, curve.loss, curve.grad_norm)
            parts.append(part)
        return join(parts)

    def _scalars(self) -> Iterator[Path]:
        for incarnation in self.incarnations:
            for _, path in list_segments(incarnation, SCALARS):
                yield path

    def _parse(self, path: Path) -> bytes:
        """The index of a segment's steps, from the steps themselves."""
        self.parsed.append(path)
        return index_of(self.read(path).frames)[0]

    def configuration(self, incarnation: Path | None = None) -> Mapping[str, Any] | None:
        """The configuration record of an incarnation (default: the last); None without one."""
        place = self.incarnations[-1] if incarnation is None else incarnation
        try:
            found = json.loads((place / CONFIG).read_bytes())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def read(self, path: Path) -> Segment:
        """One segment; its damage is noted."""
        segment = read_segment(path)
        if segment.damage is not None:
            self._damage[path] = segment.damage
        return segment

    @staticmethod
    def _header(segment: Segment) -> Header | None:
        if not segment.frames or segment.frames[0].kind is not Kind.HEADER:
            return None
        return decode_header(segment.frames[0].payload, str(segment.path))


class _ColumnCursor:
    """Walks the layers stream beside the steps; both are in the order of the steps."""

    def __init__(self, reader: Reader, incarnation: Path) -> None:
        self.incarnation = incarnation
        self._records = self._walk(reader)
        self._next = next(self._records, None)

    def _walk(self, reader: Reader) -> Iterator[tuple[tuple[int, int], memoryview, str]]:
        for _, path in list_segments(self.incarnation, LAYERS):
            for frame in reader.read(path).frames:
                if frame.kind is Kind.COLUMNS:
                    yield columns_key(frame.payload), frame.payload, str(path)

    def find(self, step: int, attempt: int) -> Mapping[str, Column] | None:
        """The columns of that step, or None when they are lost."""
        while self._next is not None and self._next[0][0] < step:
            self._next = next(self._records, None)
        if self._next is None or self._next[0] != (step, attempt):
            return None
        _, payload, where = self._next
        return decode_columns(payload, where)


def _corrected(record: StepRecord, payload: bytes, where: str) -> StepRecord:
    try:
        outcome = codec.decode_outcome(payload)
    except ProtocolError as error:
        raise TraceError(f"{where}: {error}") from error
    return replace(record, outcome=outcome) if outcome.step == record.step else record


def index_of(frames: Sequence[Frame]) -> tuple[bytes, dict[int, int]]:
    """The index of the steps among `frames`, with corrected outcomes.

    Returns:
        The index, and by step the actions of outcomes whose steps are not among the frames.
    """
    index, rows, foreign = bytearray(), {}, {}
    for frame in frames:
        if frame.kind is Kind.STEP:
            part = index_bytes(frame.payload)
            rows[int.from_bytes(part[:8], "little", signed=True)] = len(index)
            index += part
        elif frame.kind is Kind.OUTCOME:
            outcome = codec.decode_outcome(bytes(frame.payload))
            at = rows.get(outcome.step)
            if at is None:
                foreign[outcome.step] = int(outcome.executed)
            else:
                index[at + EXECUTED_AT] = outcome.executed
    return bytes(index), foreign


def _curve(parts: Sequence[bytes]) -> Curve:
    rows_N = np.frombuffer(b"".join(parts), INDEX_DTYPE)
    present_N = rows_N["present"]
    return Curve(
        rows_N["step"].astype(np.int64),
        rows_N["attempt"].astype(np.int64),
        measured(rows_N, "loss"),
        (present_N & HAS_LOSS) != 0,
        measured(rows_N, "grad_norm"),
        (present_N & HAS_NORM) != 0,
        measured(rows_N, "lr"),
        rows_N["executed"].astype(np.int64),
    )

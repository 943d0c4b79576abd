"""A sidecar's record of one run: what its trainer reported, on disk before it is acknowledged.

    record = Record(directory, run=..., incarnation=..., policy=..., state=None, seen=seen, ...)
    record.report(frame, decision_bytes, executed, attempt=0, before=state, late=False)
    record.outcome(outcome)                the step before was carried out otherwise after all

The format is that of the trainer's own trace (sentinel.traces), so the same readers, `sentinel
replay` included, work on it. Three things differ, since a report arrives before its outcome is
known and may arrive late: a step stands with the outcome that was decided, and an OUTCOME record
follows where it turned out otherwise; a REPORT record numbers each step, so that a restarted
sidecar knows what it has; late steps stand where they arrived.

`lost_records` counts reports: each that no disk took once, however often it is told, and no
corrections. One of those that fails is written after the next report that does not.

Durability: report() returns after the bytes are with the operating system: a sidecar that is killed
         with -9 loses nothing that it acknowledged. A power cut may take the last seconds.
Errors:  OSError when the disk fails; the report is then not recorded, see Recorder.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sentinel.core.errors import ProtocolError, TraceError
from sentinel.core.events import Event, Restored, RestoreFailed
from sentinel.core.policy import Policy
from sentinel.core.state import State
from sentinel.core.types import Action, Outcome, Source
from sentinel.traces.reader import Chapter, Reader
from sentinel.traces.recorder import Recorder, list_incarnations, safe_name
from sentinel.traces.records import (
    EXECUTED_AT,
    INDEX_BYTES,
    UNKNOWN_ACTION,
    Header,
    StepRecord,
    columns_key,
    decode_columns,
    decode_header,
    encode_reported_columns,
    encode_reported_step,
)
from sentinel.traces.segments import (
    LAYERS,
    SCALARS,
    Kind,
    Segment,
    list_segments,
    read_segment,
)
from sentinel.wire import codec
from sentinel.wire.codec import WireObservation
from sentinel.wire.messages import Frame

SEGMENT_BYTES = 2 * 2**20  # a hundred open indices fit into 20 MB
LATE, DECIDED = 1, 2
_REPORT = struct.Struct("<qB")  # number, flags
_KEPT_OUTCOMES = 4096
LOOK_EVERY = 16
PROBE_BYTES = 4096


class Seen:
    """Which frame numbers have arrived: intervals, so that a long run stays small."""

    def __init__(self, start: int = 0) -> None:
        self.start = start
        self._spans: list[list[int]] = []  # [first, last], ascending, apart
        self._told = start - 1

    def add(self, seq: int) -> bool:
        """Note `seq`; False when it was there already."""
        spans = self._spans
        at = len(spans)
        while at and spans[at - 1][0] > seq:
            at -= 1
        before = spans[at - 1] if at else None
        if before is not None and seq <= before[1]:
            return False
        after = spans[at] if at < len(spans) else None
        joins_before = before is not None and before[1] == seq - 1
        joins_after = after is not None and after[0] == seq + 1
        if joins_before and joins_after and before is not None and after is not None:
            before[1] = after[1]
            del spans[at]
        elif joins_before and before is not None:
            before[1] = seq
        elif joins_after and after is not None:
            after[0] = seq
        else:
            spans.insert(at, [seq, seq])
        return True

    def add_span(self, first: int, last: int) -> None:
        """Note all of first to last."""
        spans = sorted([*self._spans, [first, last]])
        joined = spans[:1]
        for span in spans[1:]:
            if span[0] <= joined[-1][1] + 1:
                joined[-1][1] = max(joined[-1][1], span[1])
            else:
                joined.append(span)
        self._spans = joined

    def told(self, seq: int) -> None:
        """`seq` is known to exist: as long as it has not arrived, it is missing."""
        self._told = max(self._told, seq)

    def __contains__(self, seq: int) -> bool:
        for first, last in reversed(self._spans):
            if first <= seq:
                return seq <= last
        return False

    @property
    def spans(self) -> list[tuple[int, int]]:
        """What has arrived, ascending."""
        return [(first, last) for first, last in self._spans]

    @property
    def highest(self) -> int:
        """The highest number that is known of, or could have arrived before any did."""
        return max(self._spans[-1][1] if self._spans else self.start, self._told)

    @property
    def count(self) -> int:
        """How many have arrived."""
        return sum(last - first + 1 for first, last in self._spans)

    @property
    def missing(self) -> int:
        """Holes: numbers from the start to the highest one known of that have not arrived."""
        last = max(self._spans[-1][1] if self._spans else self.start - 1, self._told)
        return max(last + 1 - self.start - self.count, 0)

    def holes(self, most: int = 64) -> list[tuple[int, int]]:
        """The first holes as spans."""
        found: list[tuple[int, int]] = []
        expected = self.start
        for first, last in self._spans:
            if first > expected:
                found.append((expected, first - 1))
            expected = last + 1
            if len(found) >= most:
                return found
        if self._told >= expected:
            found.append((expected, self._told))
        return found


def try_to_write(directory: Path) -> None:
    """Raise OSError when nothing can be written there: an empty file fits onto a full disk too."""
    directory.mkdir(parents=True, exist_ok=True)
    place = directory / "probe"
    try:
        place.write_bytes(bytes(PROBE_BYTES))
    finally:
        place.unlink(missing_ok=True)


class Record(Recorder):
    """See the module docstring; used by the event loop."""

    def __init__(
        self,
        directory: Path,
        *,
        run: str,
        incarnation: str,
        policy: Policy,
        state: State | None,
        seen: Seen,
        layers: Sequence[Any],
        engine_version: int,
        limit_bytes: int,
        clock: Callable[[], float],
        timer: Callable[[], float],
        segment_bytes: int = SEGMENT_BYTES,
        refused: Seen | None = None,
    ) -> None:
        """Open it.

        Args:
            seen: report numbers on disk already; kept up to date here.
            refused: those that a disk has refused before and that are counted; likewise.
        """
        self.seen = seen
        self.refused = Seen() if refused is None else refused
        self._owed: dict[int, Outcome] = {}  # corrections that no disk took, by step
        self._last: tuple[int, Outcome | None] | None = None  # the newest step, and what it says
        self._told: dict[int, Outcome] = {}  # of the open segment's steps: what is not plain there
        self._early: dict[int, Outcome] = {}  # outcomes of steps that have not arrived yet
        self._looked = 0
        self._foreign = False  # an outcome of an earlier segment's step stands in this one
        super().__init__(
            directory,
            run=run,
            incarnation=incarnation,
            policy=policy,
            state=state,
            layers=layers,
            engine_version=engine_version,
            segment_bytes=segment_bytes,
            limit_bytes=limit_bytes,
            clock=clock,
            timer=timer,
        )

    def limit(self, limit_bytes: int) -> None:
        """From now on the run may take so much disk."""
        self._limit_bytes = limit_bytes

    def report(
        self,
        frame: Frame,
        decision: bytes,
        executed: Action | None,
        *,
        attempt: int,
        events: Sequence[bytes] = (),
        before: State | None,
        handed: bool = False,
        skipped: bool = False,
        flags: int = 0,
    ) -> None:
        """Record one report.

        Args:
            decision: canonical bytes of what was answered, or of the trainer's own; b"" if neither.
            executed: what is going to be done as far as is known now; None: nobody knows.
            events: what happened between the step before and this one, each as canonical bytes.
            before: the engine's state before those events, if it is known.
            handed: `before` was handed over: it holds those events, and a segment begins with it.
            skipped: steps before this one were never reported: a segment begins with `before`, to
                which nothing on disk leads.

        Raises:
            OSError: the disk failed; this report is not recorded.
        """
        seen = frame.observation
        known = self._early.pop(seen.step, None)
        outcome = known
        if outcome is None:
            action = Action.PROCEED if executed is None else executed
            source = Source.SIDECAR if flags & DECIDED else Source.TRAINER
            outcome = Outcome(seen.step, action, action is Action.PROCEED, source)
        step = encode_reported_step(
            _bare(seen),
            seen,
            decision,
            outcome,
            attempt,
            self._clock() if self._clock is not None else None,
        )
        if executed is None and known is None:
            step = step[:EXECUTED_AT] + bytes([UNKNOWN_ACTION]) + step[EXECUTED_AT + 1 :]
        records = [(Kind.EVENT, event) for event in events]
        records.append((Kind.REPORT, _REPORT.pack(frame.seq, flags)))
        records.append((Kind.STEP, step))
        with self._counting(frame.seq):
            if seen.columns:
                # Columns first: a step on disk implies that its columns are.
                self._append_columns(encode_reported_columns(seen.step, attempt, seen.columns))
            writer = self._scalars
            if handed and writer is not None and len(records) > 2:
                writer.append_all(records[:-2])
                records = records[-2:]
            if skipped:
                self._close_scalars()
                self._gap, writer = True, None
            if handed or writer is None or self._gap or writer.size >= self._segment_bytes:
                self._close_scalars()
                self._foreign = False
                self._told = {}
                self._state = before
                writer = self._open_scalars()
            writer.append_all(records)
            self._index += step[:INDEX_BYTES]
            self._kept += 1
        self.written_bytes += len(step)
        self.seen.add(frame.seq)
        self._last = (seen.step, None if step[EXECUTED_AT] == UNKNOWN_ACTION else outcome)
        self._keep(outcome)
        if self._owed:
            self._pay()

    def outcome(self, outcome: Outcome) -> bool:
        """What was really done at a step; True if that is not what its record says already.

        Raises:
            OSError: the disk failed.
        """
        newest = self._last is not None and self._last[0] == outcome.step
        if newest and self._last is not None and _same(self._last[1], outcome):
            return False
        at = self._row(outcome.step)
        if at is not None and _same(self._said(at, outcome.step), outcome):
            return False
        if at is None and (self._last is None or outcome.step > self._last[0] or self._holes()):
            self._early[outcome.step] = outcome
            while len(self._early) > _KEPT_OUTCOMES:
                del self._early[next(iter(self._early))]
        try:
            with self._trying(0):
                if self._scalars is None:
                    return True  # its segment is gone; the outcome waits for its step
                self._scalars.append(Kind.OUTCOME, codec.encode_outcome(outcome))
                if at is None:
                    self._foreign = True
                else:
                    self._index[at + EXECUTED_AT] = outcome.executed
                    self._keep(outcome)
                if newest:
                    self._last = (outcome.step, outcome)
        except OSError:
            if outcome.step not in self._early and len(self._owed) < _KEPT_OUTCOMES:
                self._owed[outcome.step] = outcome
            raise
        return True

    def _keep(self, outcome: Outcome) -> None:
        """Remember what the index does not say of a step of the open segment."""
        if outcome.executed is Action.PROCEED and outcome.applied:
            self._told.pop(outcome.step, None)
        else:
            self._told[outcome.step] = outcome

    def _said(self, at: int, step: int) -> Outcome | None:
        """What the record says was done at a step of the open segment, whose row begins `at`."""
        if self._index[at + EXECUTED_AT] == UNKNOWN_ACTION:
            return None
        return self._told.get(step) or Outcome(step, Action.PROCEED, True)

    def _pay(self) -> None:
        """Write the corrections that no disk took."""
        owed, self._owed = self._owed, {}
        for outcome in owed.values():
            with contextlib.suppress(OSError):  # then it is owed again
                self.outcome(outcome)

    @contextlib.contextmanager
    def _counting(self, seq: int) -> Iterator[None]:
        """One report is written, or lost; counted when it is lost for the first time."""
        try:
            with self._trying(int(seq not in self.refused)):
                yield
        except OSError:
            self.refused.add(seq)
            self.seen.told(seq)  # at once a hole, and not only when a later one is written
            raise

    def after(self, events: Iterable[bytes]) -> None:
        """What happened after the last step, each as canonical bytes: no step comes to bring it.

        Raises:
            OSError: the disk failed.
        """
        with self._trying():
            if self._scalars is not None:
                self._scalars.append_all([(Kind.EVENT, event) for event in events])

    def look_again(self) -> None:
        """See whether the disk takes writes again; else only the next report would tell."""
        if not self.trouble or self._rest_until is not None:
            return
        with contextlib.suppress(OSError):
            try_to_write(self.directory.parent)
            self.trouble = ""

    def _look(self) -> None:
        # Two calls of the system; a directory that somebody deletes is noticed soon enough.
        self._looked += 1
        if self._looked % LOOK_EVERY == 0 or self.trouble:
            super()._look()

    def _holes(self) -> bool:
        return len(self.seen.spans) > 1

    def _row(self, step: int) -> int | None:
        """Where that step's row begins in the open segment's index."""
        index, wanted = self._index, step.to_bytes(8, "little", signed=True)
        at = len(index) - INDEX_BYTES
        while at >= 0:
            if index[at : at + 8] == wanted:
                return at
            at -= INDEX_BYTES
        return None

    def _header(self, stream: str) -> Header:
        header = super()._header(stream)
        if stream == SCALARS:
            header.reports = self.seen.spans
        return header

    def _close_scalars(self, *, sync: bool = False) -> None:
        # Without a footer the segment is read record by record, the foreign outcomes too.
        self._gap, before = self._gap or self._foreign, self._gap
        try:
            super()._close_scalars(sync=sync)
        finally:
            self._gap = before


def _same(said: Outcome | None, told: Outcome) -> bool:
    """Whether both say that the same was done; whose decision a plain step was is not kept."""
    return (
        said is not None
        and (said.executed, said.applied) == (told.executed, told.applied)
        and (said.executed is Action.PROCEED or said.source is told.source)
    )


def reports_on_disk(directory: Path, incarnation: str, start: int = 0) -> Seen:
    """Which reports of an incarnation are recorded; what cannot be read is not."""
    seen = Seen(start)
    for place in reversed(list_incarnations(directory)):
        for _, path in reversed(list_segments(place, SCALARS)):
            segment = read_segment(path)
            if not segment.frames or segment.frames[0].kind is not Kind.HEADER:
                continue  # killed while it was opened
            header = decode_header(segment.frames[0].payload, str(path))
            if header.incarnation == incarnation:
                for frame in segment.frames:
                    if frame.kind is Kind.REPORT:
                        seen.add(_REPORT.unpack_from(frame.payload)[0])
                for first, last in header.reports:  # all that came before
                    seen.add_span(first, last)
            return seen
    return seen


def _newest(directory: Path, incarnation: str) -> Segment | None:
    """The newest segment of an incarnation that holds a step; older ones are not read."""
    for place in reversed(list_incarnations(directory)):
        if not place.name.endswith("-" + safe_name(incarnation)):
            continue
        for _, path in reversed(list_segments(place, SCALARS)):
            segment = read_segment(path)
            if any(frame.kind is Kind.STEP for frame in segment.frames):
                return segment
    return None


def _items(segment: Segment, *, columns: bool) -> Iterator[StepRecord | Event]:
    """Its steps and events, in order."""
    place = segment.path.parent
    known = _columns_since(segment) if columns else {}
    for item in Reader(place).items(Chapter(place, None, False, segment)):
        if isinstance(item, StepRecord) and item.has_columns and columns:
            found = known.get((item.step, item.attempt))
            if found is not None:
                item = item.with_columns(decode_columns(found, str(place)))
        yield item


def _columns_since(segment: Segment) -> dict[tuple[int, int], memoryview]:
    """The columns of its steps; of the layers stream only the end is read."""
    first = next(columns_key(f.payload) for f in segment.frames if f.kind is Kind.STEP)[0]
    found: dict[tuple[int, int], memoryview] = {}
    for _, path in reversed(list_segments(segment.path.parent, LAYERS)):
        keys = [
            (columns_key(frame.payload), frame.payload)
            for frame in read_segment(path).frames
            if frame.kind is Kind.COLUMNS
        ]
        found.update(keys)
        if keys and keys[0][0][0] < first:
            break
    return found


def newest_steps(directory: Path, incarnation: str) -> list[StepRecord]:
    """The steps of the newest segment, without columns; nothing on any trouble."""
    try:
        segment = _newest(directory, incarnation)
        if segment is None:
            return []
        return [item for item in _items(segment, columns=False) if isinstance(item, StepRecord)]
    except (TraceError, OSError):
        return []


def newest_ends(directory: Path, incarnation: str) -> list[Restored | RestoreFailed]:
    """How the rollbacks of the newest segment ended; nothing on any trouble."""
    try:
        segment = _newest(directory, incarnation)
        if segment is None:
            return []
        items = _items(segment, columns=False)
        return [item for item in items if isinstance(item, Restored | RestoreFailed)]
    except (TraceError, ProtocolError, OSError):
        return []


def acted(steps: Iterable[StepRecord]) -> list[StepRecord]:
    """Those that were not simply let through."""
    return [
        step
        for step in steps
        if step.outcome.executed is not Action.PROCEED and step.decision_bytes
    ]


def newest_chapter(directory: Path, incarnation: str) -> Iterator[State | StepRecord | Event]:
    """The newest segment of an incarnation: the state that it starts with, if known, and its items.

    Raises:
        TraceError, ProtocolError: it cannot be read.
    """
    segment = _newest(directory, incarnation)
    if segment is None:
        return
    if segment.frames[0].kind is Kind.HEADER:
        header = decode_header(segment.frames[0].payload, str(segment.path))
        if header.state:
            yield codec.decode_state(header.state)
    yield from _items(segment, columns=True)


def _bare(seen: WireObservation) -> bytes:
    if not seen.columns:
        return codec.encode(seen)  # type: ignore[no-any-return]
    return codec.encode(msgspec.structs.replace(seen, columns={}))  # type: ignore[no-any-return]

"""How a segment ends when it is closed: a long run is drawn without reading its steps.

    frames = footer(index)                    the three last records of a segment
    read_index(path) -> bytes | None          the fixed part of every step, for Reader.curve()
    read_summary(path) -> Summary | None      extremes of every BUCKET steps, for overview()

The index is what curves are made of, copied out of the steps that are ten times its size. The
summary follows it and says where it starts; the trailer, of fixed size, says the same of the
summary. Each has its checksum. A segment that was never closed (a killed process) has none of
them: read its steps instead.

Units:   loss [nats]; norms L2. Shapes: every column of a summary has one entry a bucket [B].
"""

from __future__ import annotations

import contextlib
import dataclasses
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from sentinel.core.errors import TraceError
from sentinel.traces.records import INDEX_BYTES, INDEX_DTYPE, measured
from sentinel.traces.segments import FRAME, Kind

BUCKET = 64
_TRAILER = struct.Struct("<QQ")  # format of the summary, offset of its frame
_SUMMARY_FORMAT = 1

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Summary:
    """Extremes of the finite values in each bucket; nan where a bucket has none.

    Attributes:
        first, last: first and last step of the bucket.
        nonfinite: steps whose loss or norm is not finite, or was not measured.
    """

    first: Ints
    last: Ints
    loss_min: Floats
    loss_max: Floats
    norm_min: Floats
    norm_max: Floats
    nonfinite: Ints


class _Summary(msgspec.Struct, array_like=True):
    first: bytes
    last: bytes
    loss_min: bytes
    loss_max: bytes
    norm_min: bytes
    norm_max: bytes
    nonfinite: bytes
    index: int = 0  # where its frame starts; 0 when there is none


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Summary)


def summarise(steps_N: Ints, loss_N: Floats, norm_N: Floats) -> Summary:
    """Extremes of every BUCKET steps; an unmeasured value comes in as nan."""
    starts = np.arange(0, len(steps_N), BUCKET)
    ends = np.minimum(starts + BUCKET, len(steps_N)) - 1
    bad_N = (~(np.isfinite(loss_N) & np.isfinite(norm_N))).astype(np.int64)
    loss_min_B, loss_max_B = _extremes(loss_N, starts)
    norm_min_B, norm_max_B = _extremes(norm_N, starts)
    return Summary(
        first=steps_N[starts],
        last=steps_N[ends],
        loss_min=loss_min_B,
        loss_max=loss_max_B,
        norm_min=norm_min_B,
        norm_max=norm_max_B,
        nonfinite=np.add.reduceat(bad_N, starts) if len(starts) else bad_N,
    )


def join(parts: Sequence[Summary]) -> Summary:
    """The summaries of consecutive stretches as one."""
    return Summary(
        *(
            np.concatenate([getattr(part, f.name) for part in parts])
            for f in dataclasses.fields(Summary)
        )
    )


def encode_summary(summary: Summary, index: int = 0) -> bytes:
    """Bytes of a summary record that points at the index's frame."""
    return _encoder.encode(
        _Summary(
            first=_bytes(summary.first),
            last=_bytes(summary.last),
            loss_min=_bytes(summary.loss_min),
            loss_max=_bytes(summary.loss_max),
            norm_min=_bytes(summary.norm_min),
            norm_max=_bytes(summary.norm_max),
            nonfinite=_bytes(summary.nonfinite),
            index=index,
        )
    )


def footer(index: bytes, offset: int) -> list[tuple[Kind, bytes]]:
    """The records that close a segment.

    Args:
        index: the first INDEX_BYTES of every step record, one after the other.
        offset: where the first of the records will start.
    """
    rows_N = np.frombuffer(index, INDEX_DTYPE)
    loss_N, norm_N = measured(rows_N, "loss"), measured(rows_N, "grad_norm")
    summary = summarise(rows_N["step"].astype(np.int64), loss_N, norm_N)
    after = offset + FRAME.size + len(index)
    return [
        (Kind.INDEX, index),
        (Kind.SUMMARY, encode_summary(summary, offset)),
        (Kind.TRAILER, encode_trailer(after)),
    ]


def _extremes(values_N: Floats, starts: npt.NDArray[np.intp]) -> tuple[Floats, Floats]:
    if not len(starts):
        return values_N, values_N
    finite_N = np.isfinite(values_N)
    low_B = np.minimum.reduceat(np.where(finite_N, values_N, np.inf), starts)
    high_B = np.maximum.reduceat(np.where(finite_N, values_N, -np.inf), starts)
    none_B = ~np.isfinite(low_B)
    return np.where(none_B, np.nan, low_B), np.where(none_B, np.nan, high_B)


def _bytes(column: npt.NDArray[np.generic]) -> bytes:
    return column.astype(column.dtype.newbyteorder("<")).tobytes()


def encode_trailer(offset: int) -> bytes:
    """Bytes of a trailer record that points at the summary's frame."""
    return _TRAILER.pack(_SUMMARY_FORMAT, offset)


def read_summary(path: Path) -> Summary | None:
    """The summary of a closed segment, or None: open, torn, or written by a later version.

    Raises:
        TraceError: the file cannot be read.
    """
    with _opened(path) as file:
        found = _find_summary(file)
    return None if found is None else decode_summary(found[0])


def read_index(path: Path) -> bytes | None:
    """The index of a closed segment, or None: open, torn, damaged, or without one.

    Raises:
        TraceError: the file cannot be read.
    """
    with _opened(path) as file:
        found = _find_summary(file)
        if found is None:
            return None
        payload, end = found
        start = _decoder.decode(payload).index
        if not 0 < start < end:
            return None
        file.seek(start)
        index = _payload(file.read(end - start), Kind.INDEX)
    return None if index is None or len(index) % INDEX_BYTES else index


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error}") from error


def _find_summary(file: BinaryIO) -> tuple[bytes, int] | None:
    """The summary's payload and where its frame starts."""
    size = FRAME.size + _TRAILER.size
    end = file.seek(0, 2)
    if end < size:
        return None
    file.seek(end - size)
    trailer = _payload(file.read(size), Kind.TRAILER)
    if trailer is None:
        return None
    version, offset = _TRAILER.unpack(trailer)
    if version != _SUMMARY_FORMAT or offset >= end:
        return None
    file.seek(offset)
    payload = _payload(file.read(end - size - offset), Kind.SUMMARY)
    return None if payload is None else (payload, offset)


def decode_summary(payload: bytes) -> Summary:
    """A summary record that passed its checksum."""
    raw = _decoder.decode(payload)
    return Summary(
        first=np.frombuffer(raw.first, "<i8"),
        last=np.frombuffer(raw.last, "<i8"),
        loss_min=np.frombuffer(raw.loss_min, "<f8"),
        loss_max=np.frombuffer(raw.loss_max, "<f8"),
        norm_min=np.frombuffer(raw.norm_min, "<f8"),
        norm_max=np.frombuffer(raw.norm_max, "<f8"),
        nonfinite=np.frombuffer(raw.nonfinite, "<i8"),
    )


def _payload(frame: bytes, kind: Kind) -> bytes | None:
    if len(frame) < FRAME.size:
        return None
    found, length, checksum = FRAME.unpack_from(frame)
    payload = frame[FRAME.size :]
    if found != kind or length != len(payload) or zlib.crc32(payload, found) != checksum:
        return None
    return payload

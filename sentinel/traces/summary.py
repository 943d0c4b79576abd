"""Min/max summaries of a closed segment: a long curve is drawn without reading its steps.

    encode_summary(steps, losses, norms)      one bucket per BUCKET steps
    read_summary(path) -> Summary | None      two small reads at the end of the file

The trailer, the last record of a closed segment, has a fixed size and says where the summary
starts. A segment that was never closed (a killed process) has none: read its steps instead.

Units:   loss [nats]; norms L2. Shapes: every column has one entry a bucket [B].
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from sentinel.core.errors import TraceError
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


def encode_summary(steps: array[int], losses: array[float], norms: array[float]) -> bytes:
    """Bytes of a summary record; an unmeasured value comes in as nan."""
    summary = summarise(
        np.array(steps, np.int64), np.array(losses, np.float64), np.array(norms, np.float64)
    )
    return _encoder.encode(
        _Summary(
            first=_bytes(summary.first),
            last=_bytes(summary.last),
            loss_min=_bytes(summary.loss_min),
            loss_max=_bytes(summary.loss_max),
            norm_min=_bytes(summary.norm_min),
            norm_max=_bytes(summary.norm_max),
            nonfinite=_bytes(summary.nonfinite),
        )
    )


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
    size = FRAME.size + _TRAILER.size
    try:
        with path.open("rb") as file:
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
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error}") from error
    return None if payload is None else decode_summary(payload)


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

"""Segment files: how records lie on disk, and how a damaged file is read as far as it goes.

    writer = SegmentWriter(directory, "scalars", number)
    writer.append(Kind.STEP, payload)      one os.write, no buffer of our own
    segment = read_segment(path)           frames up to the first damaged byte, and what is lost

A segment is 8 bytes of magic and then frames: kind (1 byte), length (4), CRC32 of kind and payload
(4), payload; little-endian. A process that dies loses nothing that append() returned from: the
bytes are with the operating system. A machine that dies may tear or zero the tail; the checksum
finds that, everything before it stands. The next segment starts afresh, so damage in the middle of
a run costs the rest of one segment, not the rest of the run.

Errors:  append() raises OSError (disk full) after it took back what it had written of the frame;
         read_segment() raises TraceError for a file that is no segment of ours or of a later
         format, and never for a damaged one.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from sentinel.core.errors import TraceError

MAGIC = b"SNTLSEG1"  # the last byte is the framing's version; the records' is in the header
FRAME = struct.Struct("<BII")  # kind, payload length, CRC32
SEGMENT_BYTES = 16 * 1024 * 1024
SCALARS, LAYERS = "scalars", "layers"
_NAME = re.compile(r"^(scalars|layers)-(\d{5,})\.seg$")


class Kind(IntEnum):
    """What a frame holds; 0 is no kind, so that zeroed pages are damage."""

    HEADER = 1
    STEP = 2
    EVENT = 3
    COLUMNS = 4
    SUMMARY = 5
    TRAILER = 6
    INDEX = 7
    REPORT = 8  # which report of its trainer the next step is; a sidecar's record
    OUTCOME = 9  # what was really done at an earlier step; a sidecar hears of it one step later


_KINDS = {int(kind): kind for kind in Kind}
_START = re.compile(b"[%s]" % re.escape(bytes(_KINDS)))


@dataclass(frozen=True, slots=True)
class Damage:
    """A stretch of a segment that cannot be trusted.

    Attributes:
        offset: where the first bad frame starts.
        lost_bytes: from there to the end of the file.
        reason: `torn` when the file ends inside a frame, else what is wrong with it.
    """

    path: Path
    offset: int
    lost_bytes: int
    reason: str


class Frame(NamedTuple):
    """One intact record and where it starts; a tuple, because a long run has millions."""

    kind: Kind
    payload: memoryview
    offset: int


@dataclass(frozen=True, slots=True)
class Segment:
    """The intact frames of one file, in order."""

    path: Path
    number: int
    frames: tuple[Frame, ...]
    damage: Damage | None


def segment_name(stream: str, number: int) -> str:
    """File name of a stream's segment."""
    return f"{stream}-{number:05d}.seg"


def list_segments(directory: Path, stream: str) -> list[tuple[int, Path]]:
    """A stream's segments in order of their number; an empty list when there are none."""
    found = []
    for entry in os.scandir(directory):
        match = _NAME.match(entry.name)
        if match is not None and match[1] == stream:
            found.append((int(match[2]), Path(entry.path)))
    return sorted(found)


def encode_frame(kind: Kind, payload: bytes) -> bytes:
    """One framed record."""
    return FRAME.pack(kind, len(payload), zlib.crc32(payload, kind)) + payload


def read_segment(path: Path) -> Segment:
    """Read one segment up to its first damaged byte.

    Raises:
        TraceError: it cannot be opened, or is no segment that this version can read.
    """
    match = _NAME.match(path.name)
    number = int(match[2]) if match else 0
    try:
        data = memoryview(path.read_bytes())
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error}") from error
    magic = bytes(data[: len(MAGIC)])
    if magic != MAGIC:
        if len(magic) < len(MAGIC) and MAGIC.startswith(magic):
            return Segment(path, number, (), Damage(path, 0, len(data), "torn"))
        if magic[:-1] == MAGIC[:-1]:
            raise TraceError(
                f"{path} has framing version {magic[-1:].decode('latin1')!r}, this sentinel reads "
                f"{MAGIC[-1:].decode()!r}; read it with the version that wrote it"
            )
        return Segment(path, number, (), Damage(path, 0, len(data), "no segment magic"))
    frames, reason = _frames(data)
    damage = None
    if reason:
        last = frames[-1] if frames else None
        end = len(MAGIC) if last is None else last.offset + FRAME.size + len(last.payload)
        damage = Damage(path, end, len(data) - end, reason)
    return Segment(path, number, tuple(frames), damage)


def beyond(segment: Segment) -> list[Frame]:
    """Intact frames behind the first damage, to tell how much it cost; they are not to be used.

    Nothing says what stood between them, so that a replay cannot go on with them. None at a tail
    that was torn or zeroed. Takes some seconds for a large file without any.

    Raises:
        TraceError: the file is gone.
    """
    if segment.damage is None:
        return []
    try:
        data = memoryview(segment.path.read_bytes())
    except OSError as error:
        raise TraceError(f"{segment.path} cannot be read: {error}") from error
    found: list[Frame] = []
    at, end = max(segment.damage.offset, len(MAGIC)), len(data)
    while (start := _START.search(data, at)) is not None:
        at = start.start()
        if at + FRAME.size > end:
            break
        number, length, checksum = FRAME.unpack_from(data, at)
        payload = data[at + FRAME.size : at + FRAME.size + length]
        if len(payload) < length or zlib.crc32(payload, number) != checksum:
            at += 1
            continue
        found.append(Frame(_KINDS[number], payload, at))
        at += FRAME.size + length
    return found


def read_header(path: Path) -> bytes | None:
    """The header record of a segment, without reading the rest; None when it is damaged.

    Raises:
        TraceError: it cannot be opened.
    """
    try:
        with path.open("rb") as file:
            start = file.read(len(MAGIC) + FRAME.size)
            if len(start) < len(MAGIC) + FRAME.size or not start.startswith(MAGIC):
                return None
            kind, length, checksum = FRAME.unpack_from(start, len(MAGIC))
            payload = file.read(min(length, os.fstat(file.fileno()).st_size))
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error}") from error
    whole = kind == Kind.HEADER and len(payload) == length
    return payload if whole and zlib.crc32(payload, kind) == checksum else None


def _frames(data: memoryview) -> tuple[list[Frame], str]:
    """The intact frames, and what is wrong after them; "" if nothing is."""
    found: list[Frame] = []
    offset, end = len(MAGIC), len(data)
    unpack, header, crc32 = FRAME.unpack_from, FRAME.size, zlib.crc32
    while offset < end:
        start = offset + header
        if start > end:
            return found, "torn"
        number, length, checksum = unpack(data, offset)
        kind = _KINDS.get(number)
        if kind is None:
            return found, f"unknown record kind {number}"
        stop = start + length
        if stop > end:
            return found, "torn"
        payload = data[start:stop]
        if crc32(payload, number) != checksum:
            return found, "checksum does not match"
        found.append(Frame(kind, payload, offset))
        offset = stop
    return found, ""


class SegmentWriter:
    """One segment file being written; each append is handed to the operating system at once."""

    def __init__(self, directory: Path, stream: str, number: int) -> None:
        self.path = directory / segment_name(stream, number)
        self.number = number
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
        self._fd: int | None = os.open(self.path, flags, 0o644)
        self.size = 0
        self._identity = os.fstat(self._fd)[1:3]  # inode and device
        try:
            self._write(MAGIC)
        except OSError:
            self.close()
            self.path.unlink(missing_ok=True)
            raise

    def append(self, kind: Kind, payload: bytes) -> int:
        """Write one record; returns the offset at which it starts.

        Raises:
            OSError: it could not be written whole; the file ends where it ended before.
        """
        offset = self.size
        self._write(encode_frame(kind, payload))
        return offset

    def append_all(self, records: Iterable[tuple[Kind, bytes]]) -> None:
        """Write several records in one call of the system: all of them, or none.

        Raises:
            OSError: they could not be written whole; the file ends where it ended before.
        """
        self._write(b"".join([encode_frame(kind, payload) for kind, payload in records]))

    def _write(self, data: bytes) -> None:
        if self._fd is None:
            raise OSError(f"{self.path} is closed")
        written = 0
        try:
            written = os.write(self._fd, data)
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError:
            if written:
                # Half a frame would hide every later one from a reader.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, self.size)
            raise
        self.size += len(data)

    @property
    def vanished(self) -> bool:
        """Its name leads elsewhere: it was deleted, or its disk is gone. Appending would work on.

        One stat(), 1.5 us.
        """
        try:
            return os.stat(self.path)[1:3] != self._identity
        except OSError:
            return True

    def close(self, *, sync: bool = False) -> None:
        """Close the file, after syncing it if asked to; a second call does nothing."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            try:
                if sync:
                    os.fsync(fd)
            finally:
                os.close(fd)

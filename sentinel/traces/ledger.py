"""The ledger file: what was done to a run, found again by the process that is started next.

    base = write(directory, saved)           run_dir/<run>/ledger, on the disk, or not at all
    append(directory, saved, base)           run_dir/<run>/ledger.tail, for what matters less
    saved = read(directory)                  both together; None when there is none
    change = change_of(before, after)        whether, and how urgently, it is to be written again
    marker = read_halted(directory)          the HALTED marker, which a person has to clear

The ledger is two lines that need none of our code to be read: a JSON object, and the blake2b-128
of that line's bytes. It is replaced by renaming a temporary file: a process that is killed at any
moment leaves the old one or the new one, and it is on the disk when write() returns (4 to 20 ms).

The tail makes the small moves cheap (50 us): a line each, a JSON object, a blank, its blake2b-128.
A line counts if its `base` is the checksum of the ledger beside it; the last one that is whole has
the newest step and ledger. With the operating system, but not synced: it survives a kill, and a
power cut takes it back to the ledger.

`Mark`s are the states of the weights that a restart can be recognised by: fingerprint, and the
statistics that belonged to them. `Life` is one process of the run and what it started from.

Purity:  no clock, no threads; read and write do what they say.
Errors:  write() raises OSError. read() raises TraceError: damaged, or of a later format.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from sentinel.core.errors import TraceError
from sentinel.core.state import ENGINE_VERSION, Ledger

LEDGER = "ledger"
TAIL = "ledger.tail"
HALTED = "HALTED"  # while it is there, attach() refuses the run
FORMAT = 1
MARKS_KEPT = 8
LIVES_KEPT = 64


@dataclass(frozen=True, slots=True)
class Mark:
    """The weights as they were before `step`.

    Attributes:
        fingerprint: see sentinel_hooks.ledger_file.fingerprint.
        stats: codec.encode_stats of that moment.
        applied: Ledger.in_weights of that moment.
    """

    step: int
    fingerprint: str
    stats: bytes
    applied: int = 0
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class Life:
    """One process of the run.

    Attributes:
        parent: the incarnation before it, "" for the first.
        step: the first step it decided.
        fingerprint: of the weights it started from.
        from_step: the mark that these are; None when they are known from nowhere.
    """

    incarnation: str
    parent: str = ""
    step: int = 0
    fingerprint: str = ""
    from_step: int | None = None


@dataclass(frozen=True, slots=True)
class Saved:
    """What the file holds.

    Attributes:
        step: the next step to be decided when it was written.
        paused_by_file: the pause in the ledger is the PAUSE file's, which ends with the file.
        marks: oldest first.
        lives: oldest first; the last is the one that wrote.
    """

    run: str
    incarnation: str
    step: int
    ledger: Ledger
    policy_hash: str = ""
    engine_version: int = ENGINE_VERSION
    paused_by_file: bool = False
    marks: tuple[Mark, ...] = ()
    lives: tuple[Life, ...] = ()


class Change(enum.IntEnum):
    """How urgently a changed ledger is to be written."""

    NONE = 0
    SOFT = 1  # must outlive the process, not a power cut: append()
    HARD = 2  # must be on the disk before anything else happens: write()


# What a quiet step moves anyway: every one of them is not worth a write.
_HARD = (
    "attempt",
    "rollbacks",
    "last_rollback",
    "pending_restore",
    "stopped",
    "automation",
    "manual_lr",
    "commands",
)
_SOFT = (
    "snapshots",
    "lr",
    "skips",
    "skip_run",
    "spike_count",
    "verdict",
    "shield",
    "rules",
    "incidents",
)


def change_of(before: Ledger, after: Ledger) -> Change:
    """What became of the ledger; compares mostly identities, and takes no time on a quiet step."""
    if before is after:
        return Change.NONE
    for name in _HARD:
        old, new = getattr(before, name), getattr(after, name)
        if old is not new and old != new:
            return Change.HARD
    if after.incidents is not before.incidents and _states(after) != _states(before):
        return Change.HARD
    for name in _SOFT:
        old, new = getattr(before, name), getattr(after, name)
        if old is not new and old != new:
            if name == "snapshots" and _same_registry(before, after):
                continue  # a candidate has one more quiet step
            return Change.SOFT
    return Change.NONE


def _same_registry(before: Ledger, after: Ledger) -> bool:
    return [(s.step, s.healthy) for s in before.snapshots] == [
        (s.step, s.healthy) for s in after.snapshots
    ]


def _states(ledger: Ledger) -> list[tuple[int, str]]:
    return [(i.number, str(i.state)) for i in ledger.incidents]


# ---------------------------------------------------------------- the file


class _File(msgspec.Struct):
    """The JSON object; fields that it does not know are ignored, what is left out has a default."""

    format: int
    run: str
    incarnation: str
    step: int
    ledger: Ledger
    policy_hash: str = ""
    engine_version: int = 0
    paused_by_file: bool = False
    marks: tuple[Mark, ...] = ()  # their statistics as base64 of msgpack
    lives: tuple[Life, ...] = ()


class _Line(msgspec.Struct, omit_defaults=True):
    """One line of the tail."""

    base: str
    step: int
    ledger: Ledger
    paused_by_file: bool = False
    marks: tuple[Mark, ...] = ()  # new ones


_decoder = msgspec.json.Decoder(_File)
_line = msgspec.json.Decoder(_Line)


def encode(saved: Saved) -> bytes:
    """The file's bytes."""
    body = msgspec.json.encode(
        _File(
            FORMAT,
            saved.run,
            saved.incarnation,
            saved.step,
            saved.ledger,
            saved.policy_hash,
            saved.engine_version,
            saved.paused_by_file,
            saved.marks[-MARKS_KEPT:],
            saved.lives[-LIVES_KEPT:],
        )
    )
    return body + b"\n" + _checksum(body) + b"\n"


def decode(data: bytes, where: str = LEDGER) -> Saved:
    """Inverse of encode; raises TraceError."""
    body, _, check = data.partition(b"\n")
    if check.strip() != _checksum(body):
        raise TraceError(f"{where} is damaged: its checksum does not match ({len(data)} bytes)")
    try:
        version = json.loads(body).get("format")
        if version != FORMAT:
            raise TraceError(
                f"{where} is of format {version}, this version reads {FORMAT}; continue the run "
                "with the version that wrote it, or under another run id"
            )
        found = _decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, AttributeError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{where} cannot be read: {error}") from error
    return Saved(
        found.run,
        found.incarnation,
        found.step,
        found.ledger,
        found.policy_hash,
        found.engine_version,
        found.paused_by_file,
        found.marks,
        found.lives,
    )


def _checksum(body: bytes) -> bytes:
    return blake2b(body, digest_size=16).hexdigest().encode()


def read(directory: Path) -> Saved | None:
    """The ledger of a run with its tail, None when there is none; raises TraceError."""
    path = directory / LEDGER
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error}") from error
    saved = decode(data, str(path))
    try:
        lines = (directory / TAIL).read_bytes().splitlines()
    except OSError:
        return saved
    base = _checksum(data.partition(b"\n")[0]).decode()
    for text in lines:
        body, _, check = text.rpartition(b" ")
        if check != _checksum(body):
            continue  # torn
        try:
            line = _line.decode(body)
        except msgspec.MsgspecError:
            continue
        if line.base == base:
            steps = {m.step for m in line.marks}
            marks = (*(m for m in saved.marks if m.step not in steps), *line.marks)
            saved = replace(
                saved,
                step=line.step,
                ledger=line.ledger,
                paused_by_file=line.paused_by_file,
                marks=marks,
            )
    return saved


def set_aside(directory: Path) -> str:
    """Rename a damaged ledger, to be looked into; its new name, "" when that failed."""
    for number in range(1000):
        aside = directory / f"{LEDGER}.damaged-{number}"
        if not aside.exists():
            with contextlib.suppress(OSError):
                os.rename(directory / LEDGER, aside)
                return str(aside)
            break
    return ""


def write(directory: Path, saved: Saved) -> str:
    """Replace the ledger of a run, durably; the base for append().

    Raises OSError, and then the old one still stands.
    """
    data = encode(saved)
    replace_file(directory / LEDGER, data)
    with contextlib.suppress(OSError):
        os.truncate(directory / TAIL, 0)
    return _checksum(data.partition(b"\n")[0]).decode()


def append(directory: Path, saved: Saved, base: str, marks: tuple[Mark, ...] = ()) -> int:
    """Add a line to the tail; its size now. Raises OSError."""
    body = msgspec.json.encode(
        _Line(base, saved.step, saved.ledger, saved.paused_by_file, tuple(marks))
    )
    # A blank line first: a torn line before it must not take this one along.
    data = b"\n" + body + b" " + _checksum(body) + b"\n"
    handle = os.open(directory / TAIL, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        if os.write(handle, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory / TAIL))
        return os.fstat(handle).st_size
    finally:
        os.close(handle)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, durably; raises OSError."""
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with open(new, "wb", buffering=0) as file:
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---------------------------------------------------------------- the marker


def read_halted(directory: Path) -> Mapping[str, Any] | None:
    """What the HALTED marker says, {} when it cannot be read; None when there is none."""
    try:
        text = (directory / HALTED).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError):
        return {}
    try:
        data = json.loads(text)
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def write_halted(directory: Path, **values: Any) -> None:
    """Set the marker, durably; raises OSError."""
    body = json.dumps(values, indent=2, ensure_ascii=False, default=str)
    replace_file(directory / HALTED, f"{body}\n".encode())


def clear_halted(directory: Path) -> Path:
    """Rename the marker, so that attach() takes the run again; its new path. Raises OSError."""
    number = 0
    while (directory / f"{HALTED}.cleared-{number}").exists():
        number += 1
    kept = directory / f"{HALTED}.cleared-{number}"
    os.rename(directory / HALTED, kept)
    return kept

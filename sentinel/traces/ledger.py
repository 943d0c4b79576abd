"""The ledger file: what was done to a run, found again by the process that is started next.

    write(directory, saved, sync=True)       run_dir/<run>/ledger, whole or not at all
    saved = read(directory)                  None when there is none
    change = change_of(before, after)        whether, and how urgently, it is to be written again
    marker = read_halted(directory)          the HALTED marker, which a person has to clear

The file is two lines that need none of our code to be read: a JSON object, and the blake2b-128 of
that line's bytes. It is replaced by renaming a temporary file: a process that is killed at any
moment leaves the old one or the new one. A synced write is on the disk when it returns.

`Mark`s are the states of the weights that a restart can be recognised by: fingerprint, and the
statistics that belonged to them. `Life` is one process of the run and what it started from.

Purity:  no clock, no threads; read and write do what they say.
Errors:  write() raises OSError. read() raises TraceError: damaged, or of a later format.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from sentinel.core.errors import TraceError
from sentinel.core.state import ENGINE_VERSION, Ledger

LEDGER = "ledger"
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
    SOFT = 1  # must outlive the process, not a power cut
    HARD = 2  # must be on the disk before anything else happens


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
    "snapshots",
)
_SOFT = ("lr", "skips", "skip_run", "spike_count", "verdict", "shield", "rules", "incidents")


def change_of(before: Ledger, after: Ledger) -> Change:
    """What became of the ledger; compares mostly identities, and takes no time on a quiet step."""
    if before is after:
        return Change.NONE
    for name in _HARD:
        old, new = getattr(before, name), getattr(after, name)
        if old is not new and old != new:
            if name == "snapshots" and _same_registry(before, after):
                continue  # a candidate has one more quiet step
            return Change.HARD
    if after.incidents is not before.incidents and _states(after) != _states(before):
        return Change.HARD
    for name in _SOFT:
        old, new = getattr(before, name), getattr(after, name)
        if old is not new and old != new:
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


_decoder = msgspec.json.Decoder(_File)


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
    """The ledger of a run, None when there is none; raises TraceError."""
    path = directory / LEDGER
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error}") from error
    return decode(data, str(path))


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


def write(directory: Path, saved: Saved, *, sync: bool) -> None:
    """Replace the ledger of a run; raises OSError, and then the old one still stands."""
    replace_file(directory / LEDGER, encode(saved), sync=sync)


def replace_file(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Write a file whole or not at all; raises OSError."""
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with open(new, "wb", buffering=0) as file:
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]
            if sync:
                os.fsync(file.fileno())
        os.replace(new, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise
    if sync:
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

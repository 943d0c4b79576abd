"""Snapshots on disk: which are there, which are whole, which are healthy. No torch needed.

    for found in list_snapshots(run_directory): print(found.step, found.health, found.reason)
    find_damage(path, run="r7")              "" when every byte is as it was written

A run keeps them under `<run directory>/snapshots/<step>-<attempt>-<number>/`, each in a directory
of its own:

    __0_0.distcp, .metadata    tensors, written by torch.distributed.checkpoint
    rank-0.pt                  everything else: counters, schedulers, RNG, the engine's statistics
    manifest-0.json            one per rank: files, sizes, CRC32, step, attempt, run, parameters
    COMMIT                     written last, when all of the above is on the disk
    HEALTHY or UNHEALTHY       what became of the candidate

Where the user's own checkpoints are adopted, the manifest lists no files and names the checkpoint
under "adopted": whether it is still there is looked at, what is in it is the user's business.

Without a sound COMMIT a directory is torn and never used. COMMIT holds the checksums of the
manifests, the manifests those of the files, COMMIT and the markers one over themselves: a flipped
bit is found wherever it is (torch.distributed.checkpoint alone loads it without a word).

Errors:  damage is an answer here, not an exception; only write_durably() raises OSError.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

FORMAT = 1
DIRECTORY = "snapshots"
COMMIT, HEALTHY, UNHEALTHY = "COMMIT", "HEALTHY", "UNHEALTHY"
_NAME = re.compile(r"^(\d+)-(\d+)-(\d+)$")
_CHUNK = 1 << 20


class Health(StrEnum):
    """What may be done with a snapshot on disk."""

    CANDIDATE = "candidate"  # whole, not confirmed
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"  # an incident fired before it was confirmed, or a rollback passed it
    TORN = "torn"  # its save was cut off
    DAMAGED = "damaged"  # not as it was written


USABLE = frozenset({Health.HEALTHY, Health.CANDIDATE})


@dataclass(frozen=True, slots=True)
class DiskSnapshot:
    """One directory.

    Attributes:
        number: tells apart several of the same step.
        reason: why it is unhealthy, torn or damaged.
        run, saved_at, parameters: from the manifest; "" where there is none to be read.
        weights: hash of the parameters' values.
        adopted: the user's own checkpoint that it stands for.
    """

    path: Path
    step: int
    attempt: int
    number: int
    health: Health
    reason: str = ""
    size_bytes: int = 0
    run: str = ""
    saved_at: str = ""
    parameters: str = ""
    weights: str = ""
    adopted: str = ""


class _DamageError(Exception):
    """Why a snapshot cannot be used."""


def snapshot_name(step: int, attempt: int, number: int) -> str:
    """Directory name; sorts by step."""
    return f"{step:08d}-{attempt}-{number}"


def parse_name(name: str) -> tuple[int, int, int] | None:
    """(step, attempt, number), or None for a directory that is no snapshot."""
    match = _NAME.match(name)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def list_snapshots(run_directory: Path, *, verify: bool = False) -> list[DiskSnapshot]:
    """All snapshots of a run, oldest step first; an empty list when there are none.

    Args:
        verify: read every file and compare checksums, not only the sizes.
    """
    found = []
    try:
        entries = list(os.scandir(run_directory / DIRECTORY))
    except OSError:
        return []
    for entry in entries:
        if parse_name(entry.name) is not None and entry.is_dir():
            found.append(inspect_snapshot(Path(entry.path), verify=verify))
    return sorted(found, key=lambda s: (s.step, s.attempt, s.number))


def inspect_snapshot(path: Path, *, verify: bool = False, run: str | None = None) -> DiskSnapshot:
    """What is known of one directory; see list_snapshots()."""
    step, attempt, number = parse_name(path.name) or (-1, -1, -1)
    size = _tree_bytes(path)
    if not (path / COMMIT).exists():
        reason = "no COMMIT: the save was cut off"
        return DiskSnapshot(path, step, attempt, number, Health.TORN, reason, size)
    try:
        manifest = _check(path, run=run, parameters=None, contents=verify)
    except _DamageError as error:
        return DiskSnapshot(path, step, attempt, number, Health.DAMAGED, str(error), size)
    health, reason = Health.CANDIDATE, ""
    for name, value in ((HEALTHY, Health.HEALTHY), (UNHEALTHY, Health.UNHEALTHY)):
        try:
            marker = _unseal(path / name)
        except FileNotFoundError:
            continue
        except _DamageError as error:
            health, reason = Health.CANDIDATE, f"its marker does not count: {error}"
        else:
            health, reason = value, str(marker.get("reason", ""))
    return DiskSnapshot(
        path,
        step,
        attempt,
        number,
        health,
        reason,
        size,
        str(manifest.get("run", "")),
        str(manifest.get("saved_at", "")),
        str(manifest.get("parameters", "")),
        str(manifest.get("weights", "")),
        str(manifest.get("adopted", "")),
    )


def find_damage(
    path: Path, *, run: str | None = None, parameters: str | None = None, contents: bool = True
) -> str:
    """Why this snapshot may not be used; "" when it is whole.

    Args:
        run: the run that it must belong to.
        parameters: hash of the names, shapes and types that it must hold.
        contents: read every file, not only its size.
    """
    try:
        _check(path, run=run, parameters=parameters, contents=contents)
    except _DamageError as error:
        return str(error)
    return ""


def read_manifest(path: Path, rank: int = 0) -> dict[str, Any]:
    """A rank's manifest, unchecked.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    data: dict[str, Any] = json.loads((path / manifest_name(rank)).read_text(encoding="utf-8"))
    return data


def manifest_name(rank: int) -> str:
    """File name of a rank's manifest."""
    return f"manifest-{rank}.json"


# ---------------------------------------------------------------- writing


def file_entry(path: Path) -> dict[str, Any]:
    """A file as manifests and COMMIT list it."""
    crc, size = checksum(path)
    return {"name": path.name, "size": size, "crc32": f"{crc:08x}"}


def checksum(path: Path) -> tuple[int, int]:
    """(CRC32, size) of a file."""
    crc = size = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
            size += len(chunk)
    return crc, size


def write_manifest(path: Path, rank: int, names: Iterable[str], values: Mapping[str, Any]) -> None:
    """List `names` with their sizes and checksums, durably."""
    files = [file_entry(path / name) for name in names]
    data = {"format": FORMAT, "kind": "sentinel snapshot", "rank": rank, **values, "files": files}
    text = json.dumps(data, indent=1, sort_keys=True) + "\n"
    write_durably(path / manifest_name(rank), text.encode())


def commit(path: Path, ranks: int, values: Mapping[str, Any]) -> None:
    """The last word: from here on the snapshot counts."""
    manifests = [file_entry(path / manifest_name(rank)) for rank in range(ranks)]
    data = {"format": FORMAT, "ranks": ranks, **values, "manifests": manifests}
    write_durably(path / COMMIT, _seal(data))


def mark(path: Path, name: str, values: Mapping[str, Any]) -> None:
    """Write HEALTHY or UNHEALTHY; the other one goes."""
    other = UNHEALTHY if name == HEALTHY else HEALTHY
    write_durably(path / name, _seal({"format": FORMAT, **values}))
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path / other)


def delete(path: Path) -> None:
    """Remove a snapshot; one that is half removed is torn, not damaged.

    Raises:
        OSError: something could not be removed.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path / COMMIT)
        sync_directory(path)
    for entry in list(os.scandir(path)):
        os.unlink(entry.path)
    os.rmdir(path)


def write_durably(path: Path, data: bytes) -> None:
    """The file is whole and on the disk when this returns, or not there at all."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make new names in a directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---------------------------------------------------------------- reading


def _seal(data: Mapping[str, Any]) -> bytes:
    """JSON that carries a checksum of itself."""
    body = json.dumps(data, sort_keys=True)
    outer = {"crc32": f"{zlib.crc32(body.encode()):08x}", "sealed": data}
    return json.dumps(outer, sort_keys=True).encode()


def _unseal(path: Path) -> dict[str, Any]:
    """Inverse of _seal(); FileNotFoundError, or _DamageError when a byte is not as written."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _DamageError(f"{path.name} cannot be read: {error.strerror}") from error
    try:
        outer = json.loads(raw)
        data: dict[str, Any] = outer["sealed"]
        sound = isinstance(data, dict) and _seal(data) == raw
    except (ValueError, KeyError, TypeError):
        sound = False
    if not sound:
        raise _DamageError(f"{path.name} is damaged: it does not match its own checksum")
    if data.get("format") != FORMAT:
        raise _DamageError(
            f"{path.name} is of format {data.get('format')}, this sentinel reads {FORMAT}"
        )
    return data


def _check(
    path: Path, *, run: str | None, parameters: str | None, contents: bool
) -> dict[str, Any]:
    """Rank 0's manifest, after everything was compared."""
    named = parse_name(path.name)
    try:
        sealed = _unseal(path / COMMIT)
    except FileNotFoundError:
        gone = "the directory is gone" if not path.is_dir() else "no COMMIT: the save was cut off"
        raise _DamageError(gone) from None
    first: dict[str, Any] = {}
    for entry in sealed["manifests"]:
        name = str(entry["name"])
        try:
            manifest = json.loads((path / name).read_bytes())
        except FileNotFoundError:
            raise _DamageError(f"{name} is missing") from None
        except OSError as error:
            raise _DamageError(f"{name} cannot be read: {error.strerror}") from error
        except ValueError:
            manifest = None
        if isinstance(manifest, dict):
            owner = manifest.get("run")
            expected = sealed.get("run") if run is None else run
            if owner != expected:
                raise _DamageError(f"{name} is of run {owner!r}, not of {expected!r}")
        _compare(path / name, entry, "COMMIT", contents=True)
        if manifest is None:
            raise _DamageError(f"{name} is no JSON")
        if named is not None and (manifest["step"], manifest["attempt"]) != named[:2]:
            raise _DamageError(
                f"{name} is of step {manifest['step']}, attempt {manifest['attempt']}, and the "
                f"directory's name says step {named[0]}, attempt {named[1]}"
            )
        if parameters is not None and manifest["parameters"] != parameters:
            raise _DamageError(
                f"it holds other parameters (names, shapes or types {manifest['parameters'][:12]}, "
                f"the model has {parameters[:12]})"
            )
        adopted = manifest.get("adopted", "")
        if adopted and not os.path.exists(adopted):
            raise _DamageError(f"the adopted checkpoint {adopted} is gone")
        for file in manifest["files"]:
            _compare(path / file["name"], file, name, contents=contents)
        first = first or manifest
    return first


def _compare(path: Path, entry: Mapping[str, Any], witness: str, *, contents: bool) -> None:
    try:
        size = path.stat().st_size
        if size != entry["size"]:
            raise _DamageError(f"{path.name} has {size} bytes, and {witness} says {entry['size']}")
        if not contents:
            return
        crc, _ = checksum(path)
    except FileNotFoundError:
        raise _DamageError(f"{path.name} is missing") from None
    except OSError as error:
        raise _DamageError(f"{path.name} cannot be read: {error.strerror}") from error
    if f"{crc:08x}" != entry["crc32"]:
        raise _DamageError(
            f"{path.name} is damaged: its CRC32 is {crc:08x}, and {witness} says {entry['crc32']}"
        )


def _tree_bytes(path: Path) -> int:
    try:
        return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
    except OSError:
        return 0

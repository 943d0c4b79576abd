"""Snapshots on disk: which are there, which are whole, which are healthy. No torch needed.

    for found in list_snapshots(run_directory): print(found.step, found.health, found.reason)
    find_damage(path, run="r7")              "" when every byte is as it was written

A run keeps them under `<run directory>/snapshots/<step>-<attempt>-<number>/`, each in a directory
of its own:

    __0_0.distcp, .metadata    tensors, in the files of torch.distributed.checkpoint
    rank-0.pt                  everything else: counters, schedulers, RNG, the engine's statistics
    manifest-0.json            one per rank: files, sizes, CRC32, step, attempt, run, parameters
    COMMIT                     written last, when all of the above is on the disk
    HEALTHY or UNHEALTHY       what became of the candidate

With several ranks each writes __<rank>_0.distcp, rank-<rank>.pt, part-<rank>.pickle and its
manifest; rank 0 then makes .metadata of the parts, which COMMIT lists with its checksum.

Where the user's own checkpoints are adopted, the manifest lists no files and names the checkpoint
under "adopted": whether it is still there is looked at, what is in it is the user's business.

Without a sound COMMIT a directory is torn and never used. COMMIT holds the checksums of the
manifests, the manifests those of the files, COMMIT and the markers one over themselves: a flipped
bit is found wherever it is (torch.distributed.checkpoint alone loads it without a word).

Errors:  damage is an answer here, not an exception; only write_durably() raises OSError.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

FORMAT = 1
DIRECTORY = "snapshots"
COMMIT, HEALTHY, UNHEALTHY = "COMMIT", "HEALTHY", "UNHEALTHY"
_NAME = re.compile(r"^(\d+)-(\d+)-(\d+)$")
_MANIFEST = re.compile(r"^manifest-(\d+)\.json$")
_CHUNK = 1 << 20
# What the manifests of one save have in common.
AGREED = ("run", "step", "attempt", "world", "policy_hash", "engine_version", "parameters", "torch")


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
        ranks: how many wrote it; 0 where nothing says so.
        parts: the ranks whose part is there.
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
    ranks: int = 0
    parts: tuple[int, ...] = ()


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
    parts = _parts(path)
    if not (path / COMMIT).exists():
        ranks = _ranks_of(path, parts)
        reason = "no COMMIT: the save was cut off"
        missing = [rank for rank in range(ranks) if rank not in parts]
        if ranks > 1:
            reason += f"; of its {ranks} ranks {_some(missing) if missing else 'none'} had no part"
        return DiskSnapshot(
            path, step, attempt, number, Health.TORN, reason, size, ranks=ranks, parts=parts
        )
    try:
        manifest = _check(path, run=run, parameters=None, contents=verify)
    except _DamageError as error:
        return DiskSnapshot(
            path,
            step,
            attempt,
            number,
            Health.DAMAGED,
            str(error),
            size,
            ranks=_ranks_of(path, parts),
            parts=parts,
        )
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
        _weights(path, parts, manifest),
        str(manifest.get("adopted", "")),
        len(parts),
        parts,
    )


def find_damage(
    path: Path,
    *,
    run: str | None = None,
    parameters: str | None = None,
    contents: bool = True,
    pace: Callable[[int], None] | None = None,
) -> str:
    """Why this snapshot may not be used; "" when it is whole.

    Args:
        run: the run that it must belong to.
        parameters: hash of the names, shapes and types that it must hold.
        contents: read every file, not only its size.
        pace: told after every so many bytes that were read; it may wait, and what it raises ends
            the reading.
    """
    try:
        _check(path, run=run, parameters=parameters, contents=contents, pace=pace)
    except _DamageError as error:
        return str(error)
    return ""


def find_damaged_file(path: Path, names: Iterable[str]) -> str:
    """Why these files of a snapshot may not be read; "" when every byte is as it was written.

    For whoever reads only some of them; find_damage(contents=False) comes first.
    """
    try:
        witnesses = {
            file["name"]: (file, manifest_name(rank))
            for rank in _parts(path)
            for file in read_manifest(path, rank)["files"]
        }
        witnesses |= {f["name"]: (f, COMMIT) for f in _unseal(path / COMMIT).get("files", ())}
        for name in names:
            if name not in witnesses:
                raise _DamageError(f"{name} is in no manifest")
            entry, witness = witnesses[name]
            _compare(path / name, entry, witness, contents=True)
    except _DamageError as error:
        return str(error)
    except (OSError, ValueError) as error:
        return f"its manifests cannot be read: {error}"
    return ""


def missing_parts(path: Path, ranks: int) -> str:
    """Why the parts of all ranks make no whole yet; "" when COMMIT may be written.

    All must be there and of one save; their files must have the sizes that the manifests say.
    """
    first: dict[str, Any] | None = None
    for rank in range(ranks):
        name = manifest_name(rank)
        try:
            manifest = read_manifest(path, rank)
        except FileNotFoundError:
            return f"{name} is missing"
        except (OSError, ValueError) as error:
            return f"{name} cannot be read: {error}"
        first = first or manifest
        for key in AGREED:
            if manifest.get(key) != first.get(key):
                return (
                    f"{name} says {key} {manifest.get(key)!r}, {manifest_name(0)} says "
                    f"{first.get(key)!r}"
                )
        if (manifest["rank"], manifest["world"]) != (rank, ranks):
            return f"{name} is of rank {manifest['rank']} of {manifest['world']}, not of {ranks}"
        try:
            for file in manifest["files"]:
                _compare(path / file["name"], file, name, contents=False)
        except _DamageError as error:
            return str(error)
    return ""


def ranks_of(path: Path) -> int:
    """How many ranks have written a committed snapshot.

    Raises:
        OSError, ValueError: its COMMIT cannot be read.
    """
    try:
        return int(_unseal(path / COMMIT)["ranks"])
    except _DamageError as error:
        raise ValueError(str(error)) from error


def token(path: Path) -> int:
    """A number that is the same for all who look at the same committed snapshot."""
    return checksum(path / COMMIT)[0]


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


def checksum(path: Path, pace: Callable[[int], None] | None = None) -> tuple[int, int]:
    """(CRC32, size) of a file; for `pace` see find_damage()."""
    crc = size = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
            size += len(chunk)
            if pace is not None:
                pace(len(chunk))
    return crc, size


def write_manifest(path: Path, rank: int, names: Iterable[str], values: Mapping[str, Any]) -> None:
    """List `names` with their sizes and checksums, durably."""
    files = [file_entry(path / name) for name in names]
    data = {"format": FORMAT, "kind": "sentinel snapshot", "rank": rank, **values, "files": files}
    text = json.dumps(data, indent=1, sort_keys=True) + "\n"
    write_durably(path / manifest_name(rank), text.encode())


def commit(path: Path, ranks: int, values: Mapping[str, Any], names: Iterable[str] = ()) -> None:
    """The last word: from here on the snapshot counts.

    Args:
        names: files that belong to all ranks together.
    """
    manifests = [file_entry(path / manifest_name(rank)) for rank in range(ranks)]
    files = [file_entry(path / name) for name in names]
    data = {"format": FORMAT, "ranks": ranks, **values, "manifests": manifests}
    if files:
        data["files"] = files
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
    path: Path,
    *,
    run: str | None,
    parameters: str | None,
    contents: bool,
    pace: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Rank 0's manifest, after everything was compared."""
    named = parse_name(path.name)
    try:
        sealed = _unseal(path / COMMIT)
    except FileNotFoundError:
        gone = "the directory is gone" if not path.is_dir() else "no COMMIT: the save was cut off"
        raise _DamageError(gone) from None
    first: dict[str, Any] = {}
    if len(sealed["manifests"]) != sealed["ranks"]:
        raise _DamageError(
            f"{COMMIT} names {len(sealed['manifests'])} manifests of {sealed['ranks']} ranks"
        )
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
            _compare(path / file["name"], file, name, contents=contents, pace=pace)
        first = first or manifest
    for file in sealed.get("files", ()):
        _compare(path / file["name"], file, COMMIT, contents=contents, pace=pace)
    return first


def _parts(path: Path) -> tuple[int, ...]:
    """The ranks that have written a manifest."""
    try:
        found = [_MANIFEST.match(entry.name) for entry in os.scandir(path)]
    except OSError:
        return ()
    return tuple(sorted(int(match[1]) for match in found if match))


def _ranks_of(path: Path, parts: Iterable[int]) -> int:
    """How many ranks a save is of, as far as any manifest can be read."""
    for rank in parts:
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            return int(read_manifest(path, rank).get("world", 1))
    return 0


def _weights(path: Path, parts: tuple[int, ...], first: Mapping[str, Any]) -> str:
    """Hash of the parameters' values: of one rank as it says, of several over all their hashes."""
    if len(parts) < 2:
        return str(first.get("weights", ""))
    h = hashlib.blake2b(digest_size=16)
    for rank in parts:
        with contextlib.suppress(OSError, ValueError):
            h.update(str(read_manifest(path, rank).get("weights", "")).encode())
    return h.hexdigest()


def _some(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def _compare(
    path: Path,
    entry: Mapping[str, Any],
    witness: str,
    *,
    contents: bool,
    pace: Callable[[int], None] | None = None,
) -> None:
    try:
        size = path.stat().st_size
        if size != entry["size"]:
            raise _DamageError(f"{path.name} has {size} bytes, and {witness} says {entry['size']}")
        if not contents:
            return
        crc, _ = checksum(path, pace)
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

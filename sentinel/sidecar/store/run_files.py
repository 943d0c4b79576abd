"""A run's row once more, in its own folder: data_dir/runs/<run>/run.json.

    run_files.write(directory, row)            0.1 ms; raises OSError
    run_files.read(directory)                  RunRow, or None when there is none that can be read

The database may be a server that is gone, or stand on a disk that is full, at the very moment when
a run is registered or ends. Its folder is where its reports go, so what says whose they are stands
beside them, and a start that finds no row in the database, or an older one, takes this.

Format:  one JSON object, the columns of RunRow and `format`; bytes as base64.
Durability: renamed into place, with the operating system when write() returns, not synced: as the
         reports. A power cut may take it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import msgspec

from sentinel.sidecar.store.models import RunRow

logger = logging.getLogger(__name__)

NAME = "run.json"
FORMAT = 1


class _File(msgspec.Struct, kw_only=True):
    format: int
    name: str
    incarnation: str
    fence: int
    state: str
    engine_version: int
    policy: bytes
    reason: str = ""
    json: bool = False
    session: str = ""
    layers: list[Any] = []
    info: dict[str, Any] = {}
    refused: list[Any] = []
    registered_at: float
    heard_at: float
    ended_at: float | None = None
    last_step: int | None = None


def write(directory: Path, row: RunRow) -> None:
    """Put it there, the folder too; raises OSError."""
    values = {column.key: getattr(row, column.key) for column in RunRow.__table__.columns}
    data = msgspec.json.encode({"format": FORMAT, **values})
    directory.mkdir(parents=True, exist_ok=True)
    place, beside = directory / NAME, directory / (NAME + ".tmp")
    try:
        beside.write_bytes(data)
        os.replace(beside, place)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def read(directory: Path) -> RunRow | None:
    """What was written last."""
    try:
        kept = msgspec.json.decode((directory / NAME).read_bytes(), type=_File)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("%s cannot be read error=%s", directory / NAME, error)
        return None
    if kept.format != FORMAT or kept.name != directory.name:
        logger.warning(
            "%s is not taken: it is of run %r, format %s, and this sentinel reads format %s",
            directory / NAME,
            kept.name,
            kept.format,
            FORMAT,
        )
        return None
    values = msgspec.structs.asdict(kept)
    del values["format"]
    return RunRow(**values)

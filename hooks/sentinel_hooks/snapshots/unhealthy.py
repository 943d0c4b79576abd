"""A note beside a checkpoint of the user's own that was saved inside an incident.

    note(path, run="r7", step=510, incident="i-3", reason="...", when="2026-01-01T00:00:00+00:00")
    warning = warn_if_unhealthy(path)        None, or what to say when a run resumes from it
    forget(path)                             this checkpoint is a good one

A checkpoint that is a folder (HF: checkpoint-500/) has the note inside, as unhealthy.json; one that
is a file (Lightning: last.ckpt) beside it, as last.ckpt.unhealthy.json. Nothing else of the user's
is touched. A note is about what lay there when it was written: when a later checkpoint has taken
the same name, it no longer counts.

Errors:  note() and forget() raise OSError; warn_if_unhealthy() never raises.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path

from sentinel.traces.snapshots import write_durably

logger = logging.getLogger(__name__)

NAME = "unhealthy.json"
_LATER_S = 60.0  # copying a checkpoint and its note may take a while, in either order


def note_path(checkpoint: str | os.PathLike[str]) -> Path:
    """Where the note of this checkpoint lies, or would lie."""
    path = Path(checkpoint)
    return path / NAME if path.is_dir() else path.with_name(f"{path.name}.{NAME}")


def note(
    checkpoint: str | os.PathLike[str],
    *,
    run: str,
    step: int,
    incident: str,
    reason: str,
    when: str,
) -> None:
    """Say beside the checkpoint why nobody should go on from it."""
    data = {
        "kind": "sentinel unhealthy checkpoint",
        "run": run,
        "step": step,
        "incident": incident or None,
        "reason": reason,
        "when": when,
    }
    write_durably(note_path(checkpoint), (json.dumps(data, indent=1) + "\n").encode())


def forget(checkpoint: str | os.PathLike[str]) -> None:
    """Remove the note, if there is one."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(note_path(checkpoint))


def warn_if_unhealthy(checkpoint: str | os.PathLike[str]) -> str | None:
    """What to say to somebody who resumes from this checkpoint; logged too. None: nothing."""
    place = note_path(checkpoint)
    try:
        text = place.read_text(encoding="utf-8")
        if _newest(Path(checkpoint), place) > place.stat().st_mtime + _LATER_S:
            return None
    except (OSError, UnicodeDecodeError):
        return None
    try:
        data = json.loads(text)
        about = f"step {data['step']} of run {data['run']}: {data['reason']}"
        if data.get("incident"):
            about += f" ({data['incident']})"
    except (ValueError, KeyError, TypeError, AttributeError):
        about = "the note cannot be read"
    message = (
        f"the checkpoint {os.fspath(checkpoint)} is listed as unhealthy by {place.name}, {about}; "
        f"resume from an earlier one, or delete {place} if you know better"
    )
    logger.warning("resuming from an unhealthy checkpoint path=%s note=%s", checkpoint, about)
    return message


def _newest(checkpoint: Path, place: Path) -> float:
    """When the checkpoint was last written; 0 where nothing of it can be seen."""
    if not checkpoint.is_dir():
        return checkpoint.stat().st_mtime
    times = [e.stat().st_mtime for e in os.scandir(checkpoint) if e.name != place.name]
    return max(times, default=0.0)

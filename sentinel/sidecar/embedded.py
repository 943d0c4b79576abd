"""What a watched run says of itself, as the database's rows would: read from its own files.

    incidents("r7", state)                 as GET .../incidents: its ledger's, newest first
    executed(directory, "r7", most=1000)   as GET .../decisions: from its trace, newest first

The database knows of runs that report here. An embedded one has its ledger and its trace; what they
do not say (an id of the database, when an incident opened by the clock, who has taken it) is None.

Threads: executed() reads files, of a long run for a moment: in a thread.
Errors:  TraceError when the trace cannot be read, or another version wrote it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from sentinel.core.events import Event, Restored, RestoreFailed
from sentinel.core.state import State
from sentinel.core.types import Action
from sentinel.sidecar.store.writes import FAILED
from sentinel.traces.reader import Chapter, Reader
from sentinel.traces.records import INDEX_DTYPE, UNKNOWN_ACTION, StepRecord
from sentinel.traces.segments import SCALARS, list_segments
from sentinel.traces.summary import read_index


def incidents(run: str, state: State | None) -> list[dict[str, Any]]:
    """See the module docstring."""
    if state is None:
        return []
    return [
        {
            "id": None,
            "run": run,
            "number": one.number,
            "key": one.key,
            "state": str(one.state),
            "severity": str(one.severity),
            "summary": one.summary,
            "opened": one.opened,
            "last": one.last,
            "fired": one.fired,
            "resolved": one.resolved,
            "steps": one.steps,
            "latched": one.latched,
            "layers": list(one.layers),
            "actions": [list(action) for action in one.actions],
            "opened_at": None,
            "updated_at": None,
            "acknowledged_at": None,
            "acknowledged_by": "",
            "silenced_until": None,
            "silenced_by": "",
        }
        for one in reversed(state.ledger.incidents)
    ]


def executed(directory: Path, run: str, most: int) -> list[dict[str, Any]]:
    """See the module docstring; segments whose index has no action in it are not read."""
    reader = Reader(directory)
    found: list[dict[str, Any]] = []
    later: Path | None = None
    for place in reversed(reader.incarnations):
        for _, path in reversed(list_segments(place, SCALARS)):
            if len(found) >= most:
                return found[:most]
            if _acted(path):
                chapter = Chapter(place, None, False, reader.read(path))
                rows = _rows(run, place, reader.items(chapter))
                if later is not None and rows and rows[-1]["action"] == "rollback":
                    _ends_later(rows[-1], reader, later)
                found += reversed(rows)
            later = path
    return found[:most]


def _ends_later(row: dict[str, Any], reader: Reader, path: Path) -> None:
    """The segment may have ended between a rollback's decision and its end."""
    if path.parent.name.partition("-")[2] != row["incarnation"]:
        return
    for item in reader.items(Chapter(path.parent, None, False, reader.read(path))):
        if isinstance(item, StepRecord):
            return
        if isinstance(item, Restored | RestoreFailed):
            if item.step == row["step"] + 1:
                _ended(row, item)
            return


def _rows(run: str, place: Path, items: Iterable[StepRecord | Event]) -> list[dict[str, Any]]:
    """The actions of a segment, each as what was done; see sidecar.store.writes.end_rollback."""
    rows: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, StepRecord):
            if item.outcome.executed is not Action.PROCEED and item.decision_bytes:
                rows.append(_row(run, place, item))
        elif isinstance(item, Restored | RestoreFailed) and rows:
            _ended(rows[-1], item)
    return rows


def _ended(row: dict[str, Any], end: Restored | RestoreFailed) -> None:
    """Write into a rollback's row what it came to."""
    if row["action"] != "rollback":
        return
    if isinstance(end, Restored):
        if end.target != row["target"]:
            row["reason"] += f"; the snapshot of step {row['target']} could not be used"
        row["target"] = end.target
    else:
        row["action"], row["target"] = FAILED, None
        row["reason"] += f"; nothing was restored: {end.reason}"


def _acted(path: Path) -> bool:
    index = read_index(path)
    if index is None:
        return True  # still open, or cut off: only its records say
    done_N = np.frombuffer(index, INDEX_DTYPE)["executed"]
    return bool(np.any((done_N != Action.PROCEED) & (done_N != UNKNOWN_ACTION)))


def _row(run: str, place: Path, record: StepRecord) -> dict[str, Any]:
    decision = record.decision
    return {
        "run": run,
        "incarnation": place.name.partition("-")[2],
        "step": record.step,
        "attempt": record.attempt,
        "action": record.outcome.executed.name.lower(),
        "rule": decision.rule,
        "reason": decision.reason,
        "target": decision.target,
        "source": str(record.outcome.source),
        "at": record.at,
    }

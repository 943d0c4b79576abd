"""What a run can go back to, and whether it is still whole where it lies.

    listed(run, verifier, settings, now)   a row for each snapshot, the newest first; for people
    damaged(run, verifier)                 how many are damaged, for a list of runs; None: not known
    unseen(run, verifier, settings)        why nothing is known of its disk; "" when something is
    doubt(rows, target)                    what speaks against going back there; "" when nothing

The engine knows which snapshots are healthy: quiet steps have passed after each. Whether the copy
on disk is still as it was written only reading it tells (verify.py). A damaged one is warned of and
not refused: the trainer goes back to the copy that it holds in memory while it has one, which
nobody can see from here; where it has none it compares every byte itself, and takes the next older
healthy one. Refusing would keep somebody from the one order that helps.

Units:   steps; `now` and `checked_at` in Unix seconds.
Threads: the event loop's; what the verifier found is replaced whole.
Errors:  none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from sentinel.core.state import Snapshot
from sentinel.sidecar.runs import Run
from sentinel.sidecar.settings import Settings
from sentinel.sidecar.verify import Checked, Result, There, Verifier
from sentinel.traces.snapshots import parse_name


class Copy(StrEnum):
    """What is known of the copy of a snapshot on disk."""

    SOUND = "sound"
    DAMAGED = "damaged"
    UNREAD = "unread"  # there, and not read again yet
    ADOPTED = "adopted"  # the user's own checkpoint: never read
    NONE = "none"  # there is no copy
    UNSEEN = "unseen"  # nobody can tell from here


_MEMORY = {
    "running": "in the trainer's memory only",
    "lost": "in the trainer's memory only, while that process lives",
}
_ENDED = "it was in the memory of a process that has ended"


def listed(
    run: Run, verifier: Verifier | None, settings: Settings, now: float
) -> list[dict[str, Any]]:
    """See the module docstring; of a run whose ledger is not known, what lies on disk."""
    there, found = _seen(run, verifier)
    why = unseen(run, verifier, settings)
    newest = _by_step(there.names)
    known: Iterable[Snapshot | int] = newest if run.state is None else run.state.ledger.snapshots
    rows: list[dict[str, Any]] = []
    for one in known:
        step = one if isinstance(one, int) else one.step
        copy, detail, checked = _copy(newest.get(step), there, found, why, run.run_state)
        rows.append(
            {
                "step": step,
                "healthy": None if isinstance(one, int) else one.healthy,
                "quiet": None if isinstance(one, int) else one.quiet,
                "name": newest.get(step),
                "disk": str(copy),
                "detail": detail,
                "checked_at": None if checked is None else checked.checked_at,
                "checked_s_ago": None
                if checked is None
                else round(max(now - checked.checked_at, 0.0), 3),
                "warning": "",
            }
        )
    rows.sort(key=lambda row: row["step"], reverse=True)
    for row in rows:
        row["warning"] = _warning(row, rows, run.run_state)
    return rows


def damaged(run: Run, verifier: Verifier | None) -> int | None:
    """See the module docstring."""
    if verifier is None or run.name not in verifier.there:
        return None
    there, found = _seen(run, verifier)
    newest = _by_step(there.names)
    steps = newest if run.state is None else {s.step for s in run.state.ledger.snapshots}
    broken = {c.name for c in found.values() if c.result is Result.DAMAGED}
    return sum(newest.get(step) in broken for step in steps)


def unseen(run: Run, verifier: Verifier | None, settings: Settings) -> str:
    """See the module docstring."""
    if not settings.verify_every_s:
        return "this sidecar reads no snapshots: it was started with --verify-every 0"
    if verifier is None:
        return (
            "this sidecar sees no snapshots: start it with --run-dir RUN_DIR, where the trainers' "
            "run_dir is to be seen"
        )
    there = verifier.there.get(run.name)
    if there is None:
        if run.ended is None:
            return "this sidecar has not looked for its snapshots yet"
        return (
            "it has been over for too long: this sidecar does not look for its snapshots any more"
        )
    if not there.directory:
        folders = ", ".join(map(str, (*settings.run_dirs, *settings.watch)))
        return (
            f"this run has no directory in {folders}: its run_dir is another one, or this sidecar "
            "cannot see into it"
        )
    return ""


def doubt(rows: list[dict[str, Any]], target: int | None) -> str:
    """See the module docstring.

    Args:
        rows: as listed() gives them.
        target: the step that was asked for; None: the newest healthy one.
    """
    for row in rows:
        if row["healthy"] and target in (None, row["step"]):
            return str(row["warning"])
    return ""


def _seen(run: Run, verifier: Verifier | None) -> tuple[There, Mapping[str, Checked]]:
    if verifier is None:
        return There(directory=False), {}
    none = There(directory=False)
    return verifier.there.get(run.name, none), verifier.found.get(run.name, {})


def _by_step(names: Iterable[str]) -> dict[int, str]:
    """The copy of each step that a trainer would read: the last one that was written."""
    found: dict[int, tuple[tuple[int, int], str]] = {}
    for name in names:
        step, attempt, number = parse_name(name) or (-1, 0, 0)
        if step not in found or found[step][0] < (attempt, number):
            found[step] = (attempt, number), name
    return {step: name for step, (_, name) in found.items()}


def _copy(
    name: str | None, there: There, found: Mapping[str, Checked], why: str, run_state: str
) -> tuple[Copy, str, Checked | None]:
    if why:
        return Copy.UNSEEN, why, None
    if name is None:
        return Copy.NONE, f"there is no copy on disk: {_MEMORY.get(run_state, _ENDED)}", None
    if name in there.adopted:
        return Copy.ADOPTED, "it is your own checkpoint: what is in it is not checked", None
    checked = found.get(name)
    if checked is None:
        return Copy.UNREAD, "it is on disk, and was not read again yet", None
    if checked.result is Result.DAMAGED:
        return Copy.DAMAGED, checked.reason, checked
    return Copy.SOUND, "", checked


def _warning(row: dict[str, Any], rows: list[dict[str, Any]], run_state: str) -> str:
    """What a person should know who is about to go back to it; the newest row comes first."""
    if row["disk"] != Copy.DAMAGED:
        return ""
    said = f"the snapshot of step {row['step']} is damaged on disk ({row['detail']}). "
    older = [r for r in rows if r["healthy"] and r["step"] < row["step"]]
    usable = next((r for r in older if r["disk"] != Copy.DAMAGED), None)
    whole = "verified" if usable is not None and usable["disk"] == Copy.SOUND else "not verified"
    if run_state not in _MEMORY:
        if usable is None:
            return said + "No older healthy snapshot is known to be whole"
        return said + f"The next older healthy one is of step {usable['step']} ({whole})"
    said += "A rollback to it takes the copy in the trainer's memory, if there still is one; else "
    if usable is None:
        return said + (
            "an older one that is whole, and none is known to be: without one nothing is put back, "
            "the step is skipped and the learning rate cut"
        )
    return said + f"the next older one, of step {usable['step']} ({whole})"

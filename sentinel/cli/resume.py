"""`sentinel resume RUN`: a person clears the HALTED marker, so that the run may be started again.

    sentinel resume sentinel-runs/r7         says why it was halted, and clears it
    sentinel resume r7 --show                only says why

The marker is renamed, not deleted: it holds the last steps before the halt.

Exit:    0; 2 when the run is not halted.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from sentinel.cli.failing import NothingError, find_run
from sentinel.core.errors import TraceError
from sentinel.traces import ledger
from sentinel.traces.places import run_dir

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "resume",
        help="clear the marker of a run that was halted",
        description="Say why a run was halted, and let it be started again under its run id. "
        "Budgets, cooldowns and incidents stay as they are.",
    )
    parser.add_argument(
        "directory", metavar="RUN", help="a run's directory, or its id under --run-dir"
    )
    parser.add_argument("--run-dir", default=run_dir(), help="where runs lie (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--show", action="store_true", help="say why, clear nothing")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the subcommand out; returns the exit status."""
    directory = find_run(args.directory, args.run_dir)
    marker = ledger.read_halted(directory)
    if marker is None:
        raise NothingError(f"run {directory.name} is not halted: it holds no {ledger.HALTED}")
    step, reason = marker.get("step"), marker.get("reason", "no reason is given")
    told = {"run": directory.name, "step": step, "reason": reason, "cleared": None}
    if not args.json:
        print(f"halted at step {'?' if step is None else step}: {reason}")
    if args.show:
        if args.json:
            print(json.dumps(told))
        return 0
    try:
        kept = ledger.clear_halted(directory)
    except OSError as error:
        raise TraceError(
            f"{directory / ledger.HALTED} cannot be cleared: {error.strerror}"
        ) from error
    if args.json:
        print(json.dumps(told | {"cleared": str(kept)}))
    else:
        print(f"cleared (kept as {kept}); start the run again with the same run id")
    return 0

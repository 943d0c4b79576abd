"""`sentinel resume RUN`: a person clears the HALTED marker, so that the run may be started again.

    sentinel resume sentinel-runs/r7         says why it was halted, and clears it
    sentinel resume r7 --show                only says why

The marker is renamed, not deleted: it holds the last steps before the halt.

Exit:    0; 2 when the run is not halted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sentinel.core.errors import TraceError
from sentinel.traces import ledger

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
    parser.add_argument("--run-dir", default="sentinel-runs", help="where runs lie (%(default)s)")
    parser.add_argument("--show", action="store_true", help="say why, clear nothing")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the subcommand out; returns the exit status."""
    directory = Path(args.directory)
    if not directory.is_dir():
        directory = Path(args.run_dir) / args.directory
    marker = ledger.read_halted(directory)
    if marker is None:
        print(f"sentinel resume: {directory / ledger.HALTED} is not there", file=sys.stderr)
        return 2
    print(f"halted at step {marker.get('step', '?')}: {marker.get('reason', 'no reason is given')}")
    if args.show:
        return 0
    try:
        kept = ledger.clear_halted(directory)
    except OSError as error:
        raise TraceError(
            f"{directory / ledger.HALTED} cannot be cleared: {error.strerror}"
        ) from error
    print(f"cleared (kept as {kept}); start the run again with the same run id")
    return 0

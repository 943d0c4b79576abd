"""`sentinel snapshots RUN`: what a run has on disk, and what of it can be used.

    sentinel snapshots sentinel-runs/r7              steps, candidate/healthy/..., sizes, ranks
    sentinel snapshots r7 --verify                   read every byte and compare checksums
    sentinel snapshots r7 --json                     the same for programs

Exit:    0; 1 when one is damaged (without --verify only by its sizes and manifests); 2 when there
         is no snapshot.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from sentinel.cli.failing import find_run
from sentinel.traces.places import run_dir
from sentinel.traces.snapshots import DIRECTORY, DiskSnapshot, Health, list_snapshots

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "snapshots",
        help="what a run has on disk to roll back to",
        description="List a run's snapshots on disk: steps, sizes, and which are healthy, "
        "candidates, torn or damaged, and why.",
    )
    parser.add_argument(
        "directory", metavar="RUN", help="a run's directory, or its id under --run-dir"
    )
    parser.add_argument("--verify", action="store_true", help="read all files, compare checksums")
    parser.add_argument("--run-dir", default=run_dir(), help="where runs lie (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the subcommand out; returns the exit status."""
    directory = find_run(args.directory, args.run_dir)
    found = list_snapshots(directory, verify=args.verify)
    if args.json:
        rows = [_as_dict(snapshot) for snapshot in found]
        print(json.dumps({"schema": 1, "verified": args.verify, "snapshots": rows}, indent=2))
    elif found:
        print("\n".join(_lines(found, verified=args.verify)))
    if not found:
        print(f"sentinel snapshots: none in {directory / DIRECTORY}", file=sys.stderr)
        return 2
    return 1 if any(s.health is Health.DAMAGED for s in found) else 0


def _as_dict(snapshot: DiskSnapshot) -> dict[str, Any]:
    return {
        "name": snapshot.path.name,
        "step": snapshot.step,
        "attempt": snapshot.attempt,
        "health": str(snapshot.health),
        "reason": snapshot.reason,
        "size_bytes": snapshot.size_bytes,
        "run": snapshot.run,
        "saved_at": snapshot.saved_at,
        "parameters": snapshot.parameters,
        "weights": snapshot.weights,
        "adopted": snapshot.adopted,
        "ranks": snapshot.ranks,
        "parts": list(snapshot.parts),
    }


def _ranks(snapshot: DiskSnapshot) -> str:
    """How many ranks wrote it, or how many of them had when it was cut off."""
    if not snapshot.ranks:
        return "-"
    if len(snapshot.parts) == snapshot.ranks:
        return str(snapshot.ranks)
    return f"{len(snapshot.parts)}/{snapshot.ranks}"


def _lines(found: list[DiskSnapshot], *, verified: bool) -> list[str]:
    several = any(s.ranks > 1 for s in found)
    rows = [("step", "attempt", "state", "MiB", "ranks", "saved", "")]
    rows += [
        (
            str(s.step),
            str(s.attempt),
            str(s.health),
            f"{s.size_bytes / 2**20:.1f}",
            _ranks(s),
            s.saved_at or "-",
            "; ".join(filter(None, (s.reason, s.adopted and f"adopted {s.adopted}"))),
        )
        for s in found
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    lines = []
    for step, attempt, state, size, ranks, saved, reason in rows:
        cells = [
            f"{step:>{widths[0]}}",
            f"{attempt:>{widths[1]}}",
            f"{state:<{widths[2]}}",
            f"{size:>{widths[3]}}",
            *([f"{ranks:>{widths[4]}}"] if several else []),
            f"{saved:<{widths[5]}}",
            reason,
        ]
        lines.append("  ".join(cells).rstrip())
    how = "every byte compared" if verified else "sizes compared; --verify compares every byte"
    lines.append(f"{len(found)} in {found[0].path.parent}; {how}")
    return lines

"""The command line of the demo; `sentinel demo` starts it."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from sentinel.core.errors import SentinelError
from sentinel.wire import codec
from sentinel_hooks.demo import faults, table
from sentinel_hooks.demo.corpus import DemoError
from sentinel_hooks.demo.model import Shape
from sentinel_hooks.demo.runner import Progress, Run, run_all
from sentinel_hooks.demo.sidecar import Sidecar, missing
from sentinel_hooks.demo.train import Settings

# Trains in a minute; too small and too noisy for the numbers to mean much.
QUICK = Shape(width=64, heads=4, layers=2, rows=32)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line's arguments."""
    parser = argparse.ArgumentParser(
        prog="sentinel demo",
        description="Train a small GPT on Python's own sources, break it in four ways, and "
        "compare the same run unprotected and protected, with a sidecar that decides.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    parser.add_argument("--seed", type=int, default=0, help="of model, data and fault steps")
    parser.add_argument(
        "--worlds",
        default=",".join(faults.FAULTS),
        metavar="LIST",
        help="which of them, comma-separated (default: all of %(default)s)",
    )
    parser.add_argument("--steps", type=int, default=240, help="of each run (default: 240)")
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model: shows the machinery, not the numbers"
    )
    parser.add_argument(
        "--embedded", action="store_true", help="without a sidecar: the trainer's engine decides"
    )
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="keep traces and logs there (see replay)"
    )
    return parser.parse_args(arguments)


def plan(options: argparse.Namespace, sidecar: str | None, run_dir: Path) -> list[Settings]:
    """All runs, unprotected and protected of one world next to each other.

    The fault-free unprotected run is always there: everything is compared with it.
    """
    worlds = [key for key in faults.FAULTS if key in _worlds(options)]
    steps = faults.draw_steps(options.seed)
    pairs = [("none", False)]
    pairs += [(key, how) for key in worlds for how in (False, True) if (key, how) != pairs[0]]
    return [
        Settings(
            fault=key,
            fault_step=steps[key],
            protected=protected,
            seed=options.seed,
            steps=options.steps,
            run_id=f"demo-{key}",
            run_dir=str(run_dir),
            sidecar=sidecar,
            shape=QUICK if options.quick else Shape(),
        )
        for key, protected in pairs
    ]


def _worlds(options: argparse.Namespace) -> list[str]:
    return [word.strip() for word in options.worlds.split(",") if word.strip()]


def check(options: argparse.Namespace) -> None:
    """Refuse what would only fail after minutes of training.

    Raises:
        DemoError: with the option, the bound and the value.
    """
    faults.check(_worlds(options), options.steps)
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise DemoError(
            f"--json must name a file in a folder that exists, no folder there: "
            f"{options.json.parent}"
        )


def demo(options: argparse.Namespace) -> dict[str, Any]:
    """Run the whole demo; returns the report.

    Raises:
        SentinelError: a run broke, or the sidecar did not start.
    """
    progress = Progress(sys.stdout)
    now = datetime.now(UTC).replace(microsecond=0)
    started = time.perf_counter()
    with ExitStack() as stack:
        # Short: the path of a Unix socket may have 107 characters.
        scratch = Path(tempfile.mkdtemp(prefix="sentinel-demo-"))
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        folder = scratch
        if options.run_dir is not None:
            folder = options.run_dir / f"demo-{now:%Y%m%dT%H%M%SZ}"
            folder.mkdir(parents=True)
        sidecar, why_not = _start_sidecar(options, stack, scratch)
        before = sidecar.metrics() if sidecar is not None else {}
        todo = plan(options, sidecar.url if sidecar is not None else None, folder)
        _introduce(options, todo, progress, why_not)
        runs = run_all(todo, folder, progress, _Announcer(progress))
        told: dict[str, Any] = {"used": sidecar is not None, "why_not": why_not, "metrics": {}}
        if sidecar is not None:
            told["metrics"] = table.moved(before, sidecar.metrics())
    wall_s = time.perf_counter() - started
    return table.build(runs, measured_at=f"{now:%Y-%m-%dT%H:%M:%SZ}", wall_s=wall_s, sidecar=told)


def _start_sidecar(
    options: argparse.Namespace, stack: ExitStack, folder: Path
) -> tuple[Sidecar | None, str | None]:
    if options.embedded:
        return None, "--embedded"
    if absent := missing():
        return None, f"{', '.join(absent)} not installed (pip install 'torch-sentinel[sidecar]')"
    return stack.enter_context(Sidecar(folder)), None


def _introduce(
    options: argparse.Namespace, todo: Sequence[Settings], progress: Progress, why_not: str | None
) -> None:
    who = f"no sidecar: {why_not}" if why_not else "a sidecar is up and decides"
    progress.line(f"sentinel demo: {len(todo)} runs, two at a time; {who}")
    falls = ", ".join(
        f"{run.fault} {run.fault_step}" for run in todo if run.protected and run.fault != "none"
    )
    progress.line(f"seed {options.seed}; faults fall at step: {falls or 'none'}")


class _Announcer:
    """Says in one line how a world ended, once both of its runs have."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._said: set[str] = set()

    def __call__(self, runs: Sequence[Run]) -> None:
        losses: dict[str, dict[bool, float]] = {}
        for run in runs:
            if run.result is not None:
                of_world = losses.setdefault(run.settings.fault, {})
                of_world[run.settings.protected] = float(run.result["validation_loss"])
        for key, of_world in losses.items():
            if len(of_world) == 2 and key not in self._said:
                self._said.add(key)
                self._progress.line(
                    f"{faults.FAULTS[key].label}: validation loss "
                    f"{of_world[False]:.3f} unprotected, {of_world[True]:.3f} protected"
                )


def _stop(number: int, frame: FrameType | None) -> None:
    """A polite end ends the processes too that were started here."""
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status: 0, 1 when a run broke, 2 for bad options."""
    options = parse(arguments)
    try:
        check(options)
    except SentinelError as error:
        print(f"sentinel demo: {error}", file=sys.stderr)
        return 2
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        report = demo(options)
    except SentinelError as error:
        print(f"\nsentinel demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsentinel demo: stopped", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    print()
    print("\n".join(table.draw(report)))
    if options.json is not None:
        options.json.write_bytes(codec.to_json(report, indent=1) + b"\n")
        print(f"\nwritten to {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

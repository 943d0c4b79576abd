"""`sentinel replay RUN`: compute a recorded run's decisions again and compare.

    sentinel replay sentinel-runs/r7                    is every decision the same, byte for byte?
    sentinel replay r7 --policy stricter.toml           what would another policy have decided?
    sentinel replay r7 --json                           the same for programs

Exit:    0 the same, or another policy was asked about; 1 a decision or a state differs under the
         recorded policy, or the record is not complete: more is missing than was dropped for space
         or torn off its end; 2 there is nothing to replay or the policy makes no sense.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from sentinel.cli import words
from sentinel.cli.failing import NothingError, UsageError, find_run
from sentinel.core.errors import ConfigError, SentinelError
from sentinel.core.policy import Policy
from sentinel.core.state import ENGINE_VERSION
from sentinel.core.types import Decision
from sentinel.traces.places import run_dir
from sentinel.traces.replay import ReplayReport, replay
from sentinel.wire import codec

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

SHOWN = 20


def add_parser(subparsers: Subparsers) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "replay",
        help="compute a recorded run's decisions again and compare",
        description="Compute a recorded run's decisions again. With the recorded policy they must "
        "be equal byte for byte; with --policy, list what would have been decided differently.",
    )
    parser.add_argument(
        "directory", metavar="RUN", help="a run's directory, or its id under --run-dir"
    )
    parser.add_argument("--policy", help="a shipped policy's name or a TOML file")
    parser.add_argument("--run-dir", default=run_dir(), help="where runs lie (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--limit", type=int, default=SHOWN, help="differences to list (%(default)s)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the subcommand out; returns the exit status."""
    try:
        policy = None if args.policy is None else Policy.load(args.policy)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    directory = find_run(args.directory, args.run_dir)
    try:
        report = replay(directory, policy, keep=max(args.limit, 0))
    except SentinelError as error:
        raise NothingError(str(error)) from error
    if args.json:
        print(codec.to_json(_as_dict(report), indent=2).decode())
    else:
        print("\n".join(_lines(report)))
    return 0 if (report.identical and report.complete) or not report.same_policy else 1


def _as_dict(report: ReplayReport) -> dict[str, Any]:
    shown: dict[str, Any] = codec.plain(report)
    return {
        "schema": 1,
        **shown,
        "identical": report.identical,
        "complete": report.complete,
        "lost_bytes": report.lost_bytes,
    }


def _lines(report: ReplayReport) -> list[str]:
    what = "the recorded policy" if report.same_policy else "another policy, open loop"
    head = (
        f"run {report.run or '?'}: {report.steps} steps and {report.events} events in "
        f"{report.segments} segments of {report.incarnations} incarnation(s), "
        f"policy {report.policy or '?'} ({what})"
    )
    damaged = (
        f"damaged: {d.path} from byte {d.offset} on ({d.reason}); {d.lost_bytes} bytes ignored"
        for d in report.damage
    )
    lines = [head]
    if report.recorded_with:
        lines.append(f"recorded with {report.recorded_with} (config.json has the rest)")
    lines += damaged
    if report.missing:
        where = "are damaged or not in the trace" if report.broken else "are not in the trace"
        lines.append(f"missing: {report.missing} steps {where}")
    if report.unverified:
        lines.append(
            f"not verified: {report.unverified} steps; something they depend on is missing"
        )
    if report.state_mismatches:
        lines.append(
            f"state: {report.state_mismatches} segment(s) start with a state that their past does "
            "not lead to"
        )
    if report.different == 0:
        verdict = "equal the recorded ones byte for byte" if report.same_policy else "are the same"
        which = "all" if report.complete else "the record is not complete; the"
        lines.append(f"{which} {report.steps} recomputed decisions {verdict}")
        return lines + _incidents(report)
    lines.append(f"{report.different} of {report.steps} decisions differ")
    others = [v for v in report.engine_versions if v != ENGINE_VERSION]
    if others and report.same_policy:
        lines.append(
            f"recorded by engine version {', '.join(map(str, others))}, computed again by "
            f"{ENGINE_VERSION}, which decides by other rules: whether the record is true, the "
            "version that recorded it can say"
        )
    if not report.differences:
        return lines + _incidents(report)
    rows = [("step", "recorded", "recomputed")]
    rows += [(str(d.step), _short(d.recorded), _short(d.recomputed)) for d in report.differences]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    lines += [f"{a:>{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows]
    left = report.different - len(report.differences)
    if left:
        lines.append(f"... and {left} more (--limit)")
    first = report.differences[0]
    lines.append(f"first difference, step {first.step} (attempt {first.attempt}):")
    lines.append(f"  recorded    {first.recorded}")
    lines.append(f"  recomputed  {first.recomputed}")
    return lines + _incidents(report)


def _incidents(report: ReplayReport) -> list[str]:
    """The incidents that the replay ended with, as `sentinel incidents` shows them."""
    if not report.incidents:
        return ["no incidents"]
    head = "incidents:" if report.same_policy else "incidents under this policy:"
    lines = [head]
    targets = dict(report.targets)
    for incident in report.incidents:
        told = words.incident_lines(codec.plain(incident), report.layers, targets=targets)
        lines += [f"  {line}" for line in told]
    return lines


def _short(decision: Decision) -> str:
    text = decision.action.name
    if decision.rule:
        text += f" {decision.rule}"
    if decision.target is not None:
        text += f" -> {decision.target}"
    if decision.would is not decision.action:
        text += f" (would {decision.would.name})"
    return text

"""`sentinel dashboards`: what Grafana and Prometheus are told, built, compared and pushed.

    sentinel dashboards build                        write grafana/ and deploy/ in a checkout
    sentinel dashboards build --check                only say whether they are up to date
    sentinel dashboards diff --url https://grafana   what a push would change
    sentinel dashboards push --url https://grafana   dashboard, folder and alert rules; idempotent
    sentinel dashboards push --dry-run ...           ask, say, and write nothing

The token comes from --token-file, $SENTINEL_GRAFANA_TOKEN_FILE or $SENTINEL_GRAFANA_TOKEN.

Exit:    0; 1 when something cannot be done, when `diff` finds a difference, or when `build
         --check` finds a stale file; 2 for bad usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "dashboards",
        help="Grafana dashboards and alert rules: build, diff, push",
        description="Grafana dashboards and alert rules, generated from the metric catalogue.",
    )
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")

    build_ = verbs.add_parser("build", help="write the generated files of a checkout")
    build_.add_argument("--root", default=".", metavar="DIR", help="the checkout (%(default)s)")
    build_.add_argument("--check", action="store_true", help="write nothing; 1 if one is stale")
    build_.add_argument("--runbooks", metavar="URL", help="where docs/operating.md is read")
    build_.add_argument("--json", action="store_true", help="print JSON")
    build_.set_defaults(run=build)

    for verb, about in (
        ("diff", "what a push would change"),
        ("push", "write dashboard, folder and alert rules"),
    ):
        one = verbs.add_parser(verb, help=about)
        one.add_argument("--url", default="", help="of Grafana (else $SENTINEL_GRAFANA_URL)")
        one.add_argument("--token-file", default="", metavar="FILE", help="holds the token")
        one.add_argument("--folder", metavar="UID", help="in Grafana (sentinel)")
        one.add_argument("--datasource", metavar="UID", help="Prometheus, for the alert rules")
        one.add_argument("--no-alerts", action="store_true", help="leave alert rules alone")
        one.add_argument("--runbooks", default="", metavar="URL", help="of docs/operating.md")
        one.add_argument("--from", dest="source", metavar="DIR", help="with dashboards as JSON")
        one.add_argument("--json", action="store_true", help="print JSON")
        if verb == "push":
            one.add_argument("--dry-run", action="store_true", help="write nothing")
        one.set_defaults(run=push, dry_run=verb == "diff", diff=verb == "diff")


def build(options: argparse.Namespace) -> int:
    """Write the generated files, or say which are stale."""
    from sentinel.dashboards import alerts
    from sentinel.dashboards.build import build as write
    from sentinel.dashboards.build import generate

    root = Path(options.root)
    runbooks = options.runbooks or alerts.RUNBOOKS
    if not options.check:
        written = [str(name) for name in write(root, runbooks)]
        if options.json:
            print(json.dumps({"schema": 1, "written": written, "stale": []}))
        else:
            print("\n".join(written))
        return 0
    stale = [
        name
        for name, text in generate(runbooks).items()
        if not (root / name).is_file() or (root / name).read_text(encoding="utf-8") != text
    ]
    if options.json:
        print(json.dumps({"schema": 1, "written": [], "stale": stale}))
    for name in stale:
        print(f"{name} is stale; write it with: sentinel dashboards build", file=sys.stderr)
    return 1 if stale else 0


def push(options: argparse.Namespace) -> int:
    """Compare, and write unless asked not to."""
    from sentinel.dashboards import alerts
    from sentinel.dashboards import push as pushing
    from sentinel.dashboards.grafana import GrafanaPort, Target

    target = Target.from_environment(os.environ, url=options.url, token_file=options.token_file)
    boards = pushing.dashboards(Path(options.source) if options.source else None)
    with GrafanaPort(target) as grafana:
        datasource = None
        if not options.no_alerts:
            datasource = options.datasource or pushing.only_source(grafana)
        want = pushing.wanted(
            boards,
            folder=options.folder or alerts.FOLDER,
            runbooks=options.runbooks,
            datasource=datasource,
        )
        plan = pushing.compare(grafana, want)
        say = not options.json
        if options.dry_run:
            for change in plan.changes if say else ():
                print(change)
        else:
            for change in pushing.apply(grafana, plan):
                if say:
                    print(f"wrote {change.what} {change.name}")
    if options.json:
        changes = [
            {"what": c.what, "name": c.name, "differences": list(c.differences)}
            for c in plan.changes
        ]
        written = not options.dry_run
        print(json.dumps({"schema": 1, "written": written, "changes": changes}, indent=2))
    elif not plan.changes:
        print(f"nothing to do: {', '.join(plan.equal)}")
    return 1 if options.diff and plan.changes else 0

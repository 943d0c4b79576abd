"""The `sentinel` command.

    sentinel run | serve | status | replay | snapshots | demo | policy | dashboards ...  (--help)

Exit status: see failing.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sentinel import __version__
from sentinel.cli import dashboards, failing, keep, look, order, replay, resume, run, snapshots
from sentinel.cli.failing import UsageError
from sentinel.cli.remote import DEFAULT_PORT
from sentinel.client import TOKEN_VARIABLE
from sentinel.core.errors import ConfigError, SentinelError
from sentinel.core.policy import SHIPPED, Policy
from sentinel.wire import codec

ROLES = ("read", "ingest", "control")

DATA_VARIABLE, DEFAULT_DATA = "SENTINEL_DATA", "sentinel-data"
DATABASE_VARIABLE = "SENTINEL_DATABASE"
GIB = 2**30
LEAST_GIB = 1 / 64  # see MIN_RUN_BYTES of the sidecar's settings


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == ["demo"]:
        return demo(arguments[1:])  # its options are its own
    as_json = failing.wants_json(arguments)
    try:
        options = build_parser().parse_args(arguments)
    except UsageError as error:
        raise SystemExit(failing.failed(error, as_json=as_json)) from None
    try:
        status: int = options.run(options)
    except SentinelError as error:
        return failing.failed(error, as_json=as_json)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has gone (a pager, head): not an error of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser: argparse.ArgumentParser = failing.Parser(
        prog="sentinel",
        description="Watch a PyTorch run, and undo the step that broke it.",
        epilog=failing.EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"sentinel {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve_ = commands.add_parser("serve", help="run a sidecar")
    serve_.add_argument("--port", type=failing.port, help="TCP port; 0 takes a free one")
    serve_.add_argument("--host", default="127.0.0.1", help="address of --port (%(default)s)")
    serve_.add_argument("--uds", metavar="PATH", help="Unix socket, made with mode 0660")
    serve_.add_argument(
        "--policy", metavar="P", help="policy for runs that did not choose one: a name or a file"
    )
    serve_.add_argument(
        "--lost-after",
        type=_number(0.0, above=True),
        default=60.0,
        metavar="S",
        help="seconds of silence after which a run is lost (%(default)g)",
    )
    serve_.add_argument(
        "--token-file",
        type=_token_file,
        action="append",
        default=[],
        metavar="ROLE=FILE",
        help=f"tokens of role {', '.join(ROLES)}, one a line, as NAME TOKEN; may be given again "
        f"(${TOKEN_VARIABLE} is a token of every role)",
    )
    serve_.add_argument(
        "--data",
        type=Path,
        default=Path(os.environ.get(DATA_VARIABLE) or DEFAULT_DATA),
        metavar="DIR",
        help=f"where series and the database are kept (${DATA_VARIABLE}, else %(default)s)",
    )
    serve_.add_argument(
        "--database",
        type=_database,
        metavar="URL",
        default=os.environ.get(DATABASE_VARIABLE, ""),
        help=f"postgresql://... instead of a file in --data (${DATABASE_VARIABLE})",
    )
    serve_.add_argument(
        "--quota",
        type=_gib,
        default=50 * GIB,
        metavar="GIB",
        help="what all series may take (50); runs that are over make room",
    )
    serve_.add_argument(
        "--run-quota",
        type=_gib,
        default=2 * GIB,
        metavar="GIB",
        help="what the series of one run may take (2); its oldest make room",
    )
    serve_.add_argument(
        "--retention",
        type=_number(0.0, above=True, endless=True),
        default=30.0,
        metavar="DAYS",
        help="how long what is known of ended runs is kept (%(default)g)",
    )
    serve_.add_argument(
        "--audit-retention",
        type=_number(0.0, above=True, endless=True),
        metavar="DAYS",
        help="how long the audit log is kept (365, or --retention where that is longer)",
    )
    serve_.add_argument(
        "--max-runs",
        type=_whole,
        default=1000,
        metavar="N",
        help="runs held in memory (%(default)s); those that have ended make room, then lost ones, "
        "and stay on disk",
    )
    serve_.add_argument(
        "--watch",
        type=Path,
        action="append",
        default=[],
        metavar="RUN_DIR",
        help="show the runs in this folder too, which need no sidecar; read-only, repeatable",
    )
    serve_.add_argument(
        "--run-dir",
        type=Path,
        action="append",
        default=[],
        metavar="RUN_DIR",
        help="where the trainers that report here keep their runs, if it can be seen from here: "
        "their snapshots are read again now and then; repeatable",
    )
    serve_.add_argument(
        "--verify-every",
        type=_number(1 / 60, or_none=True),
        default=24.0,
        metavar="HOURS",
        help="how often each snapshot is read again (%(default)g); 0: never",
    )
    serve_.add_argument(
        "--verify-rate",
        type=_number(1.0),
        default=32.0,
        metavar="MIB",
        help="at most so many MiB a second (%(default)g)",
    )
    keep.add_options(serve_)
    serve_.add_argument("--verbose", action="store_true", help="log what happens to runs")
    serve_.set_defaults(run=serve)

    look.add_parsers(commands)
    order.add_parsers(commands)
    run.add_parser(commands)
    replay.add_parser(commands)
    snapshots.add_parser(commands)
    resume.add_parser(commands)
    dashboards.add_parser(commands)

    commands.add_parser("demo", help="a run goes wrong and is saved (needs torch)", add_help=False)

    policy_ = commands.add_parser("policy", help="show or check a policy")
    verbs = policy_.add_subparsers(required=True, metavar="COMMAND")
    for verb, about in (
        ("show", "every setting, defaults spelled out"),
        ("check", "read it, say whether it is sound"),
    ):
        one = verbs.add_parser(verb, help=about)
        one.add_argument(
            "source", metavar="NAME|PATH", help=f"{', '.join(SHIPPED)}, or a TOML file"
        )
        one.add_argument("--json", action="store_true", help="as JSON")
        one.set_defaults(run=show_policy if verb == "show" else check_policy)
    return parser


def _number(
    least: float, *, above: bool = False, or_none: bool = False, endless: bool = False
) -> Callable[[str], float]:
    """A number from `least` on, for argparse; what the sidecar would refuse is bad usage.

    Args:
        above: `least` itself is too little.
        or_none: 0 is taken as well, for never.
        endless: so is inf.
    """

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        enough = value > least if above else value >= least
        if (enough and (endless or value < math.inf)) or (or_none and value == 0.0):
            return value
        bound = f"{'0, or ' if or_none else ''}{'above' if above else 'at least'} {least:.3g}"
        raise argparse.ArgumentTypeError(f"must be {bound}, got {text!r}")

    return read


def _database(text: str) -> str:
    if text and not re.match(r"(sqlite|postgres|postgresql)(\+\w+)?://", text):
        # Not shown whole: it may hold a password.
        kind = f"{text.partition('://')[0]}://..." if "://" in text else "one without ://"
        raise argparse.ArgumentTypeError(
            f"must be postgresql://... or sqlite:///PATH (or ${DATABASE_VARIABLE}), got {kind}"
        )
    return text


def _gib(text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not LEAST_GIB <= value < 2**20:
        raise argparse.ArgumentTypeError(
            f"must be a number of GiB, at least {LEAST_GIB:.3g} (16 MiB), got {text!r}"
        )
    return int(value * GIB)


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) == int(text)):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {text!r}")
    return int(text)


def _token_file(text: str) -> tuple[str, Path]:
    role, equals, path = text.partition("=")
    if not equals or role not in ROLES or not path:
        raise argparse.ArgumentTypeError(f"must be ROLE=FILE with a role of {', '.join(ROLES)}")
    return role, Path(path)


def serve(options: argparse.Namespace) -> int:
    """Run a sidecar until it is told to stop."""
    try:
        from sentinel.sidecar.security import Role
        from sentinel.sidecar.serve import serve as run_sidecar
        from sentinel.sidecar.settings import Settings
    except ModuleNotFoundError as error:
        print(
            f"sentinel serve needs {error.name}, which is not installed here; install it with: "
            "pip install 'torch-sentinel[sidecar]'",
            file=sys.stderr,
        )
        return 1
    logging.basicConfig(
        level=logging.INFO if options.verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(message)s",
    )
    for noisy in ("alembic", "apscheduler", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        policy = Policy.load(options.policy) if options.policy else None
    except ConfigError as error:
        raise UsageError(f"--policy: {error}", prog="sentinel serve") from error
    kept = options.audit_retention
    if kept is not None and kept < options.retention:
        raise UsageError(
            f"--audit-retention must be at least --retention ({options.retention:g}), got "
            f"{kept:g}: the log must say what was asked of a run that is still kept",
            prog="sentinel serve",
        )
    grafana = keep.grafana_from(options)
    settings = Settings(
        grafana=grafana,
        policy=policy,
        token=os.environ.get(TOKEN_VARIABLE, ""),
        token_files=tuple((Role(role), path) for role, path in options.token_file),
        lost_after_s=options.lost_after,
        data_dir=options.data,
        database=options.database,
        max_runs=options.max_runs,
        max_store_bytes=options.quota,
        max_run_bytes=options.run_quota,
        retention_days=options.retention,
        audit_days=max(365.0, options.retention) if kept is None else kept,
        watch=tuple(options.watch),
        run_dirs=tuple(options.run_dir),
        verify_every_s=options.verify_every * 3600.0,
        verify_bytes_per_s=options.verify_rate * 2**20,
    )
    if options.port is None and options.uds is None:
        options.port = DEFAULT_PORT
    for folder in settings.watch:
        if not folder.is_dir():  # it may come yet; a slip in its name will not
            said = f"{folder} is not there; its runs are shown once it is"
            print(f"sentinel serve: --watch: {said}", file=sys.stderr)
    for folder in settings.run_dirs:
        if not folder.is_dir():
            said = f"{folder} is not there; snapshots in it are read again once it is"
            print(f"sentinel serve: --run-dir: {said}", file=sys.stderr)
    try:
        run_sidecar(
            settings,
            port=options.port,
            host=options.host,
            uds=options.uds,
            say=lambda line: print(line, flush=True),
        )
    finally:
        if grafana is not None:
            grafana.writer.close()
    return 0


def demo(arguments: list[str]) -> int:
    """Run the demo in a process of its own: this one never imports torch."""
    if importlib.util.find_spec("torch") is None:
        print(
            "sentinel: the demo trains a model and needs torch, which is not installed here; "
            "install it with: pip install 'torch-sentinel[hooks]'",
            file=sys.stderr,
        )
        return 1
    command = [sys.executable, "-m", "sentinel_hooks.demo", *arguments]
    return subprocess.call(command)  # noqa: S603 (our own module, no shell)


def show_policy(options: argparse.Namespace) -> int:
    """Print a policy with every default spelled out."""
    policy = Policy.load(options.source)
    if options.json:
        print(codec.to_json(policy.to_dict(), indent=2).decode())
    else:
        print("\n".join(_toml(policy.to_dict())))
    return 0


def check_policy(options: argparse.Namespace) -> int:
    """Say whether a policy is sound; a broken one raises ConfigError."""
    policy = Policy.load(options.source)
    digest = codec.policy_hash(policy).hex()
    if options.json:
        print(json.dumps({"ok": True, "name": policy.name, "mode": policy.mode, "hash": digest}))
    else:
        print(f"{policy.name}: sound, mode {policy.mode}, hash {digest}")
    return 0


def _toml(table: dict[str, Any], prefix: str = "") -> list[str]:
    """A nested table as TOML that Policy.parse reads back to the same policy."""
    lines = [f"{k} = {_toml_value(v)}" for k, v in table.items() if not isinstance(v, dict)]
    for key, value in table.items():
        if isinstance(value, dict):
            path = f"{prefix}.{key}" if prefix else key
            inner = _toml(value, path)
            plain = any(not isinstance(v, dict) for v in value.values())
            lines += ["", f"[{path}]", *inner] if plain else inner
    return lines


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    return repr(value)


if __name__ == "__main__":
    raise SystemExit(main())

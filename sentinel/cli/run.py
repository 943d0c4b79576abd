"""`sentinel run -- torchrun train.py`: a sidecar beside a command, and attaching without a change.

    sentinel run -- python train.py             a local sidecar; train.py calls sentinel.attach()
    sentinel run --attach -- torchrun train.py  ... and a script that does not is attached as well

The sidecar listens on a Unix socket that only this user can reach, is told to the command by
$SENTINEL_SIDECAR, and ends with it; where Prometheus scrapes it, after one more scrape, so that the
run's end is seen (linger.py). Where one is named already, or the sidecar's packages are not
installed, none is started; that is said, and training decides by itself. The exit status is the
command's; signals are passed on to it. With --attach, when the command has ended and no process of
it was attached, that is said, and how far the processes came (they leave lines in a file).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from sentinel.cli.failing import UsageError, port
from sentinel.cli.linger import until_seen
from sentinel.core.errors import ConfigError
from sentinel.core.policy import Policy

SIDECAR_VARIABLE = "SENTINEL_SIDECAR"
ATTACH_VARIABLE = "SENTINEL_ATTACH"
REPORT_VARIABLE = "SENTINEL_ATTACH_REPORT"
LINGER_S = 45.0  # three scrapes, as in deploy/k8s/job.yaml
MOST_LINGER_S = 3600.0
READY_S = 20.0  # from start to listening; importing the web stack takes two on a busy machine
NEEDS = ("fastapi", "uvicorn", "apscheduler", "prometheus_client", "sqlalchemy")


def add_parser(commands: Any) -> None:
    """The `run` command."""
    parser = commands.add_parser(
        "run",
        help="run a command with a sidecar beside it",
        description="Run a command with a local sidecar beside it.",
        usage="sentinel run [options] -- COMMAND ...",
    )
    parser.add_argument(
        "--attach",
        action="store_true",
        help="attach at the first optimizer step of each process (and anew to what steps later), "
        "for scripts that do not",
    )
    parser.add_argument("--policy", metavar="P", help="with --attach: a policy's name or file")
    parser.add_argument("--mode", choices=("act", "observe"), help="with --attach")
    parser.add_argument("--run-dir", metavar="DIR", help="with --attach: where the trace goes")
    parser.add_argument("--run-id", metavar="ID", help="names the run; continues one that is there")
    parser.add_argument("--no-sidecar", action="store_true", help="start none")
    parser.add_argument("--port", type=port, help="the sidecar's page on this TCP port as well")
    parser.add_argument(
        "--linger",
        type=_seconds,
        default=LINGER_S,
        metavar="SECONDS",
        help="with --port: longest wait after the command for one more scrape, so that Prometheus "
        "sees the end; nobody waits where nobody scrapes (%(default)g; 0: never)",
    )
    parser.add_argument(
        "--data", metavar="DIR", help="where the sidecar keeps its record (a temporary folder)"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run it; the command's exit status.

    Raises:
        ConfigError: nothing to run, or an option that makes no sense.
    """
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise UsageError("run needs a command, for example: sentinel run -- torchrun train.py")
    environment = dict(os.environ)
    environment.pop(REPORT_VARIABLE, None)  # of a `sentinel run` around this one
    if options.run_id:
        environment["SENTINEL_RUN_ID"] = options.run_id
    place = ""
    if options.attach:
        place = _arrange_attach(options, environment)
    else:
        for name in ("policy", "mode", "run_dir"):
            if getattr(options, name) is not None:
                raise UsageError(
                    f"--{name.replace('_', '-')} is for --attach; a script that calls "
                    f"sentinel.attach() gives {name}= there"
                )
    with contextlib.ExitStack() as stack:
        if not options.no_sidecar:
            url = stack.enter_context(_sidecar(options, environment))
            if url:
                environment[SIDECAR_VARIABLE] = url
        if not options.attach:
            return _carry_out(command, environment)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sentinel-"))
        report = Path(folder) / "attach"
        environment[REPORT_VARIABLE] = str(report)
        status = _carry_out(command, environment)
        _say_unattached(report, place)
        return status


def _say_unattached(report: Path, place: str) -> None:
    """Nothing at all, if a process was attached, or attached itself."""
    try:
        came = set(report.read_text(encoding="utf-8").split())
    except OSError:
        came = set()
    if came & {"attached", "own"}:
        return
    if "refused" in came:
        why = "see the line NOT ATTACHED above"
    elif "torch" in came:
        why = (
            "torch was imported, but no torch optimizer has made a step (an evaluation? a "
            "framework that steps optimizers of its own, as DeepSpeed does?)"
        )
    elif "python" in came:
        why = (
            "Python was reached, but no process of it imported torch.optim; if training runs "
            f"elsewhere (ssh, srun, a container), put {place} first on its PYTHONPATH and pass "
            f"${ATTACH_VARIABLE} on, or run `sentinel run --attach` there"
        )
    else:
        why = (
            "no Python process of this command has read PYTHONPATH as it was given. Does a script "
            "set it anew (let it keep what is there: PYTHONPATH=mine:$PYTHONPATH), or is Python "
            "started with -I, -E or -S, in a container, or on another machine? Put "
            f"{place} first on it there and pass ${ATTACH_VARIABLE} on"
        )
    _say(
        f"NOT ATTACHED: no process of this command was watched, it ran unprotected: {why}; or call "
        "sentinel.attach() in the script"
    )


def _arrange_attach(options: argparse.Namespace, environment: dict[str, str]) -> str:
    """Returns the folder that was put on PYTHONPATH."""
    spec = importlib.util.find_spec("sentinel_hooks")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "--attach needs the trainer's side in this environment: "
            "pip install 'torch-sentinel[hooks]'"
        )
    policy = options.policy
    if policy is not None:
        Policy.load(policy)  # now, and not in the middle of the first step
        if os.path.exists(policy):
            policy = os.path.abspath(policy)
    wishes = {"policy": policy, "mode": options.mode, "run_dir": options.run_dir}
    environment[ATTACH_VARIABLE] = json.dumps({k: v for k, v in wishes.items() if v is not None})
    here = os.path.join(spec.submodule_search_locations[0], "unasked")
    before = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([here, before] if before else [here])
    return here


@contextlib.contextmanager
def _sidecar(options: argparse.Namespace, environment: dict[str, str]) -> Generator[str]:
    """A local one, until the command has ended; "" when there is none of ours."""
    named = environment.get(SIDECAR_VARIABLE)
    if named:
        _say(f"using the sidecar of ${SIDECAR_VARIABLE}, {named}")
        yield ""
        return
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        _say(
            f"no sidecar: {', '.join(missing)} not installed "
            "(pip install 'torch-sentinel[sidecar]'); training decides by itself"
        )
        yield ""
        return
    with tempfile.TemporaryDirectory(prefix="sentinel-") as folder:
        path = os.path.join(folder, "sentinel.sock")
        arguments = [sys.executable, "-m", "sentinel.cli.main", "serve", "--uds", path]
        arguments += ["--data", options.data or os.path.join(folder, "data")]
        if options.port is not None:
            arguments += ["--port", str(options.port)]
        with open(os.path.join(folder, "sidecar.log"), "w+", encoding="utf-8") as log:
            process = subprocess.Popen(  # noqa: S603  our own interpreter
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C is for the command: the sidecar ends after it
            )
            try:
                if not _listens(process, path):
                    log.seek(0)
                    last = " ".join(log.read().split()[-40:])
                    _say(f"no sidecar, it did not start: {last}; training decides by itself")
                    yield ""
                    return
                at = f", page at http://127.0.0.1:{options.port}/" if options.port else ""
                _say(f"a sidecar listens on {path}{at}")
                yield f"unix://{path}"
                if options.port is not None:
                    until_seen(f"unix://{path}", options.linger, _say)
            finally:
                _end(process)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= MOST_LINGER_S:
        raise argparse.ArgumentTypeError(
            f"must be seconds from 0 to {MOST_LINGER_S:g}, got {text!r}"
        )
    return value


def _listens(process: subprocess.Popen[Any], path: str) -> bool:
    until = time.perf_counter() + READY_S
    while time.perf_counter() < until:
        if process.poll() is not None:
            return False
        if Path(path).is_socket():
            return True
        time.sleep(0.05)
    return False


def _end(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _carry_out(command: list[str], environment: dict[str, str]) -> int:
    try:
        process = subprocess.Popen(command, env=environment)  # noqa: S603  what it is for
    except OSError as error:
        raise ConfigError(f"cannot run {command[0]!r}: {error.strerror}") from error

    def pass_on(number: int, _: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)

    # SIGINT from a terminal goes to the whole group, the command included.
    before = {signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        before[number] = signal.signal(number, pass_on)
    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status


def _say(text: str) -> None:
    print(f"sentinel: {text}", file=sys.stderr, flush=True)

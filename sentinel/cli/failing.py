"""How the command fails: one line for a person, and with --json an object for a program.

    parser = Parser(prog="sentinel")           usage errors as UsageError, with a near word
    failed(error, as_json=True)                {"code": ..., "detail": ...} on stdout, exit status

The object has the shape of the sidecar's own refusals, so that a program reads one thing: `code` is
the sidecar's where it refused (docs/sidecar.md), else one of CODES. The line for people goes to
stderr in any case.

Exit:    0; 1 could not be done; 2 bad usage, or there is nothing of that name to look at; 3 an
         order was not obeyed yet; 130 interrupted. `sentinel run` gives its command's status.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from sentinel.core.errors import ConfigError, SentinelError

FAILED, USAGE = 1, 2
CODES = {
    "usage": "the command line makes no sense",
    "config": "a setting or a file that was named makes no sense",
    "not_found": "there is nothing of that name here",
    "unreachable": "no sidecar answers there",
    "timeout": "a sidecar is there and does not answer in time",
    "not_a_sidecar": "what answers is no sidecar",
    "failed": "it could not be done",
}
EPILOG = (
    "exit status: 0 done; 1 could not be done (refused, an order that failed, no sidecar, a replay "
    "that differs or of a record with holes); 2 bad usage, or nothing of that name on disk; 3 an "
    "order that was not obeyed yet; run: the command's own. "
    'With --json an error is {"code": ..., "detail": ...}.'
)


class UsageError(ConfigError):
    """The command line makes no sense; `usage` is shown before the message."""

    code = "usage"

    def __init__(self, detail: str, usage: str = "", prog: str = "sentinel") -> None:
        super().__init__(detail)
        self.usage = usage
        self.prog = prog


class NothingError(SentinelError):
    """There is nothing of that name to look at."""

    code = "not_found"


class Parser(argparse.ArgumentParser):
    """See the module docstring."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(message + _near(message), self.format_usage(), self.prog)


def _near(message: str) -> str:
    """What may have been meant by a word that is not among the choices."""
    found = re.search(r"invalid choice: '(?P<word>[^']*)' \(choose from (?P<choices>.*)\)", message)
    if found is None:
        return ""
    choices = [word.strip().strip("'") for word in found["choices"].split(",")]
    near = difflib.get_close_matches(found["word"], choices, 1, 0.6)
    return f"; did you mean {near[0]}?" if near else ""


def wants_json(arguments: Iterable[str]) -> bool:
    """Whether --json is among them; what follows a bare -- is another command's."""
    for argument in arguments:
        if argument == "--":
            return False
        if argument == "--json":
            return True
    return False


def failed(error: SentinelError, *, as_json: bool) -> int:
    """Say what went wrong; returns the exit status."""
    usage = getattr(error, "usage", "")
    print(f"{usage}{getattr(error, 'prog', 'sentinel')}: {error}", file=sys.stderr)
    if as_json:
        print(json.dumps({"code": code_of(error), "detail": str(error)}))
    return USAGE if isinstance(error, UsageError | NothingError) else FAILED


def code_of(error: SentinelError) -> str:
    """One word for a program."""
    code: str = getattr(error, "code", "")
    if code:
        return code
    return "config" if isinstance(error, ConfigError) else "failed"


def port(text: str) -> int:
    """A TCP port, for argparse."""
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 65535, got {text!r}")
    return number


def find_run(name: str, folder: str) -> Path:
    """A run's directory, by its path or by its id under a folder.

    Raises:
        NothingError: there is none; it names those there are.
    """
    given = Path(name)
    if given.is_dir():
        return given
    if os.sep in name:
        raise NothingError(f"there is no run's directory {name}")
    found = Path(folder) / name
    try:
        if found.is_dir():
            return found
        there = sorted(p.name for p in Path(folder).iterdir() if p.is_dir())
    except OSError as error:
        raise NothingError(
            f"there is no run {name!r}: {folder} cannot be read ({error.strerror}); name a run's "
            "directory, or the folder with --run-dir"
        ) from error
    listed = f"{folder} holds {', '.join(there[:8])}" if there else f"{folder} holds no run"
    more = f" and {len(there) - 8} more" if len(there) > 8 else ""
    raise NothingError(f"there is no run {name!r}; {listed}{more}; --run-dir names another folder")

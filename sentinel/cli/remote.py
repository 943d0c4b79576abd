"""Asking a sidecar from the command line: where it is, who asks, and what to say when it fails.

    add_options(parser)                      --sidecar URL, --token-file FILE, --json
    with Remote(options) as sidecar: sidecar.get("/v1/runs")     sidecar.post("/v1/...", {...})

Errors:  RemoteError: one line that says what is wrong and what to do about it.
"""

from __future__ import annotations

import argparse
import difflib
import getpass
import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

from sentinel.cli.failing import UsageError
from sentinel.cli.words import text
from sentinel.client import TOKEN_VARIABLE, Client, MissError
from sentinel.core.errors import ConfigError, SentinelError

SIDECAR_VARIABLE = "SENTINEL_SIDECAR"
DEFAULT_PORT = 8123
STANDARD_SOCKET = "/run/sentinel/sentinel.sock"
DEADLINE_S = 5.0
AGAIN_S, TRIES = 1.0, 30  # over TCP a sidecar takes 600 questions at once, then 100 a second


class RemoteError(SentinelError):
    """A sidecar does not do what it was asked; the message is for a person."""

    def __init__(self, detail: str, status: int = 0, code: str = "failed") -> None:
        super().__init__(detail)
        self.status = status
        self.code = code


def default_sidecar() -> str:
    """$SENTINEL_SIDECAR, else the standard socket if it is there, else the default port."""
    given = os.environ.get(SIDECAR_VARIABLE)
    if given:
        return given
    if Path(STANDARD_SOCKET).is_socket():
        return f"unix://{STANDARD_SOCKET}"
    return f"http://127.0.0.1:{DEFAULT_PORT}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of every command that asks a sidecar."""
    parser.add_argument(
        "--sidecar",
        metavar="URL",
        default=None,
        help=f"http://host:port or unix:///path (${SIDECAR_VARIABLE}, else {STANDARD_SOCKET} if "
        f"it is there, else http://127.0.0.1:{DEFAULT_PORT})",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help=f"file whose first token is brought along (${TOKEN_VARIABLE})",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def me() -> str:
    """Who gives an order, if nothing else is said."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # no such user, as in some containers
        return ""


class Remote:
    """One sidecar."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Raises UsageError: the URL is none; ConfigError: the token file cannot be read."""
        self.url: str = options.sidecar or default_sidecar()
        token = None if options.token_file is None else _first_token(Path(options.token_file))
        try:
            self._client = Client(self.url, token=token)
        except ConfigError as error:
            raise UsageError(
                f"{'--sidecar' if options.sidecar else '$' + SIDECAR_VARIABLE} must be "
                f"http://host:port or unix:///path/to/socket, got {self.url!r}"
            ) from error

    def __enter__(self) -> Remote:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._client.close()

    def get(self, path: str) -> Any:
        """An answer as JSON; one that is asked for too often is waited for; raises RemoteError."""
        for _ in range(TRIES):
            try:
                return self._ask("GET", path, b"")
            except RemoteError as error:
                if error.code != "too_many":
                    raise
            time.sleep(AGAIN_S)
        return self._ask("GET", path, b"")

    def post(self, path: str, value: dict[str, Any]) -> Any:
        """The answer to a request with a body; raises RemoteError."""
        return self._ask("POST", path, json.dumps(value).encode())

    def run(self, name: str, *, whole: bool = False) -> Any:
        """All about one run, which may be named by the first letters of its name.

        Args:
            whole: they are not enough: something is to be done to it.

        Raises:
            RemoteError: there is none, or several begin so; it names those there are.
        """
        try:
            return self.get(run_path(name))
        except RemoteError as error:
            if error.status != 404:
                raise
        known = sorted(r["run"] for r in self.get("/v1/runs")["runs"])
        begin = [one for one in known if one.startswith(name)] if name else []
        if len(begin) == 1 and not whole:
            return self.get(run_path(begin[0]))
        raise RemoteError(_which(name, known, begin, self.url), 404, "unknown_run")

    def _ask(self, method: str, path: str, body: bytes) -> Any:
        try:
            status, answer = self._client.ask(method, path, body, deadline_s=DEADLINE_S)
        except MissError as error:
            code = error.reason if error.reason in ("unreachable", "timeout") else "not_a_sidecar"
            raise RemoteError(self._unheard(error), 0, code) from error
        try:
            found = json.loads(answer)
        except ValueError:
            raise RemoteError(
                f"{self.url} answers {status} and no JSON: is that a sentinel sidecar?",
                status,
                "not_a_sidecar",
            ) from None
        if 200 <= status < 300:
            return found
        refusal = found if isinstance(found, dict) else {}
        detail, code = text(refusal.get("detail", "")), text(refusal.get("code", "failed"))
        if status == 401:
            detail = (
                f"the sidecar at {self.url} wants a token that it knows; set {TOKEN_VARIABLE} or "
                "name a file with --token-file"
            )
        raise RemoteError(detail or f"{self.url}{path} answered {status}", status, code)

    def _unheard(self, error: MissError) -> str:
        if error.reason == "unreachable":
            return (
                f"no sidecar answers at {error}; start one (sentinel serve) or name another "
                f"(--sidecar URL, ${SIDECAR_VARIABLE})"
            )
        if error.reason == "timeout":
            return (
                f"{error}; it is there and does not answer: it may be overloaded or stopped. "
                "Training goes on without it"
            )
        return f"{error}; is that a sentinel sidecar?"


def _which(name: str, known: list[str], begin: list[str], url: str) -> str:
    """What to say of a name that is not that of one run."""
    if not known:
        return f"no run {name!r} at {url}; it knows no run yet"
    near = begin or difflib.get_close_matches(name, known, 3, 0.6)
    shown = ", ".join(map(text, (near or known)[:8]))
    left = len(near or known) - 8
    shown += f" and {left} more" if left > 0 else ""
    if len(begin) > 1:
        return f"several runs begin with {name!r}: {shown}"
    if near:
        return f"no run {name!r} at {url}; did you mean {shown}?"
    return f"no run {name!r} at {url}; it knows {shown}"


def run_path(run: str, what: str = "") -> str:
    """The address of a run."""
    return f"/v1/runs/{quote(run, safe='')}{what}"


def _first_token(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"token file {path} cannot be read: {error}") from error
    for line in lines:
        words = line.split()
        if words and not words[0].startswith("#"):
            return words[-1]
    raise ConfigError(f"token file {path} holds no token")

"""Asking a sidecar from the command line: where it is, who asks, and what to say when it fails.

    add_options(parser)                      --sidecar URL, --token-file FILE, --json
    with Remote(options) as sidecar: sidecar.get("/v1/runs")     sidecar.post("/v1/...", {...})

Errors:  RemoteError: one line that says what is wrong and what to do about it.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

from sentinel.cli.words import text
from sentinel.client import TOKEN_VARIABLE, Client, MissError
from sentinel.core.errors import ConfigError, SentinelError

SIDECAR_VARIABLE = "SENTINEL_SIDECAR"
DEFAULT_PORT = 8123
STANDARD_SOCKET = "/run/sentinel/sentinel.sock"
DEADLINE_S = 5.0


class RemoteError(SentinelError):
    """A sidecar does not do what it was asked; the message is for a person."""

    def __init__(self, detail: str, status: int = 0) -> None:
        super().__init__(detail)
        self.status = status


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
        """Raises ConfigError: the URL is none, or the token file cannot be read."""
        self.url: str = options.sidecar or default_sidecar()
        token = None if options.token_file is None else _first_token(Path(options.token_file))
        self._client = Client(self.url, token=token)

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
        """An answer as JSON; raises RemoteError."""
        return self._ask("GET", path, b"")

    def post(self, path: str, value: dict[str, Any]) -> Any:
        """The answer to a request with a body; raises RemoteError."""
        return self._ask("POST", path, json.dumps(value).encode())

    def run(self, name: str) -> Any:
        """All about one run; raises RemoteError, which names the runs there are."""
        try:
            return self.get(run_path(name))
        except RemoteError as error:
            if error.status == 404:
                known = [text(r["run"]) for r in self.get("/v1/runs")["runs"]]
                there = f"it knows {', '.join(known[:8])}" if known else "it knows no run yet"
                raise RemoteError(f"no run {name!r} at {self.url}; {there}", 404) from None
            raise

    def _ask(self, method: str, path: str, body: bytes) -> Any:
        try:
            status, answer = self._client.ask(method, path, body, deadline_s=DEADLINE_S)
        except MissError as error:
            raise RemoteError(self._unheard(error)) from error
        try:
            found = json.loads(answer)
        except ValueError:
            raise RemoteError(
                f"{self.url} answers {status} and no JSON: is that a sentinel sidecar?", status
            ) from None
        if 200 <= status < 300:
            return found
        detail = text(found.get("detail", "")) if isinstance(found, dict) else ""
        if status == 401:
            detail = (
                f"the sidecar at {self.url} wants a token that it knows; set {TOKEN_VARIABLE} or "
                "name a file with --token-file"
            )
        raise RemoteError(detail or f"{self.url}{path} answered {status}", status)

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

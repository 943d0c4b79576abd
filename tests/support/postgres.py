"""A real PostgreSQL server for tests, in a directory of its own.

    with postgres() as url: ...
    with server() as one: one.url, one.stop(), one.start()

The server refuses to run as root: started by root it runs as user `postgres` (or `nobody`).
"""

from __future__ import annotations

import glob
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support import require


def binaries() -> Path | None:
    """Where pg_ctl lies; None when there is none."""
    found = sorted(glob.glob("/usr/lib/postgresql/*/bin/pg_ctl"))
    if found:
        return Path(found[-1]).parent
    there = shutil.which("pg_ctl")
    return None if there is None else Path(there).parent


@dataclass(frozen=True)
class Server:
    """One that can go away and come back."""

    url: str
    stop: Callable[[], None]
    start: Callable[[], None]


@contextmanager
def postgres() -> Iterator[str]:
    """A server on a free port; its URL."""
    with server() as one:
        yield one.url


@contextmanager
def server() -> Iterator[Server]:
    """A server on a free port."""
    place = binaries()
    require(place, "PostgreSQL (apt-get install postgresql)")
    assert place is not None
    as_user, user = _user()
    # Not pytest's tmp_path: that is root's alone, and another user has to get in.
    folder = Path(tempfile.mkdtemp(prefix="sentinel-postgres-"))
    data = folder / "data"
    try:
        if as_user:
            os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
        _call([*as_user, str(place / "initdb"), "-D", str(data), "-U", "sentinel", "-A", "trust"])
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        options = f"-c listen_addresses=127.0.0.1 -p {port} -k {folder} -c fsync=off"
        log = str(folder / "log")
        start = [str(place / "pg_ctl"), "-D", str(data), "-l", log, "-w", "-o", options]
        stop = [*as_user, str(place / "pg_ctl"), "-D", str(data), "-m", "immediate", "stop"]
        _call([*as_user, *start, "start"])
        try:
            yield Server(
                f"postgresql://sentinel@127.0.0.1:{port}/postgres",
                stop=lambda: _call(stop),
                start=lambda: _call([*as_user, *start, "start"]),
            )
        finally:
            if (data / "postmaster.pid").exists():
                _call(stop)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _user() -> tuple[list[str], str]:
    if os.geteuid() != 0:
        return [], ""
    try:
        user = pwd.getpwnam("postgres").pw_name
    except KeyError:
        user = "nobody"
    return ["runuser", "-u", user, "--"], user


def _call(command: list[str]) -> None:
    # pg_ctl leaves its standard output to the server: a pipe would never end.
    with tempfile.TemporaryFile() as said:
        done = subprocess.run(
            command, check=False, stdout=said, stderr=said, stdin=subprocess.DEVNULL, cwd="/"
        )
        said.seek(0)
        text = said.read().decode(errors="replace")
    assert done.returncode == 0, f"{command}: {text}"

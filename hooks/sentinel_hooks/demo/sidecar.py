"""A real sidecar for the demo: the process that `sentinel serve` is, on a socket of its own.

    with Sidecar(folder) as sidecar:
        sidecar.url            what sentinel.attach(sidecar=...) is given
        sidecar.metrics()      what Prometheus would scrape: {series: value}

Errors:  DemoError when it does not come up, with the end of its log.
"""

from __future__ import annotations

import http.client
import importlib.util
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from sentinel_hooks.demo.corpus import DemoError

START_DEADLINE_S = 30.0
PATIENCE_S = 5.0
# What the sidecar extra brings; without it the demo goes on with the engine in the trainer.
NEEDED = ("fastapi", "uvicorn", "prometheus_client", "apscheduler")
_SERIES = re.compile(r"^(\w+(?:\{.*\})?) (\S+)$")


def missing() -> list[str]:
    """The packages of the sidecar extra that are not installed here."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


class Sidecar:
    """Starts the process, waits until it is ready, stops it."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "sentinel.sock"
        self.url = f"unix://{self.socket}"
        self.log = folder / "sidecar.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Sidecar:
        command = [sys.executable, "-m", "sentinel.cli.main", "serve", "--uds", str(self.socket)]
        command += ["--data", str(self.socket.parent / "data")]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own command, no shell
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        try:
            self._wait_until_ready(self._process)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop it: politely, then not."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def metrics(self) -> dict[str, float]:
        """/metrics, parsed: series with labels as written -> value.

        Raises:
            DemoError: it does not answer.
        """
        status, text = self._get("/metrics")
        if status != 200:
            raise DemoError(f"the sidecar answers /metrics with status {status}")
        found = (_SERIES.match(line) for line in text.splitlines())
        return {match[1]: float(match[2]) for match in found if match}

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.perf_counter() + START_DEADLINE_S
        while time.perf_counter() < deadline:
            if process.poll() is not None:
                raise DemoError(
                    f"the sidecar ended with status {process.returncode}:\n{self._log_tail()}"
                )
            try:
                if self._get("/readyz")[0] == 200:
                    return
            except DemoError:
                pass
            time.sleep(0.1)
        raise DemoError(
            f"the sidecar was not ready within {START_DEADLINE_S:g} s:\n{self._log_tail()}"
        )

    def _get(self, path: str) -> tuple[int, str]:
        connection = _UnixConnection(self.socket)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        except (OSError, http.client.HTTPException) as error:
            raise DemoError(f"the sidecar at {self.socket} does not answer: {error}") from error
        finally:
            connection.close()

    def _log_tail(self) -> str:
        return tail(self.log)


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=PATIENCE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def total(metrics: Mapping[str, float], name: str, **labels: str) -> float:
    """The sum over all series of `name` that carry these labels."""
    return sum(
        value
        for series, value in metrics.items()
        if (series == name or series.startswith(name + "{"))
        and all(f'{label}="{wanted}"' in series for label, wanted in labels.items())
    )


def tail(log: Path, lines: int = 20) -> str:
    """The end of a log, for an error message."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"(no log: {error})"

"""A real Prometheus and a real Alertmanager (Debian packages), on free ports, gone at the end.

with prometheus(tmp_path, targets={"sentinel": [port]}, rules=[path]) as prom:
    prom.instant("up") · prom.range("up", start, end) · prom.until('up == 1')
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml

from tests.support import require

START_S = 30.0


def free_port() -> int:
    """A port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Prometheus:
    """One that listens."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def _ask(self, path: str, **query: object) -> list[dict[str, Any]]:
        try:
            with urlopen(f"{self.url}/api/v1/{path}?{urlencode(query)}", timeout=20) as answer:
                said = json.load(answer)
        except HTTPError as error:
            raise AssertionError(f"{query}: {error.read().decode()}") from None
        result: list[dict[str, Any]] = said["data"]["result"]
        return result

    def instant(self, expr: str) -> list[dict[str, Any]]:
        """The samples of an expression now."""
        return self._ask("query", query=expr)

    def range(self, expr: str, start: float, end: float) -> list[dict[str, Any]]:
        """Its series from start to end, one sample a second."""
        return self._ask("query_range", query=expr, start=start, end=end, step=1)

    def exemplars(self, expr: str) -> list[dict[str, str]]:
        """The labels of the exemplars that it keeps of a series, oldest first."""
        query = urlencode({"query": expr, "start": 0, "end": time.time() + 3600})
        with urlopen(f"{self.url}/api/v1/query_exemplars?{query}", timeout=20) as answer:
            found = json.load(answer)["data"]
        return [one["labels"] for series in found for one in series["exemplars"]]

    def until(self, expr: str, seconds: float = 60.0) -> list[dict[str, Any]]:
        """Wait until an expression has samples."""
        deadline = time.monotonic() + seconds
        while True:
            found = self.instant(expr)
            if found:
                return found
            assert time.monotonic() < deadline, f"after {seconds} s still nothing: {expr}"
            time.sleep(0.1)


@contextmanager
def _process(command: Sequence[str], url: str, log: Path) -> Iterator[None]:
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + START_S
            while not _ready(url):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            yield
        finally:
            process.kill()
            process.wait(20)


def _ready(url: str) -> bool:
    try:
        with urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


@contextmanager
def prometheus(
    folder: Path,
    *,
    targets: Mapping[str, Sequence[int]],
    rules: Sequence[Path] = (),
    alertmanager: int | None = None,
) -> Iterator[Prometheus]:
    """A Prometheus that scrapes ports of this machine every second.

    Args:
        rules: rule files; each group is evaluated every second too.
    """
    program = shutil.which("prometheus")
    require(program, "prometheus (apt-get install prometheus)")
    assert program is not None
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for path in rules:
        text = yaml.safe_load(path.read_text(encoding="utf-8"))
        for group in text["groups"]:
            group["interval"] = "1s"
        files.append(folder / path.name)
        files[-1].write_text(yaml.safe_dump(text), encoding="utf-8")
    config: dict[str, Any] = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(f) for f in files],
        "scrape_configs": [
            {
                "job_name": job,
                "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}],
            }
            for job, ports in targets.items()
        ],
    }
    if alertmanager is not None:
        targets_ = [{"targets": [f"127.0.0.1:{alertmanager}"]}]
        config["alerting"] = {"alertmanagers": [{"static_configs": targets_}]}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    port = free_port()
    command = [
        program,
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
    ]
    with _process(command, f"http://127.0.0.1:{port}/-/ready", folder / "prometheus.log"):
        yield Prometheus(port)


@contextmanager
def alertmanager(folder: Path, config: Path) -> Iterator[int]:
    """An Alertmanager with that configuration; yields its port."""
    program = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
    require(program, "alertmanager (apt-get install prometheus-alertmanager)")
    assert program is not None
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [
        program,
        f"--config.file={config}",
        f"--storage.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
    ]
    with _process(command, f"http://127.0.0.1:{port}/-/ready", folder / "alertmanager.log"):
        yield port

"""From a real run through a real Prometheus and Alertmanager to a webhook: each alert once.

The route is the example in deploy/alertmanager, with the receivers' addresses replaced.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sentinel.core.types import Command, CommandKind
from tests.deploy.test_queries import RULES, SCRAPE_S, ReportingTrainer, trainer
from tests.support import ROOT
from tests.support.prometheus import Prometheus, alertmanager, prometheus
from tests.support.sidecars import ServeProcess, serving
from tests.support.simulated import Damage, LogitGrowth, NanGradient, Order

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.torch]

LOST_AFTER_S = 6.0


class Webhook:
    """What was sent, to whom. A group's message repeats its other alerts: they keep their start."""

    def __init__(self) -> None:
        self.fired: set[tuple[str, str, str]] = set()  # receiver, alert, run
        self.starts: dict[tuple[str, str], set[str]] = {}

    def take(self, message: dict[str, Any]) -> None:
        for alert in message["alerts"]:
            if alert["status"] == "firing":
                name, run = alert["labels"]["alertname"], alert["labels"]["run"]
                self.fired.add((message["receiver"], name, run))
                self.starts.setdefault((name, run), set()).add(alert["startsAt"])


@contextmanager
def webhook() -> Iterator[tuple[Webhook, str]]:
    """A receiver that listens."""
    hook = Webhook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            hook.take(json.loads(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hook, f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


class World:
    """Everything started; `sidecar` may be killed."""

    def __init__(self, prom: Prometheus, hook: Webhook, sidecar: ServeProcess) -> None:
        self.prom, self.hook, self.sidecar = prom, hook, sidecar
        self.alive: list[ReportingTrainer] = []

    def wait(self, *wanted: tuple[str, str, str], seconds: float = 60.0) -> None:
        """Until these have arrived; the living trainers go on meanwhile."""
        deadline = time.monotonic() + seconds
        while not set(wanted) <= self.hook.fired:
            assert time.monotonic() < deadline, f"wanted {wanted}, got {self.hook.fired}"
            for one in self.alive:
                one.step()
            time.sleep(0.3)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    rules = tmp_path / RULES.name
    # Two minutes are for people; the test has two seconds.
    rules.write_text(RULES.read_text().replace("for: 2m", "for: 2s"))
    with webhook() as (hook, url):
        config = (ROOT / "deploy/alertmanager/alertmanager.yaml").read_text()
        for address in ("http://pager.internal/alertmanager", "http://chat.internal/alertmanager"):
            assert address in config
            config = config.replace(address, url)
        config = config.replace("group_wait: 10s", "group_wait: 1s")
        config = config.replace("group_interval: 2m", "group_interval: 1s")
        (tmp_path / "alertmanager.yaml").write_text(config)
        with (
            serving("--lost-after", str(LOST_AFTER_S)) as sidecar,
            alertmanager(tmp_path / "am", tmp_path / "alertmanager.yaml") as port,
            prometheus(
                tmp_path / "prom",
                targets={"sentinel": [sidecar.port]},
                rules=[rules],
                alertmanager=port,
            ) as prom,
        ):
            yield World(prom, hook, sidecar)


def test_each_trouble_reaches_its_receiver_once_and_a_healthy_run_none(world: World) -> None:
    url = world.sidecar.url
    healthy = trainer(url, "healthy", [])
    healthy.until(200)
    time.sleep(SCRAPE_S)
    healthy.link.close()

    bad = trainer(url, "bad", [NanGradient(130), LogitGrowth(150), Damage(220)])
    world.alive.append(bad)
    bad.until(320)
    world.wait(
        ("channel", "SentinelNonFinite", "bad"),
        ("channel", "SentinelQkNorm", "bad"),
        ("channel", "SentinelRollback", "bad"),
    )

    pause = Command("p1", CommandKind.PAUSE, issued_by="ann")
    paused = trainer(url, "paused", [Order(100, pause)])
    world.alive.append(paused)
    paused.until(120)
    world.wait(("pager", "SentinelUnprotected", "paused"))
    world.alive.remove(paused)
    paused.link.close()

    lost = trainer(url, "lost", [])
    lost.until(60)
    vanish(lost)
    world.wait(("pager", "SentinelTrainerLost", "lost"))

    world.prom.until('sentinel_run_state{run="bad",state="running"} == 1')
    world.sidecar.kill()
    world.wait(("pager", "SentinelSilent", "bad"))

    assert world.hook.fired == {
        ("channel", "SentinelNonFinite", "bad"),
        ("channel", "SentinelQkNorm", "bad"),
        ("channel", "SentinelRollback", "bad"),
        ("pager", "SentinelUnprotected", "paused"),
        ("pager", "SentinelTrainerLost", "lost"),
        ("pager", "SentinelSilent", "bad"),
    }
    assert {key: len(starts) for key, starts in world.hook.starts.items() if len(starts) > 1} == {}
    bad.link.close()


def vanish(made: ReportingTrainer) -> None:
    """As a killed process does: no report, no sign of life and no goodbye any more."""
    link: Any = made.link
    link._finish = lambda how: None
    link.close()

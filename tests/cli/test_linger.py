"""`sentinel run --port`: the sidecar outlives its command by one scrape, where somebody scrapes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

# A trainer in another language, as short as can be; it waits until it was scraped.
TRAINER = """
import json, os, sys, time
from sentinel.client import Client
client = Client(os.environ["SENTINEL_SIDECAR"])
def send(method, what, body):
    url, data = "/v1/runs/r7" + what, json.dumps(body).encode()
    status, answer = client.ask(method, url, data, deadline_s=10)
    assert status == 200, answer
send("PUT", "", {})
for step in range(3):
    send("POST", "/steps", {"observation": {"step": step, "loss": 2.0, "grad_norm": 1.0}})
time.sleep(float(sys.argv[1]))
if sys.argv[2] == "close":
    send("POST", "/close", {})
sys.exit(7)
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


class Scraper:
    """Prometheus, every half second: what it has seen last of the run."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/metrics"
        self.states: list[str] = []
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self) -> None:
        while not self.over.wait(0.5):
            try:
                with urllib.request.urlopen(self.url, timeout=5) as got:
                    text = got.read().decode()
            except OSError:
                continue
            for line in text.splitlines():
                if line.startswith("sentinel_run_state{") and line.endswith(" 1.0"):
                    self.states.append(line.split('state="')[1].split('"')[0])


Start = Callable[..., tuple["subprocess.Popen[str]", int]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def starting(*words: str, options: tuple[str, ...] = ()) -> tuple[subprocess.Popen[str], int]:
        port = free_port()
        script = tmp_path / "trainer.py"
        script.write_text(TRAINER)
        run = [sys.executable, "-m", "sentinel.cli.main", "run", "--port", str(port), *options]
        environment = {k: v for k, v in os.environ.items() if k != "SENTINEL_SIDECAR"}
        process = subprocess.Popen(
            [*run, "--", sys.executable, str(script), *words],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        started.append(process)
        return process, port

    yield starting
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stderr is not None:
            process.stderr.close()


def test_a_scraper_sees_the_end_and_the_shell_waits_no_longer_than_that(start: Start) -> None:
    process, port = start("3", "close")
    scraper = Scraper(port)
    _, said = process.communicate(timeout=90)
    scraper.over.set()
    assert process.returncode == 7
    assert scraper.states[0] == "running"
    assert scraper.states[-1] == "finished"
    assert "stays until it is scraped once more" in said


@pytest.mark.parametrize(
    ("words", "scraped", "options"),
    [
        (("0", "close"), False, ()),  # nobody scrapes
        (("3", "die"), True, ()),  # nothing is known of its end
        (("3", "close"), True, ("--linger", "0")),
    ],
)
def test_it_ends_with_its_command_where_there_is_nothing_to_be_seen(
    start: Start, words: tuple[str, ...], scraped: bool, options: tuple[str, ...]
) -> None:
    process, port = start(*words, options=options)
    scraper = Scraper(port) if scraped else None
    _, said = process.communicate(timeout=90)
    if scraper is not None:
        scraper.over.set()
        assert scraper.states
    assert process.returncode == 7
    assert "stays until" not in said


def test_ctrl_c_ends_the_wait_and_leaves_no_sidecar(start: Start) -> None:
    process, port = start("3", "close")
    scraper = Scraper(port)
    assert process.stderr is not None
    while not scraper.states:
        time.sleep(0.1)
    scraper.over.set()  # Prometheus goes away: nothing more will come
    for line in process.stderr:
        if "stays until" in line:
            break
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 7
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=5).close()

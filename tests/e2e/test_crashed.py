"""A run that an exception has ended is missed, not taken for finished."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sentinel.client import Client
from tests.support.sidecars import serving

pytestmark = [pytest.mark.e2e, pytest.mark.torch]

SCRIPT = """
import sys, torch, sentinel
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
how = sys.argv[1]

def loop():
    for t in range(6):
        optimizer.zero_grad()
        model(torch.ones(4, 2)).square().mean().backward()
        optimizer.step()
    if how in ("raises", "raises in with"):
        raise RuntimeError("out of memory, say")
    if how == "interrupted in with":
        raise KeyboardInterrupt

session = sentinel.attach(model=model, optimizer=optimizer, run_id="r7", run_dir=sys.argv[2])
if how == "goes well after an error":
    session.detach()
    try:
        raise ValueError("out of memory, say")
    except ValueError:  # the second try is made in here
        session = sentinel.attach(
            model=model, optimizer=optimizer, run_id="r7", run_dir=sys.argv[2]
        )
        loop()
        session.detach()
elif how.endswith("in with"):
    with session:
        loop()
else:
    loop()
"""


@pytest.mark.parametrize(
    ("how", "ends"),
    [
        ("goes well", "finished"),
        ("goes well in with", "finished"),
        ("goes well after an error", "finished"),
        ("interrupted in with", "finished"),
        ("raises", "lost"),
        ("raises in with", "lost"),
    ],
)
def test_only_a_run_that_ended_by_itself_says_goodbye(how: str, ends: str, tmp_path: Path) -> None:
    with serving("--lost-after", "1") as process:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, how, str(tmp_path)],
            env={**os.environ, "SENTINEL_SIDECAR": process.url},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert bool(done.returncode) is (ends == "lost" or how.startswith("interrupted")), (
            done.stderr[-2000:]
        )
        assert until_not_running(process.url)["state"] == ends
    text = "".join(p.read_text() for p in tmp_path.glob("*.prom"))
    assert text == ""  # the sidecar tells


def until_not_running(url: str) -> dict[str, Any]:
    client = Client(url)
    until = time.perf_counter() + 90
    while True:
        run: dict[str, Any] = json.loads(client.get("/v1/runs/r7", deadline_s=5.0))
        if run["state"] != "running" or time.perf_counter() > until:
            client.close()
            return run
        time.sleep(0.2)

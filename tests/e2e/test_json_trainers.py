"""Two JSON trainers over HTTP under one name, and a sidecar that is killed between their steps."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from sentinel.traces.replay import replay
from tests.support.sidecars import ServeProcess, serving

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STEPS = 40


class Trainer:
    """One process of somebody's, in whatever language."""

    def __init__(self, process: ServeProcess, loss: float) -> None:
        self.url = f"{process.url}/v1/runs/r7"
        self.headers: dict[str, str] = {}
        self.loss = loss
        self.refused: list[str] = []

    def ask(self, method: str, path: str = "", body: Any = None) -> httpx.Response:
        return httpx.request(method, self.url + path, json=body, headers=self.headers, timeout=60.0)

    def put(self, **body: Any) -> httpx.Response:
        got = self.ask("PUT", "", {"layers": ["a", "b"], **body})
        if got.status_code == 200 and got.json()["session"]:
            self.headers["sentinel-session"] = got.json()["session"]
        return got

    def step(self, step: int) -> bool:
        """One step; False when it was refused and trains on alone."""
        seen = {"step": step, "loss": self.loss + 0.01 * (step % 5), "grad_norm": 1.0}
        got = self.ask("POST", "/steps", seen)
        if got.status_code == 200:
            assert got.json()["recorded"]
            return True
        self.refused.append(got.json()["code"])
        return False


def test_the_second_trainer_is_told_and_never_mixed_in(tmp_path: Path) -> None:
    with serving("--data", str(tmp_path)) as process:
        first, second = Trainer(process, 2.0), Trainer(process, 7.0)
        assert first.put(exclusive=True).status_code == 200
        assert first.step(0)
        refused = second.put(exclusive=True)
        assert (refused.status_code, refused.json()["code"]) == (409, "fenced")
        for step in range(1, STEPS):
            if step == STEPS // 2:
                process.kill()
                process.start(process.port)
            assert not second.step(step)
            assert first.step(step)
        assert set(second.refused) == {"fenced"}
        metrics = httpx.get(f"{process.url}/metrics").text
        assert 'sentinel_second_writers_refused{run="r7"}' in metrics
        assert first.ask("POST", "/close", {}).json()["state"] == "finished"
        told = first.ask("GET", "/series?name=loss").json()["series"]["loss"]
        assert told["step"] == list(range(STEPS))
        assert told["value"] == [2.0 + 0.01 * (step % 5) for step in range(STEPS)]
        assert second.put(exclusive=True).status_code == 200  # the name is free now
        assert second.step(0)
        process.stop()
    report = replay(tmp_path / "runs" / "r7")
    assert (report.identical, report.steps) == (True, STEPS + 1)


def test_curl_needs_nothing_to_carry() -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    with serving() as process:
        where = f"{process.url}/v1/runs/r7"

        def say(method: str, address: str, body: str) -> str:
            return subprocess.run(
                [
                    *(curl, "-s", "-o", "-", "-w", " %{http_code}", "-X", method, address),
                    *("-H", "content-type: application/json", "-d", body),
                ],
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            ).stdout

        for _ in range(2):
            assert say("PUT", where, '{"layers": ["embed", "head"]}').endswith(" 200")
            step = '{"step": 0, "loss": 10.8, "grad_norm": "nan"}'
            assert say("POST", f"{where}/steps", step).endswith(" 200")
        other = say("POST", f"{where}/steps", '{"step": 0, "loss": 3.1, "grad_norm": 1.0}')
        assert other.endswith(" 409")
        assert '"conflict"' in other

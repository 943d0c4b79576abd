"""A trainer in another language: it speaks JSON to an in-process sidecar that can start again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from sentinel.sidecar.app import create_app
from sentinel.sidecar.service import Service
from sentinel.sidecar.settings import Settings
from sentinel.traces.replay import replay
from tests.support import FakeClock

TOKEN = "t" * 16


class Sidecar:
    """It keeps its data when it starts again."""

    def __init__(self, place: Path, clock: FakeClock) -> None:
        self.place, self.clock = place, clock
        self.client: TestClient
        self.service: Service
        self.start()

    def start(self) -> None:
        settings = Settings(data_dir=self.place, token=TOKEN)
        app = create_app(settings, clock=self.clock, timer=lambda: 0.0)
        headers = {"authorization": f"Bearer {TOKEN}"}
        self.client = TestClient(app, base_url="http://localhost", headers=headers)
        self.service = app.state.service


class Foreign:
    """A trainer of run "j"; `carried` is the session that it sends with every request."""

    def __init__(self, place: Path, clock: FakeClock, sidecar: Sidecar | None = None) -> None:
        self.place = place
        self.clock = clock
        self.sidecar = sidecar or Sidecar(place, clock)
        self.carried = ""

    @property
    def service(self) -> Service:
        return self.sidecar.service

    def beside(self) -> Foreign:
        """Another trainer at the same sidecar, under the same name."""
        return Foreign(self.place, self.clock, self.sidecar)

    def again(self) -> None:
        """The sidecar starts again."""
        self.service.close()
        self.sidecar.start()

    def ask(self, method: str, path: str = "", body: Any = None, status: int = 200) -> Any:
        headers = {"sentinel-session": self.carried} if self.carried else {}
        client = self.sidecar.client
        got = client.request(method, f"/v1/runs/j{path}", json=body, headers=headers)
        assert got.status_code == status, got.text
        return got.json()

    def put(self, status: int = 200, **body: Any) -> Any:
        return self.ask("PUT", "", body, status)

    def alone(self, **body: Any) -> str:
        """It registers to write alone; what it carries from then on."""
        self.carried = self.put(exclusive=True, **body)["session"]
        return self.carried

    def step(self, step: int, norm: Any = 1.0, status: int = 200, **beside: Any) -> Any:
        columns = beside.pop("columns", {})
        loss = beside.pop("loss", 2.0 + 0.001 * (step % 7))
        seen = {"step": step, "loss": loss, "grad_norm": norm, "columns": columns}
        return self.ask("POST", "/steps", {"observation": seen, **beside}, status)

    def actions(self) -> dict[int, str]:
        found = self.ask("GET", "/series?name=action")["series"]["action"]
        return dict(zip(found["step"], found["value"], strict=True))


def proved(trainer: Foreign, steps: int) -> None:
    """Every decision of the record is computed again, and is the same."""
    report = replay(trainer.place / "runs" / "j")
    assert (report.steps, report.unverified) == (steps, 0)
    assert report.identical
    assert report.state_mismatches == 0

"""A run that is not guarded any more, though the last step that was decided was: who hears of it.

Seen red: the .prom file, the list of runs and the metrics went on saying "warming" for ever, and no
alert could fire.
"""

from __future__ import annotations

import gc
import json
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sentinel_hooks
from sentinel.cli import main as cli
from sentinel.client import Client
from sentinel.sidecar.app import create_app
from sentinel.sidecar.settings import Settings
from sentinel_hooks import link, outlets
from tests.support.served import served
from tests.support.waits import until

pytestmark = [pytest.mark.torch, pytest.mark.e2e]


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(outlets, "TEXTFILE_S", 0.05)


class Loop:
    """Five steps of an optimizer that is watched, then one that was made anew."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.watched = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.session = sentinel_hooks.attach(
            model=self.model, optimizer=self.watched, run_id="r7", **options
        )
        self.steps(self.watched, 5)

    def steps(self, optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            self.model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def forsake(self) -> None:
        self.steps(torch.optim.SGD(self.model.parameters(), lr=0.01), 40)
        assert self.session.status().protection == "blind"

    def breaks(self) -> None:
        self.session._switch.off = "sentinel failed at gate again and again: OSError"
        assert self.session.status().protection == "off"


FORSAKEN = "training goes on, but no watched optimizer steps any more"
WAYS: list[tuple[str, Callable[[Loop], None], str]] = [
    ("blind", Loop.forsake, FORSAKEN),
    ("off", Loop.breaks, "sentinel failed at gate again and again: OSError"),
]


@pytest.mark.parametrize(("state", "happens", "why"), WAYS, ids=["blind", "off"])
def test_without_a_sidecar_the_prom_file_says_so(
    tmp_path: Path, state: str, happens: Callable[[Loop], None], why: str
) -> None:
    loop = Loop(sidecar=None, run_dir=tmp_path)
    page = tmp_path / "sentinel-r7.prom"

    def shown() -> list[str]:
        lines = page.read_text().splitlines() if page.exists() else []
        of = [x for x in lines if x.startswith("sentinel_protection{") and x.endswith(" 1.0")]
        return [x.partition('state="')[2].partition('"')[0] for x in of]

    until(lambda: shown() == ["warming"])
    happens(loop)
    until(lambda: shown() == [state])
    loop.session.detach()


@pytest.mark.parametrize("decide", ["sidecar", "trainer"])
@pytest.mark.parametrize(("state", "happens", "why"), WAYS, ids=["blind", "off"])
def test_the_sidecar_says_so_and_why_until_the_watched_optimizer_steps_again(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    state: str,
    happens: Callable[[Loop], None],
    why: str,
    decide: str,
) -> None:
    app = create_app(Settings(), clock=time.time, timer=time.perf_counter)
    with served(app, tmp_path / "s.sock") as url:
        client = Client(url)
        loop = Loop(sidecar=url, decide=decide, run_dir=tmp_path)

        def about() -> dict[str, Any]:
            found: dict[str, Any] = json.loads(client.get("/v1/runs/r7", deadline_s=20.0))
            return found

        until(lambda: about()["protection"] == "warming")
        happens(loop)
        until(lambda: about()["protection"] == state)
        assert about()["protection_why"] == why
        line = f'sentinel_protection{{run="r7",state="{state}"}} 1.0'
        assert line in client.get("/metrics", deadline_s=20.0).decode()
        cli.main(["status", "r7", "--sidecar", url])
        said = capsys.readouterr().out
        assert f"protection {state}" in said
        assert why in said
        if state == "blind":
            loop.steps(loop.watched, 1)
            until(lambda: about()["protection"] == "warming")
            assert about()["protection_why"] == ""
        loop.session.detach()
        client.close()


def test_being_asked_keeps_no_session_alive(tmp_path: Path) -> None:
    loop = Loop(sidecar=None, run_dir=tmp_path)
    model, session = weakref.ref(loop.model), weakref.ref(loop.session)
    del loop
    gc.collect()
    until(lambda: gc.collect() >= 0 and session() is None and model() is None)

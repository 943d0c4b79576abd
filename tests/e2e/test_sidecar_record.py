"""The record without holes or doubles: a sidecar killed with -9 while trainers report.

Trainers are threads with the real link and the real engine over simulated runs with faults; each
writes its own trace, which the series over HTTP must equal row for row.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from sentinel.client import Client
from sentinel.core import engine
from sentinel.core.events import Event
from sentinel.core.policy import Policy
from sentinel.core.state import State
from sentinel.core.types import Action, Decision, Observation
from sentinel.traces.reader import Reader
from sentinel.traces.recorder import Recorder
from sentinel.wire.messages import Layer
from sentinel_hooks import link as links
from sentinel_hooks.link import Breaker, Link, make_link
from tests.support import mounts
from tests.support.sidecars import ServeProcess, serving
from tests.support.simulated import (
    Damage,
    Garbage,
    LogitGrowth,
    NanGradient,
    NanLoss,
    SimulatedTrainer,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.torch]

LAYERS = 6
POLICY = Policy.load("default")


@dataclass
class LinkedTrainer(SimulatedTrainer):
    """A simulated trainer whose decisions go over a link; see SimulatedTrainer."""

    link: Link | None = None
    pause_s: float = 0.0

    def __post_init__(self) -> None:
        self.decider = self._ask
        super().__post_init__()

    def _ask(self, state: State, observation: Observation, policy: Policy) -> Decision:
        own = engine.decide(state, observation, policy)
        assert self.link is not None
        decision, _ = self.link.decide(observation, own, state)
        return decision

    def _note(self, event: Event) -> None:
        super()._note(event)
        assert self.link is not None
        self.link.event(event)

    def step(self) -> None:
        super().step()
        assert self.link is not None
        last = self.steps[-1]
        self.link.settled(last.observation, last.decision, last.outcome)
        if self.pause_s:
            time.sleep(self.pause_s)


@dataclass
class Fleet:
    """Trainers in threads, each with its own trace, before one sidecar."""

    url: str
    folder: Path
    trainers: dict[str, LinkedTrainer] = field(default_factory=dict)
    threads: list[threading.Thread] = field(default_factory=list)

    def add(self, name: str, steps: int, *, seed: int, pause_s: float = 0.0, **more: Any) -> Link:
        options: dict[str, Any] = {"breaker": Breaker(floor_s=0.05, retry_s=0.02)} | more
        link = make_link(
            self.url,
            run=name,
            incarnation=f"life-{name}",
            policy=POLICY,
            layers=tuple(Layer(f"layer{at}") for at in range(LAYERS)),
            **options,
        )
        third = steps // 3
        trainer = LinkedTrainer(
            seed=seed,
            layers=LAYERS,
            link=link,
            pause_s=pause_s,
            faults=[
                NanGradient(third // 2),
                LogitGrowth(third // 3, 3),
                Garbage(third, 2),
                Damage(2 * third, 2.5),
                NanLoss(steps - third // 2, 2),
            ],
            recorder=Recorder(
                self.folder / name, run=name, policy=POLICY, state=State(), layers=["l"] * LAYERS
            ),
        )
        self.trainers[name] = trainer
        thread = threading.Thread(target=trainer.run, args=(steps,), name=name)
        self.threads.append(thread)
        return link

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    @property
    def running(self) -> bool:
        return any(thread.is_alive() for thread in self.threads)

    def finish(self, timeout_s: float = 120.0) -> None:
        """All steps are made and all reports delivered; the runs are closed."""
        for thread in self.threads:
            thread.join(timeout_s)
            assert not thread.is_alive(), thread.name
        until = time.monotonic() + timeout_s
        for name, trainer in self.trainers.items():
            assert trainer.link is not None
            while trainer.link.status().buffered and time.monotonic() < until:
                time.sleep(0.05)
            assert not trainer.link.status().buffered, (name, trainer.link.status())
            trainer.link.close("finished", trainer.state)
            assert trainer.recorder is not None
            trainer.recorder.close()


@pytest.fixture
def ask() -> Callable[..., Any]:
    """Ask a sidecar for one of its pages."""

    def asking(process: ServeProcess, path: str) -> Any:
        client = Client(process.url)
        try:
            return json.loads(client.get(path, deadline_s=30.0))
        finally:
            client.close()

    return asking


Row = tuple[int, Any, Any, Any, Any]


def over_http(ask: Callable[..., Any], process: ServeProcess, run: str) -> list[Row]:
    """All rows of a run as the sidecar shows them."""
    names = ("loss", "grad_norm", "lr", "action")
    found = ask(process, f"/v1/runs/{quote(run)}/series?name={','.join(names)}&points=20000")
    assert not found["downsampled"]
    columns = [found["series"][name]["value"] for name in names]
    steps = found["series"]["loss"]["step"]
    return [tuple(row) for row in zip(steps, *columns, strict=True)]


def own_rows(folder: Path) -> list[Row]:
    """The same rows from the trainer's own trace."""
    curve = Reader(folder).curve()

    def value(number: float, measured: bool) -> Any:
        if not measured:
            return None
        if number != number:
            return "nan"
        return number if abs(number) != float("inf") else "inf" if number > 0 else "-inf"

    rows = zip(
        curve.step.tolist(),
        curve.loss.tolist(),
        curve.loss_measured.tolist(),
        curve.grad_norm.tolist(),
        curve.norm_measured.tolist(),
        curve.lr.tolist(),
        curve.executed.tolist(),
        strict=True,
    )
    return [
        (step, value(loss, lm), value(norm, nm), lr, Action(done).name.lower())
        for step, loss, lm, norm, nm, lr, done in rows
    ]


def actions_of(trainer: SimulatedTrainer) -> list[tuple[int, str, str]]:
    return [
        (s.observation.step, s.outcome.executed.name.lower(), s.decision.rule)
        for s in trainer.steps
        if s.outcome.executed is not Action.PROCEED
    ]


def check(ask: Callable[..., Any], process: ServeProcess, fleet: Fleet) -> None:
    """Everything that a trainer did is in the sidecar, once."""
    metrics = Client(process.url)
    text = metrics.get("/metrics", deadline_s=30.0).decode()
    metrics.close()
    for name, trainer in fleet.trainers.items():
        about = ask(process, f"/v1/runs/{name}")
        assert about["record"]["holes"] == 0, (name, about["missing_reports"])
        assert about["record"]["frames"] == len(trainer.steps)
        assert about["state"] == "finished"
        assert over_http(ask, process, name) == own_rows(fleet.folder / name)
        decisions = ask(process, f"/v1/runs/{name}/decisions")["decisions"]
        told = [(d["step"], d["action"], d["rule"]) for d in reversed(decisions)]
        assert sorted(told) == sorted(actions_of(trainer))
        counters = trainer.state.ledger.counters
        assert f'sentinel_steps_total{{run="{name}"}} {float(counters.steps)}' in text
        for rule, count in counters.skipped:
            line = f'sentinel_skipped_steps_total{{run="{name}",rule="{rule}"}} {float(count)}'
            assert line in text, line
        last = ask(process, f"/v1/runs/{name}/layers?from=0&to=40&points=300")
        assert len(last["values"]) == LAYERS
        assert last["rows"] == 41


def kill_and_restart(process: ServeProcess, fleet: Fleet, kills: int, chance: Any) -> int:
    done = 0
    for _ in range(kills):
        time.sleep(chance.uniform(0.05, 0.8))
        if not fleet.running:
            break
        process.kill()
        done += 1
        time.sleep(chance.uniform(0.0, 0.3))
        process.start(process.port)
    return done


@pytest.mark.parametrize(
    ("trainers", "kills", "steps"),
    [
        pytest.param(4, 4, 500, id="some"),
        pytest.param(
            20, 30, 3000, id="twenty", marks=[pytest.mark.full, pytest.mark.timeout(1800)]
        ),
    ],
)
def test_a_sidecar_killed_at_random_moments_loses_and_doubles_nothing(
    ask: Callable[..., Any], tmp_path: Path, trainers: int, kills: int, steps: int
) -> None:
    chance = random.Random(7)
    with serving() as process:
        fleet = Fleet(process.url, tmp_path)
        for at in range(trainers):
            decide = "trainer" if at % 4 == 3 else "sidecar"
            fleet.add(f"r{at}", steps, seed=at, pause_s=0.02, decide=decide)
        fleet.start()
        died = kill_and_restart(process, fleet, kills, chance)
        fleet.finish(600.0)
        acted = sum(len(actions_of(trainer)) for trainer in fleet.trainers.values())
        late = sum(ask(process, f"/v1/runs/{n}")["record"]["late"] for n in fleet.trainers)
        print(f"{died} kills, {trainers * steps} reports, {acted} actions, {late} late")
        check(ask, process, fleet)
        assert died >= 2
        assert acted >= 4 * trainers
        process.kill()
        process.start(process.port)  # and once more, now that all is over
        for name in fleet.trainers:
            assert over_http(ask, process, name) == own_rows(tmp_path / name)


def test_a_hole_beyond_the_buffer_is_as_large_as_the_missing_rows(
    ask: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "BUFFER_FRAMES", 40)
    with serving() as process:
        fleet = Fleet(process.url, tmp_path)
        link = fleet.add("r", 0, seed=1)
        trainer = fleet.trainers["r"]
        fleet.start()
        trainer.run(60)
        process.kill()
        trainer.run(100)
        process.start(process.port)
        until = time.monotonic() + 30.0
        while link.status().buffered and time.monotonic() < until:
            time.sleep(0.05)
        trainer.run(20)
        fleet.finish()
        dropped = link.status().dropped
        about = ask(process, "/v1/runs/r")
        own, shown = own_rows(tmp_path / "r"), over_http(ask, process, "r")
        missing = [row for row in own if row not in shown]
        print(f"{dropped} dropped, {about['missing_reports']}")
        assert dropped >= 50
        assert about["record"]["holes"] == len(missing) == dropped
        assert about["record"]["dropped"] == dropped
        assert shown == [row for row in own if row not in missing]


def test_a_second_live_trainer_is_refused_is_shown_and_goes_on_embedded(
    ask: Callable[..., Any], tmp_path: Path
) -> None:
    with serving() as process:
        fleet = Fleet(process.url, tmp_path)
        fleet.add("r", 0, seed=1)
        first = fleet.trainers["r"]
        first.run(30)
        second = make_link(
            process.url,
            run="r",
            incarnation="another-life",
            policy=POLICY,
            breaker=Breaker(floor_s=0.05),
        )
        assert second.status().state == "refused"
        assert "another live process" in second.status().detail
        assert ask(process, "/v1/runs/r")["second_writers_refused"] == ["another-life"]
        process.kill()
        process.start(process.port)
        alone = LinkedTrainer(seed=2, link=second)
        alone.run(50)
        assert len(alone.steps) == 50
        assert second.status().decided["trainer"] == 50
        first.run(30)
        about = ask(process, "/v1/runs/r")
        assert about["incarnation"] == "life-r"
        second.close()
        fleet.threads.clear()
        fleet.finish()
        assert over_http(ask, process, "r") == own_rows(tmp_path / "r")


def test_reports_that_a_full_disk_did_not_take_are_told_again_until_it_did(
    ask: Callable[..., Any], tmp_path: Path
) -> None:
    with (
        mounts.small_disk(tmp_path / "disk", "2m") as disk,
        serving("--data", str(disk)) as process,
    ):
        fleet = Fleet(process.url, tmp_path)
        link = fleet.add("r", 0, seed=1)
        trainer = fleet.trainers["r"]
        fleet.start()
        trainer.run(60)
        filler = mounts.fill(disk)
        trainer.run(120)
        assert link.status().buffered > 50
        filler.unlink()
        trainer.run(20)
        fleet.finish()
        about = ask(process, "/v1/runs/r")
        assert about["record"]["holes"] == 0
        assert about["unwritten_reports"] > 50
        assert over_http(ask, process, "r") == own_rows(tmp_path / "r")


def test_embedded_runs_in_a_watched_folder_are_shown_while_they_run(
    ask: Callable[..., Any], tmp_path: Path
) -> None:
    recorder = Recorder(
        tmp_path / "r7", run="r7", policy=POLICY, state=State(), layers=["l"] * LAYERS
    )
    trainer = SimulatedTrainer(seed=1, layers=LAYERS, recorder=recorder)
    trainer.run(100)
    with serving("--watch", str(tmp_path)) as process:
        (shown,) = ask(process, "/v1/runs")["runs"]
        assert (shown["run"], shown["state"], shown["watched"]) == ("r7", "running", True)
        assert over_http(ask, process, "r7") == own_rows(tmp_path / "r7")
        trainer.run(20)
        recorder.close()
        until = time.monotonic() + 30.0
        while ask(process, "/v1/runs/r7")["state"] != "finished" and time.monotonic() < until:
            time.sleep(0.2)
        about = ask(process, "/v1/runs/r7")
        assert (about["state"], about["step"]) == ("finished", 119)

"""What people are told of a snapshot's copy on disk: whole, damaged, or why nobody knows."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from sentinel.core import engine
from sentinel.core.state import Snapshot
from sentinel.sidecar.app import create_app
from sentinel.sidecar.jobs import Jobs
from sentinel.sidecar.service import Service
from sentinel.sidecar.settings import Settings
from sentinel.traces import snapshots as saved
from tests.sidecar.test_verify import flip, snapshot
from tests.support import FakeClock
from tests.support.waits import until

HEALTHY = tuple(Snapshot(step, healthy=True) for step in (100, 200, 300, 400))
CANDIDATE = Snapshot(450, healthy=False, quiet=7)


class Place:
    """A sidecar, a run that reports to it, and the run's folder."""

    def __init__(self, folder: Path, clock: FakeClock, **settings: Any) -> None:
        self.folder = folder / "runs" / "r7"
        given = {"run_dirs": (folder / "runs",), "verify_bytes_per_s": 1e12, "token": "t"}
        self.app = create_app(Settings(**given | settings), clock=clock, timer=lambda: 0.0)
        self.service: Service = self.app.state.service
        self.client = TestClient(
            self.app, base_url="http://localhost", headers={"authorization": "Bearer t"}
        )

    def register(self, *known: Snapshot) -> None:
        """The run, with these snapshots in its ledger."""
        self.client.put("/v1/runs/r7", json={})
        run = self.service.runs.get("r7")
        state = engine.initial(460)
        run.mirror.state = replace(state, ledger=replace(state.ledger, snapshots=known))

    def read(self) -> None:
        """What is due is read, and told."""
        assert self.service.verifier is not None
        self.service.verifier.turn({"r7": self.service.seen_at("r7")})

    def rows(self) -> dict[int, dict[str, Any]]:
        about = self.client.get("/v1/runs/r7").json()
        steps = [row["step"] for row in about["snapshots"]]
        assert steps == sorted(steps, reverse=True)
        return {row["step"]: row for row in about["snapshots"]}

    def order(self, **body: Any) -> dict[str, Any]:
        got = self.client.post("/v1/runs/r7/commands", json={"kind": "rollback", **body})
        assert got.status_code == 202, got.text
        found: dict[str, Any] = got.json()
        return found


@pytest.fixture
def place(tmp_path: Path, clock: FakeClock) -> Iterator[Place]:
    found = Place(tmp_path, clock)
    yield found
    found.service.close()


def test_each_says_what_is_known_of_its_copy_and_why_not_more(
    place: Place, clock: FakeClock
) -> None:
    place.register(*HEALTHY, CANDIDATE)
    paths = {step: snapshot(place.folder, step) for step in (100, 200, 300)}
    flip(paths[200] / "__0_0.distcp")
    os.utime(paths[300] / saved.COMMIT, (clock.now, clock.now))  # its trainer is at it
    place.read()
    clock.advance(50.0)
    rows = place.rows()
    assert {step: row["disk"] for step, row in rows.items()} == {
        100: "sound",
        200: "damaged",
        300: "unread",
        400: "none",
        450: "none",
    }
    assert (rows[100]["checked_s_ago"], rows[100]["detail"]) == (50.0, "")
    assert "__0_0.distcp is damaged: its CRC32 is" in rows[200]["detail"]
    assert rows[200]["checked_at"] == clock.now - 50.0
    assert "was not read" in rows[300]["detail"]
    assert "in the trainer's memory only" in rows[400]["detail"]
    assert (rows[400]["checked_at"], rows[400]["name"]) == (None, None)
    assert (rows[450]["healthy"], rows[450]["quiet"]) == (False, 7)


def test_of_several_copies_of_a_step_the_last_that_was_written_counts(place: Place) -> None:
    place.register(HEALTHY[0])
    old = snapshot(place.folder, 100)
    new = old.with_name(saved.snapshot_name(100, 0, 12))
    shutil.copytree(old, new)
    for file in new.iterdir():
        os.utime(file, (1.0, 1.0))
    flip(old / "__0_0.distcp")
    place.read()
    assert (place.rows()[100]["disk"], place.rows()[100]["name"]) == ("sound", new.name)
    flip(new / "__0_0.distcp")
    flip(old / "__0_0.distcp")
    assert place.service.verifier is not None
    place.service.verifier.found = {}
    place.read()
    assert place.rows()[100]["disk"] == "damaged"


def test_the_users_own_checkpoint_is_said_not_to_be_read(place: Place) -> None:
    place.register(HEALTHY[0])
    path = place.folder / saved.DIRECTORY / saved.snapshot_name(100, 0, 1)
    path.mkdir(parents=True)
    about = {"run": "r7", "step": 100, "attempt": 0, "adopted": "/scratch/step-100.pt"}
    saved.write_manifest(path, 0, [], about | {"parameters": "p", "world": 1})
    saved.commit(path, 1, {"run": "r7"})
    place.read()
    assert place.rows()[100]["disk"] == "adopted"
    place.read()  # what was looked up once stays known
    assert place.rows()[100]["disk"] == "adopted"


@pytest.mark.parametrize(
    ("settings", "look", "ended", "why"),
    [
        ({"run_dirs": ()}, False, False, "sees no snapshots: start it with --run-dir RUN_DIR"),
        ({"verify_every_s": 0.0}, False, False, "it was started with --verify-every 0"),
        ({}, False, False, "has not looked for its snapshots yet"),
        ({}, False, True, "over for too long"),
        ({"run_dirs": (Path("/nowhere"),)}, True, False, "no directory in /nowhere: its run_dir"),
    ],
)
def test_where_nothing_can_be_seen_the_reason_is_said(
    tmp_path: Path,
    clock: FakeClock,
    settings: dict[str, Any],
    look: bool,
    ended: bool,
    why: str,
) -> None:
    place = Place(tmp_path, clock, **settings)
    place.register(*HEALTHY)
    snapshot(place.folder, 100)
    if look:
        place.read()
    if ended:
        place.client.post("/v1/runs/r7/close", json={"state": "finished"})
    for row in place.rows().values():
        assert row["disk"] == "unseen"
        assert why in row["detail"]
    assert why in place.client.get("/v1/runs/r7/snapshots").json()["why"]
    assert place.client.get("/v1/runs/r7").json()["damaged_snapshots"] == (0 if look else None)
    if not ended:  # nothing is known against it
        assert place.order()["warning"] == ""
    place.service.close()


def test_a_rollback_to_a_damaged_one_is_given_with_a_warning_that_is_kept(place: Place) -> None:
    place.register(*HEALTHY)
    for step in (100, 200, 300, 400):
        path = snapshot(place.folder, step)
        if step in (300, 400):
            flip(path / "__0_0.distcp")
    place.read()
    (listed,) = place.client.get("/v1/runs").json()["runs"]
    assert listed["damaged_snapshots"] == 2
    told = place.order(id="a")
    assert told["state"] == "pending"
    assert "the snapshot of step 400 is damaged on disk (__0_0.distcp" in told["warning"]
    # Not to 300, which is damaged as well; and the memory comes before the disk.
    assert told["warning"].endswith("; else the next older one, of step 200 (verified)")
    assert "takes the copy in the trainer's memory, if there still is one" in told["warning"]
    assert place.order(id="a")["warning"] == told["warning"]  # the same order
    assert "of step 300 is damaged on disk" in place.order(target=300)["warning"]
    assert place.order(target=200)["warning"] == ""
    assert place.order(kind="pause")["warning"] == ""
    lines = [e for e in place.service.people.recent if e.action == "command"]
    warned = ["warning" in e.detail for e in lines if not e.detail.get("again")]
    assert warned == [True, True, False, False]


def test_the_oldest_one_says_that_nothing_may_be_put_back(place: Place) -> None:
    place.register(*HEALTHY[:2])
    for step in (100, 200):
        flip(snapshot(place.folder, step) / "__0_0.distcp")
    place.read()
    for row in place.rows().values():
        assert "nothing is put back, the step is skipped" in row["warning"]
    place.client.post("/v1/runs/r7/close", json={"state": "halted"})
    rows = place.rows()
    assert "memory" not in rows[100]["warning"]  # its process has ended
    assert rows[200]["warning"].endswith("No older healthy snapshot is known to be whole")


def test_a_run_whose_ledger_is_not_known_lists_what_lies_on_disk(place: Place) -> None:
    place.client.put("/v1/runs/r7", json={})
    flip(snapshot(place.folder, 100) / ".metadata")
    snapshot(place.folder, 200)
    place.read()
    rows = place.rows()
    assert {s: (r["healthy"], r["disk"]) for s, r in rows.items()} == {
        200: (None, "sound"),
        100: (None, "damaged"),
    }
    assert place.client.get("/v1/runs").json()["runs"][0]["damaged_snapshots"] == 1


def test_what_comes_while_a_large_one_is_read_is_seen_at_once(
    place: Place, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.register(*HEALTHY)
    verifier = place.service.verifier
    assert verifier is not None
    snapshot(place.folder, 100, size=8 * 2**20)
    disk: list[str] = []

    def wait(seconds: float) -> None:
        clock.advance(11.0)
        if not (place.folder / saved.DIRECTORY / saved.snapshot_name(200, 0, 1)).exists():
            snapshot(place.folder, 200)
        disk.append(place.rows()[200]["disk"])

    monkeypatch.setattr(verifier._stop, "wait", wait)
    place.read()
    assert (disk[0], disk[-1]) == ("none", "unread")


def test_a_restarted_sidecar_knows_what_was_damaged_and_reads_that_at_once(
    tmp_path: Path, clock: FakeClock
) -> None:
    place = Place(tmp_path, clock, data_dir=tmp_path / "data")
    place.register(*HEALTHY)
    paths = {step: snapshot(place.folder, step) for step in (100, 200)}
    flip(paths[200] / "__0_0.distcp")
    with place.client:  # its jobs run
        until(lambda: place.rows()[200]["disk"] == "damaged")
        before = place.rows()[200]["checked_at"]
        assert place.service.verifier is not None
        until(lambda: place.service.verifier is not None and not place.service.verifier.busy)
        asyncio.run(Jobs(place.service).verify())  # which tells of it
    clock.advance(60.0)
    place = Place(tmp_path, clock, data_dir=tmp_path / "data")
    place.register(*HEALTHY)
    assert place.service.verifier is not None
    kept = place.service.verifier.found["r7"]
    assert [(c.step, str(c.result), c.checked_at) for c in kept.values()] == [
        (200, "damaged", before)
    ]
    place.read()
    assert place.rows()[200]["checked_at"] == clock.now
    assert not any(c.changed for c in place.service.verifier.news())  # nobody is told twice
    flip(paths[200] / "__0_0.distcp")  # mended
    clock.advance(86_400.0)
    place.read()
    assert place.rows()[200]["disk"] == "sound"
    place.service.close()

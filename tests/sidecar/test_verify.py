"""Snapshots are read again: what is damaged is shown, and what is being deleted is not damage."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from sentinel.core.errors import ConfigError
from sentinel.sidecar import exporter
from sentinel.sidecar import verify as verifying
from sentinel.sidecar.app import create_app
from sentinel.sidecar.jobs import Jobs
from sentinel.sidecar.service import Service
from sentinel.sidecar.settings import Settings
from sentinel.sidecar.verify import Result, Verifier
from sentinel.traces import snapshots as saved
from tests.support import FakeClock
from tests.support.reports import Reporter
from tests.support.simulated import SimulatedTrainer
from tests.support.waits import until

DAY_S = 86_400.0
MIB = 2**20


def snapshot(
    directory: Path, step: int, *, run: str = "r7", size: int = 5000, ranks: int = 1
) -> Path:
    """One as a trainer writes it, long ago, with weights of so many bytes a rank."""
    path = directory / saved.DIRECTORY / saved.snapshot_name(step, 0, 1)
    path.mkdir(parents=True)
    for rank in range(ranks):
        (path / f"__{rank}_0.distcp").write_bytes(os.urandom(size))
        about = {
            "run": run,
            "step": step,
            "attempt": 0,
            "world": ranks,
            "parameters": "p",
            "weights": "w",
        }
        saved.write_manifest(path, rank, [f"__{rank}_0.distcp"], about)
    (path / ".metadata").write_bytes(b"m" * 100)
    saved.commit(path, ranks, {"run": run}, [".metadata"])
    saved.mark(path, saved.HEALTHY, {"reason": "quiet"})
    for file in path.iterdir():
        os.utime(file, (1_600_000_000 + step, 1_600_000_000 + step))
    return path


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def verifier(clock: FakeClock, **options: float) -> Verifier:
    given = {"every_s": DAY_S, "bytes_per_s": 1e12} | options
    return Verifier(clock=clock, **given)


def results(one: Verifier, run: str = "r7") -> dict[int, str]:
    return {c.step: str(c.result) for c in one.found.get(run, {}).values()}


class TestReading:
    @pytest.mark.parametrize("name", ["__1_0.distcp", ".metadata", "manifest-1.json", "COMMIT"])
    def test_a_flipped_bit_is_found_wherever_it_is_and_named(
        self, tmp_path: Path, clock: FakeClock, name: str
    ) -> None:
        paths = {step: snapshot(tmp_path, step, ranks=2) for step in (100, 200, 300)}
        one = verifier(clock)
        one.turn({"r7": (tmp_path,)})
        assert results(one) == {100: "sound", 200: "sound", 300: "sound"}
        assert not any(c.changed for c in one.news())
        flip(paths[200] / name)
        one.turn({"r7": (tmp_path,)})
        assert results(one)[200] == "sound"  # not due yet
        clock.advance(DAY_S)
        one.turn({"r7": (tmp_path,)})
        assert results(one) == {100: "sound", 200: "damaged", 300: "sound"}
        (news,) = [c for c in one.news() if c.changed]
        assert (news.step, name in news.reason) == (200, True)

    def test_nothing_is_written_and_all_of_it_is_read(
        self, tmp_path: Path, clock: FakeClock
    ) -> None:
        path = snapshot(tmp_path, 100, size=3 * MIB)
        before = {f.name: (f.stat().st_mtime_ns, f.read_bytes()) for f in path.iterdir()}
        one = verifier(clock)
        one.turn({"r7": (tmp_path,)})
        assert {f.name: (f.stat().st_mtime_ns, f.read_bytes()) for f in path.iterdir()} == before
        assert one.read_bytes == 3 * MIB + 100

    def test_what_is_never_used_and_what_is_just_being_written_is_not_read(
        self, tmp_path: Path, clock: FakeClock
    ) -> None:
        unhealthy, torn, young = (snapshot(tmp_path, step) for step in (100, 200, 300))
        saved.mark(unhealthy, saved.UNHEALTHY, {"reason": "an incident"})
        (torn / saved.COMMIT).unlink()
        os.utime(young / saved.COMMIT, (clock.now, clock.now))
        flip(young / "__0_0.distcp")
        one = verifier(clock)
        one.turn({"r7": (tmp_path,)})
        assert (results(one), one.read_bytes) == ({}, 0)
        clock.advance(61.0)
        one.turn({"r7": (tmp_path,)})
        assert results(one) == {300: "damaged"}

    def test_one_that_its_trainer_deletes_meanwhile_is_gone_and_not_damaged(
        self, tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = snapshot(tmp_path, 100)
        real = verifying.find_damage

        def find_damage(path: Path, **options: Any) -> str:
            saved.delete(path)
            return real(path, **options)

        monkeypatch.setattr(verifying, "find_damage", find_damage)
        one = verifier(clock)
        one.turn({"r7": (tmp_path,)})
        assert not path.exists()
        assert (results(one), one.news()) == ({}, [])

    def test_one_that_is_gone_is_not_listed_any_more(
        self, tmp_path: Path, clock: FakeClock
    ) -> None:
        paths = [snapshot(tmp_path, step) for step in (100, 200)]
        one = verifier(clock)
        one.turn({"r7": (tmp_path,)})
        saved.delete(paths[0])
        one.turn({"r7": (tmp_path,)})
        assert results(one) == {200: "sound"}
        one.turn({})
        assert one.found == {}

    def test_one_of_another_run_is_not_this_runs(self, tmp_path: Path, clock: FakeClock) -> None:
        snapshot(tmp_path, 100, run="other")
        one = verifier(clock)
        one.turn({"r7": (tmp_path,)})
        assert results(one) == {100: "damaged"}

    def test_a_checkpoint_of_the_users_own_is_not_judged_by_a_path_that_only_they_see(
        self, tmp_path: Path, clock: FakeClock
    ) -> None:
        path = tmp_path / saved.DIRECTORY / saved.snapshot_name(100, 0, 1)
        path.mkdir(parents=True)
        about = {"run": "r7", "step": 100, "attempt": 0, "adopted": "/scratch/step-100.pt"}
        saved.write_manifest(path, 0, [], about | {"parameters": "p", "world": 1})
        saved.commit(path, 1, {"run": "r7"})
        os.utime(path / saved.COMMIT, (1.0, 1.0))
        assert "is gone" in saved.find_damage(path)
        one = verifier(clock)
        one.turn({"r7": (tmp_path,)})
        assert (results(one), one.news()) == ({}, [])

    def test_a_pipe_among_the_files_holds_nobody(self, tmp_path: Path, clock: FakeClock) -> None:
        path = snapshot(tmp_path, 100)
        (path / "manifest-0.json").unlink()
        os.mkfifo(path / "manifest-0.json")
        one = verifier(clock)
        one.turn({"r7": (tmp_path,)})
        (found,) = one.found["r7"].values()
        assert (found.result, "no regular file" in found.reason) == (Result.DAMAGED, True)

    def test_it_reads_no_faster_than_it_may(
        self, tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        snapshot(tmp_path, 100, size=5 * MIB)
        one = verifier(clock, bytes_per_s=2.0 * MIB)
        waits: list[float] = []
        monkeypatch.setattr(one._stop, "wait", lambda seconds: waits.append(seconds))
        one.turn({"r7": (tmp_path,)})
        assert sum(waits) == pytest.approx((5 * MIB + 100) / (2 * MIB))
        assert max(waits) <= 0.5

    def test_a_large_one_does_not_fill_the_page_cache(
        self, tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        snapshot(tmp_path, 100, size=9 * MIB)
        left: list[int] = []
        one = verifier(clock)
        monkeypatch.setattr(verifying, "MOST_CACHED", 2 * MIB)
        monkeypatch.setattr(verifying, "_leave_cache", lambda path: left.append(one.read_bytes))
        one.turn({"r7": (tmp_path,)})
        assert left == [0, 2 * MIB, 4 * MIB, 6 * MIB, 8 * MIB, 9 * MIB + 100]

    def test_it_stops_in_the_middle_of_a_large_file(self, tmp_path: Path, clock: FakeClock) -> None:
        snapshot(tmp_path, 100, size=20 * MIB)
        one = verifier(clock, bytes_per_s=1.0 * MIB)
        one.begin({"r7": [tmp_path]})
        until(lambda: one.read_bytes > 0)
        one.begin({"r7": [tmp_path]})  # it is at it
        assert len([t for t in threading.enumerate() if t.name == "sentinel-verify"]) == 1
        one.close(10.0)
        assert not one.busy
        assert one.read_bytes < 20 * MIB
        one.begin({"r7": [tmp_path]})
        assert not one.busy


class TestShown:
    @pytest.fixture
    def service(self, tmp_path: Path, clock: FakeClock) -> Iterator[Service]:
        settings = Settings(watch=(tmp_path / "runs",))
        service = Service(settings, clock=clock, timer=lambda: 0.0)
        yield service
        service.close()

    def turn(self, service: Service) -> None:
        assert service.verifier is not None
        service.verifier._bytes_per_s = 1e12
        for _ in range(2):  # the second tells what the first has found
            asyncio.run(Jobs(service).verify())
            until(lambda: service.verifier is not None and not service.verifier.busy)

    def test_a_damaged_one_is_told_once_everywhere_and_the_run_goes_on(
        self,
        service: Service,
        tmp_path: Path,
        clock: FakeClock,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        reporter = Reporter(service, SimulatedTrainer(seed=1, layers=2), run="r7")
        reporter.register()
        reporter.steps(5)
        hash_before = service.runs.get("r7").state
        paths = [snapshot(tmp_path / "runs" / "r7", step) for step in (100, 200)]
        flip(paths[1] / "__0_0.distcp")
        listener = service.hub.listen("r7")
        for _ in range(3):
            self.turn(service)
        events = [e for e in asyncio.run(listener.next(0.0)) if e.kind == "snapshot"]
        assert [(e.data["step"], e.data["result"]) for e in events] == [(200, "damaged")]
        (entry,) = [e for e in service.people.recent if e.action == "snapshot"]
        assert (entry.run, entry.outcome) == ("r7", "damaged")
        assert "CRC32" in entry.detail["reason"]
        assert len([r for r in caplog.records if "snapshot on disk" in r.getMessage()]) == 1
        text = asyncio.run(exporter.render(service, "1")).decode()
        for result in ("sound", "damaged"):
            line = f'sentinel_sidecar_snapshots_checked{{run="r7",result="{result}"}} 1.0\n'
            assert line in text
        assert service.runs.get("r7").state is hash_before
        assert reporter.steps(1).decision is not None
        paths[1].joinpath("__0_0.distcp").unlink()  # mended: it is told as well
        saved.delete(paths[1])
        snapshot(tmp_path / "runs" / "r7", 200)
        clock.advance(2 * DAY_S)
        self.turn(service)
        events = [e for e in asyncio.run(listener.next(0.0)) if e.kind == "snapshot"]
        assert [e.data["result"] for e in events] == ["sound"]

    def test_the_api_lists_them_and_says_where_it_sees_none(
        self, tmp_path: Path, clock: FakeClock
    ) -> None:
        settings = Settings(watch=(tmp_path / "runs",), verify_bytes_per_s=1e12)
        app = create_app(settings, clock=clock, timer=lambda: 0.0)
        client = TestClient(app, base_url="http://localhost")
        for name in ("r7", "elsewhere"):
            client.put(f"/v1/runs/{name}", json={})
        for step in (100, 200):
            snapshot(tmp_path / "runs" / "r7", step)
        flip(tmp_path / "runs" / "r7" / saved.DIRECTORY / "00000100-0-1" / ".metadata")
        self.turn(app.state.service)
        found = client.get("/v1/runs/r7/snapshots").json()
        assert [(s["step"], s["result"]) for s in found["snapshots"]] == [
            (200, "sound"),
            (100, "damaged"),
        ]
        assert ".metadata" in found["snapshots"][1]["reason"]
        nothing = client.get("/v1/runs/elsewhere/snapshots").json()
        assert (nothing["seen"], nothing["snapshots"]) == (False, [])
        assert "no directory in" in nothing["why"]
        assert client.get("/v1/runs/nobody/snapshots").status_code == 404
        app.state.service.close()

    def test_of_a_run_dir_only_the_runs_that_report_here_are_read_and_not_for_ever(
        self, tmp_path: Path, clock: FakeClock
    ) -> None:
        settings = Settings(run_dirs=(tmp_path / "runs",))
        service = Service(settings, clock=clock, timer=lambda: 0.0)
        for name in ("r7", "finished", "lost", "another"):
            snapshot(tmp_path / "runs" / name, 100, run=name)
            if name != "another":
                reporter = Reporter(service, SimulatedTrainer(seed=1, layers=2), run=name)
                reporter.register()
                reporter.steps(2)
            if name == "finished":
                reporter.close()

        def read() -> set[str]:
            self.turn(service)
            assert service.verifier is not None
            return {run for run, found in service.verifier.found.items() if found}

        assert read() == {"r7", "finished", "lost"}
        clock.advance(100.0)
        service.runs.get("r7").last_heard = clock.now
        service.runs.expire(clock.now)
        clock.advance(1.5 * DAY_S)
        assert read() == {"r7", "lost"}
        clock.advance(6 * DAY_S)
        assert read() == {"r7"}
        service.close()

    def test_without_a_watched_folder_nothing_is_read(self, clock: FakeClock) -> None:
        for settings in (Settings(), Settings(watch=(Path("/nowhere"),), verify_every_s=0.0)):
            service = Service(settings, clock=clock, timer=lambda: 0.0)
            assert service.verifier is None
            assert "snapshots_checked" not in asyncio.run(exporter.render(service, "1")).decode()
            service.close()

    def test_options_that_make_no_sense_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="verify_every_s must be 0 or at least 60"):
            Settings(verify_every_s=5.0)
        with pytest.raises(ConfigError, match="verify_bytes_per_s must be at least"):
            Settings(verify_bytes_per_s=0.0)


@pytest.mark.torch
def test_a_snapshot_that_a_real_trainer_has_written_is_sound(
    tmp_path: Path, clock: FakeClock
) -> None:
    torch = pytest.importorskip("torch")
    import sentinel
    from sentinel_hooks import Snapshots

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    with sentinel.attach(
        model=model,
        optimizer=optimizer,
        sidecar=None,
        run_id="r7",
        run_dir=tmp_path,
        snapshots=Snapshots(ram=False),
    ):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    (path,) = (tmp_path / "r7" / saved.DIRECTORY).iterdir()
    clock.now = (path / saved.COMMIT).stat().st_mtime + 100.0
    one = verifier(clock)
    one.turn({"r7": (tmp_path / "r7",)})
    assert list(results(one).values()) == ["sound"]
    written = sum(f["size"] for f in json.loads((path / "manifest-0.json").read_text())["files"])
    assert one.read_bytes >= written > 0

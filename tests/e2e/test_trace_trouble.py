"""The trace's disk fills up, is read-only, vanishes: no step is harmed, holes are counted.

On file systems of their own. The oracle of "unharmed" is the same loop without sentinel, bitwise.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sentinel.traces import recorder as recorder_module
from sentinel.traces.reader import Reader
from sentinel.traces.replay import replay
from tests.support import mounts

torch = pytest.importorskip("torch")

from sentinel_hooks import Snapshots
from tests.support.victims import Loop

pytestmark = [pytest.mark.torch, pytest.mark.e2e]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounts.small_disk(tmp_path / "disk", "1m") as place:
        yield place


def watched(place: Path) -> Loop:
    return Loop(place, snapshots=Snapshots(disk=False))


def run(loop: Loop, steps: int) -> None:
    for _ in range(steps):
        loop.step()


def assert_unharmed(loop: Loop, steps: int, tmp_path: Path) -> None:
    alone = Loop(tmp_path, watched=False)
    run(alone, steps)
    assert loop.state() == alone.state()
    assert {k for k in dict(loop.session.status().internal_errors) if k != "ledger"} == set()


def holes(loop: Loop) -> str:
    """What status() says of the trace."""
    spots: tuple[Any, ...] = loop.session.status().blind_spots
    return "; ".join(s.what for s in spots if "trace" in s.what)


def assert_replays_with_a_hole(place: Path, missing: int, last: int) -> None:
    report = replay(place / "r7")
    assert report.identical
    assert report.missing == missing
    assert report.damage == ()
    assert report.unverified == 0
    curve = Reader(place / "r7").curve()
    assert curve.step[-1] == last
    assert len(curve.step) == last + 1 - missing


def test_a_full_disk_costs_the_records_that_do_not_fit(disk: Path, tmp_path: Path) -> None:
    loop = watched(disk)
    run(loop, 20)
    assert holes(loop) == ""
    filler = mounts.fill(disk)
    run(loop, 30)
    assert holes(loop) == "the trace has holes: [Errno 28] No space left on device"
    filler.unlink()
    run(loop, 20)
    loop.session.state  # noqa: B018  settles the last step
    lost = loop.session._chronicle.lost
    assert 20 <= lost <= 40, "steps, and the snapshots between them"
    assert holes(loop) == f"the trace has holes: {lost} records are missing"
    assert_unharmed(loop, 70, tmp_path)
    loop.session.detach()
    steps = set(range(70)) - set(Reader(disk / "r7").curve().step.tolist())
    assert steps == set(range(min(steps), 50)), "one hole"
    assert_replays_with_a_hole(disk, len(steps), 69)


def test_a_disk_that_is_read_only_from_the_start_is_written_once_it_can_be(
    disk: Path, tmp_path: Path
) -> None:
    mounts.remount(disk, "ro")
    loop = watched(disk)
    run(loop, 20)
    assert holes(loop) == "the trace has holes: [Errno 30] Read-only file system: " + repr(
        str(disk / "r7")
    )
    mounts.remount(disk, "rw")
    run(loop, 20)
    assert "records are missing" in holes(loop)
    assert_unharmed(loop, 40, tmp_path)
    loop.session.detach()
    assert_replays_with_a_hole(disk, 20, 39)
    (config,) = (disk / "r7").glob("*/config.json")
    assert json.loads(config.read_text())["run"] == "r7"


def test_a_disk_that_is_hidden_by_a_read_only_one_is_found_again(
    disk: Path, tmp_path: Path
) -> None:
    loop = watched(disk)
    run(loop, 20)
    with mounts.small_disk(disk):
        mounts.remount(disk, "ro")
        run(loop, 10)
        assert "the trace has holes: [Errno 30] Read-only file system" in holes(loop)
    run(loop, 20)
    assert "records are missing" in holes(loop)
    assert_unharmed(loop, 50, tmp_path)
    loop.session.detach()
    assert_replays_with_a_hole(disk, 11, 49)


def test_a_directory_that_is_deleted_is_made_again(tmp_path: Path) -> None:
    loop = watched(tmp_path / "runs")
    run(loop, 20)
    shutil.rmtree(tmp_path / "runs")
    run(loop, 20)
    loop.session.state  # noqa: B018
    assert holes(loop) == "the trace has holes: 19 records are missing"
    assert_unharmed(loop, 40, tmp_path)
    loop.session.detach()
    assert_replays_with_a_hole(tmp_path / "runs", 19, 39)
    assert list((tmp_path / "runs" / "r7").glob("*/config.json"))


def test_a_disk_that_is_unmounted_and_comes_back_is_found_again(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    with mounts.small_disk(place, "1m"):
        loop = watched(place)
        run(loop, 20)
    run(loop, 10)  # into the empty directory below
    below = sorted(p.name for p in place.rglob("scalars-*.seg"))
    with mounts.small_disk(place, "1m"):
        run(loop, 10)
        assert "records are missing" in holes(loop)
        assert_unharmed(loop, 40, tmp_path)
        loop.session.detach()
        assert below == ["scalars-00001.seg"]
        assert sorted(p.name for p in place.rglob("scalars-*.seg")) == ["scalars-00002.seg"]
        curve = Reader(place / "r7").curve()
        assert curve.step.tolist() == list(range(29, 40))
        assert replay(place / "r7").identical
    assert Reader(place / "r7").curve().step.tolist() == list(range(19, 29))


@pytest.mark.slow
def test_a_disk_that_hangs_twice_is_left_alone_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "SLOW_S", 0.5)
    monkeypatch.setattr(recorder_module, "REST", 3.0)
    with mounts.real_disk(tmp_path / "disk", tmp_path / "image") as place:
        loop = watched(place)
        for begin in (19, 27):  # the records of 18 and 26 hang; no ledger is written there
            run(loop, begin - loop.session.state.step)
            thaw = mounts.freeze(place, 0.8)
            loop.step()
            loop.step()
            thaw.join()
        run(loop, 11)
        assert "the trace has holes: the disk is slow: it took more than 0.5 s" in holes(loop)
        time.sleep(3.0)
        run(loop, 10)
        assert "records are missing" in holes(loop)
        assert_unharmed(loop, 50, tmp_path)
        loop.session.detach()
        steps = Reader(place / "r7").curve().step.tolist()
        assert steps == [*range(27), *range(steps[27], 50)], "what hung is there all the same"
        assert 38 < steps[27] < 42
        assert_replays_with_a_hole(place, 50 - len(steps), 49)

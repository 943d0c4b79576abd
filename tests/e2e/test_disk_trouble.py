"""The disk fills up, is read-only, vanishes, hangs: no step is harmed, and status() says so."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sentinel.traces.snapshots import Health, list_snapshots
from tests.support import mounts

torch = pytest.importorskip("torch")

from sentinel_hooks import Snapshots
from sentinel_hooks.snapshots import disk as disk_tier
from sentinel_hooks.snapshots import files
from tests.support.victims import Loop

pytestmark = [pytest.mark.torch, pytest.mark.e2e]
BOTH = Snapshots(disk_share=1.0)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    with mounts.small_disk(tmp_path / "mounted") as place:
        yield place


def run(loop: Loop, steps: int) -> None:
    for _ in range(steps):
        loop.step()
        loop.settle()


def unharmed(loop: Loop, steps: int, tmp_path: Path) -> bool:
    """Bitwise where an unwatched run is."""
    alone = Loop(tmp_path, watched=False)
    run(alone, steps)
    return loop.state() == alone.state()


def test_a_full_disk_harms_no_step_and_heals_when_there_is_room(
    mounted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Room is looked for beforehand; here it goes in the middle of the save.
    monkeypatch.setattr(disk_tier.DiskStore, "_make_room", lambda self, need: None)
    loop = Loop(mounted, snapshots=BOTH)
    filler = mounts.fill(mounted, leave=40_960)
    run(loop, 30)
    text = str(loop.session.status())
    assert "blind spot: no snapshot reaches the disk:" in text
    assert "No space left on device" in text or "writing" in text, text
    assert loop.session.status().healthy, "RAM goes on"
    assert list_snapshots(loop.session.directory) == [], "nothing torn is left behind"
    filler.unlink()
    run(loop, 20)
    assert "reaches the disk" not in str(loop.session.status())
    assert loop.session.status().on_disk
    assert dict(loop.session.status().internal_errors) == {}
    assert unharmed(loop, 50, tmp_path)
    loop.session.detach()
    left = [s.health for s in list_snapshots(mounted / "r7", verify=True)]
    assert Health.HEALTHY in left
    assert {Health.HEALTHY, Health.CANDIDATE} >= set(left)


def test_a_read_only_disk_harms_no_step_and_heals(mounted: Path, tmp_path: Path) -> None:
    mounts.remount(mounted, "ro")
    loop = Loop(mounted, snapshots=BOTH)
    run(loop, 30)
    text = str(loop.session.status())
    assert "no snapshot reaches the disk: Read-only file system" in text
    assert "the trace has holes: [Errno 30] Read-only file system" in text
    mounts.remount(mounted, "rw")
    run(loop, 20)
    assert loop.session.status().on_disk
    assert "reaches the disk" not in str(loop.session.status())
    assert dict(loop.session.status().internal_errors) == {}
    assert unharmed(loop, 50, tmp_path)
    loop.session.detach()


def test_a_directory_that_vanishes_costs_its_snapshots_and_comes_back(tmp_path: Path) -> None:
    loop = Loop(tmp_path)  # without RAM: the disk is all there is
    run(loop, 44)
    shutil.rmtree(loop.session.directory / "snapshots")
    for _ in range(3):
        loop.optimizer.zero_grad()
        (loop.model(torch.ones(16, 12), torch.ones(16, 1)) * float("nan")).backward()
        loop.optimizer.step()
    run(loop, 40)
    status = loop.session.status()
    assert dict(status.counters.rollbacks) == {"nonfinite_loss/failed": 1}
    assert status.on_disk, "a new one is written where the old ones were"
    assert all(step > 44 for step in status.on_disk)
    assert dict(status.internal_errors) == {}
    loop.session.detach()


def test_a_disk_that_hangs_holds_up_no_step_and_the_end_only_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    monkeypatch.setattr(files, "write", lambda *a, **k: go.wait(60) and [])
    monkeypatch.setattr(disk_tier, "LOAD_WAIT_S", 0.2)
    loop = Loop(tmp_path, snapshots=BOTH)
    for _ in range(50):
        loop.step()  # never waits
    assert loop.session._disk._busy is not None
    assert unharmed(loop, 50, tmp_path)
    with pytest.raises(disk_tier.SnapshotError, match=r"the disk did not answer within 0\.2 s"):
        loop.session._disk.load(16)
    loop.session._disk.close(wait_s=0.1)
    began = time.perf_counter()
    loop.session.detach()
    assert time.perf_counter() - began < 10
    go.set()


def test_a_forked_child_neither_writes_nor_waits(tmp_path: Path) -> None:
    loop = Loop(tmp_path, snapshots=BOTH)
    run(loop, 20)
    before = sorted(p.name for p in (loop.session.directory / "snapshots").iterdir())
    pid = os.fork()
    if pid == 0:
        ended = 1
        try:
            ended = int(loop.session._disk.due(10_000))
            loop.session._disk.close()
        finally:
            os._exit(ended)
    _, status = os.waitpid(pid, 0)
    assert status == 0
    assert sorted(p.name for p in (loop.session.directory / "snapshots").iterdir()) == before
    loop.session.detach()

"""Nothing damaged is ever used: saves cut off at any byte, rotten files, foreign manifests.

Real processes are killed at 30 byte offsets of a save; what they leave is listed, resumed from and
compared with what the process itself had written down about its state. Then, in a live run, the
copy that a rollback wants is damaged in every way.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sentinel.core.events import Restored, SnapshotLost
from sentinel.traces.reader import Reader
from sentinel.traces.replay import replay
from sentinel.traces.snapshots import Health, list_snapshots
from tests.support import ROOT

torch = pytest.importorskip("torch")

from sentinel_hooks.snapshots.disk import newest_healthy, resume
from sentinel_hooks.target import Target
from tests.hooks.worlds import digest
from tests.support import confirm
from tests.support.victims import Loop

pytestmark = [pytest.mark.torch, pytest.mark.e2e]
OFFSETS = 30


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, dict[str, Any]]]:
    """The run directories of processes killed in their third save, and what was said of each."""
    directory = tmp_path_factory.mktemp("killed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.victims", str(directory), str(OFFSETS)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=280,
    )
    said = [json.loads(line) for line in done.stdout.splitlines()]
    return [(directory / f"{one['number']:02d}" / "r7", one) for one in said]


def expected(run: Path) -> dict[int, str]:
    lines = (run.parent / "expected.jsonl").read_text().splitlines()
    return {one["step"]: one["state"] for one in map(json.loads, lines)}


def test_a_save_cut_off_at_any_byte_is_torn_and_the_one_before_it_is_whole(
    killed: list[tuple[Path, dict[str, Any]]],
) -> None:
    assert len({said["offset"] for _, said in killed}) == OFFSETS
    torn, left = 0, set()
    for run, said in killed:
        assert said["ended"] == -1, "killed"
        found = {s.step: s for s in list_snapshots(run, verify=True)}
        assert found[0].health is found[16].health is Health.HEALTHY, said
        # Whole or torn: a directory with COMMIT is never damaged.
        assert found[32].health in (Health.TORN, Health.CANDIDATE, Health.HEALTHY), (said, found)
        if found[32].health is Health.TORN:
            torn += 1
            left.add(tuple(sorted(os.listdir(found[32].path))))
            assert found[32].reason == "no COMMIT: the save was cut off"
    assert torn >= 20
    assert len(left) >= 4, f"cut off at different files: {left}"


def test_after_any_kill_the_newest_healthy_one_comes_back_bit_by_bit_and_the_run_goes_on(
    killed: list[tuple[Path, dict[str, Any]]],
) -> None:
    for number, (run, said) in enumerate(killed):
        best = newest_healthy(run)
        assert best is not None
        assert best.step in (16, 32), said
        loop = Loop(run.parent, watched=False)
        target = Target((loop.model,), (loop.optimizer,))
        assert resume(target, best.path, run="r7") == best.step
        assert loop.state() == expected(run)[best.step], said
        if number % 10:
            continue
        # Three of them train on as the same run; saves work, and what was torn is tidied away.
        again = Loop(run.parent)
        resume(Target((again.model,), (again.optimizer,)), best.path, run="r7")
        for _ in range(24):
            again.step()
            again.settle()
        again.session.detach()
        after = list_snapshots(run, verify=True)
        assert Health.TORN not in {s.health for s in after}
        assert max(s.step for s in after if s.health is Health.HEALTHY) >= 32


def test_a_script_with_torch_and_json_confirms_what_is_restored(
    killed: list[tuple[Path, dict[str, Any]]],
) -> None:
    run = killed[0][0]
    best = newest_healthy(run)
    assert best is not None
    script = Path(confirm.__file__)
    assert "sentinel" not in "".join(
        line for line in script.read_text().splitlines() if "import" in line.split()
    )
    done = subprocess.run(
        [sys.executable, "-I", str(script), str(best.path)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    said = json.loads(done.stdout)
    loop = Loop(run.parent, watched=False)
    resume(Target((loop.model,), (loop.optimizer,)), best.path)
    live = {f"model.{n}": t.detach() for n, t in loop.model.state_dict().items()}
    for name, parameter in loop.model.named_parameters():
        for key, value in loop.optimizer.state[parameter].items():
            live[f"optimizer.state.{name}.{key}"] = value
    assert said == {"step": best.step, "digest": confirm.digest(live)}


# ---------------------------------------------------------------- in a live run


def _flip(name: str) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        data = bytearray((path / name).read_bytes())
        data[len(data) // 2] ^= 1
        (path / name).write_bytes(data)

    return spoil


def _truncate(path: Path) -> None:
    os.truncate(path / "__0_0.distcp", 1000)


def _foreign(path: Path) -> None:
    text = (path / "manifest-0.json").read_text()
    (path / "manifest-0.json").write_text(text.replace('"run": "r7"', '"run": "r8"'))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a flipped bit in the tensors": (_flip("__0_0.distcp"), "__0_0.distcp is damaged"),
    "a flipped bit in the index": (_flip(".metadata"), ".metadata is damaged"),
    "a flipped bit in the rest": (_flip("rank-0.pt"), "rank-0.pt is damaged"),
    "a flipped bit in the manifest": (_flip("manifest-0.json"), "manifest-0.json"),
    "a flipped bit in COMMIT": (_flip("COMMIT"), "COMMIT is damaged"),
    "a truncated shard": (_truncate, "__0_0.distcp has 1000 bytes, and manifest-0.json says"),
    "no manifest": (lambda p: (p / "manifest-0.json").unlink(), "manifest-0.json is missing"),
    "no COMMIT": (lambda p: (p / "COMMIT").unlink(), "no COMMIT: the save was cut off"),
    "another run's manifest": (_foreign, "manifest-0.json is of run 'r8', not of 'r7'"),
    "nothing at all": (shutil.rmtree, "the directory is gone"),
}


@pytest.mark.parametrize("kind", list(DAMAGE))
def test_a_rollback_refuses_the_damaged_copy_and_takes_the_next_healthy_one(
    kind: str, tmp_path: Path
) -> None:
    spoil, reason = DAMAGE[kind]
    loop = Loop(tmp_path)
    states = {}
    for step in range(40):
        states[step] = loop.state()
        loop.step()
        loop.settle()
    ledger = loop.session.state.ledger
    assert [s.step for s in ledger.snapshots if s.healthy] == [0, 16, 32]
    [newest] = [s for s in list_snapshots(loop.session.directory) if s.step == 32]
    for _ in range(600):  # its mark is written in the background: spoil what is whole
        if (newest.path / "HEALTHY").exists():
            break
        time.sleep(0.05)
    spoil(newest.path)

    for _ in range(3):  # the 3rd loss in a row that is not finite: back
        loop.optimizer.zero_grad()
        loss = loop.model(torch.ones(16, 12), torch.ones(16, 1)) * math.nan
        loss.backward()
        loop.optimizer.step()
    loop.optimizer.zero_grad()
    loop.model(torch.ones(16, 12), torch.ones(16, 1)).backward()  # the safe point is in here
    assert loop.state() == states[16]
    loop.optimizer.step()
    for _ in range(30):
        loop.step()
        loop.settle()
    assert loop.state() != states[16], "training goes on"
    status = loop.session.status()
    assert dict(status.counters.rollbacks) == {"nonfinite_loss/restored": 1}
    assert dict(status.internal_errors) == {}
    loop.session.detach()

    events = list(Reader(loop.session.directory))
    [lost] = [e for e in events if isinstance(e, SnapshotLost)]
    [back] = [e for e in events if isinstance(e, Restored)]
    assert (lost.target, back.target) == (32, 16)
    assert lost.reason.startswith(f"00000032-0-0: {reason}")
    assert replay(loop.session.directory).identical


def test_when_every_copy_is_damaged_nothing_is_put_back_and_the_run_goes_on(
    tmp_path: Path,
) -> None:
    loop = Loop(tmp_path)
    for _ in range(40):
        loop.step()
        loop.settle()
    for found in list_snapshots(loop.session.directory):
        _flip("__0_0.distcp")(found.path)
    held = digest(dict(loop.model.named_parameters()))
    for _ in range(3):
        loop.optimizer.zero_grad()
        (loop.model(torch.ones(16, 12), torch.ones(16, 1)) * math.nan).backward()
        loop.optimizer.step()
    loop.optimizer.zero_grad()
    loop.model(torch.ones(16, 12), torch.ones(16, 1)).backward()
    assert digest(dict(loop.model.named_parameters())) == held
    loop.optimizer.step()
    for _ in range(20):
        loop.step()
    assert dict(loop.session.status().counters.rollbacks) == {"nonfinite_loss/failed": 1}
    loop.session.detach()

"""A run of several ranks is halted: what it held is on disk, whole, and no rank waits for another.

Each rank writes its part and rank 0 commits them, without a word between them: at a halt nobody
steps again. Compared with what the loop itself saved at its end, read by tests/support/confirm.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sentinel.traces import snapshots as store
from sentinel.traces.snapshots import Health
from tests.ranks import judge
from tests.ranks.test_together import LOOP, TROUBLE
from tests.support.ranks import Ranks, Report
from tests.support.ranks.loop import RULES

torch = pytest.importorskip("torch")

from tests.support import confirm
from tests.support.ranks.loop import initial

pytestmark = [pytest.mark.torch, pytest.mark.e2e]

HALTING = RULES.replace("quiet = 6", "quiet = 6\nbudget = 0\nhalt_when_spent = true")
STEP = 32  # damaged before 28, hot four times: at 31 there is nothing left but to halt


def run(ranks: Ranks, world: str, count: int, **args: Any) -> Report:
    options = {"run_id": "r7"}
    args = {"world": world, "attach": "all", "timeout_s": 4.0, **TROUBLE, **args}
    args = {"rules": HALTING, "options": options, **args}
    report = ranks.run(LOOP, count, args=args)
    report.ended_well()
    for rank in report.ranks:
        assert rank.last("end")["ended"].startswith("TrainingHalted"), rank.text
        assert rank.last("step")["t"] == STEP - 2
    judge.together(report, replicated=world != "fsdp")
    return report


def saved_at_the_halt(report: Report) -> list[Path]:
    found = store.list_snapshots(report.directory / "runs" / "r7")
    return [s.path for s in found if s.step == STEP]


@pytest.mark.parametrize(("world", "count"), [("ddp", 2), ("fsdp", 4)])
def test_what_a_halted_run_held_is_saved_by_all_ranks_and_no_rollback_uses_it(
    ranks: Ranks, world: str, count: int
) -> None:
    report = run(ranks, world, count, save=True)
    [path] = saved_at_the_halt(report)
    assert store.inspect_snapshot(path, verify=True).health is Health.UNHEALTHY
    assert store.find_damage(path) == ""
    tensors, rest = confirm.read(path, rank=count - 1)
    assert rest["step"] == STEP
    shapes = {name: list(p.shape) for name, p in initial(4).named_parameters()}
    for name, value in judge.whole(report.directory, count, shapes).items():
        assert torch.equal(tensors[f"model.{name}"], value), name


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_whose_disk_is_full_holds_up_nobody_and_the_others_parts_are_there(
    ranks: Ranks, rank: int
) -> None:
    fault = {"kind": "full_disk", "rank": rank, "step": 31, "place": "loop.step:entry"}
    report = run(ranks, "ddp", 4, faults=[fault])
    ended = [r.ended_s for r in report.ranks]
    assert max(ended) - min(ended) < 4.0 + judge.MARGIN_S
    [path] = saved_at_the_halt(report)
    assert not (path / store.COMMIT).exists()
    there = {r for r in range(4) if (path / store.manifest_name(r)).exists()}
    assert there == {0, 1, 2, 3} - {rank}


def test_a_save_that_is_in_flight_is_committed_before_it(ranks: Ranks) -> None:
    rules = HALTING.replace("disk_every = 16", "disk_every = 24")
    place = "snapshots.files.write:entry"
    fault = {"kind": "sleep", "rank": 1, "step": 24, "place": place, "seconds": 0.6}
    report = run(ranks, "ddp", 2, faults=[fault], rules=rules)
    found = store.list_snapshots(report.directory / "runs" / "r7")
    assert [(s.step, s.health) for s in found] == [
        (24, Health.HEALTHY),
        (STEP, Health.UNHEALTHY),
    ]

"""The harness itself, on runs without sentinel: faults happen where they were ordered, and the
judge notices ranks that part.

Seen red: with a judge that compares nothing; with faults on every rank; without SIGCONT.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks import judge
from tests.support.ranks import Ranks, Report
from tests.support.ranks.loop import initial

pytestmark = [pytest.mark.torch, pytest.mark.e2e]

LOOP = "tests.support.ranks.loop:train"
TIMEOUT = 2.0


def run(ranks: Ranks, world: str = "ddp", count: int = 2, **args: Any) -> Report:
    args = {"world": world, "steps": 12, "timeout_s": TIMEOUT, **args}
    return ranks.run(LOOP, count, args=args, bound_s=60)


def fault(kind: str, place: str, *, rank: int = 1, step: int = 5, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "rank": rank, "step": step, "place": place, **more}


@pytest.mark.parametrize("world", ["ddp", "fsdp", "plain"])
def test_a_run_is_repeatable_and_its_ranks_agree(ranks: Ranks, world: str) -> None:
    one, two = (run(ranks, world, 4) for _ in range(2))
    for report in (one, two):
        report.ended_well()
        judge.together(report, replicated=world != "fsdp")
        judge.groups_work(report)
    ends = [[r.last("end")["hash"] for r in report.ranks] for report in (one, two)]
    assert ends[0] == ends[1]
    assert (len(set(ends[0])) == 1) == (world != "fsdp")


@pytest.mark.parametrize("world", ["ddp", "fsdp"])
def test_full_parameters_do_not_depend_on_how_they_are_held(ranks: Ranks, world: str) -> None:
    shapes = {n: list(p.shape) for n, p in initial(1).named_parameters()}
    here = judge.whole(run(ranks, world, 4, save=True).directory, 4, shapes)
    plain = judge.whole(run(ranks, "plain", 4, save=True).directory, 4, shapes)
    for name in shapes:
        torch.testing.assert_close(here[name], plain[name], rtol=1e-4, atol=1e-5)


def test_a_killed_rank_is_dead_and_what_it_said_is_there(ranks: Ranks) -> None:
    report = run(ranks, count=4, faults=[fault("kill", "loop.forward:exit", rank=2)])
    assert report.ranks[2].exit == -9
    assert report.ranks[2].last("fault")["step"] == 5
    assert report.ranks[2].last("step")["t"] == 4
    assert [r.rank for r in judge.survivors(report)] == [0, 1, 3]
    assert all(r.last("end")["ended"] != "done" for r in judge.survivors(report))
    judge.together(report, replicated=True)
    judge.in_time(report, 5.0, timeout_s=TIMEOUT)


@pytest.mark.parametrize("kind", ["sleep", "stop"])
def test_a_pause_shorter_than_the_timeout_changes_nothing(ranks: Ranks, kind: str) -> None:
    calm = run(ranks)
    report = run(ranks, faults=[fault(kind, "loop.backward:exit", seconds=0.7)])
    report.ended_well()
    assert report.ranks[1].said("fault")
    assert not report.ranks[0].said("fault")
    assert report.wall_s >= 0.7
    assert [r.last("end")["hash"] for r in report.ranks] == [
        r.last("end")["hash"] for r in calm.ranks
    ]


def test_a_pause_longer_than_the_timeout_breaks_the_users_own_group(ranks: Ranks) -> None:
    pause = fault("stop", "loop.forward:exit", seconds=2 * TIMEOUT)
    report = run(ranks, faults=[pause])
    judge.in_time(report, 5.0, timeout_s=TIMEOUT, fault_s=2 * TIMEOUT)
    assert all(r.last("end")["ended"] != "done" for r in report.ranks)


def test_after_a_full_disk_a_rank_can_still_speak(ranks: Ranks) -> None:
    report = run(ranks, faults=[fault("full_disk", "loop.step:entry")], save=True)
    assert report.ranks[1].last("end")["ended"] == "done"
    assert report.ranks[1].exit != 0  # its save at the end could not be written
    assert report.ranks[0].exit == 0


def test_a_nan_of_one_rank_is_everybodys(ranks: Ranks) -> None:
    report = run(ranks, nan={"5": 1})
    losses = [[s["loss"] for s in r.said("step")][5] for r in report.ranks]
    assert losses[1] == "nan"
    assert losses[0] != "nan"
    assert [[s["loss"] for s in r.said("step")][6] for r in report.ranks] == ["nan", "nan"]


def test_the_judge_sees_a_rank_that_acts_alone(ranks: Ranks) -> None:
    report = run(ranks, rogue={"5": 1})
    with pytest.raises(AssertionError, match="differently at step 5"):
        judge.together(report, replicated=True)
    for rank in report.ranks:  # had it said the same, its weights would tell
        rank.records = [{**r, "held": False} for r in rank.records]
    with pytest.raises(AssertionError, match="different weights at step 5"):
        judge.together(report, replicated=True)


def test_who_hangs_is_killed_at_the_bound_and_says_where(ranks: Ranks) -> None:
    sleep = fault("sleep", "loop.forward:entry", seconds=300)
    args = {"steps": 8, "timeout_s": TIMEOUT, "faults": [sleep]}
    report = ranks.run(LOOP, 2, args=args, bound_s=6.0)
    assert report.overdue == [1]
    assert "in _happen" in report.ranks[1].text
    with pytest.raises(AssertionError, match="still there at the bound"):
        judge.none_hangs(report)


@pytest.mark.parametrize("world", ["ddp", "fsdp"])
def test_what_is_done_by_hand_is_in_the_books(ranks: Ranks, world: str) -> None:
    script = {"5": {"held": True, "rate": 1.0}, "8": {"rate": 0.5, "restored": 3}}
    report = run(ranks, world, script=script)
    report.ended_well()
    for rank in report.ranks:
        assert judge.acted(rank) == {5: (True, 1.0, None), 8: (False, 0.5, 3)}
        steps = {s["t"]: s for s in rank.said("step")}
        assert steps[8]["entered"] == steps[2]["hash"]
    judge.together(report, replicated=world == "ddp")


def test_with_the_store_in_rank_0_a_run_is_the_same(ranks: Ranks) -> None:
    args = {"steps": 4, "timeout_s": TIMEOUT}
    one = ranks.run(LOOP, 2, args=args, store="rank0")
    one.ended_well()
    two = ranks.run(LOOP, 2, args=args)
    assert one.ranks[0].last("end")["hash"] == two.ranks[0].last("end")["hash"]

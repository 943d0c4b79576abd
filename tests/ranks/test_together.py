"""Several ranks, no fault of ours: nothing is disturbed, and what is done is done on all alike.

The oracle is a run by hand: the same world without sentinel, in which a script leaves out the
updates, puts back the weights and cuts the rates that the attached run's own books show.

Seen red: see each test.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import judge
from tests.support.ranks import Ranks, Report

pytestmark = [pytest.mark.torch, pytest.mark.e2e]

LOOP = "tests.support.ranks.loop:train"
WORLDS = ["ddp", "fsdp", "plain"]
# A NaN on one rank at 12; weights damaged before 28: hot at 28 to 31, back to 24 before 32.
TROUBLE = {"nan": {"12": 1}, "damage": [28], "steps": 44}


def run(ranks: Ranks, world: str, count: int, **args: Any) -> Report:
    report = ranks.run(LOOP, count, args={"world": world, "attach": "all", **args})
    report.ended_well()
    judge.groups_work(report)
    judge.together(report, replicated=world != "fsdp")
    assert not [r.rank for r in report.ranks if "states differ" in r.text]
    return report


def hashes(report: Report) -> list[list[str]]:
    return [[s["hash"] for s in r.said("step")] for r in report.ranks]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("world", WORLDS)
def test_a_healthy_run_is_bitwise_what_it_is_without_us(
    ranks: Ranks, world: str, count: int
) -> None:
    watched = run(ranks, world, count, steps=40)
    bare = run(ranks, world, count, steps=40, attach="none")
    assert hashes(watched) == hashes(bare)
    for rank in watched.ranks:
        assert not judge.acted(rank)
        assert rank.last("end")["status"]["protection"] in ("warming", "armed")
        assert not rank.last("end")["status"]["errors"]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("world", WORLDS)
def test_a_nan_is_skipped_and_a_divergence_rolled_back_on_all_ranks(
    ranks: Ranks, world: str, count: int
) -> None:
    watched = run(ranks, world, count, **TROUBLE)
    for rank in watched.ranks:
        acted = judge.acted(rank)
        assert [t for t, a in acted.items() if a[0]] == [12, 28, 29, 30, 31]
        assert acted[32] == (False, 0.5, 24)
    by_hand = run(
        ranks, world, count, **{**TROUBLE, "attach": "none"}, script=judge.script(watched.ranks[0])
    )
    assert hashes(watched) == hashes(by_hand)


@pytest.mark.parametrize("world", WORLDS)
def test_a_nan_gradient_on_one_rank_is_skipped_on_all(ranks: Ranks, world: str) -> None:
    report = run(ranks, world, 2, nan_grad={"9": 1}, steps=16)
    for rank in report.ranks:
        assert judge.acted(rank) == {9: (True, 1.0, None)}


@pytest.mark.parametrize("world", ["ddp", "fsdp"])
def test_with_a_canary_all_ranks_ask_together(ranks: Ranks, world: str) -> None:
    watched = run(ranks, world, 2, **TROUBLE, canary=True)
    for rank in watched.ranks:
        acted = judge.acted(rank)
        assert [t for t, a in acted.items() if a[0]] == [12, 28, 29, 30, 31]
        assert acted[32] == (False, 0.5, 24)
        assert not rank.last("end")["status"]["errors"]
    by_hand = run(
        ranks, world, 2, **{**TROUBLE, "attach": "none"}, script=judge.script(watched.ranks[0])
    )
    assert hashes(watched) == hashes(by_hand)


BETWEEN = {
    "accumulation": {"accumulation": 3},
    "no-sync": {"accumulation": 3, "no_sync": True},
    "recompute": {"recompute": True},
    "evaluate": {"evaluate": 2},
    "all": {"accumulation": 2, "no_sync": True, "recompute": True, "evaluate": 3, "clip": 0.5},
}


@pytest.mark.parametrize("world", ["ddp", "fsdp"])
@pytest.mark.parametrize("how", sorted(BETWEEN))
def test_a_rollback_is_done_at_a_safe_point_however_the_loop_works(
    ranks: Ranks, world: str, how: str
) -> None:
    watched = run(ranks, world, 2, **TROUBLE, **BETWEEN[how])
    for rank in watched.ranks:
        assert judge.acted(rank)[32] == (False, 0.5, 24)
    by_hand = run(
        ranks,
        world,
        2,
        **{**TROUBLE, "attach": "none"},
        **BETWEEN[how],
        script=judge.script(watched.ranks[0]),
    )
    assert hashes(watched) == hashes(by_hand)


@pytest.mark.parametrize("store", ["agent", "rank0"])
def test_attached_on_one_rank_only_nobody_is_watched_and_the_users_groups_work(
    ranks: Ranks, store: str
) -> None:
    args = {"world": "ddp", "steps": 10, "timeout_s": 6.0}
    bare = ranks.run(LOOP, 2, args=args, store=store)
    report = ranks.run(LOOP, 2, args={**args, "attach": "rank0"}, store=store)
    report.ended_well()
    judge.groups_work(report)
    assert hashes(report) == hashes(bare)
    end = report.ranks[0].last("end")["status"]
    assert end["protection"] == "off"
    assert "rank" in end["why"]

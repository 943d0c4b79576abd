"""Attaching twice, detaching on one rank, attaching again; a rollback that one rank cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import judge
from tests.ranks.test_together import LOOP, TROUBLE, hashes
from tests.support.ranks import Ranks, Report
from tests.support.sidecars import serving

pytestmark = [pytest.mark.torch, pytest.mark.e2e]


def run(ranks: Ranks, world: str, size: int = 2, **args: Any) -> Report:
    args = {"world": world, "attach": "all", "timeout_s": 6.0, **args}
    report = ranks.run(LOOP, size, args=args)
    report.ended_well()
    judge.groups_work(report)
    judge.together(report, replicated=world != "fsdp")
    return report


def protection(report: Report, t: int) -> set[str]:
    return {s["protection"] for r in report.ranks for s in r.said("step") if s["t"] == t}


def test_attaching_twice_is_refused_on_every_rank_and_harms_nobody(ranks: Ranks) -> None:
    report = run(ranks, "ddp", moves={"5": "attach-twice"}, nan={"9": 1}, steps=14)
    for rank in report.ranks:
        assert "attached already" in rank.last("moved")["refused"]
        assert judge.acted(rank) == {9: (True, 1.0, None)}


@pytest.mark.parametrize("gone", [0, 1])
def test_detached_on_one_rank_the_others_switch_off_and_say_so(ranks: Ranks, gone: int) -> None:
    bare = run(ranks, "ddp", steps=40, attach="none")
    report = run(ranks, "ddp", steps=40, moves={"8": f"detach:{gone}"})
    assert hashes(report) == hashes(bare)
    assert "off" not in protection(report, 7)
    assert protection(report, 10) == {"off"}
    stayed = report.ranks[1 - gone].last("end")["status"]
    assert stayed["why"] == f"rank {gone} has detached"
    assert "blind spot" not in stayed["text"]  # nobody counts the forwards any more


def test_ranks_with_unequal_batches_are_let_alone_and_the_run_ends_as_without_us(
    ranks: Ranks,
) -> None:
    """Seen red: a rank that still had batches waited for one that had none, until both failed."""
    ends = []
    for attach in ("none", "all"):
        args = {"world": "ddp", "attach": attach, "timeout_s": 6.0, "steps": 12, "uneven": 4}
        report = ranks.run(LOOP, 2, args=args)
        report.ended_well()
        judge.groups_work(report)
        ends.append([r.last("end")["hash"] for r in report.ranks])
    assert ends[0] == ends[1]
    for rank in report.ranks:
        assert "unequal numbers of batches" in rank.last("end")["status"]["why"]


def test_a_halted_run_is_refused_on_every_rank_with_the_same_error(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Seen red: only rank 0 heard StillHalted, which alone ends the run of a trainer."""
    (tmp_path / "r7").mkdir()
    (tmp_path / "r7" / "HALTED").write_text('{"step": 3, "reason": "ordered"}')
    options = {"run_id": "r7", "run_dir": str(tmp_path)}
    args = {"world": "ddp", "attach": "all", "timeout_s": 6.0, "steps": 4, "options": options}
    report = ranks.run(LOOP, 2, args=args)
    report.ended_well()
    assert [r.last("ready")["refused"].split(":")[0] for r in report.ranks] == ["StillHalted"] * 2


NO_SNAPSHOTS = {"snapshots": {"ram": False, "disk": False}}
_OFF, _ON = "ram=False, disk=False", "ram=True, disk=True"


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        ({"mode": "observe"}, "another policy or mode than rank 0"),
        (NO_SNAPSHOTS, f"other snapshots than rank 0: {_OFF} on rank 1, {_ON} on rank 0"),
    ],
    ids=["mode", "snapshots"],
)
def test_ranks_that_ask_for_different_things_only_observe_and_each_log_says_why(
    ranks: Ranks, odd: dict[str, Any], why: str
) -> None:
    """Seen red: other snapshots took the rollback from all ranks, and nobody said whose."""
    report = run(ranks, "ddp", steps=10, odd={"1": odd}, nan={"5": 1})
    for rank in report.ranks:
        assert not judge.acted(rank)
        assert rank.last("end")["status"]["protection"] == "off"
        why_all = f"why=rank 1 has {why}"
        assert [line for line in rank.said("log") if why_all in line["text"]], rank.said("log")
    (run_id,) = {r.last("end")["status"]["run_id"] for r in report.ranks}  # one job is one run
    assert [path.name for path in (report.directory / "runs").iterdir() if path.is_dir()] == [
        run_id
    ]


def test_a_rank_that_only_observes_is_another_run_where_the_user_says_so(ranks: Ranks) -> None:
    odd = {"1": {"mode": "observe", "run_id": "stage-1"}}
    report = run(ranks, "ddp", steps=4, odd=odd, options={"run_id": "stage-0"})
    ids = [r.last("end")["status"]["run_id"] for r in report.ranks]
    assert ids == ["stage-0", "stage-1"]
    assert {path.name for path in (report.directory / "runs").iterdir()} >= set(ids)


def test_detached_and_attached_again_it_acts_as_before(ranks: Ranks) -> None:
    moves = {"5": "detach", "8": "attach"}
    report = run(ranks, "ddp", moves=moves, nan={"6": 0, "11": 1}, steps=16, rows=4)
    for rank in report.ranks:
        # The NaN that came while nobody watched has damaged everything: but it is not ours.
        assert 6 not in judge.acted(rank)
        assert rank.said("moved")[1]["refused"] == ""


def test_attached_again_a_nan_is_skipped_on_all(ranks: Ranks) -> None:
    moves = {"5": "detach", "8": "attach"}
    report = run(ranks, "fsdp", moves=moves, nan={"11": 1}, steps=16)
    for rank in report.ranks:
        assert judge.acted(rank) == {11: (True, 1.0, None)}


@pytest.mark.parametrize("spoiled", [1, 3])
def test_a_rank_whose_engine_knows_something_else_goes_on_with_what_rank_0_knows(
    ranks: Ranks, spoiled: int
) -> None:
    """Seen red: the rank with no snapshot to go back to voted on none, and all were lost."""
    moves = {"30": f"spoil:{spoiled}"}
    odd: dict[str, dict[str, Any]] = {str(r): {} for r in range(4)}
    report = run(ranks, "ddp", 4, **TROUBLE, moves=moves, odd=odd)
    for rank in report.ranks:
        assert judge.acted(rank)[32] == (False, 0.5, 24)
        assert [line for line in rank.said("log") if "states differ" in line["text"]]
        assert rank.last("end")["status"]["protection"] == "warming"


LOAD = "snapshots.ram.RamStore.prepare:entry"


@pytest.mark.parametrize("world", ["ddp", "fsdp"])
def test_when_one_rank_cannot_load_all_take_the_next_older_snapshot(
    ranks: Ranks, world: str
) -> None:
    fault = {"kind": "raise", "rank": 1, "step": 30, "place": LOAD}
    report = run(ranks, world, 4, **TROUBLE, faults=[fault])
    assert report.ranks[1].last("fault")["place"] == LOAD
    for rank in report.ranks:
        acted = judge.acted(rank)
        assert acted[32][2] is not None
        assert 0 <= acted[32][2] < 24
    by_hand = run(
        ranks, world, 4, **{**TROUBLE, "attach": "none"}, script=judge.script(report.ranks[0])
    )
    assert hashes(report) == hashes(by_hand)


def test_when_one_rank_can_load_nothing_no_rank_moves_a_bit(ranks: Ranks) -> None:
    fault = {"kind": "raise", "rank": 2, "step": 30, "place": LOAD, "always": True}
    report = run(ranks, "ddp", 4, **TROUBLE, faults=[fault])
    for rank in report.ranks:
        assert all(a[2] is None for a in judge.actions(rank).values())
        steps = {s["t"]: s for s in rank.said("step")}
        assert steps[32]["entered"] == steps[31]["hash"]


def test_one_collective_a_step(ranks: Ranks) -> None:
    report = run(ranks, "ddp", 4, steps=24, count=True)
    for rank in report.ranks:
        said = rank.said("collectives")
        counts = [{k: v for k, v in s.items() if k not in ("what", "t")} for s in said]
        assert counts == [{"allreduce": 1}] * 24


def test_with_a_sidecar_one_broadcast_more(ranks: Ranks) -> None:
    with serving() as sidecar:
        options = {"sidecar": sidecar.url, "decide": "sidecar"}
        report = run(ranks, "ddp", 4, steps=24, count=True, nan={"12": 2}, options=options)
    for rank in report.ranks:
        assert judge.acted(rank) == {12: (True, 1.0, None)}
        said = rank.said("collectives")
        counts = [{k: v for k, v in s.items() if k not in ("what", "t")} for s in said]
        assert counts == [{"allreduce": 1, "broadcast": 1}] * 24
        state = "rank_0_asks" if rank.rank else "connected"
        assert f"sidecar: {state} {sidecar.url}" in rank.last("end")["status"]["text"]


def test_a_dead_sidecar_is_dead_for_all_ranks_alike(ranks: Ranks) -> None:
    with serving() as sidecar:
        url = sidecar.url
    options = {"sidecar": url, "decide": "sidecar"}
    report = run(ranks, "ddp", 4, **TROUBLE, options=options)
    for rank in report.ranks:
        assert [t for t, a in judge.acted(rank).items() if a[0]] == [12, 28, 29, 30, 31]

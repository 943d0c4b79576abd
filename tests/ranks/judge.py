"""What must hold of a run of several ranks, whatever happened in it; imports nothing of ours.

    judge.together(report)                  every rank acted alike, and ended with the same weights
    judge.in_time(report, base_s, fault)    nobody waited longer than one timeout
    judge.groups_work(report)               the user's own groups still do what they should

Each raises AssertionError that says where two ranks parted.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tests.support.ranks import RankReport, Report

MARGIN_S = 12.0  # the machine's own moods; a hang is three times as long


def survivors(report: Report) -> list[RankReport]:
    """Ranks that ended by themselves."""
    return [r for r in report.ranks if r.exit == 0 and not r.overdue]


def actions(rank: RankReport) -> dict[int, tuple[Any, ...]]:
    """step -> (held, rate, restored from), as the loop itself saw it."""
    return {r["t"]: (r["held"], r["rate"], r.get("restored")) for r in rank.said("step")}


def acted(rank: RankReport) -> dict[int, tuple[Any, ...]]:
    """Only the steps at which something was done."""
    return {t: a for t, a in actions(rank).items() if a != (False, 1.0, None)}


def script(rank: RankReport) -> dict[str, dict[str, Any]]:
    """For a run by hand that shall do the same."""
    orders: dict[str, dict[str, Any]] = {}
    for t, (held, rate, restored) in acted(rank).items():
        orders[str(t)] = {"held": held, "rate": rate}
        if restored is not None:
            orders[str(t)]["restored"] = restored
    return orders


def together(report: Report, *, replicated: bool) -> None:
    """Actions alike at every step that two ranks both made; equal weights if replicated.

    What a killed rank had said before its death counts too.
    """
    first, *others = report.ranks
    mine = actions(first)
    hashes = {r["t"]: (r["entered"], r["hash"]) for r in first.said("step")}
    for other in others:
        theirs = actions(other)
        parted = [t for t in sorted(mine.keys() & theirs.keys()) if mine[t] != theirs[t]]
        assert not parted, (
            f"ranks {first.rank} and {other.rank} acted differently at step {parted[0]}: "
            f"{mine[parted[0]]} and {theirs[parted[0]]} (held, rate, restored)"
        )
        if not replicated:
            continue
        for record in other.said("step"):
            t = record["t"]
            if t in hashes:
                assert (record["entered"], record["hash"]) == hashes[t], (
                    f"ranks {first.rank} and {other.rank} have different weights at step {t}"
                )
        ends = [e for r in (first, other) for e in r.said("end") if e.get("ended") == "done"]
        assert len({e["hash"] for e in ends}) < 2, "different weights at the end"


def none_hangs(report: Report) -> None:
    """Everybody ended before the bound."""
    texts = "\n".join(f"rank {r.rank}:\n{r.text}" for r in report.ranks if r.overdue)
    assert not report.overdue, f"ranks {report.overdue} were still there at the bound\n{texts}"


def in_time(report: Report, base_s: float, *, timeout_s: float, fault_s: float = 0.0) -> None:
    """The unattached run, the fault's own length, one timeout, and a margin."""
    none_hangs(report)
    bound = base_s + fault_s + timeout_s + MARGIN_S
    assert report.wall_s <= bound, f"took {report.wall_s:.1f} s, allowed {bound:.1f} s"


def groups_work(report: Report, *, but: Iterable[int] = ()) -> None:
    """The user made a group and reduced in it, before and after detach()."""
    for rank in report.ranks:
        if rank.rank in but or rank.last("end")["ended"] != "done":
            continue
        for what in ("groups", "groups_after"):
            for said in rank.said(what):
                assert said["works"], f"rank {rank.rank}, {what}: {said['error']}"


def joined(held: list[torch.Tensor], shape: list[int]) -> torch.Tensor:
    """One full tensor from what each rank holds: shards along the first dimension, or copies."""
    if list(held[0].shape) == shape and all(torch.equal(held[0], h) for h in held):
        return held[0]
    full = torch.cat([h for h in held if h.numel()])
    assert list(full.shape) == shape, f"{list(full.shape)} for {shape}"
    return full


def whole(
    directory: Path, ranks: int, shapes: dict[str, list[int]], *, step: int = -1, part: str = ""
) -> dict[str, torch.Tensor]:
    """Full parameters as saved at the end, or `part` of the dump of a step."""
    suffix = "" if step < 0 else f"-step{step}"
    saved = [torch.load(directory / f"rank{r}{suffix}.pt", weights_only=True) for r in range(ranks)]
    if part:
        saved = [s[part] for s in saved]
    return {name: joined([s[name] for s in saved], shape) for name, shape in shapes.items()}

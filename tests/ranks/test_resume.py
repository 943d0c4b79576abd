"""All ranks are killed at a random moment and start again from the loop's own latest checkpoint.

The second process draws other batches, so that its weights are not those the first would have had:
a rollback may put back what stood in this lineage, and nothing else. Judged by hashes of weights:
those of the second process, and of the first up to the checkpoint.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import judge
from tests.ranks.test_faults import SEED, Survey, _passed
from tests.support.ranks import Ranks

pytestmark = [pytest.mark.torch, pytest.mark.e2e]

LOOP = "tests.support.ranks.loop:train"
RANKS, NAN_AT, EVERY = 2, 6, 5


@pytest.fixture(scope="module")
def survey(ranks: Ranks) -> Survey:
    return Survey(ranks)


def check(number: int, ranks: Ranks, directory: Path) -> None:
    dice = random.Random(f"resume-{SEED}-{number}")
    world = ["ddp", "fsdp"][number % 2]
    common: dict[str, Any] = {
        "world": world,
        "attach": "all",
        "keep_every": EVERY,
        "options": {"run_id": "r7"},
        "snapshots": {"ram": dice.random() < 0.5},
        "survey": True,
    }
    first = {**common, "steps": 44, "nan": {str(NAN_AT): 1}, "damage": [28]}
    calm = ranks.run(LOOP, RANKS, args={**first, "options": {}})
    calm.ended_well()
    rank = dice.randrange(RANKS)
    places = _passed(calm.ranks[rank].records)
    place = dice.choice(sorted(places))
    late = [t for t in places[place] if t > NAN_AT] or [NAN_AT + 1]
    kill = {
        "kind": "kill",
        "rank": rank,
        "step": dice.choice(late),
        "place": place.rstrip("!"),
    }
    print(f"seed {SEED}, {number}, {world}: {kill}, {common['snapshots']}")
    killed = ranks.run(
        LOOP, RANKS, args={**first, "faults": [kill]}, directory=directory, die_together=True
    )
    if not any(r.said("fault") for r in killed.ranks):  # a place that is passed only now and then
        killed.ended_well()
    judge.together(killed, replicated=world == "ddp")
    before = [{s["t"]: s for s in r.said("step")} for r in killed.ranks]

    start = 0
    second = {**common, "resume": True, "shift": 1, "survey": False}
    # Far enough behind the checkpoint for cold statistics to have warmed up.
    guess = max((s["t"] for s in killed.ranks[0].records if s["what"] == "step"), default=0)
    damage = guess + 22
    again = ranks.run(
        LOOP,
        RANKS,
        args={**second, "damage": [damage], "steps": damage + 14},
        directory=directory,
    )
    again.ended_well()
    judge.groups_work(again)
    judge.together(again, replicated=world == "ddp")
    for r in again.ranks:
        start = r.last("ready")["start"]
        assert start <= guess + 1
        own = {s["entered"] for s in r.said("step")[:1]} | {s["hash"] for s in r.said("step")}
        lineage = {s["entered"] for t, s in before[r.rank].items() if t <= start}
        back = {t: s for t, s in _restores(r.said("step")).items() if t > damage}
        assert len(back) >= 1, f"never rolled back: {r.last('end')['status']['text']}"
        for t, entered in back.items():
            assert entered in own | lineage, f"step {t} went on with weights of another lineage"
        status = r.last("end")["status"]
        assert status["protection"] != "off", status["text"]
        assert "nonfinite" in status["text"], f"the skip of step {NAN_AT} is forgotten"


def _restores(steps: list[dict[str, Any]]) -> dict[int, str]:
    return {s["t"]: s["entered"] for s in steps if "restored" in s}


@pytest.mark.parametrize("number", range(3))
def test_killed_ranks_go_on_in_their_own_lineage(ranks: Ranks, tmp_path: Path, number: int) -> None:
    check(number, ranks, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("number", range(3, 20))
def test_killed_ranks_go_on_in_their_own_lineage_at_length(
    ranks: Ranks, tmp_path: Path, number: int
) -> None:
    check(number, ranks, tmp_path)

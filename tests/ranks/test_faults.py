"""A rank misbehaves at any place of our code or of the loop, and all others stay with it.

Each run has 4 ranks, a NaN on one of them and a real divergence; on top of these one fault is drawn
from a printed seed: what, on which rank, in which step, at which place (entry or exit of any of our
functions, as a survey of the same run without a fault has seen them passed; attach and detach
included). `SENTINEL_FAULT_SEED=n` draws others; `python -m tests.ranks.test_faults N` runs one.

Whatever happens: what is done is done by every rank in the same step, weights stay equal, nobody
waits longer than one timeout, and the user's own groups work afterwards (unless a rank is dead).
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from tests.ranks import judge
from tests.support.ranks import Ranks, Report

pytestmark = [pytest.mark.torch, pytest.mark.e2e]

LOOP = "tests.support.ranks.loop:train"
SEED = int(os.environ.get("SENTINEL_FAULT_SEED", "20261129"))
RANKS, TIMEOUT = 4, 4.0
# By draw number, so that 24 and 200 hold the same mixture.
WORLDS = ["ddp", "plain", "ddp", "fsdp", "ddp", "plain"]
KINDS = ["raise", "raise", "short_stop", "kill", "raise", "full_disk", "long_stop", "short_sleep"]
KINDS += ["raise", "kill", "long_sleep", "raise"]
SECONDS = {"short": 0.5, "long": 1.4 * TIMEOUT}
TROUBLE: dict[str, Any] = {"nan": {"12": 1}, "damage": [28], "steps": 40, "timeout_s": TIMEOUT}


@dataclass(frozen=True)
class Drawn:
    """One fault."""

    number: int
    world: str
    kind: str
    rank: int
    step: int
    place: str

    @property
    def seconds(self) -> float:
        return SECONDS.get(self.kind.partition("_")[0], 0.0)

    def order(self) -> dict[str, Any]:
        _, _, kind = self.kind.rpartition("_") if self.seconds else ("", "", self.kind)
        return {
            "kind": kind,
            "rank": self.rank,
            "step": self.step,
            "place": self.place,
            "seconds": self.seconds,
        }


class Survey:
    """Which places each world passes, and how long it takes without us."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._places: dict[str, list[dict[str, list[int]]]] = {}
        self._base: dict[str, float] = {}

    def base(self, world: str) -> float:
        if world not in self._base:
            report = self._ranks.run(LOOP, RANKS, args={"world": world, **TROUBLE})
            report.ended_well()
            self._base[world] = report.wall_s
        return self._base[world]

    def places(self, world: str) -> list[dict[str, list[int]]]:
        """By rank: place -> steps; a place with "!" may not raise."""
        if world not in self._places:
            args = {"world": world, "attach": "all", "survey": True, **TROUBLE}
            report = self._ranks.run(LOOP, RANKS, args=args)
            report.ended_well()
            self._places[world] = [_passed(r.records) for r in report.ranks]
        return self._places[world]


def _passed(records: list[dict[str, Any]]) -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    at = {"ready": -1, "detached": TROUBLE["steps"]}
    for record in records:
        for place in record.get("passed", ()):
            places.setdefault(place, []).append(at.get(record["what"], record.get("t", -1)))
    return places


def draw(number: int, survey: Survey) -> Drawn:
    """The `number`th fault of this seed."""
    dice = random.Random(f"{SEED}-{number}")
    world = WORLDS[number % len(WORLDS)]
    kind = KINDS[(number + number // len(KINDS)) % len(KINDS)]
    rank = dice.randrange(RANKS)
    places = survey.places(world)[rank]
    # A place that is passed now below a guard and now outside of one may not raise either.
    allowed = [
        p for p in sorted(places) if kind != "raise" or not (p.endswith("!") or f"{p}!" in places)
    ]
    if kind == "raise" and len(allowed) == 0:
        pytest.fail(f"no place of {world} lies under the guard")
    place = dice.choice(allowed)
    return Drawn(number, world, kind, rank, dice.choice(places[place]), place.rstrip("!"))


def in_words(words: str) -> Drawn:
    world, kind, rank, step, place = words.split()
    return Drawn(0, world, kind, int(rank), int(step), place)


def run(drawn: Drawn, ranks: Ranks, survey: Survey) -> Report:
    base = survey.base(drawn.world)
    bound = base + drawn.seconds + 3 * TIMEOUT + 30
    args = {"world": drawn.world, "attach": "all", "faults": [drawn.order()], **TROUBLE}
    return ranks.run(LOOP, RANKS, args=args, bound_s=bound)


def judged(drawn: Drawn, report: Report, base_s: float) -> str:
    """Raises AssertionError; returns how it ended, for the table."""
    judge.in_time(report, base_s, timeout_s=TIMEOUT, fault_s=drawn.seconds)
    hit = report.ranks[drawn.rank].said("fault")
    judge.together(report, replicated=drawn.world != "fsdp")
    dead = [r.rank for r in report.ranks if r.exit]
    assert dead == ([drawn.rank] if drawn.kind == "kill" and hit else []), (
        f"ranks {dead} are dead: {[r.text for r in report.ranks if r.rank in dead]}"
    )
    # Longer than the timeout at the very end: the user's own last reduce would break too.
    if not dead and not (drawn.kind.startswith("long") and drawn.step >= TROUBLE["steps"]):
        judge.groups_work(report)
    ends = [r.last("end") for r in judge.survivors(report)]
    done = all(e["ended"] == "done" for e in ends)
    states = {e["status"].get("protection", "unattached") for e in ends}
    if not drawn.kind.startswith(("long", "kill")):
        assert done, f"the loop itself ended: {[e['ended'] for e in ends]}"
    if done and not dead:
        # In the last steps a rank may know what the others learn in the next.
        if drawn.step < TROUBLE["steps"] - 3:
            assert len(states - {"unattached"}) < 2, f"protection differs: {states}"
        if "unattached" in states and hit:
            assert states <= {"unattached", "off"}, "watched, but not all are"
    refused = [r.rank for r in judge.survivors(report) if r.last("ready").get("refused")]
    assert not refused or drawn.step < 0, f"attach() was refused on {refused}"
    how = "/".join(sorted(states)) if done else "the user's own group broke"
    return f"{how}{'' if hit else ' (never reached)'}"


@pytest.fixture(scope="module")
def survey(ranks: Ranks) -> Survey:
    return Survey(ranks)


def check(number: int, ranks: Ranks, survey: Survey) -> str:
    drawn = draw(number, survey)
    print(f"seed {SEED}, {drawn}")
    report = run(drawn, ranks, survey)
    return judged(drawn, report, survey.base(drawn.world))


@pytest.mark.parametrize("number", range(24))
def test_all_ranks_do_the_same_whatever_one_of_them_does(
    ranks: Ranks, survey: Survey, number: int
) -> None:
    check(number, ranks, survey)


def test_a_rank_that_slept_after_the_meeting_does_not_wait_for_those_who_left(
    ranks: Ranks, survey: Survey
) -> None:
    drawn = Drawn(0, "ddp", "long_sleep", 2, -1, "ranks.meeting._gather:exit")
    judged(drawn, run(drawn, ranks, survey), survey.base(drawn.world))  # the time is bounded there


def test_a_sharded_rank_that_has_nothing_to_say_has_not_parted(
    ranks: Ranks, survey: Survey
) -> None:
    drawn = Drawn(0, "fsdp", "raise", 3, 38, "ranks.council._digest:entry")
    assert judged(drawn, run(drawn, ranks, survey), survey.base(drawn.world)) != "off"


@pytest.mark.full
@pytest.mark.parametrize("number", range(24, 200))
def test_all_ranks_do_the_same_whatever_one_of_them_does_at_length(
    ranks: Ranks, survey: Survey, number: int
) -> None:
    check(number, ranks, survey)


@pytest.mark.parametrize(
    "words",
    [
        # A step that a rank has not noted: it decided on another state from then on.
        "ddp raise 0 26 session.Session.after_step:entry",
        # A rollback whose step was not settled: no cut rate on this rank.
        "plain raise 2 32 parts.turns.Turns.all_stepped:exit",
        "fsdp raise 3 32 session.Session._settle:entry",
        "ddp raise 1 32 saving.Saving.restore:exit",
        # A rate that was cut twice.
        "ddp raise 2 32 actuators.ScaledLr.cut:exit",
        # A part of a save that nobody heard of: at detach rank 0 waited for it.
        "ddp raise 3 16 snapshots.disk.next_due:exit",
    ],
)
def test_what_was_found_to_part_ranks_does_so_no_more(
    ranks: Ranks, survey: Survey, words: str
) -> None:
    drawn = in_words(words)
    assert judged(drawn, run(drawn, ranks, survey), survey.base(drawn.world)) == "warming"


def test_a_survey_passes_the_places_of_a_skip_and_of_a_rollback(survey: Survey) -> None:
    for world in ("ddp", "fsdp", "plain"):
        for places in survey.places(world):
            names = {p.rstrip("!").rpartition(":")[0] for p in places}
            assert {"actuators.HeldBack.take", "saving.Saving._restore"} <= names
            assert len(places) > 100


def sweep(ranks: Ranks, world: str = "ddp", rank: int = 1, step: int = 12) -> dict[str, str]:
    """An error at every place that may raise, in the very step in which all ranks must act.

    place -> what went wrong, for those where something did. Two ranks.

    Args:
        step: 12, in which they skip; or one before whose forward they save to disk (16) or roll
            back (32): then only the places that the skipped step does not pass.
    """
    args = {"world": world, "attach": "all", **TROUBLE, "nan": {"12": 0}}
    args["steps"] = step + 6
    calm = ranks.run(LOOP, 2, args={**args, "survey": True})
    calm.ended_well()
    places = [
        p
        for p, steps in _passed(calm.ranks[rank].records).items()
        if step in steps and (step == 12 or 12 not in steps)
    ]
    wrong = {}
    for place in sorted(p for p in places if not p.endswith("!")):
        fault = {"kind": "raise", "rank": rank, "step": step, "place": place}
        report = ranks.run(LOOP, 2, args={**args, "faults": [fault]}, bound_s=60)
        try:
            judge.none_hangs(report)
            report.ended_well()
            judge.together(report, replicated=world != "fsdp")
            judge.groups_work(report)
            ends = [r.last("end") for r in report.ranks]
            assert {e["ended"] for e in ends} == {"done"}, ends[0]["ended"]
            states = {e["status"]["protection"] for e in ends}
            assert len(states) == 1, f"protection differs: {states}"
        except AssertionError as error:
            wrong[place] = str(error).splitlines()[0]
            print(f"{place}: {wrong[place]}", flush=True)
    return wrong


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("step", [12, 16, 32])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_at_any_place_of_a_step_in_which_all_act_parts_nobody(
    ranks: Ranks, rank: int, step: int
) -> None:
    wrong = sweep(ranks, rank=rank, step=step)
    assert not wrong, "\n".join(f"{place}: {why}" for place, why in wrong.items())


def main() -> None:
    """Runs draws by number, faults in words ("ddp raise 1 12 session.Session._decide:entry"), or
    "sweep WORLD RANK STEP", and says how each ended.
    """
    with Ranks() as ranks:
        survey = Survey(ranks)
        for word in sys.argv[1:]:
            if word.startswith("sweep"):
                _, world, rank, step = word.split()
                wrong = sweep(ranks, world, int(rank), int(step))
                print(f"{word}: wrong at {len(wrong)} places", flush=True)
                continue
            if word.isdigit():
                drawn = draw(int(word), survey)
            else:
                drawn = in_words(word)
            print(drawn, flush=True)
            report = run(drawn, ranks, survey)
            try:
                print("   ", judged(drawn, report, survey.base(drawn.world)), flush=True)
            except AssertionError as error:
                print("    FAILED", error)
                for r in report.ranks:
                    print(f"    -- rank {r.rank} exit {r.exit}\n{r.text[-1500:]}", flush=True)


if __name__ == "__main__":
    main()

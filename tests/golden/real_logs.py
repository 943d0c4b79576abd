"""Replay a recorded loss curve through the whole engine, open loop, and score it.

    steps = replay(trace, policy)         one Step per logged point
    score(steps, events) -> Score         which events were acted on, and how often for nothing

A log cannot be acted on: what would have been skipped or rolled back went on all the same. So the
policy only observes, the outcome of every step is PROCEED, and what counts is `Decision.would`.

Windows. A sustained event (S) or a divergence (D) counts as acted on if a rollback is decided
inside it, from its first to its last point; a non-finite event (N) if a skip or rollback is. A
rollback is false if it lies outside every S, D and N event, where 6 points of lead and 40 points
of after-effect still belong to the event. A transient (T) justifies no rollback.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sentinel.core import advice, engine
from sentinel.core.events import SnapshotTaken
from sentinel.core.policy import Policy
from sentinel.core.types import Action, Observation, Outcome

LEAD, AFTER = 6, 40


@dataclass(frozen=True)
class Event:
    """One labelled event, by index into the trace, ends included.

    `points` are those that stick out: all, unless the label knows better.
    """

    kind: str
    start: int
    end: int
    points: int


@dataclass(frozen=True)
class Trace:
    name: str
    rows: list[tuple[float, float | None, float | None]]  # loss, grad_norm, lr
    events: list[Event]


@dataclass(frozen=True)
class Step:
    would: Action
    rule: str
    hot: bool
    shifted: bool
    flags: tuple[str, ...] = ()  # advice, by name


@dataclass
class Score:
    acted: list[tuple[Event, int]] = field(default_factory=list)  # with the delay in points
    missed: list[Event] = field(default_factory=list)
    false_rollbacks: list[int] = field(default_factory=list)
    false_skips: int = 0  # outside every event, transients included
    noticed: list[tuple[Event, int]] = field(default_factory=list)  # first finding of any kind


def load(folder: Path) -> Iterator[Trace]:
    """The traces of a folder with `labels.json` and one CSV for each name in it."""
    labels = json.loads((folder / "labels.json").read_text(encoding="utf-8"))
    for name, label in labels.items():
        path = folder / f"{name}.csv"
        if not path.is_file():  # excerpts are listed but too short to replay
            continue
        with path.open(encoding="utf-8", newline="") as file:
            rows = [
                (float(row["loss"]), _number(row.get("grad_norm")), _number(row.get("lr")))
                for row in csv.DictReader(file)
            ]
        events = [
            Event(e["kind"], e["start"], e["end"], e.get("points", e["end"] - e["start"] + 1))
            for e in label["events"]
        ]
        yield Trace(name, rows, events)


def replay(trace: Trace, policy: Policy) -> list[Step]:
    """Decide every logged step; nothing is ever carried out."""
    state = engine.note(engine.initial(), SnapshotTaken(0), policy)
    steps = []
    for i, (loss, norm, lr) in enumerate(trace.rows):
        observation = Observation(i, loss=loss, grad_norm=norm, lr=lr)
        decision = engine.decide(state, observation, policy)
        shifted = any(f.key == "level_shift" for f in decision.findings)
        hot = decision.readings.spike_level > 0
        flags = tuple(f.key for f in decision.findings if f.key in advice.FLAGS)
        steps.append(Step(decision.would, decision.rule, hot, shifted, flags))
        outcome = Outcome(i, Action.PROCEED, applied=True)
        state = engine.apply(state, observation, decision, outcome, policy)
        if decision.take_snapshot:
            state = engine.note(state, SnapshotTaken(i + 1), policy)
    return steps


def score(steps: list[Step], events: list[Event]) -> Score:
    """Compare what would have been done with what should have been."""
    result = Score()
    serious = [e for e in events if e.kind != "T"]
    for event in serious:
        inside = range(event.start, min(event.end + 1, len(steps)))
        needed = Action.SKIP_STEP if event.kind == "N" else Action.ROLLBACK
        at = next((i for i in inside if steps[i].would >= needed), None)
        if at is None:
            result.missed.append(event)
        else:
            result.acted.append((event, at - event.start))
        near = range(max(event.start - LEAD, 0), inside.stop)
        seen = next((i for i in near if steps[i].shifted or steps[i].would > Action.PROCEED), None)
        if seen is not None:
            result.noticed.append((event, seen - event.start))
    for i, step in enumerate(steps):
        if step.would is Action.ROLLBACK and not any(_belongs(i, e) for e in serious):
            result.false_rollbacks.append(i)
        if step.would is Action.SKIP_STEP and not any(_belongs(i, e) for e in events):
            result.false_skips += 1
    return result


def summary(delays: list[int]) -> str:
    """Median and maximum of delays, in points."""
    if not delays:
        return "no delays"
    return f"median {statistics.median(delays):g}, max {max(delays)} points"


def _belongs(i: int, event: Event) -> bool:
    end = math.inf if event.kind in "DN" else event.end + AFTER
    return event.start - LEAD <= i <= end


def _number(text: str | None) -> float | None:
    return float(text) if text not in (None, "") else None

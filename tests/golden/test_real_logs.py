"""Real loss curves through the whole engine: what is acted on, what is left alone, how soon."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sentinel.core.policy import Policy
from tests.golden.real_logs import Event, Score, Trace, load, replay, score, summary

Row = tuple[str, Event]


@dataclass
class Tally:
    """What became of the events, over all traces of a folder."""

    points: int = 0
    skips: int = 0
    acted: list[Row] = field(default_factory=list)
    missed: list[Row] = field(default_factory=list)
    false: list[tuple[str, int]] = field(default_factory=list)
    acted_after: list[int] = field(default_factory=list)
    noticed_after: list[int] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    flags: list[tuple[str, str, int]] = field(default_factory=list)  # flag, trace, point

    def add(self, trace: Trace, result: Score, asked: list[Event]) -> None:
        """Count a trace in; `asked` are the events that must be acted on."""
        self.points += len(trace.rows)
        self.skips += result.false_skips
        self.false += [(trace.name, i) for i in result.false_rollbacks]
        acted, noticed = dict(result.acted), dict(result.noticed)
        for event in asked:
            (self.acted if event in acted else self.missed).append((trace.name, event))
            if event in acted:
                self.acted_after.append(acted[event])
            if event in noticed:
                self.noticed_after.append(noticed[event])
            self.lines.append(
                f"  {trace.name:20} {event.kind} {event.start}..{event.end} "
                f"noticed +{noticed.get(event, '-')} acted +{acted.get(event, '-')}"
            )

    def count(self, kind: str) -> int:
        return sum(event.kind == kind for _, event in self.acted)

    def report(self, title: str) -> str:
        return "\n".join(
            (
                f"\n{title}: {self.points} points, default policy, open loop, no canary",
                *self.lines,
                (
                    f"  delay until acted: {summary(self.acted_after)}; "
                    f"until noticed: {summary(self.noticed_after)}"
                ),
                (
                    f"  false rollbacks: {self.false or 'none'}; "
                    f"steps skipped outside every event: {self.skips}"
                ),
            )
        )


@pytest.mark.slow
def test_recorded_runs_are_acted_on_where_they_fail_and_nowhere_else(
    shared_traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = Policy.load("default").with_mode("observe")
    tally = Tally()
    for trace in load(shared_traces):
        own = trace.name.startswith("self_")
        asked = [
            e for e in trace.events if e.kind in "DN" or (own and e.kind == "S" and e.points > 3)
        ]
        steps = replay(trace, policy)
        tally.add(trace, score(steps, trace.events), asked)
        tally.flags += [(f, trace.name, i) for i, s in enumerate(steps) for f in s.flags]
    with capsys.disabled():
        print(tally.report("recorded runs"))
        print(f"  advice: {tally.flags}")
    assert tally.points > 139_000
    assert tally.missed == []
    assert (tally.count("S"), tally.count("D"), tally.count("N")) == (6, 4, 1)
    assert len(tally.false) <= 1
    # What is on by default hardly ever speaks, and hardly ever for nothing.
    failing = {"self_badbatch30", "self_div_lrbug", "self_div_ramp"}
    assert {f for f, name, _ in tally.flags if name in failing} >= {"norm_trend", "rising_together"}
    assert len([f for f in tally.flags if f[1] not in failing]) <= 1
    assert len(tally.flags) <= 6


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(1200)  # a minute on an idle core
def test_fresh_runs_are_acted_on_where_they_fail_and_nowhere_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.golden.make_traces import make

    seed = int(os.environ.get("SENTINEL_SEED", "2026"))
    make(tmp_path, seed)
    policy = Policy.load("default").with_mode("observe")
    tally = Tally()
    traces = list(load(tmp_path))
    for trace in traces:
        asked = [e for e in trace.events if e.kind in "SDN" and e.points > 3]
        tally.add(trace, score(replay(trace, policy), trace.events), asked)
    with capsys.disabled():
        print(tally.report(f"fresh runs, SENTINEL_SEED={seed}"))
    assert len(traces) == 20
    assert tally.missed == []
    assert len(tally.false) <= 1
    # The faults took effect: the test is about something.
    assert tally.count("S") + tally.count("D") >= 6
    assert tally.count("N") == 3

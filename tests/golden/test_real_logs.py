"""Real loss curves through the whole engine: what is acted on, what is left alone, how soon."""

from __future__ import annotations

from pathlib import Path

import pytest

from sentinel.core.policy import Policy
from tests.golden.real_logs import Event, load, replay, score, summary


def own_sustained(name: str, event: Event) -> bool:
    return name.startswith("self_") and event.kind == "S" and event.points > 3


@pytest.mark.slow
def test_recorded_runs_are_acted_on_where_they_fail_and_nowhere_else(
    shared_traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = Policy.load("default").with_mode("observe")
    points = skips = 0
    sustained: list[tuple[str, Event, bool]] = []
    diverging: list[tuple[str, Event, bool]] = []
    nonfinite: list[tuple[str, Event, bool]] = []
    false: list[tuple[str, int]] = []
    delays: list[int] = []
    noticed: list[int] = []
    lines = []
    for trace in load(shared_traces):
        result = score(replay(trace, policy), trace.events)
        points += len(trace.rows)
        skips += result.false_skips
        false += [(trace.name, i) for i in result.false_rollbacks]
        done = dict(result.acted)
        seen = dict(result.noticed)
        for event in trace.events:
            row = (trace.name, event, event in done)
            if own_sustained(trace.name, event):
                sustained.append(row)
            elif event.kind == "D":
                diverging.append(row)
            elif event.kind == "N":
                nonfinite.append(row)
            else:
                continue
            if event in done:
                delays.append(done[event])
            if event in seen:
                noticed.append(seen[event])
            lines.append(
                f"  {trace.name:24} {event.kind} {event.start}..{event.end} "
                f"noticed +{seen.get(event, '-')} acted +{done.get(event, '-')}"
            )
    with capsys.disabled():
        print(f"\nreal logs: {points} points, policy {policy.name}, open loop, no canary")
        print("\n".join(lines))
        print(f"  delay until acted: {summary(delays)}; until noticed: {summary(noticed)}")
        print(f"  false rollbacks: {false or 'none'}; steps skipped for nothing: {skips}")
    assert points > 139_000
    assert [row for row in sustained if not row[2]] == []
    assert len(sustained) == 6
    assert [row for row in diverging if not row[2]] == []
    assert len(diverging) == 4
    assert [row for row in nonfinite if not row[2]] == []
    assert len(nonfinite) == 1
    assert len(false) <= 1

"""Orders of people reach two real ranks through a real sidecar: each once, on both at one step.

Rank 0 alone asks the sidecar; what is ordered travels in the reduce. The replies that carry an
order are lost on the way, one order expires while nothing gets through, and the last one halts.

Seen red: with orders that rank 1 did not take from the note of rank 0.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest

from sentinel.traces.reader import Reader
from tests.e2e.test_commands import People, wait_until
from tests.ranks import judge
from tests.ranks.test_together import LOOP
from tests.support.ranks import Ranks, Report
from tests.support.sidecars import HostileProxy, hostile_proxy, serving

pytestmark = [pytest.mark.torch, pytest.mark.e2e, pytest.mark.slow]


class Training(threading.Thread):
    """Two ranks that train until somebody halts them."""

    def __init__(self, ranks: Ranks, **args: Any) -> None:
        super().__init__(daemon=True)
        self._ranks, self._args = ranks, args
        self.report: Report | None = None
        self.start()

    def run(self) -> None:
        self.report = self._ranks.run(LOOP, 2, args=self._args, bound_s=150.0)


def order(people: People, kind: str, id_: str, **more: Any) -> None:
    """Given, and taken by the trainer."""
    assert people.order(kind, id_, **more)[0] == 202
    wait_until(lambda: people.states()[id_] == "taken", f"order {id_} taken")


def steer(people: People, proxy: HostileProxy) -> list[str]:
    """Every kind of order, one after the other; the ids of those that must be obeyed."""
    wait_until(lambda: proxy.requests > 10, "training")
    order(people, "pause", "o-pause")
    order(people, "resume", "o-resume")
    for id_ in ("o-skip-1", "o-skip-2"):
        proxy.drop_next = id_.encode()
        order(people, "skip_next", id_)
        assert people.order("skip_next", id_)[0] == 202  # somebody presses again
        assert proxy.drop_next == b"", "no reply has carried the order"
    proxy.behaviour = "refuses"
    assert people.order("skip_next", "o-late", expires_in_s=0.5)[0] == 202
    wait_until(lambda: people.states()["o-late"] == "expired", "the order expired")
    proxy.behaviour = "healthy"
    proxy.drop_next = b"o-scale"
    order(people, "scale_lr", "o-scale", value=0.25)
    proxy.drop_next = b"o-back"
    order(people, "rollback", "o-back")
    proxy.drop_next = b"o-halt"
    assert people.order("halt", "o-halt")[0] == 202
    return ["o-pause", "o-resume", "o-skip-1", "o-skip-2", "o-scale", "o-back", "o-halt"]


@pytest.mark.parametrize("decide", ["sidecar", "trainer"])
def test_each_order_is_obeyed_once_and_on_both_ranks_at_the_same_step(
    ranks: Ranks, tmp_path: Path, decide: str
) -> None:
    path = tmp_path / "s.sock"
    with serving("--uds", str(path)) as process, hostile_proxy(process.port) as proxy:
        people = People(path)
        options = {"sidecar": proxy.url, "decide": decide, "run_id": "r7"}
        training = Training(
            ranks,
            attach="all",
            steps=8000,
            pause_s=0.005,
            timeout_s=20.0,
            orders=True,
            options=options,
        )
        with contextlib.closing(people.client):
            ids = steer(people, proxy)
            training.join(160.0)
    report = training.report
    assert report is not None
    report.ended_well()
    judge.together(report, replicated=True)
    for rank in report.ranks:
        assert rank.last("end")["ended"].startswith("TrainingHalted"), rank.text
    seen = [first_seen(r.said("step")) for r in report.ranks]
    assert seen[0] == seen[1], "obeyed at the same step on both"
    assert list(seen[0]) == ids[:-1]  # the loop says nothing of the step in which it is halted

    trace = list(Reader(report.directory / "runs" / "r7").steps())
    obeyed = [c.id for r in trace for c in r.observation.commands]
    assert obeyed == ids
    assert proxy.lost >= 5

    acted = judge.acted(report.ranks[0])
    assert sum(held for held, _, _ in acted.values()) == 3  # two orders, and the step rolled back
    back = [t for t, (_, _, restored) in acted.items() if restored is not None]
    assert len(back) == 1
    before = {rate for t, (_, rate, _) in judge.actions(report.ranks[0]).items() if t < back[0]}
    assert before == {1.0, 0.25}
    assert acted[back[0]][1] == 0.25  # a rollback that a person orders cuts nothing
    paused = [s["t"] for s in report.ranks[1].said("step") if not s["automation"]]
    assert paused == list(range(seen[0]["o-pause"], seen[0]["o-resume"]))


def first_seen(steps: list[dict[str, Any]]) -> dict[str, int]:
    """order -> the step after which it was first among those obeyed."""
    found: dict[str, int] = {}
    for record in steps:
        for id_ in record["orders"]:
            found.setdefault(id_, record["t"])
    return found

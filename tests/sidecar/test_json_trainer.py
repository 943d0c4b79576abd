"""A trainer in another language: it is never locked out, and its record says what was done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sentinel.traces.replay import replay
from sentinel.wire import codec
from tests.support import FakeClock
from tests.support.foreign import Foreign, proved


@pytest.fixture
def trainer(tmp_path: Path, clock: FakeClock) -> Iterator[Foreign]:
    made = Foreign(tmp_path / "data", clock)
    yield made
    made.service.close()


def did(step: int, executed: str) -> dict[str, Any]:
    return {"step": step, "executed": executed, "applied": executed == "proceed"}


class TestRefused:
    @pytest.mark.parametrize(
        "body",
        [
            {"step": 1, "outcome": did(5, "proceed")},
            {"step": 20_000_000, "outcome": did(0, "proceed")},
            {"step": 1, "outcome": did(0, "proceed"), "columns": {"layer_grad_norm": [1, 2, 3]}},
            {
                "step": 1,
                "outcome": did(0, "proceed"),
                "events": [{"kind": "restored", "step": 1, "target": -1}],
            },
        ],
    )
    def test_a_refused_step_settles_nothing(self, trainer: Foreign, body: dict[str, Any]) -> None:
        trainer.put()
        first = trainer.step(0)
        trainer.step(status=422, **body)
        assert trainer.step(0) == first
        trainer.step(1, outcome=did(0, "skip_step"))
        assert trainer.actions() == {0: "skip_step", 1: "proceed"}
        assert trainer.ask("GET")["ledger"]["counters"]["skipped"] == [["trainer", 1]]

    def test_a_step_that_is_over_is_refused_with_the_way_back(self, trainer: Foreign) -> None:
        trainer.put()
        for step in range(5):
            trainer.step(step)
        detail = trainer.step(2, status=422, outcome=did(1, "proceed"))["detail"]
        assert "must be the next step (5) or a later one, got 2" in detail
        assert 'PUT /v1/runs/j with {"first_step": 2}' in detail


class TestHoles:
    def test_it_goes_on_behind_steps_that_nobody_heard_of(self, trainer: Foreign) -> None:
        trainer.put()
        trainer.step(0)
        assert trainer.step(5, outcome=did(4, "proceed"))["decision"]["step"] == 5
        trainer.step(6, events=[{"kind": "snapshot_taken", "step": 6}])
        trainer.step(9, "nan", events=[{"kind": "snapshot_taken", "step": 9}])
        about = trainer.ask("GET")
        assert about["record"]["holes"] == 6
        assert about["missing_reports"] == [[1, 4], [7, 8]]
        assert [s["step"] for s in about["ledger"]["snapshots"]] == [6, 9]
        trainer.ask("POST", "/close", {})
        proved(trainer, 4)
        assert replay(trainer.place / "runs" / "j").missing == 6

    def test_a_hole_over_a_restart_of_the_sidecar_is_one_like_any_other(
        self, trainer: Foreign
    ) -> None:
        trainer.put()
        for step in range(30):
            trainer.step(step)
        trainer.again()
        trainer.step(40, outcome=did(39, "proceed"))
        assert trainer.ask("GET")["record"]["holes"] == 10
        assert trainer.ask("GET")["ledger"]["counters"]["steps"] == 30
        proved(trainer, 31)


class TestBeginningAnew:
    def test_a_checkpoint_behind_begins_an_incarnation_of_its_own(self, trainer: Foreign) -> None:
        trainer.put(layers=["a"])
        for step in range(20):
            trainer.step(step)
        assert trainer.put()["next_step"] == 20
        assert trainer.put(first_step=10, layers=["a"])["next_step"] == 10
        assert trainer.put(first_step=10, layers=["a"])["next_step"] == 10  # a lost reply
        for step in range(10, 25):
            trainer.step(step)
        trainer.ask("POST", "/close", {})
        found = trainer.ask("GET", "/series?name=loss")
        assert len(found["incarnations"]) == 2
        proved(trainer, 35)

    def test_the_step_that_it_named_counts(self, trainer: Foreign) -> None:
        trainer.put(first_step=10)
        assert "next step (10)" in trainer.step(9, status=422)["detail"]
        trainer.step(12)
        assert trainer.ask("GET")["record"]["holes"] == 2

    def test_after_its_end_it_takes_no_step_until_it_is_registered(self, trainer: Foreign) -> None:
        trainer.put()
        trainer.step(0)
        trainer.ask("POST", "/close", {})
        refused = trainer.step(1, status=409)
        assert refused["code"] == "over"
        assert "PUT /v1/runs/j" in refused["detail"]
        assert trainer.ask("POST", "/close", {"state": "halted"})["state"] == "finished"
        assert trainer.ask("GET")["record"]["frames"] == 1
        trainer.put()
        trainer.step(1)
        assert trainer.ask("GET")["state"] == "running"


class TestRecord:
    def test_it_can_be_replayed_from_its_first_step(self, trainer: Foreign) -> None:
        trainer.put()
        for step in range(40, 80):
            trainer.step(step, "nan" if step == 60 else 1.0)
        trainer.ask("POST", "/close", {})
        proved(trainer, 40)

    @pytest.mark.parametrize("end", ["finished", "lost"])
    def test_after_a_restart_it_reads_as_before(
        self, trainer: Foreign, clock: FakeClock, end: str
    ) -> None:
        trainer.put()
        for step in range(40):
            trainer.step(step, "nan" if step == 30 else 1.0)
        if end == "finished":
            trainer.ask("POST", "/close", {})
        else:
            clock.advance(10_000.0)
            trainer.service.runs.expire(clock.now)
        before = trainer.ask("GET")
        trainer.again()
        after = trainer.ask("GET")
        assert after["state"] == end
        assert after["skipped"] == before["skipped"] == 1
        assert after["ledger"]["counters"]["skipped"] == [["nonfinite_grad", 1]]
        if end == "finished":
            assert after["ledger"] == before["ledger"]
        assert after["decision"] == before["decision"]

    def test_a_restore_brings_its_statistics_over_a_restart_of_the_sidecar(
        self, trainer: Foreign
    ) -> None:
        trainer.put()
        for step in range(30):
            taken = [{"kind": "snapshot_taken", "step": 20}] if step == 20 else []
            trainer.step(step, events=taken)
        trainer.again()
        back = [{"kind": "restored", "step": 31, "target": 20}]
        trainer.step(30)
        trainer.step(31, events=back)
        trainer.step(32)
        state = trainer.service.runs.get("j").state
        trainer.again()
        trainer.step(32)
        again = trainer.service.runs.get("j").state
        assert state is not None
        assert again is not None
        assert codec.state_hash(again) == codec.state_hash(state)
        proved(trainer, 33)


class TestLayers:
    def test_a_run_that_goes_on_keeps_its_layers(self, trainer: Foreign) -> None:
        trainer.put(layers=["a", "b"])
        trainer.put(layers=["a", "c"])  # nothing was measured yet
        trainer.step(0, columns={"layer_grad_norm": [1, 2]})
        trainer.put(layers=["a", "c"])
        trainer.put()
        refused = trainer.put(409, layers=["a", "d"])
        assert refused["code"] == "conflict"
        assert "layers[1] is 'd' instead of 'c'" in refused["detail"]
        assert "first_step" in refused["detail"]
        assert "1 layers instead of 2" in trainer.put(409, layers=["a"])["detail"]
        trainer.step(1, columns={"layer_grad_norm": [1, 2]})

    def test_the_map_shows_the_newest_table_alone(self, trainer: Foreign) -> None:
        trainer.put(layers=["a", "b"])
        trainer.step(0, columns={"layer_grad_norm": [1, 2]})
        trainer.step(1, columns={"layer_grad_norm": [1, 2]})
        trainer.put(layers=["b", "a"], first_step=1)
        trainer.step(1, columns={"layer_grad_norm": [5, 6]})
        found = trainer.ask("GET", "/layers?name=layer_grad_norm")
        assert found["layers"] == ["b", "a"]
        assert (found["steps"], found["values"]) == ([1], [[5.0], [6.0]])


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ({"kind": "scale_lr"}, "command.value must be given for scale_lr"),
        ({"kind": "pause", "value": 3}, "command.value is for scale_lr alone"),
        ({"kind": "pause", "target": 5}, "command.target is for rollback and ack alone"),
        ({"kind": "pause", "id": ""}, "command.id must not be empty"),
    ],
)
def test_an_order_with_what_does_not_belong_to_it_is_refused(
    trainer: Foreign, order: dict[str, Any], said: str
) -> None:
    trainer.put()
    trainer.step(0)
    refused = trainer.ask("POST", "/commands", order, 422)
    assert refused["code"] == "malformed"
    assert said in refused["detail"]
    assert trainer.ask("GET")["orders"] == []

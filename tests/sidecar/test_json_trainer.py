"""A trainer in another language: it is never locked out, and its record says what was done."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sentinel.core.types import Action, Command, CommandKind, Outcome
from sentinel.sidecar.embedded import executed
from sentinel.sidecar.runs.orders import MAX_COMMANDS
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


class TestRollbacks:
    @pytest.mark.parametrize(
        ("end", "told", "state"),
        [
            ({"kind": "restored", "target": 20}, ("rollback", 20), "taken"),
            ({"kind": "restored", "target": 0}, ("rollback", 0), "taken"),
            (
                {"kind": "restore_failed", "target": 20, "reason": "torn"},
                ("rollback_failed", None),
                "failed",
            ),
        ],
    )
    def test_each_is_told_as_what_was_done_over_a_restart_too(
        self, trainer: Foreign, end: dict[str, Any], told: tuple[str, Any], state: str
    ) -> None:
        def done() -> list[tuple[str, Any]]:
            listed = trainer.ask("GET", "/decisions")["decisions"]
            return [(row["action"], row["target"]) for row in listed]

        trainer.put()
        for step in range(60):
            events = [{"kind": "snapshot_taken", "step": step}] if step in (0, 20) else []
            trainer.step(step, events=events)
        order = {"kind": "rollback", "id": "o"}
        trainer.ask("POST", "/commands", order, 202)
        trainer.step(60)
        assert done() == [("rollback", 20)]
        trainer.again()
        assert trainer.ask("POST", "/commands", order, 202)["state"] == "restoring"
        trainer.step(61, events=[end | {"step": 61}])
        assert done() == [told]
        said = trainer.ask("POST", "/commands", order, 202)
        assert (said["state"], said["taken_step"]) == (state, 60)
        reason = trainer.ask("GET", "/decisions")["decisions"][0]["reason"]
        trainer.again()
        assert done() == [told]
        assert trainer.ask("GET", "/decisions")["decisions"][0]["reason"] == reason
        assert trainer.ask("POST", "/commands", order, 202)["result"] == said["result"]
        trainer.ask("POST", "/close", {})
        (seen,) = executed(trainer.place / "runs" / "j", "j", 10)
        assert (seen["action"], seen["target"], seen["reason"]) == (*told, reason)

    def test_one_that_never_ended_has_failed_when_the_run_has_ended(self, trainer: Foreign) -> None:
        trainer.put()
        trainer.step(0, events=[{"kind": "snapshot_taken", "step": 0}])
        for step in range(1, 20):
            trainer.step(step)
        order = {"kind": "rollback", "id": "o"}
        trainer.ask("POST", "/commands", order, 202)
        trainer.step(20)
        trainer.ask("POST", "/close", {})
        said = trainer.ask("POST", "/commands", order, 202)
        assert (said["state"], said["result"]) == (
            "failed",
            "its process ended before a snapshot was restored",
        )

    def test_an_order_that_the_trainer_did_not_carry_out_has_failed(self, trainer: Foreign) -> None:
        trainer.put()
        trainer.step(0)
        trainer.ask("POST", "/commands", {"kind": "skip_next", "id": "o"}, 202)
        trainer.step(1)
        trainer.step(2, outcome=did(1, "proceed"))
        said = trainer.ask("POST", "/commands", {"kind": "skip_next", "id": "o"}, 202)
        assert said["state"] == "failed"
        assert said["result"] == "it was decided, and the trainer did otherwise: proceed"


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

    @pytest.mark.parametrize("path", ["/series?points=0", "/layers?points=0"])
    def test_no_points_at_all_are_refused_like_too_many(self, trainer: Foreign, path: str) -> None:
        trainer.put(layers=["a"])
        trainer.step(0, columns={"layer_grad_norm": [1]})
        for points in ("0", "99999"):
            refused = trainer.ask("GET", path.replace("0", points), status=422)
            assert (
                f"points must lie between 1 and 20{'000' if 'series' in path else '00'}"
                in (refused["detail"])
            )

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


class TestWhatWasDone:
    """A trainer tells of the step before: the record holds it, and a restart forgets nothing."""

    def dropping(self, trainer: Foreign, *, again: tuple[int, ...] = ()) -> None:
        trainer.put()
        for step in range(60):
            if step in again:
                trainer.again()
            beside: dict[str, Any] = {}
            if step % 10 == 5:  # a loss scaler left the step before out
                told = {"step": step - 1, "executed": "proceed", "applied": False}
                beside["outcome"] = told
            trainer.step(step, "nan" if step == 40 else 1.0 + 0.01 * (step % 3), **beside)

    def test_steps_that_a_scaler_left_out_are_in_the_record(self, trainer: Foreign) -> None:
        self.dropping(trainer)
        assert trainer.ask("GET")["ledger"]["counters"]["lost_steps"] == 7  # and a skip
        trainer.ask("POST", "/close", {})
        proved(trainer, 60)

    @pytest.mark.parametrize("at", [50, 55, 56])
    def test_and_are_still_known_after_a_restart(
        self, trainer: Foreign, tmp_path: Path, clock: FakeClock, at: int
    ) -> None:
        other = Foreign(tmp_path / "never restarted", clock)
        self.dropping(trainer, again=(at,))
        self.dropping(other)
        state, same = (t.service.runs.get("j").state for t in (trainer, other))
        other.service.close()
        assert state is not None
        assert same is not None
        assert codec.state_hash(state) == codec.state_hash(same)
        trainer.ask("POST", "/close", {})
        proved(trainer, 60)

    def test_what_was_done_instead_is_shown_when_it_is_told_after_a_restart(
        self, trainer: Foreign
    ) -> None:
        trainer.put()
        for step in range(40):
            trainer.step(step, "nan" if step == 39 else 1.0)
        assert trainer.actions()[39] == "skip_step"
        trainer.again()
        trainer.step(40, outcome=did(39, "proceed"))
        assert trainer.actions()[39] == "proceed"
        assert trainer.ask("GET", "/decisions")["decisions"] == []

    def test_the_same_told_twice_and_taken_back_is_as_it_was_told_last(
        self, trainer: Foreign
    ) -> None:
        trainer.put()
        trainer.step(0)
        record = trainer.service.runs.get("j").kept.record
        assert record is not None
        left_out, done = Outcome(0, Action.PROCEED, False), Outcome(0, Action.PROCEED, True)
        assert [record.outcome(o) for o in (done, left_out, left_out, done)] == [
            False,
            True,
            False,
            True,
        ]

    @pytest.mark.parametrize("end", ["running", "finished"])
    def test_who_decided_is_the_same_after_a_restart(self, trainer: Foreign, end: str) -> None:
        def told() -> Any:
            rows = trainer.ask("GET", "/decisions")["decisions"]
            lines = trainer.sidecar.client.get("/metrics").text.splitlines()
            total = [line for line in lines if line.startswith("sentinel_decisions_total{")]
            return [(row["step"], row["source"]) for row in rows], total

        trainer.put()
        for step in range(40):
            trainer.step(step, "nan" if step == 30 else 1.0)
        if end == "finished":
            trainer.ask("POST", "/close", {})
        before = told()
        assert before[0] == [(30, "sidecar")]
        assert len(before[1]) == 1
        trainer.again()
        if end == "running":
            assert trainer.put()["next_step"] == 40
        trainer.ask("GET")
        assert told() == before


class TestOrderIds:
    """The same id is the same order, whatever has happened in between."""

    def order(self, trainer: Foreign, key: str = "s", status: int = 202, **beside: Any) -> Any:
        return trainer.ask("POST", "/commands", {"kind": "skip_next", "id": key, **beside}, status)

    def obeyed(self, trainer: Foreign) -> None:
        trainer.put()
        trainer.step(0)
        self.order(trainer)
        assert trainer.step(1)["decision"]["action"] == "skip_step"
        assert self.order(trainer)["taken_step"] == 1

    def test_after_a_restart_it_is_what_it_was(self, trainer: Foreign) -> None:
        self.obeyed(trainer)
        before = trainer.ask("GET")["orders"]
        trainer.again()
        assert trainer.ask("GET")["orders"] == before
        got = self.order(trainer)
        assert (got["state"], got["taken_step"]) == ("taken", 1)
        assert self.order(trainer, status=409, kind="pause")["code"] == "conflict"
        assert trainer.step(2)["decision"]["action"] == "proceed"
        assert trainer.ask("GET")["orders"] == before

    @pytest.mark.parametrize("restart", [False, True])
    def test_when_the_run_begins_anew_it_does_not_act_again(
        self, trainer: Foreign, restart: bool
    ) -> None:
        self.obeyed(trainer)
        trainer.put(first_step=100)
        trainer.step(100)
        if restart:
            trainer.again()
        assert self.order(trainer)["taken_step"] == 1
        assert trainer.step(101)["decision"]["action"] == "proceed"

    def test_one_that_is_not_in_memory_any_more_is_known_from_the_database(
        self, trainer: Foreign, clock: FakeClock
    ) -> None:
        self.obeyed(trainer)
        known = trainer.service.runs.get("j")
        for at in range(MAX_COMMANDS):
            made = known.orders.take(Command(f"k{at}", CommandKind.RESUME), 60.0, clock.now + 1.0)
            known.orders.known([made.command.id])
        assert known.orders.get("s") is None
        assert self.order(trainer)["taken_step"] == 1
        trainer.again()
        known = trainer.service.runs.get("j")
        assert len(known.orders) == MAX_COMMANDS
        assert known.orders.get("s") is None
        assert self.order(trainer)["taken_step"] == 1

    def test_one_that_nobody_obeyed_is_still_told_and_one_that_expired_is_not(
        self, trainer: Foreign, clock: FakeClock
    ) -> None:
        trainer.put()
        trainer.step(0)
        self.order(trainer, "gone", expires_in_s=1)
        clock.advance(5.0)
        trainer.service.runs.expire(clock.now)
        self.order(trainer, "open")
        trainer.again()
        assert [o["state"] for o in trainer.ask("GET")["orders"]] == ["expired", "pending"]
        assert self.order(trainer, "gone")["state"] == "expired"
        assert trainer.step(1)["decision"]["action"] == "skip_step"
        lines = trainer.sidecar.client.get("/v1/audit").json()["audit"]
        (line,) = [line for line in lines if line["outcome"] == "expired"]
        assert line["detail"] == {"id": "gone", "kind": "skip_next"}

    def test_two_ids_that_differ_are_refused(self, trainer: Foreign) -> None:
        trainer.put()
        trainer.step(0)
        body = {"kind": "skip_next", "id": "a"}
        client, headers = trainer.sidecar.client, {"idempotency-key": "b"}
        got = client.post("/v1/runs/j/commands", json=body, headers=headers)
        assert got.status_code == 422
        assert "must be the same where both are given, got 'a' and 'b'" in got.text
        headers = {"idempotency-key": "a"}
        assert client.post("/v1/runs/j/commands", json=body, headers=headers).status_code == 202


class TestIncidentsOfABeginningAnew:
    """Nobody looks after an incident of an engine that is gone: it is over, and says so."""

    def troubled(self, trainer: Foreign, steps: range) -> None:
        for step in steps:
            trainer.step(step, "nan" if step >= steps.stop - 3 else 1.0)

    def listed(self, trainer: Foreign) -> list[tuple[int, int, str]]:
        found = trainer.ask("GET", "/incidents")["incidents"]
        return [
            (i["number"], i["opened"], "over" if i["state"] == "resolved" else "open")
            for i in reversed(found)
        ]

    @pytest.mark.parametrize("restart", ["never", "before", "after"])
    def test_what_was_open_is_closed_with_the_reason_and_numbers_go_on(
        self, trainer: Foreign, restart: str
    ) -> None:
        trainer.put()
        self.troubled(trainer, range(60))
        ((first, _, state),) = self.listed(trainer)
        assert (first, state) == (1, "open")
        if restart == "before":
            trainer.again()
        trainer.put(first_step=40)
        assert self.listed(trainer) == [(1, 57, "over")]
        (found,) = trainer.ask("GET", "/incidents")["incidents"]
        assert found["summary"].endswith("(closed: the run was begun anew)")
        assert found["resolved"] == 58  # what was done at 59 nobody said
        if restart == "after":
            trainer.again()
        self.troubled(trainer, range(40, 60))
        assert self.listed(trainer) == [(1, 57, "over"), (2, 57, "open")]
        assert trainer.ask("GET")["open_incidents"] == 1
        got = trainer.sidecar.client.post("/v1/incidents/j:1/ack", json={"by": "ann"})
        assert got.json()["detail"] == "noted; it was over already"
        by = [i["acknowledged_by"] for i in trainer.ask("GET", "/incidents")["incidents"]]
        assert by == ["", "ann"]
        trainer.ask("POST", "/close", {})
        proved(trainer, 80)

    def test_after_its_end_too(self, trainer: Foreign) -> None:
        trainer.put()
        self.troubled(trainer, range(60))
        trainer.ask("POST", "/close", {})
        assert [i[2] for i in self.listed(trainer)] == ["open"]  # as it was at the end
        assert trainer.ask("GET")["open_incidents"] == 1
        trainer.put()
        assert [i[2] for i in self.listed(trainer)] == ["over"]

    def test_those_that_an_earlier_version_left_open_are_closed_with_the_next_step(
        self, trainer: Foreign
    ) -> None:
        trainer.put()
        self.troubled(trainer, range(60))
        stray = replace(trainer.service.runs.get("j").saved_incidents[0], opened=3)
        trainer.service.store.save_incidents("j", [stray], 0.0)
        assert [i[2] for i in self.listed(trainer)] == ["open", "open"]
        trainer.again()
        trainer.step(60)
        found = {i["opened"]: i for i in trainer.ask("GET", "/incidents")["incidents"]}
        assert (found[57]["state"], found[3]["state"]) == ("pending", "resolved")
        assert "does not know of it" in found[3]["summary"]

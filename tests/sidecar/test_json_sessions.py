"""Two trainers that post JSON under one name: one that asks to be alone is, and none is mixed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import FakeClock
from tests.support.foreign import Foreign, proved
from tests.support.reports import Reporter
from tests.support.simulated import SimulatedTrainer


@pytest.fixture
def trainer(tmp_path: Path, clock: FakeClock) -> Iterator[Foreign]:
    made = Foreign(tmp_path / "data", clock)
    yield made
    made.service.close()


def second_writers(trainer: Foreign) -> list[str]:
    found: list[str] = trainer.ask("GET")["second_writers_refused"]
    return found


class TestAlone:
    @pytest.mark.parametrize(
        "body", [{}, {"exclusive": True}, {"first_step": 0}, {"first_step": 9, "exclusive": True}]
    )
    @pytest.mark.parametrize("steps", [0, 3])
    def test_a_second_registration_is_refused_with_the_ways_out(
        self, trainer: Foreign, clock: FakeClock, body: dict[str, Any], steps: int
    ) -> None:
        session = trainer.alone()
        for step in range(steps):
            trainer.step(step)
        clock.advance(2.5)
        refused = trainer.beside().put(409, **body)
        assert refused["code"] == "fenced"
        assert "written by another live trainer, last heard 2.5 s ago" in refused["detail"]
        assert "another name" in refused["detail"]
        assert "silent for 60 s" in refused["detail"]
        assert '{"exclusive": true, "take_over": true}' in refused["detail"]
        assert session not in refused["detail"]
        assert second_writers(trainer) == ["json"]
        trainer.step(steps)

    def test_steps_without_its_session_change_nothing(self, trainer: Foreign) -> None:
        trainer.alone()
        other, third = trainer.beside(), trainer.beside()
        third.carried = "f" * 32
        for step in range(30):
            trainer.step(step)
            for stranger in (other, third):
                for wrong in (step, step + 1, 0):
                    refused = stranger.step(wrong, loss=9.0, status=409)
                    assert refused["code"] == "fenced"
        assert "sentinel-session" in other.step(30, status=409)["detail"]
        assert "whose place was taken" in third.step(30, status=409)["detail"]
        about = trainer.ask("GET")
        assert (about["record"]["frames"], about["record"]["holes"]) == (30, 0)
        assert about["exclusive"]
        assert about["second_writers_refused"] == ["json", "f" * 32]  # each once
        losses = trainer.ask("GET", "/series?name=loss")["series"]["loss"]["value"]
        assert losses == [2.0 + 0.001 * (step % 7) for step in range(30)]
        proved(trainer, 30)

    def test_nobody_else_ends_it(self, trainer: Foreign) -> None:
        trainer.alone()
        trainer.step(0)
        assert trainer.beside().ask("POST", "/close", {}, 409)["code"] == "fenced"
        assert trainer.ask("GET")["state"] == "running"
        assert trainer.ask("POST", "/close", {})["state"] == "finished"

    def test_strangers_are_no_sign_of_its_life(self, trainer: Foreign, clock: FakeClock) -> None:
        trainer.alone()
        trainer.step(0)
        for _ in range(5):
            clock.advance(15.0)
            trainer.beside().step(1, status=409)
        trainer.service.runs.expire(clock.now)
        assert trainer.ask("GET")["state"] == "lost"

    def test_started_again_with_its_session_it_goes_on_at_once(self, trainer: Foreign) -> None:
        trainer.alone()
        for step in range(5):
            trainer.step(step)
        again = trainer.beside()
        again.carried = trainer.carried
        answer = again.put()
        assert (answer["session"], answer["next_step"]) == (trainer.carried, 5)
        again.step(5)
        assert again.put(first_step=3)["session"] == trainer.carried  # from a checkpoint
        again.step(3)
        assert trainer.beside().step(4, status=409)["code"] == "fenced"
        assert len(trainer.ask("GET", "/series?name=loss")["incarnations"]) == 2

    def test_a_lost_one_is_followed_by_whoever_comes_and_does_not_come_between(
        self, trainer: Foreign, clock: FakeClock
    ) -> None:
        first = trainer.alone()
        for step in range(5):
            trainer.step(step)
        clock.advance(61.0)
        follower = trainer.beside()
        assert follower.alone() != first
        follower.step(5)
        assert "whose place was taken" in trainer.step(5, status=409)["detail"]
        follower.step(6)
        proved(trainer, 7)

    def test_a_lost_one_that_nobody_followed_goes_on(
        self, trainer: Foreign, clock: FakeClock
    ) -> None:
        trainer.alone()
        trainer.step(0)
        clock.advance(10_000.0)
        trainer.service.runs.expire(clock.now)
        trainer.step(1)
        assert trainer.ask("GET")["state"] == "running"

    def test_who_knows_that_it_is_gone_takes_over(self, trainer: Foreign) -> None:
        trainer.alone()
        trainer.step(0)
        other = trainer.beside()
        assert other.alone(take_over=True, first_step=0) != trainer.carried
        assert trainer.step(1, status=409)["code"] == "fenced"
        other.step(0)
        other.put(take_over=True)  # by the one that writes it: nothing to take
        other.step(1)
        shared = trainer.beside()
        assert shared.put(take_over=True)["session"] is None
        shared.step(2)
        assert "without a session" in other.step(3, status=409)["detail"]

    def test_a_restart_of_the_sidecar_changes_nothing(self, trainer: Foreign) -> None:
        trainer.alone()
        for step in range(3):
            trainer.step(step)
        trainer.again()
        other = trainer.beside()
        assert other.put(409, exclusive=True)["code"] == "fenced"
        assert other.step(3, status=409)["code"] == "fenced"
        trainer.step(3)
        assert trainer.put()["session"] == trainer.carried
        trainer.again()
        trainer.step(4)
        assert second_writers(trainer) == ["json", "json"]
        proved(trainer, 5)

    def test_what_was_taken_over_stays_so_over_a_restart(self, trainer: Foreign) -> None:
        trainer.alone()
        trainer.step(0)
        other = trainer.beside()
        other.alone(take_over=True)
        trainer.again()
        assert trainer.step(1, status=409)["code"] == "fenced"
        other.step(1)

    def test_after_its_end_the_name_is_free(self, trainer: Foreign) -> None:
        trainer.alone()
        trainer.step(0)
        trainer.ask("POST", "/close", {})
        other = trainer.beside()
        assert other.put()["session"] is None
        other.step(0)
        assert "without a session" in trainer.step(1, status=409)["detail"]

    def test_a_shared_run_is_not_taken_from_those_who_write_it(
        self, trainer: Foreign, clock: FakeClock
    ) -> None:
        trainer.put()
        other = trainer.beside()
        other.put()
        trainer.step(0)
        refused = other.put(409, exclusive=True)
        assert refused["code"] == "fenced"
        assert "a live trainer without a session" in refused["detail"]
        other.put()
        trainer.step(1)
        clock.advance(61.0)
        other.alone()
        other.step(2)

    def test_a_shared_run_without_a_step_is_nobodys(self, trainer: Foreign) -> None:
        trainer.put()
        other = trainer.beside()
        other.alone()
        other.step(0)
        assert trainer.step(0, status=409)["code"] == "fenced"

    def test_a_trainer_of_ours_is_not_taken_over(self, trainer: Foreign) -> None:
        ours = Reporter(trainer.service, SimulatedTrainer(seed=1, layers=1), run="j")
        ours.register()
        refused = trainer.put(409, exclusive=True, take_over=True)
        assert refused["code"] == "fenced"
        ours.steps(1)


class TestShared:
    def test_somebody_with_curl_needs_no_session(self, trainer: Foreign) -> None:
        for _ in range(2):
            assert trainer.put()["session"] is None
        trainer.step(0)
        assert trainer.put()["next_step"] == 1
        trainer.put()
        trainer.step(1)
        assert second_writers(trainer) == []
        assert not trainer.ask("GET")["exclusive"]

    @pytest.mark.parametrize(
        "other",
        [{"loss": 3.0}, {"norm": 1.5}, {"norm": "nan"}, {"columns": {"layer_grad_norm": [1, 3]}}],
    )
    @pytest.mark.parametrize("restart", [False, True])
    def test_a_step_that_is_told_otherwise_is_a_conflict(
        self, trainer: Foreign, other: dict[str, Any], restart: bool
    ) -> None:
        trainer.put(layers=["a", "b"])
        told: dict[str, Any] = {"loss": 2.0, "columns": {"layer_grad_norm": [1, 2]}}
        first = trainer.step(0, **told)
        if restart:
            trainer.again()
        refused = trainer.beside().step(0, status=409, **(told | other))
        assert refused["code"] == "conflict"
        assert "step 0" in refused["detail"]
        assert "another name" in refused["detail"]
        trainer.beside().step(0, status=409, **(told | other))
        assert second_writers(trainer) == ["json"]
        assert trainer.step(0, **told)["decision"] == first["decision"]
        trainer.step(1, **told)
        assert trainer.ask("GET")["record"]["frames"] == 2

    @pytest.mark.parametrize("restart", [False, True])
    def test_the_same_step_is_the_same_with_what_is_no_number_in_it(
        self, trainer: Foreign, restart: bool
    ) -> None:
        trainer.put(layers=["a", "b"])
        told: dict[str, Any] = {
            "norm": "inf",
            "loss": "nan",
            "columns": {"layer_update_ratio": [0.1, "inf"], "layer_grad_norm": ["nan", None]},
        }
        first = trainer.step(0, **told)
        if restart:
            trainer.again()
        assert trainer.step(0, **told)["decision"] == first["decision"]

    def test_an_order_that_came_with_a_step_does_not_make_it_another_one(
        self, trainer: Foreign
    ) -> None:
        trainer.put()
        trainer.ask("POST", "/commands", {"kind": "skip_next"}, 202)
        first = trainer.step(0)
        assert first["decision"]["action"] == "skip_step"
        assert trainer.step(0) == first
        assert second_writers(trainer) == []

    def test_one_that_is_behind_is_refused(self, trainer: Foreign) -> None:
        trainer.put()
        for step in range(5):
            trainer.step(step)
        late = trainer.beside()
        for step in range(4):
            assert late.step(step, status=422)["code"] == "malformed"
        assert trainer.ask("GET")["record"]["frames"] == 5


def test_its_own_slip_is_no_second_writer(trainer: Foreign) -> None:
    trainer.alone()
    trainer.step(0)
    assert trainer.step(0, loss=3.0, status=409)["code"] == "conflict"
    assert second_writers(trainer) == []


def test_a_slip_in_the_registration_is_refused(trainer: Foreign) -> None:
    assert trainer.put(422, exclusiv=True)["code"] == "malformed"
    assert trainer.put(422, exclusive="yes")["code"] == "malformed"

"""What is due at the safe point, with a saving of the test's own that notes what it is asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sentinel.core import engine
from sentinel.core.policy import Policy
from sentinel.core.state import State
from sentinel.core.types import Action, Decision, Observation
from sentinel_hooks.guard import Guard
from sentinel_hooks.parts.between import Between

pytestmark = pytest.mark.torch

POLICY = Policy()


class Saving:
    """Notes what it is asked; what is in `fails` raises, once."""

    def __init__(self) -> None:
        self.resume_due = self.first_due = False
        self.asked: list[str] = []
        self.fails: set[str] = set()

    def _note(self, what: str) -> None:
        self.asked.append(what)
        if what in self.fails:
            self.fails.discard(what)
            raise OSError(what)

    def poll(self) -> None:
        self._note("poll")

    def take(self) -> None:
        self._note("take")

    def take_first(self) -> None:
        self._note("first")
        self.first_due = False

    def resume(self) -> None:
        self._note("resume")
        self.resume_due = False

    def restore(self, decision: Decision) -> None:
        self._note("restore")

    def restore_deferred(self, target: int, rule: str) -> None:
        self._note(f"restore {target} {rule}")


class Pause:
    due = False
    looked = 0

    def look(self) -> None:
        self.looked += 1


class Council:
    """A seat that nothing is heard at."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def compare(self, digest: Callable[[], bytes]) -> None:
        pass


def make(rank: int | None = None) -> tuple[Between, Saving, Pause]:
    saving: Any = Saving()
    pause: Any = Pause()
    council: Any = None if rank is None else Council(rank)
    target: Any = SimpleNamespace(models=(), optimizers=())
    return Between(target, saving, pause, Guard("r7"), council), saving, pause


def decision(**values: Any) -> Decision:
    plain = engine.decide(State(), Observation(0, loss=1.0, grad_norm=1.0), POLICY)
    return dataclasses.replace(plain, **values)


def test_a_snapshot_is_taken_once_after_a_step_that_was_applied() -> None:
    between, saving, _ = make()
    between.settled(decision(take_snapshot=True), Action.PROCEED, True)
    between.work(False)
    between.work(False)
    assert saving.asked == ["poll", "take", "poll"]
    between.settled(decision(take_snapshot=True), Action.SKIP_STEP, False)
    between.work(False)
    assert saving.asked[3:] == ["poll"]


def test_a_snapshot_waits_while_a_step_is_unheard_and_so_does_the_pause() -> None:
    between, saving, pause = make()
    pause.due = True
    between.settled(decision(take_snapshot=True), Action.PROCEED, True)
    between.work(True)
    assert (saving.asked, pause.looked) == (["poll"], 0)
    between.work(False)
    assert (saving.asked, pause.looked) == (["poll", "poll", "take"], 1)


def test_a_rollback_comes_before_a_snapshot_and_the_first_snapshot_before_both() -> None:
    between, saving, _ = make()
    saving.first_due = True
    rollback = decision(take_snapshot=True, action=Action.ROLLBACK)
    between.settled(rollback, Action.ROLLBACK, True)
    for _ in range(4):
        between.work(False)
    assert [w for w in saving.asked if w != "poll"] == ["first", "restore", "take"]


def test_alone_a_rollback_that_failed_is_not_begun_again_and_together_it_is() -> None:
    for rank, times in ((None, 1), (0, 2), (1, 2)):
        between, saving, _ = make(rank)
        saving.fails = {"restore"}
        between.settled(decision(), Action.ROLLBACK, False)
        assert between.going_back
        with pytest.raises(OSError, match="restore"):
            between.work(False)
        between.work(False)
        assert saving.asked.count("restore") == times
        assert not between.going_back


def test_a_rollback_of_the_processes_before_is_done_once() -> None:
    between, saving, _ = make(1)
    between.put_off((16, "spike"))
    between.work(False)
    between.work(False)
    assert saving.asked == ["poll", "restore 16 spike", "poll"]


def test_weights_are_recognised_where_the_ledger_is() -> None:
    for rank, asked in ((None, ["resume"]), (0, ["resume"]), (1, [])):
        between, saving, _ = make(rank)
        saving.resume_due = True
        between.work(False)
        assert [w for w in saving.asked if w != "poll"] == asked

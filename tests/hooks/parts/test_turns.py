"""Which optimizers have stepped in a logical step, and which forwards were seen."""

from __future__ import annotations

import pytest

from sentinel_hooks.parts.turns import DORMANT, Turns

pytestmark = pytest.mark.torch  # of the hooks' package; nothing here needs it


def step(turns: Turns, *members: int, forwards: int = 1) -> list[bool]:
    """A logical step in which these optimizers step; whether each of their gates began it."""
    turns.forwards += forwards
    began = []
    for me in members:
        began.append(turns.gate(me))
        if began[-1]:
            turns.begin()
        turns.stepped(me)
    return began


def test_the_first_gate_begins_a_logical_step_and_the_others_follow_it() -> None:
    turns = Turns(3)
    assert step(turns, 2, 0) == [True, False]
    assert not turns.all_stepped()
    assert step(turns, 1) == [False]
    assert turns.all_stepped()
    assert turns.steps == 1


def test_an_optimizer_that_steps_again_begins_the_next_whoever_is_missing() -> None:
    turns = Turns(2)
    assert step(turns, 0) == [True]
    assert step(turns, 0) == [True]
    assert turns.steps == 2
    assert not turns.all_stepped()


def test_one_that_has_not_stepped_for_long_is_not_waited_for_and_takes_no_part() -> None:
    turns = Turns(2)
    both = 0b11
    for _ in range(DORMANT):
        step(turns, 0)
        assert not turns.all_stepped()
        assert turns.taking_part(both, 0) == [0, 1]
    step(turns, 0)
    assert turns.all_stepped()
    assert turns.taking_part(both, 0) == [0]
    assert turns.taking_part(both, 1) == [0, 1], "at its own gate it does"


def test_only_those_with_new_gradients_take_part() -> None:
    assert Turns(3).taking_part(0b100, 1) == [1, 2]
    assert Turns(1).taking_part(0, 0) == [0]


@pytest.mark.parametrize("me", [0, 1])
def test_going_back_to_a_mark_undoes_a_gate(me: int) -> None:
    turns, other = Turns(2), Turns(2)
    for each in (turns, other):
        step(each, 0, 1)
        step(each, 0)
        each.forwards += 3
    mark = turns.mark()
    step(turns, me)
    assert turns.back_to(mark, me) is (me == 0)
    for each in (turns, other):
        each.forwards += 1
        assert each.gate(me) is (me == 0)
    assert turns.mark() == other.mark()


def test_forwards_without_a_step_are_counted_and_too_many_of_them_are_none_of_training() -> None:
    turns = Turns(1)
    turns.forwards = 1000
    assert not turns.forsaken, "before the first step there is no usual number"
    turns.forwards = 0
    for _ in range(3):
        step(turns, 0, forwards=2)
    assert turns.forwards == 0
    turns.forwards = 4 * 2 + 16
    assert not turns.forsaken
    turns.forwards += 1
    assert turns.forsaken


def test_steps_without_a_forward_are_counted_until_one_is_seen() -> None:
    turns = Turns(1)
    step(turns, 0, forwards=0)
    step(turns, 0, forwards=0)
    assert turns.unseen == 2
    step(turns, 0)
    assert turns.unseen == 0


def test_gates_are_counted_between_two_updates_of_the_scaler() -> None:
    turns = Turns(2)
    step(turns, 0, 1)
    assert turns.updated() == 2
    assert turns.updated() == 0
    turns.all_left_out()
    assert turns.all_stepped()

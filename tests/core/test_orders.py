"""Several orders in one step: each is carried out, waits for its own step, or is told why not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sentinel.core import engine, orders
from sentinel.core.orders import Fate
from sentinel.core.policy import Policy
from sentinel.core.state import Ledger, Snapshot, State
from sentinel.core.types import Action, Command, CommandKind, Observation

POLICY = Policy.load("default")
SNAPSHOTS = (Snapshot(0, healthy=True), Snapshot(100, healthy=True), Snapshot(200, healthy=True))
SKIP = Command("s", CommandKind.SKIP_NEXT)
HALT = Command("h", CommandKind.HALT)
PAUSE = Command("p", CommandKind.PAUSE)
RESUME = Command("r", CommandKind.RESUME)
BACK = Command("b", CommandKind.ROLLBACK)


def to(step: int) -> Command:
    return Command("t", CommandKind.ROLLBACK, target=step)


def lr(value: float, key: str) -> Command:
    return Command(key, CommandKind.SCALE_LR, value)


def settled(*commands: Command) -> tuple[Action, list[tuple[str, Fate]], dict[str, str]]:
    """The engine's action, and what each order is told, its id and its fate."""
    state = State(step=300, ledger=Ledger(snapshots=SNAPSHOTS))
    observation = Observation(300, 2.0, 1.0, commands=commands)
    decision = engine.decide(state, observation, POLICY)
    fates = orders.settle(observation, decision)
    return decision.action, [(i, f) for i, f, _ in fates], {i: why for i, _, why in fates}


@pytest.mark.parametrize(
    ("given", "action", "fates"),
    [
        ((SKIP,), Action.SKIP_STEP, [Fate.DONE]),
        ((PAUSE,), Action.PROCEED, [Fate.DONE]),
        ((BACK, HALT), Action.HALT, [Fate.SUPERSEDED, Fate.DONE]),
        ((HALT, BACK), Action.HALT, [Fate.DONE, Fate.SUPERSEDED]),
        ((SKIP, HALT), Action.HALT, [Fate.SUPERSEDED, Fate.DONE]),
        ((SKIP, BACK), Action.ROLLBACK, [Fate.DONE, Fate.RESTORING]),
        ((BACK, to(100)), Action.ROLLBACK, [Fate.SUPERSEDED, Fate.RESTORING]),
        ((to(100), BACK), Action.ROLLBACK, [Fate.SUPERSEDED, Fate.RESTORING]),
        ((to(200), BACK), Action.ROLLBACK, [Fate.RESTORING, Fate.RESTORING]),
        ((to(150),), Action.PROCEED, [Fate.FAILED]),
        ((BACK, to(150)), Action.ROLLBACK, [Fate.RESTORING, Fate.FAILED]),
        ((to(150), SKIP), Action.SKIP_STEP, [Fate.FAILED, Fate.DONE]),
        ((PAUSE, RESUME), Action.PROCEED, [Fate.SUPERSEDED, Fate.DONE]),
        ((lr(0.5, "a"), lr(0.1, "b")), Action.PROCEED, [Fate.SUPERSEDED, Fate.DONE]),
        ((SKIP, replace(SKIP, id="s2")), Action.SKIP_STEP, [Fate.DONE, Fate.SUPERSEDED]),
    ],
)
def test_each_order_is_told_what_the_engine_made_of_it(
    given: tuple[Command, ...], action: Action, fates: list[Fate]
) -> None:
    decided, found, why = settled(*given)
    assert decided is action
    assert found == list(zip([c.id for c in given], fates, strict=True))
    for key, fate in found:
        assert bool(why[key]) == (fate in (Fate.SUPERSEDED, Fate.FAILED))


def test_it_is_said_which_order_went_before_and_which_snapshot_is_gone() -> None:
    _, _, why = settled(BACK, replace(to(100), issued_by="ann"))
    assert why["b"] == "a later order for the same step by ann: rollback to step 100"
    assert settled(to(150))[2] == {"t": "there is no healthy snapshot of step 150 any more"}
    assert settled(BACK, HALT)[2]["b"] == "the run is halted at this step"


def test_two_orders_to_skip_are_for_two_steps() -> None:
    second, third = replace(SKIP, id="s2"), replace(SKIP, id="s3")
    now, later = orders.due((SKIP, second, PAUSE, third))
    assert (now, later) == ((SKIP, PAUSE), (second, third))
    assert orders.due(later) == ((second,), (third,))

"""What the ledger keeps and lets go, one promise at a time; each was once broken unseen."""

from __future__ import annotations

import dataclasses
import math

import pytest

from sentinel.core import engine
from sentinel.core.events import Restored, SnapshotTaken
from sentinel.core.policy import Policy
from sentinel.core.state import Snapshot, State
from sentinel.core.types import Action, CanaryAnswer, Verdict
from tests.core.test_engine import SMALL, WITHOUT_CANARY, Run


def with_ledger(run: Run, **values: object) -> State:
    ledger = dataclasses.replace(run.state.ledger, **values)  # type: ignore[arg-type]
    return dataclasses.replace(run.state, ledger=ledger)


def test_a_restore_forgets_the_snapshots_of_the_abandoned_way() -> None:
    run = Run()
    for _ in range(20):
        run.step()
    kept = tuple(Snapshot(step, healthy=True, applied=step) for step in (0, 5, 10))
    state = with_ledger(run, snapshots=kept, pending_rule="loss_spike", rollbacks=(19,))
    state = engine.note(state, Restored(20, 5, state.stats), run.policy)
    assert [s.step for s in state.ledger.snapshots] == [0, 5]


@pytest.mark.parametrize(("rollbacks", "factor"), [(1, 0.4), (2, 0.2), (3, 0.2)])
def test_the_rate_is_cut_further_each_time_but_never_below_the_floor(
    rollbacks: int, factor: float
) -> None:
    run = Run(WITHOUT_CANARY + "[lr]\ncut = 0.4\nfloor = 0.2\n")
    for _ in range(20):
        run.step()
    done = tuple(range(10, 10 + rollbacks))
    state = with_ledger(run, pending_rule="loss_spike", rollbacks=done)
    state = engine.note(state, Restored(20, 0, state.stats), run.policy)
    assert engine.lr_factor(state.ledger.lr) == pytest.approx(factor)


def test_only_what_training_starts_from_is_healthy_at_once() -> None:
    policy = Policy.parse(SMALL)
    state = engine.note(engine.initial(), SnapshotTaken(0), policy)
    assert [s.healthy for s in state.ledger.snapshots] == [True]
    run = Run()
    run.step()
    state = engine.note(run.state, SnapshotTaken(1), policy)
    assert [s.healthy for s in state.ledger.snapshots] == [True, False]


def test_a_candidate_is_healthy_after_exactly_so_many_quiet_steps() -> None:
    run = Run()
    while all(s.healthy for s in run.state.ledger.snapshots):
        run.step()
    seen = []
    for _ in range(run.policy.snapshots.confirm):
        seen.append(run.state.ledger.snapshots[-1].healthy)
        run.step()
    assert seen == [False] * run.policy.snapshots.confirm
    assert run.state.ledger.snapshots[-1].healthy


def test_no_snapshot_is_due_after_a_spike_step_that_was_let_through() -> None:
    run = Run(WITHOUT_CANARY + '[rules.loss_outlier]\nmode = "off"\n')
    for _ in range(19):
        assert run.step().take_snapshot == (run.state.step == 10)
    decision = run.step(loss=9.0)
    assert (decision.action, decision.take_snapshot) == (Action.PROCEED, False)
    taken = [run.step().take_snapshot for _ in range(3)]
    assert taken == [False, True, False]  # once two cool steps have ended it


def test_an_incident_that_fires_drops_the_candidates_whoever_is_to_blame() -> None:
    run = Run(SMALL)
    run.canary = lambda: CanaryAnswer(1, 2.0, 2.0)  # as it was: the data
    while all(s.healthy for s in run.state.ledger.snapshots):
        run.step()
    for _ in range(3):
        run.step(loss=9.0)
        assert not run.state.ledger.snapshots[-1].healthy  # pending: it may still be confirmed
    assert run.step(loss=9.0).action is Action.SKIP_STEP
    assert run.state.ledger.verdict is Verdict.DATA
    assert all(s.healthy for s in run.state.ledger.snapshots)


def test_the_norm_of_a_spike_step_that_was_let_through_is_no_baseline() -> None:
    run = Run(WITHOUT_CANARY + '[rules.loss_outlier]\nmode = "off"\n')
    for _ in range(20):
        run.step()
    before = run.state.stats.norm.norms
    assert run.step(loss=9.0, norm=3.0).action is Action.PROCEED
    assert run.state.stats.norm.norms == before
    run.step()
    run.step()
    assert 3.0 not in run.state.stats.norm.norms


def test_the_norm_that_a_switched_off_rule_would_skip_is_no_baseline() -> None:
    run = Run(WITHOUT_CANARY + '[rules.grad_norm]\nmode = "off"\n')
    for _ in range(20):
        run.step()
    assert run.step(norm=40.0).action is Action.PROCEED
    assert 40.0 not in run.state.stats.norm.norms


def test_observing_counts_as_if_it_had_been_done() -> None:
    run = Run('mode = "observe"\n' + WITHOUT_CANARY)
    for _ in range(20):
        run.step()
    at = run.state.step
    decision = run.step(norm=math.nan)
    assert (decision.action, decision.would) == (Action.PROCEED, Action.SKIP_STEP)
    ledger = run.state.ledger
    assert (ledger.skip_run, ledger.skips) == (1, (at,))
    assert ledger.incidents[-1].actions == ((at, "would_skip_step", "nonfinite_grad"),)
    assert ledger.counters.would == (("skip_step/nonfinite_grad", 1),)
    assert ledger.counters.skipped == ()


def test_three_losses_that_are_not_finite_but_not_in_a_row_are_only_skipped() -> None:
    run = Run()
    for _ in range(20):
        run.step()
    for _ in range(2):
        assert run.step(loss=math.nan).rule == "nonfinite_loss"
        assert run.step().action is Action.PROCEED
    assert run.step(loss=math.nan).action is Action.SKIP_STEP
    assert run.state.ledger.nonfinite_run == 1

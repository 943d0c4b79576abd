"""The engine: what is done with a troubled step, told as short stories.

A small policy keeps the stories short: warm-up after 8 steps, snapshots every 10, confirmed
after 4 quiet steps. `Run` plays the trainer: it carries out every decision at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from sentinel.core import engine, incidents
from sentinel.core.errors import StateError
from sentinel.core.events import AutomationSet, Restored, RestoreFailed, SnapshotTaken
from sentinel.core.policy import Policy
from sentinel.core.state import State
from sentinel.core.types import (
    LAYER_ATTENTION_MAX_LOGIT,
    Action,
    CanaryAnswer,
    Command,
    CommandKind,
    Decision,
    IncidentState,
    Observation,
    Outcome,
    Protection,
    Severity,
    Verdict,
)

SMALL = """
[spike]
window = 16
warmup = 8
[grad_norm]
window = 16
warmup = 8
[snapshots]
ram_every = 10
confirm = 4
older_by = 40
[skip]
in_a_row = 6
in_window = 12
window = 40
data = 5
[rollback]
quiet = 6
relapse = 60
[rules.loss_spike]
cooldown = 5
[rules.skip_bound]
cooldown = 5
[rules.nonfinite_loss]
cooldown = 5
[rules.norm_band]
mode = "off"
"""
WITHOUT_CANARY = SMALL + '[canary]\nmode = "off"\n'
NAN = math.nan
CalmOr = float | None


class Run:
    """A trainer that obeys: loss 2.0 with a little ripple, norm 1.0, unless told otherwise."""

    def __init__(self, toml: str = WITHOUT_CANARY, snapshots: bool = True) -> None:
        self.policy = Policy.parse(toml)
        self.state: State = engine.initial()
        self.kept: dict[int, object] = {}
        self.decisions: list[Decision] = []
        self.canary: Callable[[], CanaryAnswer | None] = lambda: None
        self.asked: list[int] = []
        self.snapshots = snapshots
        if snapshots:
            self._note(SnapshotTaken(0))

    def _note(self, event: object) -> None:
        self.state = engine.note(self.state, event, self.policy)  # type: ignore[arg-type]
        if isinstance(event, SnapshotTaken):
            self.kept[event.step] = self.state.stats

    def step(self, loss: CalmOr = None, norm: CalmOr = None, **more: object) -> Decision:
        at = self.state.step
        ripple = 0.01 * math.sin(at * 1.7)
        observation = Observation(
            at,
            2.0 + ripple if loss is None else loss,
            1.0 + ripple if norm is None else norm,
            1e-3,
            **more,  # type: ignore[arg-type]
        )
        if engine.wants_canary(self.state, observation, self.policy):
            self.asked.append(at)
            observation = Observation(
                at, observation.loss, observation.grad_norm, 1e-3, canary=self.canary(), **more
            )  # type: ignore[arg-type]
        decision = engine.decide(self.state, observation, self.policy)
        outcome = Outcome(at, decision.action, applied=decision.action is Action.PROCEED)
        self.state = engine.apply(self.state, observation, decision, outcome, self.policy)
        if decision.action is Action.ROLLBACK:
            assert decision.target is not None
            self._note(Restored(at + 1, decision.target, self.kept[decision.target]))  # type: ignore[arg-type]
        elif decision.take_snapshot and self.snapshots:
            self._note(SnapshotTaken(at + 1))
        self.decisions.append(decision)
        return decision

    def calm(self, steps: int) -> None:
        for _ in range(steps):
            decision = self.step()
            assert decision.action is Action.PROCEED, decision

    def hot(self, steps: int, loss: float = 4.0) -> list[Action]:
        return [self.step(loss).action for _ in range(steps)]

    @property
    def ledger(self) -> object:
        return self.state.ledger


SKIP, BACK, GO = Action.SKIP_STEP, Action.ROLLBACK, Action.PROCEED
OFF = Protection.OFF


def test_a_nan_gradient_is_skipped_from_step_0_and_named() -> None:
    run = Run()
    decision = run.step(norm=NAN)
    assert (decision.action, decision.rule) == (SKIP, "nonfinite_grad")
    assert dict(run.state.ledger.counters.skipped) == {"nonfinite_grad": 1}
    assert dict(run.state.ledger.counters.nonfinite) == {"grad": 1}


@pytest.mark.parametrize(("factor", "action"), [(9.9, GO), (10.1, SKIP)])
def test_a_norm_above_ten_times_its_mean_is_skipped(factor: float, action: Action) -> None:
    run = Run()
    run.calm(20)
    mean = run.state.stats.norm.norms
    assert run.step(norm=factor * sum(mean) / len(mean)).action is action


def test_before_it_is_armed_the_norm_rule_says_warming_and_skips_nothing() -> None:
    run = Run()
    run.calm(5)
    decision = run.step(norm=100.0)
    assert decision.action is GO
    assert decision.readings.protection is Protection.WARMING
    run.calm(30)
    assert run.decisions[-1].readings.protection is Protection.ARMED


def test_three_spike_steps_are_skipped_and_the_fourth_rolls_back_to_the_newest_healthy() -> None:
    run = Run()
    run.calm(36)  # snapshots 0, 10, 20, 30; 30 is confirmed at 34
    assert run.hot(4) == [SKIP, SKIP, SKIP, BACK]
    assert run.decisions[-1].target == 30
    assert run.decisions[-1].rule == "loss_spike"
    assert run.state.ledger.attempt == 1


def test_a_snapshot_taken_just_before_the_spike_is_not_used() -> None:
    run = Run()
    run.calm(31)  # candidate 30 has seen one quiet step
    run.hot(4)
    assert run.decisions[-1].target == 20
    assert [s.step for s in run.state.ledger.snapshots if s.step > 20] == []


def test_with_only_snapshot_0_that_one_is_used() -> None:
    run = Run(WITHOUT_CANARY.replace("ram_every = 10", "ram_every = 1000"))
    run.calm(36)
    run.hot(4)
    assert run.decisions[-1].target == 0


def test_two_cool_steps_end_an_incident_and_its_count() -> None:
    run = Run()
    run.calm(36)
    run.hot(3)
    run.step()
    assert run.state.ledger.spike_count == 3  # one cool step is not enough
    run.step()
    assert run.state.ledger.spike_count == 0
    assert run.hot(3) == [SKIP, SKIP, SKIP]


def test_after_a_rollback_spike_steps_are_skipped_and_do_not_climb() -> None:
    run = Run()
    run.calm(36)
    actions = run.hot(4 + 5)
    assert actions == [SKIP, SKIP, SKIP, BACK] + [SKIP] * 5


def test_a_relapse_after_a_quiet_stretch_takes_a_strictly_older_snapshot() -> None:
    run = Run()
    run.calm(36)
    run.hot(4)
    run.calm(8)
    assert run.hot(4) == [SKIP, SKIP, SKIP, BACK]
    targets = [d.target for d in run.decisions if d.action is BACK]
    assert targets == [30, 20]


def test_a_spent_budget_stops_the_acting_and_says_so_but_nan_is_still_skipped() -> None:
    run = Run(WITHOUT_CANARY + "[rules.attention_logit]\nmode = 'off'\n")
    run.calm(56)
    for _ in range(3):
        run.hot(4)
        run.calm(8)
    actions = run.hot(5)
    assert actions == [SKIP, SKIP, SKIP, GO, GO]
    assert run.state.ledger.stopped
    assert any(f.key == "budget_spent" for f in run.decisions[-2].findings)
    assert run.decisions[-1].readings.protection is Protection.OFF
    assert run.step(norm=NAN).action is SKIP
    (incident,) = [i for i in run.state.ledger.incidents if i.state is IncidentState.FIRING]
    assert incident.key == incidents.INSTABILITY
    run.hot(3)  # what is needed of a person must not be lost under the next hot step
    assert "spent" in run.state.ledger.incidents[-1].summary


def test_the_learning_rate_is_cut_held_and_warmed_up_again() -> None:
    toml = WITHOUT_CANARY + "[lr]\ncut = 0.5\nhold = 2\nrewarm = 3\n"
    run = Run(toml)
    run.calm(36)
    run.hot(4)
    factors = [run.step().lr_factor for _ in range(7)]
    assert factors == [0.5, 0.5, 0.625, 0.75, 0.875, 1.0, 1.0]


def test_a_skipped_step_uses_nothing_of_the_cut_up() -> None:
    run = Run(WITHOUT_CANARY + "[lr]\nhold = 2\nrewarm = 0\n")
    run.calm(36)
    run.hot(4)
    run.step(norm=NAN)
    factors = [run.step().lr_factor for _ in range(3)]
    assert factors == [0.5, 0.5, 1.0]


def test_statistics_come_back_with_the_weights_and_the_ledger_does_not() -> None:
    run = Run()
    run.calm(36)
    before = run.kept[30]
    run.hot(4)
    assert run.state.stats == before
    assert run.state.ledger.rollbacks == (39,)
    assert run.state.step == 40


def test_the_third_nonfinite_loss_in_a_row_rolls_back() -> None:
    run = Run()
    run.calm(36)
    assert [run.step(NAN, NAN).action for _ in range(3)] == [SKIP, SKIP, BACK]
    assert run.decisions[-1].rule == "nonfinite_loss"


def test_at_the_third_nonfinite_loss_the_canary_is_heard_and_bad_inputs_cost_no_rollback() -> None:
    run = Run(SMALL)
    run.canary = lambda: CanaryAnswer(20, 2.0, 2.0)
    run.calm(36)
    decisions = [run.step(NAN, NAN, params_finite=True) for _ in range(30)]
    assert {d.action for d in decisions} == {SKIP}
    assert run.asked == [38]
    assert run.state.ledger.counters.rollbacks == ()
    assert run.state.ledger.counters.lost_steps == 30
    # A person is called at the third, and told why nothing is rolled back.
    assert decisions[2].reason == "the loss is nan; the canary blames the data"
    paged = incidents.find(run.state.ledger, incidents.INSTABILITY)
    assert paged is not None
    assert (paged.state, paged.fired) == (IncidentState.FIRING, 38)
    assert paged.severity is Severity.CRITICAL
    run.calm(10)
    assert run.state.ledger.verdict is Verdict.NONE
    assert incidents.find(run.state.ledger, incidents.INSTABILITY) is None
    # What was skipped on its word does not count towards the bounds of what comes next.
    assert [run.step(NAN, NAN).action for _ in range(3)] == [SKIP] * 3
    assert run.asked == [38, 78]


@pytest.mark.parametrize("now", [2.5, NAN, None])
def test_at_the_third_nonfinite_loss_bad_weights_or_no_answer_roll_back(now: float | None) -> None:
    run = Run(SMALL)
    run.canary = lambda: None if now is None else CanaryAnswer(20, 2.0, now)
    run.calm(36)
    decisions = [run.step(NAN, NAN) for _ in range(3)]
    assert [d.action for d in decisions] == [SKIP, SKIP, BACK]
    assert decisions[-1].rule == "nonfinite_loss"
    assert ("weights are to blame" in decisions[-1].reason) == (now is not None)
    assert run.asked == [38]


def test_what_the_canary_said_of_a_spike_is_not_taken_for_nonfinite_losses_after_it() -> None:
    run = Run(SMALL)
    answers = iter([CanaryAnswer(20, 2.0, 2.0), CanaryAnswer(20, 2.0, math.inf)])
    run.canary = lambda: next(answers)
    run.calm(36)
    assert run.hot(4) == [SKIP] * 4
    assert run.state.ledger.verdict is Verdict.DATA
    assert [run.step(NAN, NAN).action for _ in range(3)] == [SKIP, SKIP, BACK]
    assert run.asked == [39, 42]


def test_parameters_that_are_known_to_be_bad_and_a_rule_that_is_off_ask_no_canary() -> None:
    run = Run(SMALL + "[rules.nonfinite_params]\ncooldown = 5\n")
    run.calm(36)
    assert run.step(NAN, NAN, params_finite=False).rule == "nonfinite_params"
    assert run.asked == []
    run = Run(SMALL.replace("[rules.nonfinite_loss]", "[rules.nonfinite_loss]\nmode = 'off'"))
    run.calm(36)
    for _ in range(3):
        run.step(NAN, 1.0)
    assert run.asked == []


def test_nonfinite_parameters_roll_back_at_once() -> None:
    run = Run()
    run.calm(36)
    decision = run.step(NAN, NAN, params_finite=False)
    assert (decision.action, decision.rule) == (BACK, "nonfinite_params")


def test_a_gradient_scale_that_jumps_for_good_is_not_skipped_for_ever() -> None:
    run = Run()
    run.calm(36)
    actions = [run.step(norm=50.0).action for _ in range(30)]
    assert actions[:7] == [SKIP] * 6 + [BACK]
    assert set(actions[7:]) == {GO}


@pytest.mark.parametrize("snapshots", [True, False])
@pytest.mark.parametrize("faulty", [{"loss": 4.0}, {"loss": 4.0, "norm": 50.0}])
def test_the_skip_bound_holds_where_a_rollback_is_wanted_but_may_not_be_done(
    faulty: dict[str, float], snapshots: bool
) -> None:
    """Budget spent, in cooldown or without a snapshot: hot for ever is not skipped for ever."""
    run = Run(snapshots=snapshots)
    run.calm(36)
    actions = [run.step(**faulty).action for _ in range(120)]
    text = "".join(a.name[0] for a in actions)
    assert "S" * 7 not in text
    assert text.endswith("P" * 60)


def test_nan_gradients_for_ever_are_never_let_through() -> None:
    run = Run()
    run.calm(36)
    actions = {run.step(norm=NAN).action for _ in range(200)}
    assert GO not in actions


def test_the_canary_is_asked_once_at_the_fourth_spike_step() -> None:
    run = Run(SMALL)
    run.canary = lambda: CanaryAnswer(20, 2.0, 2.0)
    run.calm(36)
    run.hot(7)
    assert run.asked == [39]


def test_when_the_data_are_to_blame_nothing_is_rolled_back_and_the_bound_lets_through() -> None:
    run = Run(SMALL)
    run.canary = lambda: CanaryAnswer(20, 2.0, 1.99)
    run.calm(36)
    actions = run.hot(12)
    assert actions == [SKIP] * 5 + [GO] * 7
    assert run.decisions[-7].drop_canaries
    latched = [i for i in run.state.ledger.incidents if i.latched]
    assert [i.key for i in latched] == [incidents.LEVEL_SHIFT]
    run.calm(30)
    assert [i.state for i in run.state.ledger.incidents if i.latched] == [IncidentState.FIRING]


def test_when_the_weights_are_to_blame_the_fourth_spike_step_rolls_back() -> None:
    run = Run(SMALL)
    run.canary = lambda: CanaryAnswer(20, 2.0, 2.5)
    run.calm(36)
    assert run.hot(4) == [SKIP, SKIP, SKIP, BACK]
    assert "weights are to blame" in run.decisions[-1].reason


@pytest.mark.parametrize("now", [NAN, math.inf])
def test_a_canary_that_is_not_finite_blames_the_weights(now: float) -> None:
    run = Run(SMALL)
    run.canary = lambda: CanaryAnswer(20, 2.0, now)
    run.calm(36)
    assert run.hot(4)[-1] is BACK


def test_without_a_canary_the_fourth_spike_step_rolls_back_and_the_shield_goes_up() -> None:
    run = Run(SMALL)
    run.calm(36)
    assert run.hot(9) == [SKIP, SKIP, SKIP, BACK] + [SKIP] * 5
    assert run.state.ledger.verdict is Verdict.UNAVAILABLE
    assert run.state.ledger.shield


def test_after_a_canary_rollback_each_incident_is_judged_anew_but_not_in_cooldown() -> None:
    run = Run(SMALL)
    run.canary = lambda: CanaryAnswer(20, 2.0, 3.0)
    run.calm(36)
    actions = run.hot(11)
    assert actions == [SKIP, SKIP, SKIP, BACK] + [SKIP] * 5 + [BACK, SKIP]
    first, second = [d.step for d in run.decisions if d.action is BACK]
    assert second - first > run.policy.rules.loss_spike.cooldown


def test_without_any_snapshot_a_due_rollback_skips_and_cuts_and_pages() -> None:
    run = Run(snapshots=False)
    run.calm(36)
    assert run.hot(4) == [SKIP] * 4
    assert any(f.key == "no_snapshot" for f in run.decisions[-1].findings)
    run.step()
    assert run.step().lr_factor == 0.5


def test_a_restore_that_fails_cuts_the_rate_and_forgets_the_snapshot() -> None:
    run = Run()
    run.calm(36)
    run.hot(3)
    observation = Observation(39, 4.0, 1.0)
    decision = engine.decide(run.state, observation, run.policy)
    state = engine.apply(run.state, observation, decision, Outcome(39, BACK, False), run.policy)
    state = engine.note(state, RestoreFailed(40, 30, "shape changed"), run.policy)
    assert [s.step for s in state.ledger.snapshots if s.step == 30] == []
    assert state.ledger.lr.factor == 0.5
    assert dict(state.ledger.counters.rollbacks) == {"loss_spike/failed": 1}
    assert state.ledger.incidents[-1].actions[-1] == (39, "rollback_failed", "loss_spike")


def test_observing_decides_the_same_and_does_nothing() -> None:
    acting, observing = Run(), Run('mode = "observe"\n' + WITHOUT_CANARY)
    for run in (acting, observing):
        run.calm(36)
        run.step(norm=NAN)
        run.step(4.0)
    assert [d.would for d in observing.decisions] == [d.action for d in acting.decisions]
    assert {d.action for d in observing.decisions} == {GO}
    assert dict(observing.state.ledger.counters.would) == {
        "skip_step/loss_outlier": 1,
        "skip_step/nonfinite_grad": 1,
    }
    assert observing.decisions[-1].readings.protection is Protection.OFF


def test_orders_are_obeyed_once_and_before_the_rules() -> None:
    run = Run()
    run.calm(36)
    skip = Command("a", CommandKind.SKIP_NEXT, issued_by="kim")
    assert run.step(commands=(skip,)).rule == "command"
    assert run.step(commands=(skip,)).action is GO  # delivered again
    back = run.step(commands=(Command("b", CommandKind.ROLLBACK, target=20),))
    assert (back.action, back.target) == (BACK, 20)
    assert run.step(commands=(Command("c", CommandKind.SCALE_LR, value=0.3),)).lr_factor == 0.3
    assert run.step().lr_factor == 0.3
    run.step(commands=(Command("d", CommandKind.PAUSE),))
    assert run.step(norm=NAN).action is GO
    run.step(commands=(Command("e", CommandKind.RESUME),))
    assert run.step(norm=NAN).action is SKIP
    assert run.step(commands=(Command("f", CommandKind.HALT),)).action is Action.HALT


def test_the_kill_switch_pauses_automation_between_steps() -> None:
    run = Run()
    run.calm(3)
    run._note(AutomationSet(3, True, "file"))
    assert run.step(norm=NAN).action is GO


def test_a_pause_holds_for_the_step_that_brings_it() -> None:
    run = Run()
    run.calm(36)
    decision = run.step(norm=NAN, commands=(Command("a", CommandKind.PAUSE),))
    assert (decision.action, decision.would) == (GO, SKIP)
    run.step(commands=(Command("b", CommandKind.RESUME),))
    both = (Command("c", CommandKind.PAUSE), Command("d", CommandKind.RESUME))
    assert run.step(norm=NAN, commands=both).action is SKIP


def test_protection_is_off_from_the_very_step_that_brings_a_pause() -> None:
    run = Run()
    run.calm(36)
    assert run.decisions[-1].readings.protection is Protection.ARMED
    paused = run.step(commands=(Command("a", CommandKind.PAUSE),))
    assert paused.readings.protection is Protection.OFF
    assert run.step().readings.protection is Protection.OFF
    # It was not guarded yet when this one was settled; it is from the next on.
    assert run.step(commands=(Command("b", CommandKind.RESUME),)).readings.protection is OFF
    assert run.step().readings.protection is Protection.ARMED
    both = (Command("c", CommandKind.PAUSE), Command("d", CommandKind.RESUME))
    assert run.step(commands=both).readings.protection is Protection.ARMED


def test_protection_is_off_from_the_very_step_that_spends_the_budget() -> None:
    run = Run(WITHOUT_CANARY.replace("[rollback]", "[rollback]\nbudget = 1"))
    run.calm(36)
    run.hot(4)
    run.calm(12)
    run.hot(3)
    assert not run.state.ledger.stopped
    last = run.step(4.0)
    assert run.state.ledger.stopped, last
    assert last.readings.protection is Protection.OFF


@pytest.mark.parametrize("mode", ["act", "observe"])
def test_a_step_that_the_gradient_scaler_left_out_is_no_fault_of_the_run(mode: str) -> None:
    policy = Policy.parse(WITHOUT_CANARY).with_mode(mode)
    state = engine.note(engine.initial(), SnapshotTaken(0), policy)
    for at in range(12):
        over = at in (0, 1, 8)
        seen = Observation(at, 2.0, math.inf if over else 1.0, loss_scale=2.0**16 / (1 + over))
        decision = engine.decide(state, seen, policy)
        state = engine.apply(state, seen, decision, Outcome(at, GO, applied=not over), policy)
    counters = state.ledger.counters
    assert dict(counters.nonfinite) == {"scaler": 3}
    assert counters.skipped == counters.would == ()
    assert counters.lost_steps == 3
    for incident in state.ledger.incidents:
        assert (incident.severity, incident.fired, incident.actions) == (Severity.INFO, None, ())
        assert incident.summary.startswith("the gradient scaler left this step out")
        assert "a loss scale of 32768" in incident.summary


def test_an_overflow_beside_something_worse_does_not_talk_it_down() -> None:
    run = Run()
    run.calm(36)
    run.step(NAN, NAN)
    worse = incidents.find(run.state.ledger, incidents.INSTABILITY)
    assert worse is not None
    at = run.state.step
    seen = Observation(at, 2.0, math.inf, loss_scale=8.0)
    decision = engine.decide(run.state, seen, run.policy)
    after = engine.apply(run.state, seen, decision, Outcome(at, GO, applied=False), run.policy)
    now = incidents.find(after.ledger, incidents.INSTABILITY)
    assert now is not None
    assert (now.severity, now.summary) == (worse.severity, worse.summary)


@pytest.mark.parametrize(
    "seen",
    [
        {"loss": 2.0, "grad_norm": math.inf},  # nobody scales
        {"loss": NAN, "grad_norm": NAN, "loss_scale": 8.0},
        {"loss": 2.0, "grad_norm": NAN, "loss_scale": 8.0, "params_finite": False},
    ],
    ids=["no scaler", "the loss is bad too", "the weights are"],
)
def test_other_steps_that_were_not_applied_are_none_of_the_scalers(seen: dict[str, float]) -> None:
    run = Run()
    run.calm(20)
    observation = Observation(20, **seen)  # type: ignore[arg-type]
    decision = engine.decide(run.state, observation, run.policy)
    outcome = Outcome(20, GO, applied=False)
    state = engine.apply(run.state, observation, decision, outcome, run.policy)
    assert "scaler" not in dict(state.ledger.counters.nonfinite)


@pytest.mark.parametrize("by", ["order", "file"])
def test_rollbacks_that_were_only_supposed_while_paused_forbid_no_real_one(by: str) -> None:
    run = Run(SMALL + "[rules.nonfinite_params]\ncooldown = 5\n")
    run.calm(8)
    assert [s.step for s in run.state.ledger.snapshots if s.healthy] == [0]
    if by == "order":
        run.step(commands=(Command("a", CommandKind.PAUSE),))
    else:
        run._note(AutomationSet(8, True, "file"))
    for _ in range(40):
        decision = run.step(NAN, NAN, params_finite=False)
        assert decision.action is GO
    assert run.state.ledger.last_target == 0  # it was supposed
    assert run.state.ledger.counters.rollbacks == ()
    if by == "order":
        run.step(NAN, NAN, params_finite=False, commands=(Command("b", CommandKind.RESUME),))
    else:
        run._note(AutomationSet(run.state.step, False, "file"))
    decision = run.step(NAN, NAN, params_finite=False)
    assert (decision.action, decision.target) == (BACK, 0)
    assert dict(run.state.ledger.counters.rollbacks) == {"nonfinite_params/restored": 1}


def test_a_hot_attention_logit_flags_its_layer_once_and_changes_nothing() -> None:
    run = Run()
    run.calm(10)
    columns = {LAYER_ATTENTION_MAX_LOGIT: np.array([3.0, 60.0, 4.0], np.float32)}
    first, second = run.step(columns=columns), run.step(columns=columns)
    assert first.action is GO
    assert [(f.key, f.layers) for f in first.findings] == [("attention_logit", (1,))]
    assert second.findings == ()
    assert dict(run.state.ledger.counters.flags) == {"attention_logit": 1}


def test_a_blind_step_is_let_through_and_never_looks_healthy() -> None:
    run = Run()
    run.calm(20)
    decision = run.step(norm=NAN, blind=True)
    assert decision.action is GO
    assert decision.readings.protection is Protection.BLIND
    assert not decision.readings.quiet


def test_lost_steps_count_each_undone_update_once() -> None:
    run = Run()
    run.calm(36)
    run.hot(4)  # back to 30: six updates undone, four steps skipped
    assert run.state.ledger.counters.lost_steps == 10
    assert run.state.ledger.in_weights == 30


def test_one_snapshot_well_before_the_newest_is_kept() -> None:
    run = Run()
    run.calm(200)
    steps = [s.step for s in run.state.ledger.snapshots if s.healthy]
    newest = steps[-1]
    assert steps[-2] == newest - 10
    assert any(newest - 100 <= s <= newest - 40 for s in steps)
    assert len(steps) <= 4


def test_a_rollback_names_what_was_not_finite() -> None:
    run = Run()
    run.calm(60)
    for _ in range(4):
        decision = run.step(40.0, math.inf)
    assert decision.action is Action.ROLLBACK
    assert decision.reason == "spike step 4 of this incident: the gradient norm is not finite"


def test_a_step_out_of_order_is_refused_with_both_numbers() -> None:
    run = Run()
    with pytest.raises(StateError, match=r"next step \(0\), got 7"):
        engine.decide(run.state, Observation(7, 2.0, 1.0), run.policy)


def test_apply_gives_the_same_with_and_without_the_memo() -> None:
    from dataclasses import replace

    run = Run()
    run.calm(36)
    observation = Observation(36, 4.0, 30.0)
    decision = engine.decide(run.state, observation, run.policy)
    outcome = Outcome(36, decision.action, False)
    with_memo = engine.apply(run.state, observation, decision, outcome, run.policy)
    without = engine.apply(
        run.state, observation, replace(decision, memo=None), outcome, run.policy
    )
    assert with_memo == without

"""The engine: one pure function decides, one moves the state on what was really done.

    state    = initial()
    decision = decide(state, observation, policy)
    state    = apply(state, observation, decision, outcome, policy)
    state    = note(state, event, policy)          # at the safe point between two steps

`wants_canary(state, observation, policy)` says beforehand whether the decision depends on the
canary; if it does, the trainer computes it and puts the answer into the observation.

The learning rate after a rollback, counted in applied steps (a skipped step uses nothing up): the
first `hold` applied steps are multiplied by factor = max(floor, cut ** n), n the number of
rollbacks within rollback.window; the k-th after them, k = 1..rewarm, by
factor + (1 - factor) * k / (rewarm + 1); from then on by 1.

Units:   steps; see core.types.
Purity:  no clock, no I/O, no randomness: equal inputs give equal outputs on every rank and in
         every replay.
Errors:  StateError when called out of order; otherwise never raises, whatever was measured.
"""

from __future__ import annotations

from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

from sentinel.core import advice, incidents
from sentinel.core.detectors import grad_norm
from sentinel.core.errors import StateError
from sentinel.core.events import (
    AutomationSet,
    Event,
    Restored,
    RestoreFailed,
    SnapshotLost,
    SnapshotTaken,
)
from sentinel.core.incidents import INSTABILITY, LEVEL_SHIFT
from sentinel.core.judge import Judged, judge, learn
from sentinel.core.policy import Policy
from sentinel.core.rules import (
    COMMAND,
    Plan,
    asks_canary,
    memory,
    pauses,
    plan,
    scaler_dropped,
    severity_of,
)
from sentinel.core.state import (
    ENGINE_VERSION,
    Counters,
    Ledger,
    LrCut,
    RuleMemory,
    Snapshot,
    State,
)
from sentinel.core.types import (
    Action,
    CommandKind,
    Decision,
    Finding,
    Mode,
    Observation,
    Outcome,
    Protection,
    Reading,
    Readings,
    Severity,
    Status,
    Verdict,
)

__all__ = [
    "ENGINE_VERSION",
    "apply",
    "decide",
    "initial",
    "lr_factor",
    "note",
    "snapshot_due",
    "wants_canary",
]

COMMANDS_KEPT = 256  # ids of obeyed orders; they expire long before so many have come
ACTED_KEPT = 256
SCALER = "scaler"  # counted among what was not finite: an overflow that its scaler dealt with
_BUT_STEPS = attrgetter(*[f.name for f in fields(Counters) if f.name != "steps"])
_PLACE = {f.name: i for i, f in enumerate(fields(Ledger))}
_VALUES = attrgetter(*_PLACE)

wants_canary = asks_canary


def initial(step: int = 0) -> State:
    """A run's first state; `step` is the number of its first step."""
    return State(step=step)


def decide(state: State, observation: Observation, policy: Policy) -> Decision:
    """What shall be done with this step.

    Raises:
        StateError: the observation is not of the step that comes next.
    """
    _in_order(state, observation)
    judged = judge(state.stats, observation, policy)
    planned = plan(state, observation, judged, policy)
    ledger = state.ledger
    spike, norm = judged.spike, judged.norm
    readings = Readings(
        spike.score,
        spike.level,
        spike.baseline,
        norm.status,
        norm.baseline,
        norm.score if norm.baseline is not None else None,
        judged.shift.drift,
        planned.quiet,
        _protection(ledger, observation, planned, norm, spike.status, policy),
    )
    findings = planned.flags
    if not planned.quiet:
        findings = (*_findings(observation, judged, planned, policy), *findings)
    factor = lr_factor(ledger.lr)
    if planned.manual_lr != 1.0:
        factor *= planned.manual_lr
    return Decision(
        observation.step,
        planned.action,
        planned.rule,
        planned.reason,
        planned.would,
        planned.target,
        factor,
        planned.quiet,
        planned.accept_level or spike.accepted_level,
        planned.quiet and _snapshot_due(ledger, observation.step + 1),
        findings,
        readings,
        (state, observation, judged, planned),
    )


def apply(
    state: State, observation: Observation, decision: Decision, outcome: Outcome, policy: Policy
) -> State:
    """The state after this step, given what the trainer did.

    Args:
        decision: the one carried out; another engine's is as good, for the same inputs.
        outcome: what was executed, which need not be what was decided.

    Raises:
        StateError: the observation is not of the step that comes next.
    """
    _in_order(state, observation)
    memo = decision.memo
    planned: Plan
    if memo is not None and memo[0] is state and memo[1] is observation:
        judged, planned = memo[2], memo[3]
    else:
        judged = judge(state.stats, observation, policy)
        planned = plan(state, observation, judged, policy)
    executed = outcome.executed
    dropped = scaler_dropped(observation, outcome)
    observing = planned.would > planned.action and executed is Action.PROCEED and not dropped
    effective = planned.would if observing else executed

    stats = learn(
        state.stats,
        observation,
        judged,
        policy,
        accept_norm=(
            outcome.applied
            and effective is Action.PROCEED
            and not planned.hot
            and judged.norm.status is not Status.SPIKE
        ),
        accept_level=planned.accept_level,
        restart_norm=observing and planned.restart_norm,
    )
    if planned.quiet and outcome.applied and effective is Action.PROCEED:
        ledger = _calm(state.ledger, observation, planned, policy)
    else:
        ledger = _trouble(
            state.ledger,
            observation,
            judged.spike.accepted_level,
            planned,
            outcome,
            effective,
            observing,
            dropped,
            judged.nonfinite,
            judged.advice.first,
            policy,
        )
    over = advice.over(judged.advice_state, observation.step) if ledger.flagged else ()
    if planned.runs or planned.flags or _flag_expired(ledger, observation.step, over, policy):
        ledger = _remember(ledger, observation.step, planned, over, policy)
    return State(state.step + 1, stats, ledger)


def note(state: State, event: Event, policy: Policy) -> State:
    """The state after something that happened between two steps."""
    ledger = state.ledger
    if isinstance(event, SnapshotTaken):
        if event.tier == "disk" and any(s.step == event.step for s in ledger.snapshots):
            return state  # another copy of one that is known
        first = not ledger.snapshots and ledger.counters.steps == 0
        taken = Snapshot(event.step, healthy=first, applied=ledger.in_weights)
        kept = tuple(s for s in ledger.snapshots if s.step != event.step)
        ledger = replace(
            ledger,
            snapshots=tuple(sorted((*kept, taken), key=_by_step)),
            next_snapshot=_next_snapshot(event.step, policy),
        )
    elif isinstance(event, Restored):
        stats = event.stats
        if ledger.pending_norm:
            stats = replace(stats, norm=grad_norm.restart(stats.norm))
        return State(state.step, stats, _restored(ledger, event, policy))
    elif isinstance(event, RestoreFailed):
        rule = ledger.pending_rule or COMMAND
        ledger = incidents.touch(
            incidents.not_restored(ledger, INSTABILITY),
            INSTABILITY,
            max(event.step - 1, 0),
            f"rollback failed: {event.reason}; skipped, and the learning rate is cut",
            Severity.CRITICAL,
            fire=True,
        )
        ledger = replace(
            ledger,
            snapshots=tuple(s for s in ledger.snapshots if s.step != event.target),
            lr=_cut(ledger, policy),
            pending_restore=None,
            pending_rule="",
            pending_shield=False,
            pending_norm=False,
            counters=replace(
                ledger.counters,
                rollbacks=_bump(ledger.counters.rollbacks, f"{rule}/failed"),
            ),
        )
    elif isinstance(event, SnapshotLost):
        ledger = replace(
            ledger, snapshots=tuple(s for s in ledger.snapshots if s.step != event.target)
        )
    elif isinstance(event, AutomationSet):
        if event.paused:
            ledger = replace(ledger, automation=False)
        elif not ledger.automation:
            ledger = _resumed(ledger)
    return State(state.step, state.stats, ledger)


def snapshot_due(state: State) -> bool:
    """A snapshot follows the step that comes next, if that one is quiet and applied."""
    return _snapshot_due(state.ledger, state.step + 1)


def lr_factor(cut: LrCut) -> float:
    """What the next applied step's learning rate is multiplied by; see the module docstring."""
    if cut.hold > 0:
        return cut.factor
    if cut.rewarm > 0:
        k = cut.rewarm_total - cut.rewarm + 1
        return cut.factor + (1.0 - cut.factor) * k / (cut.rewarm_total + 1)
    return 1.0


# ---------------------------------------------------------------- between steps


def _restored(ledger: Ledger, event: Restored, policy: Policy) -> Ledger:
    target = next((s for s in ledger.snapshots if s.step == event.target), None)
    in_weights = ledger.in_weights if target is None else target.applied
    lost = max(ledger.in_weights - in_weights, 0)
    rule = ledger.pending_rule or COMMAND
    counters = ledger.counters
    return replace(
        ledger,
        attempt=ledger.attempt + 1,
        in_weights=in_weights,
        last_target=event.target,  # an older one than was decided, when that one was damaged
        quiet_run=0,
        shield=ledger.pending_shield,
        pending_restore=None,
        pending_rule="",
        pending_shield=False,
        pending_norm=False,
        lr=_cut(ledger, policy) if rule != COMMAND else ledger.lr,
        # What was copied after the target belongs to the abandoned way.
        snapshots=tuple(s for s in ledger.snapshots if s.step <= event.target),
        next_snapshot=_next_snapshot(event.step, policy),
        counters=replace(
            counters,
            rollbacks=_bump(counters.rollbacks, f"{rule}/restored"),
            lost_steps=counters.lost_steps + lost,
        ),
    )


def _cut(ledger: Ledger, policy: Policy) -> LrCut:
    """The cut for the rollback that was just counted in ledger.rollbacks."""
    n = max(len(ledger.rollbacks), 1)
    lr = policy.lr
    factor = max(lr.floor, lr.cut**n)
    if factor >= 1.0:
        return LrCut()
    hold, rewarm = (lr.hold, lr.rewarm) if n == 1 else (lr.again_hold, lr.again_rewarm)
    return LrCut(factor, hold, rewarm, rewarm)


def _tick(cut: LrCut) -> LrCut:
    """One applied step further."""
    if cut.hold > 0:
        cut = replace(cut, hold=cut.hold - 1)
    elif cut.rewarm > 0:
        cut = replace(cut, rewarm=cut.rewarm - 1)
    return cut if cut.hold > 0 or cut.rewarm > 0 else LrCut()


def _next_snapshot(step: int, policy: Policy) -> int:
    every = policy.snapshots.ram_every
    return (step // every + 1) * every


def _snapshot_due(ledger: Ledger, step: int) -> bool:
    """A candidate is due at the safe point before `step`, and there is none yet."""
    return step >= ledger.next_snapshot and all(s.healthy for s in ledger.snapshots)


# ---------------------------------------------------------------- the ledger after a step


def _calm(ledger: Ledger, observation: Observation, planned: Plan, policy: Policy) -> Ledger:
    """A quiet, applied step: the common case, kept short."""
    step = observation.step
    quiet_run = ledger.quiet_run + 1
    snapshots = ledger.snapshots
    if snapshots and not snapshots[-1].healthy:
        snapshots = _confirm(snapshots, policy)
    stopped = ledger.stopped
    rollbacks = ledger.rollbacks
    if rollbacks and rollbacks[0] <= step - policy.rollback.window:
        rollbacks = _within(rollbacks, step, policy.rollback.window)
        stopped = stopped and bool(rollbacks)
    if ledger.incidents:
        ledger = incidents.resolve(ledger, INSTABILITY, step)
    counters = ledger.counters
    return _moved(
        ledger,
        in_weights=ledger.in_weights + 1,
        spike_count=planned.spike_count,
        spike_skips=ledger.spike_skips if planned.spike_count else 0,
        cool_run=planned.cool_run,
        nonfinite_run=0,
        skip_run=0,
        verdict=planned.verdict,
        shield=ledger.shield and quiet_run < policy.rollback.quiet,
        quiet_run=quiet_run,
        rollbacks=rollbacks,
        stopped=stopped,
        lr=_tick(ledger.lr) if ledger.lr.factor < 1.0 else ledger.lr,
        snapshots=snapshots,
        counters=Counters(counters.steps + 1, *_BUT_STEPS(counters)),
    )


def _trouble(
    ledger: Ledger,
    observation: Observation,
    accepted_level: bool,
    planned: Plan,
    outcome: Outcome,
    effective: Action,
    observing: bool,
    dropped: bool,
    nonfinite: tuple[str, ...],
    first_out: tuple[int, ...],
    policy: Policy,
) -> Ledger:
    """Any other step: hot, skipped, blind, ordered, or in the shadow of an incident."""
    step = observation.step
    skipped = effective is not Action.PROCEED
    back = effective is Action.ROLLBACK
    rung = back or planned.no_target  # both use the ladder up
    counters = ledger.counters
    really = outcome.executed
    new = replace(
        counters,
        steps=counters.steps + 1,
        skipped=_bump(counters.skipped, planned.rule or "trainer")
        if really is Action.SKIP_STEP
        else counters.skipped,
        would=_bump(counters.would, f"{planned.would.name.lower()}/{planned.rule}")
        if observing
        else counters.would,
        spike_steps=counters.spike_steps + planned.hot,
        lost_steps=counters.lost_steps + (not outcome.applied),
    )
    for signal in (SCALER,) if dropped else nonfinite:
        new = replace(new, nonfinite=_bump(new.nonfinite, signal))
    acting = policy.mode is Mode.ACT and ledger.automation
    if planned.no_target and acting and not observing:
        new = replace(new, rollbacks=_bump(new.rollbacks, f"{planned.rule or 'ladder'}/none"))

    ledger = _incident(
        ledger, observation, planned, effective, observing, dropped, first_out, policy
    )
    if accepted_level or planned.accept_level:
        ledger = incidents.touch(
            ledger,
            LEVEL_SHIFT,
            step,
            "the loss has moved to a new level, which is now the baseline",
            Severity.CRITICAL,
            fire=True,
            latch=True,
        )
        new = replace(new, flags=_bump(new.flags, "level_shift"))
    snapshots = ledger.snapshots
    if planned.fires or back:
        snapshots = tuple(s for s in snapshots if s.healthy)

    rollbacks = _within(ledger.rollbacks, step, policy.rollback.window)
    if rung and planned.rule != COMMAND:
        rollbacks = (*rollbacks, step)
    rules = ledger.rules
    if skipped and planned.rule != COMMAND:
        rules = _acted(rules, planned.rule, step, policy)
    skips = _within(ledger.skips, step, policy.skip.window)
    over = back or planned.accept_level  # what was counted so far is settled by it
    # The canary has spoken, and a loss that is no number can only be skipped: it uses no bound up.
    moot = "loss" in nonfinite and planned.verdict is Verdict.DATA
    if skipped and not over and not moot:
        skips = (*skips, step)
    restored_later = back and not observing
    ledger = replace(
        ledger,
        in_weights=ledger.in_weights + outcome.applied,
        spike_count=0 if back else planned.spike_count,
        spike_skips=0
        if back or not planned.spike_count
        else ledger.spike_skips + (skipped and planned.hot and not moot),
        cool_run=planned.cool_run,
        nonfinite_run=0 if back else planned.nonfinite_run,
        verdict=Verdict.NONE if back else planned.verdict,
        skip_run=0 if over or not skipped else ledger.skip_run + 1,
        skips=() if over else skips,
        shield=(ledger.shield or (back and observing and planned.shield))
        and not (planned.accept_level),
        # A lone outlier, skipped or not, is no quiet step; it does not undo the stretch either.
        quiet_run=0 if (back or planned.fires) else ledger.quiet_run,
        rollbacks=rollbacks,
        last_target=planned.target if back else ledger.last_target,
        last_rollback=step if rung else ledger.last_rollback,
        pending_restore=planned.target if restored_later else None,
        pending_rule=planned.rule if restored_later else "",
        pending_shield=restored_later and planned.shield,
        pending_norm=restored_later and planned.restart_norm,
        stopped=(ledger.stopped and bool(rollbacks)) or planned.spent,
        manual_lr=planned.manual_lr,
        rules=rules,
        snapshots=snapshots,
        counters=new,
    )
    if planned.no_target and acting and not observing:
        ledger = replace(ledger, lr=_cut(ledger, policy))
    elif outcome.applied and ledger.lr.factor < 1.0:
        ledger = replace(ledger, lr=_tick(ledger.lr))
    return _obey(ledger, planned, step) if planned.commands else ledger


def _incident(
    ledger: Ledger,
    observation: Observation,
    planned: Plan,
    effective: Action,
    observing: bool,
    dropped: bool,
    first_out: tuple[int, ...],
    policy: Policy,
) -> Ledger:
    step = observation.step
    if not (planned.troubled or effective is not Action.PROCEED or planned.fires):
        open_ = incidents.find(ledger, INSTABILITY)
        if open_ is not None and step - open_.last >= policy.rollback.cool:
            return incidents.resolve(ledger, INSTABILITY, step)
        return ledger
    action: tuple[int, str, str] | None = None
    if effective is not Action.PROCEED:
        name = effective.name.lower()
        action = (step, f"would_{name}" if observing else name, planned.rule)
    if planned.spent:
        summary = (
            f"{policy.rollback.budget} rollbacks within {policy.rollback.window} steps are spent: "
            "acting stopped, a person is needed"
        )
    elif planned.accept_level:
        summary = "the bound on skipping is reached: the new level is let through and accepted"
    else:
        summary = planned.reason or f"spike step {planned.spike_count}, let through"
        if ledger.stopped:  # must not be lost under the next hot step's line
            summary += "; acting is stopped, the rollback budget is spent: a person is needed"
    severity = severity_of(policy, planned.rule) if planned.rule else Severity.WARNING
    old = incidents.find(ledger, INSTABILITY)
    if planned.fires:
        severity = Severity.CRITICAL
    elif dropped and not planned.hot:
        severity = Severity.INFO
        if old is None or old.severity is Severity.INFO:
            summary = (
                "the gradient scaler left this step out: its gradients overflowed at a loss scale "
                f"of {observation.loss_scale:g}, which it lowers by itself"
            )
        else:
            summary = old.summary  # what is worse stands
    return incidents.touch(
        ledger,
        INSTABILITY,
        step,
        summary,
        severity,
        fire=planned.fires,
        # Who was first is settled when it begins; what breaks later is not added.
        layers=first_out[:1] if old is None or not old.layers else (),
        action=action,
    )


def _flag_expired(ledger: Ledger, step: int, over: tuple[str, ...], policy: Policy) -> bool:
    """A flag was last raised a cooldown ago, or is known to be over: so may its incident be."""
    for key, _, raised in ledger.flagged:
        if key in over or step - raised >= getattr(policy.rules, key).cooldown:
            return True
    return False


def _remember(
    ledger: Ledger, step: int, planned: Plan, over: tuple[str, ...], policy: Policy
) -> Ledger:
    """Flags raised, `for` counts moved, flag incidents that have gone quiet resolved."""
    rules = ledger.rules
    for name, run in planned.runs:
        old = memory(ledger, name)
        rules = _put(rules, name, RuleMemory(run, old.acted))
    flagged, counters = ledger.flagged, ledger.counters
    for flag in planned.flags:
        counters = replace(counters, flags=_bump(counters.flags, flag.key))
        layers = flag.layers or (-1,)
        flagged = (
            *(f for f in flagged if not (f[0] == flag.key and f[1] in layers)),
            *((flag.key, layer, step) for layer in layers),
        )
        ledger = incidents.touch(
            ledger, flag.key, step, flag.summary, flag.severity, fire=True, layers=flag.layers
        )
    kept = tuple(
        f
        for f in flagged
        if f[0] not in over and step - f[2] < max(getattr(policy.rules, f[0]).cooldown, 1)
    )
    for key in {f[0] for f in flagged} - {f[0] for f in kept}:
        ledger = incidents.resolve(ledger, key, step)
    if rules is ledger.rules and kept == ledger.flagged and counters is ledger.counters:
        return ledger
    return replace(ledger, rules=rules, flagged=kept, counters=counters)


def _obey(ledger: Ledger, planned: Plan, step: int) -> Ledger:
    """What orders do besides this step's action; each is remembered, so it counts once."""
    for command in planned.commands:
        if command.kind is CommandKind.PAUSE:
            ledger = replace(ledger, automation=False)
        elif command.kind is CommandKind.RESUME:
            ledger = _resumed(ledger)
        elif command.kind is CommandKind.ACK:
            for incident in ledger.incidents:
                if incident.number == command.target:
                    ledger = incidents.resolve(ledger, incident.key, step, acknowledged=True)
    ids = (*ledger.commands, *(c.id for c in planned.commands))
    return replace(ledger, commands=ids[-COMMANDS_KEPT:])


def _resumed(ledger: Ledger) -> Ledger:
    """A person hands over again: budgets are whole, and the ladder is at its foot.

    While paused, rollbacks were only supposed. Taken for done they would forbid the real one: its
    target has to be older than theirs.
    """
    return replace(
        ledger,
        automation=True,
        stopped=False,
        rollbacks=(),
        last_target=None,
        last_rollback=None,
        shield=False,
        skips=(),
        skip_run=0,
    )


def _confirm(snapshots: tuple[Snapshot, ...], policy: Policy) -> tuple[Snapshot, ...]:
    """One quiet step more for every candidate; when one turns healthy, drop what is not kept."""
    need = policy.snapshots.confirm
    new = tuple(
        s if s.healthy else Snapshot(s.step, s.quiet + 1 >= need, s.quiet + 1, s.applied)
        for s in snapshots
    )
    if all(a.healthy == b.healthy for a, b in zip(new, snapshots, strict=True)):
        return new
    healthy = [s for s in new if s.healthy]
    kept = set(healthy[-policy.snapshots.keep :])
    older = [s for s in healthy if s not in kept]
    if older:
        # One well before the newest; while none is old enough, the oldest there is. And the
        # oldest of the rest, which grows into that place: without it the first would stay for ever.
        far = [s for s in older if s.step <= healthy[-1].step - policy.snapshots.older_by]
        well_before = far[-1] if far else older[0]
        kept.add(well_before)
        kept.update([s for s in older if s.step > well_before.step][:1])
    return tuple(s for s in new if not s.healthy or s in kept)


# ---------------------------------------------------------------- readings and findings


def _protection(
    ledger: Ledger,
    observation: Observation,
    planned: Plan,
    norm: Reading,
    spike: Status,
    policy: Policy,
) -> Protection:
    if not ledger.automation or ledger.stopped or policy.mode is Mode.OBSERVE:
        return Protection.OFF
    if planned.spent or (planned.commands and pauses(planned.commands)):
        return Protection.OFF  # from this step on
    if observation.blind or (observation.loss is None and observation.grad_norm is None):
        return Protection.BLIND
    if norm.status is Status.WARMING_UP or spike is Status.WARMING_UP:
        return Protection.WARMING
    return Protection.ARMED


def _findings(
    observation: Observation, judged: Judged, planned: Plan, policy: Policy
) -> tuple[Finding, ...]:
    found: list[Finding] = []
    if planned.rule:
        found.append(
            Finding(
                planned.rule,
                severity_of(policy, planned.rule),
                planned.reason,
                observation.grad_norm if planned.rule == "grad_norm" else observation.loss,
            )
        )
    elif planned.troubled:
        found.append(
            Finding("unsettled", Severity.WARNING, "a troubled step was let through", None)
        )
    if judged.spike.level == 2:
        found.append(
            Finding(
                "persistent_spike",
                Severity.WARNING,
                "several spike steps close together: no lone outlier",
                observation.loss,
            )
        )
    if planned.accept_level:
        found.append(
            Finding(
                "level_accepted",
                Severity.CRITICAL,
                "the bound on skipping is reached: the new level is let through and accepted",
                observation.loss,
            )
        )
    if planned.spent:
        found.append(
            Finding(
                "budget_spent",
                Severity.CRITICAL,
                f"{policy.rollback.budget} rollbacks within {policy.rollback.window} steps are "
                "spent: acting stopped, a person is needed",
                None,
            )
        )
    if planned.no_target:
        found.append(
            Finding("no_snapshot", Severity.CRITICAL, "no usable snapshot to roll back to", None)
        )
    return tuple(found)


# ---------------------------------------------------------------- small values


def _in_order(state: State, observation: Observation) -> None:
    if observation.step != state.step:
        raise StateError(
            f"observation.step must be the next step ({state.step}), got {observation.step}; "
            "apply() each decided step before the next is observed"
        )


def _within(steps: tuple[int, ...], step: int, window: int) -> tuple[int, ...]:
    """The steps that lie in the last `window` steps."""
    if not steps or steps[0] > step - window:
        return steps
    return tuple(s for s in steps if s > step - window)


def _bump(
    counts: tuple[tuple[str, int], ...], key: str, by: int = 1
) -> tuple[tuple[str, int], ...]:
    table = dict(counts)
    table[key] = table.get(key, 0) + by
    return tuple(sorted(table.items()))


def _put(
    rules: tuple[tuple[str, RuleMemory], ...], name: str, value: RuleMemory
) -> tuple[tuple[str, RuleMemory], ...]:
    table = dict(rules)
    table[name] = value
    return tuple(sorted(table.items()))


def _acted(
    rules: tuple[tuple[str, RuleMemory], ...], name: str, step: int, policy: Policy
) -> tuple[tuple[str, RuleMemory], ...]:
    """Remember that a rule acted, if its own cooldown or budget will ask for it."""
    config = getattr(policy.rules, name, None)
    if config is None or (config.budget == 0 and config.cooldown == 0):
        return rules
    old = dict(rules).get(name, RuleMemory())
    kept = tuple(s for s in old.acted if s > step - config.budget_window)[-ACTED_KEPT:]
    return _put(rules, name, RuleMemory(old.run, (*kept, step)))


def _moved(ledger: Ledger, **changes: Any) -> Ledger:
    """What replace() does, at half the price: it is paid on every calm step."""
    values = list(_VALUES(ledger))
    for name, value in changes.items():
        values[_PLACE[name]] = value
    return Ledger(*values)


def _by_step(snapshot: Snapshot) -> int:
    return snapshot.step

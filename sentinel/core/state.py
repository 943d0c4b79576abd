"""The engine's state: plain immutable values, in two parts with different fates.

`Stats` is what detectors learned from the run: it is kept with each snapshot and comes back
with the weights. `Ledger` is what was done to the run (budgets, cooldowns, the LR cut, incidents,
snapshots, people's orders): a rollback never rewinds it, or a crash loop could refill a budget.

    state = State()                       a run's first state
    wire.codec.encode_state(state)        its canonical bytes; decode_state is the inverse

Purity:  values only. Tuples, numbers, strings and nested frozen dataclasses: what msgpack carries
         without loss.
Units:   steps, unless the name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from sentinel.core.advice import AdviceState
from sentinel.core.detectors.grad_norm import NormState
from sentinel.core.detectors.level_shift import ShiftState
from sentinel.core.detectors.spike import SpikeState
from sentinel.core.quick import quick
from sentinel.core.types import IncidentState, Severity, Verdict

# Part of the protocol: a sidecar may decide only for a trainer with the same engine version.
# Raise it with every change that can change a decision or the state's layout.
ENGINE_VERSION = 6


@quick
@dataclass(frozen=True, slots=True)
class Stats:
    """What the detectors learned; rolls back with the weights."""

    spike: SpikeState = SpikeState()
    shift: ShiftState = ShiftState()
    norm: NormState = NormState()
    shape: tuple[int, ...] = ()  # the batch regime the norm baseline belongs to
    shape_age: int = 0  # steps in a row in which another regime was seen
    advice: AdviceState = AdviceState()


@quick
@dataclass(frozen=True, slots=True)
class Snapshot:
    """One restorable state, as the engine knows it.

    Attributes:
        step: taken at the safe point before this step.
        healthy: confirmed; until then a candidate.
        quiet: quiet steps seen since it was taken.
        applied: steps whose update its weights hold.
    """

    step: int
    healthy: bool
    quiet: int = 0
    applied: int = 0


@dataclass(frozen=True, slots=True)
class Incident:
    """Findings grouped in time.

    Attributes:
        key: what it is about: `instability`, `level_shift`, or a flag's name.
        latched: stays firing until a person acknowledges it.
        steps: troubled steps in it.
        actions: (step, action name, rule) of what was done, oldest first, at most 64; a rollback
            that restored nothing is `rollback_failed`. Of more than 64, (step, "left_out", "N")
            stands where N, up to that step, were left out.
    """

    number: int
    key: str
    state: IncidentState
    severity: Severity
    opened: int
    last: int
    summary: str
    fired: int | None = None
    resolved: int | None = None
    steps: int = 0
    latched: bool = False
    layers: tuple[int, ...] = ()
    actions: tuple[tuple[int, str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class RuleMemory:
    """One rule's own past.

    Attributes:
        run: steps in a row in which its condition held (compared with `for`).
        acted: steps at which it acted, within its budget window, oldest first.
    """

    run: int = 0
    acted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LrCut:
    """The learning-rate cut after a rollback, counted in applied steps.

    Attributes:
        factor: what it was cut to; 1.0 when no cut is in force.
        hold: applied steps left at `factor`.
        rewarm: applied steps left on the way back to 1; `rewarm_total` of them in all.
    """

    factor: float = 1.0
    hold: int = 0
    rewarm: int = 0
    rewarm_total: int = 0


@quick
@dataclass(frozen=True, slots=True)
class Counters:
    """Totals since the start of the run; exported as Prometheus counters."""

    steps: int = 0
    skipped: tuple[tuple[str, int], ...] = ()  # (rule, count), sorted by rule
    rollbacks: tuple[tuple[str, int], ...] = ()  # ("rule/outcome", count), sorted
    would: tuple[tuple[str, int], ...] = ()  # ("action/rule", count) while observing
    flags: tuple[tuple[str, int], ...] = ()
    nonfinite: tuple[tuple[str, int], ...] = ()  # by signal
    spike_steps: int = 0
    lost_steps: int = 0  # applied steps undone by rollbacks, plus skipped steps


@quick
@dataclass(frozen=True, slots=True)
class Ledger:
    """What was done; never rewound.

    Attributes:
        spike_count: spike steps of the current incident, whether skipped or not.
        cool_run: cool steps in a row.
        skip_run: skipped steps in a row.
        skips: steps skipped within the skip window, oldest first.
        spike_skips: spike steps skipped in this incident.
        shield: after a rollback without a canary: spike steps are skipped and do not climb.
        quiet_run: quiet steps in a row.
        rollbacks: steps at which a rollback was decided and done, within the budget window.
        last_target: snapshot step of the last rollback, None before the first.
        last_rollback: step of the last rollback, None before the first.
        attempt: 0, then one more with every restore.
        pending_restore: target of a rollback that was decided but not yet restored.
        stopped: the budget is spent: only non-finite and norm skips are still done.
        automation: False while a person has paused it.
        in_weights: steps whose update the present weights hold: attempted minus lost.
        pending_rule: the rule that decided the rollback in `pending_restore`.
        pending_norm: whether the norm rule warms up anew when it is restored.
        pending_shield: whether the shield goes up when it is restored.
        flagged: (flag, layer, step) of the last time each flag was raised.
    """

    attempt: int = 0
    in_weights: int = 0
    spike_count: int = 0
    cool_run: int = 0
    nonfinite_run: int = 0
    skip_run: int = 0
    skips: tuple[int, ...] = ()
    spike_skips: int = 0
    verdict: Verdict = Verdict.NONE
    shield: bool = False
    quiet_run: int = 0
    rollbacks: tuple[int, ...] = ()
    last_target: int | None = None
    last_rollback: int | None = None
    pending_restore: int | None = None
    pending_rule: str = ""
    pending_shield: bool = False
    pending_norm: bool = False
    stopped: bool = False
    automation: bool = True
    lr: LrCut = LrCut()
    manual_lr: float = 1.0
    snapshots: tuple[Snapshot, ...] = ()
    next_snapshot: int = 0
    next_incident: int = 1
    incidents: tuple[Incident, ...] = ()  # open ones, and the newest resolved, oldest first
    rules: tuple[tuple[str, RuleMemory], ...] = ()
    flagged: tuple[tuple[str, int, int], ...] = ()
    commands: tuple[str, ...] = ()  # ids already obeyed, oldest first, bounded
    counters: Counters = Counters()


@quick
@dataclass(frozen=True, slots=True)
class State:
    """Everything the engine knows; `step` is the next step to decide."""

    step: int = 0
    stats: Stats = Stats()
    ledger: Ledger = Ledger()

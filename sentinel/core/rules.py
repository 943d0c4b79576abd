"""The rules: from readings and the ledger to what should be done with this step.

    plan(state, observation, judged, policy) -> Plan
    asks_canary(state, observation, policy) -> bool

How a troubled step is settled, in this order:

1. A person's order.
2. A reason to roll back: non-finite parameters, the 3rd non-finite loss in a row, the 4th spike
   step of an incident. At the last two the canary is heard: is its loss as it was, the data are to
   blame, and nothing is rolled back. After a rollback without a canary the shield is up:
   spike steps are skipped and do not climb the ladder until a quiet stretch has passed.
3. A reason to skip: a non-finite loss or gradient, a norm far above its mean, a spike step.
   Skipping has bounds; at the bound the next rung of the ladder is taken, and where there is none
   the step is let through, unless it would write non-finite values into the weights.
4. A rollback that is wanted but may not be done: in cooldown the step is skipped; without a usable
   snapshot it is skipped, the learning rate cut, a person paged; with the budget spent the engine
   stops acting (only non-finite and norm skips go on) and pages.

Observing, by policy, rule or a person's pause, the same is planned as `would` and not done.

Purity:  no clock, no I/O, no randomness.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sentinel.core.advice import Advised
from sentinel.core.incidents import INSTABILITY, LEVEL_SHIFT, find
from sentinel.core.judge import Judged, judge_loss
from sentinel.core.policy import CanaryMode, Policy, RuleConfig, Rules
from sentinel.core.quick import quick
from sentinel.core.state import Ledger, RuleMemory, State
from sentinel.core.types import (
    Action,
    CanaryAnswer,
    Command,
    CommandKind,
    Finding,
    Mode,
    Observation,
    Outcome,
    Severity,
    Status,
    Verdict,
)

# Rules that a spent budget does not silence: letting these steps through does certain harm.
ALWAYS = frozenset({"nonfinite_params", "nonfinite_loss", "nonfinite_grad", "grad_norm"})
NONFINITE = frozenset({"nonfinite_params", "nonfinite_loss", "nonfinite_grad"})
COMMAND = "command"


@quick
@dataclass(frozen=True, slots=True)
class Plan:
    """What to do with this step, and what it means for the ledger.

    Attributes:
        hot, spike_count, cool_run, nonfinite_run, verdict: the incident's counts after this step.
        troubled: hot, non-finite, or worth skipping.
        fires: the instability incident fires with this step.
        accept_level: the level is accepted and this step let through.
        restart_norm: the norm rule warms up anew after the rollback.
        shield: the shield goes up with the rollback.
        no_target: a rollback was due and no snapshot usable: skip (or let through), cut, page.
        spent: a rollback was due and the budget spent: stop acting, page.
        runs: new `run` counts of rules with a `for`, by rule name.
        flags: findings that are advice only.
        commands: orders not yet obeyed.
    """

    action: Action
    would: Action
    rule: str
    reason: str
    target: int | None
    hot: bool
    spike_count: int
    cool_run: int
    nonfinite_run: int
    verdict: Verdict
    troubled: bool
    quiet: bool
    fires: bool = False
    accept_level: bool = False
    restart_norm: bool = False
    shield: bool = False
    no_target: bool = False
    spent: bool = False
    runs: tuple[tuple[str, int], ...] = ()
    flags: tuple[Finding, ...] = ()
    commands: tuple[Command, ...] = ()
    manual_lr: float = 1.0


def memory(ledger: Ledger, name: str) -> RuleMemory:
    """A rule's past; an unknown rule has none."""
    for key, value in ledger.rules:
        if key == name:
            return value
    return _NO_MEMORY


_NO_MEMORY = RuleMemory()


def pauses(commands: Sequence[Command]) -> bool:
    """These orders leave automation paused, from this very step on."""
    switched = [c.kind for c in commands if c.kind in (CommandKind.PAUSE, CommandKind.RESUME)]
    return bool(switched) and switched[-1] is CommandKind.PAUSE


def scaler_dropped(observation: Observation, outcome: Outcome) -> bool:
    """The gradient scaler left this step out by itself: its gradients overflowed, its loss is fine.

    It finds its scale so, in the first steps and every few thousand after: no fault of the run.
    """
    loss, norm = observation.loss, observation.grad_norm
    return (
        outcome.executed is Action.PROCEED
        and not outcome.applied
        and observation.loss_scale is not None
        and norm is not None
        and not math.isfinite(norm)
        and (loss is None or math.isfinite(loss))
        and observation.params_finite is not False
    )


def asks_canary(state: State, observation: Observation, policy: Policy) -> bool:
    """Whether this step's decision depends on the canary. Cheap on a calm step."""
    ledger, rules = state.ledger, policy.rules
    if policy.canary.mode is CanaryMode.OFF or observation.blind or ledger.stopped:
        return False
    loss = observation.loss
    if loss is not None and not math.isfinite(loss) and rules.nonfinite_loss.mode is not Mode.OFF:
        if observation.params_finite is False and rules.nonfinite_params.mode is not Mode.OFF:
            return False  # no question left
        if _doubts(ledger, ledger.nonfinite_run + 1, rules):
            return True
    if (
        rules.loss_spike.mode is Mode.OFF
        or ledger.verdict is not Verdict.NONE
        or ledger.spike_count + 1 < rules.loss_spike.for_steps
    ):
        return False
    return judge_loss(state.stats, observation, policy)[1].hot


def _doubts(ledger: Ledger, nonfinite_run: int, rules: Rules) -> bool:
    """A long enough row of non-finite losses, and nobody has heard the canary about it.

    What it said of an earlier spike of this incident was said of other weights.
    """
    needed = rules.nonfinite_loss.for_steps
    if ledger.verdict is Verdict.DATA:
        return nonfinite_run == needed
    return nonfinite_run >= needed and ledger.verdict is Verdict.NONE


def plan(state: State, observation: Observation, judged: Judged, policy: Policy) -> Plan:
    """Settle this step; see the module docstring."""
    ledger = state.ledger
    hot = judged.spike.hot
    cool_run = 0 if hot else ledger.cool_run + 1
    ended = cool_run >= policy.rollback.cool
    spike_count = ledger.spike_count + 1 if hot else (0 if ended else ledger.spike_count)
    verdict = Verdict.NONE if ended else ledger.verdict
    nonfinite_run = ledger.nonfinite_run + 1 if "loss" in judged.nonfinite else 0

    runs, flags = _flags(ledger, observation, judged, policy)
    commands = tuple(c for c in observation.commands if c.id not in ledger.commands)
    if pauses(commands):
        ledger = replace(ledger, automation=False)  # it holds for this very step already
    norm_bad = judged.norm.status is Status.SPIKE
    troubled = hot or bool(judged.nonfinite) or norm_bad
    if not troubled and not commands:
        if ledger.rules and memory(ledger, "grad_norm").run:
            runs = (*runs, ("grad_norm", 0))
        incident = find(ledger, INSTABILITY)
        quiet = (
            not observation.blind
            and (observation.loss is not None or observation.grad_norm is not None)
            and (incident is None or observation.step - incident.last >= policy.rollback.cool)
        )
        return Plan(
            Action.PROCEED,
            Action.PROCEED,
            "",
            "",
            None,
            hot,
            spike_count,
            cool_run,
            nonfinite_run,
            verdict,
            troubled,
            quiet,
            runs=runs,
            flags=flags,
            manual_lr=ledger.manual_lr,
        )
    return _settle(
        ledger,
        observation,
        judged,
        policy,
        hot=hot,
        spike_count=spike_count,
        cool_run=cool_run,
        nonfinite_run=nonfinite_run,
        verdict=verdict,
        runs=runs,
        flags=flags,
        commands=commands,
    )


def _settle(
    ledger: Ledger,
    observation: Observation,
    judged: Judged,
    policy: Policy,
    *,
    hot: bool,
    spike_count: int,
    cool_run: int,
    nonfinite_run: int,
    verdict: Verdict,
    runs: tuple[tuple[str, int], ...],
    flags: tuple[Finding, ...],
    commands: tuple[Command, ...],
) -> Plan:
    rules, step = policy.rules, observation.step
    troubled = hot or bool(judged.nonfinite) or judged.norm.status is Status.SPIKE
    manual_lr = ledger.manual_lr
    for command in commands:
        if command.kind is CommandKind.SCALE_LR:
            manual_lr = command.value

    # --- 2. reasons to roll back
    back, back_reason = "", ""
    if "params" in judged.nonfinite and rules.nonfinite_params.mode is not Mode.OFF:
        back, back_reason = "nonfinite_params", "parameters hold non-finite values"
    elif (
        nonfinite_run >= rules.nonfinite_loss.for_steps
        and rules.nonfinite_loss.mode is not Mode.OFF
    ):
        if policy.canary.mode is CanaryMode.ON and _doubts(ledger, nonfinite_run, rules):
            verdict = _hear(observation.canary, policy)
        if verdict is not Verdict.DATA:
            back = "nonfinite_loss"
            back_reason = f"the loss was not finite {nonfinite_run} steps in a row"
            if verdict is Verdict.WEIGHTS:
                back_reason += f"; {_canary_text(observation.canary)}"
    elif hot and spike_count >= rules.loss_spike.for_steps:
        if rules.loss_spike.mode is not Mode.OFF:
            if policy.canary.mode is CanaryMode.ON and verdict is Verdict.NONE:
                verdict = _hear(observation.canary, policy)
            blames_weights = verdict is Verdict.WEIGHTS
            without_canary = verdict in (Verdict.NONE, Verdict.UNAVAILABLE) and not ledger.shield
            if blames_weights or without_canary:
                back = "loss_spike"
                back_reason = f"spike step {spike_count} of this incident: {_spike_text(judged)}"
                if blames_weights:
                    back_reason += f"; {_canary_text(observation.canary)}"

    # --- 3. reasons to skip
    skip, skip_reason, norm_run = _skip(
        ledger, observation, judged, policy, hot, spike_count, verdict
    )
    if verdict is Verdict.DATA and skip in ("nonfinite_loss", "loss_outlier", "loss_spike"):
        skip_reason += "; the canary blames the data"
    if norm_run != memory(ledger, "grad_norm").run:
        runs = (*runs, ("grad_norm", norm_run))
    accept_level = (
        hot
        and verdict is Verdict.DATA
        and ledger.spike_skips >= policy.skip.data
        and not judged.nonfinite
    )
    bound = False
    if skip and not accept_level:
        windowed = sum(1 for s in ledger.skips if s > step - policy.skip.window)
        bound = (
            ledger.skip_run >= policy.skip.in_a_row or windowed >= policy.skip.in_window
        ) and rules.skip_bound.mode is not Mode.OFF
        if bound and verdict is Verdict.DATA:
            accept_level = not judged.nonfinite
        elif bound and not back:
            back = "skip_bound"
            back_reason = (
                f"{ledger.skip_run} steps skipped in a row, {windowed} in the last "
                f"{policy.skip.window}; the last because {skip_reason}"
            )

    # --- 4. what is allowed
    action, rule, reason = Action.PROCEED, "", ""
    target: int | None = None
    shield = restart_norm = no_target = spent = False
    if accept_level:
        verdict = Verdict.ACCEPTED
    elif back:
        allowed, target = _rung(ledger, step, policy, back)
        if allowed == "yes":
            action, rule, reason = Action.ROLLBACK, back, back_reason
            shield = verdict is not Verdict.WEIGHTS
            restart_norm = back == "skip_bound" and skip == "grad_norm"
        elif allowed == "spent":
            spent = True
            if policy.rollback.halt_when_spent:
                action, rule = Action.HALT, back
                reason = f"{back_reason}; {policy.rollback.budget} rollbacks are spent"
        elif allowed == "no target":
            no_target = True
        if action is Action.PROCEED:
            if bound and skip not in NONFINITE:
                accept_level = True  # a rung there is not: let it through, or it never ends
                verdict = Verdict.ACCEPTED
            elif skip and not (spent and skip not in ALWAYS):
                action, rule, reason = Action.SKIP_STEP, skip, skip_reason
                if no_target:
                    rule = back
                    reason = f"{back_reason}; no usable snapshot, so skipped and the rate cut"
            elif no_target:
                action, rule = Action.SKIP_STEP, back
                reason = f"{back_reason}; no usable snapshot, so skipped and the rate cut"
    elif skip:
        action, rule, reason = Action.SKIP_STEP, skip, skip_reason

    mode = _mode(ledger, policy, rule) if rule else Mode.ACT
    would = action
    if mode is not Mode.ACT:
        action = Action.PROCEED

    # --- 1. a person's order goes before all of it
    for command in commands:
        ordered = _ORDERS.get(command.kind)
        if ordered is None or ordered < action:
            continue
        by = f" by {command.issued_by}" if command.issued_by else ""
        if ordered is Action.ROLLBACK:
            chosen = _newest(ledger, command.target)
            if chosen is None:
                continue
            target, shield = chosen, True
        action = would = ordered
        rule, reason = COMMAND, f"ordered{by}: {command.kind.value}"
        accept_level = no_target = spent = False

    fires = would >= Action.ROLLBACK or no_target or spent
    fires = fires or (hot and spike_count >= rules.loss_spike.for_steps)
    fires = fires or (
        nonfinite_run >= rules.nonfinite_loss.for_steps
        and rules.nonfinite_loss.mode is not Mode.OFF
    )
    return Plan(
        action,
        would,
        rule,
        reason,
        target if would is Action.ROLLBACK else None,
        hot,
        spike_count,
        cool_run,
        nonfinite_run,
        verdict,
        troubled,
        quiet=False,
        fires=fires,
        accept_level=accept_level,
        restart_norm=restart_norm,
        shield=shield,
        no_target=no_target,
        spent=spent,
        runs=runs,
        flags=flags,
        commands=commands,
        manual_lr=manual_lr,
    )


_ORDERS = {
    CommandKind.SKIP_NEXT: Action.SKIP_STEP,
    CommandKind.ROLLBACK: Action.ROLLBACK,
    CommandKind.HALT: Action.HALT,
}


def _mode(ledger: Ledger, policy: Policy, rule: str) -> Mode:
    """How this rule is carried out now: the most careful of policy, rule and pause."""
    own: RuleConfig = getattr(policy.rules, rule)
    if policy.mode is Mode.OBSERVE or own.mode is Mode.OBSERVE or not ledger.automation:
        return Mode.OBSERVE
    return own.mode


def _hear(canary: CanaryAnswer | None, policy: Policy) -> Verdict:
    if canary is None:
        return Verdict.UNAVAILABLE
    return Verdict.DATA if _excess(canary) < policy.canary.margin else Verdict.WEIGHTS


def _excess(canary: CanaryAnswer) -> float:
    """ln(loss now / loss recorded); inf when it cannot be told, so that weights are blamed."""
    if not (math.isfinite(canary.now) and math.isfinite(canary.recorded)):
        return math.inf
    if canary.now <= 0 or canary.recorded <= 0:  # not a likelihood: compare plainly
        return canary.now - canary.recorded
    return math.log(canary.now / canary.recorded)


def _skip(
    ledger: Ledger,
    observation: Observation,
    judged: Judged,
    policy: Policy,
    hot: bool,
    spike_count: int,
    verdict: Verdict,
) -> tuple[str, str, int]:
    """The first rule that would skip this step and its reason ("" for none), and the norm's run."""
    rules, step = policy.rules, observation.step
    norm = judged.norm
    norm_run = memory(ledger, "grad_norm").run + 1 if norm.status is Status.SPIKE else 0
    if rules.grad_norm.for_steps == 1:
        norm_run = 0  # nothing to remember
    nonfinite = judged.nonfinite
    if "params" in nonfinite and _permits(rules.nonfinite_params, ledger, "nonfinite_params", step):
        return "nonfinite_params", "parameters hold non-finite values", norm_run
    if "loss" in nonfinite and _permits(rules.nonfinite_loss, ledger, "nonfinite_loss", step):
        return "nonfinite_loss", f"the loss is {observation.loss}", norm_run
    if "grad" in nonfinite and _permits(rules.nonfinite_grad, ledger, "nonfinite_grad", step):
        return "nonfinite_grad", f"the gradient norm is {observation.grad_norm}", norm_run
    if (
        norm.status is Status.SPIKE
        and (rules.grad_norm.for_steps == 1 or norm_run >= rules.grad_norm.for_steps)
        and _permits(rules.grad_norm, ledger, "grad_norm", step)
    ):
        reason = (
            f"the gradient norm {_num(norm.value)} is {norm.score:.1f} times its mean "
            f"{_num(norm.baseline)}"
        )
        return "grad_norm", reason, norm_run
    if not hot or ledger.stopped or verdict is Verdict.ACCEPTED:
        return "", "", norm_run
    if _permits(rules.loss_outlier, ledger, "loss_outlier", step):
        name = "loss_outlier"
    elif ledger.shield or verdict in (Verdict.DATA, Verdict.WEIGHTS):
        name = "loss_spike"  # waiting for the ladder; skipping is part of that rule
    else:
        return "", "", norm_run
    return name, f"spike step {spike_count}: {_spike_text(judged)}", norm_run


def _permits(rule: RuleConfig, ledger: Ledger, name: str, step: int) -> bool:
    """Whether a skip rule may act: on, not in its cooldown, within its own budget.

    The cooldown of rules that also climb the ladder is the ladder's: it never stops their skips.
    """
    if rule.mode is Mode.OFF:
        return False
    if name in _LADDER or (rule.cooldown == 0 and rule.budget == 0):
        return True
    acted = memory(ledger, name).acted
    if acted and step - acted[-1] <= rule.cooldown:
        return False
    recent = sum(1 for s in acted if s > step - rule.budget_window)
    return rule.budget == 0 or recent < rule.budget


_LADDER = frozenset({"nonfinite_params", "nonfinite_loss", "loss_spike", "skip_bound"})


def _rung(ledger: Ledger, step: int, policy: Policy, name: str) -> tuple[str, int | None]:
    """May the ladder be climbed now: ("yes" | "cooldown" | "spent" | "no target", target)."""
    rule: RuleConfig = getattr(policy.rules, name)
    if ledger.stopped:
        return "stopped", None
    if ledger.last_rollback is not None and step - ledger.last_rollback <= rule.cooldown:
        return "cooldown", None
    recent = sum(1 for s in ledger.rollbacks if s > step - policy.rollback.window)
    if recent >= policy.rollback.budget:
        return "spent", None
    if rule.budget:
        acted = memory(ledger, name).acted
        if sum(1 for s in acted if s > step - rule.budget_window) >= rule.budget:
            return "spent", None
    relapse = (
        ledger.last_rollback is not None
        and ledger.last_target is not None
        and step - ledger.last_rollback < policy.rollback.relapse
    )
    usable = [
        s.step
        for s in ledger.snapshots
        if s.healthy and not (relapse and s.step >= (ledger.last_target or 0))
    ]
    return ("yes", max(usable)) if usable else ("no target", None)


def _newest(ledger: Ledger, target: int | None) -> int | None:
    """The healthy snapshot that a person asked for, or the newest."""
    steps = [s.step for s in ledger.snapshots if s.healthy]
    if target is not None:
        return target if target in steps else None
    return max(steps, default=None)


# ---------------------------------------------------------------- flags: advice, never an action


def _flags(
    ledger: Ledger, observation: Observation, judged: Judged, policy: Policy
) -> tuple[tuple[tuple[str, int], ...], tuple[Finding, ...]]:
    if not (
        judged.hot_logits
        or judged.odd_updates
        or judged.band
        or judged.shift.shifted
        or judged.advice.raised
        or ledger.flagged
        or ledger.rules
    ):
        return (), ()
    rules, step = policy.rules, observation.step
    runs: list[tuple[str, int]] = []
    flags: list[Finding] = []
    if judged.hot_logits and rules.attention_logit.mode is not Mode.OFF:
        if fresh := _fresh(ledger, "attention_logit", judged.hot_logits, step, rules):
            flags.append(
                Finding(
                    "attention_logit",
                    rules.attention_logit.severity,
                    f"max attention logit above {policy.attention_logit.threshold:g} in "
                    f"{len(fresh)} layer(s): add QK-Norm, or lower the initial variance",
                    None,
                    fresh,
                )
            )
    if "layer_update_ratio" in observation.columns and rules.update_ratio.mode is not Mode.OFF:
        run = memory(ledger, "update_ratio").run + 1 if judged.odd_updates else 0
        if run != memory(ledger, "update_ratio").run:
            runs.append(("update_ratio", run))
        if run >= rules.update_ratio.for_steps and (
            fresh := _fresh(ledger, "update_ratio", judged.odd_updates, step, rules)
        ):
            flags.append(
                Finding(
                    "update_ratio",
                    rules.update_ratio.severity,
                    f"update-to-weight ratio out of band in {len(fresh)} layer(s): look at their "
                    "scale and learning rate",
                    None,
                    fresh,
                )
            )
    if rules.norm_band.mode is not Mode.OFF:
        past = memory(ledger, "norm_band").run
        run = min(past + 1, rules.norm_band.for_steps) if judged.band else 0
        if run != past:
            runs.append(("norm_band", run))
        if (
            judged.band
            and run >= rules.norm_band.for_steps
            and _fresh(ledger, "norm_band", (-1,), step, rules)
        ):
            flags.append(
                Finding(
                    "norm_band",
                    judged.band,
                    f"gradient norm {_num(observation.grad_norm)} outside its healthy band "
                    f"{policy.norm_band.low:g} to {policy.norm_band.high:g}",
                    observation.grad_norm,
                )
            )
    if (
        judged.shift.shifted
        and rules.level_shift.mode is not Mode.OFF
        and find(ledger, LEVEL_SHIFT) is None
    ):
        flags.append(
            Finding(
                "level_shift",
                rules.level_shift.severity,
                f"the loss has settled {judged.shift.drift:.2f} (ln) above its lowest recent level",
                judged.shift.drift,
            )
        )
    if judged.advice.judged:
        _advise(ledger, judged.advice, step, rules, runs, flags)
    return tuple(runs), tuple(flags)


def _advise(
    ledger: Ledger,
    advised: Advised,
    step: int,
    rules: Rules,
    runs: list[tuple[str, int]],
    flags: list[Finding],
) -> None:
    """What was raised long enough becomes a finding; what was judged and not raised starts anew."""
    held = {raised.key for raised in advised.raised}
    runs += [
        (name, 0)
        for name, past in ledger.rules
        if past.run and name in advised.judged and name not in held
    ]
    for raised in advised.raised:
        rule: RuleConfig = getattr(rules, raised.key)
        if rule.mode is Mode.OFF:
            continue
        run = 0
        if rule.for_steps > 1:  # else there is nothing to remember
            past = memory(ledger, raised.key).run
            run = min(past + raised.steps, rule.for_steps)
            if run != past:
                runs.append((raised.key, run))
        if rule.for_steps > max(run, 1):
            continue
        if fresh := _fresh(ledger, raised.key, raised.layers or (-1,), step, rules):
            layers = fresh if raised.layers else ()
            flags.append(Finding(raised.key, rule.severity, raised.summary, raised.value, layers))


def _fresh(
    ledger: Ledger, flag: str, layers: tuple[int, ...], step: int, rules: Rules
) -> tuple[int, ...]:
    """The layers not flagged within the rule's cooldown."""
    cooldown: int = getattr(rules, flag).cooldown
    known = {
        layer for key, layer, at in ledger.flagged if key == flag and step - at < max(cooldown, 1)
    }
    return tuple(layer for layer in layers if layer not in known)


# ---------------------------------------------------------------- words


def _num(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"


def _spike_text(judged: Judged) -> str:
    reading = judged.spike
    if reading.level >= 3:
        what = "loss" if "loss" in judged.nonfinite else "gradient norm"
        return f"the {what} is not finite"
    if reading.baseline is None:
        return "the loss is far above"
    return f"the loss is {reading.score:.1f} std above the expected {reading.baseline:.4g}"


def _canary_text(canary: CanaryAnswer | None) -> str:
    if canary is None:
        return "its weights verdict stands"
    return (
        f"the canary of step {canary.step} went from {canary.recorded:.4g} to {canary.now:.4g}: "
        "the weights are to blame"
    )


def severity_of(policy: Policy, rule: str) -> Severity:
    """A rule's severity; a person's order is informational."""
    own: RuleConfig | None = getattr(policy.rules, rule, None)
    return Severity.INFO if own is None else own.severity

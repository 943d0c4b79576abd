"""The list: what is broken, where, and what the break means.

MUTANTS["cooldown ignored"] -> Mutant(file, old, new)

`old` stands exactly once in `file`. A break that changes nothing that anybody could see is no use
here; each of these would be a bug that costs somebody a run.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One replacement in one file under sentinel/core."""

    file: str
    old: str
    new: str


MUTANTS: dict[str, Mutant] = {
    # -- engine: what is restored, kept and counted
    "an overflow of the scaler's is a fault": Mutant(
        "engine.py", "dropped = scaler_dropped(observation, outcome)", "dropped = False"
    ),
    "an overflow talks down what is worse": Mutant(
        "engine.py", "if old is None or old.severity is Severity.INFO:", "if True:"
    ),
    "a bad loss is left to the scaler": Mutant(
        "rules.py", "and (loss is None or math.isfinite(loss))\n", "\n"
    ),
    "the step that brings a pause looks guarded": Mutant(
        "engine.py",
        "if planned.spent or (planned.commands",
        "if planned.spent and (planned.commands",
    ),
    "a rollback leaves the statistics": Mutant(
        "engine.py", "stats = event.stats\n", "stats = state.stats\n"
    ),
    "a rollback is no new attempt": Mutant(
        "engine.py", "attempt=ledger.attempt + 1,", "attempt=ledger.attempt,"
    ),
    "snapshots of the abandoned way are kept": Mutant(
        "engine.py",
        "snapshots=tuple(s for s in ledger.snapshots if s.step <= event.target),",
        "snapshots=ledger.snapshots,",
    ),
    "the cut has no floor": Mutant("engine.py", "max(lr.floor, lr.cut**n)", "lr.cut**n"),
    "the second cut is like the first": Mutant(
        "engine.py", "max(lr.floor, lr.cut**n)", "max(lr.floor, lr.cut)"
    ),
    "the rate jumps back": Mutant(
        "engine.py",
        "return cut.factor + (1.0 - cut.factor) * k / (cut.rewarm_total + 1)",
        "return 1.0",
    ),
    "skipped steps use the cut up": Mutant(
        "engine.py",
        "elif outcome.applied and ledger.lr.factor < 1.0:",
        "elif ledger.lr.factor < 1.0:",
    ),
    "a failed restore cuts nothing": Mutant(
        "engine.py", "lr=_cut(ledger, policy),", "lr=ledger.lr,"
    ),
    "a candidate is healthy a step late": Mutant(
        "engine.py", "s.quiet + 1 >= need", "s.quiet >= need"
    ),
    "an incident keeps its candidates": Mutant(
        "engine.py", "if planned.fires or back:", "if back:"
    ),
    "nothing well before the newest is kept": Mutant("engine.py", "kept.add(well_before)", "pass"),
    "snapshot 0 must prove itself": Mutant(
        "engine.py",
        "first = not ledger.snapshots and ledger.counters.steps == 0",
        "first = False",
    ),
    "snapshots are taken in the middle of trouble": Mutant(
        "engine.py",
        "planned.quiet and _snapshot_due(ledger, observation.step + 1),",
        "_snapshot_due(ledger, observation.step + 1),",
    ),
    "norms of spike steps enter the mean": Mutant(
        "engine.py", "and not planned.hot\n", "and True\n"
    ),
    "norms that are spikes enter the mean": Mutant(
        "engine.py", "and judged.norm.status is not Status.SPIKE\n", "and True\n"
    ),
    "rollbacks are not counted": Mutant(
        "engine.py", "rollbacks = (*rollbacks, step)", "rollbacks = rollbacks"
    ),
    "the last rollback is forgotten": Mutant(
        "engine.py",
        "last_rollback=step if rung else ledger.last_rollback,",
        "last_rollback=ledger.last_rollback,",
    ),
    "no shield after a rollback": Mutant(
        "engine.py", "shield=ledger.pending_shield,", "shield=False,"
    ),
    "the shield never comes down": Mutant(
        "engine.py",
        "shield=ledger.shield and quiet_run < policy.rollback.quiet,",
        "shield=ledger.shield,",
    ),
    "observing forgets what it would have done": Mutant(
        "engine.py",
        "effective = planned.would if observing else executed",
        "effective = executed",
    ),
    "orders are not remembered": Mutant(
        "engine.py",
        "ids = (*ledger.commands, *(c.id for c in planned.commands))",
        "ids = ledger.commands",
    ),
    "steps may come in any order": Mutant(
        "engine.py", "if observation.step != state.step:", "if False:"
    ),
    # -- rules: what is decided
    "the rollback comes a step late": Mutant(
        "rules.py",
        "elif hot and spike_count >= rules.loss_spike.for_steps:",
        "elif hot and spike_count > rules.loss_spike.for_steps:",
    ),
    "the canary is heard the wrong way round": Mutant(
        "rules.py",
        "_excess(canary) < policy.canary.margin",
        "_excess(canary) > policy.canary.margin",
    ),
    "a canary that is nan blames the data": Mutant("rules.py", "return math.inf", "return 0.0"),
    "the cooldown is ignored": Mutant(
        "rules.py", "step - ledger.last_rollback <= rule.cooldown:", "step < 0:"
    ),
    "one rollback more than the budget": Mutant(
        "rules.py", "if recent >= policy.rollback.budget:", "if recent > policy.rollback.budget:"
    ),
    "a relapse goes to the same snapshot": Mutant(
        "rules.py", "s.step >= (ledger.last_target or 0)", "s.step > (ledger.last_target or 0)"
    ),
    "candidates are rolled back to": Mutant(
        "rules.py", "if s.healthy and not (relapse", "if not (relapse"
    ),
    "no bound on skips in a row": Mutant(
        "rules.py", "ledger.skip_run >= policy.skip.in_a_row or windowed", "False or windowed"
    ),
    "bad data is skipped for ever": Mutant(
        "rules.py", "and ledger.spike_skips >= policy.skip.data", "and False"
    ),
    "a spent budget still skips outliers": Mutant(
        "rules.py",
        "if not hot or ledger.stopped or verdict is Verdict.ACCEPTED:",
        "if not hot or verdict is Verdict.ACCEPTED:",
    ),
    "one cool step ends an incident": Mutant(
        "rules.py", "ended = cool_run >= policy.rollback.cool", "ended = cool_run >= 1"
    ),
    "a paused engine acts": Mutant(
        "rules.py",
        "own.mode is Mode.OBSERVE or not ledger.automation:",
        "own.mode is Mode.OBSERVE:",
    ),
    "orders are obeyed again": Mutant("rules.py", "if c.id not in ledger.commands", "if True"),
    "non-finite losses need not be in a row": Mutant(
        "rules.py",
        'ledger.nonfinite_run + 1 if "loss" in judged.nonfinite else 0',
        'ledger.nonfinite_run + ("loss" in judged.nonfinite)',
    ),
    # -- judge and detectors: what is seen
    "a new batch shape keeps the baseline": Mutant("judge.py", "age >= REGIME_STEPS", "False"),
    "a blind step is judged": Mutant(
        "judge.py",
        "() if blind else nonfinite.judge(observation),",
        "nonfinite.judge(observation),",
    ),
    "ten times is twenty times": Mutant(
        "detectors/grad_norm.py", "ratio > config.factor", "ratio > 2 * config.factor"
    ),
    "a falling baseline is armed": Mutant(
        "detectors/grad_norm.py",
        "if len(norms) < config.warmup or not state.flat:",
        "if len(norms) < config.warmup:",
    ),
    "a norm that is nan is a number": Mutant(
        "detectors/grad_norm.py", "if not norm < math.inf:", "if norm == math.inf:"
    ),
    "the mean is since the start": Mutant(
        "detectors/grad_norm.py",
        "norms = norms[len(norms) - config.window + 1 :]",
        "norms = norms[:]",
    ),
    "an infinite norm is finite": Mutant(
        "detectors/nonfinite.py",
        "norm_bad = norm is not None and not math.isfinite(norm)",
        "norm_bad = norm is not None and math.isnan(norm)",
    ),
    "any rise is a spike": Mutant(
        "detectors/spike.py", "z > config.z_hot and r > config.r_hot", "z > config.z_hot"
    ),
    "a spike is over too early": Mutant(
        "detectors/spike.py",
        "state.hot and z > config.z_stay and r > config.r_stay",
        "False",
    ),
    "a new level is never accepted": Mutant(
        "detectors/spike.py", "accepted = age >= config.accept_after", "accepted = False"
    ),
    "two lone outliers in a row are lone": Mutant(
        "detectors/spike.py", "if state.clean == 0 or state.recurred:", "if False:"
    ),
    "an outlier widens the spread of norms": Mutant(
        "detectors/spike.py", "log_norm = centre + config.z_grad * spread", "pass"
    ),
    "any drift is a shift": Mutant(
        "detectors/level_shift.py",
        "shifted = drift > max(config.rise, config.z * spread, _both_sides(low, config))",
        "shifted = drift > 0.0",
    ),
    "an objective that rises towards zero has drifted": Mutant(
        "detectors/level_shift.py", "return -2.0 * from_plain(low, config.loss_floor)", "return 0.0"
    ),
    "a loss about zero has a logarithm": Mutant(
        "detectors/spike.py", "signed = lowest < to_log(0.0, floor)", "signed = False"
    ),
    "a falling loss is expected below what it can be": Mutant(
        "detectors/spike.py",
        "predicted = max(m2 + slope * (n - h) / 2, lowest)",
        "predicted = m2 + slope * (n - h) / 2",
    ),
    "a wiggle is a rise": Mutant("detectors/norm_trend.py", "newer > max(", "newer > 0 * max("),
    "a slow divergence is hot for ever": Mutant(
        "detectors/level_shift.py", "if away >= config.accept_after:", "if False:"
    ),
    "a logit that is nan is low": Mutant(
        "detectors/attention_logit.py",
        "~(column <= config.threshold)",
        "column > config.threshold",
    ),
    "laggards are not seen": Mutant(
        "detectors/update_ratio.py", "lower = middle / config.laggard", "lower = 0.0"
    ),
    "the healthy band ends at 1": Mutant(
        "detectors/norm_band.py", "if norm > config.high:", "if norm > config.low:"
    ),
    # -- incidents
    "a latched incident closes by itself": Mutant(
        "incidents.py", "if old is None or (old.latched and not acknowledged):", "if old is None:"
    ),
    "an incident grows milder": Mutant(
        "incidents.py",
        "severity=max(old.severity, severity, key=_ORDER.__getitem__),",
        "severity=severity,",
    ),
    # -- advice, and the canary for losses that are no numbers
    "nan inputs cost a rollback": Mutant(
        "rules.py", "        if verdict is not Verdict.DATA:\n", "        if True:\n"
    ),
    "nan losses are settled by an older verdict": Mutant(
        "rules.py", "return nonfinite_run == needed", "return False"
    ),
    "nan inputs use the bounds up": Mutant(
        "engine.py",
        'moot = "loss" in nonfinite and planned.verdict is Verdict.DATA',
        "moot = False",
    ),
    "advice need not last": Mutant(
        "rules.py", "if past.run and name in advised.judged and name not in held", "if False"
    ),
    "an old culprit is blamed": Mutant(
        "advice.py", "observation.step - layers.out_at <= LINGERS", "True"
    ),
    "layers that are back stay flagged": Mutant("advice.py", 'return ("layer_band",)', "return ()"),
    "a rare sample is taken for a return": Mutant(
        "advice.py", " or any(b.first for b in layers.bands)", ""
    ),
    "advice is given on a blind step": Mutant(
        "advice.py", "    if observation.blind:\n", "    if False:\n"
    ),
    "a layer that is nan is inside its band": Mutant(
        "detectors/layer_band.py", "inside = column <= limit", "inside = ~(column > limit)"
    ),
    "a layer's new level is never its own": Mutant(
        "detectors/layer_band.py", "state.out_for >= config.patience", "False"
    ),
    "a scaler that finds its level collapses": Mutant(
        "detectors/loss_scale.py", "if seen <= config.settle:", "if False:"
    ),
    "a slow pace is usual at once": Mutant(
        "detectors/throughput.py", "if not known or ratio >= 1.0 - config.drop:", "if True:"
    ),
    "one block's gain is not asked": Mutant(
        "detectors/depth.py", "max(product, worst) >= config.gain", "product >= config.gain"
    ),
    "mixing that is nan is well": Mutant(
        "detectors/depth.py", "not value < config.mixing", "value >= config.mixing"
    ),
    "any growth is a forgotten zero_grad": Mutant(
        "detectors/stale_grads.py", "if falls <= FALLS:", "if falls <= n:"
    ),
}

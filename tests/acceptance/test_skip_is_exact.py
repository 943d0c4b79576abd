"""A skipped step leaves no trace: not in a weight, not in a moment, not in the end of the run.

Every class of torch.optim that steps on the CPU, in every variant it offers, with and without
accumulation and a gradient scaler, with a fault at the first and at a middle step. The oracle is a
loop written by hand that computes the faulty batch and throws it away (oracle.by_hand).

Seen red: with the gradients zeroed instead of taken away (momentum and decay move), left in place,
or optimizer state made by a held step kept (LBFGS, fused); with scaler.update() not watched; and
with mode="observe" (the negative controls below stay in the suite).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sentinel.core.types import Action, Protection
from tests.acceptance.oracle import (
    Job,
    JobSpec,
    OptimizerCase,
    Step,
    by_hand,
    classes,
    gain_for,
    optimizer_cases,
    regression,
    with_gain,
    with_nan,
)
from tests.acceptance.watched import (
    actions,
    decisions,
    drawn,
    job_session,
    policy,
    skipped,
    train_job,
)

pytestmark = [pytest.mark.torch, pytest.mark.slow]

WARMUP, WINDOW, STEPS = 8, 10, 16
SMALL = policy(
    f"""
    [grad_norm]
    warmup = {WARMUP}
    window = {WINDOW}
    flatness = 4.0
    """
)
CASES = {case.name: case for case in optimizer_cases()}
CELLS = [
    pytest.param(
        case, accumulation, scaler, id=f"{name}-acc{accumulation}-{'scaler' if scaler else 'plain'}"
    )
    for name, case in CASES.items()
    for accumulation in (1, 4)
    for scaler in (False, True)
    if not (scaler and case.closure)  # torch itself refuses a closure under a scaler
]


def test_every_optimizer_class_of_this_torch_is_in_the_matrix() -> None:
    assert {case.cls for case in CASES.values()} == set(classes())
    offered = {case.name for case in CASES.values()}
    assert {"AdamW-fused", "AdamW-foreach", "AdamW-for-loop", "LBFGS-only"} <= offered


@pytest.mark.parametrize(("case", "accumulation", "scaler"), CELLS)
@pytest.mark.parametrize("where", ["first", "middle"])
def test_a_step_with_one_nan_micro_batch_never_happened(
    case: OptimizerCase, accumulation: int, scaler: bool, where: str, tmp_path: Path
) -> None:
    spec = JobSpec(case, accumulation, scaler, seed=11)
    dice = drawn(f"{case.name} nan {where}", spec.seed)
    at = 0 if where == "first" else dice.randrange(4, 12)
    data = regression(spec, STEPS)
    data[at] = with_nan(data[at], dice.randrange(accumulation))

    oracle = Job(spec)
    by_hand(oracle, data, never_apply={at})
    job = Job(spec)
    session = job_session(job, SMALL, tmp_path)
    trail = train_job(job, data)
    session.detach()

    assert [t for t, held in enumerate(trail.held) if held] == [at]
    assert job.everything() == oracle.everything()
    assert sum(skipped(session).values()) == 1, skipped(session)
    (step, (_, rule, reason)), *more = actions(session).items()
    assert not more
    assert step == at
    assert rule in ("nonfinite_grad", "nonfinite_loss")
    assert "nan" in reason
    counters = session.state.ledger.counters
    assert counters.steps == STEPS
    assert dict(counters.nonfinite).get("grad") == 1


@pytest.mark.parametrize(("case", "accumulation", "scaler"), CELLS)
@pytest.mark.parametrize("where", ["first armed", "middle"])
def test_a_step_with_a_finite_gradient_of_20_times_the_mean_never_happened(
    case: OptimizerCase, accumulation: int, scaler: bool, where: str, tmp_path: Path
) -> None:
    spec = JobSpec(case, accumulation, scaler, seed=12)
    dice = drawn(f"{case.name} 20x {where}", spec.seed)
    at = WARMUP if where == "first armed" else dice.randrange(WARMUP + 2, STEPS - 2)
    data = regression(spec, STEPS)
    data[at] = with_gain(data[at], gain_for(spec, data, at, 20.0, WINDOW))

    oracle = Job(spec)
    by_hand(oracle, data, never_apply={at})
    job = Job(spec)
    session = job_session(job, SMALL, tmp_path)
    trail = train_job(job, data)
    session.detach()

    assert [t for t, held in enumerate(trail.held) if held] == [at]
    assert job.everything() == oracle.everything()
    assert skipped(session) == {"grad_norm": 1}
    (step, (executed, rule, reason)), *more = actions(session).items()
    assert not more
    assert (step, executed, rule) == (at, Action.SKIP_STEP, "grad_norm")
    assert "20.0 times" in reason


# ---- where the line is --------------------------------------------------------

SOME = [CASES[name] for name in ("AdamW-foreach", "SGD-fused", "LBFGS-only", "SparseAdam-only")]


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
@pytest.mark.parametrize(("ratio", "is_skipped"), [(9.9, False), (10.1, True)])
def test_ten_times_the_mean_is_the_line(
    case: OptimizerCase, ratio: float, is_skipped: bool, tmp_path: Path
) -> None:
    spec = JobSpec(case, accumulation=4, seed=13)
    at = drawn(f"{case.name} {ratio}", spec.seed).randrange(WARMUP, STEPS - 2)
    data = regression(spec, STEPS)
    data[at] = with_gain(data[at], gain_for(spec, data, at, ratio, WINDOW))
    oracle = Job(spec)
    by_hand(oracle, data, never_apply={at} if is_skipped else ())
    job = Job(spec)
    session = job_session(job, SMALL, tmp_path)
    train_job(job, data)
    session.detach()
    assert job.everything() == oracle.everything()
    assert skipped(session) == ({"grad_norm": 1} if is_skipped else {})


@pytest.mark.parametrize(("at", "is_skipped"), [(63, False), (64, True)])
def test_the_default_policy_is_armed_after_64_accepted_norms_and_says_warming_until_then(
    at: int, is_skipped: bool, tmp_path: Path
) -> None:
    spec = JobSpec(CASES["SGD-foreach"], seed=14)
    data = regression(spec, 70)
    drawn("arming", spec.seed)
    data[at] = with_gain(data[at], gain_for(spec, data, at, 20.0, 128))
    oracle = Job(spec)
    by_hand(oracle, data, never_apply={at} if is_skipped else ())
    job = Job(spec)
    session = job_session(job, policy(""), tmp_path)
    said: dict[int, Protection] = {}

    def note(t: int) -> None:
        status = session.status()
        said[t] = status.protection
        if t == 10:
            assert "warming" in str(status)

    train_job(job, data, each=note)
    session.detach()
    assert job.everything() == oracle.everything()
    assert skipped(session) == ({"grad_norm": 1} if is_skipped else {})
    assert said[10] is Protection.WARMING
    assert said[40] is Protection.WARMING


def test_before_the_rule_is_armed_neither_9_nor_20_times_is_skipped(tmp_path: Path) -> None:
    spec = JobSpec(CASES["AdamW-foreach"], seed=15)
    data = regression(spec, STEPS)
    for at, ratio in ((4, 9.9), (6, 20.0)):
        data[at] = with_gain(data[at], gain_for(spec, data, at, ratio, WINDOW))
    oracle = Job(spec)
    by_hand(oracle, data)
    job = Job(spec)
    session = job_session(job, SMALL, tmp_path)
    train_job(job, data)
    session.detach()
    assert job.everything() == oracle.everything()
    assert skipped(session) == {}


def test_a_finite_loss_with_a_nan_gradient_is_skipped_though_the_loop_clips(tmp_path: Path) -> None:
    """Clipping by a nan norm would spread the nan into every gradient."""
    spec = JobSpec(CASES["AdamW-foreach"], seed=16)
    at = drawn("nan gradient, finite loss", spec.seed).randrange(3, 12)
    data = regression(spec, STEPS)

    def run(job: Job, never: set[int]) -> None:
        for t, step in enumerate(data):
            job.optimizer.zero_grad()
            job.backward(step[0])
            if t == at:
                next(job.model.parameters()).grad.view(-1)[2] = float("nan")  # type: ignore[union-attr]
            torch.nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
            if t not in never:
                job.optimizer.step()
            job.scheduler.step()

    oracle = Job(spec)
    run(oracle, {at})
    job = Job(spec)
    session = job_session(job, SMALL, tmp_path)
    run(job, set())
    session.detach()
    assert job.everything() == oracle.everything()
    assert skipped(session) == {"nonfinite_grad": 1}


@pytest.mark.parametrize("scaler", [False, True], ids=["plain", "scaler"])
@pytest.mark.parametrize("name", ["AdamW-foreach", "AdamW-fused", "SGD-for-loop"])
def test_the_norm_is_judged_before_the_loop_clips_it(
    name: str, scaler: bool, tmp_path: Path
) -> None:
    spec = JobSpec(CASES[name], accumulation=4, scaler=scaler, seed=21)
    at = drawn(f"clip {name} {scaler}", spec.seed).randrange(WARMUP, STEPS - 2)
    data = regression(spec, STEPS)

    def run(job: Job, data: list[Step], never: set[int]) -> list[float]:
        norms = []
        for t, step in enumerate(data):
            job.optimizer.zero_grad()
            for micro in step:
                job.backward(micro)
            if job.scaler is not None:
                job.scaler.unscale_(job.optimizer)
            norms.append(float(torch.nn.utils.clip_grad_norm_(job.model.parameters(), 0.2)))
            if job.scaler is None:
                if t not in never:
                    job.optimizer.step()
            else:
                if t not in never:
                    job.scaler.step(job.optimizer)
                job.scaler.update()
            job.scheduler.step()
        return norms

    norms = run(Job(spec), data[: at + 1], {at})
    recent = norms[:at][-WINDOW:]
    data[at] = with_gain(data[at], 10.1 * (sum(recent) / len(recent)) / norms[at])
    oracle = Job(spec)
    run(oracle, data, {at})
    job = Job(spec)
    session = job_session(job, SMALL, tmp_path)
    run(job, data, set())
    session.detach()
    assert job.everything() == oracle.everything()
    assert skipped(session) == {"grad_norm": 1}
    assert "10.1 times" in actions(session)[at][2]


@pytest.mark.parametrize("name", ["AdamW-fused", "AdamW-foreach", "SGD-fused"])
def test_an_overflow_that_the_scaler_drops_by_itself_is_noted_once_and_changes_nothing(
    name: str, tmp_path: Path
) -> None:
    """A finite loss whose scaled gradients overflow: the scaler at work, not a fault."""
    spec = JobSpec(CASES[name], scaler=True, seed=19)
    at = drawn(f"overflow {name}", spec.seed).randrange(3, 12)
    data = regression(spec, STEPS)

    def run(job: Job) -> None:
        for t, step in enumerate(data):
            job.optimizer.zero_grad()
            job.backward(step[0])
            if t == at:
                next(job.model.parameters()).grad.view(-1)[1] = float("inf")  # type: ignore[union-attr]
            job.scaler.step(job.optimizer)  # type: ignore[union-attr]
            job.scaler.update()  # type: ignore[union-attr]
            job.scheduler.step()

    alone = Job(spec)
    run(alone)
    job = Job(spec)
    session = job_session(job, SMALL, tmp_path)
    run(job)
    session.detach()
    assert job.everything() == alone.everything()
    counters = session.state.ledger.counters
    assert counters.steps == STEPS
    assert dict(counters.nonfinite) == {"scaler": 1}
    assert sum(skipped(session).values()) <= 1
    (step, (_, rule, reason)), *more = actions(session).items()
    assert (step, rule, more) == (at, "nonfinite_grad", [])
    assert "inf" in reason


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_dropped_through_the_model_are_no_part_of_the_next_step(
    to_none: bool, tmp_path: Path
) -> None:
    """A loop that throws a micro-batch away by model.zero_grad() and begins anew."""
    spec = JobSpec(CASES["AdamW-foreach"], seed=20)
    at = 11
    data = regression(spec, STEPS)
    data[at] = with_gain(data[at], gain_for(spec, data, at, 20.0, WINDOW))

    def run(job: Job, never: set[int]) -> None:
        for t, step in enumerate(data):
            job.model.zero_grad(set_to_none=to_none)
            job.backward(data[(t + 3) % STEPS][0])  # a micro-batch that is thrown away again
            job.model.zero_grad(set_to_none=to_none)
            job.backward(step[0])
            if t not in never:
                job.optimizer.step()
            job.scheduler.step()

    oracle = Job(spec)
    run(oracle, {at})
    job = Job(spec)
    session = job_session(job, SMALL, tmp_path)
    run(job, set())
    session.detach()
    assert job.everything() == oracle.everything()
    assert skipped(session) == {"grad_norm": 1}
    losses = [o.loss for o, _, _ in decisions(session)]
    plain = Job(spec)
    if to_none:  # gradients set to zero in place still look like an open accumulation
        assert losses[0] == pytest.approx(float(plain.loss(data[0][0]).detach()))


# ---- negative controls: the oracle can tell -------------------------------------


@pytest.mark.parametrize("fault", ["nan", "20x"])
def test_negative_control_an_observing_session_fails_the_oracle(fault: str, tmp_path: Path) -> None:
    spec = JobSpec(CASES["AdamW-foreach"], accumulation=4, seed=17)
    at = 10
    data = regression(spec, STEPS)
    data[at] = (
        with_nan(data[at], 2)
        if fault == "nan"
        else with_gain(data[at], gain_for(spec, data, at, 20.0, WINDOW))
    )
    oracle = Job(spec)
    by_hand(oracle, data, never_apply={at})
    job = Job(spec)
    session = job_session(job, SMALL, tmp_path, mode="observe")
    trail = train_job(job, data)
    session.detach()
    assert not trail.held[at]
    assert job.everything() != oracle.everything()
    assert skipped(session) == {}
    assert sum(dict(session.state.ledger.counters.would).values()) >= 1


@pytest.mark.parametrize("name", ["AdamW-foreach", "SGD-foreach"])
def test_negative_control_zeroed_gradients_are_not_a_skip(name: str) -> None:
    spec = JobSpec(CASES[name], seed=18)
    data = regression(spec, STEPS)
    oracle = Job(spec)
    by_hand(oracle, data, never_apply={9})
    job = Job(spec)
    for t, step in enumerate(data):
        job.optimizer.zero_grad()
        job.backward(step[0])
        if t == 9:
            job.optimizer.zero_grad(set_to_none=False)
        job.optimizer.step()
        job.scheduler.step()
    assert job.everything() != oracle.everything()

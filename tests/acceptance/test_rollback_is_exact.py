"""Damaged weights: three spike steps are skipped, at the fourth everything comes back, bit by bit.

The test copies the run itself before each step; after the rollback the run must equal its own copy
of the newest healthy step, and from there a loop written by hand (oracle.rescued) that goes on with
the next unseen batches at the stated learning rates, while every schedule follows attempted steps.

Seen red: without the optimizer's state, the buffers, the scaler or extra_state in the copy; with a
copy that aliases live tensors; with the schedule's group entries restored too; with the restore
done at once, in an evaluation pass, or before all optimizers have stepped; with a cut that ends one
step early, or none; with candidates taken for healthy, the ladder's "strictly older" ignored, and
no shield after a rollback; with parameters never checked; and with mode="observe".
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sentinel_hooks
from sentinel.core.types import Action, IncidentState, Protection
from tests.acceptance.oracle import (
    Job,
    JobSpec,
    OptimizerCase,
    Plan,
    World,
    by_hand,
    digest,
    optimizer_cases,
    regression,
    rescued,
)
from tests.acceptance.watched import (
    Copies,
    actions,
    drawn,
    job_session,
    policy,
    rollbacks,
    skipped,
    train_job,
    train_world,
    world_session,
)
from tests.acceptance.worlds import SCHEDULES, batch, batches, damage_weights, world
from tests.support import not_applicable

pytestmark = [pytest.mark.torch, pytest.mark.slow]

EVERY, CONFIRM, HOLD, REWARM = 10, 4, 3, 8


def rules(
    *, rollback: str = "quiet = 6", every: int = EVERY, grad_norm: str = "off", more: str = ""
) -> Any:
    """A short policy; the norm rule, which would skip some of these steps too, is off."""
    return policy(
        f"""
        [spike]
        window = 20
        warmup = 16
        [snapshots]
        ram_every = {every}
        confirm = {CONFIRM}
        [lr]
        hold = {HOLD}
        rewarm = {REWARM}
        again_hold = {HOLD}
        again_rewarm = {REWARM}
        [rollback]
        {rollback}
        {more}
        [canary]
        mode = "off"
        [rules.grad_norm]
        mode = "{grad_norm}"
        """
    )


def newest_healthy(at: int, every: int = EVERY) -> int:
    """The newest multiple of `every` with at least CONFIRM quiet steps behind it before `at`."""
    return max((s for s in range(0, at, every) if s + CONFIRM <= at), default=0)


def rates(applied_from: int, factor: float = 0.5) -> dict[int, float]:
    """The stated learning rates when every step from `applied_from` on is applied."""
    table = {applied_from + i: factor for i in range(HOLD)}
    for k in range(1, REWARM + 1):
        table[applied_from + HOLD + k - 1] = factor + (1.0 - factor) * k / (REWARM + 1)
    return table


def by_the_book(fault: int, target: int) -> Plan:
    return Plan(
        skip=frozenset(range(fault, fault + 4)),
        restore={fault + 4: target},
        rate=rates(fault + 4),
        damage={fault: damage_weights},
    )


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batchnorm-dropout": {"norm": True, "dropout": 0.1},
    "scaler-batchnorm": {"scaler": True, "norm": True},
    "two-optimizers": {"optimizers": 2},
    "two-optimizers-scaler": {"optimizers": 2, "scaler": True},
}
CELLS = [
    *((schedule, "scaler-batchnorm", 1) for schedule in sorted(SCHEDULES)),
    *(("onecycle", variant, 4) for variant in sorted(VARIANTS)),
    ("sequential", "two-optimizers", 1),
    ("cosine", "batchnorm-dropout", 4),
]


@pytest.mark.parametrize(("schedule", "variant", "accumulation"), CELLS)
def test_the_fourth_spike_step_brings_back_the_newest_healthy_copy_and_goes_on_by_the_book(
    schedule: str, variant: str, accumulation: int, tmp_path: Path
) -> None:
    seed, steps = 21, 64
    fault = drawn(f"rollback {schedule} {variant} {accumulation}", seed).randrange(34, 46)
    target = newest_healthy(fault)
    made = {"steps": steps, "schedule": schedule, **VARIANTS[variant]}
    data = batches(seed, steps, accumulation=accumulation, rows=512 // accumulation)

    oracle = world(seed, **made)
    torch.manual_seed(seed)
    by_the_book_losses = rescued(oracle, data, by_the_book(fault, target))

    run = world(seed, **made)
    torch.manual_seed(seed)
    session = world_session(run, rules(), tmp_path)
    copies = Copies(run)
    trail = train_world(run, data, damage={fault: damage_weights}, between=copies.next)
    session.detach()

    # three are skipped and nothing is restored; nor is it at the fourth, before the safe point
    assert [t for t, held in enumerate(trail.held) if held] == list(range(fault, fault + 4))
    assert len({trail.before[t] for t in range(fault, fault + 4)}) == 1
    assert trail.after[fault + 3] == trail.before[fault]
    # then all of it is back
    assert copies.at[fault + 4].digest() == copies.at[target].digest()
    assert copies.at[fault].digest() != copies.at[target].digest()
    # and goes on as the hand-written loop, to the last bit of rates and schedules
    assert trail.losses == by_the_book_losses
    assert run.everything() == oracle.everything()
    # every batch was consumed once and in order
    assert trail.consumed == [t for t in range(steps) for _ in range(accumulation)]
    done = actions(session)
    assert [(t, done[t][0]) for t in sorted(done)] == [
        (fault, Action.SKIP_STEP),
        (fault + 1, Action.SKIP_STEP),
        (fault + 2, Action.SKIP_STEP),
        (fault + 3, Action.ROLLBACK),
    ]
    assert done[fault + 3][1] == "loss_spike"
    assert "spike step 4" in done[fault + 3][2]
    assert rollbacks(session) == {"loss_spike/restored": 1}
    assert session.state.ledger.last_target == target
    assert session.state.ledger.counters.lost_steps == (fault - target) + 4


@pytest.mark.parametrize("offset", [0, 1, CONFIRM - 1, CONFIRM])
def test_a_copy_without_enough_quiet_steps_behind_it_is_not_used(
    offset: int, tmp_path: Path
) -> None:
    """Also the one taken one step before the spike, and one that holds the damage itself."""
    seed, steps = 22, 56
    fault = 40 + offset
    target = newest_healthy(fault)
    assert target == (40 if offset == CONFIRM else 30)
    data = batches(seed, steps)
    oracle = world(seed, steps=steps)
    rescued(oracle, data, by_the_book(fault, target))
    run = world(seed, steps=steps)
    session = world_session(run, rules(), tmp_path)
    copies = Copies(run)
    train_world(run, data, damage={fault: damage_weights}, between=copies.next)
    session.detach()
    assert copies.at[fault + 4].digest() == copies.at[target].digest()
    assert run.everything() == oracle.everything()


def test_with_only_the_snapshot_of_the_start_that_one_is_used(tmp_path: Path) -> None:
    seed, steps = 23, 56
    fault = drawn("snapshot 0", seed).randrange(30, 40)
    data = batches(seed, steps)
    oracle = world(seed, steps=steps)
    rescued(oracle, data, by_the_book(fault, 0))
    run = world(seed, steps=steps)
    session = world_session(run, rules(every=1000), tmp_path)
    copies = Copies(run)
    train_world(run, data, damage={fault: damage_weights}, between=copies.next)
    session.detach()
    assert copies.at[fault + 4].digest() == copies.at[0].digest()
    assert session.state.ledger.last_target == 0
    assert run.everything() == oracle.everything()


@pytest.mark.parametrize("cooldown", [16, 0])
def test_a_block_of_20_garbage_batches_takes_one_rollback_and_no_further_rung(
    cooldown: int, tmp_path: Path
) -> None:
    """Not because of the cooldown: after the rollback spike steps do not climb."""
    seed, steps = 24, 80
    fault = drawn("garbage, canary off", seed).randrange(36, 44)
    target = newest_healthy(fault)
    bad = range(fault, fault + 20)
    data = batches(seed, steps, garbage=bad)
    oracle = world(seed, steps=steps)
    rescued(
        oracle,
        data,
        Plan(skip=frozenset(bad), restore={fault + 4: target}, rate=rates(fault + 20)),
    )
    run = world(seed, steps=steps)
    limits = rules(more=f"[rules.loss_spike]\ncooldown = {cooldown}")
    session = world_session(run, limits, tmp_path)
    trail = train_world(run, data)
    session.detach()
    assert rollbacks(session) == {"loss_spike/restored": 1}
    assert [t for t, held in enumerate(trail.held) if held] == list(bad)
    assert sum(skipped(session).values()) == 19
    assert run.everything() == oracle.everything()


def test_each_relapse_after_a_quiet_stretch_goes_further_back_until_the_budget_is_spent(
    tmp_path: Path,
) -> None:
    """The whole ladder: 30, 10, 0, and then the acting stops and says so.

    At the second fault 50 and 60 are healthy, but belong to the way that has just relapsed; 20 has
    made room for them.
    """
    seed, steps = 25, 220
    drawn("ladder", seed)
    faults = {36: 30, 72: 10, 108: 0}
    last = 170
    data = batches(seed, steps)
    damage: dict[int, Callable[[World], None]] = dict.fromkeys([*faults, last], damage_weights)
    rate: dict[int, float] = {}
    for n, fault in enumerate(faults, start=1):
        rate |= rates(fault + 4, factor=max(0.1, 0.5**n))
    oracle = world(seed, steps=steps)
    rescued(
        oracle,
        data,
        Plan(
            skip=frozenset(
                [t for f in faults for t in range(f, f + 4)] + list(range(last, last + 3))
            ),
            restore={fault + 4: target for fault, target in faults.items()},
            rate=rate,
            damage=damage,
        ),
    )
    run = world(seed, steps=steps)
    session = world_session(run, rules(), tmp_path)
    copies = Copies(run)
    said: dict[int, Any] = {}

    def between(t: int, moved: World) -> None:
        copies.next(t, moved)
        said[t] = session.status()

    trail = train_world(run, data, damage=damage, between=between)
    session.detach()
    for fault, target in faults.items():
        assert copies.at[fault + 4].digest() == copies.at[target].digest(), (fault, target)
    done = actions(session)
    assert [t for t, act in sorted(done.items()) if act[0] is Action.ROLLBACK] == [
        fault + 3 for fault in faults
    ]
    # the fourth time: three skips, then it stands back
    assert [trail.held[last + i] for i in range(6)] == [True, True, True, False, False, False]
    assert said[last - 1].protection is not Protection.OFF
    assert said[last + 3].protection is Protection.OFF
    assert "spent" in str(said[last + 3]) or "stopped" in str(said[last + 3])
    spent = [i for i in session.state.ledger.incidents if "spent" in i.summary]
    assert spent or session.state.ledger.stopped
    assert run.everything() == oracle.everything()


def test_a_spent_budget_stops_the_acting_and_says_so(tmp_path: Path) -> None:
    seed, steps = 26, 110
    drawn("budget 1", seed)
    data = batches(seed, steps)
    damage: dict[int, Callable[[World], None]] = {36: damage_weights, 80: damage_weights}
    run = world(seed, steps=steps)
    session = world_session(run, rules(rollback="quiet = 6\nbudget = 1"), tmp_path)
    at_end: list[Any] = []
    trail = train_world(
        run, data, damage=damage, between=lambda t, _: at_end.append(session.status())
    )
    session.detach()
    assert rollbacks(session) == {"loss_spike/restored": 1}
    assert trail.held[80:83] == [True] * 3
    assert not any(trail.held[83:])
    assert session.state.ledger.stopped
    assert at_end[-1].protection is Protection.OFF
    firing = [i for i in session.state.ledger.incidents if i.state is not IncidentState.RESOLVED]
    summaries = " ".join(i.summary for i in session.state.ledger.incidents)
    assert "spent" in summaries, firing
    assert "spent" in str(at_end[83]) or "stopped" in str(at_end[83])


def test_with_the_budget_spent_the_norm_rule_still_skips_but_not_for_ever(tmp_path: Path) -> None:
    seed, steps = 26, 140
    drawn("budget 0", seed)
    run = world(seed, steps=steps)
    limits = rules(rollback="budget = 0", grad_norm="act", more="[grad_norm]\nwarmup = 16")
    session = world_session(run, limits, tmp_path)
    trail = train_world(run, batches(seed, steps), damage={50: damage_weights})
    session.detach()
    held = "".join("-" if h else "." for h in trail.held)
    assert "-" in held
    assert "-" * 21 not in held
    assert "-" not in held[-50:]
    assert rollbacks(session) == {}


def test_three_spike_steps_and_no_fourth_restore_nothing(tmp_path: Path) -> None:
    seed, steps = 31, 60
    fault = drawn("three only", seed).randrange(34, 44)
    bad = range(fault, fault + 3)
    data = batches(seed, steps, garbage=bad)
    oracle = world(seed, steps=steps)
    rescued(oracle, data, Plan(skip=frozenset(bad)))
    run = world(seed, steps=steps)
    session = world_session(run, rules(), tmp_path)
    train_world(run, data)
    session.detach()
    assert rollbacks(session) == {}
    assert skipped(session) == {"loss_outlier": 3}
    assert run.everything() == oracle.everything()


def test_one_snapshot_can_be_restored_twice(tmp_path: Path) -> None:
    """A restore that aliased its copy would bring the damage back the second time."""
    seed, steps = 32, 70
    drawn("twice", seed)
    damage: dict[int, Callable[[World], None]] = {36: damage_weights, 48: damage_weights}
    data = batches(seed, steps)
    oracle = world(seed, steps=steps, norm=True)
    plan = Plan(
        skip=frozenset([*range(36, 40), *range(48, 52)]),
        restore={40: 30, 52: 30},
        rate=rates(40) | rates(52, factor=0.25),
        damage=damage,
    )
    rescued(oracle, data, plan)
    run = world(seed, steps=steps, norm=True)
    limits = rules(rollback="quiet = 6\nrelapse = 0", more="[rules.loss_spike]\ncooldown = 4")
    session = world_session(run, limits, tmp_path)
    copies = Copies(run)
    train_world(run, data, damage=damage, between=copies.next)
    session.detach()
    assert rollbacks(session) == {"loss_spike/restored": 2}
    assert copies.at[40].digest() == copies.at[30].digest() == copies.at[52].digest()
    assert run.everything() == oracle.everything()


def _poison(moved: World) -> None:
    with torch.no_grad():
        next(moved.model.parameters()).view(-1)[3] = float("nan")


def test_nan_in_the_weights_rolls_back_at_once_even_while_warming_up(tmp_path: Path) -> None:
    seed, steps = 33, 40
    fault = drawn("nan weights", seed).randrange(5, 12)
    data = batches(seed, steps)
    plan = Plan(
        skip=frozenset({fault}),
        restore={fault + 1: newest_healthy(fault)},
        rate=rates(fault + 1),
        damage={fault: _poison},
    )
    oracle = world(seed, steps=steps, scaler=True)
    rescued(oracle, data, plan)
    run = world(seed, steps=steps, scaler=True)
    session = world_session(run, rules(), tmp_path)
    train_world(run, data, damage={fault: _poison})
    session.detach()
    assert rollbacks(session) == {"nonfinite_params/restored": 1}
    assert all(bool(torch.isfinite(p).all()) for p in run.model.parameters())
    assert run.everything() == oracle.everything()


def _overload(moved: World) -> None:
    with torch.no_grad():
        moved.model.head.weight.mul_(float("inf"))  # type: ignore[union-attr,operator]
        moved.model.head.weight.nan_to_num_(posinf=3e38, neginf=-3e38)  # type: ignore[union-attr,operator]


@pytest.mark.parametrize("scaler", [False, True], ids=["plain", "scaler"])
def test_the_third_nonfinite_loss_in_a_row_rolls_back(scaler: bool, tmp_path: Path) -> None:
    """Finite weights, too large to compute with; under a scaler step() is never even called."""
    seed, steps = 35, 50
    fault = drawn("overload", seed).randrange(26, 36)
    damage: dict[int, Callable[[World], None]] = {fault: _overload}
    data = batches(seed, steps)
    plan = Plan(
        skip=frozenset(range(fault, fault + 3)),
        restore={fault + 3: newest_healthy(fault)},
        rate=rates(fault + 3),
        damage=damage,
    )
    oracle = world(seed, steps=steps, scaler=scaler, schedule="cosine")
    rescued(oracle, data, plan)
    run = world(seed, steps=steps, scaler=scaler, schedule="cosine")
    session = world_session(run, rules(), tmp_path)
    train_world(run, data, damage=damage)
    session.detach()
    assert rollbacks(session) == {"nonfinite_loss/restored": 1}
    assert run.everything() == oracle.everything()


@pytest.mark.parametrize("attached", ["wrapper", "inside"])
def test_a_compiled_model_is_brought_back_too(attached: str, tmp_path: Path) -> None:
    """Attached to the wrapper, at the safe point; to the inside, right after the step."""
    seed, steps = 36, 60
    fault = drawn(f"compiled {attached}", seed).randrange(34, 44)
    made = {"steps": steps, "schedule": "onecycle", "norm": True, "dropout": 0.1}
    data = batches(seed, steps)
    ends = []
    for watched in (False, True):
        torch.compiler.reset()
        run = world(seed, **made)
        compiled = torch.compile(run.model, backend="aot_eager")
        run.forward = compiled
        torch.manual_seed(seed)
        if not watched:
            rescued(run, data, by_the_book(fault, newest_healthy(fault)))
        else:
            session = sentinel_hooks.attach(
                model=compiled if attached == "wrapper" else run.model,
                optimizer=run.optimizers[0],
                policy=rules(),
                sidecar=None,
                run_dir=tmp_path,
            )
            train_world(run, data, damage={fault: damage_weights})
            session.detach()
            assert rollbacks(session) == {"loss_spike/restored": 1}
        ends.append(run.everything())
    assert ends[0] == ends[1]


def test_a_learning_rate_that_is_a_tensor_stays_that_tensor(tmp_path: Path) -> None:
    seed, steps = 37, 60
    fault = drawn("tensor rate", seed).randrange(34, 44)
    data = batches(seed, steps)
    runs = []
    for _ in range(2):
        run = world(seed, steps=steps)
        optimizer = torch.optim.AdamW(run.model.parameters(), lr=torch.tensor(0.02), fused=True)
        run.optimizers[:] = [optimizer]
        run.schedulers[:] = [SCHEDULES["lambda"](optimizer, steps)]
        runs.append(run)
    oracle, run = runs
    rescued(oracle, data, by_the_book(fault, newest_healthy(fault)))
    rate = run.optimizers[0].param_groups[0]["lr"]
    session = world_session(run, rules(), tmp_path)
    train_world(run, data, damage={fault: damage_weights})
    session.detach()
    assert rollbacks(session) == {"loss_spike/restored": 1}
    assert run.optimizers[0].param_groups[0]["lr"] is rate
    assert run.everything() == oracle.everything()


def test_extra_state_comes_back_with_the_weights(tmp_path: Path) -> None:
    seed, steps = 38, 60
    fault = drawn("extra state", seed).randrange(34, 44)
    run = world(seed, steps=steps)
    average = torch.optim.swa_utils.AveragedModel(
        run.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    session = world_session(run, rules(), tmp_path, extra_state=[average])
    seen: dict[int, str] = {}

    def look(module: torch.nn.Module, _: Any) -> None:
        seen[now[0]] = digest(average.state_dict())

    now = [0]
    handle = run.model.register_forward_pre_hook(look)

    def between(t: int, moved: World) -> None:
        average.update_parameters(moved.model)
        now[0] = t + 1

    train_world(run, batches(seed, steps), damage={fault: damage_weights}, between=between)
    handle.remove()
    session.detach()
    assert seen[fault + 4] == seen[newest_healthy(fault)]
    assert seen[fault + 3] != seen[newest_healthy(fault)]


# ---- every optimizer class comes back ------------------------------------------------

EVERY_CASE = optimizer_cases()


@pytest.mark.parametrize("scaler", [False, True], ids=["plain", "scaler"])
@pytest.mark.parametrize("case", EVERY_CASE, ids=lambda case: case.name)
def test_every_optimizer_class_is_brought_back_and_goes_on(
    case: OptimizerCase, scaler: bool, tmp_path: Path
) -> None:
    if scaler and case.closure:
        not_applicable("torch refuses a closure under a scaler")
    spec = JobSpec(case, scaler=scaler, seed=34)
    fault, target, steps = 26, 20, 36
    drawn(f"restore {case.name}", spec.seed)
    data = regression(spec, steps)

    oracle = Job(spec)
    by_hand(oracle, data[:target])
    for _ in range(target, fault + 4):  # schedules follow attempted steps
        oracle.scheduler.step()
    rate = rates(fault + 4)
    for t in range(fault + 4, steps):
        lr = [group["lr"] for group in oracle.optimizer.param_groups]
        by_hand(oracle, [data[t]], factor=rate.get(t, 1.0))
        assert [group["lr"] for group in oracle.optimizer.param_groups] != lr

    job = Job(spec)
    session = job_session(job, rules(), tmp_path)

    def between(t: int) -> None:
        if t + 1 == fault:
            with torch.no_grad():
                for p in job.model.parameters():
                    p.mul_(30.0)

    trail = train_job(job, data, each=between)
    session.detach()
    assert [t for t, held in enumerate(trail.held) if held] == list(range(fault, fault + 4))
    assert rollbacks(session) == {"loss_spike/restored": 1}
    assert session.state.ledger.last_target == target
    assert job.everything() == oracle.everything()


# ---- only at a safe point ---------------------------------------------------------


def test_an_evaluation_pass_after_the_fourth_spike_step_sees_no_restore(tmp_path: Path) -> None:
    seed, steps = 27, 60
    fault = drawn("evaluation", seed).randrange(34, 44)
    data = batches(seed, steps)
    held_out = batch(seed, 10_000)
    made = {"steps": steps, "schedule": "cosine", "norm": True, "dropout": 0.1}

    def evaluate(moved: World) -> float:
        moved.model.eval()
        with torch.no_grad():
            value = float(moved.loss(moved.model, held_out))
        moved.model.train()
        return value

    run = world(seed, **made)
    torch.manual_seed(seed)
    session = world_session(run, rules(), tmp_path)
    copies = Copies(run)
    around: dict[int, tuple[str, float, str]] = {}

    def between(t: int, moved: World) -> None:
        before = moved.fragile()
        value = evaluate(moved)
        around[t] = (before, value, moved.fragile())
        copies.next(t, moved)

    train_world(run, data, damage={fault: damage_weights}, between=between)
    session.detach()
    for t in (fault + 2, fault + 3):
        assert around[t][0] == around[t][2]
        assert around[t][1] > 3.0  # the damaged weights were evaluated
    assert around[fault + 4][1] < 3.0
    assert copies.at[fault + 4].digest() == copies.at[newest_healthy(fault)].digest()
    oracle = world(seed, **made)
    torch.manual_seed(seed)
    rescued(oracle, data, by_the_book(fault, newest_healthy(fault)))
    assert run.everything() == oracle.everything()


@pytest.mark.parametrize("open_gradients", [False, True], ids=["alternating", "open-accumulation"])
def test_between_two_optimizers_of_one_step_nothing_is_restored(
    open_gradients: bool, tmp_path: Path
) -> None:
    """Two training forwards a step, an optimizer after each, as adversarial training does.

    With open_gradients the second optimizer's gradients of the first half are still being
    accumulated while the second forward runs.
    """
    seed, steps = 28, 60
    fault = drawn(f"two optimizers, {open_gradients}", seed).randrange(34, 44)
    target = newest_healthy(fault)
    run = world(seed, steps=steps, optimizers=2, lr=0.01)
    session = world_session(run, rules(), tmp_path)
    first, second = run.optimizers
    at_forward: dict[tuple[int, int], str] = {}
    now = (0, 0)

    def look(module: torch.nn.Module, _: Any) -> None:
        at_forward[now] = run.restorable().digest()

    handle = run.model.register_forward_pre_hook(look)
    moved: dict[tuple[int, int], bool] = {}
    for t in range(steps):
        if t == fault:
            damage_weights(run)
        first.zero_grad()
        second.zero_grad()
        now = (t, 0)
        run.backward(batch(seed, t, micro=0), 1.0)
        before = run.fragile()
        first.step()
        moved[now] = run.fragile() != before
        first.zero_grad()
        if not open_gradients:
            second.zero_grad()
        now = (t, 1)
        run.backward(batch(seed, t, micro=1), 1.0)
        before = run.fragile()
        second.step()
        moved[now] = run.fragile() != before
        for scheduler in run.schedulers:
            scheduler.step()
    handle.remove()
    session.detach()
    assert session.state.ledger.counters.steps == steps
    assert [k for k, did in sorted(moved.items()) if not did] == [
        (t, half) for t in range(fault, fault + 4) for half in (0, 1)
    ]
    assert at_forward[fault + 3, 1] == at_forward[fault, 0]  # damaged still, both halves
    assert at_forward[fault + 4, 0] == at_forward[target, 0]
    assert rollbacks(session) == {"loss_spike/restored": 1}


def test_an_optimizer_that_never_steps_does_not_starve_the_restore(tmp_path: Path) -> None:
    seed, steps = 29, 60
    fault = drawn("idle optimizer", seed).randrange(34, 44)
    target = newest_healthy(fault)
    run = world(seed, steps=steps)
    idle = torch.optim.SGD([run.model.head.bias], lr=0.1)  # type: ignore[union-attr,list-item]
    run.optimizers[0].param_groups[0]["params"].pop()
    optimizers = [*run.optimizers, idle]
    session = sentinel_hooks.attach(
        model=run.model, optimizer=optimizers, policy=rules(), sidecar=None, run_dir=tmp_path
    )
    copies = Copies(run)
    train_world(run, batches(seed, steps), damage={fault: damage_weights}, between=copies.next)
    session.detach()
    wanted = copies.at[target].digest()
    assert copies.at[fault + 4].digest() == wanted
    assert copies.at[fault + 3].digest() != wanted


# ---- negative control ---------------------------------------------------------------


def test_negative_control_an_observing_session_fails_the_oracle(tmp_path: Path) -> None:
    seed, steps, fault = 30, 60, 40
    data = batches(seed, steps)
    oracle = world(seed, steps=steps)
    rescued(oracle, data, by_the_book(fault, newest_healthy(fault)))
    run = world(seed, steps=steps)
    session = world_session(run, rules(), tmp_path, mode="observe")
    trail = train_world(run, data, damage={fault: damage_weights})
    session.detach()
    assert not any(trail.held)
    assert run.everything() != oracle.everything()
    assert rollbacks(session) == {}
    would = dict(session.state.ledger.counters.would)
    assert would["rollback/loss_spike"] == 1

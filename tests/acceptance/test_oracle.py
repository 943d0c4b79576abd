"""The oracles agree among themselves before anything of ours is measured by them."""

from __future__ import annotations

import pytest
import torch

from tests.acceptance.oracle import (
    Job,
    JobSpec,
    Plan,
    by_hand,
    digest,
    gain_for,
    grad_norm,
    optimizer_cases,
    regression,
    rescued,
    with_gain,
)
from tests.acceptance.worlds import SCHEDULES, batches, damage_weights, world

pytestmark = pytest.mark.torch

CASES = {case.name: case for case in optimizer_cases()}


def test_the_digest_sees_one_bit_a_sign_of_zero_and_a_type() -> None:
    a = torch.zeros(3)
    assert digest(a) == digest(a.clone())
    assert digest(a) != digest(-a)
    assert digest(a) != digest(a.double())
    assert digest({"a": 1}) != digest({"a": 1.0})
    assert digest([a, a]) != digest([torch.cat([a, a])])


SOME = ["AdamW-fused", "LBFGS-only", "SparseAdam-only", "Muon-only"]  # Muon: newer torch only


@pytest.mark.parametrize("name", [name for name in SOME if name in CASES])
def test_a_thrown_away_batch_equals_a_loop_that_never_saw_it(name: str) -> None:
    spec = JobSpec(CASES[name], accumulation=4, seed=5)
    data = regression(spec, 12)
    thrown = Job(spec)
    by_hand(thrown, data, never_apply={7})

    never = Job(spec)
    by_hand(never, data[:7])
    never.scheduler.step()
    for step in data[8:]:
        by_hand(never, [step])
    assert thrown.everything() == never.everything()


def test_the_gain_makes_exactly_the_asked_multiple_of_the_mean() -> None:
    spec = JobSpec(CASES["AdamW-foreach"], accumulation=4, scaler=True, seed=6)
    data = regression(spec, 14)
    gain = gain_for(spec, data, at=12, ratio=20.0, window=10)
    plain = Job(spec)
    values = [float(plain.loss(m).detach()) for m in data[12]]
    data[12] = with_gain(data[12], gain)
    assert [float(plain.loss(m).detach()) for m in data[12]] == pytest.approx(values)
    norms = by_hand(Job(spec), data, never_apply={12})
    assert norms[12] == pytest.approx(20.0 * sum(norms[2:12]) / 10, rel=1e-5)


def test_the_norm_is_the_root_of_all_squares() -> None:
    model = torch.nn.Linear(2, 1)
    model.weight.grad = torch.tensor([[3.0, 0.0]])
    model.bias.grad = torch.tensor([4.0])
    assert grad_norm(model) == 5.0
    assert grad_norm(model, scale=2.0) == 2.5


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_a_restore_by_hand_equals_a_run_that_begins_at_the_copy(schedule: str) -> None:
    """Weights of step 10 at step 20, rates of step 20: written once more, without `rescued`."""
    data = batches(3, 30)
    made = {"steps": 30, "schedule": schedule, "optimizers": 2, "scaler": True, "norm": True}
    rescue = world(3, **made)
    rescued(
        rescue,
        data,
        Plan(skip=frozenset({19}), restore={20: 10}, rate={20: 0.5}, damage={17: damage_weights}),
    )

    first = world(3, **made)
    rescued(first, data[:10], Plan())
    later = world(3, **made)
    for scheduler, optimizer in zip(later.schedulers, later.optimizers, strict=True):
        for t in range(20):
            if t != 19:
                optimizer.step()  # no gradients: only so that the scheduler has seen a step
            scheduler.step()
    first.restorable().put_back(later)
    for t, part in enumerate(data[20:], start=20):
        rescued(later, [part], Plan(rate={0: 0.5} if t == 20 else {}))
    assert later.fragile() == rescue.fragile()
    assert digest(later.model.state_dict()) == digest(rescue.model.state_dict())
    assert later.scaler.state_dict() == rescue.scaler.state_dict()  # type: ignore[union-attr]
    for mine, theirs in zip(later.optimizers, rescue.optimizers, strict=True):
        assert mine.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]


def test_equal_seeds_make_equal_worlds_and_batches() -> None:
    assert world(1, steps=9).everything() == world(1, steps=9).everything()
    assert world(1, steps=9).everything() != world(2, steps=9).everything()
    one, two = batches(1, 3, garbage={2}), batches(1, 3)
    assert torch.equal(one[1][0].y, two[1][0].y)
    assert not torch.equal(one[2][0].y, two[2][0].y)

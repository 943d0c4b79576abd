"""accelerate.Accelerator: attached before or after prepare(), and what its wrappers do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sentinel_hooks
from sentinel_hooks import AttachError
from tests.hooks.adapters.watching import FRAMEWORK_WARNINGS, POLICY, acted, attach, records
from tests.support import require
from tests.support.trainers import Accelerate, Cell, frameworks_present

pytestmark = [pytest.mark.torch, pytest.mark.slow, *FRAMEWORK_WARNINGS]


@pytest.fixture(autouse=True, scope="module")
def _frameworks() -> None:
    require(frameworks_present(), "transformers, lightning and accelerate")


class Early(Accelerate):
    early = True


def test_attached_before_prepare_it_waits_for_the_first_backward(tmp_path: Path) -> None:
    cell = Cell(steps=16, accumulation=2, clip=1.0)
    alone = Early(cell, tmp_path)
    alone.train()
    world = Early(cell, tmp_path)
    session = attach(world, tmp_path / "runs")
    status = session.status()
    assert status.why.startswith("waiting for accelerator.prepare(...) and the first accelerator")
    world.train()
    assert session.status().step == 16
    session.detach()
    assert world.fingerprint() == alone.fingerprint()
    assert [r.observation.loss for r in records(session)] == pytest.approx(world.losses, rel=1e-6)
    assert world.leftovers() == []


def test_attached_before_prepare_the_very_first_step_is_guarded(tmp_path: Path) -> None:
    world = Early(Cell(steps=6, nan_at={0}), tmp_path)
    session = attach(world, tmp_path / "runs")
    world.train()
    session.detach()
    assert acted(session) == [(0, "SKIP_STEP", "nonfinite_grad")]
    assert session.status().healthy == (0,)


def test_attached_after_prepare_it_begins_at_once_and_errors_are_raised_there(
    tmp_path: Path,
) -> None:
    world = Accelerate(Cell(steps=4), tmp_path)
    session = attach(world, tmp_path / "runs")
    assert session.live
    assert "no step seen" in session.status().why
    session.detach()
    other = Accelerate(Cell(steps=4), tmp_path)
    other.trainer._models[:] = [nn.Linear(1, 1)]
    with pytest.raises(AttachError, match="share no parameter"):
        attach(other, tmp_path / "runs")
    assert other.leftovers() == []


def test_what_is_prepared_later_is_a_blind_spot(tmp_path: Path) -> None:
    world = Accelerate(Cell(steps=4), tmp_path)
    session = attach(world, tmp_path / "runs")
    other = nn.Linear(2, 2)
    world.trainer.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
    (spot,) = session.status().blind_spots
    assert "1 optimizers were prepared after sentinel had begun" in str(spot)
    session.detach()


def test_two_prepares_before_the_first_backward_are_both_watched(tmp_path: Path) -> None:
    world = Early(Cell(steps=4), tmp_path)
    accelerator = world.trainer
    session = attach(world, tmp_path / "runs")
    nets = [nn.Linear(2, 1), nn.Linear(2, 1)]
    pairs = [accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1)) for net in nets]
    for _ in range(3):
        for net, optimizer in pairs:
            optimizer.zero_grad()
            accelerator.backward(net(torch.ones(4, 2)).square().mean())
            optimizer.step()
    assert session.status().step == 3
    assert len(session.layers) == 2
    session.detach()


def test_the_wrapped_optimizer_takes_what_it_took_before(tmp_path: Path) -> None:
    """accelerate looks at the signature of the inner zero_grad before it passes set_to_none."""
    world = Accelerate(Cell(steps=4), tmp_path)
    optimizer = world.prepared[1]
    session = attach(world, tmp_path / "runs")
    world.model.head.bias.grad = torch.ones_like(world.model.head.bias)
    optimizer.zero_grad(set_to_none=False)
    assert world.model.head.bias.grad is not None
    assert not world.model.head.bias.grad.any()
    session.detach()


@pytest.mark.parametrize("end", ["free_memory", "clear", "end_training"])
def test_what_ends_a_training_detaches_and_the_next_one_is_watched_again(
    end: str, tmp_path: Path
) -> None:
    world = Accelerate(Cell(steps=4), tmp_path)
    session = attach(world, tmp_path / "runs")
    world.train()
    first = session.run_id
    getattr(world.trainer, end)()
    assert not session.live
    assert session.status().why.startswith("training has ended")
    assert [x for x in world.leftovers() if not x.startswith("accelerator")] == []
    net = nn.Linear(2, 1)
    model, optimizer = world.trainer.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    if end == "end_training":
        world.trainer._models[:], world.trainer._optimizers[:] = [model], [optimizer]
    world.trainer._schedulers.clear()
    world.trainer.backward(model(torch.ones(4, 2)).mean())
    optimizer.step()
    assert session.run_id != first
    assert session.status().step == 1
    session.detach()
    assert world.leftovers() == []


def test_saved_states_are_told_and_a_resumed_process_is_recognised(tmp_path: Path) -> None:
    world = Accelerate(Cell(steps=12), tmp_path)
    session = attach(world, tmp_path / "runs", run_id="r")

    def save(step: int) -> None:
        if step == 7:
            world.trainer.save_state(tmp_path / "state")

    world.before_step = save
    world.train()
    session.detach()
    again = Accelerate(Cell(steps=3), tmp_path)
    again.trainer.load_state(tmp_path / "state")
    session = attach(again, tmp_path / "runs", run_id="r")
    again.train()
    assert "step 7" in session.status().lineage, session.status().lineage
    assert session.status().step == 15, "attempted steps go on counting"
    session.detach()


def test_a_rollback_leaves_the_schedulers_pace_alone(tmp_path: Path) -> None:
    """accelerate's scheduler moves once a process and step: attempted steps, as unattached."""
    alone = Accelerate(Cell(), tmp_path)
    alone.train()
    world = Accelerate(Cell(damage_at=24), tmp_path)
    session = attach(world, tmp_path / "runs")
    world.train()
    session.detach()
    assert session.status().counters.rollbacks
    assert world.schedulers[0].state_dict() == alone.schedulers[0].state_dict()
    assert world.inner.param_groups[0]["lr"] == alone.inner.param_groups[0]["lr"]


def test_an_accelerator_alone_is_told_what_to_do(tmp_path: Path) -> None:
    world = Early(Cell(steps=4), tmp_path)
    session: Any = sentinel_hooks.attach(
        world.trainer, sidecar=None, run_dir=tmp_path / "runs", policy=POLICY
    )
    loss = world.model(**next(iter(world.forever())))["loss"]
    world.trainer.backward(loss)  # nothing was prepared
    assert session.session is None
    assert session.status().why.startswith("waiting for")
    session.detach()


class Scaled(Accelerate):
    """With a GradScaler, as accelerate makes one for fp16 on a GPU (on a CPU it makes none)."""

    early = True

    def build(self) -> None:
        super().build()
        self.trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=8)


@pytest.mark.parametrize("late", [False, True], ids=["before prepare", "after prepare"])
def test_a_scaled_run_is_unharmed_and_its_overflows_are_the_scalers_business(
    late: bool, tmp_path: Path
) -> None:
    cell = Cell(steps=24, accumulation=2, clip=1.0, nan_at={9})
    alone = Scaled(cell, tmp_path)
    alone.train()
    world = Scaled(cell, tmp_path)
    if late:
        world.prepare()
    session = attach(world, tmp_path / "runs")
    world.train()
    session.detach()
    assert world.fingerprint() == alone.fingerprint()
    assert world.trainer.scaler.get_scale() == alone.trainer.scaler.get_scale() != 2.0**10
    found = records(session)
    assert len(found) == 24
    assert acted(session) == [], "the scaler drops that step by itself"
    assert [r.step for r in found if not r.outcome.applied] == [9]
    assert [r.observation.loss for r in found] == pytest.approx(world.losses, rel=1e-6)
    assert world.leftovers() == []


@pytest.mark.parametrize("late", [False, True], ids=["before prepare", "after prepare"])
def test_what_a_model_that_accelerate_has_compiled_does_inside_is_seen(
    late: bool, tmp_path: Path
) -> None:
    """Seen red: the Accelerator keeps the model that it was given, and the loop calls another."""
    world = (Accelerate if late else Early)(Cell(steps=8, compiled="aot_eager"), tmp_path)
    session = attach(world, tmp_path / "runs")
    world.train()
    status = session.status()
    session.detach()
    assert "the forward is seen" in status.self_check
    assert "layer_activation_rms is measured" in status.self_check
    assert status.blind_spots == ()
    assert world.leftovers() == []

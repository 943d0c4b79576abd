"""The Lightning Trainer: validation, checkpoints, several fits, GANs, precision, accumulation."""

from __future__ import annotations

import contextlib
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sentinel_hooks
from tests.hooks.adapters.watching import FRAMEWORK_WARNINGS, POLICY, acted, attach, records
from tests.hooks.worlds import digest
from tests.support import require
from tests.support.trainers import Cell, Lightning, LightningManual, frameworks_present

pytestmark = [pytest.mark.torch, pytest.mark.slow, *FRAMEWORK_WARNINGS]


@pytest.fixture(autouse=True, scope="module")
def _frameworks() -> None:
    require(frameworks_present(), "transformers, lightning and accelerate")


class Checked(Lightning):
    """With validation: a sanity check before training, and in the middle of epochs."""

    def train(self, **options: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.trainer.fit(self.fitted, self.loader(), self.loader(), **options)


def test_sanity_check_and_validation_in_between_change_nothing(tmp_path: Path) -> None:
    cell = Cell(
        steps=30,
        accumulation=2,
        clip=1.0,
        options={"val_check_interval": 8, "num_sanity_val_steps": 2, "limit_val_batches": 2},
    )
    alone = Checked(cell, tmp_path)
    alone.train()
    world = Checked(cell, tmp_path)
    session = attach(world, tmp_path / "runs")
    world.train()
    session.detach()
    assert world.fingerprint() == alone.fingerprint()
    assert len(records(session)) == 30
    assert {k: float(v) for k, v in world.trainer.callback_metrics.items()} == {
        k: float(v) for k, v in alone.trainer.callback_metrics.items()
    }


def test_a_checkpoint_written_after_a_rollback_holds_what_was_restored(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    keep = ModelCheckpoint(
        dirpath=tmp_path / "kept", every_n_train_steps=4, save_top_k=-1, filename="{step}"
    )
    world = Lightning(Cell(damage_at=24, options={"enable_checkpointing": True}), tmp_path)
    world.trainer.callbacks.append(keep)
    session = attach(world, tmp_path / "runs")
    told: list[str] = []
    session.saved = lambda path: told.append(Path(path).name)
    world.train()
    session.detach()
    assert [s for s, action, _ in acted(session) if action == "ROLLBACK"] == [27]
    saved = torch.load(tmp_path / "kept" / "step=28.ckpt", weights_only=False)["state_dict"]
    names = [f"lm.{name}" for name, _ in world.model.named_parameters()]
    assert digest([saved[name] for name in names]) == world.weights[16]
    assert told[:3] == ["step=4.ckpt", "step=8.ckpt", "step=12.ckpt"]
    assert world.leftovers() == []


def test_resuming_from_its_checkpoint_is_the_same_run(tmp_path: Path) -> None:
    cell = Cell(steps=20)
    through = Lightning(cell, tmp_path)
    through.train()

    first = Lightning(Cell(steps=20, options={"max_steps": 10}), tmp_path)
    with attach(first, tmp_path / "runs", run_id="r"):
        first.train()
        first.trainer.save_checkpoint(tmp_path / "ten.ckpt")
    again = Lightning(cell, tmp_path)
    with attach(again, tmp_path / "runs", run_id="r") as session:
        again.train(ckpt_path=tmp_path / "ten.ckpt", weights_only=False)
        status = session.status()
    assert "step 10" in status.lineage, status.lineage
    assert status.step == 20
    assert "sentinel" not in str(torch.load(tmp_path / "ten.ckpt", weights_only=False)["callbacks"])


def test_an_interrupted_fit_leaves_a_trainer_that_fits_again(tmp_path: Path) -> None:
    world = Lightning(Cell(steps=8), tmp_path)
    session = attach(world, tmp_path / "runs")

    def break_at(step: int) -> None:
        if step == 3:
            raise RuntimeError("somebody pulled the plug")

    world.before_step = break_at
    with pytest.raises(RuntimeError, match="pulled the plug"):
        world.train()
    assert not session.live
    assert [x for x in world.leftovers() if not x.startswith("callbacks")] == ["trainer.callbacks"]
    world.before_step = None
    world.train()
    assert session.status().step == 5, "Lightning goes on at its own step 3"
    session.detach()
    assert world.leftovers() == []


def test_fp16_on_a_cpu_is_bfloat16_without_a_scaler_and_is_watched_as_such(tmp_path: Path) -> None:
    cell = Cell(steps=10, options={"precision": "16-mixed"}, nan_at={6})
    world = Lightning(cell, tmp_path)
    session = attach(world, tmp_path / "runs")
    world.train()
    session.detach()
    assert acted(session) == [(6, "SKIP_STEP", "nonfinite_grad")]
    assert all(r.observation.loss_scale is None for r in records(session))
    assert getattr(world.trainer.precision_plugin, "scaler", None) is None


def test_a_short_last_accumulation_is_reported_as_lightning_trains_it(tmp_path: Path) -> None:
    """Lightning divides by accumulate_grad_batches even where fewer came: so does our loss."""
    options = {"max_steps": -1, "max_epochs": 1, "limit_train_batches": 10}
    world = Lightning(Cell(accumulation=4, steps=3, options=options), tmp_path)
    session = attach(world, tmp_path / "runs")
    world.train()
    session.detach()
    heard = [s / n for s, n in world.model.heard]
    by_hand = [sum(heard[:4]) / 4, sum(heard[4:8]) / 4, sum(heard[8:]) / 4]
    assert [r.observation.loss for r in records(session)] == pytest.approx(by_hand, rel=1e-6)


def test_the_canary_asks_training_step_and_leaves_the_users_logs_alone(tmp_path: Path) -> None:
    world = Lightning(Cell(damage_at=24), tmp_path)
    calls: list[bool] = []
    step = world.module.training_step

    def counted(*args: Any) -> Any:
        calls.append(torch.is_grad_enabled())
        return step(*args)

    world.module.training_step = counted
    session = attach(world, tmp_path / "runs")
    status: list[str] = []
    world.before_step = lambda _: status.append(session.status().canary)
    logs: list[Any] = []
    log = world.module.log
    world.module.log = lambda *args, **kwargs: (logs.append(args[1]), log(*args, **kwargs))[1]
    world.train()
    session.detach()
    assert status[20] == "available"
    assert calls.count(False) >= 1, "it was asked"
    assert len(logs) == calls.count(True) == 40
    (rollback,) = [r for r in records(session) if r.outcome.executed.name == "ROLLBACK"]
    assert "the weights are to blame" in rollback.decision.reason


def test_in_manual_optimisation_the_canary_asks_the_loss_function_that_was_given(
    tmp_path: Path,
) -> None:
    world = LightningManual(Cell(damage_at=24), tmp_path)

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        found: Tensor = world.model(**batch)["loss"]
        return found

    session = attach(world, tmp_path / "runs", loss_fn=loss_of)

    def training_step(batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer = world.module.optimizers()
        optimizer.zero_grad()
        world.module.manual_backward(session.loss(batch))
        optimizer.step()

    world.module.training_step = training_step
    status: list[Any] = []
    world.before_step = lambda _: status.append(session.status())
    world.train()
    session.detach()
    assert status[20].canary == "available"
    assert status[20].blind_spots == ()
    (rollback,) = [r for r in records(session) if r.outcome.executed.name == "ROLLBACK"]
    assert "the weights are to blame" in rollback.decision.reason


def test_bad_data_is_skipped_and_good_weights_are_kept(tmp_path: Path) -> None:
    world = Lightning(Cell(garbage_at=range(24, 30)), tmp_path)
    session = attach(world, tmp_path / "runs")
    world.train()
    session.detach()
    actions = acted(session)
    assert {a for _, a, _ in actions} == {"SKIP_STEP"}
    assert [s for s, _, _ in actions] == list(range(24, 30))


# ---------------------------------------------------------------- several optimizers


def gan(world: LightningManual) -> Any:
    import lightning

    class Gan(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(7)
            self.g, self.d = nn.Linear(4, 12), nn.Linear(12, 1)
            self.automatic_optimization = False
            self.poison: dict[int, str] = {}

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            first, second = self.optimizers()
            real = batch["input_ids"].float() / 24
            fake = self.g(torch.randn(len(real), 4))
            self.toggle_optimizer(first)
            first.zero_grad()
            loss = F.softplus(-self.d(real)).mean() + F.softplus(self.d(fake.detach())).mean()
            self.manual_backward(loss)
            self.spoil(batch_idx, "d")
            first.step()
            self.untoggle_optimizer(first)
            self.toggle_optimizer(second)
            second.zero_grad()
            self.manual_backward(F.softplus(-self.d(fake)).mean())
            self.spoil(batch_idx, "g")
            second.step()
            self.untoggle_optimizer(second)

        def spoil(self, step: int, which: str) -> None:
            if self.poison.get(step) == which:
                getattr(self, which).weight.grad.fill_(math.nan)

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (self.d, self.g)]

    return Gan()


class GanWorld(LightningManual):
    def build(self) -> None:
        super().build()
        self.fitted = self.module = gan(self)
        self.model = self.module  # type: ignore[assignment]


def test_a_gan_is_unharmed_and_each_of_its_optimizers_is_guarded(tmp_path: Path) -> None:
    cell = Cell(options={"max_steps": 40})  # Lightning counts both optimizers' steps
    alone = GanWorld(cell, tmp_path)
    alone.train()
    world = GanWorld(cell, tmp_path)
    session = attach(world, tmp_path / "runs")
    world.train()
    session.detach()
    assert world.fingerprint() == alone.fingerprint()
    assert len(records(session)) == 20
    assert all(r.observation.loss is not None for r in records(session))

    broken = GanWorld(cell, tmp_path)
    broken.module.poison = {8: "d", 12: "g"}
    session = attach(broken, tmp_path / "runs")
    broken.train()
    session.detach()
    assert acted(session) == [(8, "SKIP_STEP", "nonfinite_grad")]
    assert session.status().late_skips == 1
    assert all(bool(torch.isfinite(p).all()) for p in broken.module.parameters())


def test_snapshots_of_a_gan_are_taken_between_two_batches(tmp_path: Path) -> None:
    world = GanWorld(Cell(options={"max_steps": 60}), tmp_path)
    session = attach(world, tmp_path / "runs")
    world.train()
    assert session.status().healthy[-1] >= 16
    assert not session.status().internal_errors
    session.detach()


def test_one_callback_object_serves_a_trainer_whose_callbacks_are_made_anew(tmp_path: Path) -> None:
    import lightning

    class Brings(lightning.Callback):  # type: ignore[misc]
        pass

    world = Lightning(Cell(steps=4), tmp_path)
    world.module.configure_callbacks = lambda: [Brings()]
    session = attach(world, tmp_path / "runs")
    world.train()
    assert session.status().step == 4
    ours = [c for c in world.trainer.callbacks if "sentinel" in type(c).__module__]
    assert len(ours) == 1
    session.detach()
    assert world.leftovers() == []


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork"])
def test_a_strategy_that_trains_in_copies_of_the_trainer_is_a_blind_spot(
    strategy: str, tmp_path: Path
) -> None:
    world = Lightning(Cell(options={"strategy": strategy, "devices": 2}), tmp_path)
    session = attach(world, tmp_path / "runs")
    (spot,) = session.status().blind_spots
    assert 'use strategy="ddp"' in str(spot)
    session.detach()


def test_a_policy_that_halts_ends_fit(tmp_path: Path) -> None:
    from sentinel.core.policy import Policy
    from tests.support.trainers import QUICK

    halting = QUICK.replace("[rollback]", "[rollback]\nbudget = 0\nhalt_when_spent = true")
    world = Lightning(Cell(damage_at=24), tmp_path)
    session = attach(world, tmp_path / "runs", run_id="r", policy=Policy.parse(halting, "halting"))
    with pytest.raises(sentinel_hooks.TrainingHalted):
        world.train()
    assert not session.live
    assert [x for x in world.leftovers() if x.startswith("strategy")] == []
    with pytest.raises(sentinel_hooks.StillHalted), contextlib.suppress(SystemExit):
        world.train()
    session.detach()
    assert POLICY is not None


# ---------------------------------------------------------------- odd steps


class Scaled(Lightning):
    """A GradScaler and fp16 autocast on the CPU, as 16-mixed has them on a GPU."""

    def build(self) -> None:
        from lightning.pytorch.plugins import MixedPrecision

        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=8)
        plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
        object.__setattr__(self.cell, "options", {**self.cell.options, "plugins": [plugin]})
        super().build()


def test_a_scaled_run_is_unharmed_and_its_overflows_are_the_scalers_business(
    tmp_path: Path,
) -> None:
    cell = Cell(steps=24, accumulation=2, clip=1.0, nan_at={9})
    alone = Scaled(cell, tmp_path)
    alone.train()
    world = Scaled(cell, tmp_path)
    session = attach(world, tmp_path / "runs")
    world.train()
    session.detach()
    assert world.fingerprint() == alone.fingerprint()
    assert (
        world.trainer.precision_plugin.scaler.get_scale() == 2.0**11
    )  # twice doubled, once halved
    found = records(session)
    assert len(found) == 24
    assert acted(session) == [], "the scaler drops that step by itself"
    assert [r.step for r in found if not r.outcome.applied] == [9]
    assert [r.observation.loss for r in found] == pytest.approx(world.losses, rel=2e-3)
    assert world.leftovers() == []


class Odd(Lightning):
    """training_step returns None at some batches: Lightning leaves backward out."""

    def build(self) -> None:
        super().build()
        step = self.module.training_step

        def training_step(batch: Any, batch_idx: int) -> Any:
            return None if batch_idx in (3, 7) else step(batch, batch_idx)

        self.module.training_step = training_step


def test_batches_without_a_loss_are_no_harm(tmp_path: Path) -> None:
    cell = Cell(steps=14)
    alone = Odd(cell, tmp_path)
    alone.train()
    world = Odd(cell, tmp_path)
    session = attach(world, tmp_path / "runs")
    world.train()
    session.detach()
    assert world.fingerprint() == alone.fingerprint()
    assert acted(session) == []
    assert [r.step for r in records(session) if r.observation.loss is None] == [3, 7]


class Searching(Lightning):
    """LBFGS calls its closure, which is the whole training_step, several times a step."""

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, lr=0.3, max_iter=3, history_size=4)


def test_lbfgs_is_unharmed(tmp_path: Path) -> None:
    cell = Cell(steps=8)
    alone = Searching(cell, tmp_path)
    alone.train()
    world = Searching(cell, tmp_path)
    session = attach(world, tmp_path / "runs")
    world.train()
    session.detach()
    assert world.fingerprint() == alone.fingerprint()
    assert len(records(session)) == 8

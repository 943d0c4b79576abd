"""What holds for every trainer: no harm, one bad batch skipped, damage undone, nothing left.

The runs are real ones of HF, Lightning, accelerate and a plain loop (tests/support/trainers.py,
which imports nothing of ours). Seen red: with HF's safe point left out, with the callback appended
instead of inserted, with a strategy that keeps our method, with checkpoints that are not told, with
a decision for each optimizer, with the closing log of HF not taken for the end.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from sentinel.core.types import Protection
from sentinel_hooks.session import open_sessions
from tests.hooks.adapters.watching import FRAMEWORK_WARNINGS, acted, attach, records
from tests.support import require
from tests.support.trainers import WORLDS, Cell, World, frameworks_present

pytestmark = [pytest.mark.torch, pytest.mark.slow, *FRAMEWORK_WARNINGS]

CELLS = {
    "one micro-batch": Cell(),
    "accumulated, clipped": Cell(accumulation=4, clip=0.5, steps=24),
}


@pytest.fixture(autouse=True, scope="module")
def _frameworks() -> None:
    require(frameworks_present(), "transformers, lightning and accelerate")


def build(name: str, cell: Cell, directory: Path) -> World:
    return WORLDS[name](cell, directory)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("name", WORLDS)
def test_an_attached_run_is_the_unattached_one_and_reports_its_true_losses(
    name: str, cell: str, tmp_path: Path
) -> None:
    alone = build(name, CELLS[cell], tmp_path)
    alone.train()
    world = build(name, CELLS[cell], tmp_path)
    session = attach(world, tmp_path / "runs")
    world.train()
    session.detach()
    assert world.fingerprint() == alone.fingerprint()
    assert acted(session) == []
    seen = [r.observation.loss for r in records(session)]
    assert seen == pytest.approx(world.losses, rel=1e-6)
    assert len(seen) == CELLS[cell].steps
    assert not session.status().internal_errors


@pytest.mark.parametrize("name", WORLDS)
def test_one_nan_gradient_is_skipped_in_its_step_and_counted_once(
    name: str, tmp_path: Path
) -> None:
    cell = Cell(steps=16, nan_at={9}, accumulation=2, clip=1.0)
    world = build(name, cell, tmp_path)
    session = attach(world, tmp_path / "runs")
    world.train()
    session.detach()
    assert acted(session) == [(9, "SKIP_STEP", "nonfinite_grad")]
    assert session.status().counters.skipped == (("nonfinite_grad", 1),)
    assert world.weights[10] == world.weights[9] != world.weights[11]
    unprotected = build(name, cell, tmp_path)
    unprotected.train()
    assert unprotected.losses[-1] != unprotected.losses[-1], "the fault does no harm"


@pytest.mark.parametrize("name", WORLDS)
def test_damaged_weights_are_rolled_back_to_the_healthy_snapshot(name: str, tmp_path: Path) -> None:
    world = build(name, Cell(damage_at=24), tmp_path)
    session = attach(world, tmp_path / "runs")
    world.train()
    session.detach()
    rolled = [step for step, action, _ in acted(session) if action == "ROLLBACK"]
    assert rolled == [27], "at the 4th spike step"
    assert session.status().counters.rollbacks == (("loss_spike/restored", 1),)
    assert session.status().healthy[-1] > 16
    assert world.weights[28] == world.weights[16], "the weights of the snapshot, bit for bit"
    assert world.losses[-1] < 1.2 < world.losses[24] / 1.5


@pytest.mark.parametrize("name", WORLDS)
def test_after_detach_nothing_of_ours_remains(name: str, tmp_path: Path) -> None:
    world = build(name, Cell(steps=6), tmp_path)
    before = _callbacks(world)
    session = attach(world, tmp_path / "runs")
    found: list[list[str]] = []
    world.before_step = lambda _: found.append(world.leftovers())
    world.train()
    session.detach()
    session.detach()
    assert found[3], "nothing was hooked, or the search does not find it"
    assert world.leftovers() == []
    assert _callbacks(world) == before
    status = session.status()
    assert status.protection is Protection.OFF
    assert status.why == "detached"


def _callbacks(world: World) -> list[Any]:
    trainer = world.trainer
    handler = getattr(trainer, "callback_handler", trainer)
    return list(getattr(handler, "callbacks", []))


@pytest.mark.parametrize("name", [n for n in WORLDS if n not in ("plain", "accelerate")])
def test_before_training_protection_is_off_and_says_what_it_waits_for(
    name: str, tmp_path: Path
) -> None:
    world = build(name, Cell(steps=6), tmp_path)
    session = attach(world, tmp_path / "runs")
    status = session.status()
    assert status.protection is Protection.OFF
    assert status.why == f"waiting for trainer.{'train' if name == 'hf' else 'fit'}()"
    assert session.session is None
    assert session.state.step == 0
    assert str(status)
    during: list[Any] = []
    world.before_step = lambda _: during.append(session.status())
    world.train()
    assert [s.protection for s in during[2:]] == [Protection.WARMING] * (len(during) - 2)
    assert session.run_id == session.session.run_id
    status = session.status()
    assert status.protection is Protection.OFF
    assert status.why.startswith("training has ended; waiting for trainer.")
    assert status.step == 6


@pytest.mark.parametrize("name", ["hf", "lightning"])
def test_a_second_training_of_a_named_run_goes_on_where_the_first_ended(
    name: str, tmp_path: Path
) -> None:
    world = build(name, Cell(steps=10, nan_at={4}), tmp_path)
    with attach(world, tmp_path / "runs", run_id="mine") as session:
        world.train()
        first = session.session
        _more(world, 10)
        assert session.session is not first
        assert session.run_id == "mine"
        status = session.status()
        assert status.step == 20
        assert status.counters.skipped == (("nonfinite_grad", 1),), "the ledger goes on"
        assert "went on" in status.lineage or "matched" in status.lineage or status.lineage
    assert world.leftovers() == []


@pytest.mark.parametrize("name", ["hf", "lightning"])
def test_a_second_training_without_a_name_is_a_new_run(name: str, tmp_path: Path) -> None:
    world = build(name, Cell(steps=5), tmp_path)
    with attach(world, tmp_path / "runs") as session:
        world.train()
        first = session.run_id
        _more(world, 5)
        assert session.run_id != first
        assert session.status().step == 5


def _more(world: Any, steps: int) -> None:
    """Train on, with the same trainer object."""
    if world.name == "hf":
        world.trainer.args.max_steps = steps
        world.train()
    else:
        world.trainer.fit_loop.epoch_loop.max_steps += steps
        world.train()


@pytest.mark.parametrize("name", ["hf", "lightning", "lightning-manual", "accelerate"])
def test_it_may_be_attached_and_detached_by_a_callback_in_the_middle_of_training(
    name: str, tmp_path: Path
) -> None:
    world = build(name, Cell(steps=14), tmp_path)
    heard: list[str] = []
    _add_callback(world, heard)
    sessions: list[Any] = []

    def in_the_middle(step: int) -> None:
        if step == 3:
            sessions.append(attach(world, tmp_path / "runs"))
        elif step == 11:
            sessions[0].detach()

    world.before_step = in_the_middle
    world.train()
    (session,) = sessions
    assert 6 <= session.status().step <= 8
    assert world.leftovers() == []
    assert len(heard) == (0 if name == "accelerate" else 14), "nobody was passed over"
    alone = build(name, Cell(steps=14), tmp_path)
    alone.train()
    assert world.fingerprint() == alone.fingerprint()


def _add_callback(world: World, heard: list[str]) -> None:
    if world.name == "hf":
        from transformers import TrainerCallback

        class Next(TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                heard.append("step")

        found = world.trainer.callback_handler.callbacks
        names = [type(c).__name__ for c in found]
        found.insert(names.index("Before") + 1, Next())  # the one after the one that detaches
    elif world.name != "accelerate":
        import lightning

        class Next(lightning.Callback):  # type: ignore[misc]
            def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
                heard.append("step")

        world.trainer.callbacks.append(Next())


@pytest.mark.parametrize("name", WORLDS)
def test_a_run_that_nobody_holds_any_more_is_let_go(name: str, tmp_path: Path) -> None:
    world: World | None = build(name, Cell(steps=3), tmp_path)
    session: Any = attach(world, tmp_path / "runs")
    assert world is not None
    world.train()
    if session.detached is False and name not in ("plain", "accelerate"):
        model = world.model
        session.begin(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        del model
    gone = weakref.ref(world.model)
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    del world, session
    gc.collect()
    assert not open_sessions()
    assert gone() is None
    assert not hasattr(torch.autograd.backward, "__wrapped__")


SLOW_TO_TRACE = pytest.param("lightning-manual", marks=pytest.mark.full)  # 11 s, attached or not


@pytest.mark.parametrize(
    "name", [SLOW_TO_TRACE if name == "lightning-manual" else name for name in WORLDS]
)
@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compiled_runs_are_unharmed_and_still_guarded(
    name: str, backend: str, tmp_path: Path
) -> None:
    # Manual optimisation is traced in many pieces, anew for each number of a micro-batch.
    k = 1 if name == "lightning-manual" else 2
    cell = Cell(steps=6, compiled=backend, accumulation=k, clip=1.0)
    alone = build(name, cell, tmp_path)
    alone.train()
    world = build(name, cell, tmp_path)
    session = attach(world, tmp_path / "runs")
    world.train()
    session.detach()
    assert world.fingerprint() == alone.fingerprint()
    assert len(records(session)) == cell.steps
    assert all(r.observation.loss is not None for r in records(session))
    assert not session.status().internal_errors

    if name not in ("hf", "lightning"):
        return
    broken = build(name, Cell(steps=6, compiled=backend, nan_at={4}), tmp_path)
    session = attach(broken, tmp_path / "runs")
    broken.train()
    session.detach()
    assert acted(session) == [(4, "SKIP_STEP", "nonfinite_grad")]

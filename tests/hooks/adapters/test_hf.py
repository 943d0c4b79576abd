"""The HF Trainer: its own checkpoints, evaluation, callbacks, logs, resuming, and LoRA."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sentinel.core.types import Protection
from tests.hooks.adapters.watching import FRAMEWORK_WARNINGS, acted, attach, records
from tests.hooks.worlds import digest
from tests.support import require
from tests.support.trainers import ROWS, Cell, Corpus, HuggingFace, frameworks_present

pytestmark = [pytest.mark.torch, pytest.mark.slow, *FRAMEWORK_WARNINGS]


@pytest.fixture(autouse=True, scope="module")
def _frameworks() -> None:
    require(frameworks_present(), "transformers, lightning and accelerate")


def saved_weights(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = load_file(path / "model.safetensors")
    return found


def weights(model: nn.Module) -> str:
    return digest([p.detach() for p in model.parameters()])


EVERY = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}


def test_evaluation_saving_and_logging_in_between_change_nothing(tmp_path: Path) -> None:
    cell = Cell(steps=20, accumulation=2, clip=1.0, options={**EVERY, "eval_on_start": True})
    alone = HuggingFace(cell, tmp_path / "alone")
    alone.train()
    world = HuggingFace(cell, tmp_path / "watched")
    session = attach(world, tmp_path / "runs")
    world.train()
    session.detach()
    assert world.fingerprint() == alone.fingerprint()
    assert len(records(session)) == 20
    mine, theirs = (
        [{k: v for k, v in row.items() if "second" not in k and "time" not in k} for row in log]
        for log in (world.trainer.state.log_history, alone.trainer.state.log_history)
    )
    assert mine == theirs


def test_what_is_saved_and_evaluated_after_a_rollback_is_what_was_restored(tmp_path: Path) -> None:
    cell = Cell(damage_at=24, options=EVERY)  # the rollback is at step 27: saved as checkpoint-28
    world = HuggingFace(cell, tmp_path)
    session = attach(world, tmp_path / "runs")
    world.train()
    session.detach()
    assert [s for s, action, _ in acted(session) if action == "ROLLBACK"] == [27]
    saved = saved_weights(tmp_path / "hf" / "checkpoint-28")
    assert digest([saved[n] for n, _ in world.model.named_parameters()]) == world.weights[16]
    scores = {
        row["step"]: row["eval_loss"]
        for row in world.trainer.state.log_history
        if "eval_loss" in row
    }
    assert scores[28] == scores[16]


def test_checkpoints_saved_inside_an_incident_carry_a_note_and_resuming_from_one_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"save_strategy": "steps", "save_steps": 1, "save_only_model": False}
    world = HuggingFace(Cell(steps=40, damage_at=24, options=options), tmp_path)
    with attach(world, tmp_path / "runs"):
        world.train()
    noted = {int(path.parent.name.split("-")[1]) for path in tmp_path.glob("hf/*/unhealthy.json")}
    assert {26, 27} <= noted, "saved with damaged weights"
    assert not noted & {*range(1, 24), 39, 40}

    again = HuggingFace(Cell(steps=30, options=options), tmp_path)
    with attach(again, tmp_path / "runs") as session:
        again.train(resume_from_checkpoint=str(tmp_path / "hf" / "checkpoint-27"))
        spots = [str(spot) for spot in session.status().blind_spots]
    assert len(spots) == 1
    assert "checkpoint-27 is listed as unhealthy" in spots[0]
    assert "resuming from an unhealthy checkpoint" in caplog.text
    again = HuggingFace(Cell(steps=30, options=options), tmp_path)
    with attach(again, tmp_path / "runs") as session:
        again.train(resume_from_checkpoint=str(tmp_path / "hf" / "checkpoint-20"))
        assert session.status().blind_spots == ()


def test_the_loss_is_taken_before_the_trainer_puts_an_average_in_the_place_of_a_nan(
    tmp_path: Path,
) -> None:
    world = HuggingFace(Cell(steps=10, options={"logging_steps": 1}), tmp_path)
    session = attach(world, tmp_path / "runs")

    def break_one(step: int) -> None:
        if step == 6:  # one forward only: the weights themselves stay finite
            handle = world.model.head.register_forward_hook(
                lambda module, args, out: (handle.remove(), out * math.nan)[1]
            )

    world.before_step = break_one
    world.train()
    session.detach()
    logged = [row["loss"] for row in world.trainer.state.log_history if "loss" in row]
    assert not any(math.isnan(x) for x in logged), "HF hides it"
    seen = [r.observation.loss for r in records(session)]
    assert [i for i, x in enumerate(seen) if not math.isfinite(x)] == [6]
    assert [s for s, _, _ in acted(session)] == [6]


def test_ours_is_the_first_callback_and_the_users_list_is_put_back(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    class Late(TrainerCallback):  # type: ignore[misc]
        seen: Any = None

        def on_train_begin(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
            model.embed.weight.requires_grad_(False)  # after ours has heard of it

    world = HuggingFace(Cell(steps=4), tmp_path)
    session = attach(world, tmp_path / "runs")
    late = Late()
    world.trainer.add_callback(late)
    callbacks = world.trainer.callback_handler.callbacks
    theirs = callbacks[1:]
    assert "sentinel_hooks" in type(callbacks[0]).__module__
    world.train()
    assert session.status().step == 4
    session.detach()
    assert world.trainer.callback_handler.callbacks == theirs
    assert world.leftovers() == []


def test_a_run_that_resumes_from_its_checkpoint_is_the_same_run_and_rewinds_nothing(
    tmp_path: Path,
) -> None:
    options = {"save_strategy": "steps", "save_steps": 10}
    through = HuggingFace(Cell(steps=20), tmp_path / "through")
    through.train()

    world = HuggingFace(Cell(steps=20, options=options), tmp_path)
    session = attach(world, tmp_path / "runs", run_id="r")
    world.before_step = _raise_at(14)
    with pytest.raises(RuntimeError, match="pulled the plug"):
        world.train()
    session.detach()
    again = HuggingFace(Cell(steps=20, options=options), tmp_path)
    session = attach(again, tmp_path / "runs", run_id="r")
    again.train(resume_from_checkpoint=True)
    session.detach()
    status = session.status()
    assert "step 10" in status.lineage, status.lineage
    assert again.trainer.state.global_step == 20
    assert weights(again.model) == weights(through.model), "nothing was rewound or replayed"
    assert status.blind_spots == ()


def _raise_at(step: int) -> Any:
    def hook(now: int) -> None:
        if now == step:
            raise RuntimeError("somebody pulled the plug")

    return hook


def test_a_train_that_raised_leaves_a_trainer_that_can_train_again(tmp_path: Path) -> None:
    world = HuggingFace(Cell(steps=12), tmp_path)
    session = attach(world, tmp_path / "runs")
    world.before_step = _raise_at(5)
    with pytest.raises(RuntimeError):
        world.train()
    assert not session.live
    assert session.status().why == "training has ended; waiting for trainer.train()"
    world.before_step = None
    world.train()
    assert session.status().step == 12
    session.detach()
    assert world.leftovers() == []


def test_a_training_that_starts_again_with_smaller_batches_is_watched_again(
    tmp_path: Path,
) -> None:
    world = HuggingFace(Cell(steps=6, options={"auto_find_batch_size": True}), tmp_path)
    session = attach(world, tmp_path / "runs")
    runs: list[str] = []

    def run_out(step: int) -> None:
        runs.append(session.run_id)
        if len(runs) == 3:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    world.before_step = run_out
    world.train()
    assert world.trainer._train_batch_size < 32
    assert session.status().step == 6
    assert len(set(filter(None, runs))) == 2
    session.detach()
    assert world.leftovers() == []


def test_loading_the_best_model_at_the_end_is_no_step_of_the_run(tmp_path: Path) -> None:
    options = {**EVERY, "load_best_model_at_end": True, "metric_for_best_model": "eval_worst"}

    class Odd(HuggingFace):
        def trainer_class(self, base: Any) -> Any:
            class Trainer(base):  # type: ignore[misc]
                def evaluate(self, *args: Any, **kwargs: Any) -> Any:
                    found = super().evaluate(*args, **kwargs)
                    return {**found, "eval_worst": float(self.state.global_step)}

            return Trainer

    options["greater_is_better"] = False  # the first one saved is the best
    world = Odd(Cell(steps=12, options=options), tmp_path)
    session = attach(world, tmp_path / "runs", run_id="r")
    world.train()
    best = weights(world.model)
    assert best == world.weights[4], "HF has loaded checkpoint-4"
    again = attach_again(session, world)
    assert "those of step 4," in again.lineage, "not those of its last step"
    session.detach()


def attach_again(session: Any, world: HuggingFace) -> Any:
    world.trainer.args.load_best_model_at_end = False
    world.trainer.args.max_steps = 4
    found: list[Any] = []
    world.before_step = lambda _: found.append(session.status())
    world.train()
    return found[2]


def test_custom_losses_and_subclasses_are_seen_as_they_are_trained(tmp_path: Path) -> None:
    class Custom(HuggingFace):
        def trainer_class(self, base: Any) -> Any:
            class Trainer(base):  # type: ignore[misc]
                def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
                    return 2.0 * super().compute_loss(model, inputs, **kwargs)

            return Trainer

    world = Custom(Cell(steps=6, accumulation=4), tmp_path)
    session = attach(world, tmp_path / "runs")
    world.train()
    session.detach()
    seen = [r.observation.loss for r in records(session)]
    assert seen == pytest.approx([2.0 * x for x in world.losses], rel=1e-6)


def test_a_loss_made_outside_the_model_has_a_canary_where_its_module_is_given(
    tmp_path: Path,
) -> None:
    criterion = nn.CrossEntropyLoss()

    def outside(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return criterion(outputs["logits"].flatten(0, 1), labels.flatten())

    class Custom(HuggingFace):
        def trainer_class(self, base: Any) -> Any:
            return lambda **options: base(**options, compute_loss_func=outside)

    for loss_fn, said in ((None, "pass loss_fn= to attach()"), (criterion, "available")):
        world = Custom(Cell(steps=20), tmp_path)
        session = attach(world, tmp_path / "runs", loss_fn=loss_fn)
        status: list[str] = []
        world.before_step = lambda _, heard=status, s=session: heard.append(s.status().canary)
        world.train()
        session.detach()
        assert said in status[-1]


def test_a_short_last_accumulation_is_still_a_mean_over_its_tokens(tmp_path: Path) -> None:
    options = {"max_steps": -1, "num_train_epochs": 1, "dataloader_drop_last": False}
    world = HuggingFace(Cell(accumulation=4, steps=3, options=options), tmp_path)
    world.corpus = Corpus(ROWS * 9 + 5, 3)  # 10 batches: 4 + 4 + 2, the last one of 5 rows
    world.trainer.train_dataset = world.corpus
    session = attach(world, tmp_path / "runs")
    world.train()
    session.detach()
    heard = world.model.heard
    by_hand = [
        sum(s for s, _ in part) / sum(n for _, n in part)
        for part in (heard[:4], heard[4:8], heard[8:])
    ]
    assert [r.observation.loss for r in records(session)] == pytest.approx(by_hand, rel=1e-6)


# ---------------------------------------------------------------- real models


def llama(tmp_path: Path, *, lora: bool, steps: int, **options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(4)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=32,
        )
    )
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model,
            LoraConfig(r=4, target_modules=["q_proj", "v_proj", "lm_head"], task_type="CAUSAL_LM"),
        )
    g = torch.Generator().manual_seed(5)
    rows = []
    for _ in range(128):
        x = torch.randint(64, (16,), generator=g)
        y = x.masked_fill(torch.rand(16, generator=g) < 0.3, -100)
        rows.append({"input_ids": x, "labels": y})
    return Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=4,
            learning_rate=1e-2,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=1,
            logging_nan_inf_filter=False,
            **options,
        ),
        train_dataset=rows,
    )


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_a_llama_is_watched_whole_or_by_its_adapters(lora: bool, tmp_path: Path) -> None:
    import sentinel_hooks

    alone = llama(tmp_path, lora=lora, steps=8)
    alone.train()
    trainer = llama(tmp_path, lora=lora, steps=8)
    with sentinel_hooks.attach(trainer, sidecar=None, run_dir=tmp_path / "runs") as session:
        trainer.train()
        status, live = session.status(), session.session
    assert weights(trainer.model) == weights(alone.model)
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    # HF's own figure is that of the same tokens; it rounds nothing in log_history.
    assert [r.observation.loss for r in records(live)] == pytest.approx(logged, rel=1e-5)
    norms = [float(row["grad_norm"]) for row in trainer.state.log_history if "loss" in row]
    assert [r.observation.grad_norm for r in records(live)] == pytest.approx(norms, rel=1e-5)
    assert status.blind_spots == ()
    assert status.step == 8
    assert status.protection is Protection.OFF


def test_a_broken_lora_adapter_is_put_back_and_the_frozen_base_is_never_touched(
    tmp_path: Path,
) -> None:
    import sentinel_hooks
    from tests.hooks.adapters.watching import POLICY

    trainer = llama(tmp_path, lora=True, steps=34)
    base = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if "lora" not in n}
    steps = 0

    def damage(module: nn.Module, args: Any) -> None:
        nonlocal steps
        if module.training and torch.is_grad_enabled():
            steps += 1
            if steps == 4 * 22 + 1:
                with torch.no_grad():
                    for name, p in trainer.model.named_parameters():
                        if "lora" in name:
                            p.mul_(200.0)

    trainer.model.base_model.model.model.embed_tokens.register_forward_pre_hook(damage)
    session = sentinel_hooks.attach(trainer, sidecar=None, run_dir=tmp_path / "runs", policy=POLICY)
    trainer.train()
    session.detach()
    assert [a for _, a, _ in acted(session) if a == "ROLLBACK"] == ["ROLLBACK"], acted(session)
    assert session.status().counters.rollbacks == (("loss_spike/restored", 1),)
    after = dict(trainer.model.named_parameters())
    assert all(torch.equal(after[n], p) for n, p in base.items())
    assert records(session)[-1].observation.loss < 5.0

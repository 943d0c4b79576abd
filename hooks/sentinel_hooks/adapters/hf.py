"""Adapter for the HF Trainer (transformers 5) and its subclasses.

    sentinel.attach(trainer); trainer.train()

Objects exist when the first epoch begins: `model_wrapped` (compiled, DDP or FSDP2: what the loop
calls), the optimizer inside accelerate's wrapper, the scheduler, the scaler.

Safe point: `on_step_end`. Optimizer, scheduler and gradients are done, and evaluation and saving
come after it, so that what a rollback restores is what gets evaluated and saved. Our callback is
the first in the list: the user's own see the restored weights too.

The loss is taken at the roots of backward, never from the trainer's logs, whose NaN filter puts an
average in the place of a NaN. Each micro-batch's root is already its share of the step's mean (by
num_items_in_batch, or divided by the accumulation steps): their sum is the step's loss.

Threads: callbacks run in the thread that trains.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from sentinel_hooks.status import BlindSpot
from sentinel_hooks.waiting import TrainerSession, is_a


class HuggingFaceAdapter:
    """Finds the objects of an HF Trainer."""

    name = "HF Trainer"
    waits_for = "trainer.train()"

    def accepts(self, trainer: Any) -> bool:
        """A transformers.Trainer, or a subclass (Seq2SeqTrainer, TRL's)."""
        return is_a(trainer, "transformers.trainer", "Trainer")

    def watch(self, trainer: Any, session: TrainerSession) -> Callable[[], None]:
        """Put our callback before the user's."""
        callback = _Callback(trainer, session)
        trainer.callback_handler.callbacks.insert(0, callback)
        undo = session.beside(trainer, "train", before=callback.called, at_end=session.end)

        def unhook() -> None:
            undo()
            handler = trainer.callback_handler
            # A new list: detach() may be called by a callback, while this one is walked through.
            handler.callbacks = [other for other in handler.callbacks if other is not callback]

        return unhook


class _Callback:
    """What the trainer calls; it need not be a TrainerCallback, and so nothing is imported."""

    def __init__(self, trainer: Any, session: TrainerSession) -> None:
        self._trainer = weakref.ref(trainer)
        self._session = session
        self._resumed: Any = None  # as train() was asked
        self._tried = False
        self.on_train_begin = session.guarded(self._train_begin)
        # Not on_train_begin: the user's callbacks of that event come after ours, and may still
        # freeze layers or add parameters. Attached in the middle of an epoch, it is the next step.
        self.on_epoch_begin = session.guarded(self._begin)
        self.on_step_begin = session.guarded(self._begin)
        self.on_step_end = session.guarded(self._step_end)
        self.on_save = session.guarded(self._save)
        self.on_log = session.guarded(self._log)
        self.on_train_end = session.guarded(self._train_end)

    def __getattr__(self, name: str) -> Any:
        """The other events."""
        if name.startswith("on_"):
            return _nothing
        raise AttributeError(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Inert:
        return _Inert()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Inert, ()

    def called(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> None:
        """train() begins."""
        self._resumed = resume_from_checkpoint

    def _train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._session.end()  # auto_find_batch_size starts again, after memory ran out
        self._tried = False
        if self._resumed is True:
            self._resumed = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")

    def _begin(self, *args: Any, **kwargs: Any) -> None:
        trainer = self._trainer()
        if trainer is None or self._tried:
            return
        self._tried = True
        self._session.begin(
            model=trainer.model_wrapped,
            optimizer=trainer.optimizer,
            lr_scheduler=trainer.lr_scheduler,
            grad_scaler=trainer.accelerator.scaler,
            blind_spots=_blind_spots(trainer),
            resumed_from=self._resumed or None,
        )

    def _step_end(self, *args: Any, **kwargs: Any) -> None:
        self._session.safe_point()

    def _save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._trainer()
        if trainer is not None and trainer.hp_search_backend is None:  # each trial has its folder
            path = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
            self._session.saved(path)  # on all ranks, also where the folder cannot be seen

    def _log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        # The closing line of train(): after it load_best_model_at_end puts in older weights, which
        # must not be taken for those of the last step.
        if logs and "train_runtime" in logs and "train_loss" in logs:
            self._session.end()

    def _train_end(self, *args: Any, **kwargs: Any) -> None:
        self._session.end()


class _Inert:
    """A callback in a copy of the trainer."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):
            return _nothing
        raise AttributeError(name)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _blind_spots(trainer: Any) -> Sequence[BlindSpot]:
    """Ways to train in which the optimizer is not torch's, or steps elsewhere."""
    spots = []
    if getattr(trainer, "is_deepspeed_enabled", False):
        spots.append(
            BlindSpot(
                "DeepSpeed steps its own optimizer: neither gradients nor the step are seen",
                "train with DDP or FSDP2",
            )
        )
    if getattr(trainer.args, "n_gpu", 1) > 1:
        spots.append(
            BlindSpot(
                "torch.nn.DataParallel: the loss that is seen is the mean over its replicas",
                "start it with torchrun, for DDP",
            )
        )
    if "lomo" in str(getattr(trainer.args, "optim", "")).lower():
        spots.append(
            BlindSpot(
                "LOMO moves parameters inside backward: no step can be skipped",
                "use another optimizer",
            )
        )
    return spots

"""Adapter for the Lightning Trainer (2.6), automatic and manual optimisation.

    sentinel.attach(trainer); trainer.fit(module)

Objects exist at `on_train_start`: the module, the strategy's optimizers, the schedulers, the
precision plugin's scaler (16-mixed on a CPU is bfloat16 in truth, and has none).

Safe point: `on_train_batch_end`, where nothing is left of a step, before ModelCheckpoint saves; and
`on_train_batch_start`, for the first. Lightning calls `training_step` past the module's __call__,
where a forward hook sees nothing.

The canary asks `training_step` again, through the strategy's own call (autocast, the detour through
DDP). Whatever training_step logs is left out then. In manual optimisation training_step also
steps, and cannot be asked.

Threads: callbacks run in the thread that trains.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from sentinel_hooks.seams.patch import Patch, Stand
from sentinel_hooks.status import BlindSpot
from sentinel_hooks.waiting import TrainerSession, is_a


class LightningAdapter:
    """Finds the objects of a Lightning Trainer."""

    name = "Lightning Trainer"
    waits_for = "trainer.fit()"

    def accepts(self, trainer: Any) -> bool:
        """A Trainer of lightning or of pytorch_lightning."""
        return is_a(trainer, "lightning.pytorch", "Trainer") or is_a(
            trainer, "pytorch_lightning", "Trainer"
        )

    def watch(self, trainer: Any, session: TrainerSession) -> Callable[[], None]:
        """Put our callback before the user's."""
        callback = _Callback(session)
        trainer.callbacks.insert(0, callback)
        launcher = getattr(trainer.strategy, "launcher", None)
        if type(launcher).__name__ == "_MultiProcessingLauncher":
            session.blind_spot(
                "this strategy trains in processes of its own, made from a copy of the trainer: "
                "what happens there is not seen here, and after a spawn nothing is watched",
                'use strategy="ddp", with torchrun or without',
            )

        def unhook() -> None:
            callback.unwrap()
            # A new list: detach() may be called by a callback, while this one is walked through.
            trainer.callbacks = [other for other in trainer.callbacks if other is not callback]

        return unhook


class _Callback:
    """What the trainer calls; it need not be a Callback, and so nothing is imported."""

    state_key = _legacy_state_key = "sentinel"

    def __init__(self, session: TrainerSession) -> None:
        self._session = session
        self._undo: list[Callable[[], Any]] = []
        self._tried = False
        for name in (
            "on_train_start",
            "on_train_batch_start",
            "on_train_batch_end",
            "on_train_end",
            "on_fit_end",
            "on_exception",
        ):
            setattr(self, name, session.guarded(getattr(self, f"_{name}")))

    def __getattr__(self, name: str) -> Any:
        """The other events, and the checkpoint, in which we write nothing."""
        if name.startswith("on_") or name in ("setup", "teardown", "load_state_dict"):
            return _nothing
        raise AttributeError(name)

    def state_dict(self) -> dict[str, Any]:
        """Nothing of ours goes into the user's checkpoints."""
        return {}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Inert:
        return _Inert()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Inert, ()

    # -- events ------------------------------------------------------------------------------

    def _on_train_start(self, trainer: Any, module: Any) -> None:
        self.unwrap()
        self._tried = True
        step = None
        if module.automatic_optimization:
            step = _Step(trainer.strategy, module)
        session = self._session.begin(
            model=module,
            optimizer=list(trainer.strategy.optimizers),
            lr_scheduler=[config.scheduler for config in trainer.strategy.lr_scheduler_configs],
            grad_scaler=getattr(trainer.precision_plugin, "scaler", None),
            loss_fn=step,
            blind_spots=_blind_spots(trainer, module, self._session.has_loss_fn),
            resumed_from=trainer.ckpt_path,
        )
        if session is None:
            return
        strategy = trainer.strategy
        if step is not None and not self._session.has_loss_fn:
            stand = Stand(strategy, "training_step", session.loss)
            self._undo.append(Patch(strategy, "training_step", stand).remove)
        save = strategy.save_checkpoint
        told = self._session.guarded(self._session.saved)

        def save_checkpoint(checkpoint: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
            save(checkpoint, filepath, *args, **kwargs)
            told(filepath)

        stand = Stand(strategy, "save_checkpoint", save_checkpoint)
        self._undo.append(Patch(strategy, "save_checkpoint", stand).remove)

    def _on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if not self._tried:  # attached in the middle of fit()
            self._on_train_start(trainer, module)
        self._session.safe_point(*_flat(batch))

    def _on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._session.safe_point()

    def _on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._session.end()

    def _on_fit_end(self, *args: Any, **kwargs: Any) -> None:
        self.unwrap()
        self._tried = False

    def _on_exception(self, *args: Any, **kwargs: Any) -> None:
        self._session.end()
        self.unwrap()
        self._tried = False

    def unwrap(self) -> None:
        """Give the strategy its methods back."""
        undo, self._undo = self._undo, []
        for step in reversed(undo):
            step()


class _Inert(_Callback):
    """A callback in a copy of the trainer."""

    def __init__(self) -> None:
        pass


class _Step:
    """The strategy's training_step; asked again (no grad) it leaves the user's logs alone."""

    def __init__(self, strategy: Any, module: Any) -> None:
        self._call = strategy.training_step
        self._module = weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return self._call(*args, **kwargs)
        with _mute(self._module()):
            return self._call(*args, **kwargs)


@contextlib.contextmanager
def _mute(module: Any) -> Iterator[None]:
    patches = [Patch(module, name, _nothing) for name in ("log", "log_dict")]
    try:
        yield
    finally:
        for patch in patches:
            patch.remove()


def _flat(batch: Any) -> tuple[Any, ...]:
    if isinstance(batch, dict):
        return tuple(batch.values())
    return tuple(batch) if isinstance(batch, list | tuple) else (batch,)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _blind_spots(trainer: Any, module: Any, has_loss_fn: bool) -> Sequence[BlindSpot]:
    """Ways to train in which something is not seen."""
    spots = []
    if not module.automatic_optimization and not has_loss_fn:
        spots.append(
            BlindSpot(
                "manual optimisation: the canary cannot ask training_step again, which also steps",
                "pass loss_fn= to attach() and call session.loss(batch) in training_step",
            )
        )
    if any(kind.__name__ == "DeepSpeedStrategy" for kind in type(trainer.strategy).__mro__):
        spots.append(
            BlindSpot(
                "DeepSpeed steps its own optimizer: neither gradients nor the step are seen",
                "train with DDP or FSDP2",
            )
        )
    return spots

"""Adapter for accelerate.Accelerator (1.15).

    sentinel.attach(accelerator)            before or after accelerator.prepare(...)

Objects exist after `prepare`. Attached before it, sentinel waits for the first
`accelerator.backward(loss)`: then everything is prepared, in however many calls. Attached after it,
it begins at once, with what is prepared so far.

An Accelerator keeps the module that it was given (on CPUs) and hands out its DDP and torch.compile
wrappers: what the loop calls is found among the live objects, by what is inside.

Safe point: the start of the first training forward after the step, as in a plain loop; accelerate
has no callbacks. `AcceleratedOptimizer.step` between two micro-batches does not reach the
optimizer inside, and so is no step here either. `accelerator.backward` divides by the accumulation
steps: the sum of the roots is the step's loss.

`accelerator.free_memory()`, `clear()` and `end_training()` end the training.

Threads: all of it runs in the thread that trains.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from sentinel_hooks.status import BlindSpot
from sentinel_hooks.waiting import TrainerSession, is_a

_ENDS = ("free_memory", "clear", "end_training")


class AccelerateAdapter:
    """Finds the objects of an Accelerator."""

    name = "accelerate.Accelerator"
    waits_for = "accelerator.prepare(...) and the first accelerator.backward(loss)"

    def accepts(self, trainer: Any) -> bool:
        """An Accelerator."""
        return is_a(trainer, "accelerate.accelerator", "Accelerator")

    def watch(self, trainer: Any, session: TrainerSession) -> Callable[[], None]:
        """Stand before backward, and behind save_state and what ends a training."""
        held = weakref.ref(trainer)

        def begin(*_: Any, **__: Any) -> None:
            accelerator = held()
            if session.live or accelerator is None or not _prepared(accelerator):
                return
            session.begin(
                model=[_called(model) for model in accelerator._models],
                optimizer=list(accelerator._optimizers),
                lr_scheduler=list(accelerator._schedulers),
                grad_scaler=accelerator.scaler,
                blind_spots=_blind_spots(accelerator),
            )

        def end(*_: Any, **__: Any) -> None:
            session.end()

        def loaded(input_dir: Any = None, *_: Any, **__: Any) -> None:
            if input_dir is not None:
                session.resumed(input_dir)

        if _prepared(trainer):
            begin()
        undo = [session.beside(trainer, "backward", before=begin)]
        undo += [session.beside(trainer, name, before=end) for name in _ENDS]
        undo.append(session.beside(trainer, "save_state", after=session.saved))
        undo.append(session.beside(trainer, "load_state", before=loaded))
        undo.append(session.beside(trainer, "prepare", after=_Late(trainer, session)))

        def unhook() -> None:
            for step in reversed(undo):
                step()

        return unhook


class _Late:
    """Notes what was prepared after sentinel had begun."""

    def __init__(self, accelerator: Any, session: TrainerSession) -> None:
        self._accelerator = weakref.ref(accelerator)
        self._session = session
        self._before = len(accelerator._optimizers)

    def __call__(self, _: Any) -> None:
        accelerator = self._accelerator()
        if accelerator is None:
            return
        before, self._before = self._before, len(accelerator._optimizers)
        if self._session.live and self._before > before:
            self._session.blind_spot(
                f"{self._before - before} optimizers were prepared after sentinel had begun: "
                "nobody watches them",
                "attach after the last accelerator.prepare(...), or before the first",
            )


def _blind_spots(accelerator: Any) -> Sequence[BlindSpot]:
    """Optimizers that are not torch's."""
    if "DEEPSPEED" not in str(accelerator.distributed_type):
        return ()
    return (
        BlindSpot(
            "DeepSpeed steps its own optimizer: neither gradients nor the step are seen",
            "train with DDP or FSDP2",
        ),
    )


def _called(model: Any) -> Any:
    """The outermost DDP or compiled wrapper of `model` that there is one of."""
    ddp = nn.parallel.DistributedDataParallel
    wrappers = [
        thing
        for thing in gc.get_objects()
        if type(thing).__name__ == "OptimizedModule" or issubclass(type(thing), ddp)
    ]
    while True:
        around = [
            w
            for w in wrappers
            if any(vars(w).get("_modules", {}).get(n) is model for n in ("_orig_mod", "module"))
        ]
        if len(around) != 1:
            return model
        model = around[0]


def _prepared(accelerator: Any) -> bool:
    return bool(accelerator._models and accelerator._optimizers)

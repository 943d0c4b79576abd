"""Adapters: find the objects of a framework, and say where a safe point is.

    adapter = discover(trainer)          the adapter that knows this trainer
    register_adapter(MyAdapter())        one for a trainer of your own; docs/adapters.md

Discovery looks at names of classes and imports nothing. The newest registered adapter is asked
first, so that one of yours may take over a trainer that sentinel knows too.

Errors:  AttachError for an object that no adapter knows: how to attach by hand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sentinel_hooks.adapters.accelerate import AccelerateAdapter
from sentinel_hooks.adapters.hf import HuggingFaceAdapter
from sentinel_hooks.adapters.lightning import LightningAdapter
from sentinel_hooks.errors import AttachError
from sentinel_hooks.waiting import Adapter, is_a

_BY_HAND = "attach(model=..., optimizer=..., lr_scheduler=..., grad_scaler=...)"
_SHIPPED: tuple[Adapter, ...] = (HuggingFaceAdapter(), LightningAdapter(), AccelerateAdapter())
_registered: list[Adapter] = []


def register_adapter(adapter: Adapter) -> None:
    """Let attach(trainer) ask `adapter` too, before those that are there; once is enough.

    Raises:
        AttachError: it lacks something that an adapter must have.
    """
    for name in ("name", "waits_for"):
        if not isinstance(getattr(adapter, name, None), str):
            raise AttachError(
                f"an adapter must have the string {name}, got {getattr(adapter, name, None)!r}; "
                "see docs/adapters.md"
            )
    for name in ("accepts", "watch"):
        if isinstance(adapter, type) or not callable(getattr(adapter, name, None)):
            raise AttachError(
                f"an adapter must be an object with the method {name}, got {adapter!r}; "
                "see docs/adapters.md"
            )
    if adapter not in _registered:
        _registered.append(adapter)


def unregister_adapter(adapter: Adapter) -> None:
    """Forget `adapter`; trainers that it watches stay watched."""
    if adapter in _registered:
        _registered.remove(adapter)


def discover(trainer: Any) -> Adapter:
    """The adapter that knows `trainer`.

    Raises:
        AttachError: none does; the message says how to attach by hand.
    """
    for adapter in (*reversed(_registered), *_SHIPPED):
        if adapter.accepts(trainer):
            return adapter
    raise AttachError(_unknown(trainer))


def _unknown(trainer: Any) -> str:
    if isinstance(trainer, type):
        return (
            f"attach(trainer) was given the class {trainer.__qualname__}; give the object that "
            f"trains: {trainer.__name__}(...)"
        )
    kind = f"{type(trainer).__module__}.{type(trainer).__qualname__}"
    if is_a(trainer, "lightning", "LightningModule") or is_a(
        trainer, "pytorch_lightning", "LightningModule"
    ):
        return (
            f"attach(trainer) was given a LightningModule ({kind}); give the Trainer that fits it"
        )
    if isinstance(trainer, nn.Module | torch.optim.Optimizer):
        name = "model" if isinstance(trainer, nn.Module) else "optimizer"
        return f"attach(trainer) was given a {name} ({kind}); name the objects: {_BY_HAND}"
    return (
        f"attach(trainer) does not know {kind}; it knows "
        f"{', '.join(a.name for a in (*_registered, *_SHIPPED))} and their subclasses. Pass the "
        f"objects that your loop uses: {_BY_HAND}; or teach it this class with "
        "sentinel_hooks.register_adapter(...), see docs/adapters.md"
    )

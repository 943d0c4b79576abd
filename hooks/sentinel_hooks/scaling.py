"""What a GradScaler has done to the gradients, and what it will do to the step.

The scaler multiplies the loss, so gradients are too large until unscale_; a fused optimizer
unscales inside its kernel, after the gate. On overflow the scaler leaves step() out, or a fused
kernel drops the step by itself.

Purity:  each function but left_scale() on unscaled gradients reads a scalar from the device.
"""

from __future__ import annotations

from typing import Any

import torch

from sentinel_hooks.target import Target

_READY = 0  # torch.amp.grad_scaler.OptState.READY: not unscaled yet


def loss_scale(scaler: Any) -> float | None:
    """The scale in force; None without a scaler that has scaled anything."""
    if scaler is None or scaler._scale is None:
        return None
    return float(scaler.get_scale())


def left_scale(target: Target, member: int) -> float | None:
    """What this optimizer's gradients are still multiplied by; None for nothing."""
    scaler = target.live_scaler
    if scaler is None:
        return None
    optimizer = target.optimizers[member]
    given = getattr(optimizer, "grad_scale", None)
    if given is not None:  # fused: the kernel will unscale
        return float(given)
    state = scaler._per_optimizer_states.get(id(optimizer))
    if state is not None and state["stage"].value != _READY:
        return None
    return loss_scale(scaler)


def kernel_will_drop(optimizer: torch.optim.Optimizer) -> bool:
    """A fused optimizer steps with found_inf set: its kernel moves nothing."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and float(found) > 0


def scaler_dropped(target: Target) -> bool:
    """The scaler has seen non-finite gradients of ours since its last update()."""
    scaler = target.live_scaler
    return any(
        float(found) > 0
        for optimizer in target.optimizers
        if (state := scaler._per_optimizer_states.get(id(optimizer))) is not None
        for found in state["found_inf_per_device"].values()
    )

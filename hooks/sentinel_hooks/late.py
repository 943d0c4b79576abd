"""Late reads: what a step measured travels to the host while the next one runs.

    found = over(norm, loss, limits)           on the device: shall this step be held back?
    parcel = Parcel(packed)                    on its way, nothing waits
    values = parcel.open()                     one step later: float64 on the host
    check_target(target)                       attach(): can this run be skipped by the device?

A fused optimizer of torch looks at `found_inf` inside its kernel: where it is 1 nothing moves, not
a weight, not a moment, not its step counter. GradScaler made it for overflows; here the verdict of
core/ahead.py goes there, as a kernel's argument, and the host hears of it one step later.

CUDA: written for it (pinned memory, an event), and never run there. On the CPU nothing ever waits;
there the same code shows that outcomes are right, not that they are fast.

Shapes:  norm, loss and found are 0-d; the first two float64, found float32 as torch wants it.
Errors:  AttachError from check_target().
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sentinel.core.ahead import Limits
from sentinel.core.windows import LARGEST
from sentinel_hooks.errors import AttachError
from sentinel_hooks.target import Target

Float64 = npt.NDArray[np.float64]

# Those whose fused kernels leave everything as it is where found_inf is set. Compared exactly: a
# subclass may do more in step().
HONOURS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
DEVICES = ("cpu", "cuda")  # float64 and fused kernels both


class Parcel:
    """A vector on its way from the device to the host."""

    def __init__(self, packed: Tensor) -> None:
        """`packed` must be a copy that nobody writes into."""
        self._event: Any = None
        self._values = packed
        if packed.device.type == "cuda":
            host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            host.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(packed.device))
            self._values = host

    def open(self) -> Float64:
        """Its values; waits for what the device had queued when it was sent, and no longer."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.double().numpy()


def over(norm: Tensor, loss: Tensor, limits: Limits) -> Tensor:
    """1.0 where the step must be held back, else 0.0; see Limits. Does not wait."""
    fine = norm.le(limits.norm) & loss.le(limits.loss) & loss.ge(-LARGEST)
    if limits.norm_with_loss < LARGEST:
        fine &= norm.le(limits.norm_with_loss) | loss.le(limits.loss_with_norm)
    return fine.logical_not().to(torch.float32)


def check_target(target: Target) -> None:
    """Refuse what the device cannot decide.

    Raises:
        AttachError: naming the first obstacle, and the way out.
    """
    now = "leave reads='now', which costs one read a step and works everywhere"
    if target.live_scaler is not None:
        raise AttachError(
            "reads='late' cannot be combined with a GradScaler, whose scale and overflows are read "
            f"at every step; train in bfloat16 without one, or {now}"
        )
    for number, optimizer in enumerate(target.optimizers):
        name = type(optimizer).__name__
        if type(optimizer) not in HONOURS:
            known = ", ".join(kind.__name__ for kind in HONOURS)
            raise AttachError(
                f"reads='late' needs optimizers that the device can hold back ({known}, with "
                f"fused=True), and optimizer {number} is a {name}; {now}"
            )
        if not all(group.get("fused") for group in optimizer.param_groups):
            raise AttachError(
                f"reads='late' needs {name}(..., fused=True) in every parameter group, and "
                f"optimizer {number} has one without; add it, or {now}"
            )
    places = {p.device for o in target.optimizers for g in o.param_groups for p in g["params"]}
    if len(places) > 1 or any(place.type not in DEVICES for place in places):
        raise AttachError(
            f"reads='late' needs all parameters on one device of {' or '.join(DEVICES)}, got "
            f"{', '.join(sorted(map(str, places)))}; {now}"
        )


class Ready:
    """Whether a step of these optimizers can be held back by the device, asked at each gate."""

    def __init__(self, target: Target) -> None:
        self._optimizers = target.optimizers
        self._known: list[tuple[int, int, list[int]]] = [(-1, -1, [])] * len(target.optimizers)

    def why_not(self, members: list[int]) -> str:
        """The reason against it; "" for none."""
        for m in members:
            optimizer = self._optimizers[m]
            if getattr(optimizer, "found_inf", None) is not None:
                return "somebody else sets found_inf"
            if not all(group.get("fused") for group in optimizer.param_groups):
                return "a parameter group is not fused"
            if not self._has_state(m):
                return "optimizer state is made"
        return ""

    def _has_state(self, m: int) -> bool:
        """Every parameter with a gradient has its state.

        A fused SGD that is held back while it makes its momentum leaves it unwritten (torch 2.13).
        """
        optimizer = self._optimizers[m]
        state = optimizer.state
        if isinstance(optimizer, torch.optim.SGD):
            # Looked at each time: people restart the momentum in place, and a bad batch in that
            # very step would go into the weights.
            return all(
                (state.get(p) or {}).get("momentum_buffer") is not None
                for group in optimizer.param_groups
                if group.get("momentum")
                for p in group["params"]
                if p.grad is not None
            )
        params = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        found = (len(state), sum(map(len, state.values())), list(map(id, params)))
        if found == self._known[m]:
            return True
        made = all(map(state.get, params))
        if made:
            self._known[m] = found
        return made

"""Running statistics of normalisation layers: a skipped step shall not have moved them either.

    stats = RunningStats(models)
    stats.keep(41)        before the first training forward of step 41
    stats.put_back()      when that step (stats.before) is skipped

BatchNorm and its kin learn in the forward pass, long before anyone knows that the batch was bad:
one batch with a NaN makes `running_mean` NaN for good, and eval() with it. Their buffers are small
(a few numbers per channel), so they are copied every step; models without such layers pay nothing.
The copy is unconditional: their kernels move the buffers without raising a version counter.

Shapes:  whatever the layers hold; copies live on the same device. Does not wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class RunningStats:
    """The running statistics of `models` as they were before the step.

    Attributes:
        before: the step before which they were kept.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        # A compiled or DDP wrapper lists the same modules again: each once.
        found = {id(m): m for model in models for m in model.modules() if isinstance(m, _NormBase)}
        self._modules = [m for m in found.values() if m.track_running_stats]
        self._live: list[Tensor] = []
        self._kept: list[Tensor] = []
        self.before = -1

    def keep(self, step: int = 0) -> None:
        """Copy them, before `step`."""
        if self._modules:
            self._copy()
        self.before = step

    def _copy(self) -> None:
        """Buffers are looked up anew, since .to() and load_state_dict replace them."""
        live = [
            buffer
            for module in self._modules
            for name in BUFFERS
            if isinstance(buffer := module._buffers.get(name), Tensor)
            and not nn.parameter.is_lazy(buffer)
        ]
        same = len(live) == len(self._kept) and all(
            a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
            for a, b in zip(live, self._kept, strict=True)
        )
        with torch.no_grad():
            if same:
                for kept, buffer in zip(self._kept, live, strict=True):
                    kept.copy_(buffer)
            else:
                self._kept = [buffer.detach().clone() for buffer in live]
        self._live = live

    def put_back(self) -> None:
        """Undo what the forward passes since keep() did to them."""
        with torch.no_grad():
            for buffer, kept in zip(self._live, self._kept, strict=True):
                buffer.copy_(kept)

    def put_back_where(self, found: Tensor) -> None:
        """The same, if the device says so: `found` is 1.0 for a step that is held back."""
        with torch.no_grad():
            for buffer, kept in zip(self._live, self._kept, strict=True):
                buffer.copy_(torch.where(found.to(buffer.device) > 0, kept, buffer))

    def clear(self) -> None:
        """Let go of the copies."""
        self._live, self._kept = [], []

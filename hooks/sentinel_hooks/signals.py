"""Which signals are measured: what attach(signals=...) takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """Signals beyond loss and global gradient norm.

    Attributes:
        layer_grad_norm: the gradient norm of every layer, in the trace and at the sidecar.
    """

    layer_grad_norm: bool = True

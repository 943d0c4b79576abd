"""Which signals are measured: what attach(signals=...) takes."""

from __future__ import annotations

from dataclasses import dataclass

from sentinel.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """Signals beyond loss and global gradient norm.

    Attributes:
        layer_grad_norm: the gradient norm of every layer, in the trace and at the sidecar.
    """

    layer_grad_norm: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.layer_grad_norm, bool):
            raise ConfigError(
                f"signals.layer_grad_norm must be True or False, got {self.layer_grad_norm!r}"
            )

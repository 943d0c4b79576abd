"""Which signals are measured: what attach(signals=...) takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from sentinel.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """Signals beyond loss and global gradient norm; docs/signals.md says what each costs.

    Attributes:
        layer_grad_norm: the gradient norm of every layer, in the trace and at the sidecar.
        attention: the largest attention logit of every layer.
        activations: RMS, largest magnitude and spread of every block's output.
        update_ratio: update-to-weight ratio and weight norm of every layer, on sampled steps.
        clip_pressure: share of steps that the user's clipping shortened.
        memory: bytes by kind, on sampled steps.
        pace: step time and tokens a second.
        residual_mixing: for models that mix several residual streams (hyper-connections): a
            function without arguments that returns the mixing matrices [out, in] of all blocks,
            first to last, on sampled steps. What a model's matrices are is not guessed.
        every: steps from one sample to the next, for the signals that are sampled.
    """

    layer_grad_norm: bool = True
    attention: bool = True
    activations: bool = True
    update_ratio: bool = True
    clip_pressure: bool = True
    memory: bool = True
    pace: bool = True
    # Not in the repr: ranks compare theirs, and a function's has its address in it.
    residual_mixing: Callable[[], Sequence[Any]] | None = field(default=None, repr=False)
    every: int = 10

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "residual_mixing":
                if value is not None and not callable(value):
                    raise ConfigError(
                        "signals.residual_mixing must be None or a function that returns the "
                        f"mixing matrices of all blocks, got {value!r}; for example "
                        "lambda: [block.mixing for block in model.blocks]"
                    )
            elif each.name == "every":
                if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                    raise ConfigError(
                        f"signals.every must be a number of steps, at least 1, got {value!r}"
                    )
            elif not isinstance(value, bool):
                raise ConfigError(f"signals.{each.name} must be True or False, got {value!r}")

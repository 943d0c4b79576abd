"""Loss-scale detector: does the gradient scaler's scale collapse?

    observe(state, scale, config) -> (next state, ScaleReading(collapsing, halvings))

A scaler halves its scale now and then, after an overflow, and doubles it after 2,000 quiet steps.
Several halvings within a short time are no probing of the limit: activations or gradients really
overflow, and at a scale under 1 fp16 gradients vanish.

Units:   halvings within `window` steps, net of doublings.
Purity:  state is an immutable value of bounded size.
Errors:  ScaleConfig raises ConfigError. No scaler is None, and says nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sentinel.core import bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleConfig:
    """How many halvings in how many steps, the first `settle` steps left out; and a least scale.

    A scaler starts high (65,536) on purpose and is halved until it fits.
    """

    window: int = 64
    halvings: float = 4.0
    least: float = 1.0
    settle: int = 64

    def __post_init__(self) -> None:
        bounds.check(
            "loss_scale",
            window=(self.window, 4, 4096),
            halvings=(self.halvings, 1.0, 1000.0),
            least=(self.least, 0.0, 1e9),
            settle=(self.settle, 0, 1_000_000),
        )


@dataclass(frozen=True, slots=True)
class ScaleState:
    """The last scales, oldest first."""

    scales: tuple[float, ...] = ()
    seen: int = 0


@dataclass(frozen=True, slots=True)
class ScaleReading:
    """`halvings` is how often the scale was halved since the highest of the window."""

    collapsing: bool = False
    halvings: float = 0.0


def observe(
    state: ScaleState, scale: float | None, config: ScaleConfig
) -> tuple[ScaleState, ScaleReading]:
    """Take in one step."""
    if scale is None:
        return state, ScaleReading()
    seen = state.seen + 1
    scales = (*state.scales, scale)[-config.window :] if seen > config.settle else (scale,)
    highest = max(scales)
    halvings = math.log2(highest / scale) if scale > 0 else math.inf
    collapsing = halvings >= config.halvings or scale < config.least
    return ScaleState(scales, seen), ScaleReading(collapsing, halvings)

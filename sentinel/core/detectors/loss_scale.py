"""Loss-scale detector: does the gradient scaler's scale collapse?

    observe(state, scales, config) -> (next state, ScaleReading(collapsing, halvings))

Takes the scales of the steps since it was last asked, one or many.

A scaler halves its scale now and then, after an overflow, and doubles it after 2,000 quiet steps.
Several halvings within a short time are no probing of the limit: activations or gradients really
overflow, and at a scale under 1 fp16 gradients vanish.

Units:   halvings within `window` steps, net of doublings.
Purity:  state is an immutable value of bounded size.
Errors:  ScaleConfig raises ConfigError. Without a scaler there are none to give.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    """The scales of the window as (value, number of its last step), oldest first; steps seen."""

    runs: tuple[tuple[float, int], ...] = ()
    seen: int = 0


@dataclass(frozen=True, slots=True)
class ScaleReading:
    """`halvings` is how often the scale was halved since the highest of the window."""

    collapsing: bool = False
    halvings: float = 0.0


def observe(
    state: ScaleState, scales: Sequence[float], config: ScaleConfig
) -> tuple[ScaleState, ScaleReading]:
    """Take in the scales of the steps since the last call; judged at the newest."""
    if not scales:
        return state, ScaleReading()
    runs, seen = list(state.runs), state.seen
    for scale in scales:
        seen += 1
        if seen <= config.settle:
            runs = []
        if runs and runs[-1][0] == scale:
            runs[-1] = (scale, seen)
        else:
            runs.append((scale, seen))
    runs = [run for run in runs if run[1] > seen - config.window]
    newest = runs[-1][0]
    halvings = math.log2(max(v for v, _ in runs) / newest) if newest > 0 else math.inf
    collapsing = halvings >= config.halvings or newest < config.least
    return ScaleState(tuple(runs), seen), ScaleReading(collapsing, halvings)

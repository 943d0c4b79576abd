"""Update-ratio detector: which layers move far too fast, or far too slowly?

    judge(column, config) -> layers out of line, worst first

The ratio of the update's norm to the weight's is about 1e-3 in healthy training and alike across
layers. Two things stand out: a layer that changes by more than `high` of itself in one step,
whatever the others do; and a layer more than `outlier` times away from the median of all, where
its scale or learning rate differs from the rest. An upward outlier counts only above `notable`,
ten times the healthy value: while the learning rate is still near 0 a factor says nothing.
Exactly 0 is a frozen layer, which is nobody's fault, and stays out of the median too.

Shapes:  column float32 [L], dimensionless.
Purity:  no state at all.
Errors:  UpdateRatioConfig raises ConfigError. nan and inf count as worst.
Source:  1e-3 is the practitioners' rule (Karpathy, CS231n); 30 x spans the spread between
         embeddings, norms and matrices of healthy runs; 1000 x downwards is three orders of
         magnitude, where a layer takes no part in the training.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sentinel.core import bounds
from sentinel.core.types import Column


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRatioConfig:
    """Settings; see the module docstring.

    Attributes:
        high: above it a layer is flagged whatever the others do.
        outlier: times the median above which a layer is flagged, if it is above `notable` too.
        laggard: times below the median at which a layer is flagged.
        least: layers with a ratio that are needed before a median means anything.
    """

    high: float = 0.1
    outlier: float = 30.0
    notable: float = 0.01
    laggard: float = 1000.0
    least: int = 4

    def __post_init__(self) -> None:
        bounds.check(
            "update_ratio",
            high=(self.high, 0.0, 1e9),
            outlier=(self.outlier, 1.0, 1e9),
            notable=(self.notable, 0.0, 1e9),
            laggard=(self.laggard, 1.0, 1e12),
            least=(self.least, 2, 1_000_000),
        )


def judge(column: Column, config: UpdateRatioConfig) -> tuple[int, ...]:
    """Indices of the layers out of line: the fastest first, the laggards last."""
    if column.size == 0:
        return ()
    # The common case without a median, which costs ten times as much: the median is at most the
    # largest ratio, so none of the bounds below can be exceeded. A nan or a 0 goes the long way.
    # Where the largest is takes a quarter of what it is: argmax stays in C, and finds a nan first.
    largest, smallest = column.item(column.argmax()), column.item(column.argmin())
    if largest <= min(config.high, config.notable) and smallest >= largest / config.laggard:
        return ()
    moving = column[np.isfinite(column) & (column > 0)]
    upper, lower = config.high, 0.0
    if moving.size >= config.least:
        middle = float(np.median(moving))
        upper = min(upper, max(config.outlier * middle, config.notable))
        lower = middle / config.laggard
    fast = ~(column <= upper)
    slow = (column > 0) & (column < lower)
    if not (fast.any() or slow.any()):
        return ()
    out = np.flatnonzero(fast | slow)
    worst = np.where(np.isnan(column[out]), np.inf, column[out])
    return tuple(out[np.argsort(-worst, kind="stable")].tolist())

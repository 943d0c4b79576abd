"""Attention-logit detector: in which layers is the largest attention logit above 50?

    judge(column, config) -> layers above the threshold, worst first

A saturated softmax passes no gradient; the advice is QK-Norm first, then a lower init variance.
It is a flag and never an action: 8 runs crossed 50 and never diverged.

Shapes:  column float32 [L], the exact maximum or its bound from the log-sum-exp.
Purity:  no state at all.
Errors:  AttentionLogitConfig raises ConfigError. A nan counts as above: it hides the worst.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sentinel.core import bounds
from sentinel.core.types import Column


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLogitConfig:
    """The threshold above which a layer is flagged."""

    threshold: float = 50.0

    def __post_init__(self) -> None:
        bounds.check("attention_logit", threshold=(self.threshold, 0.0, 1e9))


def judge(column: Column, config: AttentionLogitConfig) -> tuple[int, ...]:
    """Indices of the layers above the threshold, nan first, then the largest."""
    if column.size == 0 or column.item(column.argmax()) <= config.threshold:  # a nan is found first
        return ()
    above = np.flatnonzero(~(column <= config.threshold))
    worst = np.where(np.isnan(column[above]), np.inf, column[above])
    return tuple(above[np.argsort(-worst, kind="stable")].tolist())

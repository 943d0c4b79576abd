"""Resource detectors: too little memory left, clipping that never ends, representations collapsed.

    low_headroom(headroom, config) -> bool
    clip_pressure(share, factor, config) -> bool
    collapsed(spread, config) -> layers

Headroom: collectives need room at their peaks; under 15 % of the device an out-of-memory error is a
matter of time.
Clip pressure: clipping is a fuse. On for nearly all of the last 100 steps, with a quarter of the
gradients gone on the mean, it is a learning rate that nobody chose.
Collapse: the tokens of a block's output hardly differ from their mean: it passes on one vector.

Shapes:  spread float32 [L].
Purity:  no state at all; how long it must last is the rule's business.
Errors:  ResourceConfig raises ConfigError. What was not measured is None or NOT_MEASURED, and says
         nothing.
Source:  15 to 20 % headroom and "rare" clipping are the practitioners' rules; 27 to 35 % of the
         step were lost to clipping in one measured case.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sentinel.core import bounds
from sentinel.core.types import NOT_MEASURED, Column


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceConfig:
    """Shares; see the module docstring."""

    headroom: float = 0.15
    clipped: float = 0.9
    left: float = 0.75
    spread: float = 0.02

    def __post_init__(self) -> None:
        bounds.check(
            "resources",
            headroom=(self.headroom, 0.0, 1.0),
            clipped=(self.clipped, 0.0, 1.0),
            left=(self.left, 0.0, 1.0),
            spread=(self.spread, 0.0, 1.0),
        )


def low_headroom(headroom: float | None, config: ResourceConfig) -> bool:
    """Less of the device's memory is free than communication will want."""
    return headroom is not None and headroom < config.headroom


def clip_pressure(share: float | None, factor: float | None, config: ResourceConfig) -> bool:
    """Clipping is on all the time, and takes much of the step."""
    if share is None or factor is None:
        return False
    return share >= config.clipped and factor <= config.left


def collapsed(spread: Column, config: ResourceConfig) -> tuple[int, ...]:
    """Indices of the blocks whose tokens are all alike, the most alike first."""
    low = np.flatnonzero((spread != NOT_MEASURED) & (spread < config.spread))
    return tuple(low[np.argsort(spread[low], kind="stable")].tolist())

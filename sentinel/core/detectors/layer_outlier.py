"""Layer-outlier detector: which layers are far above, or orders of magnitude below, their like?

    judge(column, roles, config) -> OutlierReading(high, low)

A layer is compared with the layers of the same role in the other blocks (all query projections,
all norms): biases, norms and matrices differ by orders of magnitude in every healthy model. One far
above has a wrong scale; one far below is the choke point of the backward path.

Shapes:  column float32 [L]; roles int [L], equal for layers that may be compared, -1 for none.
Purity:  no state at all.
Errors:  OutlierConfig raises ConfigError. A layer that is not finite is another detector's; one of
         exactly 0 is frozen, and stays out.
Source:  practitioners: "one or several orders smaller than the rest". Healthy models keep the same
         role within a factor of 10 over depth; 30 is beyond that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sentinel.core import bounds
from sentinel.core.types import Column


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlierConfig:
    """Factors from the median of a role, and how many layers a role needs to have one."""

    above: float = 30.0
    below: float = 30.0
    least: int = 4

    def __post_init__(self) -> None:
        bounds.check(
            "layer_outlier",
            above=(self.above, 1.0, 1e12),
            below=(self.below, 1.0, 1e12),
            least=(self.least, 3, 1_000_000),
        )


@dataclass(frozen=True, slots=True)
class OutlierReading:
    """Indices of layers, the farthest from its median first."""

    high: tuple[int, ...] = ()
    low: tuple[int, ...] = ()


def judge(column: Column, roles: npt.NDArray[np.int_], config: OutlierConfig) -> OutlierReading:
    """Layers that stand out from their role."""
    with np.errstate(invalid="ignore"):
        there = np.flatnonzero(np.isfinite(column) & (column > 0) & (roles >= 0))
    high: list[tuple[float, int]] = []
    low: list[tuple[float, int]] = []
    y = np.log(column[there].astype(np.float64))
    for role in np.unique(roles[there]):
        mine = np.flatnonzero(roles[there] == role)
        if len(mine) < config.least:
            continue
        away = y[mine] - np.median(y[mine])
        high += [
            (-away[i], int(there[mine[i]])) for i in np.flatnonzero(away > np.log(config.above))
        ]
        low += [
            (away[i], int(there[mine[i]])) for i in np.flatnonzero(-away > np.log(config.below))
        ]
    return OutlierReading(tuple(i for _, i in sorted(high)), tuple(i for _, i in sorted(low)))


def roles_of(names: tuple[str, ...]) -> npt.NDArray[np.intp]:
    """Names that differ in their numbers only have the same role."""
    known: dict[str, int] = {}
    roles = []
    for name in names:
        role = ".".join("#" if part.isdigit() else part for part in name.split("."))
        roles.append(known.setdefault(role, len(known)))
    return np.array(roles, dtype=np.intp)

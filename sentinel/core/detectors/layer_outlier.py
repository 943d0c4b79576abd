"""Layer-outlier detector: which layers are far above, or orders of magnitude below, their like?

    judge(column, roles, config) -> OutlierReading(high, low)
    silent(rows, column, roles, blocks, config) -> of the rows whose gradient has long been 0, those
                                                   of which that says something
    still(rows, column) -> of the rows whose gradient has been 0, those that may still be


A layer is compared with the layers of the same role in the other blocks (all query projections,
all norms): biases, norms and matrices differ by orders of magnitude in every healthy model. One far
above has a wrong scale; one far below is the choke point of the backward path.

A gradient of exactly 0 has no ratio to anything. It is nothing in a step or two (an expert without
tokens, an adapter while its other half is 0); over hundreds of steps it is a dead activation or a
path that was cut. Two things tell that from a part that is not in use: fewer than half of the
layers of its role are so (a dead ReLU in a residual block); or nothing below it in depth has a
gradient either, though its like above have (a dead layer of a plain network, a detach). What is
frozen, or what no optimizer holds, is NOT_MEASURED.

Shapes:  column float32 [L]; roles int [L], equal for layers that may be compared, -1 for none;
         blocks int [L], -1 for layers outside of all.
Purity:  no state at all.
Errors:  OutlierConfig raises ConfigError. A layer that is not finite is another detector's.
Source:  practitioners: "one or several orders smaller than the rest". Healthy models keep the same
         role within a factor of 10 over depth; 30 is beyond that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sentinel.core import bounds
from sentinel.core.types import NOT_MEASURED, Column

Rows = npt.NDArray[np.int_]


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


def still(rows: Rows, column: Column) -> Rows:
    """What has a gradient leaves; what was not measured stays, and so does what is 0."""
    rows = rows[rows < len(column)]
    values = column[rows]
    left: Rows = rows[(values == 0) | (values == NOT_MEASURED)]
    return left


def silent(
    rows: Rows,
    column: Column,
    roles: npt.NDArray[np.int_],
    blocks: npt.NDArray[np.int_],
    config: OutlierConfig,
) -> tuple[int, ...]:
    """See the module docstring; what lies nearest to the loss first."""
    dead = np.zeros(len(column), bool)
    dead[rows] = True
    dead &= (column == 0) & (roles >= 0)
    alive = (column != 0) & (column != NOT_MEASURED) & (roles >= 0)
    if not (dead.any() and alive.any()):
        return ()
    places = int(roles.max()) + 1
    without = np.bincount(roles[dead], minlength=places)
    within = np.bincount(roles[alive], minlength=places)
    alone = (2 * without < without + within) & (without + within >= config.least)
    found = dead & alone[roles]
    lowest = blocks[alive & (blocks >= 0)]
    if lowest.size:
        found |= dead & (blocks >= 0) & (blocks < lowest.min()) & (within[roles] > 0)
    return tuple(np.flatnonzero(found)[::-1].tolist())


def roles_of(names: tuple[str, ...]) -> npt.NDArray[np.intp]:
    """Names that differ in their numbers only have the same role."""
    known: dict[str, int] = {}
    roles = []
    for name in names:
        role = ".".join("#" if part.isdigit() else part for part in name.split("."))
        roles.append(known.setdefault(role, len(known)))
    return np.array(roles, dtype=np.intp)

"""Depth detector: does a signal grow, or die, from block to block?

    judge(column, blocks, config) -> DepthReading(rho, total, flagged)
    gain(rms, compound(blocks), config) -> GainReading(product, worst, block, flagged)
    mixing_gain(mappings) -> (forward, backward)

If each block multiplies gradients or activations by rho, L blocks multiply them by rho^L: 1.1^100
is over ten thousand. The line is fitted through ln(value) over the block index by the median of all
pairwise slopes (Theil-Sen), which a block that is off by itself does not tilt. A trained model's
residual stream grows by a small factor in all; two orders of magnitude are a wrong residual scale
or a missing norm.

The gain of the residual path is RMS out over RMS in of each block, and its product over the depth:
it sees one block that amplifies by itself, which tilts no slope unless it lies in the middle. What
the first block gets is not measured, so its own gain is not known. What a block gets counts as the
largest RMS before it: a residual path does not fall by orders of magnitude, and where a dead layer
feeds a healthy one, the one that comes back to its level amplifies nothing. A block that is a
single layer has no such path at all: compound() leaves it out.

In models that mix several residual streams (hyper-connections) the gain is the largest absolute row
sum (forward) and column sum (backward) of the product of all mappings: 1 is ideal.

Shapes:  column float32 [L]; blocks int [L], -1 for a layer outside of all blocks. Several layers of
         one block count with the root of the sum of their squares. Mappings [out, in], first to
         last.
Units:   rho [1 / block]; total = rho ^ (blocks - 1).
Purity:  no state at all.
Errors:  DepthConfig raises ConfigError.
Source:  practitioners' rule on rho^L; about 3,000 was seen before a 27B run spiked, 1.6 after its
         mappings were constrained (mHC), and 10 is nearer to the latter. A gain of 100 is what
         `total` allows the whole depth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sentinel.core import bounds
from sentinel.core.types import NOT_MEASURED, Column

Blocks = npt.NDArray[np.int_]
Matrix = npt.NDArray[np.float64]
MOST = 64  # blocks that are compared in pairs; of more, an even selection


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthConfig:
    """Settings; see the module docstring.

    Attributes:
        total: growth, or decay, over the whole depth at which it is flagged.
        least: blocks that are needed before a slope means anything.
        gain: of the residual path, by one block or over all, at which it is flagged.
        mixing: gain of the product of all mappings at which it is flagged.
    """

    total: float = 100.0
    least: int = 4
    gain: float = 100.0
    mixing: float = 10.0

    def __post_init__(self) -> None:
        bounds.check(
            "depth",
            total=(self.total, 1.0, 1e12),
            least=(self.least, 3, 1_000_000),
            gain=(self.gain, 1.0, 1e12),
            mixing=(self.mixing, 1.0, 1e12),
        )


@dataclass(frozen=True, slots=True)
class DepthReading:
    """`rho` is nan when too few blocks were measured; above 1 later blocks are larger."""

    rho: float
    total: float
    flagged: bool


@dataclass(frozen=True, slots=True)
class GainReading:
    """`worst` is the largest gain of one block, `block` its index; nan and -1 where unknown."""

    product: float = math.nan
    worst: float = math.nan
    block: int = -1
    flagged: bool = False


_ABSENT = DepthReading(math.nan, math.nan, False)
_NO_GAIN = GainReading()


def per_block(column: Column, blocks: Blocks) -> npt.NDArray[np.float64]:
    """One value for each block that has one, in the order of depth; [n]."""
    there = (blocks >= 0) & (column != NOT_MEASURED)
    if not there.any():
        return np.empty(0)
    inside = blocks[there]
    squares = np.bincount(inside, np.square(column[there].astype(np.float64)))
    found: npt.NDArray[np.float64] = np.sqrt(squares[np.bincount(inside) > 0])
    return found


def judge(column: Column, blocks: Blocks, config: DepthConfig) -> DepthReading:
    """The slope over depth; values that are 0 or not finite are left out."""
    values = per_block(column, blocks)
    place = np.flatnonzero(np.isfinite(values) & (values > 0))
    if len(place) < config.least:
        return _ABSENT
    if len(place) > MOST:
        place = place[np.linspace(0, len(place) - 1, MOST).astype(np.intp)]
    y = np.log(values[place])
    i, j = np.triu_indices(len(place), 1)
    slope = float(np.median((y[j] - y[i]) / (place[j] - place[i])))
    total = math.exp(min(max(slope * (len(values) - 1), -700.0), 700.0))
    flagged = max(total, 1.0 / total) >= config.total
    return DepthReading(math.exp(min(max(slope, -700.0), 700.0)), total, flagged)


def gain(rms: Column, blocks: Blocks, config: DepthConfig) -> GainReading:
    """RMS of each block over the largest before it; what is 0 or not finite is left out."""
    values = per_block(rms, blocks)
    place = np.flatnonzero(np.isfinite(values) & (values > 0))
    if len(place) < 2:
        return _NO_GAIN
    kept = values[place]
    steps = kept[1:] / np.maximum.accumulate(kept)[:-1]
    at = int(steps.argmax())
    inside = np.unique(blocks[(blocks >= 0) & (rms != NOT_MEASURED)])
    product, worst = float(kept[-1] / kept[0]), float(steps[at])
    flagged = max(product, worst) >= config.gain
    return GainReading(product, worst, int(inside[place[at + 1]]), flagged)


def compound(blocks: Blocks) -> Blocks:
    """The blocks of more than one layer; the others are none."""
    layers = np.bincount(blocks[blocks >= 0], minlength=1)
    return np.where((blocks >= 0) & (layers[blocks] > 1), blocks, -1)


def mixing_gain(mappings: Sequence[Matrix]) -> tuple[float, float]:
    """(largest absolute row sum, largest absolute column sum) of the product of all mappings."""
    product: Matrix | None = None
    for mapping in mappings:
        product = mapping if product is None else mapping @ product
    if product is None:
        return math.nan, math.nan
    size = np.abs(product)
    return float(size.sum(1).max()), float(size.sum(0).max())


def mixing_flagged(gains: tuple[float, float], config: DepthConfig) -> bool:
    """Either direction amplifies by `config.mixing` and more; nan counts as that."""
    return any(not value < config.mixing for value in gains)

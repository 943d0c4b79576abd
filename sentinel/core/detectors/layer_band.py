"""Layer-band detector: which layer left its own band first?

    observe(state, column, config) -> (next state, BandReading(out, first))

Each layer has a band of its own: the running mean of ln(value), and the running mean of the
distance from it. A layer is out when it is `width` such distances and a factor `factor` above the
mean, or not finite. When trouble begins, many layers leave within a step or two, and the one that
blew up first is what a person wants to know: of those out at the first step of an episode, that is
the first in the order of the table, which for activations is the order of the forward pass.

A layer that is out does not move its band, for at most `patience` steps: then the new level is
taken for its own. The episode ends when no layer is out.

Shapes:  column float32 [L]; NOT_MEASURED rows are passed over.
Units:   steps with a column.
Purity:  state is an immutable value: means and distances as float32 bytes.
Errors:  BandConfig raises ConfigError. A column of another length starts anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sentinel.core import bounds
from sentinel.core.types import NOT_MEASURED, Column

RATE = 1 / 16  # of the running means: a memory of about 16 steps
TOLD = 8  # layers that an episode remembers


@dataclass(frozen=True, slots=True, kw_only=True)
class BandConfig:
    """Settings; see the module docstring."""

    width: float = 8.0
    factor: float = 3.0
    warmup: int = 32
    patience: int = 128

    def __post_init__(self) -> None:
        bounds.check(
            "layer_band",
            width=(self.width, 1.0, 1e6),
            factor=(self.factor, 1.0, 1e6),
            warmup=(self.warmup, 4, 100_000),
            patience=(self.patience, 1, 1_000_000),
        )


@dataclass(frozen=True, slots=True)
class BandState:
    """Means and mean distances of ln(value); `first` are the layers that opened the episode."""

    seen: int = 0
    mean: bytes = b""
    distance: bytes = b""
    first: tuple[int, ...] = ()
    out_for: int = 0


@dataclass(frozen=True, slots=True)
class BandReading:
    """`out`: farthest first; `first`: who left first in this episode, in the table's order."""

    out: tuple[int, ...] = ()
    first: tuple[int, ...] = ()


def observe(state: BandState, column: Column, config: BandConfig) -> tuple[BandState, BandReading]:
    """Judge a column against the bands, then let it move them."""
    measured = column != NOT_MEASURED
    with np.errstate(divide="ignore", invalid="ignore"):
        y = np.log(column.astype(np.float64)).astype(np.float32)
    usual = measured & np.isfinite(y)
    if len(state.mean) != 4 * len(column):
        mean = np.where(usual, y, np.float32(np.nan))
        fresh = BandState(1, mean.tobytes(), np.zeros(len(column), np.float32).tobytes())
        return fresh, BandReading()
    mean = np.frombuffer(state.mean, np.float32)
    distance = np.frombuffer(state.distance, np.float32)
    known = np.isfinite(mean)
    away = np.where(usual & known, y - mean, np.float32(0.0))
    band = np.maximum(config.width * distance, np.float32(np.log(config.factor)))
    broken = measured & ~np.isfinite(column)
    out = np.zeros(len(column), bool)
    if state.seen >= config.warmup and state.out_for < config.patience:
        out = broken | (usual & known & (away > band))
    move = usual & ~out
    new_mean = np.where(move, np.where(known, mean + RATE * away, y), mean)
    new_distance = np.where(move & known, distance + RATE * (np.abs(away) - distance), distance)
    indices = np.flatnonzero(out)
    excess = np.where(broken, np.inf, away - band)[indices]
    worst = tuple(indices[np.argsort(-excess, kind="stable")].tolist())
    first = (state.first or tuple(indices[:TOLD].tolist())) if worst else ()
    following = BandState(
        state.seen + 1,
        _bytes(new_mean),
        _bytes(new_distance),
        first,
        state.out_for + 1 if worst else 0,
    )
    return following, BandReading(worst, first)


def _bytes(values: npt.NDArray[np.float32]) -> bytes:
    return values.astype(np.float32).tobytes()

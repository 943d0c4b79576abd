"""What the session asks of a probe, and how its numbers combine over ranks.

    probe.attach()                          hooks in; probe.detach() takes every one out again
    probe.before_step(step)                 at the gate, gradients are final
    vectors = probe.pending()               on the device, for the one read of the step
    parts = probe.parts(values)             this rank's numbers, shape [L]
    parts = ... over the ranks, each by probe.combine[name] ...
    columns = probe.finish(parts)           columns by name
    probe.after_step(applied)               the optimizer has stepped, or not

With one process `resolve(probe, values)` is both of the last but one.

Micro-batches are combined inside the probe, by the same rule as ranks are.

Shapes:  parts are float64 [L] and columns float32 [L], in the order of the layer table. A row that
         was not measured is NOT_MEASURED in a part that combines by MAX and in a column, and 0 in
         one that combines by SUM (of squares, of counts).
Purity:  nothing here but pending()'s reader waits for the device.
Errors:  methods may raise; the session's guard catches. What runs inside the user's forward (hooks,
         replaced functions) catches for itself and says so in blind_spots().
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sentinel.core.types import NOT_MEASURED, Column

Float64 = npt.NDArray[np.float64]
Parts = Mapping[str, Float64]

UNSEEN_AFTER = 1  # step; then what has not been seen once is called unseen
# A module that is compiled keeps the hooks that it had when it was compiled.
NEVER = "no training forward of theirs was seen, as in code that was compiled before attach()"
EARLIER = (
    "attach() before the first forward of what torch.compile made, or torch.compiler.reset() "
    "after attach(), which compiles anew"
)


class Combine(StrEnum):
    """How a part's rows combine over micro-batches and ranks."""

    MAX = "max"
    SUM = "sum"


@dataclass(frozen=True, slots=True)
class Unseen:
    """Something that a probe cannot see, and the way out; becomes a BlindSpot of status()."""

    what: str
    way_out: str


class Probe(Protocol):
    """One family of signals."""

    @property
    def combine(self) -> Mapping[str, Combine]:
        """The names of its parts, and how each combines."""
        ...

    def attach(self) -> None:
        """Put the hooks in."""
        ...

    def detach(self) -> None:
        """Take them out; a second call does nothing."""
        ...

    def before_step(self, step: int) -> None:
        """Gradients are final: what was captured since the last call belongs to `step`."""
        ...

    def after_step(self, applied: bool) -> None:
        """optimizer.step() has run; not `applied`: it was held back.

        With late reads it is called with True first, and with what was done before the next gate.
        """
        ...

    def pending(self) -> list[Tensor]:
        """Small 1-d vectors on the device; valid until the next before_step()."""
        ...

    def parts(self, values: Sequence[Float64]) -> dict[str, Float64]:
        """This rank's numbers from the values of pending(); {}: nothing was measured."""
        ...

    def finish(self, parts: Parts) -> dict[str, Column]:
        """Columns from parts; a column of which no row was measured is left out."""
        ...

    def scalars(self) -> dict[str, float]:
        """Numbers without layers, by metric name; what is not known is left out."""
        ...

    def blind_spots(self) -> list[Unseen]:
        """What it cannot see here, each with the way out."""
        ...

    def notes(self) -> list[str]:
        """What it has settled by itself and a reader of its numbers should know."""
        ...


class Quiet:
    """Defaults for a probe that has nothing to say at most of the moments."""

    combine: Mapping[str, Combine] = {}

    def attach(self) -> None:
        """No hooks."""

    def detach(self) -> None:
        """No hooks."""

    def before_step(self, step: int) -> None:
        """Nothing to do."""

    def after_step(self, applied: bool) -> None:
        """Nothing to do."""

    def pending(self) -> list[Tensor]:
        """Nothing to read."""
        return []

    def parts(self, values: Sequence[Float64]) -> dict[str, Float64]:
        """No parts."""
        return {}

    def finish(self, parts: Parts) -> dict[str, Column]:
        """No columns."""
        return {}

    def scalars(self) -> dict[str, float]:
        """No scalars."""
        return {}

    def blind_spots(self) -> list[Unseen]:
        """Sees what it should."""
        return []

    def notes(self) -> list[str]:
        """Nothing to settle."""
        return []


def resolve(probe: Probe, values: Sequence[Float64]) -> dict[str, Column]:
    """Columns of a single process."""
    return probe.finish(probe.parts(values))


def merge(left: Parts, right: Parts, combine: Mapping[str, Combine]) -> dict[str, Float64]:
    """Two ranks' parts as one; nan wins over any number."""
    merged = dict(left)
    for name, value in right.items():
        if name not in merged:
            merged[name] = value
        elif combine[name] is Combine.MAX:
            merged[name] = np.maximum(merged[name], value)
        else:
            merged[name] = merged[name] + value
    return merged


def column(values: Float64) -> Column | None:
    """float32, or None when no row was measured."""
    if not values.size or values.max() == NOT_MEASURED:  # nan, if one is
        return None
    with np.errstate(over="ignore"):  # beyond float32 it is inf, which is what it says
        return values.astype(np.float32)

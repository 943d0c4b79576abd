"""Norm-band detector: is the gradient norm where practitioners want it, 1 to 10?

    judge(norm, config) -> BandReading(severity, band)

Above 10 is worth knowing, above 50 something structural is usually wrong (init variance, a missing
normalisation). Below 1 is where most healthy runs end, small models and means of means above all:
it is said only to those who ask for it (`low`).

Units:   norm as measured, before clipping.
Purity:  no state at all; how long it must last is the rule's business.
Errors:  NormBandConfig raises ConfigError.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from sentinel.core import bounds
from sentinel.core.types import Severity


class Band(StrEnum):
    """Where the norm lies."""

    ABSENT = "absent"
    NONFINITE = "nonfinite"  # another rule's business
    BELOW = "below"
    INSIDE = "inside"
    ABOVE = "above"
    ALARM = "alarm"


@dataclass(frozen=True, slots=True, kw_only=True)
class NormBandConfig:
    """The healthy band, and the value above which the architecture is suspected.

    Attributes:
        low: a norm below it is flagged; 0 for none. Practitioners name 1.
        high: a norm above it is flagged.
        alarm: above it the flag is a warning.
    """

    low: float = 0.0
    high: float = 10.0
    alarm: float = 50.0

    def __post_init__(self) -> None:
        bounds.check(
            "norm_band",
            alarm=(self.alarm, 0.0, 1e12),
            high=(self.high, 0.0, self.alarm),
            low=(self.low, 0.0, self.high),
        )


@dataclass(frozen=True, slots=True)
class BandReading:
    """`severity` is None inside the band and where nothing was measured."""

    severity: Severity | None
    band: Band


_ABSENT = BandReading(None, Band.ABSENT)
_NONFINITE = BandReading(None, Band.NONFINITE)
_BELOW = BandReading(Severity.INFO, Band.BELOW)
_INSIDE = BandReading(None, Band.INSIDE)
_ABOVE = BandReading(Severity.INFO, Band.ABOVE)
_ALARM = BandReading(Severity.WARNING, Band.ALARM)


def judge(norm: float | None, config: NormBandConfig) -> BandReading:
    """Say in which band the norm lies."""
    if norm is None:
        return _ABSENT
    if not norm < math.inf:
        return _NONFINITE
    if norm > config.alarm:
        return _ALARM
    if norm > config.high:
        return _ABOVE
    return _BELOW if norm < config.low else _INSIDE

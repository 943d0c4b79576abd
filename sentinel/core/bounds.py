"""One way to refuse a number: the message names the field, the bound, the value.

    bounds.check("spike", warmup=(config.warmup, 2, 64))

Errors:  ConfigError for the first value that is no number, outside its inclusive bounds, or not
         finite.
"""

from __future__ import annotations

import math

from sentinel.core.errors import ConfigError


def check(where: str, **checks: tuple[float, float, float]) -> None:
    """Raise ConfigError for the first (value, low, high) that is not low <= value <= high."""
    for name, (value, low, high) in checks.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{where}.{name} must be a number, got {value!r}")
        if not (math.isfinite(value) and low <= value <= high):
            upper = math.isfinite(high)
            bound = f"lie between {low:g} and {high:g}" if upper else f"be at least {low:g}"
            raise ConfigError(f"{where}.{name} must {bound}, got {value:g}")

"""Clip probe: how often the user's clipping bites, and what it leaves of the step.

    probe = ClipProbe()
    probe.on_scale(max_norm, total_norm); ...; probe.scalars()["clipped_step_ratio"]

Clipping that is on for many steps in a row shortens every step behind the optimizer's back. Told
are the share of the last WINDOW steps with clipping that were clipped, and the mean factor by which
their gradients were scaled. Steps without any clip call do not count.

Units:   shares in [0, 1].
Purity:  does not wait for the device; the total norm is read with everything else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from sentinel_hooks.probes.probe import Float64, Quiet

WINDOW = 100


class ClipProbe(Quiet):
    """Remembers the factors of the last clips."""

    def __init__(self, window: int = WINDOW) -> None:
        self._factors: deque[float] = deque(maxlen=window)
        self._now: list[tuple[float, Tensor]] = []
        self._reading: list[tuple[float, Tensor]] = []

    def on_scale(self, max_norm: float, total_norm: Any) -> None:
        """The gradients are about to be scaled by min(1, max_norm / total_norm)."""
        if isinstance(total_norm, Tensor) and type(total_norm) is Tensor:
            self._now.append((float(max_norm), total_norm.detach().reshape(1)))

    def before_step(self, step: int) -> None:
        """The clips since the last step are this step's."""
        self._reading, self._now = self._now, []

    def pending(self) -> list[Tensor]:
        """Total norms."""
        return [norm for _, norm in self._reading]

    def parts(self, values: Sequence[Float64]) -> dict[str, Float64]:
        """No columns; the smallest factor of the step is remembered."""
        factors = [
            min(1.0, limit / (float(value[0]) + 1e-6))
            for (limit, _), value in zip(self._reading, values, strict=True)
            if value[0] == value[0]
        ]
        self._reading = []
        if factors:
            self._factors.append(min(factors))
        return {}

    def scalars(self) -> dict[str, float]:
        """Share of clipped steps, and what was left of the gradients on the mean."""
        if not self._factors:
            return {}
        n = len(self._factors)
        return {
            "clipped_step_ratio": sum(f < 1.0 for f in self._factors) / n,
            "clip_factor_mean": sum(self._factors) / n,
        }

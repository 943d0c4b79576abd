"""Pace probe: seconds a step, tokens a second.

    probe = PaceProbe(clock)
    probe.on_forward(args, kwargs); probe.before_step(step); probe.scalars()["tokens_per_second"]

A step lasts from gate to gate, evaluation and saving in between included: that is what a person
waits for. Tokens are the elements of the first integer tensor of a training forward (ids), counted
over the micro-batches of a step; a model that takes none has a step time only.

Units:   s; tokens of this rank / s.
Purity:  reads shapes, never values. The clock is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from sentinel_hooks.probes.probe import Quiet


class PaceProbe(Quiet):
    """Times the steps."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: float | None = None
        self._tokens = 0
        self._found: dict[str, float] = {}

    def on_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A training forward of a root model begins."""
        self._tokens += _tokens(args, kwargs)

    def before_step(self, step: int) -> None:
        """A step ends here, and the next begins."""
        now, last = self._clock(), self._last
        tokens, self._tokens = self._tokens, 0
        self._last = now
        self._found = {}
        if last is not None and now > last:
            self._found["step_seconds"] = now - last
            if tokens:
                self._found["tokens_per_second"] = tokens / (now - last)

    def scalars(self) -> dict[str, float]:
        """Of the step that has just ended; the first one's beginning was not seen."""
        return dict(self._found)


def _tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    first = kwargs.get("input_ids")
    for value in (first, *args, *kwargs.values()):
        if isinstance(value, Mapping):  # a batch as one object
            value = value.get("input_ids")
        if isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32):
            return value.numel()
    return 0

"""Series of losses and norms for the detector tests: calm noise with trouble in it."""

from __future__ import annotations

import math
import random

from hypothesis import strategies as st

Series = list[tuple[float | None, float | None]]

# What a stretch of steps does to (loss, norm), given the noise g() ~ N(0, 1) of the step.
KINDS = (
    "calm",
    "calm",
    "falling",
    "spike",
    "lone spikes",
    "small spike",
    "shift up",
    "norm burst",
    "norm burst with loss",
    "nan loss",
    "nan norm",
    "no loss",
    "no norm",
    "tiny loss",
    "negative",
)


def make(kinds: list[tuple[str, int]], seed: int) -> Series:
    """Concatenate stretches of (kind, length); the level and its trend go on between them."""
    rng = random.Random(seed)
    level, out = math.log(3.0), []
    for kind, length in kinds:
        if kind == "shift up":
            level += 0.25
        for i in range(length):
            if kind == "falling":
                level -= 0.02
            loss: float | None = math.exp(level + 0.015 * rng.gauss(0, 1))
            norm: float | None = math.exp(0.2 * rng.gauss(0, 1))
            assert loss is not None
            assert norm is not None
            if kind == "spike" or (kind == "lone spikes" and i % 3 == 0):
                loss *= 1.6
            elif kind == "small spike":
                loss *= 1.09
            elif kind == "norm burst":
                norm *= 30.0
            elif kind == "norm burst with loss":
                loss, norm = loss * 1.12, norm * 30.0
            elif kind == "nan loss":
                loss = rng.choice([math.nan, math.inf, -math.inf])
            elif kind == "nan norm":
                norm = rng.choice([math.nan, math.inf])
            elif kind == "no loss":
                loss = None
            elif kind == "no norm":
                norm = rng.choice([None, 0.0])
            elif kind == "tiny loss":
                loss = loss * 0.01
            elif kind == "negative":
                loss = -loss
            out.append((loss, norm))
    return out


stretches = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 9)), min_size=1, max_size=14)
series = st.builds(make, stretches, st.integers(0, 2**20))

"""Reading from the device: everything that one step needs, in one copy for each device.

    vectors, scalars = read(vectors, scalars)

Purity:  this is the one place of the hot path that waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Float64 = npt.NDArray[np.float64]


def read(vectors: Sequence[Tensor], scalars: Sequence[Tensor]) -> tuple[list[Float64], list[float]]:
    """The values of 1-d `vectors` and of `scalars` on the host, in float64."""
    tensors = [*vectors, *scalars]
    if all(t.device.type == "cpu" for t in tensors):
        return (
            [v.detach().double().numpy() for v in vectors],
            [float(s) for s in scalars],
        )
    flat: list[Float64 | None] = [None] * len(tensors)
    places: dict[torch.device, list[int]] = {}
    for i, t in enumerate(tensors):
        places.setdefault(t.device, []).append(i)
    for chosen in places.values():
        packed = torch.cat([tensors[i].detach().reshape(-1) for i in chosen])  # widest dtype wins
        values = packed.cpu().double().numpy()
        start = 0
        for i in chosen:
            size = tensors[i].numel()
            flat[i] = values[start : start + size]
            start += size
    found = [f for f in flat if f is not None]
    n = len(vectors)
    return found[:n], [float(f[0]) for f in found[n:]]

"""Reduce: one packed float64 vector per step, added up over the ranks.

    vector = pack(part, layers)       this rank's part
    vector = reducer(vector)          one all-reduce with SUM; with one process the identity
    part = unpack(vector)             what all ranks together measured

The shape is fixed from now on so that more ranks can be added without a new format: a BLIND count
(any rank on which measuring failed), the sum and the sum of squares of (attempt, seq) so that ranks
out of step notice each other, then sums. Squares of norms add up, norms do not.

Shapes:  vector float64 [HEADER + L].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Reducer = Callable[[Float64], Float64]

(RANKS, BLIND, ATTEMPT, ATTEMPT_SQ, SEQ, SEQ_SQ, LOSS, LOSSES, NORM_SQ, NORMS, PARAMS_BAD) = range(
    11
)
HEADER = 11


@dataclass(slots=True)
class Part:
    """What one rank, or all together, measured; None where nothing was.

    Attributes:
        loss: sum over the ranks that saw one; `losses` says how many.
        params_bad: ranks whose parameters are not all finite; None when nobody looked.
    """

    attempt: int
    seq: int
    blind: bool = False
    loss: float | None = None
    total_sq: float | None = None
    layer_sq_L: Float64 | None = None
    params_bad: bool = False
    in_step: bool = True


def pack(part: Part, layers: int) -> Float64:
    """This rank's vector."""
    vector = np.zeros(HEADER + layers)
    vector[RANKS] = 1.0
    vector[BLIND] = part.blind
    vector[ATTEMPT] = part.attempt
    vector[ATTEMPT_SQ] = part.attempt * part.attempt
    vector[SEQ] = part.seq
    vector[SEQ_SQ] = part.seq * part.seq
    if part.loss is not None:
        vector[LOSS] = part.loss
        vector[LOSSES] = 1.0
    if part.total_sq is not None and part.layer_sq_L is not None:
        vector[NORM_SQ] = part.total_sq
        vector[NORMS] = 1.0
        vector[HEADER:] = part.layer_sq_L
    vector[PARAMS_BAD] = part.params_bad
    return vector


def unpack(vector: Float64) -> Part:
    """All ranks' part: the loss is their mean, squares are summed."""
    ranks = float(vector[RANKS])
    # Equal everywhere exactly when n * sum(x^2) == sum(x)^2; whole numbers, so float64 is exact.
    in_step = bool(
        ranks * vector[SEQ_SQ] == vector[SEQ] ** 2
        and ranks * vector[ATTEMPT_SQ] == vector[ATTEMPT] ** 2
    )
    measured = vector[NORMS] > 0
    return Part(
        attempt=int(vector[ATTEMPT] / ranks),
        seq=int(vector[SEQ] / ranks),
        blind=bool(vector[BLIND] > 0) or not in_step,
        loss=float(vector[LOSS] / vector[LOSSES]) if vector[LOSSES] > 0 else None,
        total_sq=float(vector[NORM_SQ]) if measured else None,
        layer_sq_L=vector[HEADER:] if measured else None,
        params_bad=bool(vector[PARAMS_BAD] > 0),
        in_step=in_step,
    )


def alone(vector: Float64) -> Float64:
    """The reducer of a single process."""
    return vector

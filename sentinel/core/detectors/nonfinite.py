"""Non-finite detector: which signals of this step are nan or inf?

    judge(observation) -> ("loss", "grad")

Armed from step 0; what was not measured is not non-finite.

Purity:  no state at all.
Errors:  none.
"""

from __future__ import annotations

import math

from sentinel.core.types import Observation

LOSS = "loss"
GRAD = "grad"
PARAMS = "params"


def judge(observation: Observation) -> tuple[str, ...]:
    """The non-finite signals, in the order loss, grad, params."""
    loss, norm = observation.loss, observation.grad_norm
    loss_bad = loss is not None and not math.isfinite(loss)
    norm_bad = norm is not None and not math.isfinite(norm)
    if not (loss_bad or norm_bad or observation.params_finite is False):
        return ()
    return tuple(
        name
        for name, bad in (
            (LOSS, loss_bad),
            (GRAD, norm_bad),
            (PARAMS, observation.params_finite is False),
        )
        if bad
    )

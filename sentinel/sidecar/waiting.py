"""Why a run is "warming": which rule waits for what.

    waiting(run) -> [{"rule": "grad_norm", "detail": "..."}], empty for a run that is not warming

The engine arms the norm rule and the loss rules each on its own; people see one word for both and
want to know how long. What is said follows core.detectors: so many accepted norms, halves that
agree, so many losses. Rules on values that are not finite never wait.

Purity:  no clock, no I/O.
"""

from __future__ import annotations

from sentinel.core.detectors.grad_norm import NormConfig, NormState
from sentinel.core.types import Protection, Status
from sentinel.core.windows import median
from sentinel.sidecar.runs import Run


def waiting(run: Run) -> list[dict[str, str]]:
    """See the module docstring."""
    decision = run.decision
    if decision is None or decision.readings.protection is not Protection.WARMING:
        return []
    stats = None if run.state is None else run.state.stats
    if stats is None:
        return [{"rule": "", "detail": "baselines are being learned; nobody has told which"}]
    found = []
    if decision.readings.norm_status is Status.WARMING_UP:
        found.append({"rule": "grad_norm", "detail": _norm(stats.norm, run.policy.grad_norm)})
    losses, enough = len(stats.spike.losses), run.policy.spike.warmup
    if losses < enough:
        found.append(
            {
                "rule": "loss_spike",
                "detail": f"the loss rules wait for {enough} finite losses, {losses} so far",
            }
        )
    return found


def _norm(state: NormState, config: NormConfig) -> str:
    rule, norms = "the gradient norm rule waits", state.norms
    if len(norms) < config.warmup:
        return f"{rule} for {config.warmup} accepted norms, {len(norms)} so far"
    if not state.flat:
        half = len(norms) // 2
        older, newer = median(sorted(norms[:half])), median(sorted(norms[half:]))
        return (
            f"{rule} for its baseline to hold still: the medians of the two halves of its window "
            f"({older:.4g} and {newer:.4g}) differ by {config.flatness:g}x or more"
        )
    return f"{rule}: the mean of the accepted norms is 0"

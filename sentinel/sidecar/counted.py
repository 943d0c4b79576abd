"""How many of a run's open incidents are advice, so that a list of runs raises no false alarm.

    summary(run, now) | counted(run)     {"open_advice": 2}, None where nothing is known of the run

Advice is every incident but instability and a moved level: a flag, of which nothing is done.
"""

from __future__ import annotations

from sentinel.core.incidents import INSTABILITY, LEVEL_SHIFT
from sentinel.core.types import IncidentState
from sentinel.sidecar.runs import Run

ACTED = (INSTABILITY, LEVEL_SHIFT)


def counted(run: Run) -> dict[str, int | None]:
    """See the module docstring."""
    if run.state is None:
        return {"open_advice": None}
    listed = run.state.ledger.incidents
    return {
        "open_advice": sum(
            i.state is not IncidentState.RESOLVED and i.key not in ACTED for i in listed
        )
    }

"""Exemplars: which step, and which incident, a counter of a run last counted up for.

    figures.exemplars.note("r7", state, now)              with every report; looks at what changed
    figures.exemplars.of("rollbacks_total", ("loss_spike", "restored"))
        -> ' # {step="412",incident="r7:3"} 1.0 1700000000.5', "" when nothing is known

For OpenMetrics alone: the text format has no place for them. They lead from a bend in a curve to
the step and to what `sentinel ack` takes, and cost no series. What was counted before the sidecar
saw the run has none. Skips, rollbacks and steps that were not finite belong to the incident of the
instability, flags to the one of their own key, whatever else was raised since.

Units:   `now` in Unix seconds; steps are attempted optimizer steps.
Purity:  no clock, no I/O.
"""

from __future__ import annotations

from sentinel.core.exposition import escape, number
from sentinel.core.incidents import INSTABILITY
from sentinel.core.state import Counters, Ledger, State

MOST = 128  # characters of all names and values together: OpenMetrics
# By metric: the field of Counters. Its keys are the label's value; of rollbacks, two with "/".
FIELDS = {
    "skipped_steps_total": "skipped",
    "rollbacks_total": "rollbacks",
    "nonfinite_steps_total": "nonfinite",
    "flags_total": "flags",
}

_Key = tuple[str, tuple[str, ...]]


class Exemplars:
    """The newest one of each counter of a run."""

    def __init__(self) -> None:
        self._counters: Counters | None = None
        self._newest: dict[_Key, str] = {}

    def note(self, run: str, state: State, now: float) -> None:
        """See what has been counted since the last call; state.step is the step that comes next."""
        counters, before = state.ledger.counters, self._counters
        if counters is before:
            return
        self._counters = counters
        if before is None:
            return
        step = state.step - 1
        for metric, field in FIELDS.items():
            new, old = getattr(counters, field), getattr(before, field)
            if new is old:
                continue
            known = dict(old)
            for key, count in new:
                more = count - known.get(key, 0)
                if more > 0:
                    kind = key if field == "flags" else INSTABILITY
                    text = _labels(run, state.ledger, step, kind)
                    said = f" # {text} {number(more)} {number(round(now, 3))}"
                    values = key.partition("/")[::2] if field == "rollbacks" else (key,)
                    self._newest[metric, values] = said

    def of(self, metric: str, values: tuple[str, ...]) -> str:
        """What stands behind that sample."""
        return self._newest.get((metric, values), "")


def _labels(run: str, ledger: Ledger, step: int, kind: str) -> str:
    found = {"step": str(step)}
    for incident in reversed(ledger.incidents):
        if incident.key == kind and incident.opened <= step <= max(
            incident.last, incident.resolved or 0
        ):
            found["incident"] = f"{run}:{incident.number}"
            if sum(len(name) + len(value) for name, value in found.items()) > MOST:
                found["incident"] = str(incident.number)
            break
    return "{" + ",".join(f'{name}="{escape(value)}"' for name, value in found.items()) + "}"

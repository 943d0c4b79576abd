"""A run as JSON, for people: one line of the list, or everything about it.

    summary(run, now), details(run, now)

What was not measured is None; non-finite numbers become words where JSON is written (door.answer).

Units:   times in Unix seconds; steps are attempted optimizer steps.
Purity:  no clock, no I/O.
"""

from __future__ import annotations

from typing import Any

from sentinel.core.types import IncidentState
from sentinel.sidecar.runs.run import Run

RECENT_SHOWN = 64


def summary(run: Run, now: float) -> dict[str, Any]:
    """One line of the list of runs."""
    seen, decision = run.observation or run.earlier, run.decision
    protection = None if decision is None else str(decision.readings.protection)
    if seen is None:
        protection = "off"  # nobody has measured anything
    elif decision is not None and run.said:
        protection = run.said
    return {
        "run": run.name,
        "state": run.run_state,
        "step": None if seen is None else seen.step,
        "loss": None if seen is None else seen.loss,
        "grad_norm": None if seen is None else seen.grad_norm,
        "protection": protection,
        "protection_why": run.said_why,
        "decides": run.decides,
        "reason": run.reason,
        "watched": run.watched,
        "policy": run.policy.name,
        "mode": str(run.policy.mode),
        "open_incidents": None
        if run.state is None
        else sum(i.state is not IncidentState.RESOLVED for i in run.state.ledger.incidents),
        "last_report_s_ago": round(max(now - run.last_report, 0.0), 3),
        "registered_at": run.registered,
        "ended_at": run.ended,
    }


def details(run: Run, now: float) -> dict[str, Any]:
    """Everything about one run that a person may want to see."""
    ledger = None if run.state is None else run.state.ledger
    return summary(run, now) | {
        "incarnation": run.incarnation,
        "fence": run.fence,
        "exclusive": run.session is None or bool(run.session.id),
        "info": run.info,
        "engine_version": run.engine_version,
        "policy_hash": run.policy_hash,
        "layers": [layer.name for layer in run.layers],
        "decision": run.decision,
        "ledger": ledger,
        "record": {
            "frames": run.kept.seen.count,
            "late": run.figures.late_reports,
            "holes": run.kept.seen.missing,
            "dropped": run.figures.counts.dropped,
        },
        "missing_reports": run.kept.seen.holes(),
        "unwritten_reports": run.figures.unwritten,
        "refused_reports": run.figures.rejected,
        "decided": run.figures.decided,
        "misses": run.figures.counts.misses,
        "mismatches": run.figures.counts.mismatches,
        "longest_wait_s": run.figures.counts.longest_wait_s,
        "gauges": run.gauges,
        "state_handovers": run.figures.handovers,
        "second_writers_refused": run.refused,
        "orders": [
            {
                "command": order.command,
                "state": order.state,
                "taken_step": order.taken_step,
                "detail": order.detail,
                "issued_at": order.issued,
                "expires_at": order.expires,
            }
            for order in run.orders
        ],
        "recent": list(run.figures.recent)[-RECENT_SHOWN:],
    }

"""Incidents: findings grouped in time, with Prometheus's states.

    touch(ledger, key, step, ...) -> ledger      open one, or extend the open one
    resolve(ledger, key, step) -> ledger         close it, unless it is latched

At most one incident of a key is open. The list holds the open ones and the newest resolved ones,
at most KEPT in all; what falls off has long been in the trace.
"""

from __future__ import annotations

from dataclasses import replace

from sentinel.core.state import Incident, Ledger
from sentinel.core.types import IncidentState, Severity

INSTABILITY = "instability"
LEVEL_SHIFT = "level_shift"
KEPT = 32
ACTIONS_KEPT = 64  # per incident; a longer list tells on-call nothing new

_ORDER = {Severity.INFO: 0, Severity.WARNING: 1, Severity.CRITICAL: 2}


def find(ledger: Ledger, key: str) -> Incident | None:
    """The open incident of `key`, or None."""
    for incident in reversed(ledger.incidents):
        if incident.key == key and incident.state is not IncidentState.RESOLVED:
            return incident
    return None


def touch(
    ledger: Ledger,
    key: str,
    step: int,
    summary: str,
    severity: Severity,
    *,
    fire: bool = False,
    latch: bool = False,
    layers: tuple[int, ...] = (),
    action: tuple[int, str, str] | None = None,
) -> Ledger:
    """Open an incident of `key`, or extend the open one; severity and state only rise."""
    old = find(ledger, key)
    if old is None:
        new = Incident(
            number=ledger.next_incident,
            key=key,
            state=IncidentState.FIRING if fire else IncidentState.PENDING,
            severity=severity,
            opened=step,
            last=step,
            summary=summary,
            fired=step if fire else None,
            steps=1,
            latched=latch,
            layers=layers,
            actions=(action,) if action else (),
        )
        incidents = (*ledger.incidents, new)
        return replace(ledger, incidents=_trim(incidents), next_incident=new.number + 1)
    fired = old.fired if old.fired is not None or not fire else step
    new = replace(
        old,
        state=IncidentState.FIRING if fired is not None else old.state,
        severity=max(old.severity, severity, key=_ORDER.__getitem__),
        last=step,
        summary=summary,
        fired=fired,
        steps=old.steps + (old.last != step),
        latched=old.latched or latch,
        layers=tuple(dict.fromkeys((*old.layers, *layers)))[:64],
        actions=(*old.actions, action)[:ACTIONS_KEPT] if action else old.actions,
    )
    return _replaced(ledger, old, new)


def resolve(ledger: Ledger, key: str, step: int, *, acknowledged: bool = False) -> Ledger:
    """Close the open incident of `key`; a latched one waits for a person."""
    old = find(ledger, key)
    if old is None or (old.latched and not acknowledged):
        return ledger
    return _replaced(ledger, old, replace(old, state=IncidentState.RESOLVED, resolved=step))


def _replaced(ledger: Ledger, old: Incident, new: Incident) -> Ledger:
    incidents = tuple(new if i is old else i for i in ledger.incidents)
    return replace(ledger, incidents=incidents)


def _trim(incidents: tuple[Incident, ...]) -> tuple[Incident, ...]:
    """Drop the oldest resolved ones beyond KEPT, and only if none is left the oldest open ones."""
    while len(incidents) > KEPT:
        for at, incident in enumerate(incidents):  # noqa: B007
            if incident.state is IncidentState.RESOLVED:
                break
        else:
            at = 0
        incidents = incidents[:at] + incidents[at + 1 :]
    return incidents

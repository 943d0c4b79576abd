"""Incidents: findings grouped in time, with Prometheus's states.

    touch(ledger, key, step, ...) -> ledger      open one, or extend the open one
    resolve(ledger, key, step) -> ledger         close it, unless it is latched
    not_restored(ledger, key) -> ledger          its newest rollback came to nothing

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
ACTIONS_KEPT = 64  # per incident, with the mark of those left out
FIRST_KEPT = 16  # of them, how it began; then the mark; then the newest
LEFT_OUT = "left_out"  # the mark: (step of the newest left out, LEFT_OUT, how many)

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
        actions=_longer(old.actions, action) if action else old.actions,
    )
    return _replaced(ledger, old, new)


def resolve(ledger: Ledger, key: str, step: int, *, acknowledged: bool = False) -> Ledger:
    """Close the open incident of `key`; a latched one waits for a person."""
    old = find(ledger, key)
    if old is None or (old.latched and not acknowledged):
        return ledger
    return _replaced(ledger, old, replace(old, state=IncidentState.RESOLVED, resolved=step))


def not_restored(ledger: Ledger, key: str) -> Ledger:
    """The newest rollback in the open incident of `key` was decided, and nothing was restored."""
    old = find(ledger, key)
    if old is None:
        return ledger
    for at in range(len(old.actions) - 1, -1, -1):
        step, name, rule = old.actions[at]
        if name == "rollback":
            actions = (*old.actions[:at], (step, "rollback_failed", rule), *old.actions[at + 1 :])
            return _replaced(ledger, old, replace(old, actions=actions))
    return ledger


def _longer(
    actions: tuple[tuple[int, str, str], ...], action: tuple[int, str, str]
) -> tuple[tuple[int, str, str], ...]:
    """With one more: the first and the newest are kept, and how many are not is said.

    Of a long incident the skips are alike; a rollback or a halt goes only when no skip is left.
    """
    if len(actions) < ACTIONS_KEPT:
        return (*actions, action)
    first, rest = actions[:FIRST_KEPT], actions[FIRST_KEPT:]
    many, until = 0, -1
    if rest[0][1] == LEFT_OUT:
        until, many = rest[0][0], int(rest[0][2])
        rest = rest[1:]
    rest = (*rest, action)
    while len(first) + 1 + len(rest) > ACTIONS_KEPT:
        at = next((i for i, a in enumerate(rest) if a[1].endswith("skip_step")), 0)
        until, many = max(until, rest[at][0]), many + 1
        rest = (*rest[:at], *rest[at + 1 :])
    return (*first, (until, LEFT_OUT, str(many)), *rest)


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

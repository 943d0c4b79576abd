"""Incidents: states and severities only rise, a latched one waits for a person, few are kept."""

from __future__ import annotations

import pytest

from sentinel.core import incidents
from sentinel.core.state import Ledger
from sentinel.core.types import IncidentState, Severity

KEY = incidents.INSTABILITY


def opened(**more: object) -> Ledger:
    return incidents.touch(Ledger(), KEY, 5, "first", Severity.WARNING, **more)  # type: ignore[arg-type]


def test_it_is_pending_until_it_fires_and_never_goes_back() -> None:
    ledger = opened()
    assert ledger.incidents[0].state is IncidentState.PENDING
    ledger = incidents.touch(ledger, KEY, 6, "second", Severity.WARNING, fire=True)
    ledger = incidents.touch(ledger, KEY, 7, "third", Severity.WARNING)
    (one,) = ledger.incidents
    assert (one.state, one.opened, one.fired, one.last) == (IncidentState.FIRING, 5, 6, 7)
    assert (one.steps, one.summary) == (3, "third")


@pytest.mark.parametrize(
    ("was", "new", "stays"),
    [
        (Severity.CRITICAL, Severity.INFO, Severity.CRITICAL),
        (Severity.WARNING, Severity.INFO, Severity.WARNING),
        (Severity.INFO, Severity.CRITICAL, Severity.CRITICAL),
    ],
)
def test_its_severity_only_rises(was: Severity, new: Severity, stays: Severity) -> None:
    ledger = incidents.touch(Ledger(), KEY, 1, "", was)
    assert incidents.touch(ledger, KEY, 2, "", new).incidents[0].severity is stays


def test_a_latched_one_stays_open_until_somebody_acknowledges_it() -> None:
    ledger = opened(fire=True, latch=True)
    ledger = incidents.touch(ledger, KEY, 6, "", Severity.WARNING)  # not latched by this one
    assert incidents.resolve(ledger, KEY, 9) == ledger
    done = incidents.resolve(ledger, KEY, 9, acknowledged=True)
    assert (done.incidents[0].state, done.incidents[0].resolved) == (IncidentState.RESOLVED, 9)
    assert incidents.find(done, KEY) is None


def test_after_one_is_resolved_the_next_has_a_number_of_its_own() -> None:
    ledger = incidents.resolve(opened(), KEY, 8)
    ledger = incidents.touch(ledger, KEY, 9, "again", Severity.INFO)
    assert [(i.number, i.opened) for i in ledger.incidents] == [(1, 5), (2, 9)]


def test_the_list_is_bounded_and_open_ones_stay_longest() -> None:
    ledger = incidents.touch(Ledger(), "open", 0, "", Severity.INFO)
    for step in range(3 * incidents.KEPT):
        ledger = incidents.touch(ledger, KEY, step, "", Severity.INFO)
        ledger = incidents.resolve(ledger, KEY, step)
    assert len(ledger.incidents) == incidents.KEPT
    assert ledger.incidents[0].key == "open"
    assert ledger.incidents[-1].opened == 3 * incidents.KEPT - 1


def acted(count: int, rollback_at: int | None = None) -> tuple[tuple[int, str, str], ...]:
    ledger = Ledger()
    for step in range(count):
        name = "rollback" if step == rollback_at else "skip_step"
        ledger = incidents.touch(
            ledger, KEY, step, "", Severity.WARNING, action=(step, name, "nonfinite_loss")
        )
    return ledger.incidents[0].actions


@pytest.mark.parametrize("count", [1, 63, 64, 65, 66, 3000])
def test_a_long_incident_keeps_how_it_began_and_the_newest_and_says_how_many_it_left_out(
    count: int,
) -> None:
    actions = acted(count)
    assert len(actions) == min(count, incidents.ACTIONS_KEPT)
    marks = [a for a in actions if a[1] == incidents.LEFT_OUT]
    said = sum(int(many) for _, _, many in marks)
    assert len(actions) - len(marks) + said == count
    assert [a[0] for a in actions] == sorted(a[0] for a in actions)
    assert actions[0][0] == 0
    assert actions[-1][0] == count - 1
    if marks:
        assert actions.index(marks[0]) == incidents.FIRST_KEPT
        assert marks[0][0] == actions[incidents.FIRST_KEPT + 1][0] - 1


def test_a_rollback_in_a_long_incident_stays_listed() -> None:
    actions = acted(3000, rollback_at=2157)
    assert (2157, "rollback", "nonfinite_loss") in actions
    assert len(actions) == incidents.ACTIONS_KEPT


def test_a_rollback_that_restored_nothing_is_told_so() -> None:
    ledger = incidents.touch(Ledger(), KEY, 1, "", Severity.WARNING, action=(1, "rollback", "r"))
    ledger = incidents.touch(ledger, KEY, 5, "", Severity.WARNING, action=(5, "rollback", "r"))
    (one,) = incidents.not_restored(ledger, KEY).incidents
    assert one.actions == ((1, "rollback", "r"), (5, "rollback_failed", "r"))
    assert incidents.not_restored(Ledger(), KEY) == Ledger()

"""What the engine makes of copies on disk: another copy of a known step, and an older target."""

from __future__ import annotations

from sentinel.core import engine
from sentinel.core.events import Restored, SnapshotLost, SnapshotTaken
from sentinel.core.policy import Policy
from sentinel.core.state import Ledger, Snapshot, State, Stats

POLICY = Policy()
REGISTRY = (Snapshot(0, True), Snapshot(50, True, 32, 50), Snapshot(100, False, 9, 100))


def test_a_disk_copy_of_a_known_step_changes_nothing_and_of_another_is_a_candidate() -> None:
    state = State(120, ledger=Ledger(snapshots=REGISTRY, in_weights=118))
    assert engine.note(state, SnapshotTaken(50, "disk"), POLICY) is state
    assert engine.note(state, SnapshotTaken(100, "disk"), POLICY) is state
    other = engine.note(state, SnapshotTaken(120, "disk"), POLICY)
    assert other.ledger.snapshots == (*REGISTRY, Snapshot(120, False, 0, 118))
    # A RAM copy of the same step is a new one: it is confirmed anew.
    again = engine.note(state, SnapshotTaken(100), POLICY)
    assert again.ledger.snapshots[-1] == Snapshot(100, False, 0, 118)


def test_when_an_older_one_was_restored_a_relapse_takes_a_strictly_older_one_still() -> None:
    decided = Ledger(
        snapshots=(Snapshot(0, True), Snapshot(50, True), Snapshot(100, True, 32, 100)),
        last_target=100,
        pending_restore=100,
        in_weights=130,
    )
    state = engine.note(State(131, ledger=decided), SnapshotLost(131, 100, "damaged"), POLICY)
    state = engine.note(state, Restored(131, 50, Stats()), POLICY)
    assert [s.step for s in state.ledger.snapshots] == [0, 50]
    assert state.ledger.last_target == 50
    usual = engine.note(State(131, ledger=decided), Restored(131, 100, Stats()), POLICY)
    assert usual.ledger.last_target == 100

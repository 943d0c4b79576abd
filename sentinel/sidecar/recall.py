"""What became of a run of an earlier start: its engine's state, computed again from its record.

    past = Past(runs, store)               once, at the start; asks the database for plain counts
    await past.recall(run)                 its last state, so that nothing about it reads "unknown"
    past.tally(run)                        {"skipped": 12, "rolled_back": 1}, for a list of runs
    async with past.at_hand(runs): ...     these in the background: they have metrics still

A running trainer hands its state over with its next step; one that has ended or is lost does not
come. Its newest segment begins with a state and holds what was observed and done since, and the
engine is pure: so its end is computed again, ledger, counters, incidents and snapshots, exactly.
That takes half a second for 3,500 steps of 200 layers, so it is done in a thread, one run at a
time, when somebody asks; a list of many runs shows the executed actions that the database counts.

Errors:  none: what cannot be computed again stays unknown.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from sentinel.core import engine
from sentinel.core.errors import SentinelError
from sentinel.core.events import Event
from sentinel.core.policy import Policy
from sentinel.core.state import State
from sentinel.core.types import Action, Decision, Observation
from sentinel.sidecar.runs import Run, Runs
from sentinel.sidecar.store.models import DecisionRow
from sentinel.sidecar.store.record import newest_chapter
from sentinel.sidecar.store.store import Store
from sentinel.traces.records import StepRecord

logger = logging.getLogger(__name__)

PAUSE_S = 0.05  # between two runs in the background: trainers come first


@dataclass(frozen=True, slots=True)
class Recalled:
    """How a run stood at its end."""

    state: State
    observation: Observation
    decision: Decision


def recalled(directory: Path, incarnation: str, policy: Policy) -> Recalled | None:
    """The end of an incarnation's record; None when the record does not say enough."""
    try:
        return _recalled(directory, incarnation, policy)
    except (SentinelError, OSError, ValueError) as error:
        logger.info("an earlier run cannot be recalled directory=%s error=%s", directory, error)
        return None


def _recalled(directory: Path, incarnation: str, policy: Policy) -> Recalled | None:
    state: State | None = None
    steps: list[tuple[int, list[Event], StepRecord]] = []
    between: list[Event] = []
    for item in newest_chapter(directory, incarnation):
        if isinstance(item, State):
            state = item
        elif isinstance(item, StepRecord):
            steps.append((item.step, between, item))
            between = []
        else:
            between.append(item)
    if state is None or not steps:
        return None
    steps.sort(key=lambda one: one[0])  # late ones stand where they arrived
    for _, events, record in steps:
        for event in events:
            state = engine.note(state, event, policy)
        seen = record.observation
        decision = engine.decide(state, seen, policy)  # refuses a step behind a hole
        state = engine.apply(state, seen, decision, record.outcome, policy)
    for event in between:
        state = engine.note(state, event, policy)
    return Recalled(state, seen, decision)


class Past:
    """See the module docstring."""

    def __init__(self, runs: Runs, store: Store) -> None:
        self._runs = runs
        self._store = store
        self._turn = asyncio.Lock()
        self._executed: dict[tuple[str, str], int] = {}
        self._earlier = set(runs.runs)
        try:
            self._executed = store.database.sync(_executed)
        except SentinelError as error:
            logger.error("earlier actions cannot be counted error=%s", error)

    async def catch_up(self) -> None:
        """Count them later, in a database that could not be opened before; raises StoreError."""
        self._executed = await self._store.database.run(_executed)

    def tally(self, run: Run) -> dict[str, int | None]:
        """How many steps were skipped and how often it was rolled back, as far as is known."""
        if run.state is not None:
            counters = run.state.ledger.counters
            back = sum(n for key, n in counters.rollbacks if key.endswith("/restored"))
            return {"skipped": sum(n for _, n in counters.skipped), "rolled_back": back}
        if run.name not in self._earlier:
            return {"skipped": None, "rolled_back": None}
        return {
            "skipped": self._executed.get((run.name, Action.SKIP_STEP.name.lower()), 0),
            "rolled_back": self._executed.get((run.name, Action.ROLLBACK.name.lower()), 0),
        }

    async def recall(self, run: Run) -> None:
        """Have its last state, if it is one of an earlier start whose trainer does not come."""
        if not self._wanted(run) or run.recalled:
            return
        async with self._turn:
            if not self._wanted(run):
                return  # somebody else was faster
            run.recalled = True
            place = self._store.run_directory(run.name)
            found = await asyncio.to_thread(recalled, place, run.incarnation, run.policy)
        if found is None or not self._wanted(run):
            return
        run.mirror.recalled(found.state, found.observation, found.decision)
        if run.session is not None:
            run.figures.all_decided_here(found.state)
        run.saved_incidents = found.state.ledger.incidents

    def _wanted(self, run: Run) -> bool:
        return (
            run.state is None
            and not run.watched
            and run.run_state != "running"  # its trainer hands it over
            and run.decides
            and self._runs.peek(run.name) is run
        )

    @asynccontextmanager
    async def at_hand(self, runs: Iterable[Run]) -> AsyncGenerator[None]:
        """Recall these, the newest first, while this is open."""
        task = asyncio.create_task(self._all(list(runs)))
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _all(self, runs: list[Run]) -> None:
        for run in sorted(runs, key=lambda r: r.last_heard, reverse=True):
            try:
                await self.recall(run)
            except Exception:  # the background must not end the sidecar
                logger.exception("an earlier run cannot be recalled run=%s", run.name)
            await asyncio.sleep(PAUSE_S)


def _executed(session: Session) -> dict[tuple[str, str], int]:
    """How often each action was executed, by run, over all starts before this one."""
    counts = select(DecisionRow.run, DecisionRow.action, func.count()).group_by(
        DecisionRow.run, DecisionRow.action
    )
    return {(run, action): count for run, action, count in session.execute(counts)}

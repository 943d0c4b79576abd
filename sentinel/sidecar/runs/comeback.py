"""What an earlier start of the sidecar has left: its runs, and the states of JSON trainers' runs.

    for run in comeback.runs(now): ...         from the database, the newest ones
    for run in await comeback.missed(now): ... the same, from a database that came late
    run = comeback.stored("r7")                one that is not in memory; None: no file tells of it
    comeback.look(run)                         what is on disk of it: when somebody asks
    comeback.revive(run)                       a JSON trainer's state, computed from its series

Trainers with an engine hand their states over with their next step. Ended runs are many, so what is
on disk of them is not read before somebody asks; recall.py computes their ends.

Units:   `now` in Unix seconds.
Errors:  none: what cannot be read is logged, and counted where it is of a run.
"""

from __future__ import annotations

import logging

import msgspec

from sentinel.core import engine
from sentinel.core.errors import ProtocolError, SentinelError
from sentinel.core.events import Restored
from sentinel.core.state import State
from sentinel.core.types import Source
from sentinel.sidecar.runs.chronicle import Chronicle
from sentinel.sidecar.runs.orders import Orders, Tell
from sentinel.sidecar.runs.run import Run
from sentinel.sidecar.runs.session import Session
from sentinel.sidecar.settings import Settings
from sentinel.sidecar.store.models import RunRow
from sentinel.sidecar.store.record import (
    acted,
    newest_chapter,
    newest_ends,
    newest_steps,
    reports_on_disk,
)
from sentinel.sidecar.store.store import Store
from sentinel.traces.records import StepRecord
from sentinel.wire import codec
from sentinel.wire.messages import Layer

logger = logging.getLogger(__name__)

SHOWN_AT_ONCE = 32  # lost and halted runs whose last step is read at the start: 20 ms each


class Comeback:
    """See the module docstring."""

    def __init__(self, settings: Settings, store: Store, chronicle: Chronicle, tell: Tell) -> None:
        self._settings = settings
        self._store = store
        self._chronicle = chronicle
        self._tell = tell
        self.not_taken: dict[str, float] = {}  # there was no room for them: when each was over

    def runs(self, now: float) -> list[Run]:
        """The runs of an earlier start."""
        self._chronicle.remember()
        try:
            rows = self._store.known_runs(self._settings.max_runs)
        except SentinelError as error:
            logger.error("earlier runs cannot be read error=%s", error)
            return []
        self.not_taken = self._store.not_taken
        found = []
        for row in rows:
            run = self._sound(row, now)
            if run is None:
                continue
            found.append(run)
            if run.run_state == "running" or run.name in self._store.taken_up:
                self._reconcile(run)
        troubled = [run for run in found if run.run_state in ("lost", "halted")]
        for run in sorted(troubled, key=lambda r: r.last_heard)[-SHOWN_AT_ONCE:]:
            self._look_back(run)
        return found

    async def missed(self, now: float) -> list[Run]:
        """Runs that the database knows and no folder did; raises StoreError."""
        await self._chronicle.catch_up()
        rows = await self._store.newest_runs(self._settings.max_runs)
        self.not_taken = self._store.not_taken
        return [run for row in rows if (run := self._sound(row, now)) is not None]

    def stored(self, name: str) -> Run | None:
        """A run that made room for others, as its own file tells of it."""
        row = self._store.kept_run(name)
        return None if row is None else self._sound(row, row.heard_at)

    def look(self, run: Run) -> None:
        """Take up what is on disk of it, once."""
        if not run.unread:
            return
        run.unread = False
        run.kept.seen = reports_on_disk(self._store.run_directory(run.name), run.incarnation)
        if run.earlier is None:
            self._look_back(run)

    def revive(self, run: Run) -> None:
        """The state of a run that has no engine of its own, computed again from its series.

        Statistics of snapshots taken before the newest segment are gone: a restore of one of them
        starts with cold ones.
        """
        session, mirror = run.session, run.mirror
        if session is None or not session.unrevived:
            return
        session.unrevived = False
        self.look(run)
        seen = run.kept.seen
        mirror.next_seq = seen.spans[-1][1] + 1 if seen.count else 0
        try:
            self._walk(run, session)
        except (SentinelError, OSError) as error:
            logger.error("cannot take up a run again run=%s error=%s", run.name, error)
            run.figures.failed("revive")
            mirror.state, mirror.undecided = None, False
            return
        if mirror.state is not None:
            run.figures.all_decided_here(mirror.state)
            logger.info("taken up again run=%s step=%s", run.name, mirror.state.step)

    def _walk(self, run: Run, session: Session) -> None:
        """Go through its newest segment; the newest step's outcome is not known yet."""
        mirror = run.mirror
        state: State | None = None
        last = False  # the newest item was a step
        for item in newest_chapter(self._store.run_directory(run.name), run.incarnation):
            if isinstance(item, State):
                state = item
            elif isinstance(item, StepRecord):
                seen = item.observation
                if state is None:
                    state = engine.initial(item.step)
                decision = engine.decide(state, seen, run.policy)
                mirror.recalled(state, seen, decision)
                last = True
                state = engine.apply(state, seen, decision, item.outcome, run.policy)
            elif state is not None:
                last = False
                kept = session.with_stats(item, state)
                # A recorded restore brings the statistics that it restored.
                noted = item if isinstance(item, Restored) else kept
                state = engine.note(state, noted, run.policy)
        if not last:
            mirror.state = state
        mirror.undecided = last

    def _look_back(self, run: Run) -> None:
        found = newest_steps(self._store.run_directory(run.name), run.incarnation)
        run.earlier = found[-1].observation if found else None

    def _reconcile(self, run: Run) -> None:
        """Actions of the newest segment that a killed sidecar had no time to write down."""
        found = newest_steps(self._store.run_directory(run.name), run.incarnation)
        run.earlier = found[-1].observation if found else None
        for record in acted(found):
            decision = record.decision
            if decision.action is not record.outcome.executed:
                continue
            self._chronicle.decision(
                run,
                decision,
                record.attempt,
                record.outcome.source if run.session is None else Source.SIDECAR,
                record.at or 0.0,
                live=False,
                found=record.at is not None,
            )
        if acted(found):
            for end in newest_ends(self._store.run_directory(run.name), run.incarnation):
                target = end.target if isinstance(end, Restored) else None
                why = "" if isinstance(end, Restored) else end.reason
                self._chronicle.restored(run, end.step, target, why, live=False)

    def _sound(self, row: RunRow, now: float) -> Run | None:
        try:
            return self._of_row(row, now)
        except (ProtocolError, msgspec.ValidationError) as error:
            logger.warning("an earlier run cannot be read run=%s error=%s", row.name, error)
            return None

    def _of_row(self, row: RunRow, now: float) -> Run:
        """A run of an earlier start; raises ProtocolError or ValidationError."""
        return Run(
            name=row.name,
            incarnation=row.incarnation,
            fence=row.fence,
            policy=codec.decode_policy(row.policy),
            policy_bytes=row.policy,
            policy_hash=codec.digest(row.policy),
            engine_version=row.engine_version,
            layers=msgspec.convert(row.layers, tuple[Layer, ...]),
            info={str(key): str(value) for key, value in row.info.items()},
            registered=row.registered_at,
            max_layers=self._settings.max_layers,
            reason=row.reason,
            session=Session(id=row.session, unrevived=True) if row.json else None,
            orders=Orders(row.name, self._tell),
            run_state=row.state,
            last_report=row.heard_at,
            # We were away, not the run.
            last_heard=now if row.state == "running" else row.heard_at,
            ended=row.ended_at,
            refused=[str(name) for name in row.refused],
            unread=True,
        )

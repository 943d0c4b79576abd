"""A report's way onto the disk, and into what is shown of its run.

    recording.open(run, first)                 the record of a new writer; close(run)
    kept = recording.live(run, frame, observation, decision, now, attempt, data, before)
    recording.late(run, frame, now)            one that its trainer kept while nobody answered
    recording.outcomes(run, moves, now)        where something else was done than was decided

A report is on disk before it is answered. Where the disk fails, a live one is noted all the same
and False says that it was not recorded; a late one is refused: its trainer keeps it.

Units:   `now` in Unix seconds; steps are attempted optimizer steps.
Errors:  RefusedError for late reports that no disk takes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from sentinel.core.state import State
from sentinel.core.types import Action, Decision, Observation, Source
from sentinel.sidecar.hub import Hub
from sentinel.sidecar.runs.chronicle import Chronicle
from sentinel.sidecar.runs.figures import Row
from sentinel.sidecar.runs.mirror import core_outcome
from sentinel.sidecar.runs.refusal import RefusedError
from sentinel.sidecar.runs.run import Run
from sentinel.sidecar.store.record import DECIDED, LATE, Record
from sentinel.sidecar.store.store import Store
from sentinel.wire import codec
from sentinel.wire.codec import WireRestored, WireRestoreFailed
from sentinel.wire.messages import Frame, Move, WireOutcome

logger = logging.getLogger(__name__)


class Recording:
    """See the module docstring."""

    def __init__(self, store: Store, hub: Hub, chronicle: Chronicle) -> None:
        self._store = store
        self._hub = hub
        self._chronicle = chronicle

    # ---- the record ----------------------------------------------------------------

    def open(self, run: Run, first: int) -> Record:
        """Begin, or go on with, the record of a writer.

        Args:
            first: the oldest report that may still come, if nothing of it is on disk.
        """
        record = self._store.open_record(
            run=run.name,
            incarnation=run.incarnation,
            policy=run.policy,
            state=None if run.session is None else run.mirror.before,
            layers=run.layers,
            engine_version=run.engine_version,
            first=first,
        )
        run.kept.record, run.kept.seen = record, record.seen
        return record

    def close(self, run: Run) -> None:
        """Let go of its files; a report opens them again."""
        run.kept.record = None
        self._store.close_record(run.name)

    def _record_of(self, run: Run) -> Record:
        """Where its reports are written; opened again when a late one follows its end."""
        record = run.kept.record
        return self.open(run, run.kept.seen.start) if record is None else record

    # ---- reports -------------------------------------------------------------------

    def live(
        self,
        run: Run,
        frame: Frame,
        observation: Observation,
        decision: Decision | None,
        now: float,
        attempt: int,
        data: bytes = b"",
        before: State | None = None,
        *,
        handed: bool = False,
        skipped: bool = False,
    ) -> bool:
        """Note a live report; whether it is on disk now.

        Args:
            decision: what is answered, as bytes in `data`; None: the trainer's own is noted.
            before, handed, skipped: see Record.report.
        """
        run.kept.theirs = frame.own
        flags = 0 if decision is None else DECIDED
        if decision is None and frame.own is not None:
            decision, data = codec.core_decision(frame.own), codec.encode(frame.own)
        kept = self._write(
            run,
            frame,
            data,
            decision,
            now,
            attempt,
            before,
            flags,
            handed=handed,
            skipped=skipped,
        )
        figures, mirror = run.figures, run.mirror
        figures.carried_out(frame.moves, decides=run.decides, decision=mirror.decision)
        self._chronicle.incidents(run, now)
        if mirror.state is not None:
            figures.exemplars.note(run.name, mirror.state, now)
        row = Row(
            frame.seq,
            observation.step,
            attempt,
            observation.loss,
            observation.grad_norm,
            None if decision is None else decision.action,
            "" if decision is None else decision.rule,
            False,
        )
        figures.step(row, observation, decision, now)
        if self._hub.listeners:
            self._hub.steps(run.name, row)
        run.orders.reported(observation, decision)
        mirror.noted(observation, decision)
        return kept

    def again(self, run: Run, frame: Frame, data: bytes, now: float) -> bool:
        """Write a report that was answered already and that no disk took, `data` its answer."""
        return self._write(run, frame, data, run.mirror.decision, now, frame.attempt, None, DECIDED)

    def late(self, run: Run, frame: Frame, now: float) -> None:
        """Note a late report; one that is on disk changes nothing.

        Raises:
            RefusedError: no disk takes it now.
        """
        if frame.seq in run.kept.seen:
            return
        own = frame.own
        data = b"" if own is None else codec.encode(own)
        decision = None if own is None else codec.core_decision(own)
        if not self._write(run, frame, data, decision, now, frame.attempt, None, LATE):
            raise RefusedError(
                "unavailable", f"the disk takes no reports now: {self._store.trouble}", 503
            )
        figures, seen = run.figures, frame.observation
        figures.late(
            Row(
                frame.seq,
                seen.step,
                frame.attempt,
                seen.loss,
                seen.grad_norm,
                None if own is None else own.action,
                "" if own is None else own.rule,
                True,
            )
        )
        figures.carried_out(frame.moves, decides=run.decides, decision=run.mirror.decision)
        run.orders.reported(codec.core_observation(seen), decision)

    def _write(
        self,
        run: Run,
        frame: Frame,
        data: bytes,
        decision: Decision | None,
        now: float,
        attempt: int,
        before: State | None,
        flags: int,
        *,
        handed: bool = False,
        skipped: bool = False,
    ) -> bool:
        """Put a report on disk; False when the disk fails."""
        self.outcomes(run, frame.moves, now, of=frame.seq - 1)
        self.ended(run, frame.moves)
        events = [codec.encode(move) for move in frame.moves if not isinstance(move, WireOutcome)]
        executed = None if decision is None else decision.action
        record = self._record_of(run)
        try:
            record.report(
                frame,
                data,
                executed,
                attempt=attempt,
                events=events,
                before=before,
                handed=handed,
                skipped=skipped,
                flags=flags,
            )
        except OSError as error:
            if not run.figures.unwritten:
                logger.error("reports cannot be recorded run=%s error=%s", run.name, error)
            run.figures.unwritten = record.refused.count
            return False
        self._store.keep(run.name)
        if decision is not None and decision.action is not Action.PROCEED:
            source = Source.SIDECAR if flags & DECIDED else Source.TRAINER
            live = not flags & LATE
            self._chronicle.decision(run, decision, attempt, source, now, live=live)
        return True

    # ---- what was done -------------------------------------------------------------

    def outcomes(self, run: Run, moves: Iterable[Move], now: float, of: int | None = None) -> None:
        """Correct the record where something else was done than was decided.

        Args:
            of: the report that they are of, if that is known.
        """
        kept = run.kept
        # Then no action of it was written down: on a full disk there is nothing to take back.
        unwritten = (
            of is not None
            and of not in kept.seen
            and kept.record is not None
            and of in kept.record.refused
        )
        for move in moves:
            if not isinstance(move, WireOutcome):
                continue
            outcome = core_outcome(move)
            try:
                corrected = self._record_of(run).outcome(outcome)
            except OSError:
                continue  # shown; the step stands with what was decided until a disk takes it
            if not corrected:
                continue
            if move.executed is Action.PROCEED:
                if not unwritten:
                    self._chronicle.undone(run, move.step)
                continue
            theirs, mirror = run.kept.theirs, run.mirror
            own = None if theirs is None else codec.core_decision(theirs)
            for decision in (own, mirror.decision):
                if decision is not None and (decision.step, decision.action) == (
                    move.step,
                    move.executed,
                ):
                    attempt = _attempt(run, move.step)
                    self._chronicle.decision(
                        run, decision, attempt, outcome.source, now, live=False
                    )
                    break

    def ended(self, run: Run, moves: Iterable[Move]) -> None:
        """How rollbacks ended: what was restored need not be what was decided."""
        run.orders.happened(moves)
        for move in moves:
            if isinstance(move, WireRestored):
                self._chronicle.restored(run, move.step, move.target)
            elif isinstance(move, WireRestoreFailed):
                self._chronicle.restored(run, move.step, None, move.reason)

    def after(self, run: Run, moves: Iterable[Move]) -> None:
        """Keep what happened after the last report: a snapshot, or the end of a rollback."""
        self.ended(run, moves)
        events = [codec.encode(move) for move in moves if not isinstance(move, WireOutcome)]
        record = run.kept.record
        if events and record is not None:
            try:
                record.after(events)
            except OSError as error:
                logger.warning("the end is not recorded run=%s error=%s", run.name, error)


def _attempt(run: Run, step: int) -> int:
    """Which attempt a step that was reported lately was; a restore since does not count."""
    for row in reversed(run.figures.recent):
        if row.step == step:
            return row.attempt
    before, state = run.mirror.before, run.mirror.state
    if before is not None and before.step == step + 1:
        state = before  # a restore has been noted in the present one already
    return 0 if state is None else state.ledger.attempt

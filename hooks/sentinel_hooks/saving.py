"""Saving: the snapshots of one session, in RAM and on disk, and going back to them.

    saving = Saving(target, Snapshots(), directory, host, ...)
    saving.take(); saving.restore(target, rule)       at the safe point, and nowhere else
    saving.poll()                                     what has become of saves in the background
    saving.resume()                                   once, when the user's weights are loaded

With several ranks a snapshot counts when all have it. Each copies at the safe point, says at the
next gate what became of it (facts(), heard()), and only then is the engine told. Parts on disk go
the same way: all written, one commit by rank 0, told to all. A rollback has two phases (restore()):
all prepare, all vote, all copy; or none does, and the next older snapshot is tried.

Purity:  everything that the host does not mask runs with our own seams asleep.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from sentinel.core.events import Event, Restored, RestoreFailed, SnapshotLost, SnapshotTaken
from sentinel.core.policy import Policy
from sentinel.core.state import State, Stats
from sentinel.core.types import Decision
from sentinel_hooks.guard import Guard
from sentinel_hooks.ledger_file import Keeper, Resumed, fingerprint
from sentinel_hooks.ranks.agreement import Heard
from sentinel_hooks.ranks.council import Council, Facts, Note
from sentinel_hooks.snapshots import Snapshots
from sentinel_hooks.snapshots.disk import (
    CLOSE_WAIT_S,
    Adopted,
    DiskStore,
    Failed,
    PartWritten,
    Saved,
    Unprepared,
)
from sentinel_hooks.snapshots.ram import NotReadyError, Prepared, RamStore, SnapshotError
from sentinel_hooks.target import Target

logger = logging.getLogger(__name__)


class Host(Protocol):
    """What saving needs of a session."""

    @property
    def now(self) -> State:
        """The engine's state as it is, nothing settled on the way."""
        ...

    def note(self, event: Event) -> None:
        """Move the state on an event, and tell everybody."""
        ...

    def adopt_state(self, state: State) -> None:
        """The run goes on with another state than this process began with."""
        ...


class Saving:
    """The snapshots of one session."""

    def __init__(
        self,
        target: Target,
        config: Snapshots,
        directory: Path,
        host: Host,
        guard: Guard,
        keeper: Keeper,
        *,
        run: str,
        policy: Policy,
        incarnation: str,
        first_step: int,
        council: Council | None = None,
        sharers: int = 1,
        first_number: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Nothing is copied or read yet.

        Args:
            sharers: ranks on this machine, which snapshot at the same moment.
            first_number: of the saves to disk of this process; equal on all ranks.
        """
        self._target = target
        self._config = config
        self._host = host
        self._guard = guard
        self._keeper = keeper
        self._run = run
        self._council = council
        self._clock = clock
        self.ram = RamStore(target, config, sharers=sharers)
        self.disk = DiskStore(
            target,
            config,
            directory,
            run=run,
            policy=policy,
            incarnation=incarnation,
            first_step=first_step,
            rank=council.rank if council is not None else 0,
            world=council.world if council is not None else 1,
        )
        self.first_due = config.ram or self.disk.enabled
        self.resume_due = True  # the weights are compared with those that the run has known
        self.trouble = ""
        # Several ranks only.
        self._number = first_number
        self._copied: tuple[int, bool, bool] | None = None  # step, here it is, on its way to disk
        self._written: bool | None = None
        self._in_flight: int | None = None  # the step of a save that is not committed yet
        self._told: Note = Note()  # rank 0: what the next note shall say of saves
        self._deferred: tuple[int, str] | None = None
        self._restarted: bytes | None = None
        self._restored_of: int | None = None  # the decision that the last rollback carried out

    # ---------------------------------------------------------------- taking

    def take_first(self) -> None:
        """What training starts from. Not at attach(): a checkpoint may be loaded after it."""
        self.first_due = False
        try:
            self.take()
        except NotReadyError:
            self.first_due = True

    def takes(self, step: int) -> bool:
        """Asked for a snapshot before `step`, it would make one."""
        return self._config.ram or self.disk.due(step)

    def take(self) -> None:
        """A candidate of this moment; raises NotReadyError while a lazy parameter has no shape."""
        step = self._host.now.step
        on_disk = self._due(step)
        if not (self._config.ram or on_disk):
            return
        try:
            self.ram.take(step, self._host.now.stats)
        except NotReadyError:
            raise
        except Exception as error:
            if self._council is None and not isinstance(error, SnapshotError):
                raise
            if not self.trouble:
                logger.warning(
                    "no snapshot could be taken run=%s step=%s reason=%s", self._run, step, error
                )
            self.trouble = str(error)
            if self._council is not None:
                self._copied = (step, False, on_disk)
                if on_disk:
                    self._offer(step, here=False)
            return
        self.trouble = ""
        self._guard.run("ledger", self.remember)
        if self._council is not None:
            self._copied = (step, True, on_disk)
            if on_disk:
                self._offer(step, here=True)
            return
        if on_disk:
            image, ledger = self.ram.image(step), self._host.now.ledger
            on_disk = bool(self._guard.run("snapshot", self.disk.offer, image, ledger))
        if self._config.ram:
            self._host.note(SnapshotTaken(step))
            return
        self.ram.clear()  # the save in flight holds it
        if on_disk:
            self._host.note(SnapshotTaken(step, "disk"))

    def _due(self, step: int) -> bool:
        """The same on all ranks: an error on one of them alone must not make it another."""
        try:
            return self.disk.due(step)
        except Exception as error:
            if self._council is None:
                raise
            self._guard.note("again", error)
        return self.disk.due(step)

    def _offer(self, step: int, *, here: bool) -> None:
        """Several ranks: this rank's part goes to disk, or is known to be missing."""
        self._number += 1
        self._in_flight, self._written = step, None
        ledger = self._host.now.ledger
        try:
            if here:
                self.disk.offer(self.ram.image(step), ledger, save=self._number)
            else:
                self.disk.decline(step, ledger, save=self._number, reason=self.trouble)
        except Exception as error:  # noqa: BLE001  the others must hear that this part is missing
            self._guard.note("snapshot", error)
            self._written = False

    def remember(self) -> None:
        """A restarted process can recognise these weights."""
        self._keeper.mark(fingerprint(self._target), self._host.now)

    def adopt(self, path: str, *, quiet: bool, incident: str = "") -> None:
        """A checkpoint of the user's own, of this moment."""
        state = self._host.now
        self._guard.run("ledger", self.remember)
        if self._council is not None:
            self._number += 1
            self._in_flight, self._written = state.step, None
        self.disk.adopt(
            path,
            state.step,
            state.stats,
            state.ledger,
            quiet=quiet,
            incident=incident,
            save=self._number,
        )
        if quiet and self.disk.enabled and self._council is None:
            self._host.note(SnapshotTaken(state.step, "disk"))

    # ---------------------------------------------------------------- in the background

    def poll(self) -> None:
        """What has become of saves in the background."""
        for ended in self.disk.poll():
            if self._council is not None:
                self._part_ended(ended)
                continue
            step, target = self._host.now.step, ended.step
            if all(s.step != target for s in self._host.now.ledger.snapshots):
                continue
            if target in self.disk.steps:
                self._host.note(SnapshotTaken(target, "disk"))
            elif target not in self.ram.steps and isinstance(ended, Failed):
                self._host.note(SnapshotLost(step, target, ended.reason))

    def _part_ended(self, ended: Saved | Failed | PartWritten) -> None:
        if isinstance(ended, PartWritten):
            self._written = True
        elif isinstance(ended, Saved):
            self._told.saved = ended.step
        elif self._written:  # rank 0: the commit
            self._told.unsaved = (ended.step, ended.reason)
        else:
            self._written = False
            logger.warning(
                "this rank's part of a snapshot is not on the disk run=%s step=%s reason=%s",
                self._run,
                ended.step,
                ended.reason,
            )

    def facts(self, *, ready: bool) -> Facts:
        """Several ranks: what this one has to say at its next gate."""
        taken = self._copied[1] if self._copied is not None else None
        if self._in_flight is not None and self._written is None and self.disk.idle:
            self._written = False  # an error of our own has swallowed how it ended
        written = self._written if self._in_flight is not None else None
        flying = 0 if self._in_flight is None else self._in_flight + 1
        return Facts(taken=taken, written=written, ready=ready, flying=flying)

    def add_to(self, note: Note) -> Note:
        """Rank 0: what all shall know of saves, and of a restart."""
        note.saved, note.unsaved = self._told.saved, self._told.unsaved
        note.restore = self._deferred
        note.state = len(self._restarted) if self._restarted is not None else 0
        note.number = self._number
        self._told = Note()
        self._deferred = None
        return note

    def restarted(self) -> bytes | None:
        """Rank 0: the state that the others are to go on with; once."""
        restarted, self._restarted = self._restarted, None
        return restarted

    def heard(self, heard: Heard, note: Note) -> None:
        """Several ranks: what became of everybody's copies; the same happens on all."""
        copied, self._copied = self._copied, None
        if copied is not None:
            step, here, on_disk = copied
            if heard.taken == heard.ranks:
                if self._config.ram:
                    self._host.note(SnapshotTaken(step))
                elif on_disk:
                    self.ram.clear()
                    self._host.note(SnapshotTaken(step, "disk"))
            else:
                if here:
                    self.ram.drop(step)
                self.trouble = self.trouble or (
                    f"{heard.untaken} of {heard.ranks} ranks could not copy at step {step}"
                )
        if note.number >= 0:
            # What went wrong on one rank may have cost it a number: the next is above everybody's.
            self._number = note.number + (0 if heard.same_flight else 1)
        step_now = self._host.now.step
        flying = self._in_flight
        if flying is None:
            return
        if not heard.same_flight:
            self._give_up(flying, "not all ranks save this step")
        elif heard.unwritten:
            self._give_up(flying, f"{heard.unwritten} of {heard.ranks} ranks could not write")
        elif note.saved == flying:
            self._in_flight = None
            self.disk.committed(flying)
            # Of RAM snapshots the engine knows already; it may have dropped this one since.
            known = any(s.step == flying for s in self._host.now.ledger.snapshots)
            if known or self._config.adopt is not None:
                self._host.note(SnapshotTaken(flying, "disk"))
        elif note.unsaved is not None and note.unsaved[0] == flying:
            self._give_up(flying, note.unsaved[1])
        elif heard.written == heard.ranks and not self._committing:
            self._committing = True
            self.disk.commit(flying)
        if self._in_flight is None:
            self._committing = False
            lost = flying not in self.ram.steps and flying not in self.disk.steps
            if lost and any(s.step == flying for s in self._host.now.ledger.snapshots):
                self._host.note(SnapshotLost(step_now, flying, "it did not reach the disk"))

    _committing = False

    def _give_up(self, step: int, reason: str) -> None:
        self._in_flight = None
        self.disk.abandon(step, reason)

    def prune(self) -> None:
        """Copies that the registry does not name any more are let go of."""
        wanted = [s.step for s in self._host.now.ledger.snapshots]
        if self._copied is not None:
            wanted.append(self._copied[0])
        self.ram.keep_only(wanted)
        self.disk.follow(self._host.now.ledger)

    def close(self) -> None:
        """Wait for a save in flight, let go of memory."""
        if self._council is not None and self._council.rank == 0 and self._in_flight is not None:
            self.disk.wait()
            self.poll()
            if self._written:  # waits for the other ranks' manifests
                self.disk.commit(self._in_flight, self._patience())
        self.disk.close(self._patience())
        self.poll()

    def _patience(self) -> float:
        """Seconds for what is still to be written; others may wait for this rank meanwhile."""
        if self._council is None:
            return CLOSE_WAIT_S
        return min(CLOSE_WAIT_S, self._council.patience_s)

    def clear(self) -> None:
        """Let go of all memory."""
        self.ram.clear()

    def save_evidence(self) -> None:
        """The weights as they are now, on disk for whoever looks into it; no rollback target."""
        if self._council is not None:
            self._save_evidence_of(self._council)
            return
        self.disk.wait()
        self.poll()
        if self.disk.ready:
            step = self._host.now.step
            self.ram.take(step, self._host.now.stats)
            self.disk.offer(self.ram.image(step), self._host.now.ledger)
            self.disk.wait()
            self.poll()
            self.disk.follow(self._host.now.ledger, again=True)

    def _save_evidence_of(self, council: Council) -> None:
        """Several ranks: each writes its part, and talks to nobody; rank 0 makes them one.

        All halt at this step, so their parts have one name. A part that is missing costs rank 0 a
        bounded wait, and the others' stay, uncommitted.
        """
        disk, step, ledger = self.disk, self._host.now.step, self._host.now.ledger
        patience = self._patience()
        disk.wait(patience)
        self.poll()
        flying, self._in_flight = self._in_flight, None
        if flying is not None and self._written and council.rank == 0:
            disk.commit(flying, patience)  # its parts are there already
            disk.wait(patience)
            if any(isinstance(e, Saved) and e.step == flying for e in disk.poll()):
                disk.committed(flying)
        # Where the group is lost, the user's own objects must not be asked to talk to others.
        self.ram.take(step, self._host.now.stats, extra=not council.off)
        self._number += 1
        disk.offer(self.ram.image(step), ledger, save=self._number)
        disk.wait(CLOSE_WAIT_S)
        ended = disk.poll()
        if council.rank == 0 and any(isinstance(e, PartWritten) for e in ended):
            disk.commit(step, patience)  # of ranks that write more slowly
            disk.wait(patience + CLOSE_WAIT_S)
            ended = disk.poll()
            if any(isinstance(e, Saved) for e in ended):
                disk.committed(step)
                disk.follow(ledger, again=True)
        why = next((e.reason for e in ended if isinstance(e, Failed)), "")
        if why or not ended:
            logger.error(
                "what is saved of a halted run is incomplete run=%s step=%s rank=%s reason=%s",
                self._run,
                step,
                council.rank,
                why or f"not written within {CLOSE_WAIT_S:g} s",
            )

    # ---------------------------------------------------------------- going back

    def restore(self, decision: Decision) -> None:
        """Go back to the decision's target, or the next older one that can be read."""
        self._restore_surely(decision.target, decision.rule, decision.step)

    def _restore_surely(self, decided: int | None, rule: str, of: int = -1) -> None:
        """With several ranks: an error of our own on this one must not leave it alone.

        It is gone through again, with what the ranks have told each other so far. Copying twice
        does no harm, and what was noted already ends it.

        Args:
            of: the step at which it was decided: a second call for the same does nothing.
        """
        council = self._council
        if council is None:
            self._restore(decided, rule)
            return
        if self._restored_of != of:
            self._restore_twice(council, decided, rule, of)

    def _restore_twice(self, council: Council, decided: int | None, rule: str, of: int) -> None:
        council.begin()
        self._restored_of = of  # from here on no error gets out
        noted = self._host.now.ledger.pending_restore is None
        try:
            self._restore(decided, rule)
        except Exception as error:  # noqa: BLE001
            self._guard.note("rollback again", error)
            if not noted and self._host.now.ledger.pending_restore is None:
                return  # it was all done
            council.rewind()
            try:
                self._restore(decided, rule)
            except Exception as again:  # noqa: BLE001
                self._guard.note("rollback again", again)
                council.leave(f"a rollback failed on rank {council.rank}: {again}")

    def _restore(self, decided: int | None, rule: str) -> None:
        step, target = self._host.now.step, decided
        began = self._clock()
        if target is None:
            self._host.note(RestoreFailed(step, None, "there is no healthy snapshot"))
            return
        reason = ""
        interrupt: KeyboardInterrupt | None = None
        stats: Stats | None = None
        while target is not None:
            if self._council is not None:
                outcome = self._together(self._council, target)
                if outcome is None:
                    return  # the ranks have stopped together: nothing was changed
                stats, reason, interrupt = outcome
                if stats is not None or self._council.halt:
                    break
            else:
                try:
                    stats, interrupt = self._put_back_wholly(target)
                    break
                except Exception as error:
                    known = isinstance(error, SnapshotError)
                    reason = str(error) if known else f"{type(error).__name__}: {error}"
                    if not known:  # it may be half done
                        self._cannot(target, reason)
                        self._host.note(RestoreFailed(step, target, reason))
                        raise
            self._cannot(target, reason)
            self._host.note(SnapshotLost(step, target, reason))
            older = [
                s.step for s in self._host.now.ledger.snapshots if s.healthy and s.step < target
            ]
            target = max(older, default=None)
        if stats is None or target is None:
            self._host.note(RestoreFailed(step, decided, reason))
            return
        self._host.note(Restored(step, target, stats))
        logger.info(
            "rolled back run=%s from_step=%s to_step=%s rule=%s took_s=%.3f",
            self._run,
            step,
            target,
            rule,
            self._clock() - began,
        )
        if interrupt is not None:
            raise interrupt

    def _cannot(self, target: int, reason: str) -> None:
        logger.error(
            "a snapshot cannot be used run=%s step=%s target=%s reason=%s",
            self._run,
            self._host.now.step,
            target,
            reason,
        )

    def _put_back_wholly(self, target: int) -> tuple[Stats, KeyboardInterrupt | None]:
        """An interrupt waits until it is done: half a restore would be saved by the handler."""
        try:
            return self._put_back(target), None
        except KeyboardInterrupt as interrupt:
            return self._put_back(target), interrupt

    def _put_back(self, target: int) -> Stats:
        """From RAM, or from the disk when RAM has it not; a save in flight is awaited."""
        if target in self.ram.steps or not self.disk.enabled:
            return self.ram.restore(target)
        found = self.disk.load(target)
        if isinstance(found, Adopted):
            return self.disk.put_back(found)
        return self.ram.put_back(found)

    def _together(
        self, council: Council, target: int
    ) -> tuple[Stats | None, str, KeyboardInterrupt | None] | None:
        """Two phases; (statistics or None, why not, an interrupt that waits); None: all stopped."""
        prepared = self._guard.run("snapshot", self._prepare, target)
        token = prepared.token if prepared is not None else 0
        heard = council.vote(prepared is not None, token, target)
        if heard is None:
            return None
        if heard.failed or not heard.same_digest:
            self.disk.lost(target)
            what = f"{heard.who_failed()} could not read it" if heard.failed else "they differ"
            return None, f"all ranks must have the same snapshot, and {what}", None
        done, interrupt = False, None
        for _ in range(2):  # it only copies, and may be done again
            try:
                assert prepared is not None
                prepared.commit()
                done = True
                break
            except KeyboardInterrupt as error:
                interrupt = error
            except Exception as error:  # noqa: BLE001  a user's own object
                self._guard.note("snapshot", error)
        heard = council.vote(done, 0, target)
        if heard is None:
            return None
        if heard.failed:
            why = f"{heard.who_failed()} could not put a snapshot back that the others did"
            council.part(why)
            return None, why, interrupt
        assert prepared is not None
        return prepared.stats, "", interrupt

    def _prepare(self, target: int) -> Prepared | Unprepared | None:
        try:
            if target in self.ram.steps or not self.disk.enabled:
                return self.ram.prepare(target)
            return self.disk.prepare(target)
        except SnapshotError as error:
            self._cannot(target, str(error))
            return None

    # ---------------------------------------------------------------- after a restart

    def resume(self) -> None:
        """The user's weights are loaded: whose are they, and what is left of the snapshots?"""
        state = self._host.now
        try:
            print_ = fingerprint(self._target)
        except NotReadyError:
            return  # lazy parameters; it is tried again
        except Exception as error:  # noqa: BLE001  tensors of a kind that we do not know
            self._guard.note("ledger", error)
            print_ = ""
        self.resume_due = False
        resumed = self._keeper.recognise(print_, state)
        if self._keeper.found is None:
            self._keeper.mark(print_, state)
            self._keeper.save(state, sync=True)
            return
        self._host.adopt_state(self._with_copies(resumed))
        self._keep_what_is_left(resumed)
        self._keeper.mark(print_, self._host.now)
        self._keeper.save(self._host.now, sync=True)
        if self._council is not None:
            from sentinel.wire import codec

            self._restarted = codec.encode_state(self._host.now)

    def follow_rank_0(self, state: State) -> None:
        """Another rank: the run was restarted, and rank 0 has recognised it."""
        self.resume_due = False
        self._host.adopt_state(state)
        if self.disk.enabled:
            self._guard.run("snapshot", self.disk.find, [s.step for s in state.ledger.snapshots])

    def _with_copies(self, resumed: Resumed) -> State:
        """The state, its registry with the healthy copies on disk that RAM had outlived."""
        state, ledger = resumed.state, resumed.state.ledger
        if not (resumed.same_model and self.disk.enabled):
            return state
        known = {s.step: s for s in ledger.snapshots}
        for copy in self.disk.healthy_copies(state.step):
            target, undone = ledger.last_target, ledger.last_rollback
            if target is None or undone is None or not target < copy.step <= undone:
                known.setdefault(copy.step, copy)
        registry = tuple(known[step] for step in sorted(known))
        return dataclasses.replace(state, ledger=dataclasses.replace(ledger, snapshots=registry))

    def _keep_what_is_left(self, resumed: Resumed) -> None:
        """Snapshots of the processes before; and a rollback that they decided and did not do."""
        state = self._host.now
        step, at, ledger = state.step, resumed.from_step, state.ledger
        on_disk: tuple[int, ...] = ()
        if resumed.same_model and self.disk.enabled:
            on_disk = self.disk.find(s.step for s in ledger.snapshots)
        pending, rule = ledger.pending_restore, ledger.pending_rule
        done = at is not None and any(s.step == at and s.healthy for s in ledger.snapshots)
        if pending is not None and at is not None and done and at <= pending:
            # Started from the snapshot that it was to be rolled back to: that is the rollback.
            self._host.note(Restored(step, at, resumed.state.stats))
            pending = None
        for snapshot in self._host.now.ledger.snapshots:
            reason = ""
            if snapshot.step not in on_disk:
                reason = "it was in the memory of a process that has ended"
            elif not snapshot.healthy and (at is None or at < snapshot.step):
                reason = "it was not confirmed before the process ended"
            if reason and snapshot.step != pending:
                self._host.note(SnapshotLost(step, snapshot.step, reason))
        if pending is None:
            return
        if pending in on_disk and at is not None and at > pending:
            if self._council is not None:
                self._deferred = (pending, rule)  # all ranks together, at the next safe point
                return
            self._restore_surely(pending, rule)
            return
        why = "the process ended before it was restored"
        if pending in on_disk:
            why += ", and was started again with other weights, which are left as they are"
        self._host.note(RestoreFailed(step, pending, why))

    def restore_deferred(self, target: int, rule: str) -> None:
        """Several ranks: a rollback that the processes before had decided."""
        self._restore_surely(target, rule)

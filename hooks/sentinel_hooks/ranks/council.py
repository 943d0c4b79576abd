"""The council: what a session says to the other ranks, and when all of them stop together.

    council = Council(agreement, sidecar=False)
    heard = council.step(measured, facts, note, attempt=0)   at the gate, always, whatever failed
    heard = council.vote(ok, token)                          one phase of a rollback
    council.want_off("why")                                  told to all at the next step

Every method that talks returns None when there is nothing to agree on any more: the group is lost,
the ranks are out of step, or one of them asked all to stop. `off` then says why, and the same is
true on every rank that still lives: nobody acts alone.

Every rank says a digest of its engine's state too: an error of our own that one rank alone has seen
must not make it decide on something else from then on. Where they differ, all go on with rank 0's.

What a rank carried out at a step is said at the next one. When it was not the same everywhere, the
parameters are compared at the next safe point, and only if they differ the run is halted: on all
ranks, at the same step.

An error of our own in the middle of a step, on one rank alone, must not make that rank act alone:
begin() starts a step, rewind() lets it be gone through again, and what was heard in it the first
time is not asked a second time, but given again in the same order.

Threads: the training one. Errors: none raised.
"""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from sentinel.core.types import CanaryAnswer, Command
from sentinel_hooks.ranks.agreement import MODULUS, NOTE_BYTES, Agreement, Heard, Kind, Says
from sentinel_hooks.ranks.group import LostError
from sentinel_hooks.ranks.parted import Done, Parted

logger = logging.getLogger(__name__)

ANSWER_BYTES = 4096  # of a decision that the sidecar made differently
_OWN, _AGREED, _OTHER = 0, 1, 2
_BATCH_ID = 200  # characters of it that travel
_LEFT = "left"  # in the store: the rank that detached


class Note(msgspec.Struct, omit_defaults=True):
    """Rank 0's word on what is not measured but known: equal on all ranks afterwards.

    Attributes:
        orders: people's commands for this step.
        paused: by the kill-switch file.
        saved: the step whose snapshot is committed on disk now.
        unsaved: one that is not, and why.
        state: bytes of engine state that follow in a broadcast: the run was restarted.
        restore: a rollback that the process before had decided and not done, and its rule.
        number: of rank 0's last save to disk; -1 for not told.
        scalars: those that advice depends on, as rank 0 has them.
    """

    lr: float | None = None
    scale: float | None = None
    shape: tuple[int, ...] = ()
    batch: str = ""
    orders: tuple[Command, ...] = ()
    paused: bool = False
    saved: int | None = None
    unsaved: tuple[int, str] | None = None
    state: int = 0
    restore: tuple[int, str] | None = None
    number: int = -1
    scalars: dict[str, float] = {}


@dataclass(slots=True)
class Facts:
    """What became of this rank's share of the work, see Says."""

    taken: bool | None = None
    written: bool | None = None
    ready: bool = False
    flying: int = 0


class Council:
    """One rank's seat."""

    def __init__(
        self,
        agreement: Agreement,
        *,
        sidecar: bool = False,
        store: Callable[[], Any] | None = None,
        sharded: bool = False,
    ) -> None:
        """Take a seat.

        Args:
            sidecar: rank 0 asks a sidecar at every step: its answer is told to all.
            store: where ranks leave notes when the group is lost.
            sharded: ranks hold different parts, whose digests cannot be compared.
        """
        self._agreement = agreement
        self.sidecar = sidecar
        self._store = store
        self._sharded = sharded
        self.off = ""
        self.halt = ""  # the ranks have parted: why
        self._wanted_off = ""
        self._orders: deque[Command] = deque()
        self._log: deque[Done] = deque(maxlen=16)
        self._compare = False
        self._applied_differed = False
        self._parted: Parted | None = None
        self._published = False
        self._heard: list[Any] = []  # in this step, and how much of it was given (again)
        self._given = 0

    @property
    def rank(self) -> int:
        """This one."""
        return self._agreement.rank

    @property
    def world(self) -> int:
        """All of them."""
        return self._agreement.world

    @property
    def collectives(self) -> int:
        """How many there were so far, attach included."""
        return self._agreement.group.collectives

    # ---------------------------------------------------------------- the step

    @property
    def patience_s(self) -> float:
        """How long one rank may keep the others waiting outside a collective."""
        return self._agreement.group.timeout_s / 4

    def begin(self) -> None:
        """A gate is entered."""
        self._heard, self._given = [], 0

    def rewind(self) -> None:
        """It is gone through again, after an error of our own."""
        self._given = 0

    def _once(self, talk: Callable[[], None]) -> Any:
        """Talk to the others (`talk` notes what it heard), unless this was done before rewind()."""
        if self._given == len(self._heard):
            talk()
        self._given += 1
        return self._heard[self._given - 1]

    def want_off(self, why: str) -> None:
        """This rank cannot go on guarding: all shall stop at the next step."""
        self._wanted_off = self._wanted_off or why

    def carried_out(self, step: int, action: str, applied: bool, lr_factor: float) -> None:
        """What this rank did with the last decision."""
        self._log.append(Done(step, action, applied, lr_factor))

    def step(
        self,
        measured: Any,
        facts: Facts,
        note: Note,
        *,
        attempt: int,
        state: Callable[[], bytes] = bytes,
    ) -> tuple[Heard, Note] | None:
        """The one reduce of a step.

        Args:
            measured: None: measuring failed.
            state: digest of the engine's; Heard.same_digest tells whether all have the same.
        """
        try:
            says = self._said(measured, facts, note, attempt)
            says.digest = state()
        except Exception as error:  # noqa: BLE001  the others are waiting, whatever failed here
            logger.error("this rank has nothing to say at this step: %r", error)
            says = Says(Kind.STEP, attempt=attempt, blind=True)
            # What it did last is said all the same: unsaid, it would pass for another act.
            with contextlib.suppress(Exception):
                self._say_last(says)
        heard = self._say(says)
        if heard is None:
            return None
        if heard.off:
            own = f": {self._wanted_off}" if self._wanted_off else ", see its log"
            self._stop(f"{heard.off} of {heard.ranks} ranks cannot go on guarding{own}")
            return None
        if not heard.acted_alike:
            self._compare = True
            self._applied_differed = 0 < heard.applied < heard.ranks
        try:
            told = msgspec.msgpack.decode(heard.note, type=Note) if heard.note else Note()
        except msgspec.DecodeError as error:  # equal bytes: equal on all ranks
            logger.error("the note of rank 0 cannot be read: %s", error)
            heard.blind, told = heard.blind + 1, Note()
        return heard, told

    def _said(self, measured: Any, facts: Facts, note: Note, attempt: int) -> Says:
        says = Says(Kind.STEP, attempt=attempt, blind=measured is None)
        if measured is not None:
            says.loss = measured.loss
            says.total_sq, says.layer_sq_L = measured.total_sq, measured.layer_sq_L
            says.params_bad = bool(measured.params_bad)
            says.parts = measured.parts
        says.off = bool(self._wanted_off)
        says.taken, says.written, says.ready = facts.taken, facts.written, facts.ready
        says.flying = facts.flying
        self._say_last(says)
        if self.rank == 0:
            says.note = self._packed(note)
        return says

    def _say_last(self, says: Says) -> None:
        if self._log:
            last = self._log[-1]
            says.action = _digest(last)
            says.applied = last.applied

    def _packed(self, note: Note) -> bytes:
        """As many orders as fit; the others go with the next step."""
        self._orders.extend(note.orders)
        note.batch = note.batch[:_BATCH_ID]
        note.orders = tuple(self._orders)
        packed = msgspec.msgpack.encode(note)
        while len(packed) > NOTE_BYTES and note.orders:
            note.orders = note.orders[:-1]
            packed = msgspec.msgpack.encode(note)
        for _ in note.orders:
            self._orders.popleft()
        if len(packed) > NOTE_BYTES:
            note = Note(
                lr=note.lr,
                scale=note.scale,
                shape=note.shape,
                paused=note.paused,
                number=note.number,
            )
            packed = msgspec.msgpack.encode(note)
        return packed

    def answer(self, payload: bytes | None, agreed: bool) -> tuple[bool, bytes | None] | None:
        """Sidecar mode: what rank 0 carries out; (the sidecar decided, its decision if another).

        Args:
            payload: rank 0: the encoded decision where it differs from the own one.
            agreed: rank 0: the sidecar decided.
        """
        told = b""
        if self.rank == 0:
            kind = _AGREED if agreed else _OWN
            if payload is not None and len(payload) + 5 <= ANSWER_BYTES:
                kind = _OTHER
            size = len(payload or b"") if kind == _OTHER else 0
            told = bytes([kind]) + size.to_bytes(4, "little") + (payload or b"")[:size]
        heard = self._tell(told, ANSWER_BYTES)
        if heard is None:
            return None
        size = int.from_bytes(heard[1:5], "little")
        return heard[0] != _OWN, heard[5 : 5 + size] if heard[0] == _OTHER else None

    def state(self, encoded: bytes | None, size: int) -> bytes | None:
        """Rank 0's engine state after a restart."""
        return self._tell(encoded, size)

    def one_state(self, encoded: Callable[[], bytes]) -> bytes | None:
        """All go on with rank 0's engine state, whose bytes `encoded` gives; two broadcasts."""
        logger.error("the ranks' states differ: all go on with that of rank 0")
        payload: bytes | None = None
        if self.rank == 0:
            try:
                payload = encoded()
            except Exception as error:  # noqa: BLE001  the others are waiting
                logger.error("this rank cannot tell its state: %r", error)
        told = self._tell(len(payload or b"").to_bytes(8, "little"), 8)
        size = int.from_bytes(told or b"", "little")
        if told is not None and not size:
            self._stop("the ranks' states differ, and rank 0 could not tell its own")
        return self._tell(payload, size) if size else None

    def _tell(self, payload: bytes | None, size: int) -> bytes | None:
        def talk() -> None:
            group, told = self._agreement.group, None
            completed = group.completed
            try:
                try:
                    told = group.tell(payload, size)
                except LostError:
                    raise
                except Exception as error:  # noqa: BLE001  the others are waiting: once more
                    logger.error("a broadcast failed here: %r", error)
                    told = group.told if group.completed > completed else group.tell(payload, size)
            except LostError as error:
                self._lose(error)
            except Exception as error:  # noqa: BLE001  and the others must not wait in vain
                self.leave(f"this rank cannot speak: {type(error).__name__}: {error}")
            self._heard.append(told)

        told: bytes | None = self._once(talk)
        return told

    # ---------------------------------------------------------------- rarer things

    def vote(self, ok: bool, token: int = 0, target: int = 0) -> Heard | None:
        """One phase of a rollback; `token` must be the same on all, and so must the target."""
        says = Says(Kind.VOTE, ok=ok, digest=token.to_bytes(8, "little"), flying=target + 1)
        heard = self._say(says)
        if heard is not None and not heard.same_flight:
            self._stop("the ranks would go back to different snapshots")
            return None
        return heard

    def canary(self, answer: CanaryAnswer | None) -> CanaryAnswer | None:
        """The mean over all ranks; None when one of them has none."""
        values = (answer.recorded, answer.now) if answer is not None else (0.0, 0.0)
        of = answer.step if answer is not None else 0
        digest = of.to_bytes(8, "little", signed=True)
        heard = self._say(Says(Kind.CANARY, ok=answer is not None, values=values, digest=digest))
        if heard is None or heard.failed or answer is None or not heard.same_digest:
            return None
        return CanaryAnswer(answer.step, *heard.values)

    def copies(self, mine: float) -> float | None:
        """At attach: elements of the model, all ranks' shares added up."""
        heard = self._say(Says(Kind.COPIES, values=(mine, 0.0)))
        return None if heard is None else heard.values[0] * heard.ranks

    def all_finite(self, finite: bool) -> bool:
        """A later gate of the group: may its gradients be applied?"""
        heard = self._say(Says(Kind.LATE, ok=finite))
        return heard is not None and not heard.failed

    def compare(self, digest: Callable[[], bytes]) -> None:
        """At a safe point, on all ranks: have the parameters parted, if actions differed?"""
        if not self._compare:
            return
        self._compare = False
        try:
            mine = digest()
        except Exception as error:  # noqa: BLE001  the others are waiting
            logger.error("this rank's parameters cannot be compared: %r", error)
            mine = b""
        heard = self._say(Says(Kind.COMPARE, digest=mine))
        if heard is None:
            return
        if self._applied_differed if self._sharded else not heard.same_digest:
            self.part("the ranks acted differently and their parameters have parted")
        else:
            logger.error("the ranks acted differently; their parameters are still the same")

    def part(self, why: str) -> None:
        """All ranks have heard it: the one case that halts."""
        self.halt = self.halt or why

    # ---------------------------------------------------------------- losing each other

    def say_leaving(self) -> None:
        """This rank detaches: a note, before close(), for the others, whose reduce will fail."""
        if self.off or self._store is None:
            return
        try:
            self._store().set(_LEFT, str(self.rank))
        except Exception as error:  # noqa: BLE001  the store may be gone with rank 0
            logger.debug("the other ranks could not be told: %s", error)

    def close(self) -> None:
        """This rank leaves: the others notice at their next step."""
        self._agreement.group.close("this rank has detached")

    def disband(self, why: str) -> None:
        """All ranks stop at the same point, each by itself: nobody waits, nobody has parted."""
        self._stop(why)

    def leave(self, why: str) -> None:
        """This rank cannot go on: the others must not wait for it."""
        self._stop(why)
        self._wonder()

    def look(self, step: int) -> bool:
        """After the group was lost: whether the run is to be halted at this step."""
        if self._parted is None:
            return False
        try:
            if not self._published:
                self._published = True
                self._parted.publish(tuple(self._log))
        except Exception as error:  # noqa: BLE001  the store may be gone with rank 0
            logger.warning("the ranks cannot be compared: %s", error)
            self._parted = None
            return False
        if self._parted.look(step):
            self.part(f"the ranks have parted: {self._parted.why}")
            return True
        return False

    def _say(self, says: Says) -> Heard | None:
        heard: Heard | None = self._once(lambda: self._talk(says))
        return heard

    def _talk(self, says: Says) -> None:
        heard: Heard | None = None
        seq = self._agreement.seq + 1
        try:
            if not self.off:
                try:
                    heard = self._agreement.say(says)
                except LostError:
                    raise
                except Exception as error:  # noqa: BLE001  the others are waiting: once more
                    logger.error("talking to the other ranks failed here, once more: %r", error)
                    heard = self._agreement.say_again(says, seq)
        except LostError as error:
            self._lose(error)
        if heard is not None and not heard.in_step:
            self._stop("the ranks are out of step: they spoke of different steps")
            self._wonder()
            heard = None
        self._heard.append(heard)

    def _lose(self, error: LostError) -> None:
        gone = self._who_left()
        self._stop(
            f"rank {gone} has detached" if gone else f"the ranks have lost each other ({error})"
        )
        self._wonder()

    def _who_left(self) -> str:
        """A rank that has detached, as it says itself; "" where none does."""
        if self._store is None:
            return ""
        try:
            store = self._store()
            return bytes(store.get(_LEFT)).decode() if store.check([_LEFT]) else ""
        except Exception as error:  # noqa: BLE001  the store may be gone with rank 0
            logger.debug("why they are lost cannot be read: %s", error)
            return ""

    def _wonder(self) -> None:
        if self._store is not None:
            self._parted = Parted(self._store(), self.rank, self.world)

    def _stop(self, why: str) -> None:
        self.off = self.off or why
        self._agreement.group.close(why)


def _digest(done: Done) -> int:
    text = f"{done.step} {done.action} {done.applied} {done.lr_factor!r}"
    return zlib.crc32(text.encode()) % MODULUS

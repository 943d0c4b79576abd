"""Agreeing: what is observed and who decides, for one process alone or by all ranks together.

    voice = Alone(observer, link, host)                 one process
    voice = Together(council, observer, link, ...)      one of several ranks
    observation, all_ready = voice.observe(measured, commands)
    decision, source = voice.ask(observation, own)      the sidecar's, if it comes; else `own`
    voice.nonfinite(member)                             a later gate: on any rank?
    state = voice.surely(engine.note, state, event)     see below

Together, what a rank has measured goes into one reduce, which every rank enters whatever has failed
on it, and all that follows is computed from what they heard: equal everywhere, so nobody has to be
asked again. Where the digests of their states differ, all go on with rank 0's. What a pure function
of shared values raises on one rank alone (no memory for a moment) must not make it act alone: it is
asked once more, and if it fails again, all go off at the next step.

observe() and ask() answer None when the ranks have stopped together; council.off says why.

Threads: the training thread.
Errors:  those of what is called; the caller's guard ends them, and goes through it again with what
         was heard so far (Council.rewind).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

from sentinel.core import advice
from sentinel.core.types import Command, Decision, Observation, Source
from sentinel.wire import codec
from sentinel_hooks.canary import Canary
from sentinel_hooks.guard import Guard
from sentinel_hooks.link import Link
from sentinel_hooks.observe import Measured, Observer
from sentinel_hooks.parts.between import Between
from sentinel_hooks.parts.pausing import PauseFile
from sentinel_hooks.ranks.council import Council, Note
from sentinel_hooks.saving import Host, Saving

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Voice(Protocol):
    """What the session needs of either.

    Attributes:
        entered: this gate's observe() has begun.
    """

    entered: bool

    def observe(
        self, measured: Measured | None, commands: tuple[Command, ...]
    ) -> tuple[Observation, bool] | None:
        """The step's observation, and whether everybody could ask its canary.

        Args:
            measured: None: measuring failed.
        """
        ...

    def ask(self, observation: Observation, own: Decision) -> tuple[Decision, Source] | None:
        """The decision to carry out, and whose it is."""
        ...

    def nonfinite(self, member: int) -> bool:
        """Gradients of this optimizer, made after the decision, are not finite."""
        ...

    def surely(self, body: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Ask a pure function of what is shared."""
        ...


class Alone:
    """One process: what it measured is what is observed."""

    def __init__(self, observer: Observer, link: Link, host: Host) -> None:
        self._observer = observer
        self._link = link
        self._host = host
        self.entered = False

    def observe(
        self, measured: Measured | None, commands: tuple[Command, ...]
    ) -> tuple[Observation, bool] | None:
        """See Voice."""
        step = self._host.now.step
        if measured is None:  # say so, and decide on nothing
            return Observation(step, commands=commands, blind=True), True
        return self._observer.alone(measured, step, commands), True

    def ask(self, observation: Observation, own: Decision) -> tuple[Decision, Source] | None:
        """See Voice."""
        return self._link.decide(observation, own, self._host.now)

    def nonfinite(self, member: int) -> bool:
        """See Voice."""
        return self._observer.late_nonfinite(member)

    def surely(self, body: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """See Voice."""
        return body(*args, **kwargs)


class Together:
    """One of several ranks."""

    def __init__(
        self,
        council: Council,
        observer: Observer,
        link: Link,
        host: Host,
        *,
        guard: Guard,
        saving: Saving,
        between: Between,
        pause: PauseFile,
        canary: Canary | None,
    ) -> None:
        """Nothing is said yet."""
        self._council = council
        self._observer = observer
        self._link = link
        self._host = host
        self._guard = guard
        self._saving = saving
        self._between = between
        self._pause = pause
        self._canary = canary
        self.entered = False

    def observe(
        self, measured: Measured | None, commands: tuple[Command, ...]
    ) -> tuple[Observation, bool] | None:
        """See Voice."""
        council, saving = self._council, self._saving
        self.entered = True
        ready = self._canary is not None and self._canary.ready(self._host.now.step)
        note = Note()
        if council.rank == 0:
            if measured is not None:
                note = Note(
                    lr=measured.lr,
                    scale=measured.loss_scale,
                    shape=measured.shape,
                    batch=measured.batch_id,
                    scalars={k: v for k, v in measured.scalars.items() if k in advice.SCALARS},
                )
            note.orders = commands
            note.paused = self._pause.found
            note = saving.add_to(note)
        heard_note = council.step(
            measured,
            saving.facts(ready=ready),
            note,
            attempt=self._host.now.ledger.attempt,
            state=lambda: codec.state_hash(self._host.now),
        )
        if heard_note is None:
            return None
        heard, note = heard_note
        if note.state:
            told = council.state(saving.restarted(), note.state)
            if told is None:
                return None
            if council.rank:
                self.surely(saving.follow_rank_0, codec.decode_state(told))
        elif not heard.same_digest:
            told = council.one_state(lambda: codec.encode_state(self._host.now))
            if told is None:
                return None
            if council.rank:
                self.surely(self._host.adopt_state, codec.decode_state(told))
        if note.restore is not None:
            self._between.put_off(note.restore)
        self.surely(saving.heard, heard, note)
        self._pause.heard(note.paused)
        step = self._host.now.step
        observation = self.surely(self._observer.together, heard, note, step)
        if council.rank == 0 and measured is not None and measured.scalars:
            # The others only for the record: nothing is decided or advised on them.
            known = {k: v for k, v in measured.scalars.items() if k not in advice.SCALARS}
            scalars = {**known, **observation.scalars}
            observation = dataclasses.replace(observation, scalars=scalars)
        return observation, heard.ready == heard.ranks

    def ask(self, observation: Observation, own: Decision) -> tuple[Decision, Source] | None:
        """See Voice. Rank 0 asks and tells the others."""
        council = self._council
        decision, source = own, Source.TRAINER
        if council.rank == 0:
            asked = self._guard.run("link", self._link.decide, observation, own, self._host.now)
            if asked is not None:
                decision, source = asked
        if not council.sidecar:
            return decision, source
        payload = None
        if council.rank == 0 and decision is not own and decision != own:
            payload = codec.encode_decision(decision)
        told = council.answer(payload, source is Source.SIDECAR)
        if told is None:
            return None
        decided, other = told
        if other is not None:
            return codec.decode_decision(other), Source.SIDECAR
        return own, Source.SIDECAR if decided else Source.TRAINER

    def nonfinite(self, member: int) -> bool:
        """See Voice."""
        return not self._council.all_finite(not self._observer.late_nonfinite(member))

    def surely(self, body: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """See Voice. If it fails here, it is asked again."""
        try:
            return body(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  once more, and that error is the caller's
            self._guard.note("again", error)
        try:
            return body(*args, **kwargs)
        except Exception:
            self._council.want_off(self._guard.last)
            raise

"""Which of several JSON trainers that use one name may write the run.

    given = sessions.given(run, session, claim, fresh, now)     for who registers while it goes on
    sessions.only_the_writer(run, session, carried, now)        for every step, and the end
    sessions.only_once(run, session, observation)               for a step that is told again

A trainer that asks to write alone is given a session, carries it from then on, and is the only one
while it lives: whoever carries none, or another one, is refused and shown as a second writer. Those
that carry none cannot be told apart and share their run, as somebody with curl does; of them a step
that is told a second time and otherwise is refused, since only one of two trainers can have told it
first.

Units:   `now` in Unix seconds.
Errors:  RefusedError, with the way out.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import NoReturn

from sentinel.core.types import Observation
from sentinel.sidecar.runs.chronicle import Chronicle
from sentinel.sidecar.runs.refusal import RefusedError
from sentinel.sidecar.runs.run import Run
from sentinel.sidecar.runs.session import Claim, Session
from sentinel.sidecar.settings import Settings
from sentinel.wire import codec

SESSION_HEADER = "sentinel-session"
MOST_STRANGERS = 16  # of one session, that are told of
MOST_CARRIED = 64  # characters of a session that is told of


class Sessions:
    """See the module docstring."""

    def __init__(self, settings: Settings, chronicle: Chronicle) -> None:
        self._settings = settings
        self._chronicle = chronicle

    def given(self, run: Run, session: Session, claim: Claim, *, fresh: bool, now: float) -> str:
        """What a trainer carries that registers for a run that goes on; "" for nothing.

        Args:
            fresh: nothing was reported yet: nobody is robbed of a run that is shared.

        Raises:
            RefusedError: another one lives, and one of the two wants to write alone.
        """
        if claim.carried and claim.carried == session.id:
            return session.id
        taken = session.id != "" or (claim.alone and not fresh)
        if taken and not claim.take_over and run.live(now, self._settings.lost_after_s):
            who = "another live trainer" if session.id else "a live trainer without a session"
            self._refuse(
                run,
                claim.carried,
                f"run {run.name!r} is written by {who}, last heard {now - run.last_heard:.1f} s "
                "ago; give this one another name, wait until the other has been silent for "
                f"{run.patience(self._settings.lost_after_s):g} s, or, if that one is gone, take "
                f'over: PUT /v1/runs/{run.name} with {{"exclusive": true, "take_over": true}}',
            )
        return new_session(claim)

    def only_the_writer(self, run: Run, session: Session, carried: str, now: float) -> None:
        """Raise RefusedError for a stranger; each is told of once."""
        if carried == session.id:
            return
        put = f"PUT /v1/runs/{run.name}"
        here = (
            f"run {run.name!r} is written by a trainer that carries its session, last heard "
            f"{now - run.last_heard:.1f} s ago"
        )
        if not session.id:
            detail = (
                f"run {run.name!r} is written without a session, and this trainer carries one: it "
                f"was begun anew since; give this one another name, or {put} with "
                '{"exclusive": true}'
            )
        elif carried:
            detail = (
                f"{here}; this is another session, whose place was taken; give this trainer "
                f'another name, or {put} with {{"exclusive": true}} once the other is gone'
            )
        else:
            detail = (
                f"{here}; this request carries none; give this trainer another name, or send in "
                f"the header {SESSION_HEADER} what {put} gave it"
            )
        self._refuse(run, carried, detail, session)

    def only_once(self, run: Run, session: Session, observation: Observation) -> None:
        """Raise RefusedError when the newest step was told otherwise before."""
        told, step = run.observation, observation.step
        if told is None or _same(told, observation):
            return
        detail = (
            f"step {step} of run {run.name!r} was told before, with another observation: a second "
            "trainer posts under this name, or the step was computed again; give a second one "
            'another name (one that registers with {"exclusive": true} keeps others out), go on '
            f"with step {step + 1}, or begin anew: PUT /v1/runs/{run.name} with "
            f'{{"first_step": {step}}}'
        )
        if session.id:  # the one writer, with a slip of its own
            raise RefusedError("conflict", detail)
        self._refuse(run, "", detail, session, code="conflict")

    def _refuse(
        self,
        run: Run,
        carried: str,
        detail: str,
        session: Session | None = None,
        *,
        code: str = "fenced",
    ) -> NoReturn:
        """Raise RefusedError; a second writer is shown.

        Args:
            session: where it is noted, so that it is not shown anew at every step.
        """
        who = carried[:MOST_CARRIED] or "json"
        told = session is not None and (
            who in session.strangers or len(session.strangers) >= MOST_STRANGERS
        )
        if not told:
            if session is not None:
                session.strangers.add(who)
            self._chronicle.refused(run, who, detail)
        raise RefusedError(code, detail)


def new_session(claim: Claim) -> str:
    """One that nobody has; "" for a trainer that carries none."""
    return uuid.uuid4().hex if claim.alone else ""


def _same(told: Observation, again: Observation) -> bool:
    """Whether a step is told as it was before; orders stand in the first alone."""
    bare, other = (
        codec.encode(codec.wire_observation(replace(seen, commands=(), columns={})))
        for seen in (told, again)
    )
    return (
        bare == other
        and told.columns.keys() == again.columns.keys()
        and all(told.columns[name].tobytes() == c.tobytes() for name, c in again.columns.items())
    )

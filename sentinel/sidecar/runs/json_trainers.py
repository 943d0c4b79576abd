"""Trainers that speak JSON: they have no engine, so their state lives here and they obey.

    run = trainers.register(name, layers, now, first=None, claim=Claim(exclusive=True))
    decision = trainers.step(name, observation, outcome, events, now, carried=run.session.id)
    trainers.newest_kept(name)                 whether a disk took that report
    trainers.close(name, "finished", now, carried=run.session.id)

Steps count attempted steps, one after the other; a later one than the next leaves a hole, the same
one again gets the same decision, an earlier one is refused. After a restart of the sidecar the
state is computed again from the series (comeback.py). `docs/sidecar.md` tells trainers of it.

Which of several may write is settled in sessions.py.

Units:   `now` in Unix seconds; `timer` gives monotonic seconds, for durations only.
Errors:  RefusedError and ProtocolError; a refused step has settled nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sentinel.core import orders
from sentinel.core.errors import ProtocolError
from sentinel.core.events import Event
from sentinel.core.policy import Policy
from sentinel.core.state import ENGINE_VERSION
from sentinel.core.types import Action, Decision, Observation, Outcome, Source
from sentinel.sidecar.runs.bounds import (
    MOST_EVENTS,
    MOST_JUMP,
    apart,
    check_columns,
    check_event,
    check_layers,
    check_step,
)
from sentinel.sidecar.runs.chronicle import Chronicle
from sentinel.sidecar.runs.comeback import Comeback
from sentinel.sidecar.runs.recording import Recording
from sentinel.sidecar.runs.refusal import RefusedError
from sentinel.sidecar.runs.registry import Registry
from sentinel.sidecar.runs.run import ENDED, Run
from sentinel.sidecar.runs.session import Claim, Session
from sentinel.sidecar.runs.sessions import Sessions, new_session
from sentinel.sidecar.runs.writers import Writers, next_fence
from sentinel.sidecar.settings import Settings
from sentinel.wire import codec, messages
from sentinel.wire.messages import Frame, Layer, Move

SHARED = Claim()


class JsonTrainers:
    """See the module docstring."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        writers: Writers,
        recording: Recording,
        chronicle: Chronicle,
        comeback: Comeback,
        timer: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._writers = writers
        self._recording = recording
        self._chronicle = chronicle
        self._comeback = comeback
        self._sessions = Sessions(settings, chronicle)
        self._timer = timer

    def register(
        self,
        name: str,
        layers: tuple[Layer, ...],
        now: float,
        first: int | None = None,
        claim: Claim = SHARED,
    ) -> Run:
        """Register a run whose state lives here: its trainer posts JSON and obeys.

        Args:
            first: it begins anew at this step, from a checkpoint; None: it goes on, if it has not
                ended.
            claim: whether it shares its run.

        Raises:
            RefusedError: a bad name, no room, another process writes this run, or it goes on with
                other layers.
        """
        check_layers(layers)
        if first is not None:
            check_step("first_step", first)
        old = self._registry.find(name)
        if old is None or old.session is None or old.run_state in ENDED:
            admitted = self._writers.admit(name, "json", 0, now)
            given = new_session(claim)
            return self._anew(name, admitted, layers, Session(given, first), now)
        session = old.session
        self._comeback.revive(old)
        fresh = old.observation is None and old.state is None
        given = self._sessions.given(old, session, claim, fresh=fresh, now=now)
        if first is not None and not fresh:
            return self._anew(name, old, layers, Session(given, first), now)
        table = apart(layers) or old.layers
        if fresh:
            session.first = first
        else:
            _same_layers(old, table)
        old.layers = table
        old.heard(now, report=False)
        self._chronicle.back(old)
        if given != session.id:
            session.id, session.strangers = given, set()
            self._chronicle.save(old)
        return old

    def step(
        self,
        name: str,
        observation: Observation,
        outcome: Outcome | None,
        events: tuple[Event, ...],
        now: float,
        carried: str = "",
    ) -> Decision:
        """Decide one observation of such a run.

        Args:
            outcome: what was done at the step before; None: what was decided.
            carried: the session that its trainer was given; "" when it carries none.

        Raises:
            RefusedError: not such a run, not who writes it, or not the step that comes next.
        """
        run, session = self._of_json(name)
        if run.run_state in ENDED:
            raise RefusedError(
                "over",
                f"run {name!r} is {run.run_state}: PUT /v1/runs/{name} begins it anew, with "
                "whatever step comes next",
            )
        self._sessions.only_the_writer(run, session, carried, now)
        self._comeback.revive(run)
        check_step("observation.step", observation.step)
        check_columns(run, observation.columns)
        if outcome is not None:
            check_step("outcome.step", outcome.step)
        if len(events) > MOST_EVENTS:
            raise ProtocolError(f"events may be {MOST_EVENTS} at one step, got {len(events)}")
        for at, event in enumerate(events):
            check_event(f"events[{at}]", event)
        mirror = run.mirror
        asked = mirror.decision if mirror.undecided else None
        if asked is not None and observation.step == asked.step:
            self._sessions.only_once(run, session, observation)
            run.heard(now, report=True)
            self._chronicle.back(run)
            return asked  # the same question again
        due = session.due(mirror)
        hole = 0 if due is None else observation.step - due
        _check_hole(name, hole, observation.step)
        done = None if asked is None else _done(asked, outcome, observation.step)
        # Nothing refuses from here on: a refused step has settled nothing.
        run.heard(now, report=True)
        self._chronicle.back(run)
        moves: list[Move] = []
        if done is not None:
            mirror.apply(done, run.policy)
            moves.append(messages.wire_outcome(done))
        state = mirror.begin(observation.step, self._chronicle.next_incident(name))
        for event in events:
            noted = session.with_stats(event, state)
            state = mirror.note(noted, run.policy)
            moves.append(codec.wire_event(noted))
        observation = replace(observation, commands=orders.due(run.orders.to_tell(now)[0])[0])
        seq = mirror.next_seq + hole
        started = self._timer()
        decision = mirror.decide(seq, observation, run.policy)
        run.figures.duration.add(self._timer() - started)
        frame = Frame(seq=seq, observation=codec.wire_observation(observation), moves=tuple(moves))
        self._recording.live(
            run,
            frame,
            observation,
            decision,
            now,
            state.ledger.attempt,
            codec.encode_decision(decision),
            mirror.before,
            skipped=hole > 0 and run.kept.record is not None,
        )
        return decision

    def newest_kept(self, name: str) -> bool:
        """Whether a disk took the newest report of such a run."""
        run = self._registry.get(name)
        return run.mirror.next_seq - 1 in run.kept.seen

    def close(self, name: str, state: str, now: float, carried: str = "") -> str:
        """Such a run is over; how it has ended, which may have been before.

        Raises:
            RefusedError: not such a run, or not who writes it.
        """
        run, session = self._of_json(name)
        if run.run_state in ENDED:
            return run.run_state
        self._sessions.only_the_writer(run, session, carried, now)
        self._comeback.revive(run)
        run.last_heard = now
        mirror = run.mirror
        if mirror.undecided and mirror.decision is not None:
            done = _done(mirror.decision, None, mirror.decision.step + 1)
            mirror.apply(done, run.policy)
            told = (messages.wire_outcome(done),)
            run.figures.carried_out(told, decides=run.decides, decision=mirror.decision)
            self._chronicle.incidents(run, now)
        self._chronicle.ends(run, state, now)
        self._recording.close(run)
        return run.run_state

    def _anew(
        self,
        name: str,
        old: Run | None,
        layers: tuple[Layer, ...],
        session: Session,
        now: float,
    ) -> Run:
        """An incarnation of its own, with an engine that warms up."""
        self._chronicle.anew(old, name, now)
        policy = self._settings.policy or Policy.load("default")
        data = codec.encode_policy(policy)
        fence = next_fence(old, 0, again=False)
        new = Run(
            name=name,
            incarnation=f"json-{fence}",
            fence=fence,
            policy=policy,
            policy_bytes=data,
            policy_hash=codec.digest(data),
            engine_version=ENGINE_VERSION,
            layers=apart(layers),
            info={},
            registered=now,
            max_layers=self._settings.max_layers,
            session=session,
            last_report=now,
            last_heard=now,
        )
        self._writers.enter(new, old, again=False, first=0)
        return new

    def _of_json(self, name: str) -> tuple[Run, Session]:
        run = self._registry.get(name)
        if run.session is None:
            raise RefusedError("fenced", f"run {name!r} is written by a trainer with an engine")
        return run, run.session


def next_step(run: Run) -> int | None:
    """The step that a trainer without an engine is expected to report; None: any."""
    return None if run.session is None else run.session.due(run.mirror)


def _done(decided: Decision, told: Outcome | None, observed: int) -> Outcome:
    """What was done at the newest step of a trainer without an engine.

    Raises:
        ProtocolError: it tells of another step.
    """
    action = decided.action
    as_decided = Outcome(decided.step, action, action is Action.PROCEED, Source.SIDECAR)
    if told is None or decided.step < told.step < observed:
        return as_decided  # nobody asked about a step in a hole: it is not in the record
    if told.step != decided.step:
        raise ProtocolError(
            f"outcome.step must be the step that was decided last ({decided.step}), got {told.step}"
        )
    return replace(told, source=Source.SIDECAR)


def _check_hole(name: str, hole: int, step: int) -> None:
    """Raise RefusedError for a step that cannot come now."""
    if 0 <= hole <= MOST_JUMP:
        return
    due = step - hole
    bound = "" if hole < 0 else f" to {due + MOST_JUMP}"
    raise RefusedError(
        "malformed",
        f"observation.step must be the next step ({due}) or a later one{bound}, got {step}; a "
        f'trainer that begins again elsewhere says so: PUT /v1/runs/{name} with {{"first_step": '
        f"{step}}}",
        422,
    )


def _same_layers(run: Run, table: tuple[Layer, ...]) -> None:
    """Raise RefusedError where a run that goes on is given another layer table."""
    names, had = ([layer.name for layer in which] for which in (table, run.layers))
    if names == had:
        return
    at = next((i for i, (a, b) in enumerate(zip(names, had, strict=False)) if a != b), None)
    where = (
        f"{len(names)} layers instead of {len(had)}"
        if at is None
        else f"layers[{at}] is {names[at][:64]!r} instead of {had[at][:64]!r}"
    )
    raise RefusedError(
        "conflict",
        f"run {run.name!r} goes on and has other layers: {where}; leave them out to go on, or "
        'begin anew with "first_step"',
    )

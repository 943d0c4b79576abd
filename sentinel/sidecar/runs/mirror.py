"""The sidecar's copy of a trainer's engine state: it follows what the trainer did, and decides.

    mirror.take(state, seq)                    handed over by the trainer, for its report `seq`
    if mirror.caught_up(frame, policy):        the moves followed, and the hashes are the same
        decision = mirror.decide(seq, observation, policy)
    mirror.noted(observation, decision)        what the newest report brought

The trainer's state is the only truth. The copy follows the moves that each frame carries and is
compared by hash before every decision; once anything does not fit it is not `known` any more, and
only the trainer can hand it over. Of a trainer without an engine this is the one state there is:
begin() and note() move it.

Units:   `seq` counts reports; steps are attempted optimizer steps.
Purity:  no clock, no I/O. Mutable, of one run; the states in it are values.
Errors:  StateError where a move does not fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from sentinel.core import engine
from sentinel.core.errors import ProtocolError, StateError
from sentinel.core.events import Event
from sentinel.core.policy import Policy
from sentinel.core.state import State
from sentinel.core.types import Decision, Observation, Outcome, Source
from sentinel.wire import codec
from sentinel.wire.messages import Frame, Move, WireOutcome


@dataclass(slots=True)
class Mirror:
    """See the module docstring.

    Attributes:
        state: what report `next_seq` is to be decided on, after its moves, if it is `known`.
        handed: `state` was handed over for next_seq: its moves are in it already.
        undecided: the newest decision has no outcome yet.
        before: the state before the events that came with the newest frame, if known.
        observation: of the newest report.
        decision: of the newest report that has one; the trainer's own where none was made here.
    """

    state: State | None = None
    known: bool = False
    next_seq: int = 0
    handed: bool = False
    undecided: bool = False
    before: State | None = None
    observation: Observation | None = None
    decision: Decision | None = None

    def again(self) -> Mirror:
        """Of the same process once more: what it showed last, until it hands its state over."""
        return Mirror(state=self.state, observation=self.observation, decision=self.decision)

    def take(self, state: State, seq: int) -> None:
        """Have the state that report `seq` is to be decided on."""
        self.state, self.known, self.handed = state, True, True
        self.next_seq, self.undecided = seq, False

    def caught_up(self, frame: Frame, policy: Policy) -> bool:
        """Bring the copy up to this frame; False when only the trainer can.

        Raises:
            StateError: what the trainer did does not fit.
        """
        if not self.known or self.state is None or frame.seq != self.next_seq:
            return False
        if not self.handed:
            self.follow(frame.moves, policy)
        if codec.state_hash(self.state) != frame.state_hash:
            return False
        return self.state.step == frame.observation.step

    def follow(self, moves: Iterable[Move], policy: Policy) -> None:
        """Apply what the trainer did; raises StateError, and is not known then."""
        self.before = self.state
        try:
            for move in moves:
                if isinstance(move, WireOutcome):
                    self.apply(core_outcome(move), policy)
                    self.before = self.state
                else:
                    self.note(codec.core_event(move), policy)
        except (StateError, ProtocolError, ValueError) as error:
            self.known = False
            raise StateError(str(error)) from error

    def apply(self, outcome: Outcome, policy: Policy) -> None:
        """The newest decision was carried out so; raises StateError."""
        if not self.undecided or self.observation is None or self.decision is None:
            raise StateError(f"an outcome of step {outcome.step} without a decision of it")
        if outcome.step != self.observation.step:
            raise StateError(
                f"outcome.step must be the decided step ({self.observation.step}), "
                f"got {outcome.step}"
            )
        assert self.state is not None
        self.undecided = False
        self.state = engine.apply(self.state, self.observation, self.decision, outcome, policy)

    def note(self, event: Event, policy: Policy) -> State:
        """Something happened between two steps; returns the state from then on."""
        assert self.state is not None
        self.state = engine.note(self.state, event, policy)
        return self.state

    def begin(self, step: int) -> State:
        """The state at the beginning of a step, of a trainer without an engine."""
        self.state = self.before = replace(self.state or engine.initial(step), step=step)
        return self.state

    def decide(self, seq: int, observation: Observation, policy: Policy) -> Decision:
        """The answer to report `seq`; whatever the engine raises has changed nothing."""
        assert self.state is not None
        decision = engine.decide(self.state, observation, policy)
        self.handed, self.undecided, self.next_seq = False, True, seq + 1
        return decision

    def noted(self, observation: Observation, decision: Decision | None) -> None:
        """What the newest report brought."""
        self.observation = observation
        if decision is not None:
            self.decision = decision

    def recalled(self, state: State, observation: Observation, decision: Decision) -> None:
        """The end of a run of an earlier start, computed again from its record."""
        self.state, self.observation, self.decision = state, observation, decision


def core_outcome(move: WireOutcome) -> Outcome:
    """An outcome as the core has it; raises ValueError for a source that there is not."""
    return Outcome(move.step, move.executed, move.applied, Source(move.source))

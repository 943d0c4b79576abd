"""Turns: which optimizers have stepped in this logical step, and which forwards were seen.

    turns = Turns(optimizers=2)
    mark = turns.mark()                   a gate is entered
    first = turns.gate(me)                True: a new logical step begins with it
    turns.begin()                         ... it is decided on
    turns.stepped(me)                     this one has had its turn
    turns.all_stepped()                   the next training forward is the safe point
    turns.back_to(mark, me)               an error of ours: as if the gate had not been entered

Several optimizers are one logical step, which ends when all have stepped or one steps again. One
that has not stepped for DORMANT steps is not waited for (a phase of training, a frozen part).

Units:   steps are logical steps, forwards are training forwards of the watched models.
Threads: the training thread.
Purity:  counts only; no tensor is looked at.
"""

from __future__ import annotations

from typing import NamedTuple

DORMANT = 16


class Mark(NamedTuple):
    """Where the turns stood when a gate was entered."""

    done: frozenset[int]
    steps: int
    forwards: int
    unseen: int
    gates: int


class Turns:
    """The logical steps of one group of optimizers.

    Attributes:
        steps: how many were decided.
        forwards: since the last gate.
        unseen: steps in a row without any forward.
    """

    def __init__(self, optimizers: int) -> None:
        self._count = optimizers
        self._done: set[int] = set()  # stepped in this logical step
        self._last = [0] * optimizers  # ... and the step in which each did last
        self._usual = 0  # most forwards of one step so far
        self._gates = 0  # since the scaler's last update
        self.steps = 0
        self.forwards = 0
        self.unseen = 0

    # -- the gate ----------------------------------------------------------------------------

    def mark(self) -> Mark:
        """Where things stand."""
        return Mark(frozenset(self._done), self.steps, self.forwards, self.unseen, self._gates)

    def back_to(self, mark: Mark, me: int) -> bool:
        """The gate of optimizer `me` was not entered; True: it would begin a logical step."""
        self.steps, self.forwards, self.unseen = mark.steps, mark.forwards, mark.unseen
        self._gates = mark.gates
        first = not mark.done or me in mark.done
        self._done = set() if first else set(mark.done)
        return first

    def gate(self, me: int) -> bool:
        """The gate of optimizer `me` is entered; True: a logical step begins with it."""
        self._gates += 1
        if me in self._done:  # it steps again: the last logical step is over, whoever is missing
            self._done.clear()
        return not self._done

    def begin(self) -> None:
        """A logical step is decided on."""
        self.steps += 1
        self.unseen = 0 if self.forwards else self.unseen + 1
        self._usual = max(self._usual, self.forwards)
        self.forwards = 0

    def stepped(self, me: int) -> None:
        """Optimizer `me` has had its turn."""
        self._done.add(me)
        self._last[me] = self.steps

    def only(self, me: int) -> None:
        """A logical step of which nothing is known but that it began with `me`."""
        self._done = {me}

    # -- beside it ---------------------------------------------------------------------------

    def updated(self) -> int:
        """The scaler updates: how many gates there were since it did last."""
        gates, self._gates = self._gates, 0
        return gates

    def over(self) -> None:
        """The logical step is over."""
        self._done.clear()

    def all_left_out(self) -> None:
        """A step that the scaler left out: all have had their turn."""
        self._done = set(range(self._count))
        self._last = [self.steps] * self._count

    # -- asked -------------------------------------------------------------------------------

    def taking_part(self, fresh: int, me: int) -> list[int]:
        """Optimizers whose gradients belong to the decision at the gate of `me`.

        Args:
            fresh: bits, of those whose gradients have moved since their last gate.
        """
        if self._count == 1:
            return [0]
        bits = fresh | (1 << me)
        return [
            m for m in range(self._count) if bits >> m & 1 and (m == me or not self._dormant(m))
        ]

    def all_stepped(self) -> bool:
        """Every optimizer that still takes part has stepped in this logical step."""
        return len(self._done) == self._count or all(
            m in self._done or self._dormant(m) for m in range(self._count)
        )

    @property
    def forsaken(self) -> bool:
        """Far more forwards than usual since a watched optimizer has stepped."""
        return self.steps > 0 and self.forwards > 4 * self._usual + 16

    def _dormant(self, member: int) -> bool:
        return self.steps - self._last[member] > DORMANT

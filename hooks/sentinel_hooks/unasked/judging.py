"""What an optimizer that nobody watches is to the one that is: its partner, its heir, or neither?

    judge(Seen(alive=True, shares=False, age=1, own=1, between=False)) -> Verdict.JOIN

An optimizer that makes its first step says nothing of what it is for. What it is shows in who else
steps: partners (a GAN's two) take turns; an heir (the next phase of training, the next model) steps
alone, and the one before never again. Until that shows, a line says that it is not watched.

Units:   age, own are steps.
Purity:  pure. With several ranks all fields but `alive` are equal on all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

YOUNG = 1  # a session that saw no more than one step has learnt nothing that joining would lose
OVER = 16  # steps of the one, none of the other: the other is over


class Verdict(StrEnum):
    """What is to be done about it."""

    HEIR = "heir"  # let go of what is watched, and attach to this one
    PARTNER = "partner"  # attach anew to both
    OPEN = "open"  # it cannot be told yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What has been seen of the two.

    Attributes:
        alive: what is watched is held by somebody.
        shares: this one moves a parameter that is watched: it was made anew.
        age: steps of the session.
        own: steps of this one, with the one that it is about to make.
        between: what is watched has stepped since this one's first step.
    """

    alive: bool
    shares: bool
    age: int
    own: int
    between: bool


def judge(seen: Seen) -> Verdict:
    """Heir, partner, or not to be told yet."""
    if not seen.alive or seen.shares:
        return Verdict.HEIR
    if seen.age <= YOUNG or seen.between:
        return Verdict.PARTNER
    return Verdict.HEIR if seen.own >= OVER else Verdict.OPEN

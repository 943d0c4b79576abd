"""The link: whose decision is carried out at this step, and what the sidecar is told.

    link = make_link(sidecar, decide, run=..., incarnation=..., policy=..., pinned=...)
    link.policy                                        the policy this run shall use
    link.decide(observation, own, state) -> (decision, source)

The trainer's own engine has decided already when `decide` is called, so the link never has to
answer: a sidecar that is slow, dead or talks nonsense costs at most the deadline and a count.
Nothing here raises into the training loop.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from sentinel.core.policy import Policy
from sentinel.core.state import State
from sentinel.core.types import Command, Decision, Event, Observation, Outcome, Source


class Decide(enum.StrEnum):
    """Whose decision is carried out when a sidecar is there."""

    SIDECAR = "sidecar"  # wait for it, at most until the deadline
    TRAINER = "trainer"  # never wait; the sidecar is told afterwards


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """The link in plain values, for `session.status()`.

    Attributes:
        state: embedded, connected, connecting, breaker_open, refused or closed.
        detail: one sentence when there is something to say.
        decided: steps by whose decision was carried out.
        misses: steps on which the sidecar was asked in vain, by reason.
        mismatches: answers that differed from the trainer's own decision.
        dropped: frames lost because the buffer was full.
        buffered: frames that wait to be delivered.
        longest_wait_s: the longest that one step waited for the sidecar.
    """

    url: str = ""
    decide: Decide = Decide.TRAINER
    state: str = "embedded"
    detail: str = ""
    decided: Mapping[str, int] = field(default_factory=dict)
    misses: Mapping[str, int] = field(default_factory=dict)
    mismatches: int = 0
    dropped: int = 0
    buffered: int = 0
    longest_wait_s: float = 0.0


class Link(Protocol):
    """What the session needs; every method returns promptly and never raises.

    Order of calls: event() for what happens before the first step (snapshot 0); then for each
    step decide(), settled() when its outcome has been applied to the state, and event() for each
    event noted after it. `state` at decide() is the state that `own` was decided on.
    """

    @property
    def policy(self) -> Policy:
        """The policy this run shall use; final once make_link has returned."""
        ...

    def decide(
        self, observation: Observation, own: Decision, state: State
    ) -> tuple[Decision, Source]:
        """The decision to carry out, and whose it is."""
        ...

    def settled(self, observation: Observation, decision: Decision, outcome: Outcome) -> None:
        """`outcome` was applied to the state."""
        ...

    def event(self, event: Event) -> None:
        """`event` was noted in the state."""
        ...

    def take_commands(self) -> tuple[Command, ...]:
        """People's orders that arrived since the last call, for the next observation."""
        ...

    def count_error(self, where: str) -> None:
        """An error of sentinel's own was caught in the trainer: the sidecar shall show it."""
        ...

    def status(self) -> LinkStatus:
        """How the link is doing."""
        ...

    def close(self, how: str = "finished") -> None:
        """Deliver what can be delivered within two seconds and let go; `how`: or "halted"."""
        ...


class EmbeddedLink:
    """No sidecar: the trainer's own engine decides, nothing is sent."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._decided = 0

    @property
    def policy(self) -> Policy:
        return self._policy

    def decide(
        self, observation: Observation, own: Decision, state: State
    ) -> tuple[Decision, Source]:
        self._decided += 1
        return own, Source.TRAINER

    def settled(self, observation: Observation, decision: Decision, outcome: Outcome) -> None:
        pass

    def event(self, event: Event) -> None:
        pass

    def take_commands(self) -> tuple[Command, ...]:
        return ()

    def count_error(self, where: str) -> None:
        pass

    def status(self) -> LinkStatus:
        return LinkStatus(decided={str(Source.TRAINER): self._decided})

    def close(self, how: str = "finished") -> None:
        pass


def make_link(
    sidecar: str | None,
    decide: str | None = None,
    *,
    run: str,
    incarnation: str,
    policy: Policy,
    pinned: bool = True,
) -> Link:
    """A link to the sidecar at `sidecar`, or the embedded one.

    Args:
        sidecar: "auto" ($SENTINEL_SIDECAR, else the standard socket if it is there, else
            embedded), None (embedded), or http://host:port or unix:///path.
        decide: "sidecar" (default) or "trainer".
        pinned: the user chose `policy`; otherwise the sidecar may hand the run another one.
    """
    return EmbeddedLink(policy)

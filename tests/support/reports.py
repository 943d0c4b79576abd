"""What a simulated trainer would have told a sidecar, and an in-process sidecar to tell it to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from sentinel.core.policy import Policy
from sentinel.sidecar.service import Service
from sentinel.wire import codec, messages
from sentinel.wire.messages import Close, Frame, HandOver, Layer, Register, Registered, Reply, Steps
from tests.support.simulated import SimulatedTrainer, Step


def frames(steps: Sequence[Step]) -> list[Frame]:
    """One frame a step, as the link sends them."""
    found = []
    before: Step | None = None
    for seq, step in enumerate(steps):
        moves: list[Any] = [] if before is None else [messages.wire_outcome(before.outcome)]
        moves += [codec.wire_event(event) for event in step.events]
        found.append(
            Frame(
                seq=seq,
                attempt=step.before.ledger.attempt,
                observation=codec.wire_observation(step.observation),
                moves=tuple(moves),
                state_hash=codec.state_hash(step.before),
                own=codec.wire_decision(step.decision),
            )
        )
        before = step
    return found


class Reporter:
    """A trainer that reports straight into a Service, without HTTP."""

    def __init__(
        self,
        service: Service,
        trainer: SimulatedTrainer,
        run: str = "r",
        incarnation: str = "i",
    ) -> None:
        self.service, self.trainer, self.run, self.incarnation = service, trainer, run, incarnation
        self.layers = tuple(Layer(f"layer{at}") for at in range(trainer.layers))
        self.frames: list[Frame] = []
        self.fence = 0
        self.policy_hash = codec.policy_hash(trainer.policy)

    def register(self, first: int = 0) -> Registered:
        answer = self.service.runs.register(
            Register(
                run=self.run,
                incarnation=self.incarnation,
                fence=self.fence,
                policy=codec.encode_policy(self.trainer.policy),
                layers=self.layers,
                first=first,
            ),
            self.service.now(),
        )
        self.fence = answer.fence
        return answer

    def move(self, steps: int) -> list[Frame]:
        """The trainer makes so many steps; the frames that it would send."""
        self.trainer.run(steps)
        new = frames(self.trainer.steps)[len(self.frames) :]
        self.frames += new
        return new

    def post(self, *these: Frame, late: bool = False) -> Reply:
        """Send frames, and the state when it is asked for."""
        message = Steps(
            run=self.run,
            incarnation=self.incarnation,
            fence=self.fence,
            policy_hash=self.policy_hash,
            late=late,
            frames=tuple(msgspec.Raw(messages.encode_frame(frame)) for frame in these),
        )
        reply = self.service.runs.steps(message, self.service.now())
        if reply.need_state:
            step = self.trainer.steps[reply.seq]
            self.service.runs.hand_over(
                HandOver(
                    run=self.run,
                    incarnation=self.incarnation,
                    fence=self.fence,
                    seq=reply.seq,
                    state=codec.encode_state(step.before),
                ),
                self.service.now(),
            )
            at = [frame.seq for frame in these].index(reply.seq)
            return self.post(*these[at:], late=late)
        return reply

    def steps(self, steps: int) -> Reply:
        """Make so many steps and report each."""
        reply = None
        for frame in self.move(steps):
            reply = self.post(frame)
        assert reply is not None
        return reply

    def close(self) -> None:
        last = self.trainer.steps[-1]
        self.service.runs.close(
            Close(
                run=self.run,
                incarnation=self.incarnation,
                fence=self.fence,
                moves=(messages.wire_outcome(last.outcome),),
            ),
            self.service.now(),
        )

    def curves(self, *names: str, **query: Any) -> dict[str, Any]:
        """The series as people get them."""
        given: dict[str, Any] = {"first": None, "last": None, "points": 20_000} | query
        files = self.service.store.series
        place = self.service.series_directory(self.run)
        return files.curves(place, names or ("loss", "grad_norm", "lr", "action"), **given)


def expected(trainer: SimulatedTrainer) -> dict[str, list[Any]]:
    """The same rows from the trainer's own memory; imports nothing that wrote them."""
    steps = trainer.steps
    return {
        "step": [s.observation.step for s in steps],
        "loss": [_word(s.observation.loss) for s in steps],
        "grad_norm": [_word(s.observation.grad_norm) for s in steps],
        "lr": [_word(s.observation.lr) for s in steps],
        "action": [s.outcome.executed.name.lower() for s in steps],
    }


def _word(value: float | None) -> Any:
    if value is None:
        return None
    if value != value:
        return "nan"
    return value if abs(value) != float("inf") else "inf" if value > 0 else "-inf"


POLICY = Policy.load("default")

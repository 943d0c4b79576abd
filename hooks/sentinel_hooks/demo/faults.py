"""What goes wrong in each world: four ways in which real runs break, and a run left alone.

    fault = make("nan", fault_step)
    fault.learning_rate(step)  fault.batch(...)  fault.before_step(...)  fault.after_backward(...)

Each is an ordinary accident that happens to the run; none knows whether sentinel is attached.

Where a fault may fall: policy `default` keeps a snapshot every 50 steps and trusts it after 32
quiet ones, and its detector speaks after 48. Between steps 136 and 149 the run is guarded, and
the newest trusted snapshot (step 100) is 36 to 49 steps old. A fault just before a snapshot is
trusted costs 85 steps, which is a third of a run as short as this one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from sentinel_hooks.demo.corpus import Batch, DemoError, garbage
from sentinel_hooks.demo.model import GPT

EARLIEST, LATEST = 136, 149
AFTERMATH = 60  # steps a run needs after the latest fault to show what became of it


class Fault:
    """Nothing goes wrong: the base, and the world without fault."""

    key = "none"
    label = "no fault"

    def __init__(self, step: int) -> None:
        self.step = step

    def learning_rate(self, step: int) -> float:
        """Factor on the schedule's learning rate."""
        return 1.0

    def batch(self, step: int, batch: Batch, seed: int) -> Batch:
        """What the data pipeline really delivers."""
        return batch

    def before_step(self, step: int, model: GPT) -> None:
        """What happens to the weights between two steps."""

    def after_backward(self, step: int, model: GPT) -> None:
        """What happens to the gradients."""


class NanGradient(Fault):
    """One gradient value is NaN, once; the loss of that step is fine."""

    key = "nan"
    label = "one NaN gradient"

    def after_backward(self, step: int, model: GPT) -> None:
        if step == self.step:
            gradient = model.blocks[1].attention_out.weight.grad  # type: ignore[union-attr]
            assert isinstance(gradient, torch.Tensor)
            gradient[3, 5] = float("nan")


class LearningRate(Fault):
    """A bug in the schedule: thirty times the learning rate for five steps."""

    key = "lr"
    label = "learning rate x30 for 5 steps"
    factor = 30.0
    lasts = 5

    def learning_rate(self, step: int) -> float:
        return self.factor if self.step <= step < self.step + self.lasts else 1.0


class Garbage(Fault):
    """A damaged shard: twenty batches of random bytes."""

    key = "garbage"
    label = "20 garbage batches"
    lasts = 20

    def batch(self, step: int, batch: Batch, seed: int) -> Batch:
        if not self.step <= step < self.step + self.lasts:
            return batch
        rows, length = batch[0].shape
        return garbage(seed, step, rows, length)


class Weights(Fault):
    """One layer's weights are overwritten (bad memory, a kernel's stray write)."""

    key = "weights"
    label = "one layer's weights overwritten"
    noise = 2.0  # they are about 0.1 when healthy

    def before_step(self, step: int, model: GPT) -> None:
        if step == self.step:
            generator = torch.Generator().manual_seed(step)
            with torch.no_grad():
                model.blocks[0].qkv.weight.normal_(  # type: ignore[union-attr, operator]
                    0.0, self.noise, generator=generator
                )


FAULTS: dict[str, type[Fault]] = {
    kind.key: kind for kind in (Fault, NanGradient, LearningRate, Garbage, Weights)
}


def make(key: str, step: int) -> Fault:
    """The fault of world `key`, falling at `step`.

    Raises:
        DemoError: there is no such world.
    """
    if key not in FAULTS:
        raise DemoError(f"worlds must be among {', '.join(FAULTS)}, got {key!r}")
    return FAULTS[key](step)


def draw_steps(seed: int) -> dict[str, int]:
    """For every world the step at which its fault falls, drawn from `seed`."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    return {key: chance.randint(EARLIEST, LATEST) for key in FAULTS}


def check(worlds: Sequence[str], steps: int) -> None:
    """Refuse worlds that do not exist, and runs too short to show a rescue.

    Raises:
        DemoError: with the bound and the value.
    """
    for key in worlds:
        make(key, 0)
    if steps < LATEST + AFTERMATH:
        raise DemoError(
            f"--steps must be at least {LATEST + AFTERMATH} (faults fall as late as step "
            f"{LATEST}), got {steps}"
        )

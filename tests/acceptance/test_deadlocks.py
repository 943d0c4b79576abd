"""A true change of the gradient's scale must not be skipped for ever.

Seen red: with the bound on skips in a row set to 10,000, and with the norm rule keeping its old
baseline after the rung.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from sentinel.core.types import Action
from tests.acceptance.oracle import World
from tests.acceptance.watched import actions, drawn, policy, rollbacks, world_session

pytestmark = [pytest.mark.torch, pytest.mark.slow]


class Valley(nn.Module):
    """A long smooth slope towards a point: the loss falls slowly and steadily."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((64,), 4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w


def _longest(flags: list[bool]) -> int:
    best = run = 0
    for flag in flags:
        run = run + 1 if flag else 0
        best = max(best, run)
    return best


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("what", ["gradient", "loss and gradient"])
@pytest.mark.parametrize("canary", ["on", "off"])
def test_a_lasting_jump_of_the_gradient_scale_is_skipped_20_times_at_most_and_then_learned(
    canary: str, what: str, seed: int, tmp_path: Path
) -> None:
    steps = 480
    jump = drawn(f"gradient scale {what} {canary}", seed).randrange(190, 230)  # armed snapshots
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Valley()
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-3)
    scale = 1.0

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean() + 0.5
        if what == "gradient":
            return loss + (scale - 1.0) * (loss - loss.detach())
        return scale * loss

    run = World(model, [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0, 1)], None)  # type: ignore[arg-type]
    options = {"loss_fn": loss_fn} if canary == "on" else {}
    session = world_session(run, policy(f'[canary]\nmode = "{canary}"'), tmp_path, **options)
    losses, held = [], []
    for t in range(steps):
        scale = 50.0 if t >= jump else 1.0
        optimizer.zero_grad()
        x = 1.0 + 0.1 * torch.randn(32, 64, generator=g)
        loss = session.loss(x) if canary == "on" else loss_fn(x)
        loss.backward()
        losses.append(loss.item())
        before = run.fragile()
        optimizer.step()
        held.append(run.fragile() == before)
        run.schedulers[0].step()
    session.detach()

    done = actions(session)
    skips = [t in done and done[t][0] is Action.SKIP_STEP for t in range(steps)]
    assert not any(held[:jump])
    assert any(skips), "the jump was never noticed"
    assert _longest(skips) <= 20
    # a rung applies nothing either; where the loss jumps too, all three of the budget are climbed
    assert _longest(held) <= (21 if what == "gradient" else 3 * 21 + 20)
    assert 1 <= sum(rollbacks(session).values()) <= (1 if what == "gradient" else 3)
    assert not any(held[-100:]), "it still skips long after"
    assert losses[-1] < 0.9 * max(losses[jump + 64 : jump + 120])
    assert losses[-1] < losses[-40]

"""Small language worlds with faults drawn from a seed; imports torch and nothing of ours.

    world(seed, schedule="cosine")        fresh model, optimizer, scheduler: equal for equal seeds
    batches(seed, steps, garbage={40})    one batch a step, each marked with what it is

A sentence of this language is a pair (symbol, next symbol): a fixed permutation nine times in ten,
chance otherwise. A lawful change of the data swaps the permutation for another one; a garbage batch
draws both symbols by chance; a half-bad batch is half of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.acceptance.oracle import World

V = 24  # symbols
ROWS = 512


@dataclass(frozen=True)
class Batch:
    """One micro-batch; `kind` is for the reader and the report, nobody computes with it."""

    number: int
    kind: str
    x: Tensor
    y: Tensor


def _law(seed: int, which: int) -> Tensor:
    return torch.randperm(V, generator=torch.Generator().manual_seed(7919 * seed + which))


def batch(seed: int, number: int, kind: str = "clean", rows: int = ROWS, micro: int = 0) -> Batch:
    """The `number`-th batch of this seed's corpus; the same one whenever it is asked for."""
    g = torch.Generator().manual_seed(1_000_003 * (seed + 1) + 31 * number + micro)
    x = torch.randint(V, (rows,), generator=g)
    chance = torch.randint(V, (rows,), generator=g)
    lawful = torch.rand(rows, generator=g) < 0.9
    y = torch.where(lawful, _law(seed, 1 if kind == "new-law" else 0)[x], chance)
    if kind == "garbage":
        y = chance
    elif kind == "half-bad":
        y = torch.where(torch.arange(rows) < rows // 2, chance, y)
    return Batch(number, kind, x, y)


def batches(
    seed: int,
    steps: int,
    *,
    garbage: Collection[int] = (),
    half_bad: Collection[int] = (),
    new_law_from: int | None = None,
    accumulation: int = 1,
    rows: int = ROWS,
) -> list[tuple[Batch, ...]]:
    """One tuple of micro-batches for each step."""

    def kind(t: int) -> str:
        if t in garbage:
            return "garbage"
        if t in half_bad:
            return "half-bad"
        return "new-law" if new_law_from is not None and t >= new_law_from else "clean"

    return [
        tuple(batch(seed, t, kind(t), rows, m) for m in range(accumulation)) for t in range(steps)
    ]


class Speaker(nn.Module):
    """Embedding, one hidden layer, a head; with what a monitor could disturb, where asked for."""

    def __init__(
        self,
        *,
        norm: bool = False,
        dropout: float = 0.0,
        checkpointed: bool = False,
        own_generator: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, 16)
        self.hidden = nn.Linear(16, 32)
        self.norm: nn.Module = nn.BatchNorm1d(32) if norm else nn.Identity()
        self.drop: nn.Module = nn.Dropout(dropout) if dropout else nn.Identity()
        self.head = nn.Linear(32, V)
        self.checkpointed = checkpointed
        self.noise = torch.Generator().manual_seed(5) if own_generator else None

    def _body(self, h: Tensor) -> Tensor:
        out: Tensor = self.drop(torch.tanh(self.norm(self.hidden(h))))
        return out

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        if self.checkpointed and torch.is_grad_enabled():
            h = torch.utils.checkpoint.checkpoint(self._body, h, use_reentrant=False)
        else:
            h = self._body(h)
        if self.noise is not None and self.training:
            h = h * (0.9 + 0.2 * torch.rand(h.shape, generator=self.noise))
        out: Tensor = self.head(h)
        return out


def loss_of(model: nn.Module, part: Batch) -> Tensor:
    """Cross entropy made outside the model, as plain loops do."""
    return F.cross_entropy(model(part.x), part.y)


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer, int], Any]] = {
    "constant": lambda o, n: torch.optim.lr_scheduler.ConstantLR(o, factor=1.0, total_iters=1),
    "cosine": lambda o, n: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=n),
    "lambda": lambda o, n: torch.optim.lr_scheduler.LambdaLR(
        o, lambda t: 0.5 + 0.5 * math.cos(math.pi * t / (2 * n))
    ),
    "onecycle": lambda o, n: torch.optim.lr_scheduler.OneCycleLR(
        o, max_lr=0.02, total_steps=n + 1, pct_start=0.2
    ),
    "sequential": lambda o, n: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, start_factor=0.2, total_iters=n // 4),
            torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=n - n // 4),
        ],
        milestones=[n // 4],
    ),
}


def world(
    seed: int,
    *,
    steps: int,
    schedule: str = "constant",
    optimizers: int = 1,
    scaler: bool = False,
    lr: float = 0.02,
    **model: Any,
) -> World:
    """A fresh world; two calls with equal arguments are bitwise equal."""
    torch.manual_seed(seed)
    net = Speaker(**model)
    parts = (
        [list(net.parameters())]
        if optimizers == 1
        else [
            list(net.embed.parameters()),
            [p for n, p in net.named_parameters() if "embed" not in n],
        ]
    )
    made: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(parts[0], lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    ]
    if optimizers == 2:
        made.append(torch.optim.SGD(parts[1], lr=lr * 10, momentum=0.9))
    return World(
        net,
        made,
        [SCHEDULES[schedule](o, steps) for o in made],
        loss_of,
        torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=7) if scaler else None,
    )


def damage_weights(kind: World) -> None:
    """One layer corrupted badly: the head answers with its symbols shifted, and louder."""
    with torch.no_grad():
        head = kind.model.head.weight  # type: ignore[union-attr]
        head.copy_(torch.roll(head, 5, dims=0) * 2.0)  # type: ignore[arg-type,operator]

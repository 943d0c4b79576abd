"""The flag is exact: weights are built so that one layer's largest logit is 49.9, then 50.1.

The oracle sees queries and keys of an unattached run and computes all scores in float64, one row of
the softmax after the other; it imports nothing of ours.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sentinel.core.detectors import attention_logit
from sentinel.core.types import LAYER_ATTENTION_MAX_LOGIT
from sentinel_hooks.layers import LayerTable
from sentinel_hooks.probes.attention import AttentionProbe
from sentinel_hooks.probes.probe import resolve
from sentinel_hooks.probes.read import read

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    # torch's own, when inductor is first used.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]

LAYERS, WIDTH, HEADS, ROWS, LENGTH = 4, 32, 4, 2, 40
CONFIG = attention_logit.AttentionLogitConfig()

# ---------------------------------------------------------------- oracle


def brute_force(
    q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> float:
    """The largest score that any row of the softmax may look at, in float64."""
    q, k = q.detach().double(), k.detach().double()
    B, H, T, D = q.shape
    S = k.size(2)
    k = k.repeat_interleave(H // k.size(1), 1)
    if mask is not None:
        mask = mask.detach().expand(B, H, T, S)
    best = -math.inf
    for b in range(B):
        for h in range(H):
            for t in range(T):
                s = (k[b, h] @ q[b, h, t]) * (1 / math.sqrt(D) if scale is None else scale)
                if causal:
                    s = s[: t + 1]
                if mask is not None:
                    row = mask[b, h, t]
                    s = s[row[: len(s)]] if row.dtype == torch.bool else s + row[: len(s)]
                if s.numel():
                    best = max(best, float(s.max()))
    return best


def truths(run: Callable[[], Any]) -> list[float]:
    """The largest score of each call of attention in one unattached run."""
    calls: list[tuple[Any, ...]] = []
    original = F.scaled_dot_product_attention

    def spy(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **more: Any,
    ) -> Tensor:
        calls.append((q.detach(), k.detach(), attn_mask, is_causal, more.get("scale")))
        return original(q, k, v, attn_mask, dropout_p, is_causal, **more)

    F.scaled_dot_product_attention = spy
    try:
        torch.manual_seed(5)
        run()
    finally:
        F.scaled_dot_product_attention = original
    return [brute_force(*call) for call in calls]


def build(
    run: Callable[[], Any], queries: list[list[nn.Parameter]], layer: int, goal: float
) -> None:
    """Scale the query projection of `layer` until its largest score is `goal`."""
    start = [p.detach().clone() for p in queries[layer]]
    factor = 1.0
    for _ in range(12):  # bf16 rounds: it takes a few
        found = truths(run)[layer]
        if abs(found - goal) < 0.08:
            return
        factor *= goal / found
        with torch.no_grad():
            for p, original in zip(queries[layer], start, strict=True):
                p.copy_(original.double() * factor)
    raise AssertionError(f"no weights with {goal}, only {found}")


# ---------------------------------------------------------------- models


class Attention(nn.Module):
    """Attention in one of many ways."""

    def __init__(self, how: dict[str, Any]) -> None:
        super().__init__()
        self.how = how
        kv = how.get("kv", HEADS)
        self.q = nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * kv * WIDTH // HEADS)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.groups = kv

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q = self.q(x).view(B, T, HEADS, -1).transpose(1, 2)
        k, v = self.kv(x).view(B, T, 2, self.groups, -1).permute(2, 0, 3, 1, 4)
        how = self.how
        more = {"enable_gqa": True} if self.groups != HEADS else {}
        attended = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=how.get("mask"),
            dropout_p=how.get("dropout", 0.0),
            is_causal=how.get("causal", False),
            scale=how.get("scale"),
            **more,
        )
        out: Tensor = self.out(attended.transpose(1, 2).reshape(B, T, D))
        return out


class Block(nn.Module):
    def __init__(self, how: dict[str, Any]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = Attention(how)
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + torch.tanh(self.mlp(x))


class Model(nn.Module):
    def __init__(self, how: dict[str, Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(how) for _ in range(LAYERS))
        self.recompute = how.get("recompute")

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.recompute is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute)
        return x.float().square().mean()


def left_padding() -> Tensor:
    """Causal, and the first keys of the second row of the batch do not count: rows see nothing."""
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().repeat(ROWS, 1, 1, 1)
    mask[1, :, :, :7] = False
    return mask


def right_padding() -> Tensor:
    keys = torch.ones(ROWS, 1, 1, LENGTH, dtype=torch.bool)
    keys[1, ..., 30:] = False
    return keys


def as_float(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, -math.inf)


WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "grouped queries": {"causal": True, "kv": 2},
    "one key head": {"kv": 1},
    "padding": {"mask": right_padding()},
    "padding, float": {"mask": as_float(right_padding())},
    "left padding": {"mask": left_padding()},
    "left padding, float": {"mask": as_float(left_padding())},
    "scale": {"causal": True, "scale": 0.7},
    "near uniform": {"causal": True, "uniform": True},
    "near uniform, padding": {"mask": right_padding(), "uniform": True},
    "bf16": {"causal": True, "dtype": torch.bfloat16},
    "bf16, near uniform": {"dtype": torch.bfloat16, "uniform": True},
    "dropout": {"causal": True, "dropout": 0.1},
    "dropout, grouped, padding": {"dropout": 0.1, "kv": 2, "mask": left_padding()},
    "checkpointing": {"causal": True, "recompute": False},
    "checkpointing, reentrant": {"causal": True, "recompute": True},
    "checkpointing, near uniform": {"recompute": False, "uniform": True},
    "checkpointing, dropout": {"recompute": False, "dropout": 0.1},
    "compiled": {"causal": True, "compile": "aot_eager"},
    "compiled, padding": {"mask": left_padding(), "compile": "aot_eager"},
    "compiled, near uniform": {"uniform": True, "compile": "aot_eager"},
    "compiled, dropout": {"dropout": 0.1, "compile": "aot_eager"},
    "compiled, grouped": {"kv": 2, "causal": True, "compile": "aot_eager"},
    "compiled, checkpointing": {"causal": True, "recompute": False, "compile": "aot_eager"},
    "compiled blocks": {"causal": True, "compile": "aot_eager", "blocks": True},
    "compiled blocks, checkpointing": {
        "causal": True,
        "compile": "aot_eager",
        "blocks": True,
        "recompute": False,
    },
    "inductor": {"causal": True, "compile": "inductor"},
    "inductor, checkpointing": {"recompute": False, "compile": "inductor"},
}


class World:
    """One way of attention: model, batch, and one forward and backward."""

    def __init__(self, how: dict[str, Any], seed: int) -> None:
        torch.manual_seed(seed)
        torch._dynamo.reset()
        self.model = Model(how)
        for block in self.model.blocks:
            if how.get("uniform"):  # all queries and keys point the same way, and differ little
                attn = block.attn
                with torch.no_grad():
                    attn.q.weight.mul_(0.02)
                    attn.kv.weight.mul_(0.02)
                    attn.q.bias.uniform_(0.2, 0.4)
                    attn.kv.bias.uniform_(0.2, 0.4)
        dtype = how.get("dtype", torch.float32)
        self.model.to(dtype)
        self.x = torch.randn(ROWS, LENGTH, WIDTH).to(dtype).requires_grad_()
        self.queries = [[b.attn.q.weight, b.attn.q.bias] for b in self.model.blocks]
        self.call: Callable[[Tensor], Tensor] = self.model
        self.how = how

    def compile(self) -> None:
        backend = self.how.get("compile")
        if backend is None:
            return
        if self.how.get("blocks"):
            for block in self.model.blocks:
                block.compile(backend=backend, fullgraph=True)
        else:
            self.call = torch.compile(self.model, backend=backend, fullgraph=True)

    def step(self) -> list[Tensor]:
        """Forward and backward; loss and gradients."""
        torch.manual_seed(5)
        self.model.zero_grad()
        self.x.grad = None
        loss = self.call(self.x)
        loss.backward()
        assert self.x.grad is not None
        return [loss.detach(), self.x.grad, *(p.grad.clone() for p in self.model.parameters())]


def watch(model: nn.Module, step: Callable[[], Any], steps: int = 3) -> tuple[list[Any], Any]:
    """Columns of some steps, and the probe."""
    table = LayerTable.of([model])
    probe = AttentionProbe([model], table, CONFIG.threshold)
    probe.attach()
    columns = []
    try:
        for t in range(steps):
            answer = step()
            probe.before_step(t)
            values, _ = read(probe.pending(), [])
            columns.append(resolve(probe, values).get(LAYER_ATTENTION_MAX_LOGIT))
            assert probe.blind_spots() == []
    finally:
        probe.detach()
    return columns, answer


def flagged(table: LayerTable, column: Any) -> list[str]:
    return [table.layers[i].name for i in attention_logit.judge(column, CONFIG)]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.full if "inductor" in n else ()) for n in WAYS]
)
def test_exactly_the_layer_above_50_is_flagged_and_nothing_else_changes(name: str) -> None:
    how = WAYS[name]
    seed = sum(map(ord, name))
    layer = random.Random(seed).randrange(LAYERS)
    for goal in (49.9, 50.1):
        world = World(how, seed)
        build(lambda: world.model(world.x), world.queries, layer, goal)  # noqa: B023
        truth = truths(lambda: world.model(world.x))  # noqa: B023
        assert all(t < 45 for i, t in enumerate(truth) if i != layer), truth
        world.compile()
        plain = world.step()
        if how.get("compile"):
            torch._dynamo.reset()
            world.compile()
        columns, watched = watch(world.model, world.step)
        assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
        table = LayerTable.of([world.model])
        expected = [f"blocks.{layer}.attn.q"] if goal > 50 else []
        assert flagged(table, columns[-1]) == expected, (columns[-1], truth)
        assert all(flagged(table, c) in ([], expected) for c in columns)  # never a wrong one
        rows = [i for i, row in enumerate(table.layers) if row.name.endswith("attn.q")]
        measured = columns[-1][rows]
        assert np.isneginf(np.delete(columns[-1], rows)).all()
        assert measured[layer] == pytest.approx(truth[layer], rel=1e-3)
        assert (measured >= np.array(truth) - 1e-2).all()

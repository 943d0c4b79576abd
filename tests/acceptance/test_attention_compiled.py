"""Compiled models: every layer is seen, and nothing more is compiled than without us."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sentinel.core.types import LAYER_ACTIVATION_RMS, LAYER_ATTENTION_MAX_LOGIT
from sentinel_hooks.guard import Guard
from sentinel_hooks.layers import LayerTable
from sentinel_hooks.probes.read import read
from sentinel_hooks.probes.together import Probes
from sentinel_hooks.signals import Signals
from sentinel_hooks.target import Target

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    # torch's own, when inductor is first used.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
LAYERS, WIDTH = 9, 16  # more blocks than torch.compile recompiles before it gives up


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, 2, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        return out.transpose(1, 2).reshape(B, T, D)


class Block(nn.Module):
    def __init__(self, dropout: float, by_hand: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = HandWritten(0.0) if by_hand else Attention(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.attn(self.norm(x))
        return out


class HandWritten(Attention):
    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, 2, -1).permute(2, 0, 3, 1, 4)
        s = q @ k.transpose(-1, -2) * 0.35
        return (F.softmax(s, dim=-1) @ v).transpose(1, 2).reshape(B, T, D)


class Model(nn.Module):
    def __init__(self, recompute: bool, dropout: float, by_hand: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout, by_hand) for _ in range(LAYERS))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x.square().mean()


WAYS: dict[str, dict[str, Any]] = {
    "model": {},
    "blocks": {"blocks": True},
    "model, checkpointing": {"recompute": True},
    "blocks, checkpointing": {"blocks": True, "recompute": True},
    "model, dropout": {"dropout": 0.1},
    "model, by hand": {"by_hand": True},
    "blocks, by hand, checkpointing": {"blocks": True, "by_hand": True, "recompute": True},
    "inductor": {"backend": "inductor"},
}


def run(how: dict[str, Any], attached: bool) -> tuple[dict[str, int], Any, list[Any]]:
    """(what was compiled, the last step's columns, losses and gradients)."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    # What tracing the unwatched twin has left there would hide what tracing ours does.
    FakeTensorMode.cache_clear()
    counters.clear()
    model = Model(how.get("recompute", False), how.get("dropout", 0.0), how.get("by_hand", False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    probes: Probes | None = None
    if attached:
        table = LayerTable.of([model])
        target = Target((model,), (optimizer,))
        probes = Probes.of(
            Signals(every=2), target, table, threshold=50.0, clock=lambda: 0.0, guard=Guard("t")
        )
        probes.attach()
    call: Callable[[Tensor], Tensor] = model
    backend = how.get("backend", "aot_eager")
    if how.get("blocks"):
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)
    else:
        call = torch.compile(model, backend=backend, fullgraph=True)
    left: list[Any] = []
    columns: Any = None
    warm: dict[str, int] = {}
    try:
        for t in range(6):
            torch.manual_seed(t)
            x = torch.randn(2, 8, WIDTH)
            optimizer.zero_grad()
            loss = call(x)
            loss.backward()
            left += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
            if probes is not None:
                probes.before_step(t)
                values, _ = read(probes.pending(), [])
                columns = probes.resolve(values)
            optimizer.step()
            if probes is not None:
                probes.after_step(True)
                assert probes.blind_spots() == []
            with torch.no_grad():
                call(x)  # an evaluation in between
            if t == 1:
                warm = dict(counters["stats"])
        after_warm_up = counters["stats"]["unique_graphs"] - warm["unique_graphs"]
        compiled = {
            "graphs": counters["stats"]["unique_graphs"],
            "breaks": sum(counters["graph_break"].values()),
            "after warm-up": after_warm_up,
        }
    finally:
        if probes is not None:
            probes.detach()
    return compiled, columns, left


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.full if "inductor" in n else ()) for n in WAYS]
)
def test_no_graph_break_no_recompilation_and_every_layer_is_seen(name: str) -> None:
    plain, _, without = run(WAYS[name], attached=False)
    watched, columns, with_us = run(WAYS[name], attached=True)
    assert watched == plain
    assert watched["breaks"] == watched["after warm-up"] == 0
    assert all(torch.equal(a, b) for a, b in zip(without, with_us, strict=True))
    for column in (LAYER_ATTENTION_MAX_LOGIT, LAYER_ACTIVATION_RMS):
        assert np.isfinite(columns[column]).sum() == LAYERS, column

"""Flags on models that really have the illness, each beside its healthy twin.

A 12-block GPT is trained for some steps with the probes on; the detectors see what those measured,
and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sentinel.core.detectors import (
    depth,
    layer_band,
    layer_outlier,
    resources,
    stale_grads,
)
from sentinel.core.types import (
    LAYER_ACTIVATION_RMS,
    LAYER_ACTIVATION_SPREAD,
    LAYER_GRAD_NORM,
)
from sentinel_hooks.guard import Guard
from sentinel_hooks.layers import LayerTable
from sentinel_hooks.probes.grads import GradProbe
from sentinel_hooks.probes.read import read
from sentinel_hooks.probes.together import Probes
from sentinel_hooks.signals import Signals
from sentinel_hooks.target import Target

pytestmark = [pytest.mark.torch, pytest.mark.slow]
BLOCKS, WIDTH, HEADS, WORDS, ROWS, LENGTH = 12, 32, 2, 32, 4, 16


class Block(nn.Module):
    def __init__(self, norm: bool, residual: bool) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH) if norm else nn.Identity()
        self.norm_2 = nn.LayerNorm(WIDTH) if norm else nn.Identity()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp_in = nn.Linear(WIDTH, 2 * WIDTH)
        self.mlp_out = nn.Linear(2 * WIDTH, WIDTH)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(B, T, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.out(y.transpose(1, 2).reshape(B, T, D))
        x = x + y if self.residual else y
        y = self.mlp_out(F.gelu(self.mlp_in(self.norm_2(x))))
        out: Tensor = x + y if self.residual else y
        return out


class Gpt(nn.Module):
    def __init__(self, norm: bool = True, residual: bool = True, std: float = 0.05) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(norm, residual) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=std)
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x))[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(
    model: Gpt, steps: int, *, zero: bool = True, lr: float = 1e-3, before: Any = None
) -> Iterator[tuple[int, LayerTable, dict[str, Any], float]]:
    """(step, layer table, columns, global norm) of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    table = LayerTable.of([model])
    grads = GradProbe([optimizer], table)
    probes = Probes.of(
        Signals(every=1),
        Target((model,), (optimizer,)),
        table,
        threshold=50.0,
        clock=lambda: 0.0,
        guard=Guard("t"),
    )
    probes.attach()
    g = torch.Generator().manual_seed(1)
    try:
        for t in range(steps):
            if before is not None:
                before(t)
            start = torch.randint(0, WORDS, (ROWS, 1), generator=g)
            stride = torch.randint(1, 4, (ROWS, 1), generator=g)
            ids = (start + stride * torch.arange(LENGTH)) % WORDS
            if zero:
                optimizer.zero_grad()
            model(ids).backward()
            pending = grads.measure([0])
            probes.before_step(t)
            n = len(pending.norms)
            values, _ = read([*pending.norms, *probes.pending()], [])
            found = grads.resolve(pending, values[:n])
            assert found is not None
            columns = probes.resolve(values[n:])
            columns[LAYER_GRAD_NORM] = np.sqrt(found.layer_sq_L).astype(np.float32)
            optimizer.step()
            probes.after_step(True)
            yield t, table, columns, math.sqrt(found.total_sq)
    finally:
        probes.detach()


def blocks_of(table: LayerTable) -> Any:
    return np.array([-1 if x.block is None else x.block for x in table.layers])


def by_depth(model: Gpt, name: str) -> depth.DepthReading:
    *_, (_, table, columns, _) = train(model, 1)
    return depth.judge(columns[name], blocks_of(table), depth.DepthConfig())


def test_a_stack_without_norms_and_residuals_dies_with_depth() -> None:
    torch.manual_seed(0)
    for name in (LAYER_ACTIVATION_RMS, LAYER_GRAD_NORM):
        assert not by_depth(Gpt(), name).flagged
    reading = by_depth(Gpt(norm=False, residual=False, std=0.12), LAYER_ACTIVATION_RMS)
    assert reading.flagged
    assert reading.rho < 0.7


def test_too_large_an_init_without_norms_grows_with_depth() -> None:
    torch.manual_seed(0)
    reading = by_depth(Gpt(norm=False, std=0.2), LAYER_ACTIVATION_RMS)
    assert reading.flagged
    assert reading.rho > 1.3


def test_a_forgotten_zero_grad_is_told_from_the_norms() -> None:
    def flagged(zero: bool) -> bool:
        torch.manual_seed(0)
        state, found = stale_grads.StaleState(), False
        for _, _, _, norm in train(Gpt(), 40, zero=zero, lr=1e-4):
            state, reading = stale_grads.observe(state, [norm], stale_grads.StaleConfig())
            found = found or reading.flagged
        return found

    assert flagged(zero=False)
    assert not flagged(zero=True)


def test_representations_that_collapse_are_named() -> None:
    def collapsed(model: Gpt) -> list[str]:
        *_, (_, table, columns, _) = train(model, 2)
        found = resources.collapsed(columns[LAYER_ACTIVATION_SPREAD], resources.ResourceConfig())
        return sorted(table.layers[i].name for i in found)

    torch.manual_seed(0)
    assert collapsed(Gpt()) == []
    model = Gpt()
    with torch.no_grad():
        model.blocks[7].mlp_out.bias.fill_(1e4)
    assert collapsed(model) == [f"blocks.{i}.mlp_out" for i in range(10, 12)] + [
        f"blocks.{i}.mlp_out" for i in range(7, 10)
    ]


def test_a_layer_that_gets_no_gradient_to_speak_of_is_far_below_its_like() -> None:
    def low(model: Gpt) -> list[str]:
        *_, (_, table, columns, _) = train(model, 1)
        roles = layer_outlier.roles_of(tuple(x.name for x in table.layers))
        reading = layer_outlier.judge(
            columns[LAYER_GRAD_NORM], roles, layer_outlier.OutlierConfig()
        )
        return [table.layers[i].name for i in reading.low]

    torch.manual_seed(0)
    assert low(Gpt()) == []
    model = Gpt()
    with torch.no_grad():
        model.blocks[4].mlp_out.weight.mul_(1e-4)  # chokes what flows back into mlp_in
    assert "blocks.4.mlp_in" in low(model)


FIRST: Callable[[int], tuple[int, int]] = lambda seed: (  # noqa: E731
    int(np.random.default_rng(seed).integers(BLOCKS)),
    int(np.random.default_rng(seed + 1000).integers(45, 60)),
)


def test_the_layer_that_blew_up_first_is_named_in_19_of_20_runs() -> None:
    right = 0
    for seed in range(20):
        layer, at = FIRST(seed)
        torch.manual_seed(seed)
        model = Gpt()

        def damage(t: int) -> None:
            if t == at:  # noqa: B023
                with torch.no_grad():
                    model.blocks[layer].mlp_out.weight.mul_(100.0)  # noqa: B023

        state, first = layer_band.BandState(), ()
        for t, _, columns, _ in train(model, at + 4, before=damage):
            state, reading = layer_band.observe(
                state, columns[LAYER_ACTIVATION_RMS], t, layer_band.BandConfig()
            )
            assert t >= at or not reading.out, "a false alarm before the damage"
            first = reading.first or first
        table = LayerTable.of([model])
        names = [table.layers[i].name for i in first]
        right += names[:1] == [f"blocks.{layer}.mlp_out"]
    assert right >= 19

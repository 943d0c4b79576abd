"""torch.jit.trace and torch.func: their calls are not looked at, and what is watched goes on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

import sentinel_hooks
from sentinel.core.types import LAYER_ACTIVATION_RMS, LAYER_ATTENTION_MAX_LOGIT
from sentinel.traces.reader import Reader

pytestmark = pytest.mark.torch


class Attn(nn.Module):
    def __init__(self, *, eager: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.eager = eager

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        if self.eager:
            out = F.softmax(q @ k.transpose(-1, -2), dim=-1) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v)
        whole: Tensor = out.transpose(1, 2).reshape(B, T, D)
        return whole


class Block(nn.Module):
    def __init__(self, *, eager: bool) -> None:
        super().__init__()
        self.attn = Attn(eager=eager)
        self.up = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(self.attn(x)))


class Model(nn.Module):
    def __init__(self, *, eager: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(eager=eager) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean((1, 2))


def traced(model: nn.Module, x: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        again = torch.jit.trace(model, x)  # type: ignore[no-untyped-call]
    kinds = [node.kind() for node in again.inlined_graph.nodes()]
    assert "aten::linalg_vector_norm" not in kinds
    assert "aten::amax" not in kinds


def per_sample(model: nn.Module, x: Tensor) -> None:
    own = {name: p.detach() for name, p in model.named_parameters()}

    def loss(own: dict[str, Tensor], one: Tensor) -> Tensor:
        out: Tensor = functional_call(model, own, (one[None],))
        return out.mean()

    vmap(grad(loss), in_dims=(None, 0))(own, x)


def batched(model: nn.Module, x: Tensor) -> None:
    vmap(lambda one: model(one[None]))(x)


def differentiated(model: nn.Module, x: Tensor) -> None:
    own = {name: p.detach() for name, p in model.named_parameters()}
    grad(lambda own: functional_call(model, own, (x,)).mean())(own)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("eager", [False, True], ids=["sdpa", "softmax"])
@pytest.mark.parametrize("other", [traced, per_sample, batched, differentiated])
def test_calls_by_a_tracer_or_a_transform_are_not_looked_at_and_nothing_is_switched_off(
    other: Callable[[nn.Module, Tensor], None], eager: bool, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    model = Model(eager=eager)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = sentinel_hooks.attach(
        model=model, optimizer=optimizer, sidecar=None, run_dir=tmp_path
    )
    for step in range(8):
        if step in (0, 4):
            other(model, torch.randn(3, 5, 16))
        optimizer.zero_grad()
        loss = model(torch.randn(3, 5, 16)).mean()
        loss.backward()
        optimizer.step()
    status = session.status()
    assert dict(status.internal_errors) == {}
    assert [str(spot) for spot in status.blind_spots if "not seen" in spot.what] == []
    assert status.self_check.startswith("passed"), status.self_check
    session.detach()
    for record in Reader(session.directory).steps(columns=True):
        columns = record.observation.columns
        assert (columns[LAYER_ACTIVATION_RMS] > 0).sum() == 4, record.step
        assert (columns[LAYER_ATTENTION_MAX_LOGIT] > -1e9).any(), record.step

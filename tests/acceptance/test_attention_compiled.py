"""Compiled models: every layer is seen, and nothing more is compiled than without us."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from sentinel.core.types import LAYER_ACTIVATION_RMS, LAYER_ATTENTION_MAX_LOGIT
from sentinel_hooks.guard import Guard
from sentinel_hooks.layers import LayerTable
from sentinel_hooks.probes.activations import ActivationProbe
from sentinel_hooks.probes.attention import AttentionProbe
from sentinel_hooks.probes.probe import resolve
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


# torch keeps what it once found out about an operator's fake tensors, for the whole process: a
# model compiled before without us would hide what ours do there.


def as_in_a_new_process() -> None:
    torch._dynamo.reset()
    FakeTensorMode.cache_clear()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
@pytest.mark.parametrize("what", ["dropout", "math", "one block"])
def test_a_path_without_a_kernel_compiles_first_of_all_as_without_us(
    what: str, backend: str
) -> None:
    def steps(attached: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Model(False, 0.1 if what == "dropout" else 0.0, False)
        probe = AttentionProbe([model], LayerTable.of([model]))
        as_in_a_new_process()
        call: Callable[[Tensor], Tensor] = model
        if what == "one block":
            model.blocks[1].compile(backend=backend, fullgraph=True)
        else:
            call = torch.compile(model, backend=backend, fullgraph=True)
        found = []
        if attached:
            probe.attach()
        try:
            for t in range(3):
                torch.manual_seed(t)
                with sdpa_kernel(SDPBackend.MATH) if what != "dropout" else nullcontext():
                    loss = call(torch.randn(2, 8, WIDTH))
                loss.backward()
                found.append(loss.detach())
                if attached:
                    probe.before_step(t)
                    column = resolve(probe, read(probe.pending(), [])[0])[LAYER_ATTENTION_MAX_LOGIT]
                    assert np.isfinite(column).sum() == LAYERS
            assert not attached or probe.blind_spots() == []
        finally:
            probe.detach()
        return [*found, *(p.grad for p in model.parameters() if p.grad is not None)]

    watched = steps(attached=True)
    assert all(torch.equal(a, b) for a, b in zip(steps(attached=False), watched, strict=True))


class Products(nn.Module):
    """Attention without weights."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand

    def forward(self, q: Tensor) -> Tensor:
        if self.by_hand:
            return F.softmax(q @ q.transpose(-1, -2), dim=-1) @ q
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)


class Whole(Attention):
    """Has a piece that dynamo does not read: torch runs it, hooks and all, with fake tensors."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__(0.0)
        self.attn_products = Products(by_hand)
        self.piece = torch._dynamo.allow_in_graph(lambda q: self.attn_products(q))  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.piece(self.qkv(x)[:, None])
        return out.flatten(2)[..., :WIDTH]


class Nothing(Attention):
    """Scores without elements, of which torch makes a softmax without a word."""

    def forward(self, x: Tensor) -> Tensor:
        scores = x.new_zeros(2, 2, 0, 8)
        return x + F.softmax(scores, dim=-1).sum() + torch.softmax(input=scores, dim=-1).sum()


@pytest.mark.parametrize("kind", ["by torch", "by hand", "nothing"])
def test_what_we_cannot_follow_is_compiled_all_the_same(kind: str) -> None:
    def losses(attached: bool) -> list[float]:
        torch.manual_seed(0)
        model = Model(False, 0.1, False)
        for block in model.blocks:
            block.attn = Nothing(0.0) if kind == "nothing" else Whole(kind == "by hand")
        as_in_a_new_process()
        table = LayerTable.of([model])
        probes = [AttentionProbe([model], table), ActivationProbe([model], table)]
        call = torch.compile(model, backend="aot_eager", fullgraph=True)
        if attached:
            for probe in probes:
                probe.attach()
        found = []
        try:
            for t in range(2):
                torch.manual_seed(t)
                loss = call(torch.randn(2, 8, WIDTH, requires_grad=True))
                loss.backward()
                found.append(loss.item())
                for probe in probes if attached else ():
                    probe.before_step(t)
                    resolve(probe, read(probe.pending(), [])[0])
        finally:
            for probe in probes:
                probe.detach()
        return found

    watched = losses(attached=True)
    assert watched == losses(attached=False)


def test_fake_tensors_of_somebody_who_only_asks_for_shapes_are_nobodys_numbers() -> None:
    for by_hand in (False, True):
        torch.manual_seed(0)
        model = Model(False, 0.0, by_hand)
        table = LayerTable.of([model])
        probes = [AttentionProbe([model], table), ActivationProbe([model], table)]
        for probe in probes:
            probe.attach()
        try:
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                model(mode.from_tensor(torch.randn(2, 8, WIDTH)))
            for probe in probes:
                probe.before_step(0)
                assert probe.pending() == []
            model(torch.randn(2, 8, WIDTH)).backward()
            for probe in probes:
                probe.before_step(1)
                assert resolve(probe, read(probe.pending(), [])[0])
                assert probe.blind_spots() == []
        finally:
            for probe in probes:
                probe.detach()


class Shifted(Attention):
    """Subtracts the rows' maxima by itself, as HF's gpt-oss does."""

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, 2, -1).permute(2, 0, 3, 1, 4)
        s = q @ k.transpose(-1, -2) * 0.35
        s = s - s.amax(-1, keepdim=True)
        return (F.softmax(s, dim=-1) @ v).transpose(1, 2).reshape(B, T, D)


def test_scores_less_their_rows_maxima_are_no_measurement_in_compiled_code() -> None:
    model = Model(False, 0.0, False)
    for block in model.blocks:
        block.attn = Shifted(0.0)
    as_in_a_new_process()
    probe = AttentionProbe([model], LayerTable.of([model]))
    probe.attach()
    try:
        call = torch.compile(model, backend="aot_eager", fullgraph=True)
        for t in range(2):
            call(torch.randn(2, 8, WIDTH)).backward()
            probe.before_step(t)
            assert resolve(probe, read(probe.pending(), [])[0]) == {}
        (spot,) = probe.blind_spots()
        assert "subtracted" in spot.what
    finally:
        probe.detach()

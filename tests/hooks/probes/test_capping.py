"""Soft caps: the column says how large the scores were, not how large the cap lets them seem."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sentinel.core.types import LAYER_ATTENTION_MAX_LOGIT
from sentinel_hooks.layers import LayerTable
from sentinel_hooks.probes import capping
from sentinel_hooks.probes.attention import AttentionProbe
from sentinel_hooks.probes.probe import resolve
from sentinel_hooks.probes.read import read

pytestmark = pytest.mark.torch
WIDTH, HEADS, LENGTH, THRESHOLD = 16, 2, 12, 50.0
LATER = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
How = Callable[[Tensor, float], Tensor]


class Attention(nn.Module):
    """Causal, by hand; `how` caps and masks the scores."""

    def __init__(self, how: How, cap: float, size: float, named: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.how, self.cap = how, cap
        self.size = size
        if named:
            self.attn_logit_softcapping = cap
        self.largest = -math.inf
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2)
        allowed = scores.detach().masked_fill(LATER, -math.inf)
        # As large as we like it: the truth is `size`.
        scores = scores * (self.size / allowed.amax())
        self.calls += 1
        weights = F.softmax(self.how(scores, self.cap), dim=-1)
        return (weights.to(v.dtype) @ v).transpose(1, 2).reshape(B, T, D)


class Model(nn.Module):
    """A layer for each size."""

    def __init__(self, how: How, cap: float, sizes: tuple[float, ...], named: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"attn": Attention(how, cap, size, named)}) for size in sizes
        )
        self.again = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            attn = block["attn"]
            x = x + (checkpoint(attn, x, use_reentrant=False) if self.again else attn(x))
        return x.square().mean()


def masked(scores: Tensor) -> Tensor:
    return scores.masked_fill(LATER, torch.finfo(scores.dtype).min)


def as_gemma(scores: Tensor, cap: float) -> Tensor:
    scores = torch.tanh(scores / cap) * cap
    return scores + masked(torch.zeros(LENGTH, LENGTH, dtype=scores.dtype))


def as_grok(scores: Tensor, cap: float) -> Tensor:
    return masked(cap * F.tanh(scores / cap))


def by_a_buffer(scores: Tensor, cap: float) -> Tensor:
    return masked((scores / cap).tanh() * torch.tensor(cap))


def by_where(scores: Tensor, cap: float) -> Tensor:
    return torch.where(LATER, -1e9, torch.tanh_(scores.div_(cap)).mul(cap)).float()


def by_division(scores: Tensor, cap: float) -> Tensor:
    return masked(torch.tanh(scores / cap) / (1 / cap))


def without(scores: Tensor, cap: float) -> Tensor:
    return masked(scores)


def measured(model: nn.Module, steps: int = 1, run: Any = None) -> tuple[list[float], Any]:
    """The column over all layers that were measured, and the probe."""
    probe = AttentionProbe([model], LayerTable.of([model]), THRESHOLD)
    probe.attach()
    try:
        x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
        x = x.to(next(model.parameters()).dtype)
        for step in range(steps):
            (model if run is None else run)(x).backward()
            probe.before_step(step)
            column = resolve(probe, read(probe.pending(), [])[0])[LAYER_ATTENTION_MAX_LOGIT]
        return [float(v) for v in column if not np.isneginf(v)], probe
    finally:
        probe.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cap", [50.0, 30.0, 7.0])
def test_the_interval_holds_what_was_capped(dtype: torch.dtype, cap: float) -> None:
    scores = torch.linspace(-4 * cap, 12 * cap, 4001).to(dtype)
    capped = torch.tanh(scores / cap) * cap
    least, most = capping.undone(capped, cap, capping.rounding(dtype))
    assert bool(((least <= scores.float()) & (scores.float() <= most)).all())
    near = (scores.float() > 0.5 * cap) & (scores.float() < 1.2 * cap)
    wide = {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype]
    assert float((most - least)[near].max()) < wide * cap


def test_what_no_cap_can_have_made_is_given_back() -> None:
    given = torch.tensor([math.nan, math.inf, -math.inf, -1e38, 51.0, 0.0])
    for bound in capping.undone(given, 50.0, capping.rounding(torch.float32)):
        assert torch.equal(bound.nan_to_num(nan=7.0), given.nan_to_num(nan=7.0))


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("cap", [50.0, 30.0])
@pytest.mark.parametrize(
    "how", [as_gemma, as_grok, by_a_buffer, by_where, by_division], ids=lambda how: how.__name__
)
def test_scores_before_their_cap_are_what_is_measured(how: How, cap: float, named: bool) -> None:
    sizes = (3.0, 49.9, 50.1, 120.0)
    column, probe = measured(Model(how, cap, sizes, named))
    assert np.allclose(column, sizes, rtol=1e-3)
    assert [v > THRESHOLD for v in column] == [False, False, True, True]
    names = "blocks.0.attn, blocks.1.attn, blocks.2.attn and 1 more"
    assert probe.notes() == [
        f"attention logits of {names} are those before its soft cap of {cap:g}"
    ]
    assert probe.blind_spots() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_far_above_its_cap_is_above_the_threshold_for_certain(dtype: torch.dtype) -> None:
    column, probe = measured(Model(as_gemma, 50.0, (1060.0,)).to(dtype))
    assert THRESHOLD < column[0] <= 1060.0
    assert len(probe.notes()) == 1  # nothing is said of sides that are not known


def test_where_a_small_cap_leaves_nothing_the_column_says_the_threshold_and_the_note_why() -> None:
    column, probe = measured(Model(as_gemma, 2.0, (3.0, 1000.0)))
    assert np.allclose(column, (3.0, 50.0), rtol=1e-3)
    assert probe.notes()[1] == (
        "attention logits of blocks.1.attn lay between bounds on either side of 50 in 1 steps, "
        "since its soft cap leaves too little of them; the column says 50 there"
    )


def test_a_cap_computed_in_half_precision_is_undone_as_such() -> None:
    def how(scores: Tensor, cap: float) -> Tensor:
        return masked((torch.tanh(scores.bfloat16() / cap) * cap).float())

    column, _ = measured(Model(how, 50.0, (40.0, 1060.0)))
    assert 39.5 < column[0] < 42.0
    assert THRESHOLD < column[1] < 130.0  # float32's 381 would be more than can be known


def test_a_name_alone_is_no_cap() -> None:
    column, probe = measured(Model(without, 50.0, (40.0, 49.0, 60.0), named=True), steps=2)
    assert np.allclose(column, (40.0, 49.0, 60.0), rtol=1e-5)
    assert probe.notes() == []


def test_a_tanh_that_bounds_no_scores_is_no_cap() -> None:
    def biased(scores: Tensor, cap: float) -> Tensor:
        return masked(torch.tanh(scores.detach()) @ torch.eye(LENGTH) + scores)

    column, probe = measured(Model(biased, 50.0, (40.0,)))
    assert 39.0 <= column[0] <= 41.1
    assert probe.notes() == []


@pytest.mark.parametrize("how", [as_gemma, by_a_buffer], ids=lambda how: how.__name__)
def test_under_checkpointing_the_name_tells_the_cap_and_nothing_is_recomputed_for_it(
    how: How,
) -> None:
    model = Model(how, 50.0, (60.0, 30.0), named=True)
    model.again = True
    column, probe = measured(model)
    assert np.allclose(column, (60.0, 30.0), rtol=1e-3)
    assert [block["attn"].calls for block in model.blocks] == [2, 2]
    assert len(probe.notes()) == 1
    model = Model(how, 50.0, (60.0, 30.0))
    model.again = True
    column, probe = measured(model)
    assert [block["attn"].calls for block in model.blocks] == [2, 2]
    assert [spot.what for spot in probe.blind_spots()] == [
        (
            "attention logits of blocks.0.attn, blocks.1.attn are not seen: a tanh bounds its "
            "scores, and by how much cannot be read: the column has them after it"
        )
    ]
    assert probe.notes() == []


@pytest.mark.slow
def test_in_compiled_code_the_name_tells_the_cap() -> None:
    torch.compiler.reset()
    model = Model(as_gemma, 50.0, (60.0, 30.0), named=True)
    for block in model.blocks:
        block["attn"].calls = 0
    column, probe = measured(model, run=torch.compile(model, backend="aot_eager"))
    assert np.allclose(column, (60.0, 30.0), rtol=1e-3)
    assert len(probe.notes()) == 1


def test_flash_attn_says_its_cap_when_it_is_called() -> None:
    def flash_attn_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softcap: float = 0.0,
        return_attn_probs: bool = False,
    ) -> Any:
        scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        out = (scores.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)
        return (out, scores.logsumexp(-1), None) if return_attn_probs else out

    stand_in = types.ModuleType("flash_attn")
    stand_in.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    sys.modules["flash_attn"] = stand_in

    class Flash(nn.Module):
        def __init__(self, size: float) -> None:
            super().__init__()
            self.q = nn.Linear(WIDTH, WIDTH)
            self.size = size

        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x).view(*x.shape[:2], HEADS, -1)
            k = q.detach()
            q = q * (self.size / (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)).detach().amax())
            out = stand_in.flash_attn_func(q, k, q, softcap=50.0)  # type: ignore[attr-defined]
            return x + out.reshape(x.shape)

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(
                nn.ModuleDict({"attn": Flash(size)}) for size in (20.0, 55.0, 1000.0)
            )

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block["attn"](x)
            return x.square().mean()

    try:
        column, probe = measured(Stack())
    finally:
        del sys.modules["flash_attn"]
    assert 20.0 <= column[0] < THRESHOLD  # at most that: the log-sum-exp is above the largest
    assert column[1] == THRESHOLD  # between the bounds
    assert THRESHOLD < column[2] < 1000.0
    assert len(probe.notes()) == 2


@pytest.mark.slow
def test_gemma_2_with_raw_logits_in_the_thousands_is_flagged() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=4,
        attn_implementation="eager",
        use_cache=False,
    )
    model = transformers.Gemma2ForCausalLM(config)
    hot = model.model.layers[1].self_attn
    with torch.no_grad():
        hot.q_proj.weight.mul_(150)
        hot.k_proj.weight.mul_(150)
    ids = torch.randint(0, 64, (2, 16))

    def loss(x: Tensor) -> Tensor:
        found: Tensor = model(input_ids=ids, labels=ids).loss
        return found

    column, probe = measured(model, run=loss)
    assert column[0] < 5.0 < THRESHOLD < column[1]
    assert probe.notes() == [
        (
            "attention logits of model.layers.0.self_attn, model.layers.1.self_attn are those "
            "before its soft cap of 50"
        )
    ]

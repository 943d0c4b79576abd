"""HF models: the flag is exact in the attention that transformers calls by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sentinel_hooks.layers import LayerTable
from tests.acceptance.test_attention_flag import LENGTH, ROWS, build, flagged, truths, watch

pytestmark = [pytest.mark.torch, pytest.mark.slow]
LAYERS = 3


def llama(attention: str) -> tuple[nn.Module, Any]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation=attention,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    return model, [[x.self_attn.q_proj.weight] for x in model.model.layers]


def gpt2(attention: str) -> tuple[nn.Module, Any]:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=LAYERS,
        n_head=4,
        n_positions=64,
        attn_implementation=attention,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = transformers.GPT2LMHeadModel(config)
    return model, [
        [x.attn.c_attn.weight[:, :32], x.attn.c_attn.bias[:32]] for x in model.transformer.h
    ]


NAMES = {
    llama: "model.layers.{}.self_attn.q_proj",
    gpt2: "transformer.h.{}.attn.c_attn",
}


@pytest.mark.parametrize(
    ("padded", "recompute"),
    [(False, False), (True, False), (False, True)],
    ids=["whole", "padded", "checkpointing"],
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("make", [llama, gpt2], ids=lambda make: make.__name__)
def test_exactly_the_layer_above_50_is_flagged(
    make: Any, attention: str, padded: bool, recompute: bool
) -> None:
    ids = torch.randint(0, 64, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    if padded:
        mask[1, :9] = 0  # left padding, as for generation
    layer = 1 if attention == "sdpa" else 2
    for goal in (49.9, 50.1):
        torch.manual_seed(11)
        model, queries = make("sdpa")

        def forward() -> Tensor:
            out: Tensor = model(input_ids=ids, attention_mask=mask, labels=ids).loss  # noqa: B023
            return out

        build(forward, queries, layer, goal)
        truth = truths(forward)
        assert all(t < 45 for i, t in enumerate(truth) if i != layer), truth
        model.set_attn_implementation(attention)
        if recompute:
            model.activation_checkpointing_enable()
            model.train()

        def step() -> list[Tensor]:
            model.zero_grad()  # noqa: B023
            loss = forward()
            loss.backward()
            return [loss.detach(), *(p.grad.clone() for p in model.parameters())]  # type: ignore[union-attr]  # noqa: B023

        plain = step()
        columns, watched = watch(model, step)
        assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
        table = LayerTable.of([model])
        expected = [NAMES[make].format(layer)] if goal > 50 else []
        assert flagged(table, columns[-1]) == expected
        at = [row.name for row in table.layers].index(NAMES[make].format(layer))
        assert columns[-1][at] == pytest.approx(truth[layer], rel=1e-3)
        assert np.isfinite(columns[-1]).sum() == LAYERS

"""Which modules follow each other in depth, by every way in which people name them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sentinel.core.detectors import depth
from sentinel.core.policy import Policy
from sentinel.core.types import (
    LAYER_ACTIVATION_RMS,
    LAYER_BLOCK,
    LAYER_GRAD_NORM,
    LAYER_ROLE,
    NOT_MEASURED,
)
from sentinel_hooks import telling
from sentinel_hooks.layers import LayerTable
from sentinel_hooks.probes.activations import ActivationProbe
from sentinel_hooks.probes.grads import GradProbe
from sentinel_hooks.probes.probe import resolve
from sentinel_hooks.probes.read import read

pytestmark = pytest.mark.torch


class Part(nn.Module):
    """A block: a norm and a small MLP, whose layers are numbered."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Tree(nn.Module):
    """Modules under the names given, run in that order."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        self.order: list[nn.Module] = []
        for path, module in modules.items():
            at: nn.Module = self
            *around, last = path.split(".")
            for step in around:
                if step not in at._modules:
                    at.add_module(step, nn.Module())
                at = at.get_submodule(step)
            at.add_module(last, module)
            self.order.append(module)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.order:
            x = module(x)
        return x


def stage(blocks: int) -> nn.Sequential:
    return nn.Sequential(*(Part() for _ in range(blocks)))


def blocks_of(model: nn.Module) -> dict[str, int]:
    """The first layer of each block, with its number."""
    found: dict[int, str] = {}
    for layer in LayerTable.of([model]).layers:
        if layer.block is not None:
            found.setdefault(layer.block, layer.name)
    return {name: number for number, name in found.items()}


WORDS = {"embed": nn.Linear(8, 8)} | {f"block_{i}": Part() for i in range(5)}
NESTED = {"body.embed": nn.Linear(8, 8)} | {f"body.h{i}": Part() for i in range(4)}
STAGES = {
    "conv1": nn.Linear(8, 8),
    "layer1": stage(2),
    "layer2": stage(3),
    "layer3": stage(1),
    "fc": nn.Linear(8, 2),
}
PLACES: list[tuple[str, nn.Module]] = [
    ("embed", nn.Linear(8, 8)),
    ("alpha", Part()),
    ("beta", Part()),
    ("act", nn.Tanh()),
    ("gamma", Part()),
    ("head", nn.Linear(8, 2)),
]
MODELS: dict[str, tuple[Any, dict[str, int]]] = {
    "block_0, with numbered layers in it": (
        lambda: Tree(WORDS),
        {f"block_{i}.norm": i for i in range(5)},
    ),
    "one word, deeper": (lambda: Tree(NESTED), {f"body.h{i}.norm": i for i in range(4)}),
    "stages, as in a ResNet": (
        lambda: Tree(STAGES),
        {
            "layer1.0.norm": 0,
            "layer1.1.norm": 1,
            "layer2.0.norm": 2,
            "layer2.1.norm": 3,
            "layer2.2.norm": 4,
            "layer3.0.norm": 5,
        },
    ),
    "blocks that are lists of single layers": (
        lambda: Tree({f"layer{i}": nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for i in range(4)}),
        {f"layer{i}.0": i for i in range(4)},
    ),
    "a Sequential of words": (
        lambda: nn.Sequential(OrderedDict(PLACES)),
        {"embed": 0, "alpha.norm": 1, "beta.norm": 2, "gamma.norm": 3, "head": 4},
    ),
    "a ModuleList keeps its numbers": (
        lambda: Tree({"blocks": nn.Sequential(*(Part() for _ in range(3))), "fc1": Part()}),
        {f"blocks.{i}.norm": i for i in range(3)},
    ),
    "two towers of numbered blocks": (
        lambda: Tree({"tower1.layers": stage(3), "tower2.layers": stage(3)}),
        {f"tower1.layers.{i}.norm": i for i in range(3)},
    ),
    "numbered blocks, with words in them": (
        lambda: nn.Sequential(
            *(Tree({f"conv{i}": nn.Linear(4, 4) for i in range(5)}),) * 1, Part()
        ),
        {"0.conv0": 0, "1.norm": 1},
    ),
    "names that say nothing": (
        lambda: Tree({name: Part() for name in ("alpha", "beta", "gamma", "delta", "zeta")}),
        {},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_made_out_in_the_order_of_depth(name: str) -> None:
    make, expected = MODELS[name]
    model = make()
    assert blocks_of(model) == expected
    told = telling.of_the_depth(LayerTable.of([model]), Policy())
    assert bool(told) is (not expected)


def test_the_same_part_of_each_block_of_one_word_is_alike() -> None:
    table = LayerTable.of([Tree(WORDS)])
    roles = dict(zip([x.name for x in table.layers], table.columns()[LAYER_ROLE], strict=True))
    assert len({roles[f"block_{i}.norm"] for i in range(5)}) == 1
    assert len({roles[f"block_{i}.mlp.0"] for i in range(5)}) == 1
    assert roles["block_0.norm"] != roles["embed"]


@pytest.mark.parametrize("name", ["block_0, with numbered layers in it", "stages, as in a ResNet"])
def test_growth_with_depth_is_seen_in_blocks_of_one_word(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name][0]()
    table = LayerTable.of([model])
    probe = ActivationProbe([model], table, 1)
    probe.attach()
    parts = [m for m in model.modules() if isinstance(m, Part)]
    with torch.no_grad():
        parts[3].mlp[2].weight.mul_(3e4)  # one block in the middle amplifies
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grads = GradProbe([optimizer], table)
    model(torch.randn(16, 8)).square().mean().backward()
    probe.before_step(0)
    rms = resolve(probe, read(probe.pending(), [])[0])[LAYER_ACTIVATION_RMS]
    probe.detach()
    blocks = table.columns()[LAYER_BLOCK].astype(int)
    assert (rms != NOT_MEASURED).sum() == len(parts)
    gain = depth.gain(rms, blocks, depth.DepthConfig())
    assert (gain.flagged, gain.block) == (True, 3)
    pending = grads.measure([0])
    norms = grads.resolve(pending, read(pending.norms, [])[0])
    assert norms is not None
    column = np.sqrt(norms.layer_sq_L).astype(np.float32)
    assert not np.isnan(depth.judge(column, blocks, depth.DepthConfig()).rho), LAYER_GRAD_NORM
    assert telling.of_the_depth(table, Policy()) == []


def test_a_compiled_block_is_hooked_on_its_wrapper() -> None:
    model = Tree({f"block_{i}": torch.compile(Part(), backend="eager") for i in range(4)})  # type: ignore[dict-item]
    table = LayerTable.of([model])
    modules = table.blocks_of(model)
    assert [name for name, _ in modules] == [f"block_{i}" for i in range(4)]
    assert all(hasattr(module, "_orig_mod") for _, module in modules)

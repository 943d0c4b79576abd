"""The layer table: which parameters belong to which layer, in a fixed order.

    table = LayerTable.of(models)
    table.layers[i].name              the module's FQN, the name used everywhere
    table.index(parameters)           the layer of each parameter; OTHER for one that has none

A layer is a module that owns trainable or frozen parameters itself (not only through its children).
A tied parameter belongs to the first module that owns it, so that it is counted once. Lazily made
parameters are there from the start: torch keeps the Parameter object and only gives it a shape.
The table is fixed at attach: parameters added later to a listed module are counted there, those of
a new module count in the global norm only (`OTHER`), and status() says so.

Shapes:  per-layer columns have shape [L], L = len(table.layers).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from sentinel.core.detectors import layer_outlier
from sentinel.core.types import LAYER_BLOCK, LAYER_ROLE, Column
from sentinel_hooks.blocks import Blocks, clean

OTHER = -1
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Layer:
    """One row of the table.

    Attributes:
        kind: the module's class.
        shape: of its largest parameter.
        block: which block it lies in, see blocks.py; None outside of all.
        attention: the module, or one around it, is an attention by name.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    block: int | None
    attention: bool
    parameters: int


class LayerTable:
    """Layers of the watched models; knows the layer of each of their parameters."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        """Table of `models`; with several models each name starts with the model's number."""
        self._models = tuple(models)
        self._modules: list[nn.Module] = []
        self._roles: list[str] = []  # names, those of blocks of one word spelled apart
        self._blocks: list[Blocks] = []
        self.layers: tuple[Layer, ...] = ()
        self._build()

    @classmethod
    def of(cls, models: Sequence[nn.Module]) -> LayerTable:
        """The table of `models`."""
        return cls(models)

    def __len__(self) -> int:
        return len(self.layers)

    def rows(self) -> list[dict[str, Any]]:
        """The table as plain values, for the trace and the sidecar."""
        return [asdict(layer) for layer in self.layers]

    def columns(self) -> dict[str, Column]:
        """Block and role of each layer, as the engine takes them; float32 [L], -1 for none.

        A block that is one layer and changes the width (the first and the last of an MLP) is none
        here: what comes out is not to be compared with what goes in.
        """
        alone = Counter(layer.block for layer in self.layers)
        blocks = [
            -1
            if layer.block is None or (alone[layer.block] == 1 and _changes_width(module))
            else layer.block
            for layer, module in zip(self.layers, self._modules, strict=True)
        ]
        roles = layer_outlier.roles_of(tuple(self._roles))
        return {
            LAYER_BLOCK: np.array(blocks, dtype=np.float32),
            LAYER_ROLE: roles.astype(np.float32),
        }

    def index(self, parameters: Iterable[nn.Parameter]) -> npt.NDArray[np.intp]:
        """The layer of each parameter, OTHER (-1) where no listed module owns it."""
        owner: dict[int, int] = {}
        for i, module in enumerate(self._modules):
            for parameter in module.parameters(recurse=False):
                owner.setdefault(id(parameter), i)
        return np.array([owner.get(id(p), OTHER) for p in parameters], dtype=np.intp)

    def forgotten(self, held: Container[int]) -> dict[int, list[nn.Parameter]]:
        """Layers that want a gradient and are not among what is `held` (ids), most like them are.

        Whoever trains a part of a model chooses a role, or the blocks next to the loss: a layer
        above one that is trained, alone of its like, was left out by mistake.
        """
        out: dict[int, list[nn.Parameter]] = {}
        inside: list[int] = []
        for i, module in enumerate(self._modules):
            own = [p for p in module.parameters(recurse=False) if p.requires_grad]
            if any(id(p) in held for p in own):
                inside.append(i)
            elif own:
                out[i] = own
        if not out or not inside:
            return {}
        roles = layer_outlier.roles_of(tuple(self._roles))
        with_, without = Counter(roles[inside].tolist()), Counter(roles[list(out)].tolist())
        blocks = [layer.block for layer in self.layers]
        lowest = min((b for i in inside if (b := blocks[i]) is not None), default=None)
        return {
            i: own
            for i, own in out.items()
            if (block := blocks[i]) is not None
            and lowest is not None
            and block > lowest
            and with_[roles[i]] > without[roles[i]]
        }

    def rows_under(self, module: nn.Module) -> list[int]:
        """Indices of the layers that lie in `module`, itself included, in the table's order."""
        inside = {id(m) for m in module.modules()}
        return [i for i, m in enumerate(self._modules) if id(m) in inside]

    def blocks_of(self, model: nn.Module) -> tuple[tuple[str, nn.Module], ...]:
        """(name, module) of a model's blocks, first to last; () where they are numbered."""
        for known, blocks in zip(self._models, self._blocks, strict=True):
            if known is model:
                return blocks.modules
        return ()

    def _build(self) -> None:
        layers: list[Layer] = []
        seen: set[int] = set()
        for number, model in enumerate(self._models):
            prefix = f"{number}." if len(self._models) > 1 else ""
            blocks = Blocks.of(model)
            self._blocks.append(blocks)
            for name, module in model.named_modules():
                own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
                if not own:
                    continue
                seen.update(id(p) for p in own)
                path = clean(name)
                name = prefix + (path or type(module).__name__)
                self._roles.append(prefix + blocks.roles.get(path, path or name))
                layers.append(
                    Layer(
                        name=name,
                        kind=type(module).__name__,
                        shape=_shape(max(own, key=_numel)),
                        block=blocks.numbers.get(path),
                        attention=bool(
                            _ATTENTION.search(name) or _ATTENTION.search(type(module).__name__)
                        ),
                        parameters=sum(_numel(p) for p in own),
                    )
                )
                self._modules.append(module)
        self.layers = tuple(layers)


def _changes_width(module: nn.Module) -> bool:
    for given, made in (("in_features", "out_features"), ("in_channels", "out_channels")):
        widths = getattr(module, given, None), getattr(module, made, None)
        if None not in widths and widths[0] != widths[1]:
            return True
    return False


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return () if nn.parameter.is_lazy(parameter) else tuple(parameter.shape)


def _numel(parameter: nn.Parameter) -> int:
    return 0 if nn.parameter.is_lazy(parameter) else parameter.numel()

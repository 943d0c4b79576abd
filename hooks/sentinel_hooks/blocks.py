"""Blocks: which modules of a model follow each other in depth, and in which order.

    found = Blocks.of(model)
    found.numbers["layer2.0.conv1"]     2: the block that this layer lies in; layers outside of all
                                        blocks are not in it
    found.modules                       the blocks, where the names alone do not say which they are

Three ways of naming are read:

* numbered: the first number that stands alone in a name, as ModuleList and Sequential give it
  (blocks.3.attn);
* by one word: siblings of one word and a number (block_0, block_1; layer1, layer2). Where such a
  sibling is a list of modules with parts of their own, these are the blocks: layer1.0, layer1.1,
  layer2.0, as in a ResNet;
* by place: children of an nn.Sequential that have words for names, if it holds half of the model.
  They run in their order.

What tells more blocks apart is believed, if it holds at least half of the parameters that the other
holds; places are asked only where the names say nothing. Blocks of one word are counted in the
order in which they were made, which is nearly always the order in which they run. Of two words
(down1, down2, up1, up2) nobody knows which runs first, so only one is believed.

Purity:  looks at names and children; runs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

LEAST = 2  # siblings of one word, and children of a Sequential
PARTS = 3  # modules with lists of one name in them: an encoder and a decoder are two
SHARE = 0.5  # of the parameters that another way of naming holds
_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
_WORD = re.compile(r"^(.*\D)(\d+)$")
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of one model.

    Attributes:
        numbers: of the layers that lie in blocks, by name.
        modules: (name, module) of the blocks, first to last; () where they are numbered, or not
            known.
        roles: of layers in blocks of one word: their name with the block's number standing alone,
            so that the same part of each block is told.
    """

    numbers: Mapping[str, int]
    modules: tuple[tuple[str, nn.Module], ...] = ()
    roles: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> Blocks:
        """The blocks of `model`."""
        named: dict[str, nn.Module] = {}
        for name, module in model.named_modules():
            named.setdefault(clean(name), module)  # the wrapper of a compiled block is the block
        sizes = _sizes(model)
        numbered = _numbered(sizes)
        spelled = max(_words(named, sizes), key=_worth, default=_Way())
        most = max(numbered.parameters, spelled.parameters)
        ways = [w for w in (numbered, spelled) if w.places and w.parameters >= SHARE * most]
        best = max(ways, key=_worth, default=_Way())
        if len(best.places) < LEAST:
            placed = _placed(named, sizes)
            if len(placed.places) >= LEAST:
                best = placed
        if best is numbered:
            return cls({layer: int(str(number)) for layer, (number,) in best.keys.items()})
        ranks = {key: rank for rank, key in enumerate(best.places)}
        return cls(
            {layer: ranks[key] for layer, key in best.keys.items()},
            tuple((place, named[place]) for places in best.places.values() for place in places),
            best.roles,
        )


def clean(name: str) -> str:
    """The FQN without the wrappers' own steps: the same layer has one name, compiled or not."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@dataclass(slots=True)
class _Way:
    """What one way of naming finds.

    Attributes:
        keys: what tells the blocks apart, by the name of the layer.
        places: the names of the modules that are the block of a key; more than one where an encoder
            and a decoder name theirs alike. In the order of the model.
        parameters: in all of them.
    """

    keys: dict[str, Key] = field(default_factory=dict)
    places: dict[Key, list[str]] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    parameters: int = 0

    def add(self, layer: str, key: Key, place: str, parameters: int) -> None:
        self.keys[layer] = key
        places = self.places.setdefault(key, [])
        if place not in places:
            places.append(place)
        self.parameters += parameters


def _worth(way: _Way) -> tuple[int, int]:
    return len(way.places), way.parameters


def _sizes(model: nn.Module) -> dict[str, int]:
    """Parameters of each layer, by name: a module that owns some itself. A tied one counts once."""
    sizes: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        layer = clean(name.rpartition(".")[0])
        size = 1 if nn.parameter.is_lazy(parameter) else parameter.numel()
        sizes[layer] = sizes.get(layer, 0) + size
    return sizes


def _numbered(sizes: Mapping[str, int]) -> _Way:
    found = [(x, m[1], x[: m.start(1)], n) for x, n in sizes.items() if (m := _NUMBER.search(x))]
    # Lists of one name in more modules than they are long (alpha.mlp.0, beta.mlp.0, gamma.mlp.0)
    # are parts of those modules: not the depth of the model.
    alike: dict[str, set[str]] = {}
    for _, _, parent, _ in found:
        alike.setdefault(parent.split(".")[-2] if parent else "", set()).add(parent)
    long = max(len({number for _, number, _, _ in found}), PARTS - 1)
    parts = {p for parents in alike.values() if len(parents) > long for p in parents}
    way = _Way()
    for layer, number, parent, size in found:
        if parent not in parts:
            way.add(layer, (number,), parent + number, size)
    return way


def _words(named: Mapping[str, nn.Module], sizes: Mapping[str, int]) -> list[_Way]:
    """One for each word that siblings are named by."""
    held = {place for layer in sizes for place in _around(layer)}
    siblings: dict[tuple[str, str], list[str]] = {}
    for place in held:
        parent, _, last = place.rpartition(".")
        found = _WORD.match(last)
        if found:
            siblings.setdefault((parent, found[1]), []).append(place)
    known = {place for alike in siblings.values() if len(alike) >= LEAST for place in alike}
    lists = {place for place in known if _is_list_of_composites(named, place, held)}
    ways: dict[str, _Way] = {}
    for layer, size in sizes.items():
        for place in _around(layer):
            last = place.rpartition(".")[2]
            if last.isdigit():
                break  # numbered: what is in it is a part
            found = _WORD.match(last) if place in known else None
            if found is None:
                continue
            way = ways.setdefault(found[1], _Way())
            rest = layer[len(place) + 1 :]
            inner = rest.partition(".")[0]
            if place not in lists:
                way.add(layer, (found[2],), place, size)
                parent = place.rpartition(".")[0]
                way.roles[layer] = ".".join(p for p in (parent, found[1], found[2], rest) if p)
            elif inner.isdigit():
                way.add(layer, (found[2], inner), f"{place}.{inner}", size)
            break
    return list(ways.values())


def _is_list_of_composites(named: Mapping[str, nn.Module], place: str, held: set[str]) -> bool:
    """Its children are numbered, and have parts of their own: a stage, not a block."""
    children = [n for n, _ in named[place].named_children() if f"{place}.{n}" in held]
    return bool(children) and all(
        n.isdigit() and next(named[f"{place}.{n}"].children(), None) is not None for n in children
    )


def _placed(named: Mapping[str, nn.Module], sizes: Mapping[str, int]) -> _Way:
    """Children of the Sequential that holds most, and most of all; of equals the inner one."""
    best, least = _Way(), SHARE * sum(sizes.values())
    for name, module in named.items():
        if not isinstance(module, nn.Sequential):
            continue
        way, prefix = _Way(), f"{name}." if name else ""
        for layer, size in sizes.items():
            if layer.startswith(prefix):
                child = layer[len(prefix) :].partition(".")[0]
                if child:  # else its own
                    way.add(layer, (child,), prefix + child, size)
        if len(way.places) >= LEAST and way.parameters >= max(best.parameters, least):
            best = way
    return best


def _around(layer: str) -> list[str]:
    """The names of the modules that a layer lies in, outermost first, itself the last."""
    parts = layer.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]

"""Outputs: which tensor of all that a block puts out is the one that goes on to the next block.

    choice = choose(output, args, kwargs)      None: there is no floating-point tensor in it
    x = choice.tensor; x = at(output, choice.path)
    x = traced(output, args, kwargs)           the same while torch.compile traces: just the tensor

Of several floating-point tensors it is the first that has the shape of the block's input, which is
what a residual block hands on; where none has, the largest. Looked into are tuples, lists, dicts
(what transformers returns is one) and, where nothing is traced, dataclasses; and those directly
inside of them.

Purity:  looks at types and shapes; does not wait for the device.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Path = tuple[int | str, ...]
Found = list[tuple[Path, Tensor]]


@dataclass(frozen=True, slots=True)
class Choice:
    """The tensor, and where in the output it stands.

    Attributes:
        among: how many floating-point tensors there are.
        like_input: it was chosen for its shape.
    """

    tensor: Tensor
    path: Path
    among: int
    like_input: bool

    def __str__(self) -> str:
        where = ", ".join(repr(step) for step in self.path)
        why = "the first of the shape of its input" if self.like_input else "the largest"
        return f"[{where}], of {self.among} tensors {why}"


def choose(output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Choice | None:
    """See the module docstring."""
    found = _floating(output)
    if not found:
        return None
    index, like_input = _pick(found, args, kwargs)
    path, x = found[index]
    return Choice(x, path, len(found), like_input)


def traced(output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Nothing here but lists and loops, which every torch.compile can trace."""
    found = _floating(output)
    return found[_pick(found, args, kwargs)[0]][1] if found else None


def at(output: Any, path: Path) -> Tensor | None:
    """The tensor that stands there; None if the output is of another form now."""
    try:
        for step in path:
            inside = isinstance(output, tuple | list | dict)
            output = output[step] if inside else getattr(output, str(step))
    except (LookupError, AttributeError, TypeError):
        return None
    return output if isinstance(output, Tensor) and output.is_floating_point() else None


def kind(output: Any) -> str:
    """What an output is that has nothing to measure."""
    other = _tensors(output)
    if other:
        return str(other[0][1].dtype)
    name = type(output).__name__
    if isinstance(output, tuple | list | dict):
        return f"a {name} without a tensor in it"
    return f"of the type {name}"


def _pick(found: Found, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, bool]:
    if len(found) == 1:
        return 0, False
    given = _floating((*args, kwargs))
    if given:
        shape = given[0][1].shape
        for i, (_, x) in enumerate(found):
            if x.shape == shape:
                return i, True
    largest = 0
    for i, (_, x) in enumerate(found):
        if x.numel() > found[largest][1].numel():
            largest = i
    return largest, False


def _floating(value: Any) -> Found:
    return [(path, x) for path, x in _tensors(value) if x.is_floating_point()]


def _tensors(value: Any) -> Found:
    """What stands in the value itself, then what lies one level deeper."""
    found: Found = []
    deeper: list[tuple[int | str, Any]] = []
    for step, item in _items(value):
        if isinstance(item, Tensor):
            found.append(((step,), item))
        elif item is not None:
            deeper.append((step, item))
    for step, item in deeper:
        for inner, x in _items(item):
            if isinstance(x, Tensor):
                found.append(((step, inner), x))
    return found


def _items(value: Any) -> list[tuple[int | str, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, tuple | list):
        return list(enumerate(value))
    if torch.compiler.is_compiling() or not dataclasses.is_dataclass(value):
        return []
    return [(f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value)]

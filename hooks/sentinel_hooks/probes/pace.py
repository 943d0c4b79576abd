"""Pace probe: seconds a step, tokens a second.

    probe = PaceProbe(clock, models)
    probe.on_forward(args, kwargs); probe.before_step(step); probe.scalars()["tokens_per_second"]

A step lasts from gate to gate, evaluation and saving in between included: that is what a person
waits for. Tokens are the elements, padding included, of what a training forward is given as ids,
added up over the micro-batches of a step. That is, of its integer tensors (int64, int32):

1. the one named input_ids, tokens, token_ids, ids or idx, by keyword, as a key of a batch, or by
   the name of the positional argument;
2. else the places of `inputs_embeds`;
3. else the largest whose name does not say otherwise (cu_seqlens, masks, labels, positions, steps),
   unless a floating-point tensor stands before all of them: then they are something beside it.

A list of sequences counts as all of them together, a tuple of tensors as its largest. Models
without integer tensors have a step time only. Where the ids may be there and nobody can tell which
they are, there is no number either, and blind_spots() says so.

Units:   s; tokens of this rank / s.
Purity:  reads shapes and names, never values. The clock is an argument.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sentinel_hooks.probes.probe import Quiet, Unseen

UNKNOWN = -1
DEEP = 3  # containers inside of each other that are looked into
_IDS = ("input_ids", "tokens", "token_ids", "ids", "idx")
_MASK = re.compile(r"mask|bias", re.IGNORECASE)
_BESIDE = re.compile(
    r"mask|bias|label|target|^tgts?$|^y$|seqlen|seq_len|length|offset|position|^pos|type_id|step|"
    r"^t$|time|segment|index|indices|class",
    re.IGNORECASE,
)


class PaceProbe(Quiet):
    """Times the steps."""

    def __init__(self, clock: Callable[[], float], models: Sequence[nn.Module] = ()) -> None:
        """Names of positional arguments are known where there is one model."""
        self._clock = clock
        self._names = _names_of(models[0]) if len(models) == 1 else ()
        self._last: float | None = None
        self._tokens = 0
        self._unknown = False  # in this step
        self._lost = False
        self._found: dict[str, float] = {}

    def on_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A training forward of a root model begins."""
        found = tokens(args, kwargs, self._names)
        if found == UNKNOWN:
            self._unknown = True
        else:
            self._tokens += found

    def before_step(self, step: int) -> None:
        """A step ends here, and the next begins."""
        now, last = self._clock(), self._last
        count, self._tokens = self._tokens, 0
        self._lost, self._unknown = self._unknown, False
        self._last = now
        self._found = {}
        if last is not None and now > last:
            self._found["step_seconds"] = now - last
            if count and not self._lost:
                self._found["tokens_per_second"] = count / (now - last)

    def scalars(self) -> dict[str, float]:
        """Of the step that has just ended; the first one's beginning was not seen."""
        return dict(self._found)

    def blind_spots(self) -> list[Unseen]:
        """Tokens that may be there, and are not counted."""
        if not self._lost:
            return []
        return [
            Unseen(
                "tokens a second are not known: which argument of the model holds its tokens is "
                "not clear",
                "hand the ids over as a keyword or a key of the batch that is called input_ids or "
                "tokens",
            )
        ]


@dataclass(frozen=True, slots=True)
class _Integers:
    """Integer tensors that a forward was given under one name."""

    name: str
    count: int


def tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str] = ()) -> int:
    """Tokens of one forward; 0 where there are none, UNKNOWN where there may be; see the module.

    Args:
        names: of the positional arguments, as far as they are known.
    """
    given = [(names[i] if i < len(names) else "", value) for i, value in enumerate(args)]
    found: list[_Integers] = []
    floats: list[tuple[int, str, Tensor]] = []
    odd = False
    for name, value in (*given, *kwargs.items()):
        odd |= not _look(name, value, found, floats, 0)
    by_name = {each.name: each.count for each in reversed(found)}
    for name in _IDS:
        if name in by_name:
            return by_name[name]
    for _, name, value in floats:
        if name == "inputs_embeds" and value.dim() == 3:
            return value.size(0) * value.size(1)
    left = [each.count for each in found if not _BESIDE.search(each.name)]
    if floats and floats[0][0] == 0:  # the model's input: what are the integers beside it?
        return UNKNOWN if left else 0
    if left:
        return max(left)
    return UNKNOWN if odd or (found and not floats) else 0


def _look(
    name: str,
    value: Any,
    found: list[_Integers],
    floats: list[tuple[int, str, Tensor]],
    depth: int,
) -> bool:
    """Take note of the tensors in `value`; False if nobody knows what is in it."""
    if isinstance(value, Tensor):
        if value.dtype in (torch.int64, torch.int32):
            if value.dim():
                found.append(_Integers(name, value.numel()))
        elif value.is_floating_point() and value.dim() > 1 and not _MASK.search(name):
            floats.append((len(found), name, value))
        return True
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return True
    if depth == DEEP:
        return False
    if isinstance(value, Mapping):  # a batch as one object
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        if isinstance(value, list) and _are_sequences(value):
            found.append(_Integers(name, sum(item.numel() for item in value)))
            return True
        items = [("", item) for item in value]
    else:
        return False
    known = True
    for key, item in items:
        known &= _look(key, item, found, floats, depth + 1)
    return known


def _are_sequences(values: list[Any]) -> bool:
    """A list of sequences of ids, of any lengths."""
    return bool(values) and all(
        isinstance(v, Tensor) and v.dim() == 1 and v.dtype in (torch.int64, torch.int32)
        for v in values
    )


def _names_of(model: nn.Module) -> tuple[str, ...]:
    """Of the positional arguments of its forward."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    names = []
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            break
        names.append(parameter.name)
    return tuple(names)

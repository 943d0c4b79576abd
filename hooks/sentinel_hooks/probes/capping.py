"""Soft caps: what were scores that a softmax was given as `cap * tanh(score / cap)`?

    cap, eps = of_scores(scores)             told by autograd's graph: 0.0 none, nan not known
    cap = by_name(module)                    told by the module: 0.0 none
    least, most = undone(capped, cap, eps)

Gemma 2 and Grok bound their scores like this. What the softmax sees never passes the cap, so a
threshold at the cap or above it is never passed, however large queries and keys have grown. tanh
rises with its argument, so the largest score comes back from the largest capped one,
`cap * atanh(y / cap)`: as an interval, since rounding moves y by eps and little is left of a score
far above the cap. Where nothing is left the interval has no upper end: with a cap of 50 from 381 on
in float32, from 121 on in bfloat16.

Source:  Gemma 2 (2024), section 2; Bello et al. (2016), section 4.3.
Purity:  does not wait for the device, and unpacks nothing that saved-tensor hooks have packed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

# What may lie between the tanh and the softmax, less what scales; autograd's names begin so.
_BETWEEN = ("Add", "Sub", "MaskedFill", "Where", "ToCopy", "View", "UnsafeView", "Clone")
_DEPTH = 8
_NAMES = (  # as transformers and ports of Grok call it
    "attn_logit_softcapping",
    "attn_logit_softcap",
    "attention_logits_soft_cap",
    "attention_logit_cap",
    "max_attn_val",
)


def of_scores(scores: Tensor) -> tuple[float, float]:
    """(cap, eps) of `scores`. Takes microseconds: not for every call of every model."""
    node: Any = scores.grad_fn
    factor, eps = 1.0, rounding(scores.dtype)
    for _ in range(_DEPTH):
        if node is None:
            break
        name = node.name()
        for given in getattr(node, "_input_metadata", ()):  # of what the forward put out
            eps = max(eps, rounding(given.dtype))
        if name.startswith("Tanh"):
            return abs(factor), eps
        if name.startswith("Mul"):
            factor *= _number(node)
        elif name.startswith("Div"):
            factor /= _number(node)
        elif not name.startswith(_BETWEEN):
            break
        inputs = [f for f, _ in node.next_functions if f is not None]
        if len(inputs) != 1:  # a learned bias: not to be told apart from the scores
            break
        node = inputs[0]
    return 0.0, eps


def rounding(dtype: torch.dtype) -> float:
    """How far the steps of a soft cap, computed in `dtype`, move what comes out, over the cap."""
    return max(torch.finfo(dtype).eps, 2 * torch.finfo(torch.float32).eps)


def _number(node: Any) -> float:
    """By what a node multiplies or divides; nan if that cannot be read."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return math.nan  # to look would set off the recomputation of a checkpoint
    try:
        for name in ("_saved_other", "_saved_self"):
            value = getattr(node, name, None)
            if isinstance(value, Tensor) and value.dim() == 0 and value.device.type == "cpu":
                return float(value) or math.nan
    except RuntimeError:  # written into since
        pass
    return math.nan


def by_name(module: nn.Module) -> float:
    """The cap that a module, or its configuration, names for its attention's scores."""
    for owner in (module, getattr(module, "config", None)):
        for name in _NAMES:
            value = getattr(owner, name, None)
            if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
                return float(value)
    return 0.0


def undone(capped: Tensor, cap: float, eps: float) -> tuple[Tensor, Tensor]:
    """The least and the most that the scores were before the cap, float32.

    Args:
        capped: any shape. What lies beyond the cap (masked, not finite) is given back as it is.
        eps: see rounding().

    Returns:
        `most` is inf where `capped` is at the cap.
    """
    capped = capped.float()
    share = capped / cap
    inside = (share.abs() <= 1 + eps) & (share != 0.0)  # exactly 0 says something of its own
    low, high = (share - eps).clamp(-1.0, 1 - 2 * eps), (share + eps).clamp(-1 + eps)
    least, most = cap * torch.atanh(low), cap * torch.atanh(high)
    most = torch.where(high < 1.0, most, math.inf)
    return torch.where(inside, least, capped), torch.where(inside, most, capped)

"""Capture: the attention functions that models call, watched while somebody listens.

    CAPTURE.subscribe(probe, modules)       CAPTURE.unsubscribe(probe)

Replaced are, as attributes looked up at call time and where the modules that define the model's
classes hold them under a name of their own (F.softmax by its code, and stays the object it is):

* `F.scaled_dot_product_attention`. The call goes to torch as it came, so torch chooses the kernel
  and output and gradients are bitwise those without us. The log-sum-exp that fused kernels keep
  for their backward pass is then read from the autograd node; with saved-tensor hooks (activation
  checkpointing, offloading), where looking would trigger a recomputation, it is taken as it is
  saved. A path that keeps none (math, dropout on the CPU) shows its scores at its softmax.
* `F.softmax`, `torch.softmax` over the last dimension inside a module that is an attention by name,
  or lies in one: hand-written ("eager") attention, nn.MultiheadAttention(need_weights=True). Scores
  whose rows all have a maximum of exactly 0 had it subtracted before: their size is lost, and they
  are no measurement.
* flash-attn's functions, when that package is imported: they return the log-sum-exp if asked.
* `flex_attention`, off the CPU: it returns the maximum itself if asked.

What a __torch_function__ decides (tensor subclasses, modes) is left to torch, with torch's own in
their places meanwhile, since such code asks `func is F.scaled_dot_product_attention`. Where dynamo
reads such code, all is handed back to torch, and the layers are named. Nothing that we compute is
seen by the user's modes (apart.py). Pickled are torch's own, by name.

Compiled code gets the same as one opaque operator of torch's graph that is run where the code runs,
so that nothing about a layer is baked in. No graph break, no recompilation. That holds where dynamo
reads our code. Where it is run while somebody traces (torch's decompositions call torch.softmax,
with fake tensors), nothing of ours is done: is_traced_through().

Not counted: calls under no_grad (evaluation), inside of torch.jit.trace and torch.func, and
recomputation of what was seen in the forward.

CUDA: written for it, and never run there. The autograd node and the saved tensors are torch's own
on every device; flash-attn and flex_attention were only tried against stand-ins.

Purity:  does not wait for the device; keeps no graph alive.
Errors:  those of the user's call pass through; ours are caught, and the place says so.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import math
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, library, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import has_torch_function_variadic
from torch.utils._python_dispatch import TorchDispatchMode

from sentinel_hooks.probes import capping, exact
from sentinel_hooks.probes.apart import apart, dispatch_modes
from sentinel_hooks.probes.places import (
    ALL,
    FEW,
    THREAD,
    WHERE,
    Place,
    is_compiling,
    is_exporting,
    is_moded,
    is_traced_through,
)
from sentinel_hooks.seams.patch import Patch, Swap
from sentinel_hooks.seams.safe_point import is_tracing, is_transforming

RAW_NUMEL = 2048  # smaller log-sum-exps are kept as they are, and reduced together at the gate
RAW_KEPT = 4  # micro-batches of them

_attention = F.scaled_dot_product_attention
_softmax = F.softmax
_torch_softmax = torch.softmax
_PLAIN = (Tensor, nn.Parameter)
_MASKS = (type(None), *_PLAIN, CausalBias)
_graph_task = torch._C._current_graph_task_id
_saved_tensor_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks


class _ByName:
    """What our functions are bound to: a bound method is pickled by name.

    A function would be pickled as itself, which is refused once torch's own is back in its place.
    """

    def __init__(self, module: str) -> None:
        self._module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> _ByName:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self._module,)


def _bound(function: Callable[..., Any], module: str) -> Any:
    return types.MethodType(function, _ByName(module))


# ---------------------------------------------------------------- what is kept of a call


def keep_lse(
    place: Place,
    lse: Tensor,
    q: Tensor | None,
    k: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    keys: int,
) -> None:
    """Keep a kernel's log-sum-exp; with q and k the maximum can be made exact.

    Args:
        lse: [B, H, T], or what CUDA kernels make of it: rows padded, or a last dimension of 1.
        keys: how many keys a row sees at most.
    """
    if lse.dim() == 4:
        lse = lse.squeeze(-1)
    if q is not None and lse.size(-1) != q.size(-2):
        lse = lse[..., : q.size(-2)]
    place.keys = max(place.keys, keys)
    if mask is not None:
        place.masked = True
    if (place.level == FEW and keys > 1) or q is None or k is None:
        if lse.numel() <= RAW_NUMEL and len(place.raw) < RAW_KEPT:
            place.raw.append(lse)
            return
        with torch.no_grad():
            if place.masked:
                lse = without_empty_rows(lse)
            high = lse.amax((0, 2)).float()
            place.high.append(high)
            place.low.append(high - math.log(keys))
        return
    with torch.no_grad():
        if place.level == ALL:
            low = high = exact.everywhere(q, k, mask, causal, scale).float()
        else:
            if mask is not None:
                lse = without_empty_rows(lse)
            low, high = exact.of_rows(lse, q, k, mask, causal, scale)
            low, high = low.float(), high.float()
        place.low.append(low)
        place.high.append(high)


def without_empty_rows(lse: Tensor) -> Tensor:
    """A row that sees no key has a log-sum-exp of exactly 0 on the CPU, and says nothing."""
    return torch.where(lse == 0.0, -math.inf, lse)


def keep_scores(place: Place, best_H: Tensor) -> None:
    """Keep a maximum per head that is exact."""
    best_H = best_H.float()
    place.low.append(best_H)
    place.high.append(best_H)


def _keep_softmax(place: Place, best: Tensor, least: Tensor, eps: float) -> None:
    """Keep what a softmax was given: the largest and the smallest of its rows' maxima.

    Both exactly 0: the maxima were subtracted. A lower bound of inf above an upper one of 0 says so
    to those who read it. Of scores with a soft cap it is what they were before.
    """
    low = high = best.float()
    if place.cap and place.cap == place.cap:
        low, high = capping.undone(low, place.cap, eps)
    place.low.append(torch.where((best == 0.0) & (least == 0.0), math.inf, low))
    place.high.append(high)


def _soft_cap(place: Place, scores: Tensor) -> float:
    """Tells the place its soft cap, and us by how much rounding has blurred the scores.

    Where there was none at first there is none: only those that have one are asked again.
    """
    if place.cap == 0.0:
        return 0.0
    if scores.grad_fn is None:
        place.cap = place.named_cap
        return capping.rounding(scores.dtype)
    cap, eps = capping.of_scores(scores)
    place.cap = place.named_cap or cap if cap != cap else cap
    return eps


def _again(place: Place) -> bool:
    """Inside a backward pass: a recomputation of what was seen already."""
    if _graph_task() != -1:
        return place.seen
    return False


def _note(place: Place) -> None:
    place.measurements += 1
    if _graph_task() == -1:
        place.seen = True


def _failed(place: Place, error: Exception) -> None:
    place.trouble = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


# ---------------------------------------------------------------- compiled code

_LIBRARY: Any = library.Library("torch_sentinel", "FRAGMENT")  # type: ignore[no-untyped-call]


def _run_enter(token: Tensor, slot: Tensor) -> None:
    place = WHERE.by_address.get(slot.data_ptr())
    WHERE.compiled = True
    if place is not None:
        THREAD.here.enter(place)


def _run_leave(token: Tensor, slot: Tensor) -> None:
    place = WHERE.by_address.get(slot.data_ptr())
    if place is not None:
        THREAD.here.leave(place)


def _run_attended(
    token: Tensor,
    lse: Tensor,
    best: Tensor,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
) -> None:
    place = THREAD.here.place
    if place is None:
        WHERE.lost += CAPTURE.listening
        return
    if _again(place):
        return
    try:
        if best.numel():
            keep_scores(place, best.clone())
        elif lse.numel():
            if place.level == FEW and lse.numel() <= RAW_NUMEL:
                lse = lse.clone()  # the buffer is the graph's, which will use it again
            keep_lse(place, lse, q, k, mask, causal, scale, k.size(-2))
        else:
            return
        _note(place)
    except Exception as error:  # noqa: BLE001  nothing of ours may end the user's forward
        _failed(place, error)


def _run_scored(token: Tensor, best: Tensor, least: Tensor) -> None:
    place = THREAD.here.place
    if place is None or not best.numel() or _again(place):
        return
    if not place.counts:
        place.passed += 1
        return
    try:
        place.cap = place.named_cap or place.cap  # compiled code has no graph that could tell
        _keep_softmax(place, best.clone(), least.clone(), capping.rounding(best.dtype))
        _note(place)
    except Exception as error:  # noqa: BLE001  nothing of ours may end the user's forward
        _failed(place, error)


def operator(name: str, arguments: str, body: Callable[..., None]) -> None:
    """An operator torch_sentinel::`name` that `body` runs, and that no compiler looks into."""
    _LIBRARY.define(f"{name}(Tensor(a!) token, {arguments}) -> ()")
    _LIBRARY.impl(name, body, "CompositeExplicitAutograd")
    library.register_fake(f"torch_sentinel::{name}", lambda *args, **kwargs: None, lib=_LIBRARY)


operator("enter", "Tensor slot", _run_enter)
operator("leave", "Tensor slot", _run_leave)
operator(
    "attended",
    "Tensor lse, Tensor best, Tensor q, Tensor k, Tensor? mask, bool causal, float? scale",
    _run_attended,
)
operator("scored", "Tensor best, Tensor least", _run_scored)

_TOKENS: dict[str, Tensor] = {}


def token(device: torch.device) -> Tensor:
    """What orders our operators in a graph on `device`; nothing is ever read from it."""
    found = _TOKENS.get(device.type)
    if found is None:
        found = _TOKENS[device.type] = torch.zeros(1, device=device)
        _static(found)
    return found


def _static(tensor: Tensor) -> None:
    """CUDA graphs may keep it where it is."""
    torch._dynamo.mark_static_address(tensor, guard=False)


def home(parameters: Iterable[Tensor]) -> torch.device:
    """The device of the first that has data; offloaded weights (meta) have no address."""
    return next((p.device for p in parameters if p.device.type != "meta"), torch.device("cpu"))


def slots(device: torch.device, n: int) -> list[Tensor]:
    """One-element tensors that lie where no other does: their addresses are names."""
    # Each of its own: as views of one storage they would be aliases, and guarded as such.
    made = [torch.zeros(1, device=device) for _ in range(n)]
    for slot in made:
        _static(slot)
    return made


def _traced(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(output, lse or empty, exact maximum or empty); torch.compile takes it as one piece.

    torch chooses the kernel when it traces into this, as it does without us.
    """
    out = _stock(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    nothing = query.new_empty(0, dtype=torch.float32)
    lse = _lse_of(out)
    if lse is not None:
        return out, lse.detach(), nothing
    if out.requires_grad and query.dim() == 4:
        try:
            q, k = _as_computed(query), _as_computed(key)
            mask = attn_mask.detach() if attn_mask is not None else None
            return out, nothing, exact.everywhere(q, k, mask, is_causal, scale, None).detach()
        except Exception:  # noqa: BLE001  what torch takes is compiled, whether we can follow or not
            return out, nothing, nothing
    return out, nothing, nothing


torch._dynamo.allow_in_graph(_traced)  # type: ignore[no-untyped-call]

# ---------------------------------------------------------------- F.scaled_dot_product_attention


@functools.wraps(_attention)
def scaled_dot_product_attention(
    _: _ByName,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's own, watched."""
    if is_compiling():
        call = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if is_traced_through() or is_exporting():
            return _stock(*call)
        if _is_somebody_elses(query, key, value, attn_mask):
            CAPTURE.hand_back()
            return _stock(*call)
        if type(attn_mask) is CausalBias:  # its __torch_function__ asks for torch's own function
            return CausalBias._dispatch(query, key, value, attn_mask, *call[4:])
        order = _TOKENS.get(query.device.type)
        if order is None or not torch.is_grad_enabled() or query.dim() != 4:
            return _stock(*call)
        out, lse, best = _traced(*call)
        q, k, mask = _as_computed(query), _as_computed(key), _detached(attn_mask)
        torch.ops.torch_sentinel.attended(order, lse, best, q, k, mask, is_causal, scale)
        return out
    place = THREAD.here.place
    if has_torch_function_variadic(query, key, value, attn_mask) and (
        type(attn_mask) is CausalBias or _is_somebody_elses(query, key, value, attn_mask)
    ):
        call = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        with CAPTURE.aside():
            return _unusual(place, _as_called, *call)
    if (
        place is None
        or place.kind is None
        or place.level != FEW
        or len(place.raw) == RAW_KEPT
        or attn_mask is not None
        or type(query) not in _PLAIN
        or dispatch_modes()
        or _graph_task() != -1
        or _saved_tensor_hooks(True) is not None
        or is_transforming()
        or is_tracing()
    ):
        call = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return _unusual(place, _stock, *call)
    # The usual case, with as little Python as can be: caches are cold after a kernel.
    out = _attention(
        query, key, value, None, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    node: Any = out.grad_fn
    try:
        if type(node) is place.kind:
            lse, keys = node._saved_logsumexp, key.size(-2)
            if keys > 1:
                if lse.numel() <= RAW_NUMEL:
                    place.raw.append(lse)
                else:
                    place.top.append(lse.amax((0, 2)))
                if keys > place.keys:
                    place.keys = keys
                place.measurements += 1
                place.seen = True
                return out
    except Exception as error:  # noqa: BLE001  nothing of ours may end the user's forward
        _failed(place, error)
        return out
    if node is not None:
        found = _lse_of(out)
        _remember(place, node, found, query, key)
        _look_at(place, out, found, None, query, key, None, is_causal, scale)
    return out


def _unusual(
    place: Place | None,
    stock: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    call = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if place is None:
        if torch.is_grad_enabled():
            WHERE.lost += CAPTURE.listening
        return stock(*call)
    elsewhere = is_transforming() or is_tracing() or type(query) is FakeTensor
    if not torch.is_grad_enabled() or elsewhere or _again(place):
        return stock(*call)
    return _watched(place, stock, *call)


def _is_somebody_elses(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> bool:
    """Code of the user's decides what this call is; dynamo can read this."""
    if type(query) not in _PLAIN or type(key) not in _PLAIN or type(value) not in _PLAIN:
        return True
    return type(attn_mask) not in _MASKS or is_moded()


def _as_called(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """torch's own for those who look at the arguments: what is torch's default is not named."""
    named: dict[str, Any] = {}
    if attn_mask is not None:
        named["attn_mask"] = attn_mask
    if dropout_p != 0.0:
        named["dropout_p"] = dropout_p
    if is_causal:
        named["is_causal"] = is_causal
    if scale is not None:
        named["scale"] = scale
    if enable_gqa:
        named["enable_gqa"] = enable_gqa
    return _attention(query, key, value, **named)


def _stock(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    return _attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _watched(
    place: Place,
    stock: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    call = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if stock is _as_called or dispatch_modes():
        return _watched_in_company(place, stock, *call)
    dim = query.dim()
    if type(query) not in _PLAIN or dim > 4:
        place.trouble = _odd(query, dim)
        return _stock(*call)
    hooks = _saved_tensor_hooks(True)
    lse: Tensor | None = None
    best: Tensor | None = None
    if place.math:
        with _Scores() as scores:  # type: ignore[no-untyped-call]
            scores.dim = dim
            out = _stock(*call)
        best = scores.best
    elif hooks is None:
        out = _stock(*call)
        lse = _lse_of(out)
        if attn_mask is None:
            _remember(place, out.grad_fn, lse, query, key)
    else:
        with _Saved(hooks, dim) as saved:
            out = _stock(*call)
        lse = saved.lse
    _look_at(place, out, lse, best, query, key, attn_mask, is_causal, scale)
    return out


def _look_at(
    place: Place,
    out: Tensor,
    lse: Tensor | None,
    best: Tensor | None,
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> None:
    """Keep what a call has shown: its log-sum-exp, or its largest scores."""
    dim = query.dim()
    if dim != 4:
        lse = None  # fused kernels take 4
    if not out.requires_grad:
        return  # frozen: blind_spots() names it if that is all there is
    try:
        if lse is not None and place.level == FEW and key.size(-2) > 1:
            keep_lse(place, lse, query, None, attn_mask, is_causal, scale, key.size(-2))
        else:
            q, k, mask = _as_computed(query), _as_computed(key), _detached(attn_mask)
            if dim != 4:
                q, k, mask = _one_head(q), _one_head(k), mask if mask is None else _one_head(mask)
            if lse is not None:
                keep_lse(place, lse, q, k, mask, is_causal, scale, key.size(-2))
            else:  # from the next call on the scores are seen where they are made
                place.math, place.kind = best is not None or not place.math, None
                if best is None:
                    best = exact.everywhere(q, k, mask, is_causal, scale)
                keep_scores(place, best)
        _note(place)
    except Exception as error:  # noqa: BLE001  nothing of ours may end the user's forward
        _failed(place, error)


def _watched_in_company(
    place: Place,
    stock: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """The same where others watch too, or decide: all of ours is done apart from them."""
    call = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    other = next((t for t in (query, key, value) if type(t) not in _PLAIN), None)
    if other is None and type(attn_mask) not in _MASKS:
        other = attn_mask
    with apart(query):
        dim = query.dim() if other is None else 0
    if other is not None or dim > 4:
        place.trouble = _odd(query if other is None else other, dim)
        return stock(*call)
    hooks = _saved_tensor_hooks(True)
    lse: Tensor | None = None
    best: Tensor | None = None
    if place.math:
        with _Scores() as scores:  # type: ignore[no-untyped-call]
            scores.dim = dim
            out = stock(*call)
        best = scores.best
    elif hooks is None:
        out = stock(*call)
    else:
        with _Saved(hooks, dim) as saved:
            out = stock(*call)
        lse = saved.lse
    try:
        with apart(out):
            if hooks is None and not place.math:
                lse = _lse_of(out)
            if type(attn_mask) is CausalBias:
                attn_mask, is_causal = _meant(attn_mask, query.device)
            _look_at(place, out, lse, best, query, key, attn_mask, is_causal, scale)
    except Exception as error:  # noqa: BLE001  a mode may answer with anything
        _failed(place, error)
    return out


def _meant(bias: CausalBias, device: torch.device) -> tuple[Tensor | None, bool]:
    """(mask, is_causal) of torch's own bias."""
    if bias.seq_len_q == bias.seq_len_kv or bias.variant == CausalVariant.UPPER_LEFT:
        return None, True
    return bias._materialize(device), False


def _odd(x: Any, dim: int) -> str:
    what = f"{type(x).__name__} of {dim} dimensions" if dim else type(x).__name__
    return f"it is given {what}, and only plain tensors of up to 4 dimensions are measured"


def _remember(place: Place, node: Any, lse: Tensor | None, query: Tensor, key: Tensor) -> None:
    """What tells the next call of the same kind: the type of its node, which keeps one such."""
    if lse is None or lse.dim() != 3 or not hasattr(node, "_saved_logsumexp"):
        return
    if query.dim() == 4 and query.device.type == "cpu" and key.size(-2) > 1:
        place.kind = type(node)  # CUDA kernels pad theirs


def _one_head(x: Tensor) -> Tensor:
    """[N, T, D] as [N, 1, T, D], [T, D] as [1, 1, T, D]; a mask in the same way."""
    return x.unsqueeze(1) if x.dim() == 3 else x[None, None] if x.dim() == 2 else x


def _detached(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.detach()


def _lse_of(out: Tensor) -> Tensor | None:
    """The log-sum-exp that the kernel's autograd node keeps; some outputs are slices of it."""
    node: Any = out.grad_fn
    for _ in range(3):
        if node is None:
            break
        lse = getattr(node, "_saved_logsumexp", None)
        if lse is None:
            lse = getattr(node, "_saved_log_sumexp", None)
        if lse is not None:
            found: Tensor = lse
            return found if found.numel() else None
        name = node.name()
        if not name.startswith(("Slice", "Transpose", "Permute", "View", "Alias")):
            return None
        node = node.next_functions[0][0] if node.next_functions else None
    return None


def _as_computed(x: Tensor) -> Tensor:
    """Detached, and rounded as autocast rounds it for the kernel."""
    x = x.detach()
    kind = x.device.type
    if kind in exact.AUTOCAST and torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(kind))
    return x


class _Saved:
    """Looks at what a kernel saves, on its way to the hooks that are in force."""

    def __init__(self, hooks: Any, dim: int) -> None:
        self._pack, self._unpack = hooks
        self._dim = dim
        self.lse: Tensor | None = None

    def _look(self, tensor: Tensor) -> Any:
        if (
            self.lse is None
            and tensor.numel()
            and tensor.dtype in (torch.float32, torch.float64)
            and (
                tensor.dim() == self._dim - 1
                or (tensor.dim() == self._dim and tensor.size(-1) == 1)
            )
            and not tensor.requires_grad
        ):
            with apart(tensor):
                self.lse = tensor.detach()
        return self._pack(tensor)

    def __enter__(self) -> _Saved:
        torch._C._autograd._push_saved_tensors_default_hooks(self._look, self._unpack)
        return self

    def __exit__(self, *error: object) -> None:
        torch._C._autograd._pop_saved_tensors_default_hooks()


class _Scores(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the scores where the math path hands them to its softmax."""

    best: Tensor | None = None
    dim = 4

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _SOFTMAXES and args[0].dim() == self.dim:
            with apart(args[0]):
                seen = args[0].detach()
                self.best = seen.amax((0, 2, 3)) if self.dim == 4 else seen.amax().view(1)
        return func(*args, **(kwargs or {}))


_SOFTMAXES = tuple(
    packet
    for name in ("_safe_softmax", "_softmax", "softmax")
    if (packet := getattr(torch.ops.aten, name, None)) is not None
)

# ---------------------------------------------------------------- softmax


def _clone_of_softmax() -> Callable[..., Tensor]:
    """torch's F.softmax as a function of its own, since the code of torch's is exchanged."""
    if not _SWAPPABLE:
        return _softmax
    clone = types.FunctionType(
        _softmax.__code__, _softmax.__globals__, "_stock_softmax", _softmax.__defaults__
    )
    clone.__module__ = __name__
    return torch._dynamo.allow_in_graph(clone)  # type: ignore[no-untyped-call, no-any-return]


def _shim(
    input: Tensor,  # noqa: A002  torch's own name for it
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """F.softmax while somebody listens. Its globals are torch's, with one more."""
    return _torch_sentinel_softmax(input, dim, _stacklevel, dtype)  # type: ignore[name-defined, no-any-return]  # noqa: F821


_SWAPPABLE = (
    isinstance(_softmax, types.FunctionType)
    and not _softmax.__code__.co_freevars
    and inspect.getfullargspec(_softmax).args == inspect.getfullargspec(_shim).args
)
_stock_softmax = _clone_of_softmax()


def softmax(
    input: Tensor,  # noqa: A002  torch's own name for it
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """F.softmax, watched inside attention modules."""
    if is_compiling() and not is_traced_through():
        if type(input) not in _PLAIN or is_moded():
            CAPTURE.hand_back()
        else:
            _look_at_traced_scores(input, dim)
    elif has_torch_function_variadic(input):
        with _Looking(input, dim):
            return _stock_softmax(input, dim, _stacklevel, dtype)
    else:
        _look_at_scores(input, dim)
    if dim is None:
        _stacklevel += 2  # of the warning: the shim, and this
    return _stock_softmax(input, dim, _stacklevel, dtype)


@functools.wraps(_torch_softmax)
def torch_softmax(_: _ByName, *args: Any, **kwargs: Any) -> Tensor:
    """torch.softmax, watched inside attention modules."""
    given = args[0] if args else kwargs.get("input")
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if is_compiling() and not is_traced_through():
        if type(given) not in _PLAIN or is_moded():
            CAPTURE.hand_back()
            return _torch_softmax(*args, **kwargs)
        _look_at_traced_scores(given, dim)
        if not args:
            args = (given,)
            kwargs = {name: value for name, value in kwargs.items() if name != "input"}
        if dim is not None and "out" not in kwargs:
            # A graph calls by name, which would be ours again.
            compiled: Tensor = args[0].softmax(*args[1:], **kwargs)
            return compiled
    elif has_torch_function_variadic(given):
        with _Looking(given, dim), CAPTURE.aside():
            return _torch_softmax(*args, **kwargs)
    else:
        _look_at_scores(given, dim)
    return _torch_softmax(*args, **kwargs)


class _Looking:
    """Around a softmax that somebody's __torch_function__ decides.

    Scores of a subclass are for it to say; those that it hands to torch in turn are seen there.
    """

    def __init__(self, scores: Any, dim: Any) -> None:
        self._scores = scores
        self._dim = dim

    def __enter__(self) -> None:
        if type(self._scores) in _PLAIN:
            _look_at_scores(self._scores, self._dim)

    def __exit__(self, *error: object) -> None:
        place = THREAD.here.place
        if place is None or not place.counts or place.measurements or not torch.is_grad_enabled():
            return
        if type(self._scores) not in _PLAIN:
            place.trouble = _odd(self._scores, 0)


def _largest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Of the rows' maxima the largest and the smallest, of each head.

    Of 3-d scores of each of the first dimension.
    """
    rows = scores.amax(-1)
    if rows.dim() == 3:
        return rows.amax((0, 2)), rows.amin((0, 2))
    return rows.amax(1), rows.amin(1)


def _traced_largest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The same, as one piece of a graph; empty where it cannot be."""
    try:
        return _largest(scores.detach())
    except Exception:  # noqa: BLE001  scores without elements, say, of which torch makes a softmax
        return scores.new_empty(0), scores.new_empty(0)


torch._dynamo.allow_in_graph(_traced_largest)  # type: ignore[no-untyped-call]


def _look_at_traced_scores(scores: Any, dim: Any) -> None:
    """Read by dynamo: what is done here is in the compiled code."""
    if (
        torch.is_grad_enabled()
        and not is_exporting()
        and type(scores) in _PLAIN
        and scores.dim() == 4
        and dim in (-1, 3)
    ):
        order = _TOKENS.get(scores.device.type)
        if order is not None:
            best, least = _traced_largest(scores)
            torch.ops.torch_sentinel.scored(order, best, least)


def _look_at_scores(scores: Any, dim: Any) -> None:
    place = THREAD.here.place
    if (
        place is None
        or not torch.is_grad_enabled()
        or not isinstance(scores, Tensor)
        or type(scores) is FakeTensor
        or is_compiling()
        or is_transforming()
        or is_tracing()
        or _again(place)
    ):
        return
    with apart(scores):
        _look_at_own_scores(place, scores, dim)


def _look_at_own_scores(place: Place, scores: Tensor, dim: Any) -> None:
    if scores.dim() not in (3, 4) or dim not in (-1, scores.dim() - 1):
        return
    if not place.counts:
        # Of 3 dimensions it is as often a gate's as an attention's, unless it is square.
        place.passed += scores.dim() == 4 or scores.size(1) == scores.size(2) > 1
        return
    try:
        best, least = _largest(scores.detach())
        if scores.dim() == 3:  # one sequence's heads after the other's, if their number is known
            heads = place.heads if place.heads and best.numel() % place.heads == 0 else 1
            best, least = best.view(-1, heads).amax(0), least.view(-1, heads).amin(0)
        _keep_softmax(place, best, least, _soft_cap(place, scores))
        _note(place)
    except Exception as error:  # noqa: BLE001  nothing of ours may end the user's forward
        _failed(place, error)


# ---------------------------------------------------------------- flash-attn and flex_attention

_FLASH = (
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
)


_TANH_APPROX = 2.0**-10  # they take the GPU's tanh.approx, with a relative error of 2**-11


def _watch_flash(original: Callable[..., Any]) -> Any:
    """flash-attn's function, asked for its log-sum-exp as well."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def watched(_: _ByName, *args: Any, **kwargs: Any) -> Any:
        place = THREAD.here.place
        if is_compiling() or place is None or not torch.is_grad_enabled() or _again(place):
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        asked = bool(given.arguments.get("return_attn_probs"))
        if given.arguments.get("dropout_p") and not asked:
            place.trouble = "flash-attn with dropout would return all probabilities too"
            return original(*args, **kwargs)
        if asked:
            answer = original(*args, **kwargs)
        else:
            given.arguments["return_attn_probs"] = True
            answer = original(*given.args, **given.kwargs)
        try:
            lse = answer[1].detach()
            lse = lse[None] if lse.dim() == 2 else lse  # varlen: all sequences in a row
            keys = max(
                lse.size(-1),
                int(given.arguments.get("max_seqlen_k") or 0),
                *(t.size(1) for n, t in given.arguments.items() if n in ("k", "kv", "qkv")),
            )
            cap = float(given.arguments.get("softcap") or 0.0)
            if cap > 0.0:
                place.cap = cap
                most = lse.amax((0, 2)).float()
                low, high = most - math.log(keys), most.clamp(max=cap)
                place.low.append(capping.undone(low, cap, _TANH_APPROX)[0])
                place.high.append(capping.undone(high, cap, _TANH_APPROX)[1])
            else:
                keep_lse(place, lse, None, None, None, False, None, keys)
            _note(place)
        except Exception as error:  # noqa: BLE001  nothing of ours may end the user's forward
            _failed(place, error)
        return answer if asked else answer[0]

    return _bound(watched, original.__module__)


def _watch_flex(original: Callable[..., Any], request: Callable[..., Any]) -> Any:
    """flex_attention, asked for the largest score as well."""

    @functools.wraps(original)
    def watched(_: _ByName, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        place = THREAD.here.place
        if (
            is_compiling()
            or place is None
            or not torch.is_grad_enabled()
            or _again(place)
            or query.device.type == "cpu"
            or kwargs.get("return_lse")
            or kwargs.get("return_aux") is not None
        ):
            return original(query, *args, **kwargs)
        out, aux = original(query, *args, **kwargs, return_aux=request(max_scores=True))
        try:
            best = aux.max_scores.detach().amax((0, 2))
            score_mod = args[2] if len(args) > 2 else kwargs.get("score_mod")
            if place.named_cap and score_mod is not None:  # these are the scores after it
                place.cap = place.named_cap
                low, high = capping.undone(best, place.cap, capping.rounding(query.dtype))
                place.low.append(low)
                place.high.append(high)
            else:
                keep_scores(place, best)
            _note(place)
        except Exception as error:  # noqa: BLE001  nothing of ours may end the user's forward
            _failed(place, error)
        return out

    return _bound(watched, original.__module__)


# ---------------------------------------------------------------- in place


class Capture:
    """The process-wide replacements, there while a probe listens."""

    def __init__(self) -> None:
        # Weak: what is process-wide must not keep a run alive. A session that is dropped detaches.
        self._probes: weakref.WeakSet[Any] = weakref.WeakSet()
        self._patches: list[Patch | Swap] = []
        self._aside = 0
        self._lock = threading.Lock()
        self.handed_back = False  # to torch, until nobody listens

    @property
    def listening(self) -> bool:
        """Somebody does."""
        return bool(self._probes)

    def subscribe(self, probe: object, modules: Iterable[nn.Module]) -> None:
        """Watch; also the names that the classes of `modules` are written with."""
        self._probes.add(probe)
        self._install(modules)

    def unsubscribe(self, probe: object) -> None:
        """Stop; with the last probe the replacements go."""
        self._probes.discard(probe)
        if not self._probes:
            self._remove()
            self.handed_back = False
            THREAD.here.forget()

    def _remove(self) -> None:
        with self._lock:
            self._patches = [p for p in reversed(self._patches) if not p.remove()][::-1]

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """torch's own in their places: a __torch_function__ asks which function it was called for.

        Other threads that call meanwhile are not measured.
        """
        with self._lock:
            self._aside += 1
            for patch in self._patches:
                if isinstance(patch, Patch):
                    patch.lift()
        try:
            yield
        finally:
            with self._lock:
                self._aside -= 1
                if not self._aside:
                    for patch in self._patches:
                        if isinstance(patch, Patch):
                            patch.lay()

    @staticmethod
    def hand_back() -> None:
        """Read by dynamo, which runs what it calls: this process is no longer watched.

        In compiled code the user's __torch_function__ is read too, and asks for what stands in
        torch's modules; that cannot be another function for one call.
        """
        _hand_back()

    def _install(self, modules: Iterable[nn.Module]) -> None:
        if self.handed_back:
            return
        # torch lists once in a process whose calls a __torch_function__ may decide; with ours in
        # their places its own would be missing for good, and torch.compile would ask no CausalBias.
        torch.overrides.get_overridable_functions()
        stands: list[tuple[Any, Any]] = [(_attention, _OURS), (_torch_softmax, _OUR_SOFTMAX)]
        if not _SWAPPABLE:
            stands.append((_softmax, softmax))
        elif not any(isinstance(patch, Swap) for patch in self._patches):
            self._patches.append(Swap(_softmax, _shim, softmax))
        places: list[tuple[Any, tuple[str, ...]]] = [
            (F, ("scaled_dot_product_attention", "softmax")),
            (torch, ("softmax",)),
        ]
        flash = [
            m
            for n in ("flash_attn", "flash_attn.flash_attn_interface")
            if (m := sys.modules.get(n))
        ]
        for module in flash:
            for name in _FLASH:
                original = getattr(module, name, None)
                if original is not None and not any(o is original for o, _ in stands):
                    stands.append((original, _watch_flash(original)))
            places.append((module, _FLASH))
        flex = sys.modules.get("torch.nn.attention.flex_attention")
        request = getattr(flex, "AuxRequest", None)
        if flex is not None and request is not None:
            stands.append((flex.flex_attention, _watch_flex(flex.flex_attention, request)))
            places.append((flex, ("flex_attention",)))
        for ours, name in ((_OURS, "scaled_dot_product_attention"), (_OUR_SOFTMAX, "softmax")):
            torch.jit._builtins._register_builtin(ours, f"aten::{name}")
        for module in _homes(modules):
            places.append((module, tuple(vars(module))))
        for module, names in places:
            for name in names:
                value = vars(module).get(name)
                for original, watched in stands:
                    if value is original:
                        self._patches.append(Patch(module, name, watched))


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _hand_back() -> bool:
    restart = getattr(torch._dynamo.exc, "UnspecializeRestartAnalysis", None)
    if CAPTURE.handed_back or restart is None:
        return False
    CAPTURE.handed_back = True
    CAPTURE._remove()
    raise restart


def _homes(modules: Iterable[nn.Module]) -> list[Any]:
    """The modules in which the classes of the model were written, less torch's own."""
    names: dict[str, None] = {}
    for module in modules:
        for cls in type(module).__mro__:
            if not cls.__module__.startswith("torch."):
                names[cls.__module__] = None
    return [m for n in names if (m := sys.modules.get(n)) is not None and n != "builtins"]


CAPTURE = Capture()
_OURS = _bound(scaled_dot_product_attention, F.__name__)
_OUR_SOFTMAX = _bound(torch_softmax, torch.__name__)

"""The largest attention logit from queries and keys: exact, or from few rows with a proof.

    low_H, high_H = of_rows(lse, q, k, mask, causal, scale)     16 rows
    low_H = everywhere(q, k, mask, causal, scale)               all rows, in chunks

Let lse_i be the log-sum-exp of query row i. Its largest logit M_i is at most lse_i. So the rows
with the largest lse are looked at exactly; when the best of them is no smaller than the largest lse
of the others, it is the maximum of all. Otherwise (many rows that are nearly uniform and large)
the best of the rows is a lower bound and the largest lse an upper one.

Shapes:  q [B, H, T, D], k [B, K, S, D] with K dividing H (grouped queries); lse [B, H, T]; mask
         bool or float, broadcastable to [B, H, T, S], as F.scaled_dot_product_attention takes it;
         answers [H].
Units:   scaled, masked scores as the softmax sees them.
Purity:  does not wait for the device, keeps no graph. Computed in float32 at least: bf16 inputs are
         widened, which loses nothing.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

ROWS = 16
AUTOCAST = ("cpu", "cuda", "xpu", "mps")  # asking of another device raises
CHUNK = 256  # query rows at a time: 256 x S scores for each head


@torch.no_grad()
def of_rows(
    lse_BHT: Tensor,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    rows: int = ROWS,
) -> tuple[Tensor, Tensor]:
    """(lower, upper) bound per head from the `rows` rows of the largest lse; equal when exact."""
    T = q.size(2)
    upper_BH = lse_BHT.amax(-1)
    if rows < T:
        top = lse_BHT.topk(rows + 1, dim=-1)
        index, others_BH = top.indices[..., :rows], top.values[..., -1]
    else:
        index = torch.arange(T, device=q.device).expand(*lse_BHT.shape[:2], T)
        others_BH = torch.full_like(upper_BH, -math.inf)
    chosen = q.gather(2, index[..., None].expand(-1, -1, -1, q.size(-1)))
    best_BH = _scores(chosen, k, mask, index, causal, scale).amax((2, 3))
    high_BH = torch.where(best_BH >= others_BH, best_BH, torch.maximum(upper_BH, best_BH))
    return best_BH.amax(0), high_BH.amax(0)


@torch.no_grad()
def everywhere(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    chunk: int | None = CHUNK,
) -> Tensor:
    """The maximum per head over all rows."""
    B, H, T, _ = q.shape
    best: Tensor | None = None
    step = chunk or T
    for start in range(0, T, step):
        part = q[:, :, start : start + step]
        index = torch.arange(start, start + part.size(2), device=q.device).expand(B, H, -1)
        found = _scores(part, k, mask, index, causal, scale).amax((0, 2, 3))
        best = found if best is None else torch.maximum(best, found)
    assert best is not None
    return best


def _as_they_are(kind: str) -> AbstractContextManager[object]:
    """Autocast would round the products of float32 again."""
    if kind in AUTOCAST and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def _scores(
    q_BHRD: Tensor,
    k: Tensor,
    mask: Tensor | None,
    index_BHR: Tensor,
    causal: bool,
    scale: float | None,
) -> Tensor:
    """Masked scores [B, H, R, S] of the query rows `index`."""
    B, H, R, D = q_BHRD.shape
    groups, S = k.size(1), k.size(2)
    dtype = torch.promote_types(q_BHRD.dtype, torch.float32)
    q = q_BHRD.to(dtype).reshape(B, groups, H // groups * R, D)
    with _as_they_are(q.device.type):
        s = (q @ k.to(dtype).transpose(-1, -2)).view(B, H, R, S)
    s = s * (D**-0.5 if scale is None else scale)
    if causal:
        later = torch.arange(S, device=s.device) > index_BHR[..., None]
        s = s.masked_fill(later, -math.inf)
    if mask is not None:
        rows = mask.expand(B, H, -1, S)
        if rows.size(2) != 1:  # one row for all queries broadcasts by itself
            rows = rows.gather(2, index_BHR[..., None].expand(-1, -1, -1, S))
        s = s.masked_fill(~rows, -math.inf) if rows.dtype == torch.bool else s + rows
    return s

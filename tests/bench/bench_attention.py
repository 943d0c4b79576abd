"""What watching attention costs, as a share of the attention call itself.

    python -m tests.bench attention

A stack of modules that do nothing but attention, with queries, keys and values as their weights:
forward and backward are those of the call. Ours, timed where it runs: hooks around the module, the
replaced function less the call that it makes, and the reduction, the read and the sums at the gate.
CPU time of one thread; the share is taken within a round, and its median over rounds is told.

Queries are scaled so that the largest logit of a layer is 5, or 45: near the threshold the 16 rows
with the largest log-sum-exp of each head are computed exactly.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sentinel_hooks.layers import LayerTable
from sentinel_hooks.probes.attention import AttentionProbe
from sentinel_hooks.probes.probe import resolve
from sentinel_hooks.probes.read import read
from tests.bench.loop import Meter, clock_ns, dispatch_ns, watched_hooks
from tests.bench.timing import machine, table

LAYERS, WIDTH = 12, 64
WARM, ROUNDS = 3, 7
# rows, heads, tokens
SIZES = ((1, 4, 512), (2, 8, 512), (1, 8, 1024), (1, 4, 2048))


class Attention(nn.Module):
    def __init__(self, rows: int, heads: int, tokens: int, largest: float) -> None:
        super().__init__()
        q, k, v = torch.randn(3, rows, heads, tokens, WIDTH)
        s = torch.einsum("bhtd,bhsd->bhts", q, k) * WIDTH**-0.5
        q *= largest / s.tril().amax()
        self.q, self.k, self.v = map(nn.Parameter, (q, k, v))

    def forward(self) -> Tensor:
        return F.scaled_dot_product_attention(self.q, self.k, self.v, is_causal=True)


class Stack(nn.Module):
    def __init__(self, size: tuple[int, int, int], largest: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention(*size, largest) for _ in range(LAYERS))

    def forward(self) -> list[Tensor]:
        return [block() for block in self.blocks]


def measure(size: tuple[int, int, int], largest: float) -> tuple[float, float, float]:
    """(milliseconds of an attention call and its backward, our microseconds of it, % of it)."""
    torch.manual_seed(0)
    model = Stack(size, largest)
    probe = AttentionProbe([model], LayerTable.of([model]), 50.0)
    per_call, per_module = clock_ns(), dispatch_ns()
    upstream = [torch.randn(*size, WIDTH) for _ in range(LAYERS)]
    probe.attach()
    call, cost, share = [], [], []
    for t in range(WARM + ROUNDS):
        meter = Meter()
        model.zero_grad()
        with watched_hooks(meter):
            start = time.thread_time_ns()
            torch.autograd.backward(model(), upstream)
            whole = time.thread_time_ns() - start
        hooked = sum(bool(m._forward_hooks) for m in model.modules())
        own = meter.spent - meter.calls * per_call + hooked * per_module
        bare = whole - meter.spent
        start = time.thread_time_ns()
        probe.before_step(t)
        resolve(probe, read(probe.pending(), [])[0])
        own += time.thread_time_ns() - start
        if t >= WARM:
            call.append(bare / LAYERS / 1e6)
            cost.append(own / LAYERS / 1e3)
            share.append(100 * own / bare)
    assert not probe.blind_spots()
    probe.detach()
    return statistics.median(call), statistics.median(cost), statistics.median(share)


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for size in SIZES:
        call, cost, share = measure(size, 5.0)
        _, near, near_share = measure(size, 45.0)
        rows.append(
            (
                f"{size[2]:,} tokens, {size[0]} x {size[1]} heads",
                f"{call:.1f}",
                f"{cost:.0f}",
                f"{share:.2f}",
                f"{near:.0f}",
                f"{near_share:.2f}",
            )
        )
    head = ("attention", "call, ms", "us", "% of it", "near the threshold, us", "% of it")
    at = machine().partition(";")[0]
    print(
        table(f"Attention probe, a layer ({at}; CPU time, medians of {ROUNDS} rounds)", rows, head)
    )


if __name__ == "__main__":
    main()

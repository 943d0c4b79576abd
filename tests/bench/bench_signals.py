"""What each signal costs a training step, measured where it happens.

    python -m tests.bench signals

Two models: 10 M parameters, 8 blocks, 256 tokens a step; and 96 blocks of 1,059 small tensors, 64
tokens. Each probe's hooks, gate and read are timed in place, as CPU time, in a step that really
trains, against the rest of the same step (the bare one): full steps cannot resolve 1 % on a shared
machine. Medians of the ratios. Hooks are charged for the detour that torch takes through a module
that has any, and what the clock itself costs is taken off. Sampled signals: the sampled step, and a
tenth of it.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sentinel_hooks.layers import LayerTable
from sentinel_hooks.probes import activations, capture, places
from sentinel_hooks.probes.activations import ActivationProbe
from sentinel_hooks.probes.attention import AttentionProbe
from sentinel_hooks.probes.memory import MemoryProbe
from sentinel_hooks.probes.probe import Probe, resolve
from sentinel_hooks.probes.read import read
from sentinel_hooks.probes.updates import UpdateProbe
from tests.bench.timing import machine, table

ROUNDS = 20
WARM = 6

# ---------------------------------------------------------------- models


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-6)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, qk_norm: bool) -> None:
        super().__init__()
        self.heads = heads
        for name in ("q", "k", "v", "o"):
            setattr(self, name, nn.Linear(width, width, bias=False))
        self.q_norm = Norm(width // heads) if qk_norm else nn.Identity()
        self.k_norm = Norm(width // heads) if qk_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = (f(x).view(B, T, self.heads, -1) for f in (self.q, self.k, self.v))
        q, k, v = (t.transpose(1, 2) for t in (self.q_norm(q), self.k_norm(k), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o(y.transpose(1, 2).reshape(B, T, D))
        return out


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.a = nn.Linear(width, hidden, bias=False)
        self.b = nn.Linear(width, hidden, bias=False)
        self.c = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(F.silu(self.a(x)) * self.b(x))
        return out


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, qk_norm: bool) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = Norm(width), Norm(width)
        self.attn = Attention(width, heads, qk_norm)
        self.mlp = Mlp(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm_1(x))
        out: Tensor = x + self.mlp(self.norm_2(x))
        return out


class Gpt(nn.Module):
    def __init__(
        self, words: int, blocks: int, width: int, heads: int, hidden: int, qk_norm: bool
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden, qk_norm) for _ in range(blocks))
        self.norm = Norm(width)
        self.head = nn.Linear(width, words, bias=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.roll(-1, 1).flatten())


def ten_million() -> tuple[Gpt, Tensor]:
    return Gpt(512, 8, 320, 5, 864, False), torch.randint(0, 512, (2, 128))


def many_tensors() -> tuple[Gpt, Tensor]:
    return Gpt(64, 96, 32, 2, 64, True), torch.randint(0, 64, (2, 32))


# ---------------------------------------------------------------- timing in place


class Meter:
    """CPU time of the calls that it wraps, less what they give back to torch."""

    def __init__(self) -> None:
        self.spent = 0
        self.calls = 0

    def timed(self, call: Callable[..., Any], sign: int = 1) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time_ns()
            try:
                return call(*args, **kwargs)
            finally:
                self.spent += sign * (time.thread_time_ns() - start)
                self.calls += 1

        return run


def clock_ns() -> float:
    """What one timed call adds to the figure by being timed."""
    meter = Meter()
    empty = meter.timed(lambda: None)
    for _ in range(20_000):
        empty()
    return meter.spent / meter.calls


def dispatch_ns() -> float:
    """What a module's call costs more as soon as it has a hook, the hook left out."""
    module, x = nn.Identity(), torch.zeros(1)

    def calls() -> int:
        start = time.thread_time_ns()
        for _ in range(20_000):
            module(x)
        return time.thread_time_ns() - start

    bare = min(calls() for _ in range(5))
    module.register_forward_hook(lambda m, a, o: None)
    return (min(calls() for _ in range(5)) - bare) / 20_000


@contextlib.contextmanager
def watched_hooks(meter: Meter) -> Iterator[None]:
    """Hooks and replaced functions are timed, less the attention that they call for the user."""
    hooks = (places.Enter, places.Leave, activations._Out)
    stock = [h.__call__ for h in hooks]
    attention, ours = capture._attention, F.scaled_dot_product_attention
    for hook, call in zip(hooks, stock, strict=True):
        hook.__call__ = meter.timed(call)  # type: ignore[method-assign]
    if ours is not attention:
        capture._attention = meter.timed(attention, -1)
        F.scaled_dot_product_attention = meter.timed(ours)  # type: ignore[assignment]
    try:
        yield
    finally:
        for hook, call in zip(hooks, stock, strict=True):
            hook.__call__ = call  # type: ignore[method-assign]
        capture._attention = attention
        F.scaled_dot_product_attention = ours


Made = Callable[[Gpt, LayerTable, torch.optim.Optimizer], Probe]


def measure(
    make: Callable[[], tuple[Gpt, Tensor]], made: Made, sampled: bool
) -> tuple[float, float, float]:
    """(microseconds of the probe, % of the rest of the step, milliseconds of that)."""
    torch.manual_seed(0)
    model, ids = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    probe = made(model, LayerTable.of([model]), optimizer)
    per_call, per_module = clock_ns(), dispatch_ns()
    probe.attach()
    cost, share, bare = [], [], []
    for t in range(WARM + ROUNDS):
        meter = Meter()
        step = 0 if sampled else 10 * t + 1
        optimizer.zero_grad()
        with watched_hooks(meter):
            start = time.thread_time_ns()
            model(ids).backward()
            rest = time.thread_time_ns() - start
        hooked = sum(bool(m._forward_hooks) for m in model.modules())
        own = meter.spent - meter.calls * per_call + hooked * per_module
        start = time.thread_time_ns()
        probe.before_step(step)
        resolve(probe, read(probe.pending(), [])[0])
        own += time.thread_time_ns() - start
        start = time.thread_time_ns()
        optimizer.step()
        rest += time.thread_time_ns() - start - meter.spent
        start = time.thread_time_ns()
        probe.after_step(True)
        own += time.thread_time_ns() - start
        if t >= WARM:
            cost.append(own / 1e3)
            share.append(100 * own / rest)
            bare.append(rest / 1e6)
    probe.detach()
    return statistics.median(cost), statistics.median(share), statistics.median(bare)


PROBES: tuple[tuple[str, Made, bool], ...] = (
    ("attention, every step", lambda m, t, o: AttentionProbe([m], t), False),
    ("... with a layer near the threshold", lambda m, t, o: AttentionProbe([m], t, 0.0), False),
    ("activations, every step", lambda m, t, o: ActivationProbe([m], t), False),
    ("update ratio, a sampled step", lambda m, t, o: UpdateProbe([o], t), True),
    ("memory, a sampled step", lambda m, t, o: MemoryProbe([m], [o]), True),
)


def main() -> None:
    torch.set_num_threads(1)
    for title, make in (
        ("10 M parameters, 256 tokens", ten_million),
        ("96 blocks, 1,059 tensors, 64 tokens", many_tensors),
    ):
        rows = []
        for name, made, sampled in PROBES:
            cost, share, bare = measure(make, made, sampled)
            amortised = f"{share / 10:.2f}" if sampled else f"{share:.2f}"
            rows.append((name, f"{cost:.0f}", f"{share:.2f}", amortised, f"{bare:.1f}"))
        head = ("signal", "us", "% of the bare step", "% every 10th", "bare step, ms")
        at = machine().partition(";")[0]
        print(table(f"{title} ({at}; CPU time, medians of {ROUNDS} steps)", rows, head))
        print()


if __name__ == "__main__":
    main()

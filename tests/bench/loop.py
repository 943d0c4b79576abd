"""Training loops whose cost is taken apart where it arises, and the models that they train.

    loop = Loop(ten_million, signals=NORMS, clip=1e6)
    parts = loop.step()                  milliseconds of CPU time by part
    loop.close()

Full steps cannot resolve 1 % on a shared machine. So every hook of an attached session is timed
where it runs, in a step that really trains, with the caches as that step leaves them; what remains
of the step is the bare one. What the clock costs is taken off, and what torch's detour through a
module with hooks costs is put on.

Several loops take turns in one process: a session's taps, which are process-wide, are in only while
its own loop steps.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sentinel_hooks
from sentinel_hooks.probes import activations, capture, places
from sentinel_hooks.seams.clip_tap import CLIP_TAP
from sentinel_hooks.seams.loss_tap import LOSS_TAP

Signals = sentinel_hooks.Signals
_LEFT_OUT = {"update_ratio": False, "clip_pressure": False, "memory": False, "pace": False}
NORMS = Signals(attention=False, activations=False, **_LEFT_OUT)
THREE = Signals(**_LEFT_OUT)  # norms, activations, attention
EVERY = 4  # heavy signals come that often here, so that few rounds hold some, and count as if ...
TENTH = 10  # ... they came that often
ALL = Signals(every=EVERY)

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


Make = Callable[[], tuple[Gpt, Tensor]]


def ten_million() -> tuple[Gpt, Tensor]:
    """256 tokens a step."""
    return Gpt(512, 8, 320, 5, 864, False), torch.randint(0, 512, (2, 128))


def ten_million_long() -> tuple[Gpt, Tensor]:
    """2,048 tokens a step."""
    return Gpt(512, 8, 320, 5, 864, False), torch.randint(0, 512, (4, 512))


def many_tensors() -> tuple[Gpt, Tensor]:
    """96 blocks, 1,059 tensors of 1 M parameters, 64 tokens a step."""
    return Gpt(64, 96, 32, 2, 64, True), torch.randint(0, 64, (2, 32))


MODELS: tuple[tuple[str, Make, int], ...] = (  # title, maker, rounds
    ("10 M parameters, 256 tokens", ten_million, 8),
    ("10 M parameters, 2,048 tokens", ten_million_long, 4),
    ("96 blocks, 1,059 tensors, 64 tokens", many_tensors, 12),
)

# ---------------------------------------------------------------- timing in place


class Meter:
    """CPU time of the calls that it wraps, less what they give back to torch."""

    def __init__(self) -> None:
        self.spent = 0
        self.calls = 0

    def timed(self, call: Callable[..., Any], sign: int = 1) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time_ns()
            try:
                return call(*args, **kwargs)
            finally:
                self.spent += sign * (time.process_time_ns() - start)
                self.calls += 1

        return run

    def take(self, per_call: float) -> float:
        """Nanoseconds since the last call, less the clock's own."""
        own = self.spent - self.calls * per_call
        self.spent = self.calls = 0
        return own


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
        start = time.process_time_ns()
        for _ in range(20_000):
            module(x)
        return time.process_time_ns() - start

    bare = min(calls() for _ in range(5))
    module.register_forward_hook(lambda m, a, o: None)
    return (min(calls() for _ in range(5)) - bare) / 20_000


@contextlib.contextmanager
def watched_hooks(meter: Meter, stock: Meter | None = None) -> Iterator[None]:
    """Hooks and replaced functions are timed, less the attention that they call for the user.

    Args:
        stock: what that attention costs, if somebody wants to know.
    """
    hooks = (places.Enter, places.Leave, activations._Out, activations.Edge)
    calls = [h.__call__ for h in hooks]
    attention, ours = capture._attention, F.scaled_dot_product_attention
    for hook, call in zip(hooks, calls, strict=True):
        hook.__call__ = meter.timed(call)  # type: ignore[method-assign]
    if ours is not attention:
        inner = attention if stock is None else stock.timed(attention)
        capture._attention = meter.timed(inner, -1)
        F.scaled_dot_product_attention = meter.timed(ours)  # type: ignore[assignment]
    try:
        yield
    finally:
        for hook, call in zip(hooks, calls, strict=True):
            hook.__call__ = call  # type: ignore[method-assign]
        capture._attention = attention
        F.scaled_dot_product_attention = ours


Parts = dict[str, float]


class Loop:
    """One model in a loop, attached or not.

    Attributes:
        attempt: the next step's number; heavy signals are due where it is a multiple of EVERY.
    """

    def __init__(
        self,
        make: Make,
        signals: Signals | None = None,
        clip: float = 0.0,
        *,
        plain: bool = False,
    ) -> None:
        """Attach with `signals`; None: not at all.

        Args:
            clip: the user's clip; 0 for none.
            plain: no clock in any hook, for somebody who times whole steps.
        """
        torch.manual_seed(0)
        self.model, self.ids = make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.parameters = list(self.model.parameters())
        self.clip = clip
        self.attempt = 0
        self.session: Any = None
        self._per_call, self._per_module = clock_ns(), dispatch_ns()
        self.meters = {n: Meter() for n in ("gate", "around", "hooks", "clip", "pass", "flat")}
        self.flat = torch.randn(sum(p.numel() for p in self.parameters))
        if signals is None:
            return
        self.session = sentinel_hooks.attach(
            model=self.model,
            optimizer=self.optimizer,
            sidecar=None,
            run_dir=tempfile.mkdtemp(),
            snapshots=sentinel_hooks.Snapshots(ram=False, disk=False),
            signals=signals,
        )
        if plain:
            self._leave()
            return
        session, observer = self.session, self.session._observer
        for owner, names, key in (
            (session, ("before_step", "after_step"), "gate"),
            (session, ("on_forward", "on_output", "zeroed"), "around"),
            (observer, ("before_backward", "after_backward"), "around"),
        ):
            for name in names:
                setattr(owner, name, self.meters[key].timed(getattr(owner, name)))
        self._leave()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """This session's process-wide taps are in, and nobody else's."""
        if self.session is None:
            yield
            return
        self._enter()
        try:
            yield
        finally:
            self._leave()

    @property
    def probes(self) -> dict[str, Any]:
        """By name."""
        return dict(self.session._probes._probes) if self.session is not None else {}

    def _enter(self) -> None:
        LOSS_TAP.subscribe(self.session._hooks.faint)
        CLIP_TAP.subscribe(self.session._hooks.faint)
        if "attention" in self.probes:
            capture.CAPTURE.subscribe(self.probes["attention"], list(self.model.modules()))

    def _leave(self) -> None:
        LOSS_TAP.unsubscribe(self.session._hooks.faint)
        CLIP_TAP.unsubscribe(self.session._hooks.faint)
        if "attention" in self.probes:
            capture.CAPTURE.unsubscribe(self.probes["attention"])

    def step(self, stock: Meter | None = None, look: Callable[[], None] | None = None) -> Parts:
        """One step; its parts in milliseconds of CPU time.

        Args:
            stock: for the time of the attention calls alone.
            look: called between backward and gate.
        """
        meters = self.meters
        with self._alone():
            start = time.process_time_ns()
            self.optimizer.zero_grad()
            with watched_hooks(meters["hooks"], stock):
                self.model(self.ids).backward()
            if look is not None:
                look()
            if self.session is None and not self.clip:
                grads = [p.grad for p in self.parameters]
                meters["pass"].timed(torch._foreach_norm)(grads, 2)
                meters["flat"].timed(torch.dot)(self.flat, self.flat)
            if self.clip:
                clip = meters["clip"].timed(torch.nn.utils.clip_grad_norm_)
                clip(self.parameters, self.clip)
            self.optimizer.step()
            whole = time.process_time_ns() - start
        hooked = [m for m in self.model.modules() if m._forward_hooks or m._forward_pre_hooks]
        timed = sum(m.spent for m in meters.values())
        parts = {name: m.take(self._per_call) / 1e6 for name, m in meters.items()}
        parts["hooks"] += len(hooked) * self._per_module / 1e6
        parts["whole"] = whole / 1e6
        parts["bare"] = (whole - timed) / 1e6
        parts["ours"] = parts["gate"] + parts["around"] + parts["hooks"]
        self.attempt += 1
        return parts

    @contextlib.contextmanager
    def taps(self) -> Iterator[None]:
        """For a step of somebody else's making."""
        with self._alone():
            yield

    def close(self) -> None:
        """Detach."""
        if self.session is not None:
            self._enter()
            self.session.detach()

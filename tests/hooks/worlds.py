"""Healthy training loops as users write them, and what a run leaves behind; nothing of ours here.

run = WORLDS["accumulation"](seed)
run.train(300, before_step=...)       the loop; batches come from the global generators
run.fingerprint()                     digests of all that a run ends with
run.reference_norms()                 float64 norms of the gradients as they are, by brute force
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ROWS, IN, HIDDEN = 32, 12, 24
Hook = Callable[[int], None]


def digest(*things: Any) -> str:
    """A hash of tensors, numbers and containers of them, bit for bit."""
    h = hashlib.sha256()

    def feed(value: Any) -> None:
        if isinstance(value, Tensor):
            value = value.detach().cpu()
            h.update(f"{value.dtype}{tuple(value.shape)}".encode())
            if value.is_sparse:
                feed(value.coalesce().indices())
                feed(value.coalesce().values())
            elif value.numel():
                h.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, np.ndarray):
            h.update(value.tobytes())
        elif isinstance(value, dict):
            for key in value:
                h.update(repr(key).encode() if not isinstance(key, Tensor) else b"p")
                feed(value[key])
        elif isinstance(value, list | tuple):
            h.update(b"[")
            for item in value:
                feed(item)
            h.update(b"]")
        else:
            h.update(repr(value).encode())

    for thing in things:
        feed(thing)
    return h.hexdigest()


def dice() -> str:
    """The state of every global generator."""
    return digest(
        torch.get_rng_state(), np.random.get_state()[1], np.random.get_state()[2], random.getstate()
    )


class Net(nn.Module):
    """Dropout draws, BatchNorm moves: everything that a careless observer would disturb."""

    def __init__(self, *, recompute: bool = False, dropout: float = 0.1, norm: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(IN, HIDDEN)
        self.block = nn.Sequential(
            nn.BatchNorm1d(HIDDEN) if norm else nn.Identity(),
            nn.Tanh(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.Dropout(dropout),
        )
        self.last = nn.Linear(HIDDEN, 1)
        self.recompute = recompute

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.recompute:
            hidden = checkpoint(self.block, hidden, use_reentrant=False)
        else:
            hidden = self.block(hidden)
        return F.mse_loss(self.last(hidden), y)


class Run:
    """One world: objects and the loop over them."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.consumed: list[str] = []
        self.scaler: Any = None
        self.build()
        self.forward: nn.Module = getattr(self, "forward", self.model)

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    schedulers: list[Any]

    def build(self) -> None:
        self.model = Net()
        self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=3e-3)]
        self.schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizers[0], 400)]

    def batch(self) -> tuple[Tensor, Tensor]:
        """From the global generators, as many loaders do."""
        x = torch.randn(ROWS, IN) + 0.1 * random.random() + 0.1 * np.random.rand()
        y = x.sum(1, keepdim=True).sin() + 2.0 + 0.5 * torch.randn(ROWS, 1)
        self.consumed.append(digest(x, y))
        return x, y

    def train(self, steps: int, before_step: Hook | None = None) -> None:
        for t in range(steps):
            self.step(t, before_step or (lambda _: None))
            for scheduler in self.schedulers:
                scheduler.step()

    def step(self, t: int, before_step: Hook) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.forward(*self.batch()).backward()
        before_step(t)
        for optimizer in self.optimizers:
            optimizer.step()

    def attach_options(self) -> dict[str, Any]:
        one = len(self.optimizers) == 1
        return {
            "model": self.forward,
            "optimizer": self.optimizers[0] if one else self.optimizers,
            "lr_scheduler": self.schedulers,
            "grad_scaler": self.scaler,
        }

    # -- what it leaves behind ---------------------------------------------------------------

    def fingerprint(self) -> dict[str, Any]:
        return {
            "parameters": digest(dict(self.model.named_parameters())),
            "buffers": digest(dict(self.model.named_buffers())),
            "optimizers": [digest(o.state_dict()) for o in self.optimizers],
            "schedulers": [digest(s.state_dict()) for s in self.schedulers],
            "scaler": digest(self.scaler.state_dict()) if self.scaler is not None else "",
            "dice": dice(),
            "consumed": digest(self.consumed),
            "gradients": digest([p.grad for p in self.model.parameters() if p.grad is not None]),
        }

    # -- the brute-force reference -----------------------------------------------------------

    def grad_scale(self) -> float:
        """What the gradients are still multiplied by when before_step is called."""
        return 1.0

    def reference_norms(self) -> tuple[float, dict[str, float]]:
        """Norms over all parameters and by owning module, summed in float64."""
        squares: dict[str, float] = {}
        seen: set[int] = set()
        scale = self.grad_scale()
        for name, module in self.model.named_modules():
            for p in module.parameters(recurse=False):
                if id(p) in seen:
                    continue
                seen.add(id(p))
                grad = p.grad
                square = 0.0
                if grad is not None:
                    if grad.is_sparse:
                        grad = grad.coalesce().values()
                    square = float((grad.double() / scale).square().sum())
                squares[name] = squares.get(name, 0.0) + square
        return math.sqrt(sum(squares.values())), {k: math.sqrt(v) for k, v in squares.items()}


class Plain(Run):
    """zero_grad, forward, backward, step."""


class Clipped(Run):
    """The reference is taken before the clip, as the norm must be."""

    def step(self, t: int, before_step: Hook) -> None:
        self.optimizers[0].zero_grad()
        self.forward(*self.batch()).backward()
        before_step(t)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizers[0].step()


class Accumulation(Run):
    """Four micro-batches a step."""

    def step(self, t: int, before_step: Hook) -> None:
        self.optimizers[0].zero_grad()
        for _ in range(4):
            (self.forward(*self.batch()) / 4).backward()
        before_step(t)
        self.optimizers[0].step()


class Scaled(Run):
    """GradScaler; the scale grows every 50 steps."""

    fused = False

    def build(self) -> None:
        super().build()
        if self.fused:
            self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=3e-3, fused=True)]
            self.schedulers = []
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=50)

    def grad_scale(self) -> float:
        return float(self.scaler.get_scale())

    def step(self, t: int, before_step: Hook) -> None:
        optimizer = self.optimizers[0]
        optimizer.zero_grad()
        self.scaler.scale(self.forward(*self.batch())).backward()
        before_step(t)
        self.scaler.step(optimizer)
        self.scaler.update()


class ScaledFused(Scaled):
    """The fused kernel unscales by itself: the gate sees scaled gradients."""

    fused = True


class TwoOptimizers(Run):
    """Matrices and vectors go to different optimizers; one backward feeds both."""

    def build(self) -> None:
        self.model = Net()
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]
        self.optimizers = [
            torch.optim.SGD(matrices, lr=1e-2, momentum=0.9),
            torch.optim.AdamW(vectors, lr=3e-3),
        ]
        self.schedulers = [torch.optim.lr_scheduler.StepLR(o, 100, 0.5) for o in self.optimizers]


class Lbfgs(Run):
    """A closure, called several times a step; its batch is fixed for the step."""

    def build(self) -> None:
        self.model = Net(dropout=0.0, norm=False)
        self.optimizers = [
            torch.optim.LBFGS(
                self.model.parameters(), max_iter=2, history_size=4, line_search_fn="strong_wolfe"
            )
        ]
        self.schedulers = []

    def step(self, t: int, before_step: Hook) -> None:
        x, y = self.batch()
        calls = 0

        def closure() -> Tensor:
            nonlocal calls
            self.optimizers[0].zero_grad()
            loss = self.forward(x, y)
            loss.backward()
            if calls == 0:
                before_step(t)
            calls += 1
            return loss

        self.optimizers[0].step(closure)


class Recomputed(Run):
    """Activation checkpointing: the block runs again inside backward."""

    def build(self) -> None:
        super().build()
        self.model = Net(recompute=True)
        self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=3e-3)]
        self.schedulers = []


class Compiled(Run):
    """torch.compile; the loop calls the wrapper."""

    backend = "aot_eager"

    def build(self) -> None:
        torch._dynamo.reset()
        super().build()
        self.forward = torch.compile(self.model, backend=self.backend, fullgraph=True)


class Inductor(Compiled):
    """The real backend."""

    backend = "inductor"


class Gan(Run):
    """Two models, two optimizers, stepped one after the other, each on its own loss."""

    def build(self) -> None:
        self.model = nn.ModuleDict({"g": nn.Linear(4, IN), "d": nn.Linear(IN, 1)})
        self.optimizers = [
            torch.optim.Adam(self.model["d"].parameters(), lr=1e-3),
            torch.optim.Adam(self.model["g"].parameters(), lr=1e-3),
        ]
        self.schedulers = []

    def attach_options(self) -> dict[str, Any]:
        options = super().attach_options()
        options["model"] = [self.model["g"], self.model["d"]]
        return options

    def step(self, t: int, before_step: Hook) -> None:
        g, d = self.model["g"], self.model["d"]
        real, _ = self.batch()
        fake = g(torch.randn(ROWS, 4))
        self.optimizers[0].zero_grad()
        (F.softplus(-d(real)).mean() + F.softplus(d(fake.detach())).mean()).backward()
        self.optimizers[0].step()
        self.optimizers[1].zero_grad()
        F.softplus(-d(fake)).mean().backward()
        self.optimizers[1].step()


class Sparse(Run):
    """An embedding with sparse gradients beside a dense head."""

    def build(self) -> None:
        self.model = nn.ModuleDict(
            {"embed": nn.Embedding(20, HIDDEN, sparse=True), "head": nn.Linear(HIDDEN, 1)}
        )
        self.optimizers = [
            torch.optim.SparseAdam(self.model["embed"].parameters(), lr=3e-3),
            torch.optim.AdamW(self.model["head"].parameters(), lr=3e-3),
        ]
        self.schedulers = []

    def step(self, t: int, before_step: Hook) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        i = torch.randint(20, (ROWS,))
        self.consumed.append(digest(i))
        out = self.model["head"](self.model["embed"](i))
        F.mse_loss(out, torch.ones_like(out) * 2 + 0.3 * torch.randn_like(out)).backward()
        before_step(t)
        for optimizer in self.optimizers:
            optimizer.step()


class Half(Run):
    """bfloat16 parameters and gradients: norms must be accumulated wider."""

    def build(self) -> None:
        super().build()
        self.model = Net(norm=False).to(torch.bfloat16)
        self.optimizers = [torch.optim.SGD(self.model.parameters(), lr=1e-2)]
        self.schedulers = []

    def batch(self) -> tuple[Tensor, Tensor]:
        x, y = super().batch()
        return x.to(torch.bfloat16), y.to(torch.bfloat16)


class Double(Run):
    """float64 parameters and gradients."""

    def build(self) -> None:
        super().build()
        self.model = self.model.double()
        self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=3e-3)]
        self.schedulers = []

    def batch(self) -> tuple[Tensor, Tensor]:
        x, y = super().batch()
        return x.double(), y.double()


WORLDS: dict[str, type[Run]] = {
    "plain": Plain,
    "clipped": Clipped,
    "accumulation": Accumulation,
    "scaler": Scaled,
    "scaler, fused": ScaledFused,
    "two optimizers": TwoOptimizers,
    "lbfgs": Lbfgs,
    "checkpointing": Recomputed,
    "aot_eager": Compiled,
    "inductor": Inductor,
    "gan": Gan,
    "sparse": Sparse,
    "bfloat16": Half,
    "float64": Double,
}


# ---------------------------------------------------------------- what hangs on whom


def inventory(run: Run) -> dict[str, Any]:
    """Everything that a hook could hang on, by identity."""
    found: dict[str, Any] = {}
    for name, owner, attribute in (
        ("backward", torch.autograd, "backward"),
        ("total norm", torch.nn.utils.clip_grad, "_get_total_norm"),
        ("clip internals", torch.nn.utils.clip_grad, "_clip_grads_with_norm_"),
        ("clip", torch.nn.utils.clip_grad, "clip_grad_norm_"),
        ("clip value", torch.nn.utils.clip_grad, "clip_grad_value_"),
        ("public total norm", torch.nn.utils, "get_total_norm"),
        ("public clip with norm", torch.nn.utils, "clip_grads_with_norm_"),
        ("public clip", torch.nn.utils, "clip_grad_norm_"),
        ("public clip value", torch.nn.utils, "clip_grad_value_"),
        ("attention", F, "scaled_dot_product_attention"),
    ):
        found[name] = id(getattr(owner, attribute))
    roots = {id(m): m for m in (run.model, run.forward)}
    for m, root in enumerate(roots.values()):
        for name, module in root.named_modules():
            found[f"module {m} {name}"] = _hanging(vars(module))
    for i, optimizer in enumerate(run.optimizers):
        found[f"optimizer {i}"] = _hanging(vars(optimizer))
        found[f"optimizer {i} groups"] = [sorted(g) for g in optimizer.param_groups]
    if run.scaler is not None:
        found["scaler"] = _hanging(vars(run.scaler))
    return found


def _hanging(attributes: dict[str, Any]) -> dict[str, Any]:
    """Names of all attributes; identities of what is callable or a table of hooks."""
    return {
        name: [id(v) for v in _items(value)] if "hooks" in name else _identity(value)
        for name, value in attributes.items()
    }


def _items(value: Any) -> Iterator[Any]:
    yield from value.values() if isinstance(value, dict) else (value,)


def _identity(value: Any) -> Any:
    # A bound method is made anew at each look; its function and its object are not.
    if hasattr(value, "__func__"):
        return id(value.__func__), id(value.__self__)
    return id(value) if callable(value) and not isinstance(value, nn.Module) else None

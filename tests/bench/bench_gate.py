"""What an attached session costs a training step of a 10 M-parameter GPT at 256 tokens.

    python -m tests.bench.bench_gate

Full steps cannot resolve 1 % on a shared machine: each of our hooks is timed where it runs, after a
real forward and backward, as CPU time, against the bare step (the same step less our hooks and less
the clip) of the same round. Rounds alternate in random order; medians of ratios.

Gate: norms, reduce, decide, act. Around it: marking gradients at backward, the safe point (which
settles and records the step before), recording a canary batch every fourth step. With the user's
clip, the clip and the gate together are compared with the stock clip alone.

The limit: one `torch._foreach_norm` over the gradients and nothing else, in an unattached loop of
the same round. No gate that measures every gradient can cost less.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

import sentinel_hooks
from sentinel_hooks.demo.model import GPT, Shape
from tests.bench.timing import machine, table

ROUNDS = 40
WARM = 5


class Small(nn.Module):
    """1059 small tensors: what many-layered models cost per tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(529))
        self.scale = nn.Parameter(torch.ones(48))

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.01 * layer(x)
        out: Tensor = (x * self.scale).square().mean()
        return out


STOCK = {name: getattr(clip_grad, name) for name in ("_get_total_norm", "_clip_grads_with_norm_")}


@contextlib.contextmanager
def stock() -> Iterator[None]:
    """Torch's own clip: the taps are process-wide, and other loops here are attached."""
    tapped = {name: getattr(clip_grad, name) for name in STOCK}
    for name, original in STOCK.items():
        setattr(clip_grad, name, original)
    try:
        yield
    finally:
        for name, tap in tapped.items():
            setattr(clip_grad, name, tap)


class Loop:
    """One model in a loop, its hooks timed where they run."""

    def __init__(self, model: nn.Module, batch: tuple[Tensor, Tensor], attach: bool) -> None:
        self.model, self.batch = model, batch
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        self.spent: dict[str, float] = {}
        self.session: Any = None
        if attach:
            self.session = sentinel_hooks.attach(
                model=model,
                optimizer=self.optimizer,
                sidecar=None,
                run_dir=tempfile.mkdtemp(),
                snapshots=sentinel_hooks.Snapshots(ram=False, disk=False),
            )
            observer = self.session._observer
            for owner, names, key in (
                (self.session, ("before_step", "after_step"), "gate"),
                (self.session, ("on_forward", "on_output", "zeroed"), "around"),
                (observer, ("before_backward", "after_backward"), "around"),
            ):
                for name in names:
                    setattr(owner, name, self.timed(getattr(owner, name), key))

    def timed(self, call: Callable[..., Any], key: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time_ns()
            try:
                return call(*args, **kwargs)
            finally:
                spent = (time.process_time_ns() - start) / 1e6
                self.spent[key] = self.spent.get(key, 0.0) + spent

        return run

    def step(self, clip: float) -> dict[str, float]:
        """Milliseconds of CPU time by part."""
        self.spent = {"gate": 0.0, "around": 0.0, "clip": 0.0, "pass": 0.0}
        start = time.process_time_ns()
        self.optimizer.zero_grad()
        self.model(*self.batch).backward()
        if not clip and self.session is None:
            grads = [p.grad for p in self.model.parameters()]
            self.timed(torch._foreach_norm, "pass")(grads, 2)
        if clip:
            with contextlib.nullcontext() if self.session is not None else stock():
                self.timed(torch.nn.utils.clip_grad_norm_, "clip")(self.model.parameters(), clip)
        self.optimizer.step()
        whole = (time.process_time_ns() - start) / 1e6
        return {**self.spent, "bare": whole - sum(self.spent.values())}


def measure(make: Callable[[], tuple[nn.Module, tuple[Tensor, Tensor]]]) -> list[tuple[str, ...]]:
    loops = {}
    for attached in (False, True):
        for clip in (0.0, 1e-3, 1e6):  # none, one that always scales, one that never does
            torch.manual_seed(0)
            loops[attached, clip] = Loop(*make(), attached)
    ratios: dict[str, list[float]] = {}
    against: dict[str, list[float]] = {}  # ours over the row it is to be compared with
    bare: list[float] = []
    for round_ in range(WARM + ROUNDS):
        order = list(loops)
        random.Random(round_).shuffle(order)
        found = {key: loops[key].step(key[1]) for key in order}
        if round_ < WARM:
            continue
        step = statistics.mean(part["bare"] for part in found.values())
        bare.append(step)
        alone, busy, idle = found[True, 0.0], found[True, 1e-3], found[True, 1e6]
        limit = found[False, 0.0]["pass"]
        compared = {
            "gate, no clip": (alone["gate"], limit),
            "the same + gate, attached": (
                busy["clip"] + busy["gate"],
                found[False, 1e-3]["clip"],
            ),
            "the same + gate, attached ": (
                idle["clip"] + idle["gate"],
                found[False, 1e6]["clip"],
            ),
        }
        for name, (ours, theirs) in compared.items():
            against.setdefault(name, []).append(ours / theirs)
        for name, value in (
            ("one pass over the gradients", limit),
            ("gate, no clip", alone["gate"]),
            ("around it", alone["around"]),
            ("stock clip that scales", found[False, 1e-3]["clip"]),
            ("the same + gate, attached", busy["clip"] + busy["gate"]),
            ("stock clip that need not", found[False, 1e6]["clip"]),
            ("the same + gate, attached ", idle["clip"] + idle["gate"]),
            ("around it, with clip", idle["around"]),
        ):
            ratios.setdefault(name, []).append(100 * value / step)
    for loop in loops.values():
        if loop.session is not None:
            loop.session.detach()
    step = statistics.median(bare)
    rows: list[tuple[str, ...]] = [("bare step", f"{step * 1000:.0f}", "100", "")]
    for name, values in ratios.items():
        share = statistics.median(values)
        x = f"{statistics.median(against[name]):.2f}" if name in against else ""
        rows.append((name, f"{share / 100 * step * 1000:.0f}", f"{share:.2f}", x))
    return rows


def gpt() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    model = GPT(Shape(width=320, heads=5, layers=8, rows=2, length=128))
    x = torch.randint(0, 200, (2, 128))
    return model, (x, x.roll(-1, 1))


def small() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    x = torch.randn(64, 48)
    return Small(), (x, x)


def main() -> None:
    torch.set_num_threads(1)
    head = ("part", "us", "% of bare step", "x pass or stock clip")
    for title, make in (("GPT, 10 M parameters, 256 tokens", gpt), ("1059 small tensors", small)):
        print(table(f"{title} ({machine()})", measure(make), head))
        print()


if __name__ == "__main__":
    main()

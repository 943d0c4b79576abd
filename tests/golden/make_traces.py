"""Make 20 labelled loss curves of real training runs: python -m tests.golden.make_traces OUT SEED

Each run trains a small byte-level GPT (137k parameters) on the Python standard library's own
sources, with AdamW, warm-up and cosine; a fault of its kind is put in at a step drawn from the
seed. Same files as the recorded traces have: `NAME.csv` (step, loss, grad_norm, lr) and
`labels.json` (kind, start, end by index).

The labels do not come from looking for spikes. From the fault on, a twin without it trains on the
same batches, and the excess of ln(loss) over the twin is the truth. An event begins where the
excess is conspicuous, above 8 % and above 7 robust standard deviations of the loss before the
fault; it ends when 5 points in a row are within 8 % of the twin; `points` counts its conspicuous
ones, for an event of 20 points that stick out once is hardly to be told from a lone outlier.

    N  the loss or gradient norm is not finite
    D  the excess is still there in the last 10 points
    S  it returns
    T  as S, but no longer than 2 points
    M  the fault was made, but its excess is never conspicuous
"""

from __future__ import annotations

import copy
import csv
import json
import math
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS, ROWS, TOKENS, WIDTH, BLOCKS, HEADS = 280, 8, 32, 64, 2, 4
EXCESS = 0.08  # ln(loss) above the twin
SETTLED = 5  # points in a row within it that end an event


@dataclass(frozen=True)
class Fault:
    """What goes wrong in steps [start, start + length)."""

    kind: str = "none"
    start: int = STEPS
    length: int = 0
    factor: float = 1.0

    def at(self, step: int) -> bool:
        return self.start <= step < self.start + self.length


@dataclass(frozen=True)
class Plan:
    """One run: its seed, its settings, its faults."""

    name: str
    seed: int
    lr: float = 3e-3
    rows: int = ROWS
    clip: float | None = 1.0
    faults: tuple[Fault, ...] = ()


@dataclass
class Curve:
    loss: list[float] = field(default_factory=list)
    norm: list[float] = field(default_factory=list)
    lr: list[float] = field(default_factory=list)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (
            part.view(b, t, HEADS, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(TOKENS, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def corpus() -> Tensor:
    """About 2 MB of Python: the top level of the standard library."""
    files = sorted(Path(statistics.__file__).parent.glob("*.py"))[:80]
    data = b"".join(path.read_bytes() for path in files)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def batch(plan: Plan, data: Tensor, step: int, *, garbage: bool) -> Tensor:
    """The batch of a step depends on seed and step only: the twin sees the same ones."""
    generator = torch.Generator().manual_seed(plan.seed * 100_003 + step)
    if garbage:
        return torch.randint(0, 256, (plan.rows, TOKENS + 1), generator=generator)
    at = torch.randint(0, len(data) - TOKENS - 1, (plan.rows,), generator=generator)
    return torch.stack([data[i : i + TOKENS + 1] for i in at.tolist()]).long()


def adamw(plan: Plan, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=plan.lr, betas=(0.9, 0.99), fused=True)


def train(
    plan: Plan,
    data: Tensor,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    faults: tuple[Fault, ...],
    before: Callable[[int], None] = lambda step: None,
) -> Curve:
    curve = Curve()
    params = list(model.parameters())
    for step in steps:
        before(step)
        active = {f.kind: f for f in faults if f.at(step)}
        lr = plan.lr * min((step + 1) / 30, 0.55 + 0.45 * math.cos(math.pi * step / STEPS))
        if "lr" in active:
            lr *= active["lr"].factor
        if "ramp" in active:
            lr *= active["ramp"].factor ** (step - active["ramp"].start)
        if "weights" in active:
            with torch.no_grad():
                model.blocks[-1].down.weight[:32] *= active["weights"].factor
        if "moments" in active:
            for state in optimizer.state.values():
                state["exp_avg_sq"].zero_()
        ids = batch(plan, data, step, garbage="garbage" in active)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        if "grad" in active:
            params[3].grad.view(-1)[0] = active["grad"].factor
        norm = nn.utils.clip_grad_norm_(params, plan.clip or math.inf)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        curve.loss.append(loss.item())
        curve.norm.append(norm.item())
        curve.lr.append(lr)
    return curve


def run(plan: Plan, data: Tensor) -> tuple[Curve, list[dict[str, Any]]]:
    """Train with the faults, and from the first fault on a twin without; the labelled events."""
    torch.manual_seed(plan.seed)
    model = Gpt()
    optimizer = adamw(plan, model)
    first = min((f.start for f in plan.faults), default=STEPS)
    twin: list[Any] = []

    def copy_at_the_fault(step: int) -> None:
        if step == first:
            twin.append(copy.deepcopy(model))
            other = adamw(plan, twin[0])
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            twin.append(other)

    curve = train(plan, data, model, optimizer, range(STEPS), plan.faults, copy_at_the_fault)
    if not plan.faults:
        return curve, []
    clean = train(plan, data, twin[0], twin[1], range(first, STEPS), ())
    return curve, label(plan, curve, curve.loss[:first] + clean.loss)


def label(plan: Plan, curve: Curve, clean: list[float]) -> list[dict[str, Any]]:
    """The events of a run; see the module docstring."""
    pairs = zip(curve.loss, curve.norm, strict=True)
    finite = [math.isfinite(loss) and math.isfinite(norm) for loss, norm in pairs]
    events = []
    starts = [f.start for f in plan.faults]
    for n, fault in enumerate(plan.faults):
        stop = starts[n + 1] if n + 1 < len(starts) else STEPS
        excess = [
            math.log(curve.loss[i] / clean[i]) if finite[i] else math.inf
            for i in range(fault.start, stop)
        ]
        conspicuous = max(EXCESS, 7 * noise(clean, fault.start))
        strong = [i for i, e in enumerate(excess) if e > conspicuous]
        if not strong:
            end = min(fault.start + fault.length, stop) - 1
            events.append({"kind": "M", "start": fault.start, "end": end, "points": 0})
            continue
        end, i = strong[0], strong[0]
        while i < len(excess) and i - end <= SETTLED:
            end = i if excess[i] > EXCESS else end
            i += 1
        # Or it fell back, and left for good later.
        leaves = stop == STEPS and statistics.median(excess[-2 * SETTLED :]) > EXCESS
        points = sum(i <= end for i in strong)
        if not finite[fault.start + strong[0]]:
            kind, end = "N", len(excess) - 1
        elif leaves:
            kind, end, points = "D", len(excess) - 1, len(strong)
        else:
            kind = "S" if end - strong[0] > 1 else "T"
        start = fault.start + strong[0]
        events.append({"kind": kind, "start": start, "end": fault.start + end, "points": points})
    return events


def noise(clean: list[float], at: int) -> float:
    """Robust standard deviation of ln(loss) about its running median, in 100 points before."""
    ys = [math.log(v) for v in clean[max(at - 100, 0) : at]]
    residuals = [y - statistics.median(ys[max(i - 7, 0) : i + 8]) for i, y in enumerate(ys)]
    centre = statistics.median(residuals)
    return 1.4826 * statistics.median(abs(r - centre) for r in residuals)


def plans(seed: int) -> list[Plan]:
    """20 runs: 4 without a fault, 3 with lone bad batches, 13 with worse."""
    rng = random.Random(seed)

    def at(low: int = 120, high: int = 170) -> int:
        return rng.randint(low, high)

    def garbage(start: int, length: int) -> Fault:
        return Fault("garbage", start, length)

    listed = [
        Plan("healthy", 0),
        Plan("healthy_lr", 0, lr=rng.choice([1e-3, 1e-2])),
        Plan("healthy_noisy", 0, rows=2),
        Plan("healthy_noclip", 0, clip=None),
        *(
            Plan(f"lone_batches_{i}", 0, faults=tuple(
                garbage(start + at(0, 12), rng.choice([1, 1, 2])) for start in (110, 160, 220)
            ))
            for i in (1, 2, 3)
        ),
        *(
            Plan(f"garbage_{i}", 0, faults=(garbage(at(), rng.randint(*span)),))
            for i, span in ((1, (5, 8)), (2, (9, 19)), (3, (20, 40)))
        ),
        Plan("weights_x300", 0, faults=(Fault("weights", at(), 1, 300.0),)),
        Plan("moments_lost", 0, lr=1e-2, faults=(Fault("moments", at(), 1),)),
        Plan("lr_burst", 0, faults=(Fault("lr", at(), rng.randint(3, 8), 200.0),)),
        Plan("lr_jump", 0, faults=(Fault("lr", at(), rng.randint(20, 60), 150.0),)),
        Plan("lr_x100", 0, faults=(Fault("lr", at(), STEPS, 100.0),)),
        Plan("lr_x300", 0, clip=None, faults=(Fault("lr", at(), STEPS, 300.0),)),
        Plan("lr_ramp", 0, clip=None, faults=(Fault("ramp", at(70, 90), STEPS, 1.04),)),
        Plan("weights_inf", 0, faults=(Fault("weights", at(), 1, math.inf),)),
        Plan("grad_nan", 0, faults=(Fault("grad", at(), 1, math.nan),)),
        Plan("grad_inf", 0, faults=(Fault("grad", at(), 1, math.inf),)),
    ]  # fmt: skip
    return [
        Plan(p.name, seed * 1000 + i, p.lr, p.rows, p.clip, p.faults) for i, p in enumerate(listed)
    ]


def make(folder: Path, seed: int) -> None:
    """Write the 20 traces and their labels into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    data = corpus()
    labels = {}
    for plan in plans(seed):
        curve, events = run(plan, data)
        with (folder / f"{plan.name}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["step", "loss", "grad_norm", "lr"])
            writer.writerows(
                (i, f"{loss:.6g}", f"{norm:.6g}", f"{lr:.6g}")
                for i, (loss, norm, lr) in enumerate(
                    zip(curve.loss, curve.norm, curve.lr, strict=True)
                )
            )
        labels[plan.name] = {"n": STEPS, "seed": plan.seed, "grad": True, "events": events}
    (folder / "labels.json").write_text(json.dumps(labels, indent=1), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m tests.golden.make_traces OUT SEED")
    torch.set_num_threads(1)
    make(Path(sys.argv[1]), int(sys.argv[2]))

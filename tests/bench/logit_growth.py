"""Attention logits of real GPTs as the learning rate rises: who speaks first, flag or loss?

    python -m tests.bench.logit_growth [--seeds 3]

A tiny GPT learns Python's own sources: at learning rates that are higher from run to run, and at
one that grows by the same factor at every step, until the run is ruined. Watched in `observe`, so
that nobody helps; each without and with QK-Norm, from several seeds. Steps at which

* the flag was raised: a layer's largest attention logit is above the policy's 50;
* the loss detector spoke, its first word at all (a lone outlier) and one of more than that (a spike
  that lasts, a drift, a loss that is no number);
* the run was ruined: the mean of the last 10 losses is 1 nat above the best such mean.

Not part of `make bench`: it trains for five minutes of CPU time. docs/signals.md has the table.

Units:   loss [nats/byte]; steps.
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sentinel_hooks
from sentinel.core.types import LAYER_ATTENTION_MAX_LOGIT, NOT_MEASURED
from sentinel.traces.reader import Reader
from sentinel_hooks.demo.corpus import VOCABULARY, Corpus
from tests.bench.timing import table

WIDTH, HEADS, LAYERS, ROWS, LENGTH = 48, 2, 3, 12, 32
WARM_UP = 40  # steps, linear
SMOOTH = 10  # losses that are averaged
RUINED = 1.0  # nats above the best
AFTERMATH = 40  # steps after that


class Block(nn.Module):
    def __init__(self, qk_norm: bool) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp_in = nn.Linear(WIDTH, 4 * WIDTH)
        self.mlp_out = nn.Linear(4 * WIDTH, WIDTH)
        head = WIDTH // HEADS
        self.q_norm = nn.RMSNorm(head) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(head) if qk_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(B, T, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, D))
        out: Tensor = x + self.mlp_out(F.gelu(self.mlp_in(self.norm_2(x))))
        return out


class Gpt(nn.Module):
    def __init__(self, qk_norm: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(qk_norm) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(inputs) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.reshape(-1))


@dataclass(frozen=True, slots=True)
class Rate:
    """A learning rate: `start`, times `growth` at every step after the warm-up."""

    start: float
    growth: float = 1.0

    def at(self, step: int) -> float:
        """The learning rate of `step`."""
        return self.start * min(1.0, (step + 1) / WARM_UP) * self.growth ** max(0, step - WARM_UP)

    def __str__(self) -> str:
        return f"{self.start:g}" + (f" x {self.growth:g} a step" if self.growth != 1.0 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run came to; a step is None where it never happened.

    Attributes:
        flag: a layer's attention logit was flagged.
        hot: the loss detector spoke for the first time, a lone outlier included.
        spoke: ... of more than that: a spike that lasts, a drift, a loss that is no number.
        ruined: the loss was RUINED above its best.
        largest: attention logit of any layer, so far as the run was not ruined.
        final: loss of the last steps.
    """

    flag: int | None
    hot: int | None
    spoke: int | None
    ruined: int | None
    largest: float
    final: float

    @property
    def flag_first(self) -> bool:
        """Flagged, and neither had the loss spoken nor was the run ruined."""
        others = [step for step in (self.hot, self.ruined) if step is not None]
        return self.flag is not None and self.flag < min(others, default=self.flag + 1)


LONE = "loss_outlier"
LASTING = ("loss_spike", "persistent_spike", "level_shift", "nonfinite_loss")


def train(rate: Rate, qk_norm: bool, seed: int, steps: int, run_dir: Path) -> Run:
    """Train once, watched and not helped."""
    torch.manual_seed(seed)
    model, corpus = Gpt(qk_norm), Corpus.load()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate.start, betas=(0.9, 0.95), weight_decay=0.1
    )
    session = sentinel_hooks.attach(
        model=model,
        optimizer=optimizer,
        mode="observe",
        sidecar=None,
        run_dir=run_dir,
        signals=sentinel_hooks.Signals(update_ratio=False, memory=False),
        snapshots=sentinel_hooks.Snapshots(ram=False, disk=False),
    )
    smooth: deque[float] = deque(maxlen=SMOOTH)
    best, ruined = math.inf, None
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate.at(step)
        inputs, targets = corpus.batch(seed, step, ROWS, LENGTH)
        optimizer.zero_grad()
        loss = model(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        smooth.append(loss.item())
        mean = sum(smooth) / len(smooth)
        best = min(best, mean) if len(smooth) == SMOOTH else best
        if not mean < best + RUINED:
            ruined = ruined or step
            if step >= ruined + AFTERMATH or not math.isfinite(mean):
                break
    session.detach()
    first: dict[str, int] = {}
    largest = NOT_MEASURED
    for record in Reader(session.directory).steps(columns=True):
        for finding in record.decision.findings:
            first.setdefault(finding.key, record.step)
        column = record.observation.columns.get(LAYER_ATTENTION_MAX_LOGIT)
        if column is not None and (ruined is None or record.step <= ruined):
            largest = max(largest, float(np.nanmax(column)))
    return Run(
        flag=first.get("attention_logit"),
        hot=_first(first, (LONE, *LASTING)),
        spoke=_first(first, LASTING),
        ruined=ruined,
        largest=largest,
        final=sum(smooth) / len(smooth),
    )


def _first(steps: dict[str, int], keys: Sequence[str]) -> int | None:
    return min((steps[key] for key in keys if key in steps), default=None)


def _median(values: Sequence[float | None], digits: int = 0) -> str:
    """The median of those that happened, and of how many; "-": in none."""
    there = [v for v in values if v is not None]
    if not there:
        return "-"
    text = f"{statistics.median(there):,.{digits}f}"
    return text if len(there) == len(values) else f"{text} ({len(there)} of {len(values)})"


def row(rate: Rate, qk_norm: bool, runs: Sequence[Run]) -> tuple[str, ...]:
    """A line of the table: medians over the seeds."""
    lead = [r.hot - r.flag for r in runs if r.hot is not None and r.flag is not None]
    return (
        str(rate),
        "yes" if qk_norm else "no",
        _median([r.flag for r in runs]),
        _median([r.hot for r in runs]),
        _median([r.spoke for r in runs]),
        _median([r.ruined for r in runs]),
        f"{sum(r.flag_first for r in runs)} of {len(runs)}",
        f"{min(lead)} to {max(lead)}" if lead else "-",
        _median([r.largest for r in runs], 1),
        _median([r.final for r in runs], 2),
    )


HEAD = (
    "learning rate",
    "QK-Norm",
    "flag",
    "loss, first word",
    "loss, lasting",
    "ruined",
    "flag first",
    "lead",
    "largest logit",
    "final loss",
)
# Rising within the run, then from run to run.
RAMPS = (Rate(2e-3, 1.005), Rate(2e-3, 1.01), Rate(1e-3, 1.02), Rate(1e-3, 1.08))
CONSTANT = tuple(Rate(lr) for lr in (1e-3, 1e-2, 1e-1))


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(prog="tests.bench.logit_growth")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1400, help="of a ramp, at most")
    parser.add_argument("--constant", type=int, default=300, help="steps at a constant rate")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    for title, rates, steps in (
        (f"ramps, until ruined or {given.steps} steps", RAMPS, given.steps),
        (f"constant after the warm-up, {given.constant} steps", CONSTANT, given.constant),
    ):
        rows = []
        for rate in rates:
            for qk_norm in (False, True):
                runs = []
                for seed in range(given.seeds):
                    with tempfile.TemporaryDirectory() as folder:
                        runs.append(train(rate, qk_norm, seed, steps, Path(folder)))
                    print(rate, "QK-Norm" if qk_norm else "", seed, runs[-1], file=sys.stderr)
                rows.append(row(rate, qk_norm, runs))
        print(table(f"{title}; medians of {given.seeds} seeds", rows, HEAD))
        print(flush=True)


if __name__ == "__main__":
    main()

"""Small GPTs that really have an illness, each beside a twin that differs in the illness only.

    python -m tests.acceptance.ill_models [--seeds 3] [--first 0] [flag ...]     the confusion table

Each is trained with a real optimizer and `sentinel.attach`, with every signal and every flag on
(those two that are off by default too), in mode observe: what is counted is which flags the engine
raised, and nothing is done that would hide the illness. Two things stand in for a machine that a
test does not have, and only these: a clock that counts the blocks that were computed (throughput),
and an allocator that adds up the tensors that the loop keeps (headroom).

Policy:  the default, but for these: both flags that are off are on, and a plateau is 128 steps long
         instead of 1,024.
Data:    the next of 32 tokens, each with its own few successors and some noise, so that the loss
         keeps falling for some hundred steps and scatters by a few percent.
"""

from __future__ import annotations

import argparse
import logging
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import sentinel_hooks
from sentinel.core import advice
from sentinel.core.policy import Policy
from sentinel_hooks import Signals

WORDS, WIDTH, HEADS = 32, 32, 2
POLICY = Policy.parse(
    """
mode = "observe"
[canary]
mode = "off"
[snapshots]
ram_every = 100000
disk_at = []
disk_every = 100000
[rules]
loss_swing = { mode = "act" }
loss_plateau = { mode = "act" }
[loss_shape]
segments = 8
length = 16
""",
    "ill",
)
ADVISORY = (*advice.FLAGS, "attention_logit", "update_ratio", "norm_band", "level_shift")


# ---------------------------------------------------------------- the model


@dataclass(frozen=True, kw_only=True)
class Build:
    """How the model is made."""

    blocks: int = 6
    norm: bool = True
    residual: bool = True
    qk_norm: bool = False
    std: float = 0.05
    qk_std: float = 0.05
    head_std: float = 0.1
    embed_std: float = 0.03
    relu: bool = False  # instead of GELU
    half: bool = False  # the residual stream, and so its gradient, is fp16
    mixing: str = ""  # of 4 residual streams: "free" or "doubly stochastic"


class Block(nn.Module):
    def __init__(self, build: Build, number: int) -> None:
        super().__init__()
        self.build = build
        self.norm_1 = nn.LayerNorm(WIDTH) if build.norm else nn.Identity()
        self.norm_2 = nn.LayerNorm(WIDTH) if build.norm else nn.Identity()
        self.qk = nn.Linear(WIDTH, 2 * WIDTH)
        self.v = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp_in = nn.Linear(WIDTH, 2 * WIDTH)
        self.mlp_out = nn.Linear(2 * WIDTH, WIDTH)
        if build.mixing:
            self.mixing = nn.Parameter(torch.eye(4) + 0.5 * torch.rand(4, 4))
            self.read = nn.Parameter(torch.rand(4) / 2)
            self.write = nn.Parameter(torch.rand(4) * 2)

    def branch(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        y = self.norm_1(x)
        q, k = self.qk(y).view(B, T, 2, HEADS, -1).permute(2, 0, 3, 1, 4)
        if self.build.qk_norm:
            q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
        v = self.v(y).view(B, T, HEADS, -1).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.out(y.transpose(1, 2).reshape(B, T, D))
        if not self.build.residual:
            return self.mlp(y)
        return y + self.mlp(x + y)

    def mlp(self, x: Tensor) -> Tensor:
        active = F.relu if self.build.relu else F.gelu
        out: Tensor = self.mlp_out(active(self.mlp_in(self.norm_2(x))))
        return out

    def mapping(self) -> Tensor:
        """[4, 4]; doubly stochastic: Sinkhorn's projection, as mHC constrains it."""
        if self.build.mixing == "free":
            return self.mixing
        m = self.mixing.abs()
        for _ in range(8):
            m = m / m.sum(1, keepdim=True)
            m = m / m.sum(0, keepdim=True)
        return m

    def forward(self, x: Tensor) -> Tensor:
        if self.build.mixing:  # [streams, B, T, D]
            streams = torch.einsum("ij,jbtd->ibtd", self.mapping(), x)
            own = self.branch(torch.einsum("j,jbtd->btd", self.read, x))
            return streams + torch.einsum("i,btd->ibtd", self.write, own)
        return x + self.branch(x) if self.build.residual else self.branch(x)


class Gpt(nn.Module):
    def __init__(self, build: Build) -> None:
        super().__init__()
        self.build = build
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(build, i) for i in range(build.blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif "mixing" not in name and p.dim() == 2:
                nn.init.normal_(p, std=build.std)
        nn.init.normal_(self.head.weight, std=build.head_std)
        nn.init.normal_(self.embed.weight, std=build.embed_std)
        for block in self.blocks:
            nn.init.normal_(block.qk.weight, std=build.qk_std)
        self.temperature = 1.0
        self.recompute = False
        self.computed = 0  # blocks

    def one(self, block: nn.Module, x: Tensor) -> Tensor:
        self.computed += 1
        out: Tensor = block(x)
        return out.half().float() if self.build.half else out

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids[:, :-1])
        if self.build.mixing:
            x = x.expand(4, *x.shape)
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(self.one, block, x, use_reentrant=False)
            else:
                x = self.one(block, x)
        if self.build.mixing:
            x = x.mean(0)
        logits = self.head(self.norm(x)) * self.temperature
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class Data:
    """A chain of which each token has 4 likely successors; one in eight is any token."""

    def __init__(self, seed: int) -> None:
        self.g = torch.Generator().manual_seed(seed)
        self.successors = torch.randint(0, WORDS, (WORDS, 4), generator=self.g)

    def batch(self, rows: int, length: int, noise: float) -> Tensor:
        ids = torch.empty(rows, length, dtype=torch.int64)
        ids[:, 0] = torch.randint(0, WORDS, (rows,), generator=self.g)
        choice = torch.randint(0, 4, (rows, length), generator=self.g)
        odd = torch.rand(rows, length, generator=self.g) < noise
        other = torch.randint(0, WORDS, (rows, length), generator=self.g)
        for t in range(1, length):
            ids[:, t] = torch.where(
                odd[:, t], other[:, t], self.successors[ids[:, t - 1], choice[:, t]]
            )
        return ids


# ---------------------------------------------------------------- the loop


Hook = Callable[[int, "Loop"], None]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run; `before` is called before each step, and is where an illness begins."""

    build: Build = Build()
    steps: int = 80
    rows: int = 16
    length: int = 17
    lr: float = 1e-3
    decay: float = 0.01
    clip: float = 0.0
    zero: bool = True
    scaler: bool = False
    before: Hook | None = None


class Loop:
    """A plain training loop, and what its hooks may reach."""

    def __init__(self, trial: Trial, seed: int) -> None:
        torch.manual_seed(seed)
        self.trial = trial
        self.model = Gpt(trial.build)
        self.data = Data(seed)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=trial.lr, weight_decay=trial.decay, fused=True
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20) if trial.scaler else None
        self.noise = 0.125
        self.micro_batches = 1
        self.divide = True
        self.kept: list[Tensor] = []

    def clock(self) -> float:
        return float(self.model.computed)

    def step(self) -> None:
        if self.trial.zero:
            self.optimizer.zero_grad()
        for _ in range(self.micro_batches):
            loss = self.model(self.data.batch(self.trial.rows, self.trial.length, self.noise))
            loss = loss / self.micro_batches if self.divide else loss
            (self.scaler.scale(loss) if self.scaler is not None else loss).backward()
        if self.trial.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.trial.clip)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


class Allocator:
    """What a device with room for `total` bytes would say: the tensors that the loop keeps."""

    total = 64 << 20

    def __init__(self, loop: Loop) -> None:
        self.loop = loop

    def memory_allocated(self, device: Any) -> int:
        lasting = sum(4 * p.nbytes for p in self.loop.model.parameters())
        return lasting + sum(t.nbytes for t in self.loop.kept)

    max_memory_allocated = memory_reserved = memory_allocated

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        return self.total - self.memory_allocated(device), self.total


def run(trial: Trial, seed: int = 0) -> Mapping[str, int]:
    """How often each flag was raised in a run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        loop = Loop(trial, seed)
        mixing = None
        if trial.build.mixing:
            mixing = lambda: [block.mapping() for block in loop.model.blocks]  # noqa: E731
        with tempfile.TemporaryDirectory() as folder:
            session = sentinel_hooks.attach(
                model=loop.model,
                optimizer=loop.optimizer,
                grad_scaler=loop.scaler,
                policy=POLICY,
                sidecar=None,
                run_dir=Path(folder),
                record=False,
                signals=Signals(every=1, residual_mixing=mixing),
            )
            stand_in(session, loop)
            for t in range(trial.steps):
                if trial.before is not None:
                    trial.before(t, loop)
                loop.step()
            counted = dict(session.status().counters.flags)
            session.detach()
        return {flag: n for flag, n in counted.items() if flag in ADVISORY}
    finally:
        torch.set_num_threads(before)


def stand_in(session: Any, loop: Loop) -> None:
    """A clock and an allocator that a CPU under test does not have."""
    session._probes.pace._clock = loop.clock
    memory = session._probes.memory
    memory._counters, memory._device = Allocator(loop), torch.device("cuda")


# ---------------------------------------------------------------- the illnesses


@dataclass(frozen=True, kw_only=True)
class Case:
    """An illness: `ill` is `twin` but for the one thing that `what` says."""

    flag: str
    what: str
    twin: Trial
    ill: Trial


def case(flag: str, what: str, twin: Trial, **change: Any) -> Case:
    """The ill one is the twin with `change`."""
    return Case(flag=flag, what=what, twin=twin, ill=replace(twin, **change))


def apart(loop: Loop, parameter: nn.Parameter, **settings: float) -> None:
    """A parameter group of its own."""
    group = loop.optimizer.param_groups[0]
    group["params"] = [p for p in group["params"] if p is not parameter]
    loop.optimizer.add_param_group({"params": [parameter], **settings})


def scale(loop: Loop, layer: str, factor: float) -> None:
    """That layer's weights, `factor` times as large."""
    with torch.no_grad():
        weight = loop.model.get_submodule(layer).weight
        assert isinstance(weight, Tensor)
        weight.mul_(factor)


def loud_block(t: int, loop: Loop) -> None:
    """From the start one block writes 3,000 times as much into the residual stream."""
    if t == 0:
        scale(loop, "blocks.4.mlp_out", 3000.0)


def loud_norm(t: int, loop: Loop) -> None:
    """From the start one norm's gain is 100."""
    if t == 0:
        scale(loop, "blocks.2.norm_2", 100.0)


def damaged(t: int, loop: Loop) -> None:
    """At step 60 one layer's weights become 100 times as large."""
    if t == 60:
        scale(loop, "blocks.2.out", 100.0)


def dead(t: int, loop: Loop) -> None:
    """One block's hidden units sit where GELU is flat."""
    if t == 0:
        nn.init.constant_(loop.model.get_submodule("blocks.2.mlp_in").bias, -4.0)


def dead_relu(t: int, loop: Loop) -> None:
    """One block's hidden units are all below 0, where ReLU lets nothing through."""
    if t == 0:
        nn.init.constant_(loop.model.get_submodule("blocks.2.mlp_in").bias, -30.0)


def shrink(t: int, loop: Loop) -> None:
    """The embedding's weight decay is far too strong: its gradient grows as it shrinks."""
    if t == 0:
        apart(loop, loop.model.embed.weight, weight_decay=80.0)


def hotter(t: int, loop: Loop) -> None:
    """From step 48 on the logits' scale doubles every 8 steps."""
    if t >= 48:
        loop.model.temperature *= 2.0 ** (1 / 8)


def much_hotter(t: int, loop: Loop) -> None:
    """From step 68 on it doubles every 4 steps."""
    if t >= 68:
        loop.model.temperature *= 2.0 ** (1 / 4)


def pile_up(t: int, loop: Loop) -> None:
    """Every 7th step has three micro-batches, whose gradients are added up and not divided."""
    loop.micro_batches, loop.divide = (3, False) if t % 7 == 3 else (1, True)


def divided(t: int, loop: Loop) -> None:
    """The same, divided."""
    loop.micro_batches = 3 if t % 7 == 3 else 1


def recompute(t: int, loop: Loop) -> None:
    """From step 120 on every block is computed again in the backward pass."""
    loop.model.recompute = t >= 120


def leak(t: int, loop: Loop) -> None:
    """Something keeps 1 MiB of every step alive, until a tenth of the device is left."""
    if t < 58:
        loop.kept.append(torch.empty(1 << 20, dtype=torch.int8))


def one_fast_layer(t: int, loop: Loop) -> None:
    """One layer's learning rate is 100 times that of the others."""
    if t == 0:
        fast = loop.model.get_submodule("blocks.2.mlp_in").weight
        apart(loop, fast, lr=100.0 * loop.trial.lr)


def odd_labels(t: int, loop: Loop) -> None:
    """From step 70 on half of the tokens are noise."""
    loop.noise = 0.5 if t >= 70 else 0.125


BASE = Trial()
LOOKS = replace(BASE, steps=132)  # three looks at the layers
BARE = replace(BASE, build=Build(norm=False))
STREAMS = replace(BASE, build=Build(mixing="doubly stochastic"))
HALF = replace(BASE, build=Build(half=True), scaler=True, steps=132)
EPOCHS = replace(BASE, before=divided, rows=8, steps=196)
EMBEDDED = replace(BASE, build=Build(embed_std=0.1), lr=1e-4, steps=500)
RELU = replace(BASE, build=Build(relu=True), steps=260)

SHORT_ROWS = replace(BASE, rows=32, length=9, steps=100)
QK_NORM = replace(BASE, build=Build(qk_norm=True, qk_std=1.0))
COLLAPSING = Build(norm=False, residual=False)

CASES: tuple[Case, ...] = (
    case("depth", "no norms, init 6 x too large", BARE, build=Build(norm=False, std=0.3)),
    case("depth", "no norms, no residuals", BARE, build=COLLAPSING),
    case("collapse", "no norms, no residuals", BARE, build=COLLAPSING),
    case("residual_gain", "one block writes 3,000 x too much", BASE, before=loud_block),
    case("residual_mixing", "mappings without a bound", STREAMS, build=Build(mixing="free")),
    case("layer_outlier", "one layer far below: its activation is dead", LOOKS, before=dead),
    case("layer_outlier", "one layer without a gradient: its ReLU is dead", RELU, before=dead_relu),
    case("layer_outlier", "one layer far above: its norm's gain x 100", LOOKS, before=loud_norm),
    case("layer_band", "one layer's weights x 100 at step 60", BASE, before=damaged),
    case("norm_trend", "weight decay shrinks the embedding", EMBEDDED, before=shrink),
    case("norm_band", "output layer's init 30 x too large", BASE, build=Build(head_std=3.0)),
    case("rising_together", "the logits' scale runs away", LOOKS, before=hotter),
    case("loss_swing", "micro-batch of 1, of 8 tokens", SHORT_ROWS, rows=1),
    case("loss_plateau", "learning rate 1/10,000", LOOKS, lr=1e-7),
    case("loss_period", "accumulated gradients not divided", EPOCHS, before=pile_up),
    case("stale_grads", "zero_grad forgotten", BASE, zero=False),
    case("loss_scale", "fp16, and the logits' scale runs away", HALF, before=much_hotter),
    case("throughput", "recomputation switched on", replace(BASE, steps=180), before=recompute),
    case("headroom", "1 MiB of each step is kept", BASE, before=leak),
    case("clip_pressure", "clipped to 0.1", replace(BASE, clip=10.0), clip=0.1),
    case("attention_logit", "large init without QK-Norm", QK_NORM, build=Build(qk_std=1.0)),
    case("update_ratio", "one layer's learning rate x 100", BASE, before=one_fast_layer),
    case("level_shift", "half of the tokens become noise", LOOKS, before=odd_labels),
)
TWINS: tuple[Trial, ...] = tuple(dict.fromkeys(each.twin for each in CASES))


# ---------------------------------------------------------------- the confusion table


@dataclass(frozen=True, kw_only=True)
class Row:
    """What became of a case over some seeds."""

    case: Case
    flagged: int
    missed: int
    quiet: int  # twins without any flag
    false: tuple[str, ...]  # flags raised in a twin, whichever
    others: tuple[str, ...]  # flags raised in an ill one beside its own


def table(seeds: Sequence[int], only: Sequence[str] = ()) -> Iterator[Row]:
    """One row a case; a twin that several cases share is trained once."""
    trained: dict[tuple[Trial, int], Mapping[str, int]] = {}

    def flags(trial: Trial, seed: int) -> Mapping[str, int]:
        if (trial, seed) not in trained:
            trained[trial, seed] = run(trial, seed)
        return trained[trial, seed]

    for each in CASES:
        if only and each.flag not in only:
            continue
        ill = [flags(each.ill, seed) for seed in seeds]
        twin = [flags(each.twin, seed) for seed in seeds]
        flagged = sum(each.flag in found for found in ill)
        yield Row(
            case=each,
            flagged=flagged,
            missed=len(seeds) - flagged,
            quiet=sum(not found for found in twin),
            false=tuple(sorted({f for found in twin for f in found})),
            others=tuple(sorted({f for found in ill for f in found if f != each.flag})),
        )


HEAD = (
    "| flag | illness | ill flagged | ill missed | twin quiet | twin flagged | also raised |\n"
    "|---|---|---|---|---|---|---|"
)


def line(row: Row) -> str:
    """A row of the table in Markdown."""
    flagged = row.flagged + row.missed - row.quiet
    false = f"{flagged} ({', '.join(row.false)})" if row.false else "0"
    return (
        f"| `{row.case.flag}` | {row.case.what} | {row.flagged} | {row.missed} | {row.quiet} "
        f"| {false} | {', '.join(f'`{f}`' for f in row.others)} |"
    )


def main(arguments: Sequence[str]) -> int:
    """Print the table; 1 when a cell is not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m tests.acceptance.ill_models")
    parser.add_argument("flags", nargs="*", help="only these")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args(arguments)
    logging.disable(logging.ERROR)  # what sentinel says of ill runs
    seeds = range(options.first, options.first + options.seeds)
    where = f"torch {torch.__version__}, {platform.machine()}"
    print(f"seeds {seeds.start} to {seeds.stop - 1}, {where}\n\n{HEAD}")
    bad = 0
    for row in table(seeds, options.flags):
        print(line(row), flush=True)
        bad += row.missed + len(row.false)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

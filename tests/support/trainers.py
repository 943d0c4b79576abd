"""Small real runs of each framework, with faults; imports torch, and a framework only to build it.

    world = WORLDS["hf"](Cell(steps=40, accumulation=4, nan_at={20}), tmp_path)
    session = sentinel.attach(**world.attach_options(), ...)     the trainer, or the objects
    world.train()
    world.fingerprint()      digests of parameters, optimizer, scheduler, dice, consumed batches
    world.losses             by hand: the mean loss of each step [nats/token]
    world.weights            digest of the parameters in the first forward of each step
    world.leftovers()        names of what of sentinel's still hangs anywhere

A world of ranks is the same one in each process: give `Cell(rank=, world=)`, what the framework
needs in `options` (merged into TrainingArguments, lightning.Trainer or Accelerator), and `wrap` (a
function of the module: DistributedDataParallel, fully_shard) for loops that wrap by themselves.

Faults sit in data and weights, so that they are the same in every framework. nan_at: steps whose
last micro-batch has a finite loss and NaN gradients. garbage_at: steps of random labels. damage_at:
the step before which all weights are multiplied by `damage`, once. Each only on `fault_ranks`, if
that is given; damage on all.
"""

from __future__ import annotations

import gc
import math
import random
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.hooks.worlds import dice, digest

V, WIDTH, HEADS, LENGTH, ROWS = 24, 32, 4, 12, 32
IGNORED = -100


@dataclass(frozen=True)
class Cell:
    """One run; see the module."""

    steps: int = 40
    accumulation: int = 1
    clip: float | None = None
    compiled: str = ""  # a backend of torch.compile
    seed: int = 3
    lr: float = 1e-2
    nan_at: Collection[int] = ()
    garbage_at: Collection[int] = ()
    damage_at: int | None = None
    damage: float = 2.5
    rank: int = 0
    world: int = 1
    fault_ranks: Collection[int] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    wrap: Callable[[nn.Module], nn.Module] | None = None

    @property
    def faulty(self) -> bool:
        return self.fault_ranks is None or self.rank in self.fault_ranks


# ---------------------------------------------------------------- data


class Corpus(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of a language with one law: a permutation nine times in ten, chance otherwise.

    Some targets are missing (-100), another number in each row: a mean over tokens is not the mean
    of means.
    """

    def __init__(self, rows: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        law = torch.randperm(V, generator=g)
        x = torch.randint(V, (rows, LENGTH), generator=g)
        chance = torch.randint(V, (rows, LENGTH), generator=g)
        y = torch.where(torch.rand(rows, LENGTH, generator=g) < 0.9, law[x], chance)
        missing = torch.rand(rows, LENGTH, generator=g) < 0.4 * torch.rand(rows, 1, generator=g)
        self.x, self.y = x, y.masked_fill(missing, IGNORED)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.x[i], "labels": self.y[i]}


class Collate:
    """Makes batches, in the order of the loop; keeps digests of them, and spoils some."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.consumed: list[str] = []

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        cell = self.cell
        batch = {k: torch.stack([r[k] for r in rows]) for k in ("input_ids", "labels")}
        step, micro = divmod(len(self.consumed), cell.accumulation)
        self.consumed.append(digest(batch))
        poison = torch.zeros(len(rows))
        if cell.faulty and step in cell.nan_at and micro == cell.accumulation - 1:
            poison[0] = math.nan
        if cell.faulty and step in cell.garbage_at:
            g = torch.Generator().manual_seed(step)
            batch["labels"] = torch.randint(V, batch["labels"].shape, generator=g)
        return {**batch, "poison": poison}


# ---------------------------------------------------------------- model


class _Poison(torch.autograd.Function):
    """Changes nothing on the way there; on the way back, NaN where the batch is poisoned."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, poison: Tensor) -> Tensor:
        ctx.save_for_backward(poison)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (poison,) = ctx.saved_tensors
        return grad * (1.0 + poison.sum()), None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.05)

    def forward(self, h: Tensor) -> Tensor:
        b, n, _ = h.shape
        q, k, v = self.qkv(self.norm(h)).view(b, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(mixed.transpose(1, 2).reshape(b, n, WIDTH))
        out: Tensor = h + self.drop(self.down(F.gelu(self.up(self.norm(h)))))
        return out


class TinyLM(nn.Module):
    """Two blocks of width 32; returns its loss as HF models do.

    Attributes:
        heard: (sum of the loss, tokens) of each training forward; empty when compiled.
        seen: digest of the parameters in each training forward; likewise.
    """

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(V, WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, V)
        self.heard: list[tuple[float, int]] = []
        self.seen: list[str] = []

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        poison: Tensor | None = None,
        num_items_in_batch: Any = None,
        **_: Any,
    ) -> dict[str, Tensor]:
        h = self.embed(input_ids) + self.place
        for block in self.blocks:
            h = block(h)
        logits = self.head(h)
        if labels is None:
            return {"logits": logits}
        total = F.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        tokens = labels.ne(IGNORED).sum()
        if not torch.compiler.is_compiling() and self.training and torch.is_grad_enabled():
            self.heard.append((float(total.detach()), int(tokens)))
            self.seen.append(_digest_of(self))
        loss = total / (tokens if num_items_in_batch is None else num_items_in_batch)
        if poison is not None:
            loss = _Poison.apply(loss, poison)
        return {"loss": loss, "logits": logits}


def _digest_of(model: nn.Module) -> str:
    if any(type(p) is not nn.Parameter for p in model.parameters()):
        return ""  # sharded, or gathered for this forward only
    return digest([p.detach() for p in model.parameters()])


# ---------------------------------------------------------------- worlds


class World:
    """One run of one framework."""

    name = ""
    token_mean = False  # the step's loss is a mean over its tokens, not over its micro-batches

    def __init__(self, cell: Cell, directory: Path) -> None:
        gc.collect()  # what an earlier run left
        self.cell = cell
        self.directory = directory
        self.batches = 0
        self.before_step: Callable[[int], None] | None = None
        self.after_train: Callable[[], None] | None = None
        torch.manual_seed(cell.seed)
        random.seed(cell.seed)
        np.random.seed(cell.seed)
        self.corpus = Corpus(ROWS * 64, cell.seed)
        self.collate = Collate(cell)
        if cell.compiled:
            torch._dynamo.reset()
        self.model = TinyLM(cell.seed)
        self.trainer: Any = None
        self.build()

    # -- for each framework ------------------------------------------------------------------

    def build(self) -> None:
        raise NotImplementedError

    def train(self) -> None:
        raise NotImplementedError

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        raise NotImplementedError

    @property
    def schedulers(self) -> list[Any]:
        raise NotImplementedError

    def attach_options(self) -> dict[str, Any]:
        return {"trainer": self.trainer}

    def hangers(self) -> dict[str, Any]:
        """Objects of the framework on which something could hang."""
        return {}

    # -- for the loops -----------------------------------------------------------------------

    def loader(self) -> torch.utils.data.DataLoader[Any]:
        sampler = None
        if self.cell.world > 1:
            sampler = torch.utils.data.DistributedSampler(
                self.corpus, self.cell.world, self.cell.rank, seed=self.cell.seed
            )
        return torch.utils.data.DataLoader(
            self.corpus,
            batch_size=ROWS,
            shuffle=sampler is None,
            sampler=sampler,
            collate_fn=self.collate,
            drop_last=True,
        )

    def forever(self) -> Iterator[dict[str, Tensor]]:
        loader = self.loader()
        while True:
            yield from loader

    def before_batch(self) -> None:
        """Each loop calls it before each micro-batch."""
        step, micro = divmod(self.batches, self.cell.accumulation)
        self.batches += 1
        if micro:
            return
        if step == self.cell.damage_at:
            with torch.no_grad():
                for p in self.model.parameters():
                    p.mul_(self.cell.damage)
        if self.before_step is not None:
            self.before_step(step)

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.cell.lr, weight_decay=0.01)

    def make_scheduler(self, optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda t: 1.0 - 0.5 * t / (self.cell.steps + 1)
        )

    # -- what it leaves ----------------------------------------------------------------------

    def fingerprint(self) -> dict[str, Any]:
        return {
            "parameters": digest(dict(self.model.named_parameters())),
            "optimizers": [digest(o.state_dict()) for o in self.optimizers],
            "schedulers": [digest(_plain(s.state_dict())) for s in self.schedulers],
            "consumed": digest(self.collate.consumed),
            "dice": dice(),
        }

    @property
    def losses(self) -> list[float]:
        """The mean loss of each step, by hand [nats/token]; of this rank's share."""
        k = self.cell.accumulation
        steps = [self.model.heard[i : i + k] for i in range(0, len(self.model.heard), k)]
        if self.token_mean:
            return [sum(s for s, _ in step) / sum(n for _, n in step) for step in steps]
        return [sum(s / n for s, n in step) / len(step) for step in steps]

    @property
    def weights(self) -> list[str]:
        """The parameters in the first forward of each step."""
        return self.model.seen[:: self.cell.accumulation]

    def leftovers(self) -> list[str]:
        """What of sentinel's hangs on torch, modules, optimizers or the framework's objects."""
        things: dict[str, Any] = {
            "torch.autograd": torch.autograd,
            "torch.nn.utils": torch.nn.utils,
            "clip_grad": torch.nn.utils.clip_grad,
            "functional": F,
            **self.hangers(),
        }
        for name, module in self.model.named_modules():
            things[f"module {name}"] = module
        for i, optimizer in enumerate(self.optimizers):
            things[f"optimizer {i}"] = optimizer
        found = []
        for name, thing in things.items():
            for attribute, value in list(vars(thing).items()):
                values: list[Any] = [value]
                if isinstance(value, dict):
                    values += list(value.values())
                elif isinstance(value, list | tuple):
                    values += list(value)
                if any(_is_ours(v) for v in values):
                    found.append(f"{name}.{attribute}")
        return found


def _is_ours(value: Any) -> bool:
    kind = value if isinstance(value, type) else type(value)
    function = getattr(value, "__func__", value)
    code = getattr(function, "__code__", None)
    return str(getattr(kind, "__module__", "")).startswith("sentinel_hooks") or (
        code is not None and "sentinel_hooks" in code.co_filename
    )


def _plain(state: Any) -> dict[str, Any]:
    return {k: v for k, v in state.items() if isinstance(v, int | float | list) and v is not None}


class Plain(World):
    """A loop as users write it."""

    name = "plain"

    def build(self) -> None:
        wrap = self.cell.wrap
        self.forward: nn.Module = wrap(self.model) if wrap is not None else self.model
        if self.cell.compiled:
            self.forward = torch.compile(self.forward, backend=self.cell.compiled)
        self.optimizer = self.make_optimizer(self.forward.parameters())
        self.scheduler = self.make_scheduler(self.optimizer)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer]

    @property
    def schedulers(self) -> list[Any]:
        return [self.scheduler]

    def attach_options(self) -> dict[str, Any]:
        return {
            "model": self.forward,
            "optimizer": self.optimizer,
            "lr_scheduler": self.scheduler,
        }

    def train(self) -> None:
        k, batches = self.cell.accumulation, self.forever()
        for _ in range(self.cell.steps):
            self.optimizer.zero_grad()
            for _ in range(k):
                batch = next(batches)
                self.before_batch()
                (self.forward(**batch)["loss"] / k).backward()
            if self.cell.clip is not None:
                torch.nn.utils.clip_grad_norm_(self.forward.parameters(), self.cell.clip)
            self.optimizer.step()
            self.scheduler.step()


class Accelerate(World):
    """accelerate.Accelerator; `early` attaches before prepare()."""

    name = "accelerate"
    early = False

    def build(self) -> None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState, PartialState

        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        cell = self.cell
        options: dict[str, Any] = {"cpu": True, "gradient_accumulation_steps": cell.accumulation}
        if cell.compiled:
            options["dynamo_backend"] = cell.compiled
        self.trainer = Accelerator(**{**options, **cell.options})
        self.inner = self.make_optimizer(self.model.parameters())
        self.raw = (
            self.model,
            self.inner,
            torch.utils.data.DataLoader(
                self.corpus, ROWS, shuffle=True, collate_fn=self.collate, drop_last=True
            ),
            self.make_scheduler(self.inner),
        )
        self.prepared: Any = None
        if not self.early:
            self.prepare()

    def prepare(self) -> None:
        self.prepared = self.trainer.prepare(*self.raw)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.inner]

    @property
    def schedulers(self) -> list[Any]:
        return [self.raw[3]]

    def hangers(self) -> dict[str, Any]:
        return {"accelerator": self.trainer, "model": self.prepared[0]}

    def train(self) -> None:
        if self.prepared is None:
            self.prepare()
        forward, optimizer, loader, scheduler = self.prepared
        done = 0
        while done < self.cell.steps:
            for batch in loader:
                self.before_batch()
                with self.trainer.accumulate(forward):
                    self.trainer.backward(forward(**batch)["loss"])
                    if self.trainer.sync_gradients and self.cell.clip is not None:
                        self.trainer.clip_grad_norm_(forward.parameters(), self.cell.clip)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                done += bool(self.trainer.sync_gradients)
                if done == self.cell.steps:
                    break


class HuggingFace(World):
    """transformers.Trainer."""

    name = "hf"
    token_mean = True

    def build(self) -> None:
        from accelerate.state import AcceleratorState, GradientState, PartialState
        from transformers import Trainer, TrainerCallback, TrainingArguments

        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        cell, world = self.cell, self

        class Before(TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                world.before_batch()

            def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
                world.before_batch()

        options: dict[str, Any] = {
            "output_dir": str(self.directory / "hf"),
            "max_steps": cell.steps,
            "per_device_train_batch_size": ROWS,
            "gradient_accumulation_steps": cell.accumulation,
            "max_grad_norm": cell.clip or 0.0,
            "learning_rate": cell.lr,
            "seed": cell.seed,
            "report_to": [],
            "use_cpu": True,
            "save_strategy": "no",
            "disable_tqdm": True,
            "logging_steps": 10,
            "remove_unused_columns": False,
            "dataloader_drop_last": True,
        }
        if cell.compiled:
            options |= {"torch_compile": True, "torch_compile_backend": cell.compiled}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.trainer = self.trainer_class(Trainer)(
                model=self.model,
                args=TrainingArguments(**{**options, **cell.options}),
                train_dataset=self.corpus,
                eval_dataset=Corpus(ROWS * 2, cell.seed + 1),
                data_collator=self.collate,
                callbacks=[Before()],
            )

    def trainer_class(self, base: Any) -> Any:
        return base

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        optimizer = self.trainer.optimizer
        return [] if optimizer is None else [getattr(optimizer, "optimizer", optimizer)]

    @property
    def schedulers(self) -> list[Any]:
        return [self.trainer.lr_scheduler] if self.trainer.lr_scheduler is not None else []

    def hangers(self) -> dict[str, Any]:
        return {
            "trainer": self.trainer,
            "callbacks": self.trainer.callback_handler,
            "accelerator": self.trainer.accelerator,
            "model": self.trainer.model_wrapped,
        }

    def train(self, **options: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.trainer.train(**options)


def _lightning_module(world: Lightning) -> Any:
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.lm = world.model
            self.automatic_optimization = not world.manual

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
            loss = self.lm(**batch)["loss"]
            if not world.cell.compiled:  # torch 2.13 cannot trace Lightning 2.6's log()
                self.log("loss", loss)
            if self.automatic_optimization:
                return loss
            k = world.cell.accumulation
            optimizer = self.optimizers()
            if batch_idx % k == 0:
                optimizer.zero_grad()
            self.manual_backward(loss / k)
            if batch_idx % k == k - 1:
                if world.cell.clip is not None:
                    self.clip_gradients(optimizer, gradient_clip_val=world.cell.clip)
                optimizer.step()
                self.lr_schedulers().step()
            return None

        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            self.log("checked", self.lm(**batch)["loss"])

        def configure_model(self) -> None:
            if world.cell.wrap is not None:
                world.cell.wrap(self.lm)

        def configure_optimizers(self) -> Any:
            optimizer = world.make_optimizer(self.parameters())
            scheduler = world.make_scheduler(optimizer)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return Module()


class Lightning(World):
    """lightning.Trainer with automatic optimisation."""

    name = "lightning"
    manual = False

    def build(self) -> None:
        import lightning

        cell, world = self.cell, self

        class Before(lightning.Callback):  # type: ignore[misc]
            def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
                world.before_batch()

        options: dict[str, Any] = {
            "max_steps": cell.steps,
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(self.directory / "lightning"),
            "callbacks": [Before()],
        }
        if not self.manual:
            options |= {
                "accumulate_grad_batches": cell.accumulation,
                "gradient_clip_val": cell.clip,
            }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.trainer = lightning.Trainer(**{**options, **cell.options})
        self.module = _lightning_module(self)
        self.fitted = self.module
        if cell.compiled:
            self.fitted = torch.compile(self.module, backend=cell.compiled)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return list(self.trainer.optimizers)

    @property
    def schedulers(self) -> list[Any]:
        return [config.scheduler for config in self.trainer.lr_scheduler_configs]

    def hangers(self) -> dict[str, Any]:
        return {
            "trainer": self.trainer,
            "strategy": self.trainer.strategy,
            "module": self.module,
            "callbacks": _Holder(self.trainer.callbacks),
        }

    def train(self, **options: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.trainer.fit(self.fitted, self.loader(), **options)


class LightningManual(Lightning):
    """... with manual optimisation."""

    name = "lightning-manual"
    manual = True


class _Holder:
    def __init__(self, things: Any) -> None:
        self.things = list(things)


WORLDS: dict[str, type[World]] = {
    world.name: world for world in (Plain, Accelerate, HuggingFace, Lightning, LightningManual)
}

# Detectors that have seen enough after a dozen steps and forgot the steep start by step 24.
QUICK = """
[spike]
window = 16
warmup = 12
[grad_norm]
window = 24
warmup = 12
[snapshots]
ram_every = 8
confirm = 4
disk_at = []
disk_every = 1000
[rollback]
quiet = 6
[lr]
hold = 2
rewarm = 6
"""


def frameworks_present() -> bool:
    """All of them are installed."""
    import importlib.util as found

    return all(found.find_spec(name) for name in ("transformers", "lightning", "accelerate"))


def loaded() -> set[str]:
    """Frameworks that this process has imported."""
    return {"transformers", "lightning", "accelerate"} & set(sys.modules)

"""Hand-written torch loops that say what a run must look like; imports nothing of ours.

    by_hand(job, data, never_apply={7})            skipping, as a careful person would write it
    gain_for(job, data, at=9, ratio=20.0, ...)     the batch whose gradient is 20 x the mean
    rescued(world, batches, plan)                  skipping, restoring and cutting the rate by hand

Two runs are equal when the digests of everything that training moves are equal: parameters,
buffers, optimizer state and settings, scheduler, scaler, and (where asked) the global RNG.

A *job* is a tiny regression for one optimizer class in one variant; the list of jobs is made from
`torch.optim` itself, so that a class of a later torch cannot be forgotten: it is in the list, or
listing raises. A *world* is a small next-symbol language model with faults, see worlds.py.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import struct
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

torch.set_num_threads(1)


# ---- equality --------------------------------------------------------------


def _feed(h: Any, value: Any) -> None:
    """Every bit of `value` into the hash, with its type and place."""
    if isinstance(value, Tensor):
        dense = value.detach()
        if dense.is_sparse:
            dense = dense.coalesce().to_dense()
        h.update(f"T{dense.dtype}{tuple(dense.shape)}".encode())
        h.update(dense.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        h.update(f"M{len(value)}".encode())
        for key in sorted(value, key=repr):
            h.update(repr(key).encode())
            _feed(h, value[key])
    elif isinstance(value, list | tuple):
        h.update(f"L{len(value)}".encode())
        for item in value:
            _feed(h, item)
    elif isinstance(value, float):
        h.update(b"F" + struct.pack("<d", value))
    else:
        h.update(f"V{type(value).__name__}{value!r}".encode())


def digest(*values: Any) -> str:
    """The same text for bitwise equal values, and only for them."""
    h = hashlib.blake2b(digest_size=12)
    for value in values:
        _feed(h, value)
    return h.hexdigest()


def weights_and_moments(model: nn.Module, *optimizers: torch.optim.Optimizer) -> str:
    """Digest of what a skipped step may not move: parameters and optimizer state."""
    return digest(dict(model.named_parameters()), [o.state_dict()["state"] for o in optimizers])


# ---- every optimizer class that steps on the CPU -----------------------------


class Dense(nn.Module):
    """Matrices and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


class Matrices(nn.Module):
    """Two-dimensional parameters only (Muon refuses others)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(5, 7, bias=False), nn.Tanh(), nn.Linear(7, 3, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


class Sparse(nn.Module):
    """One table with sparse gradients (SparseAdam refuses others)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 3, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        rows = ((x[:, 0].nan_to_num() * 3).long() % 11).clamp(0, 10)
        out: Tensor = self.table(rows) + 0.0 * x.sum()  # a nan in x reaches the loss
        return out


MODELS: tuple[type[nn.Module], ...] = (Dense, Matrices, Sparse)


@dataclass(frozen=True)
class OptimizerCase:
    """One class of torch.optim, in one variant, on the first model that it can train."""

    cls: type[torch.optim.Optimizer]
    variant: str  # "for-loop", "foreach", "fused" or "only"
    model: type[nn.Module]
    closure: bool
    options: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        return f"{self.cls.__name__}-{self.variant}"

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.cls(list(model.parameters()), **dict(self.options))


def classes() -> list[type[torch.optim.Optimizer]]:
    """Every optimizer class that `torch.optim` offers under its own name."""
    found = [
        value
        for value in vars(torch.optim).values()
        if isinstance(value, type)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
    ]
    return sorted(set(found), key=lambda cls: cls.__name__)


def _steps(cls: type[torch.optim.Optimizer], kind: type[nn.Module], **options: Any) -> str:
    """How `cls` moves this model on the CPU: "plain", "closure", or "" when it does not."""
    for how in ("plain", "closure"):
        torch.manual_seed(0)
        model = kind()
        before = digest(dict(model.named_parameters()))
        try:
            optimizer = cls(list(model.parameters()), **options)

            def closure() -> Tensor:
                optimizer.zero_grad()  # noqa: B023
                loss = (model(torch.ones(2, 5)) - 1).square().mean()  # noqa: B023
                loss.backward()
                return loss

            if how == "closure":
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        except (RuntimeError, ValueError, TypeError):
            continue
        if digest(dict(model.named_parameters())) != before:
            return how
    return ""


def optimizer_cases() -> list[OptimizerCase]:
    """All classes x foreach/fused where offered.

    Raises:
        LookupError: a class steps on none of our models: it would silently go untested.
    """
    cases = []
    for cls in classes():
        known = inspect.signature(cls.__init__).parameters
        base: dict[str, Any] = {"lr": 0.02}
        if "momentum" in known and cls.__name__ != "Muon":  # not in the lowest torch
            base["momentum"] = 0.9  # a zeroed gradient would move the momentum: a skip may not
        if "weight_decay" in known:
            base["weight_decay"] = 0.1  # likewise the decay
        if "max_iter" in known:
            base |= {"max_iter": 2, "lr": 0.005}  # its steps are long: noise must not blow it up
        variants: dict[str, dict[str, Any]] = {}
        if "foreach" in known:
            variants |= {"for-loop": {"foreach": False}, "foreach": {"foreach": True}}
        if "fused" in known:
            variants["fused"] = {"fused": True}
        offered = 0
        for variant, extra in (variants or {"only": {}}).items():
            options = base | extra
            for kind in MODELS:
                how = _steps(cls, kind, **options)
                if how:
                    break
            else:
                continue  # this variant is not offered on the CPU
            offered += 1
            cases.append(
                OptimizerCase(cls, variant, kind, how == "closure", tuple(options.items()))
            )
        if not offered:
            raise LookupError(
                f"torch.optim.{cls.__name__} moved none of {[m.__name__ for m in MODELS]}; "
                "give it a model in MODELS, or its skip goes untested"
            )
    return cases


# ---- skipping by hand ----------------------------------------------------------


@dataclass(frozen=True)
class Micro:
    """One micro-batch; `gain` multiplies its gradient and leaves its loss value alone."""

    x: Tensor
    y: Tensor
    gain: float = 1.0


Step = tuple[Micro, ...]


@dataclass(frozen=True)
class JobSpec:
    """One cell of the matrix."""

    case: OptimizerCase
    accumulation: int = 1
    scaler: bool = False
    seed: int = 0


class Job:
    """A fresh model, optimizer, scheduler and scaler for a cell: equal for equal specs."""

    def __init__(self, spec: JobSpec) -> None:
        torch.manual_seed(spec.seed)
        self.spec = spec
        self.model = spec.case.model()
        self.optimizer = spec.case.build(self.model)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 1.0 / (1.0 + 0.05 * step)
        )
        self.scaler = (
            torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=5)
            if spec.scaler
            else None
        )

    def loss(self, micro: Micro) -> Tensor:
        """The micro-batch's share of the step's loss."""
        loss: Tensor = (self.model(micro.x) - micro.y).square().mean() / self.spec.accumulation
        if micro.gain != 1.0:
            loss = loss + (micro.gain - 1.0) * (loss - loss.detach())
        return loss

    def backward(self, micro: Micro) -> Tensor:
        loss = self.loss(micro)
        (self.scaler.scale(loss) if self.scaler is not None else loss).backward()
        return loss.detach()

    def closure(self, step: Step) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            return torch.stack([self.backward(micro) for micro in step]).sum()

        return closure

    def fragile(self) -> str:
        return weights_and_moments(self.model, self.optimizer)

    def everything(self) -> str:
        return digest(
            self.model.state_dict(),
            self.optimizer.state_dict(),
            self.scheduler.state_dict(),
            self.scaler.state_dict() if self.scaler is not None else None,
        )


def regression(spec: JobSpec, steps: int) -> list[Step]:
    """Noisy batches of a fixed linear law, so that the gradient norm stays level."""
    g = torch.Generator().manual_seed(1000 + spec.seed)
    law = torch.randn(5, 3, generator=g)

    def micro() -> Micro:
        x = torch.randn(16, 5, generator=g)
        return Micro(x, x @ law * 0.3 + torch.randn(16, 3, generator=g))

    return [tuple(micro() for _ in range(spec.accumulation)) for _ in range(steps)]


def with_nan(step: Step, which: int) -> Step:
    """The same step with a nan in micro-batch `which`."""
    x = step[which].x.clone()
    x[0, 0] = float("nan")
    return (*step[:which], replace(step[which], x=x), *step[which + 1 :])


def with_gain(step: Step, gain: float) -> Step:
    """The same step with all its gradients multiplied by `gain`."""
    return tuple(replace(micro, gain=gain) for micro in step)


def grad_norm(model: nn.Module, scale: float = 1.0) -> float:
    """The global norm in float64, tensor by tensor."""
    total = 0.0
    for p in model.parameters():
        if p.grad is not None:
            grad = p.grad.detach()
            grad = grad.coalesce().values() if grad.is_sparse else grad
            total += float((grad.double() / scale).square().sum())
    return float(total**0.5)


def by_hand(
    job: Job, data: Sequence[Step], never_apply: Collection[int] = (), factor: float = 1.0
) -> list[float]:
    """Train; a batch in `never_apply` is computed and thrown away, its scheduler step is kept.

    Args:
        factor: multiply each step's learning rate, for that step only.

    Returns:
        the norm of each step's gradient, before anything is done with it.
    """
    norms = []
    for t, step in enumerate(data):
        scheduled = [group["lr"] for group in job.optimizer.param_groups]
        if factor != 1.0:
            for group in job.optimizer.param_groups:
                group["lr"] = group["lr"] * factor
        job.optimizer.zero_grad()
        scale = job.scaler.get_scale() if job.scaler is not None else 1.0
        if job.spec.case.closure:
            job.closure(step)()
            norms.append(grad_norm(job.model, scale))
            if t not in never_apply:
                job.optimizer.step(job.closure(step))
        else:
            for micro in step:
                job.backward(micro)
            norms.append(grad_norm(job.model, scale))
            if job.scaler is None:
                if t not in never_apply:
                    job.optimizer.step()
            else:
                if t in never_apply:
                    job.scaler.unscale_(job.optimizer)  # lets update() see an overflow
                else:
                    job.scaler.step(job.optimizer)
                job.scaler.update()
        for group, lr in zip(job.optimizer.param_groups, scheduled, strict=True):
            group["lr"] = lr
        with warnings.catch_warnings():  # torch warns of a scheduler before any optimizer step
            warnings.simplefilter("ignore", UserWarning)
            job.scheduler.step()
    return norms


def gain_for(spec: JobSpec, data: Sequence[Step], at: int, ratio: float, window: int) -> float:
    """What to multiply step `at`'s gradient by, to make it `ratio` x the mean of the last ones."""
    norms = by_hand(Job(spec), data[: at + 1], never_apply={at})
    recent = norms[:at][-window:]
    return ratio * (sum(recent) / len(recent)) / norms[at]


# ---- rescuing by hand ------------------------------------------------------------


@dataclass
class World:
    """Everything that one training run moves.

    Attributes:
        groups: the optimizers of one step, each with its scheduler; all step at each step.
        loss: the loss of one micro-batch, made from the model's training-mode forward.
    """

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    schedulers: list[Any]
    loss: Callable[[nn.Module, Any], Tensor]
    scaler: torch.amp.GradScaler | None = None
    forward: nn.Module | None = None  # what is called, when it is not the model (compiled)
    clip: float | None = None

    def backward(self, batch: Any, share: float) -> Tensor:
        loss = self.loss(self.forward if self.forward is not None else self.model, batch) * share
        (self.scaler.scale(loss) if self.scaler is not None else loss).backward()
        return loss.detach()

    def fragile(self) -> str:
        return weights_and_moments(self.model, *self.optimizers)

    def restorable(self) -> Saved:
        """A deep copy of what a rollback must bring back."""
        return Saved(
            copy.deepcopy(dict(self.model.state_dict())),
            [copy.deepcopy(o.state_dict()["state"]) for o in self.optimizers],
            dict(self.scaler.state_dict()) if self.scaler is not None else None,
        )

    def everything(self) -> str:
        return digest(
            self.model.state_dict(),
            [o.state_dict() for o in self.optimizers],
            [s.state_dict() for s in self.schedulers],
            self.scaler.state_dict() if self.scaler is not None else None,
        )


@dataclass(frozen=True)
class Saved:
    """A copy of weights, buffers, moments and scaler: not of rates, which follow the schedule."""

    model: dict[str, Tensor]
    moments: list[Any]
    scaler: dict[str, Any] | None

    def digest(self) -> str:
        return digest(self.model, self.moments, self.scaler)

    def put_back(self, world: World) -> None:
        with torch.no_grad():
            for name, value in world.model.state_dict().items():
                value.copy_(self.model[name])
        for optimizer, moments in zip(world.optimizers, self.moments, strict=True):
            groups = [dict(g) for g in optimizer.param_groups]
            now = optimizer.state_dict()
            optimizer.load_state_dict(
                {"state": copy.deepcopy(moments), "param_groups": now["param_groups"]}
            )
            for group, kept in zip(optimizer.param_groups, groups, strict=True):
                group.update({k: v for k, v in kept.items() if k != "params"})
        if world.scaler is not None and self.scaler is not None:
            world.scaler.load_state_dict(self.scaler)


@dataclass(frozen=True)
class Plan:
    """What a careful person would have done, by step.

    Attributes:
        skip: steps whose gradient is thrown away.
        restore: before this step's forward, put back the copy made before that step's.
        rate: multiply this step's learning rate.
        damage: done to the world between the previous step and this one's forward.
        spoil_rate: the fault: this step's learning rate is multiplied by the user's own hand.
    """

    skip: frozenset[int] = frozenset()
    restore: Mapping[int, int] = field(default_factory=dict)
    rate: Mapping[int, float] = field(default_factory=dict)
    damage: Mapping[int, Callable[[World], None]] = field(default_factory=dict)
    spoil_rate: Mapping[int, float] = field(default_factory=dict)


def rescued(world: World, batches: Iterable[Sequence[Any]], plan: Plan) -> list[float]:
    """Train `world` on all batches in order, doing by hand what the plan says.

    Returns:
        the loss of each step.
    """
    wanted = set(plan.restore.values())
    kept: dict[int, Saved] = {}
    losses = []
    for t, step in enumerate(batches):
        if t in plan.damage:
            plan.damage[t](world)
        if t in plan.restore:
            kept[plan.restore[t]].put_back(world)
        if t in wanted:
            kept[t] = world.restorable()
        for optimizer in world.optimizers:
            optimizer.zero_grad()
        running = [
            (buffer, buffer.clone())
            for layer in world.model.modules()
            if isinstance(layer, nn.modules.batchnorm._BatchNorm)
            for buffer in layer.buffers()
        ]
        losses.append(float(torch.stack([world.backward(b, 1 / len(step)) for b in step]).sum()))
        for optimizer in world.optimizers:
            if world.scaler is not None:
                world.scaler.unscale_(optimizer)
        if world.clip is not None:
            nn.utils.clip_grad_norm_(world.model.parameters(), world.clip)
        factor = plan.rate.get(t, 1.0) * plan.spoil_rate.get(t, 1.0)
        for optimizer in world.optimizers:
            if t in plan.skip:
                continue
            rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                if factor != 1.0:
                    group["lr"] = group["lr"] * factor
            if world.scaler is not None:
                world.scaler.step(optimizer)
            else:
                optimizer.step()
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        if world.scaler is not None:
            world.scaler.update()
        if t in plan.skip:  # its forward taught BatchNorm already: that is taken back
            with torch.no_grad():
                for buffer, before in running:
                    buffer.copy_(before)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            for scheduler in world.schedulers:
                scheduler.step()
    return losses

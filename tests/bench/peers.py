"""What other tools cost a training step, beside ours, on the same model in the same process.

    print(report("10 M parameters, 256 tokens", ten_million, 12))     bench_signals.py does

Those that are installed: `pip install --group bench`. Composer's OptimizerMonitor is not among
them: it wants a torch before 2.7.1.

Whole steps as CPU time, attached and not: other tools cannot be timed in place. Each tool has a
model of its own, as has the bare loop, and all take turns in random order; medians of the ratios to
the bare step of the same round. A second bare loop says what the ratios are worth. Each tool is set
up as its page says, to look at every step; what it does in processes of its own is not counted.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.bench.loop import ALL, NORMS, THREE, Loop, Make
from tests.bench.timing import machine, table

WARM = 2
Silent = contextlib.redirect_stdout


def _nothing(*_: Any) -> None:
    return None


@dataclass
class Peer:
    """A tool in a loop: what is called when, and whose step() is the optimizer's."""

    optimizer: Any
    begin: Callable[[], Any] = _nothing
    gradients: Callable[[Tensor], Any] = _nothing  # before the optimizer's step; gets the loss
    end: Callable[[], Any] = _nothing
    close: Callable[[], Any] = _nothing


def _wandb(log: str) -> Callable[[Loop], Peer]:
    def attach(loop: Loop) -> Peer:
        import wandb  # type: ignore[import-not-found,unused-ignore]

        run = wandb.run or wandb.init(
            project="bench",
            mode="offline",
            dir=tempfile.mkdtemp(),
            settings=wandb.Settings(silent=True, x_disable_stats=True, console="off"),
        )
        wandb.watch(loop.model, log=log, log_freq=1)
        return Peer(
            loop.optimizer,
            end=lambda: run.log({"step": 1.0}),
            close=lambda: wandb.unwatch(loop.model),
        )

    return attach


def _lightning(loop: Loop) -> Peer:
    from lightning.pytorch.utilities import grad_norm

    return Peer(loop.optimizer, gradients=lambda _: grad_norm(loop.model, 2))


def _module_monitor(loop: Loop) -> Peer:
    from torch_module_monitor import (  # type: ignore[import-not-found,unused-ignore]
        ModuleMonitor,
    )

    monitor = ModuleMonitor(monitor_step_fn=lambda step: True)
    monitor.set_module(loop.model)
    monitor.add_gradient_metric("l2", lambda g: g.norm())
    monitor.add_parameter_metric("l2", lambda p: p.norm())
    blocks = r"blocks\.\d+$"
    monitor.add_activation_metric("rms", lambda x: x.float().pow(2).mean().sqrt(), blocks)
    monitor.add_activation_metric("absmax", lambda x: x.abs().max(), blocks)
    steps = iter(range(1 << 30))

    def gradients(_: Tensor) -> None:
        monitor.monitor_gradients()
        monitor.monitor_parameters()
        monitor.after_micro_batch()
        monitor.end_step()

    return Peer(loop.optimizer, begin=lambda: monitor.begin_step(next(steps)), gradients=gradients)


def _stabilityguard(loop: Loop) -> Peer:
    from stabilityguard import (  # type: ignore[import-not-found,unused-ignore]
        GuardedOptimizer,
    )

    guarded = GuardedOptimizer(
        loop.optimizer,
        loop.model,
        verbose=False,
        log_dir=tempfile.mkdtemp(),
        spike_threshold=1e9,
    )
    return Peer(guarded, close=guarded.close)


def _arc_vigil(loop: Loop) -> Peer:
    from arc_vigil import BendexMonitor  # type: ignore[import-not-found,unused-ignore]

    monitor = BendexMonitor(loop.model)
    steps = iter(range(1 << 30))
    return Peer(loop.optimizer, gradients=lambda _: monitor.observe(next(steps)))


def _trainpulse(loop: Loop) -> Peer:
    from trainpulse import Monitor  # type: ignore[import-not-found,unused-ignore]

    monitor, parameters = Monitor(), list(loop.model.parameters())
    steps = iter(range(1 << 30))

    def gradients(loss: Tensor) -> None:
        step = next(steps)
        grads = [p.grad for p in parameters if p.grad is not None]
        monitor.log("grad_norm", step, float(torch.nn.utils.get_total_norm(grads)))
        monitor.log("loss", step, float(loss))

    return Peer(loop.optimizer, gradients=gradients)


def _trainscope(loop: Loop) -> Peer:
    from trainscope import (  # type: ignore[import-not-found,unused-ignore]
        TrainScope,
        TrainScopeConfig,
    )

    config = TrainScopeConfig(run_dir=tempfile.mkdtemp())
    scope = TrainScope(loop.model, loop.optimizer, config=config).attach()
    steps = iter(range(1 << 30))

    def gradients(loss: Tensor) -> None:
        scope.step(float(loss), batch_index=next(steps))

    return Peer(loop.optimizer, gradients=gradients, close=scope.detach)


def _gradviz(loop: Loop) -> Peer:
    from gradviz import GradViz  # type: ignore[import-not-found,unused-ignore]

    viz = GradViz(loop.model)
    viz.attach()
    return Peer(loop.optimizer, end=viz.step, close=viz.detach)


PEERS: tuple[tuple[str, str, Callable[[Loop], Peer]], ...] = (
    ("wandb.watch, gradients", "wandb", _wandb("gradients")),
    ("wandb.watch, all", "wandb", _wandb("all")),
    ("Lightning grad_norm", "lightning", _lightning),
    ("torch-module-monitor, norms and blocks", "torch_module_monitor", _module_monitor),
    ("stabilityguard", "stabilityguard", _stabilityguard),
    ("arc-vigil", "arc_vigil", _arc_vigil),
    ("trainpulse, loss and total norm", "trainpulse", _trainpulse),
    ("trainscope", "trainscope", _trainscope),
    ("gradviz", "gradviz", _gradviz),
)


def _step(loop: Loop, peer: Peer) -> float:
    """Milliseconds of CPU time of a whole step."""
    with loop.taps():
        start = time.process_time_ns()
        peer.begin()
        peer.optimizer.zero_grad()
        loss = loop.model(loop.ids)
        loss.backward()
        peer.gradients(loss)
        peer.optimizer.step()
        peer.end()
        spent = time.process_time_ns() - start
    loop.attempt += 1
    return spent / 1e6


def report(title: str, make: Make, rounds: int) -> str:
    """The table."""
    os.environ.setdefault("WANDB_MODE", "offline")
    os.environ.setdefault("WANDB_SILENT", "true")
    rows: list[tuple[str, ...]] = []
    loops: dict[str, tuple[Loop, Peer]] = {}
    for name, signals in (
        ("nothing", None),
        ("nothing, once more", None),
        ("ours, norms only", NORMS),
        ("ours, norms + activations + attention", THREE),
        ("ours, everything, to disk", ALL),
    ):
        loop = Loop(make, signals, plain=True)
        loops[name] = (loop, Peer(loop.optimizer))
    missing: list[tuple[str, ...]] = []
    quiet, level = io.StringIO(), logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings(), Silent(quiet):
        warnings.simplefilter("ignore")
        for name, module, attach in PEERS:
            try:
                importlib.import_module(module)
                loop = Loop(make, None, plain=True)
                peer = attach(loop)
                _step(loop, peer)
                loops[name] = (loop, peer)
            except ImportError:
                missing.append((name, "not installed", ""))
            except Exception as error:
                missing.append((name, f"fails: {type(error).__name__}", ""))
        spent: dict[str, list[float]] = {name: [] for name in loops}
        for round_ in range(WARM + rounds):
            order = list(loops)
            random.Random(round_).shuffle(order)
            for name in order:
                took = _step(*loops[name])
                if round_ >= WARM:
                    spent[name].append(took)
        for loop, peer in loops.values():
            peer.close()
            loop.close()
    logging.disable(level)
    bare = spent["nothing"]
    for name, steps in spent.items():
        ratio = statistics.median(a / b for a, b in zip(steps, bare, strict=True))
        rows.append((name, f"{statistics.median(steps):.1f}", f"{ratio:.3f}"))
    head = ("tool", "step, ms", "x the bare step")
    at = machine().partition(";")[0]
    what = f"{title}: whole steps ({at}; CPU time, medians of {rounds} rounds)"
    return table(what, [*rows, *missing], head)

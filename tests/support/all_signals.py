"""A long attached run of a tiny GPT with every signal on, that tells what is alive.

    python -m tests.support.all_signals RUN_DIR STEPS EVERY

Prints a JSON object a line, every EVERY steps: step, resident MiB, live tensors, objects that the
garbage collector knows, and graphs of autograd that are still there when the step is over. One
layer's attention logits are far above the threshold, another's are near it, one's are small; now
and then a gradient is not finite, so that skipped steps take part.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sentinel_hooks
from sentinel_hooks import Signals
from sentinel_hooks.demo.model import GPT, Shape
from tests.support.marathon import resident_mib

SHAPE = Shape(width=16, heads=2, layers=3, rows=2, length=16)
ALIVE: weakref.WeakSet[Token] = weakref.WeakSet()


class Token:
    """Held by a node of a graph, and by nothing else."""


class Beacon(torch.autograd.Function):
    """The identity; its node in the graph holds a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.token = Token()
        ALIVE.add(ctx.token)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad


class Watched(GPT):
    """With a beacon at the bottom of its graph."""

    def __init__(self) -> None:
        super().__init__(SHAPE)
        self.tokens.register_forward_hook(lambda module, args, out: Beacon.apply(out))
        with torch.no_grad():
            for block, largest in zip(self.blocks, (80.0, 44.0, 1.0), strict=True):
                # A normed input has this length; queries and keys are what it is times the weights.
                norm: Any = block.norm_attention
                qkv: Any = block.qkv
                qkv.weight[: 2 * SHAPE.width].copy_(torch.eye(SHAPE.width).repeat(2, 1))
                head = SHAPE.width // SHAPE.heads
                norm.weight.fill_((largest / head**0.5) ** 0.5)


def alive() -> dict[str, int]:
    """After a collection."""
    gc.collect()
    objects = gc.get_objects()
    return {
        "tensors": sum(issubclass(type(o), Tensor) for o in objects),
        "objects": len(objects),
        "graphs": len(ALIVE),
    }


def main() -> None:
    """See the module docstring."""
    directory, steps, every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    model = Watched()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    session = sentinel_hooks.attach(
        model=model,
        optimizer=optimizer,
        sidecar=None,
        run_dir=directory,
        run_id="all-signals",
        signals=Signals(every=5),
    )
    for step in range(steps + 1):
        ids = torch.randint(0, 256, (SHAPE.rows, SHAPE.length + 1), generator=g)
        optimizer.zero_grad()
        model(ids[:, :-1], ids[:, 1:]).backward()
        if step % 400 == 333:
            _spoil(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if step % every == 0:
            print(json.dumps({"step": step, "mib": resident_mib(), **alive()}), flush=True)
    status = session.status()
    probe: Any = session._probes._probes["attention"]
    levels = [int(place.level) for _, place in probe._places if place.measurements]
    session.detach()
    print(
        json.dumps(
            {
                "skipped": sum(n for _, n in status.counters.skipped),
                "flags": dict(status.counters.flags),
                "levels": levels,
                "errors": dict(status.internal_errors),
                "blind": [str(spot) for spot in status.blind_spots],
            }
        )
    )


def _spoil(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.fill_(float("nan"))


if __name__ == "__main__":
    main()

"""What was compiled before attach() is seen, or named as blind with a way out that holds.

A compiled module keeps the hooks that it had when it was compiled, so ours never run in it. Loss,
gradient norm, clipping and updates are measured outside of the model's code and are seen all the
same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sentinel_hooks
from sentinel.core.types import (
    LAYER_ACTIVATION_RMS,
    LAYER_ATTENTION_MAX_LOGIT,
    LAYER_GRAD_NORM,
    LAYER_UPDATE_RATIO,
)
from sentinel.traces.reader import Reader
from sentinel_hooks import Signals, Snapshots

pytestmark = [pytest.mark.torch, pytest.mark.slow]
WIDTH, STEPS = 8, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, 2, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).reshape(B, T, D)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.attn(x)
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Loop:
    """A model that is compiled, and has run, before it is watched."""

    def __init__(self, run_dir: Path, *, inner: bool = False, **signals: bool) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Model()
        # Without guards nothing of ours makes it compile anew, as replacing a function does.
        keep: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
        self.call: Callable[[Tensor], Tensor] = torch.compile(
            model, backend="eager", fullgraph=True, options=keep
        )
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.parameters = list(model.parameters())
        self.step()
        self.session = sentinel_hooks.attach(
            model=model if inner else self.call,
            optimizer=self.optimizer,
            sidecar=None,
            run_dir=run_dir,
            snapshots=Snapshots(ram=False, disk=False),
            signals=Signals(every=2, **signals),
        )

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.call(torch.arange(12).view(2, 6)).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1e-3)
        self.optimizer.step()

    def blind(self) -> dict[str, str]:
        """what -> way out, of the spots that name a signal."""
        return {spot.what: spot.way_out for spot in self.session.status().blind_spots}

    def columns(self, since: int = 0) -> set[str]:
        self.session.detach()
        found = {
            name
            for record in Reader(self.session.directory).steps(columns=True)
            if record.step >= since
            for name in (*record.observation.columns, *record.observation.scalars)
        }
        assert self.session.status().internal_errors == {}
        return found


@pytest.mark.parametrize(
    ("signal", "says", "column"),
    [
        ("attention", "attention logits of ", LAYER_ATTENTION_MAX_LOGIT),
        ("activations", "activations of ", LAYER_ACTIVATION_RMS),
    ],
)
def test_a_signal_inside_the_compiled_code_is_named_and_compiling_anew_brings_it(
    signal: str, says: str, column: str, tmp_path: Path
) -> None:
    both = {"attention": False, "activations": False, signal: True}
    loop = Loop(tmp_path, **both)
    for _ in range(STEPS):
        loop.step()
    ((what, way_out),) = ((w, o) for w, o in loop.blind().items() if w.startswith(says))
    assert "compiled before attach()" in what
    assert "blocks.0" in what
    assert "attach() before" in way_out
    assert "torch.compiler.reset()" in way_out
    torch.compiler.reset()  # what it says
    for _ in range(STEPS):
        loop.step()
    assert not any(w.startswith(says) for w in loop.blind())
    assert column in loop.columns(since=STEPS)
    assert column not in {
        name
        for record in Reader(loop.session.directory).steps(columns=True)
        if record.step < STEPS
        for name in record.observation.columns
    }


def test_the_forward_and_what_hangs_on_it_are_named_and_the_wrapper_brings_them(
    tmp_path: Path,
) -> None:
    loop = Loop(tmp_path / "inner", inner=True)
    for _ in range(STEPS):
        loop.step()
    ((what, way_out),) = ((w, o) for w, o in loop.blind().items() if "of the watched model" in w)
    for named in ("snapshots", "tokens a second", "canary"):
        assert named in what
    assert "the compiled wrapper" in way_out
    assert "tokens_per_second" not in loop.columns()
    loop = Loop(tmp_path / "wrapper")
    for _ in range(STEPS):
        loop.step()
    assert not any("of the watched model" in what for what in loop.blind())
    assert "tokens_per_second" in loop.columns()


def test_what_is_measured_outside_of_the_model_is_seen_all_the_same(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    for _ in range(STEPS):
        loop.step()
    words = ("loss", "norm", "update", "clip", "memory")
    assert not [what for what in loop.blind() if any(word in what for word in words)]
    assert loop.columns() >= {
        LAYER_GRAD_NORM,
        LAYER_UPDATE_RATIO,
        "clipped_step_ratio",
        "memory_bytes/weights",
        "step_seconds",
    }
    losses = [record.observation.loss for record in Reader(loop.session.directory).steps()]
    assert None not in losses


def test_a_replaced_function_is_compiled_anew_by_itself(tmp_path: Path) -> None:
    """With its guards the compiled code notices that attention was replaced, and sees our hooks."""
    torch._dynamo.reset()
    model = Model()
    call = torch.compile(model, backend="eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ids = torch.arange(12).view(2, 6)
    call(ids).backward()
    with sentinel_hooks.attach(
        model=call, optimizer=optimizer, sidecar=None, run_dir=tmp_path
    ) as session:
        for _ in range(STEPS):
            optimizer.zero_grad()
            call(ids).backward()
            optimizer.step()
        assert session.status().blind_spots == ()

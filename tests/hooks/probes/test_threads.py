"""Forwards in several threads at once: each layer keeps its own numbers, whoever else asks it."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sentinel.core.types import (
    LAYER_ACTIVATION_ABSMAX,
    LAYER_ACTIVATION_RMS,
    LAYER_ATTENTION_MAX_LOGIT,
)
from sentinel_hooks.layers import LayerTable
from sentinel_hooks.probes.activations import ActivationProbe
from sentinel_hooks.probes.attention import AttentionProbe
from sentinel_hooks.probes.probe import resolve
from sentinel_hooks.probes.read import read

pytestmark = pytest.mark.torch
WIDTH, LAYERS, HOT = 8, 3, 1
SOON = 10.0  # seconds; nothing here takes that long unless it hangs


class Attention(nn.Module):
    """Of one head; `meet` is called where another thread may come between."""

    def __init__(self, layer: int, eager: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.layer, self.eager = layer, eager
        self.meet: Callable[[int], None] = lambda layer: None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 1, WIDTH).permute(2, 0, 3, 1, 4)
        self.meet(self.layer)
        if self.eager:
            out = F.softmax(q @ k.transpose(-1, -2) / math.sqrt(WIDTH), -1) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v)
        return out.squeeze(1)


class Block(nn.Module):
    def __init__(self, layer: int, eager: bool) -> None:
        super().__init__()
        self.attn = Attention(layer, eager)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.attn(x)
        return out


class Model(nn.Module):
    """Layers, one of which is hot."""

    def __init__(self, eager: bool = False, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(layer, eager) for layer in range(LAYERS))
        self.again = again
        with torch.no_grad():
            self.blocks[HOT].attn.qkv.weight[: 2 * WIDTH].mul_(20)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x.square().mean()

    def meet(self, what: Callable[[int], None]) -> None:
        for block in self.blocks:
            block.attn.meet = what


def batch(seed: int) -> Tensor:
    return torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(seed))


class Watched:
    """A model, its probes, and the columns of one step."""

    def __init__(self, model: Model) -> None:
        self.model = model
        table = LayerTable.of([model])
        self.probes = AttentionProbe([model], table), ActivationProbe([model], table)
        self.step = 0
        for probe in self.probes:
            probe.attach()

    def columns(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for probe in self.probes:
            probe.before_step(self.step)
            found |= resolve(probe, read(probe.pending(), [])[0])
        self.step += 1
        return found

    def detach(self) -> None:
        for probe in self.probes:
            probe.detach()


def alone(model: Model, *batches: Tensor, steps: int = 1) -> dict[str, Any]:
    """What is measured of a copy in one thread."""
    watched = Watched(copy.deepcopy(model))
    try:
        for _ in range(steps):
            for x in batches:
                watched.model(x).backward()
            found = watched.columns()
        return found
    finally:
        watched.detach()


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    names = (LAYER_ATTENTION_MAX_LOGIT, LAYER_ACTIVATION_RMS, LAYER_ACTIVATION_ABSMAX)
    return all(np.allclose(found[name], expected[name], rtol=1e-5) for name in names)


def in_a_thread(body: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread


class Turns:
    """Lets an actor go one layer on whenever the learner is inside of one."""

    def __init__(self, model: Model, actor: Callable[[], Any]) -> None:
        self._go, self._there = threading.Semaphore(0), threading.Semaphore(0)
        self.done = False
        self._actor = 0
        model.meet(self.meet)

        def act() -> None:
            self._actor = threading.get_ident()
            while not self.done:
                actor()

        self._thread = in_a_thread(act)
        assert self._there.acquire(timeout=SOON)

    def meet(self, layer: int) -> None:
        if threading.get_ident() == self._actor:
            self._there.release()
            assert self.done or self._go.acquire(timeout=SOON)
        elif not self.done:
            self._go.release()
            assert self._there.acquire(timeout=SOON)

    def end(self) -> None:
        self.done = True
        for _ in range(LAYERS):
            self._go.release()
        self._thread.join(SOON)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("learner", ["main", "worker"])
def test_an_actor_that_asks_the_model_moves_nothing(eager: bool, learner: str) -> None:
    model = Model(eager)
    expected = alone(model, batch(1), steps=3)
    watched = Watched(model)
    others = torch.randn(2, 6, WIDTH).mul(100)

    @torch.no_grad()
    def actor() -> None:
        model(others)

    found: list[dict[str, Any]] = []

    def learn() -> None:
        for _ in range(3):
            model(batch(1)).backward()
            found.append(watched.columns())

    # The actor waits in the first layer when the learner comes, and is one further each time.
    turns = Turns(model, actor)
    try:
        if learner == "main":
            learn()
        else:
            in_a_thread(learn).join(SOON)
    finally:
        turns.end()
        watched.detach()
    assert same(found[-1], expected)
    assert [v > 50 for v in found[-1][LAYER_ATTENTION_MAX_LOGIT]] == [False, True, False]
    # What the actor puts out, which nothing keeps, is no reason not to wait for the learner's.
    assert all(block.waits for block in watched.probes[1].watched)
    assert watched.probes[0].blind_spots() == watched.probes[1].blind_spots() == []


@pytest.mark.parametrize("eager", [False, True])
def test_replicas_that_train_in_threads_are_all_measured(eager: bool) -> None:
    model = Model(eager)
    batches = batch(1), batch(2)
    expected = alone(model, *batches)
    watched = Watched(model)
    both = threading.Barrier(2)
    inside = threading.local()

    def meet(layer: int) -> None:  # one is a layer ahead of the other
        inside.calls = getattr(inside, "calls", 0) + 1
        if layer > 0 or inside.first:
            both.wait(SOON)

    model.meet(meet)
    losses: list[Tensor] = []

    def replica(x: Tensor, first: bool) -> None:
        inside.first = first
        losses.append(model(x))
        if not first:
            both.wait(SOON)

    threads = [
        in_a_thread(lambda x=x, first=i == 0: replica(x, first)) for i, x in enumerate(batches)
    ]
    for thread in threads:
        thread.join(SOON)
    try:
        assert len(losses) == 2
        sum(losses).backward()  # type: ignore[union-attr]
        assert same(watched.columns(), expected)
    finally:
        watched.detach()


@pytest.mark.parametrize("steps_before", [0, 2])  # measured at once, or when the forward ends
def test_outputs_of_two_threads_do_not_come_into_one_slot(
    steps_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    # Too large to wait for the gate.
    batches = [batch(1).repeat(64, 1, 1), batch(2).repeat(64, 1, 1)]
    expected = alone(model, *batches, steps=steps_before + 1)
    watched = Watched(model)
    for _ in range(steps_before):
        for x in batches:
            model(x).backward()
        watched.columns()
    assert any(block.waits for block in watched.probes[1].watched) == bool(steps_before)
    both = threading.Barrier(2)
    aminmax = torch.aminmax

    def slow(*args: Any, **kwargs: Any) -> Any:
        try:  # whoever is here in the middle of writing waits for the other to come, for a while
            both.wait(0.2)
        except threading.BrokenBarrierError:
            both.reset()
        return aminmax(*args, **kwargs)

    monkeypatch.setattr(torch, "aminmax", slow)
    losses: list[Tensor] = []
    threads = [in_a_thread(lambda x=x: losses.append(model(x))) for x in batches]
    for thread in threads:
        thread.join(SOON)
    monkeypatch.undo()
    try:
        assert len(losses) == 2
        assert same(watched.columns(), expected)
    finally:
        watched.detach()


def test_a_forward_that_fails_in_another_thread_takes_nothing_away() -> None:
    model = Model()
    expected = alone(model, batch(1), steps=4)
    watched = Watched(model)
    main = threading.get_ident()

    def fails() -> None:
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 6, WIDTH + 1))

    def meet(layer: int) -> None:
        if threading.get_ident() == main and layer == 1:
            in_a_thread(fails).join(SOON)

    try:
        for step in range(4):
            if step == 2:
                model.meet(meet)
            model(batch(1)).backward()
            found = watched.columns()
    finally:
        watched.detach()
    assert same(found, expected)


def test_of_replicas_on_several_devices_those_of_one_count() -> None:
    model = Model()
    x = batch(1).repeat(64, 1, 1)
    expected = alone(model, x)
    watched = Watched(model)
    try:
        model(x).backward()
        probe = watched.probes[1]
        for block in probe.watched:
            probe.take(block, torch.empty(4, 4, device="meta"))
        found = watched.columns()
        assert probe.blind_spots() == []
        assert same(found, expected)
    finally:
        watched.detach()


def test_a_recomputation_in_another_thread_counts_nothing_twice() -> None:
    model = Model(again=True)
    expected = alone(model, batch(1), steps=4)
    watched = Watched(model)
    try:
        for _ in range(4):
            loss = model(batch(1))
            in_a_thread(loss.backward).join(SOON)  # as autograd's own threads do on CUDA
            found = watched.columns()
        assert same(found, expected)
    finally:
        watched.detach()

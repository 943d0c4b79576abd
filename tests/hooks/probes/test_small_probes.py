"""Update ratios, memory, pace, clip pressure, and all probes as one."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sentinel.core.detectors import update_ratio
from sentinel.core.errors import ConfigError
from sentinel.core.types import LAYER_UPDATE_RATIO, LAYER_WEIGHT_NORM
from sentinel_hooks.guard import Guard
from sentinel_hooks.layers import LayerTable
from sentinel_hooks.probes.clipping import ClipProbe
from sentinel_hooks.probes.grads import GradProbe
from sentinel_hooks.probes.memory import MemoryProbe
from sentinel_hooks.probes.mixing import MixingProbe
from sentinel_hooks.probes.pace import UNKNOWN, PaceProbe, tokens
from sentinel_hooks.probes.probe import NOT_MEASURED, merge, resolve
from sentinel_hooks.probes.read import read
from sentinel_hooks.probes.together import Probes
from sentinel_hooks.probes.updates import UpdateProbe
from sentinel_hooks.signals import Signals
from sentinel_hooks.target import Target
from tests.support import FakeClock

pytestmark = pytest.mark.torch


def net() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4), nn.Linear(4, 2))
    model[2].requires_grad_(False)
    return model


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_ratio_is_the_norm_of_the_update_over_that_of_the_weights(
    kind: str, dtype: torch.dtype
) -> None:
    if dtype == torch.bfloat16 and kind == "adagrad":
        dtype = torch.float64
    model = net().to(dtype)
    optimizer = OPTIMIZERS[kind](model.parameters())
    table = LayerTable.of([model])
    probe = UpdateProbe([optimizer], table, every=3)
    expected: dict[str, float] = {}
    seen = []
    for step in range(8):
        optimizer.zero_grad()
        model(torch.randn(5, 6, dtype=dtype)).square().sum().backward()
        probe.before_step(step)
        columns = resolve(probe, read(probe.pending(), [])[0])
        seen.append(bool(columns))
        for i, layer in enumerate(table.layers):
            if columns:
                value = columns[LAYER_UPDATE_RATIO][i]
                if layer.name == "2":
                    assert value == NOT_MEASURED
                else:
                    assert value == pytest.approx(expected[layer.name], rel=2e-3)
                    assert columns[LAYER_WEIGHT_NORM][i] > 0
        before = {
            n: [p.detach().double().clone() for p in m.parameters()]
            for n, m in model.named_children()
        }
        optimizer.step()
        probe.after_step(True)
        if step % 3 == 0:
            for name, module in model.named_children():
                pairs = list(zip(before[name], module.parameters(), strict=True))
                moved = sum(float((p.detach().double() - b).square().sum()) for b, p in pairs)
                size = sum(float(b.square().sum()) for b, _ in pairs)
                expected[name] = (moved / size) ** 0.5
    assert seen == [False, True, False, False, True, False, False, True]


class Waves(nn.Module):
    """Complex weights beside real ones."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.real = nn.Linear(6, 6)
        self.mix = nn.Linear(6, 6, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.real(x).to(self.mix.weight.dtype)).abs().square().mean()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_parameters_count_with_their_magnitudes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Waves(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    table = LayerTable.of([model])
    probe = UpdateProbe([optimizer], table, every=1)
    grads = GradProbe([optimizer], table)
    model(torch.randn(5, 6)).backward()
    gradient = model.mix.weight.grad
    assert gradient is not None
    pending = grads.measure([0])
    norms = grads.resolve(pending, read(pending.norms, [])[0])
    assert norms is not None
    assert norms.layer_sq_L[1] == pytest.approx(float(gradient.abs().square().sum()), rel=1e-5)
    probe.before_step(0)
    before = model.mix.weight.detach().clone()
    optimizer.step()
    probe.after_step(True)
    probe.before_step(1)
    columns = resolve(probe, read(probe.pending(), [])[0])
    moved = float((model.mix.weight.detach() - before).abs().square().sum()) ** 0.5
    size = float(before.abs().square().sum()) ** 0.5
    assert columns[LAYER_UPDATE_RATIO][1] == pytest.approx(moved / size, rel=1e-4)
    assert columns[LAYER_WEIGHT_NORM][1] == pytest.approx(size, rel=1e-5)
    assert columns[LAYER_UPDATE_RATIO][0] > 0


def test_what_lies_on_the_meta_device_beside_others_has_no_ratio_and_holds_no_memory() -> None:
    model = net()
    model.add_module("away", nn.Linear(100, 100, device="meta"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    table = LayerTable.of([model])
    probe = UpdateProbe([optimizer], table, every=1)
    model[:4](torch.randn(5, 6)).sum().backward()
    for step in range(2):
        probe.before_step(step)
        columns = resolve(probe, read(probe.pending(), [])[0])
        probe.after_step(True)
    assert columns[LAYER_UPDATE_RATIO][[x.name for x in table.layers].index("away")] == NOT_MEASURED
    memory = MemoryProbe([model], [optimizer], 1)
    memory.before_step(0)
    here = sum(p.nbytes for p in model.parameters() if p.device.type != "meta")
    assert memory.scalars()["memory_bytes/weights"] == here


def test_a_step_that_was_held_back_has_no_ratio() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = UpdateProbe([optimizer], LayerTable.of([model]), every=1)
    model(torch.randn(5, 6)).sum().backward()
    probe.before_step(0)
    probe.after_step(False)
    probe.before_step(1)
    assert probe.pending() == []
    assert resolve(probe, []) == {}


def test_a_rate_of_zero_is_a_ratio_of_zero_and_weights_of_zero_have_none() -> None:
    model = net()
    with torch.no_grad():
        model[3].weight.zero_()
        model[3].bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    probe = UpdateProbe([optimizer], LayerTable.of([model]), every=1)
    model(torch.randn(5, 6)).sum().backward()
    probe.before_step(0)
    optimizer.step()
    probe.after_step(True)
    probe.before_step(1)
    column = resolve(probe, read(probe.pending(), [])[0])[LAYER_UPDATE_RATIO]
    assert column.tolist() == [0.0, 0.0, NOT_MEASURED, NOT_MEASURED]


def test_layers_that_start_at_zero_have_a_ratio_when_they_have_grown() -> None:
    model = net()
    with torch.no_grad():
        model[3].weight.zero_()
        model[3].bias.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    table = LayerTable.of([model])
    probe = UpdateProbe([optimizer], table, every=1)
    row = [layer.name for layer in table.layers].index("3")
    ratios, norms, flagged = [], [], []
    for step in range(110):
        optimizer.zero_grad()
        model(torch.randn(5, 6)).square().sum().backward() if step % 2 else model(
            torch.randn(5, 6)
        ).sum().backward()
        probe.before_step(step)
        columns = resolve(probe, read(probe.pending(), [])[0])
        if step:
            ratios.append(float(columns[LAYER_UPDATE_RATIO][row]))
            norms.append(float(columns[LAYER_WEIGHT_NORM][row]))
            config = update_ratio.UpdateRatioConfig()
            flagged.append(update_ratio.judge(columns[LAYER_UPDATE_RATIO], config))
        optimizer.step()
        probe.after_step(True)
    assert norms[0] == 0.0
    assert norms[1] > 0.0
    assert ratios[:100] == [NOT_MEASURED] * 100
    assert all(0.0 < ratio < 0.1 for ratio in ratios[100:])
    assert not any(flagged)


@pytest.mark.parametrize(("start", "ill"), [(1e-6, False), (1e-4, False), (0.01, True)])
def test_weights_that_start_next_to_0_have_no_ratio_until_they_have_grown(
    start: float, ill: bool
) -> None:
    """As LayerScale's do; a layer of the usual size that moves too fast is seen at once."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.gamma = nn.Parameter(torch.full((8,), start))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.gamma * self.inner(x)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), *[Scaled() for _ in range(2)], nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    table = LayerTable.of([model])
    probe = UpdateProbe([optimizer], table, every=1)
    rows = [i for i, layer in enumerate(table.layers) if layer.kind == "Scaled"]
    odd: list[tuple[int, ...]] = []
    for step in range(115):
        optimizer.zero_grad()
        model(torch.randn(16, 6)).square().sum().backward()
        probe.before_step(step)
        columns = resolve(probe, read(probe.pending(), [])[0])
        if step:
            ratio = columns[LAYER_UPDATE_RATIO]
            assert (ratio[rows] == NOT_MEASURED).all() == (not ill and step <= 100), step
            odd.append(update_ratio.judge(ratio, update_ratio.UpdateRatioConfig()))
        optimizer.step()
        probe.after_step(True)
    assert bool(odd[0]) == ill
    assert not any(odd[100:])


def test_shares_make_replicas_count_once() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    table = LayerTable.of([model])
    found = []
    for share, ranks in ((None, 1), (lambda p: 0.25, 4)):
        probe = UpdateProbe([optimizer], table, every=1, share=share)
        optimizer.zero_grad()
        torch.manual_seed(1)
        model(torch.randn(5, 6)).sum().backward()
        saved = [p.detach().clone() for p in model.parameters()]
        probe.before_step(0)
        optimizer.step()
        probe.after_step(True)
        probe.before_step(1)
        parts = probe.parts(read(probe.pending(), [])[0])
        total = parts
        for _ in range(ranks - 1):
            total = merge(total, parts, probe.combine)
        found.append(probe.finish(total))
        with torch.no_grad():
            for p, s in zip(model.parameters(), saved, strict=True):
                p.copy_(s)
    for name in (LAYER_UPDATE_RATIO, LAYER_WEIGHT_NORM):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-6)


def test_out_of_memory_ends_the_sampling_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    probe = UpdateProbe([torch.optim.SGD(model.parameters(), lr=0.1)], LayerTable.of([model]), 1)

    def full(*_: Any) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB\nmore")

    monkeypatch.setattr(Tensor, "clone", full)
    probe.before_step(0)
    probe.after_step(True)
    (spot,) = probe.blind_spots()
    assert "CUDA out of memory. Tried to allocate 2 GiB" in spot.what
    assert "update_ratio=False" in spot.way_out


def test_updates_read_nothing_from_the_device() -> None:
    model = net().to("meta")
    probe = UpdateProbe([torch.optim.SGD(model.parameters(), lr=0.1)], LayerTable.of([model]), 1)
    probe.before_step(0)
    probe.after_step(True)
    probe.before_step(1)
    assert [v.device.type for v in probe.pending()] == ["meta"]
    probe.detach()


def test_bytes_are_counted_once_by_kind_and_what_a_cpu_does_not_know_is_absent() -> None:
    model = nn.Module()
    model.embed = nn.Embedding(10, 4)
    model.head = nn.Linear(4, 10, bias=False)
    model.head.weight = model.embed.weight
    model.register_buffer("table", torch.zeros(7))
    optimizer = torch.optim.Adam(model.parameters())
    probe = MemoryProbe([model], [optimizer], every=2)
    model.head(model.embed(torch.arange(3))).sum().backward()
    probe.before_step(0)
    first = probe.scalars()
    assert first == {
        "memory_bytes/weights": 160.0 + 28.0,
        "memory_bytes/gradients": 160.0,
        "memory_bytes/optimizer": 0.0,
    }
    optimizer.step()
    probe.before_step(1)
    assert probe.scalars() == first  # not sampled
    probe.before_step(2)
    assert probe.scalars()["memory_bytes/optimizer"] == 2 * 160.0 + 4.0


def test_parameters_that_are_views_of_one_buffer_are_that_buffer_once() -> None:
    model = nn.Module()
    flat = torch.zeros(30)
    model.a, model.b = nn.Parameter(flat[:10]), nn.Parameter(flat[10:30])
    probe = MemoryProbe([model], [])
    probe.before_step(0)
    assert probe.scalars()["memory_bytes/weights"] == 120.0


def test_a_storage_counts_once_whatever_else_looks_into_it() -> None:
    model = nn.Module()
    flat = torch.zeros(30)
    model.register_buffer("flat", flat)
    model.a, model.b = nn.Parameter(flat[:10]), nn.Parameter(flat[10:30])
    model.register_buffer("mask", torch.zeros(1, 1).expand(1024, 1024))
    probe = MemoryProbe([model], [])
    probe.before_step(0)
    assert probe.scalars()["memory_bytes/weights"] == 120.0 + 4.0


def test_the_allocator_of_a_device_says_the_rest() -> None:
    model = nn.Linear(10, 10, bias=False)
    held = types.SimpleNamespace(now=400)
    counters = types.SimpleNamespace(
        memory_allocated=lambda d: held.now,
        max_memory_allocated=lambda d: 1500,
        memory_reserved=lambda d: 2000,
        mem_get_info=lambda d: (6000, 10000),
    )
    probe = MemoryProbe([model], [], 1, torch.device("cuda"), counters)
    held.now = 1400
    probe.phase("forward")
    held.now = 900
    probe.phase("backward")
    probe.before_step(0)
    assert probe.scalars() == {
        "memory_bytes/weights": 400.0,
        "memory_bytes/gradients": 0.0,
        "memory_bytes/optimizer": 0.0,
        "memory_bytes/other": 500.0,
        "memory_bytes/peak": 1500.0,
        "memory_bytes/activations": 1000.0,
        "memory_phase_bytes/forward": 1400.0,
        "memory_phase_bytes/backward": 900.0,
        "memory_headroom": (6000 + 2000 - 900) / 10000,
    }


def test_a_step_lasts_from_gate_to_gate(clock: FakeClock) -> None:
    probe = PaceProbe(clock)
    ids = torch.zeros(4, 16, dtype=torch.long)
    probe.on_forward((ids, ids), {})
    probe.before_step(0)
    assert probe.scalars() == {}  # when it began nobody saw
    for _ in range(3):
        probe.on_forward((), {"input_ids": ids, "labels": ids})
    clock.advance(0.5)
    probe.before_step(1)
    assert probe.scalars() == {"step_seconds": 0.5, "tokens_per_second": 3 * 64 / 0.5}
    probe.on_forward((torch.randn(3, 3),), {})
    clock.advance(2.0)
    probe.before_step(2)
    assert probe.scalars() == {"step_seconds": 2.0}
    probe.on_forward(({"input_ids": ids},), {})
    clock.advance(1.0)
    probe.before_step(3)
    assert probe.scalars()["tokens_per_second"] == 64.0


IDS = torch.zeros(4, 16, dtype=torch.long)
PACK = torch.tensor([0, 30, 64], dtype=torch.int32)
LABELS = torch.zeros(8, dtype=torch.long)
FORWARDS: dict[str, tuple[tuple[Any, ...], dict[str, Any], tuple[str, ...], int]] = {
    "packed": ((PACK, IDS.flatten()), {}, (), 64),
    "packed, named": ((), {"cu_seqlens": PACK, "tokens": IDS.flatten()}, (), 64),
    "more offsets than tokens": ((LABELS, IDS[0, :5]), {}, ("cu_seqlens", "x"), 5),
    "a step first": ((torch.tensor(3), IDS), {}, (), 64),
    "a mask first": ((), {"attention_mask": IDS, "input_ids": IDS[:2]}, (), 32),
    "a batch": (({"attention_mask": IDS, "tokens": IDS[:2]},), {}, (), 32),
    "a batch in a batch": (({"text": {"ids": IDS}},), {}, (), 64),
    "sequences": (([IDS[0], IDS[1, :3]],), {}, (), 19),
    "a pair": (((IDS, IDS),), {}, (), 64),
    "named by the signature": ((LABELS, IDS), {}, ("tokens", "bag"), 8),
    "embeddings": ((), {"inputs_embeds": torch.zeros(2, 5, 3), "labels": IDS}, (), 10),
    "ids and a float mask": ((IDS, torch.zeros(4, 16)), {}, (), 64),
    "images": ((torch.zeros(8, 3, 9, 9),), {}, (), 0),
    "images, labels": ((torch.zeros(8, 3, 9, 9), LABELS), {}, ("x", "y"), 0),
    "nobody knows": ((torch.zeros(8, 3, 9, 9), LABELS), {}, (), UNKNOWN),
    "labels alone": ((), {"labels": LABELS}, (), UNKNOWN),
    "an object": ((object(),), {}, (), UNKNOWN),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_tokens_are_those_of_the_ids_and_not_of_what_is_beside_them(
    name: str, clock: FakeClock
) -> None:
    args, kwargs, names, count = FORWARDS[name]
    assert tokens(args, kwargs, names) == count

    class Model(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> None: ...

    model = Model()
    if names:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        model.forward = lambda *args, **kwargs: None  # type: ignore[method-assign]
        model.forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(n, kind) for n in names]
        )
    probe = PaceProbe(clock, [model])
    probe.before_step(0)
    probe.on_forward(args, kwargs)
    clock.advance(2.0)
    probe.before_step(1)
    assert probe.scalars().get("tokens_per_second", 0.0) == max(count, 0) / 2
    spots = probe.blind_spots()
    assert len(spots) == (count == UNKNOWN)
    assert all("input_ids" in spot.way_out for spot in spots)


def test_clip_pressure_is_the_share_of_clipped_steps_and_what_is_left() -> None:
    probe = ClipProbe(window=4)
    assert probe.scalars() == {}
    for norm in (0.5, 2.0, 4.0, 1.0, 10.0):
        probe.on_scale(1.0, torch.tensor(norm))
        probe.before_step(0)
        probe.parts(read(probe.pending(), [])[0])
    # The window holds 2, 4, 1, 10; a norm of exactly the limit is scaled by 1 / 1.000001.
    assert probe.scalars() == {
        "clipped_step_ratio": 1.0,
        "clip_factor_mean": pytest.approx((0.5 + 0.25 + 1.0 + 0.1) / 4, rel=1e-5),
    }
    probe.before_step(5)  # a step without a clip does not count
    assert probe.parts([]) == {}
    probe.on_scale(1.0, torch.tensor(float("nan")))
    probe.before_step(6)
    probe.parts(read(probe.pending(), [])[0])
    assert probe.scalars()["clipped_step_ratio"] == 1.0


# ---------------------------------------------------------------- together


@pytest.fixture
def probes() -> Iterator[Any]:
    made: list[Probes] = []

    def make(model: nn.Module, signals: Signals) -> Probes:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        target = Target((model,), (optimizer,))
        found = Probes.of(
            signals,
            target,
            LayerTable.of([model]),
            threshold=50.0,
            clock=lambda: 0.0,
            guard=Guard("t"),
        )
        found.attach()
        made.append(found)
        return found

    yield make
    for one in made:
        one.detach()


def step(together: Probes, model: nn.Module, t: int) -> dict[str, Any]:
    model(torch.randn(5, 6)).square().sum().backward()
    together.before_step(t)
    columns = together.resolve(read(together.pending(), [])[0])
    together.after_step(True)
    return columns


def test_a_probe_that_fails_is_switched_off_alone_and_named(
    probes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    together = probes(model, Signals(every=1))
    names = set(step(together, model, 0)) | set(step(together, model, 1))
    assert {"layer_update_ratio", "layer_activation_rms"} <= names

    def broken(*_: Any) -> Tensor:
        raise ValueError("inside")

    monkeypatch.setattr(UpdateProbe, "before_step", broken)
    for t in range(2, 4):
        names = set(step(together, model, t))
        assert "layer_activation_rms" in names
        assert "layer_update_ratio" not in names
    (spot,) = together.blind_spots()
    assert "update_ratio was switched off" in spot.what
    assert "inside" in spot.what


@pytest.mark.parametrize(
    ("switch", "gone"),
    [
        ("activations", "layer_activation_rms"),
        ("update_ratio", "layer_update_ratio"),
        ("memory", "memory_bytes/weights"),
    ],
)
def test_each_signal_can_be_left_out(switch: str, gone: str, probes: Any) -> None:
    model = net()
    for on in (True, False):
        together = probes(model, Signals(every=1, **{switch: on}))
        found = set(step(together, model, 0)) | set(step(together, model, 1))
        found |= set(together.scalars())
        assert (gone in found) is on
        together.detach()


def test_signals_refuse_what_they_are_not() -> None:
    with pytest.raises(ConfigError, match=r"signals\.attention must be True or False, got 'yes'"):
        Signals(attention="yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"signals\.every must be a number of steps, at least 1"):
        Signals(every=0)


def test_one_read_a_step_is_all(probes: Any) -> None:
    """Everything on a meta device up to the read: nothing else may wait for it."""
    model = net().to("meta")
    together = probes(model, Signals(every=1))
    for t in range(3):
        model(torch.empty(5, 6, device="meta")).square().sum().backward()
        together.before_step(t)
        assert all(v.device.type == "meta" and v.dim() == 1 for v in together.pending())
        together.after_step(True)
    assert together.blind_spots() == []
    assert np.isneginf(NOT_MEASURED)


# ---------------------------------------------------------------- residual mixing


def gains(probe: MixingProbe, step: int) -> dict[str, float]:
    probe.before_step(step)
    resolve(probe, read(probe.pending(), [])[0])
    return probe.scalars()


def test_mixing_is_the_gain_of_the_product_of_what_the_users_function_returns() -> None:
    torch.manual_seed(0)
    chain = [nn.Parameter(torch.randn(n, k)) for n, k in ((4, 2), (4, 4), (3, 4))]
    probe = MixingProbe(lambda: chain, every=5)
    product = (chain[2] @ chain[1] @ chain[0]).detach().abs()
    seen = gains(probe, 0)
    assert seen["residual_mixing_forward"] == pytest.approx(float(product.sum(1).max()), rel=1e-5)
    assert seen["residual_mixing_backward"] == pytest.approx(float(product.sum(0).max()), rel=1e-5)
    with torch.no_grad():
        chain[0].mul_(100.0)
    assert gains(probe, 3) == seen, "between two samples the newest stands"
    assert gains(probe, 5)["residual_mixing_forward"] == pytest.approx(
        100.0 * seen["residual_mixing_forward"], rel=1e-5
    )
    assert probe.blind_spots() == []
    with torch.no_grad():
        chain[1].fill_(float("nan"))
    assert np.isnan(gains(probe, 10)["residual_mixing_forward"])


def broken() -> list[Tensor]:
    raise RuntimeError("no such thing")


@pytest.mark.parametrize(
    ("matrices", "why"),
    [
        (broken, "no such thing"),
        (list, "no matrix"),
        (lambda: [torch.ones(2, 2, 2)], "item 0 is no plain matrix"),
        (lambda: [torch.ones(2, 2), None], "item 1 is no plain matrix but a NoneType"),
        (lambda: [torch.ones(2, 2), torch.ones(3, 3)], "matrix 1 takes 3 streams"),
        (lambda: [torch.ones(2, 2, dtype=torch.complex64)], "matrix 0 is complex"),
        (lambda: None, "TypeError"),
    ],
    ids=["raises", "empty", "three dimensions", "none", "no chain", "complex", "no list"],
)
def test_mixing_that_is_no_chain_of_matrices_is_a_blind_spot_and_no_number(
    matrices: Any, why: str
) -> None:
    good = [torch.eye(2)]
    answers = iter([lambda: good, matrices, lambda: good])
    probe = MixingProbe(lambda: next(answers)(), every=1)
    assert gains(probe, 0) == {"residual_mixing_forward": 1.0, "residual_mixing_backward": 1.0}
    assert gains(probe, 1) == {}
    assert gains(probe, 2) == {}, "the signal has ended"
    (spot,) = probe.blind_spots()
    assert why in spot.what
    assert "first to last" in spot.way_out


def test_the_mixing_function_is_asked_for_by_name_and_must_be_one() -> None:
    with pytest.raises(ConfigError, match="residual_mixing must be None or a function"):
        Signals(residual_mixing=3)  # type: ignore[arg-type]
    one, other = (Signals(residual_mixing=lambda: [torch.eye(2)]) for _ in range(2))
    assert repr(one) == repr(other), "ranks compare it"

"""The activation probe against sums in float64, one block at a time."""

from __future__ import annotations

import copy
import dataclasses
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sentinel.core.detectors import depth
from sentinel.core.types import (
    LAYER_ACTIVATION_ABSMAX,
    LAYER_ACTIVATION_RMS,
    LAYER_ACTIVATION_SPREAD,
    LAYER_BLOCK,
)
from sentinel_hooks.layers import LayerTable
from sentinel_hooks.probes import activations
from sentinel_hooks.probes.activations import MOST, ActivationProbe
from sentinel_hooks.probes.probe import merge, resolve
from sentinel_hooks.probes.read import read

pytestmark = pytest.mark.torch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.last: list[Tensor] = []

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        out = x + self.b(torch.tanh(self.a(x)))
        self.last.append(out.detach().double())
        return out, None  # as many do


class Model(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        return x.float().square().mean()


@pytest.fixture
def attached() -> Iterator[Any]:
    made: list[ActivationProbe] = []

    def attach(model: nn.Module, every: int = 1) -> tuple[ActivationProbe, LayerTable]:
        table = LayerTable.of([model])
        probe = ActivationProbe([model], table, every)
        probe.attach()
        made.append(probe)
        return probe, table

    yield attach
    for probe in made:
        probe.detach()


@pytest.fixture(params=["small", "large"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Outputs that are reduced together at the gate, or each by itself."""
    if request.param == "large":
        monkeypatch.setattr(activations, "SMALL", 0)
    return str(request.param)


def measured(probe: ActivationProbe, step: int = 0) -> dict[str, Any]:
    probe.before_step(step)
    return resolve(probe, read(probe.pending(), [])[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("batches", [1, 3, 4, 11])
@pytest.mark.parametrize("every", [1, 2, 1000])
def test_rms_and_largest_are_those_of_all_micro_batches(
    dtype: torch.dtype, batches: int, every: int, attached: Any, size: str
) -> None:
    torch.manual_seed(0)
    model = Model().to(dtype)
    probe, table = attached(model, every)
    for step in range(5):
        for block in model.layers:
            block.last = []
        for b in range(batches):
            model(torch.randn(2 + b % 2, 5, 8, dtype=dtype) * (1 + b)).backward()
        columns = measured(probe, step)
        for i, block in enumerate(model.layers):
            row = [x.name for x in table.layers].index(f"layers.{i}.b")
            everything = torch.cat([t.flatten() for t in block.last])
            assert columns[LAYER_ACTIVATION_RMS][row] == pytest.approx(
                float(everything.square().mean().sqrt()), rel=1e-5
            )
            assert columns[LAYER_ACTIVATION_ABSMAX][row] == float(everything.abs().max().float())
        assert np.isneginf(columns[LAYER_ACTIVATION_RMS]).sum() == 3  # the other rows
    assert measured(probe) == {}
    assert probe.blind_spots() == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_output_that_is_not_finite_names_its_block(bad: float, attached: Any) -> None:
    model = Model()
    probe, table = attached(model)
    with torch.no_grad():
        model.layers[1].b.bias[0] = bad
    model(torch.randn(2, 5, 8)).backward()
    columns = measured(probe)
    finite = {
        x.name: bool(np.isfinite(v))
        for x, v in zip(table.layers, columns[LAYER_ACTIVATION_ABSMAX], strict=True)
        if not np.isneginf(v)
    }
    assert finite == {"layers.0.b": True, "layers.1.b": False, "layers.2.b": False}


def test_finite_outputs_too_large_for_a_sum_have_a_finite_largest(attached: Any) -> None:
    model = Model(1)
    probe, _ = attached(model)
    with torch.no_grad():
        model.layers[0].b.bias.fill_(1e30)
    model(torch.randn(2, 5, 8)).backward()
    columns = measured(probe)
    assert math.isinf(columns[LAYER_ACTIVATION_RMS].max())
    assert columns[LAYER_ACTIVATION_ABSMAX].max() == pytest.approx(1e30)


def test_the_spread_tells_tokens_that_are_all_alike(attached: Any) -> None:
    torch.manual_seed(0)
    model = Model()
    probe, table = attached(model, every=2)
    with torch.no_grad():
        model.layers[1].b.weight.zero_()
        model.layers[1].b.bias.fill_(1e4)  # drowns what was different
    seen = []
    for step in range(4):
        model(torch.randn(2, 5, 8)).backward()
        columns = measured(probe, step)
        seen.append(LAYER_ACTIVATION_SPREAD in columns)
        if seen[-1]:
            spread = {
                x.name: float(v)
                for x, v in zip(table.layers, columns[LAYER_ACTIVATION_SPREAD], strict=True)
            }
            assert spread["layers.0.b"] > 0.5
            assert spread["layers.1.b"] < 1e-3
    assert seen == [True, False, True, False]


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_and_evaluation_do_not_count(
    reentrant: bool, attached: Any, size: str
) -> None:
    model = Model()
    probe, _ = attached(model)
    x = torch.randn(2, 5, 8, requires_grad=True)
    for _ in range(3):
        checkpoint(model, x, use_reentrant=reentrant).backward()
    with torch.no_grad():
        model(torch.full((2, 5, 8), 1e6))
    probe.before_step(0)
    parts = probe.parts(read(probe.pending(), [])[0])
    assert parts["activation_count"].tolist() == [0, 3 * x.numel()] * 3
    columns = probe.finish(parts)
    assert columns[LAYER_ACTIVATION_ABSMAX].max() < 1e3


def test_an_output_that_is_written_into_afterwards_is_not_measured_late(attached: Any) -> None:
    model = Model(2)
    probe, _ = attached(model, every=1000)
    sizes = []
    for step in range(4):
        x = torch.randn(2, 5, 8)
        model.layers[0](x)
        y, _ = model.layers[1](x)
        y.detach().add_(1e6)
        columns = measured(probe, step)
        sizes.append(int(np.isfinite(columns[LAYER_ACTIVATION_ABSMAX]).sum()))
        assert columns[LAYER_ACTIVATION_ABSMAX].max() < 1e3
    assert sizes == [2, 1, 2, 2]  # the very first is measured at once, for its spread


class Stage(nn.Module):
    """A block whose output `keep` decides about; `after` is done with it in the next one."""

    def __init__(self, keep: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.keep = keep
        self.truth = 0.0

    def forward(self, x: Tensor) -> Tensor:
        out = self.keep(self.a(x))
        self.truth = float(out.detach().double().square().mean().sqrt())
        return out


class Stages(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Stage(lambda x: x * 1.0) for _ in range(2))
        self.between = between
        self.stop = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(self.layers[0](x))
        if self.stop:
            raise ValueError("the user's own")
        return self.layers[1](x).square().mean()

    @property
    def truth(self) -> list[float]:
        return [layer.truth for layer in self.layers]


def saved(x: Tensor) -> Tensor:
    return x * x


def not_saved(x: Tensor) -> Tensor:
    return x + 1.0


def written(x: Tensor) -> Tensor:
    return x.add_(100.0)


def emptied(x: Tensor) -> Tensor:
    y = x * x
    x.untyped_storage().resize_(0)  # to be filled again before the backward pass
    return y.detach() + 0.0 * x.new_zeros(()).requires_grad_()


def rms(columns: Any) -> list[float]:
    own = columns[LAYER_ACTIVATION_RMS]
    return [float(v) for v in own[~np.isneginf(own)]]


@pytest.mark.parametrize(
    ("between", "waits"),
    [(saved, True), (not_saved, False), (written, False), (emptied, False)],
)
def test_an_output_is_measured_as_it_was_put_out_whatever_becomes_of_it(
    between: Callable[[Tensor], Tensor],
    waits: bool,
    attached: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(activations, "SMALL", 0)
    torch.manual_seed(0)
    model = Stages(between)
    probe, _ = attached(model, every=3)
    for step in range(7):
        x = torch.randn(2, 5, 8)
        model(x).backward()
        assert rms(measured(probe, step)) == pytest.approx(model.truth, rel=1e-5)
    assert [block.waits for block in probe.watched] == [waits, True]
    assert probe.blind_spots() == []


@pytest.mark.parametrize("after", [not_saved, written])
def test_an_output_that_no_longer_outlives_its_block_is_left_out_once(
    after: Callable[[Tensor], Tensor], attached: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations, "SMALL", 0)
    torch.manual_seed(0)
    model = Stages(saved)
    probe, _ = attached(model, every=1000)
    seen = []
    for step in range(6):
        if step == 3:
            model.between = after
        model(torch.randn(2, 5, 8)).backward()
        found = rms(measured(probe, step))
        assert found == pytest.approx(model.truth[-len(found) :], rel=1e-5)
        seen.append(len(found))
    assert seen == [2, 2, 2, 1, 2, 2]


def test_nothing_lives_longer_for_being_measured(
    attached: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations, "SMALL", 0)
    model = Stages(saved)
    probe, _ = attached(model, every=1000)
    alive: list[weakref.ref[Tensor]] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda m, a, out: alive.append(weakref.ref(out)))
    for step in range(3):
        model(torch.randn(2, 5, 8)).backward()
        assert all(block.waits for block in probe.watched)
        assert not any(ref() is not None for ref in alive)
        measured(probe, step)
    model.stop = True
    for _ in range(3):
        with pytest.raises(ValueError, match="own"):
            model(torch.randn(2, 5, 8))
    assert not any(ref() is not None for ref in alive)
    assert len(probe.thread.here.waiting) == 1


def test_an_output_that_has_no_version_is_measured(attached: Any, size: str) -> None:
    class Fixed(Stages):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.0 * self.layers[1].a.weight.sum()

    with torch.inference_mode():
        known = torch.randn(2, 5, 8)
    torch.manual_seed(0)
    model = Fixed(saved)
    model.layers[0].keep = lambda x: known
    model.between = lambda x: x.clone()
    probe, _ = attached(model, every=3)
    for step in range(4):
        model(torch.randn(2, 5, 8)).backward()
        assert rms(measured(probe, step)) == pytest.approx(model.truth, rel=1e-5)
    assert probe.blind_spots() == []


def test_a_pass_without_gradients_inside_a_training_forward_does_not_count(
    attached: Any, size: str
) -> None:
    """As of a teacher that shares its blocks with the student."""

    class Twice(Stages):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                first = self.layers[0](x * 100.0)
                target = self.layers[1](saved(first))
            loss: Tensor = super().forward(x)
            self.held = first, target  # alive when the forward ends
            return loss

    torch.manual_seed(0)
    model = Twice(saved)
    probe, _ = attached(model, every=3)
    for step in range(7):
        model(torch.randn(2, 5, 8)).backward()
        assert rms(measured(probe, step)) == pytest.approx(model.truth, rel=1e-5)


def test_ranks_combine_as_micro_batches_do(attached: Any) -> None:
    torch.manual_seed(0)
    model = Model()
    twin = copy.deepcopy(model)
    probe, _ = attached(model)
    other, _ = attached(twin)
    batches = [torch.randn(n, 5, 8) for n in (2, 7)]
    for x in batches:
        model(x).backward()
    together = measured(probe)
    parts = []
    for x in batches:
        twin(x).backward()
        other.before_step(0)
        parts.append(other.parts(read(other.pending(), [])[0]))
    apart = other.finish(merge(parts[0], parts[1], other.combine))
    for name in (LAYER_ACTIVATION_RMS, LAYER_ACTIVATION_ABSMAX):
        assert apart[name] == pytest.approx(together[name], rel=1e-6)


def test_the_hot_path_reads_nothing_from_the_device(attached: Any, size: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = Model().to("meta", dtype)
        probe, _ = attached(model)
        for _ in range(6):
            model(torch.empty(2, 5, 8, device="meta", dtype=dtype)).backward()
        assert all(block.waits for block in probe.watched[:2])
        probe.before_step(0)
        assert [v.device.type for v in probe.pending()] == ["meta"]
        assert probe.blind_spots() == []


def test_of_a_thousand_blocks_an_even_selection_is_watched(attached: Any) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(1000)))
    probe, _ = attached(model)
    model(torch.randn(3, 2)).sum().backward()
    rows = np.flatnonzero(~np.isneginf(measured(probe)[LAYER_ACTIVATION_RMS]))
    assert len(rows) == MOST
    assert set(np.diff(rows)) <= {7, 8}


def test_detach_leaves_nothing_and_an_unseen_block_is_named(attached: Any) -> None:
    model = Model()
    probe, _ = attached(model)
    model.layers[0](torch.randn(2, 5, 8))[0].sum().backward()
    measured(probe)
    (spot,) = probe.blind_spots()
    assert "layers.1, layers.2" in spot.what
    probe.detach()
    assert not any(m._forward_hooks for m in model.modules())


def test_a_block_that_returns_one_number_is_a_block_like_any_other() -> None:
    """The module inside DDP that returns its loss: its output has no dimension."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x).square().mean()

    class Wrap(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = Inner()

        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = self.module(x)
            return loss

    model = Wrap()
    probe = ActivationProbe([model], LayerTable.of((model,)), 10)
    probe.attach()
    try:
        for step in range(25):
            model(torch.randn(4, 8)).backward()
            probe.before_step(step)
            values, _ = read(probe.pending(), [])
            columns = resolve(probe, values)
            probe.after_step(True)
        assert not probe.blind_spots()
        assert LAYER_ACTIVATION_RMS in columns
    finally:
        probe.detach()


@dataclasses.dataclass
class Out:
    loss: Tensor | None
    hidden: Tensor


class Odd(nn.Module):
    """Its blocks hand on something else than a tensor."""

    def __init__(self, wrap: Callable[[Tensor], Any], unwrap: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wrapping(wrap) for _ in range(2))
        self.unwrap = unwrap

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = self.unwrap(block(x) if i else block(x=x))
        return x.square().mean()


class Wrapping(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.a(x))


SCALAR, LONG = torch.tensor(1e6), torch.full((4, 99), 1e6)


@pytest.mark.parametrize(
    ("wrap", "unwrap", "picked"),
    [
        (lambda x: (SCALAR, x), lambda out: out[1], "[1], of 2 tensors the first of the shape"),
        (lambda x: [LONG, x], lambda out: out[1], "[1], of 2 tensors the first of the shape"),
        (
            lambda x: {"aux": SCALAR, "hidden": x},
            lambda out: out["hidden"],
            "['hidden'], of 2 tensors the first of the shape",
        ),
        (lambda x: Out(SCALAR, x), lambda out: out.hidden, "['hidden'], of 2 tensors the first"),
        (lambda x: Out(None, x), lambda out: out.hidden, ""),
        (lambda x: (torch.arange(4), x), lambda out: out[1], ""),
        (lambda x: ((x, SCALAR), None), lambda out: out[0][0], "[0, 0], of 2 tensors the first"),
        (
            lambda x: (x[:, :7], x[:1, :1] * 1e6),
            lambda out: F.pad(out[0], (0, 1)),
            "[0], of 2 tensors the largest",
        ),
    ],
    ids=["tuple", "longer first", "dict", "dataclass", "one", "indices", "nested", "no match"],
)
def test_of_what_a_block_puts_out_the_tensor_that_goes_on_is_measured_and_named(
    wrap: Any, unwrap: Any, picked: str, attached: Any
) -> None:
    model = Odd(wrap, unwrap)
    probe, _ = attached(model)
    for step in range(3):
        model(torch.randn(4, 8)).backward()
        columns = measured(probe, step)
        assert (columns[LAYER_ACTIVATION_RMS] > 0).sum() == 2
        assert columns[LAYER_ACTIVATION_ABSMAX].max() < 1e3
    assert probe.blind_spots() == []
    if not picked:
        assert probe.notes() == []
        return
    (note,) = probe.notes()
    assert note.startswith("activations of blocks.0, blocks.1 are those of their output's ")
    assert picked in note


def test_while_it_is_compiled_the_same_tensor_is_taken(attached: Any) -> None:
    torch._dynamo.reset()
    model = Odd(lambda x: (x.sum() * 1e6, x), lambda out: out[1])
    probe, _ = attached(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for step in range(2):
        compiled(torch.randn(4, 8)).backward()
        assert measured(probe, step)[LAYER_ACTIVATION_ABSMAX].max() < 1e3
    assert probe.blind_spots() == []


def test_an_output_that_changes_its_form_is_chosen_from_anew(attached: Any) -> None:
    model = Odd(lambda x: (SCALAR, x), lambda out: out[-1])
    probe, _ = attached(model)
    model(torch.randn(4, 8)).backward()
    assert (measured(probe)[LAYER_ACTIVATION_RMS] > 0).sum() == 2
    for block in model.blocks:
        block.wrap = lambda x: (x,)
    model(torch.randn(4, 8)).backward()
    assert (measured(probe, 1)[LAYER_ACTIVATION_RMS] > 0).sum() == 2
    assert probe.notes() == []


@pytest.mark.parametrize(
    ("wrap", "unwrap", "kind"),
    [
        (lambda x: (((x,), x),), lambda out: out[0][1], ""),
        (lambda x: (((x,),), None), lambda out: out[0][0][0], "tuple without a tensor in it"),
        (lambda x: torch.complex(x, x), lambda out: out.real, "complex64"),
        (lambda x: (torch.complex(x, x),), lambda out: out[0].real, "complex64"),
    ],
    ids=["beside", "nested twice", "complex", "complex in a tuple"],
)
def test_a_block_whose_output_is_of_an_unknown_kind_was_seen_and_its_kind_is_said(
    wrap: Any, unwrap: Any, kind: str, attached: Any
) -> None:
    model = Odd(wrap, unwrap)
    probe, _ = attached(model)
    for step in range(3):
        model(torch.randn(4, 8)).backward()
        assert bool(measured(probe, step)) is not bool(kind)
    if not kind:
        assert probe.blind_spots() == []
        return
    (spot,) = probe.blind_spots()
    assert "blocks.0, blocks.1" in spot.what
    assert kind in spot.what
    assert "compiled" not in spot.what + spot.way_out
    assert "dataclass" in spot.way_out


def test_a_healthy_regressor_has_no_tokens_and_no_residual_path(attached: Any) -> None:
    """Its output is near the mean of the targets, whatever comes in, and far from what goes in."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)
    )
    with torch.no_grad():
        model[4].bias.fill_(300.0)
    probe, table = attached(model, every=1)
    model(torch.randn(64, 8)).square().mean().backward()
    columns = measured(probe, 0)
    assert LAYER_ACTIVATION_SPREAD not in columns
    assert columns[LAYER_ACTIVATION_RMS].max() == pytest.approx(300.0, rel=0.1)  # seen all the same
    blocks = table.columns()[LAYER_BLOCK].astype(int)
    assert blocks.tolist() == [-1, 2, -1]
    assert not depth.gain(columns[LAYER_ACTIVATION_RMS], blocks, depth.DepthConfig()).flagged

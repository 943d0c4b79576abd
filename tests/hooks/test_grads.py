"""Layer norms of any kind of gradient; the oracle sums squares in float64, one tensor at a time."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sentinel_hooks
from sentinel_hooks.layers import OTHER, LayerTable
from sentinel_hooks.probes.grads import GradProbe, tensor_norms
from sentinel_hooks.probes.read import read

pytestmark = pytest.mark.torch


class Odd(nn.Module):
    """Tied weights, a frozen layer, a lazy one, a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.lazy = nn.LazyLinear(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, i: Tensor) -> Tensor:
        out: Tensor = self.head(self.lazy(self.frozen(self.embed(i)) * self.scale))
        return out.square().mean()


def measured(probe: GradProbe, scale: float | None = None) -> tuple[float, list[float]]:
    members = range(len(probe.members))
    pending = probe.measure(members, dict.fromkeys(members, scale))
    vectors, _ = read(pending.norms, [])
    norms = probe.resolve(pending, vectors)
    assert norms is not None
    return math.sqrt(norms.total_sq), np.sqrt(norms.layer_sq_L).tolist()


def brute_force(table: LayerTable, model: nn.Module, scale: float = 1.0) -> list[float]:
    modules = dict(model.named_modules())
    seen: set[int] = set()
    found = []
    for layer in table.layers:
        square = 0.0
        module = modules["" if layer.name == type(model).__name__ else layer.name]
        for p in module.parameters(recurse=False):
            if id(p) not in seen and p.grad is not None:
                dense = p.grad.to_dense() if p.grad.is_sparse else p.grad
                square += float((dense.double() / scale).square().sum())
            seen.add(id(p))
        found.append(math.sqrt(square))
    return found


class Deep(nn.Module):
    """Residual blocks; one may be dead, cut off, or not used."""

    def __init__(self, blocks: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(blocks)
        )
        self.last = nn.Linear(4, 4)
        self.cut = self.unused = -1

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            if i != self.unused:
                x = x + block(x)
            x = x.detach() if i == self.cut else x
        out: Tensor = self.last(x)
        return out.square().mean()


def columns_of(model: Deep, trained: Callable[[str], bool] = lambda name: True) -> dict[str, float]:
    """The gradient norm of each layer as an observation has it, by name."""
    named = [p for name, p in model.named_parameters() if trained(name)]
    with sentinel_hooks.attach(
        model=model,
        optimizer=torch.optim.SGD(named, lr=1e-3),
        sidecar=None,
        record=False,
        signals=sentinel_hooks.Signals(every=1),
    ) as session:
        observer = session._observer
        model(torch.randn(8, 4)).backward()
        seen = observer.alone(observer.measure(0, [0], None), 0, ())
        names = [layer.name for layer in session.layers.layers]
    return dict(zip(names, seen.columns["layer_grad_norm"].tolist(), strict=True))


def test_a_gradient_of_0_is_told_from_one_that_was_not_to_be_expected() -> None:
    def fewest(values: dict[str, float], at: float) -> set[str]:
        return {name for name, value in values.items() if value == at}

    torch.manual_seed(0)
    assert fewest(columns_of(Deep()), 0.0) == fewest(columns_of(Deep()), -math.inf) == set()
    dead = Deep()
    nn.init.constant_(dead.blocks[2].get_submodule("0").bias, -100.0)
    assert fewest(columns_of(dead), 0.0) == {"blocks.2.0"}
    frozen = Deep()
    frozen.blocks[2].requires_grad_(False)
    seen = columns_of(frozen)
    assert fewest(seen, -math.inf) == {"blocks.2.0", "blocks.2.2"}
    assert fewest(seen, 0.0) == set()
    unused = Deep()
    unused.unused = 2
    assert fewest(columns_of(unused), -math.inf) == {"blocks.2.0", "blocks.2.2"}
    cut = Deep()
    cut.cut = 1
    seen = columns_of(cut)
    assert fewest(seen, 0.0) == {f"blocks.{i}.{j}" for i in (0, 1) for j in (0, 2)}
    assert fewest(seen, -math.inf) == {"first"}, "in no block: nobody knows where it lies"


def test_a_layer_that_no_optimizer_holds_has_no_gradient_if_its_like_are_trained() -> None:
    forgotten = {"blocks.3.0", "blocks.3.2"}
    for left_out, zero in (
        ("blocks.3", forgotten),
        ("blocks.0", set()),  # whoever trains only what is next to the loss leaves out the bottom
        ("blocks", set()),
        ("last", set()),
    ):
        seen = columns_of(Deep(), lambda name, out=left_out: not name.startswith(out))  # type: ignore[misc]
        assert {n for n, v in seen.items() if v == 0.0} == zero
        rest = {n for n in seen if n.startswith(left_out)} - zero
        assert {n for n, v in seen.items() if v == -math.inf} == rest
    model = Deep()
    model.blocks[3].requires_grad_(False)
    seen = columns_of(model, lambda name: not name.startswith("blocks.3"))
    assert {n for n, v in seen.items() if v == -math.inf} == forgotten


def test_an_optimizer_that_takes_no_part_says_nothing_of_its_layers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    probe = GradProbe(optimizers, LayerTable.of([model]))
    model(torch.randn(2, 4)).sum().backward()
    for members, rows in (([0], [1.0, 0.0]), ([1], [0.0, 1.0]), ([0, 1], [1.0, 1.0])):
        pending = probe.measure(members)
        norms = probe.resolve(pending, read(pending.norms, [])[0])
        assert norms is not None
        assert norms.rows_L.tolist() == rows


def test_every_layer_has_its_norm_and_tied_weights_count_once() -> None:
    torch.manual_seed(0)
    model = Odd()
    optimizer = torch.optim.AdamW(model.parameters())
    table = LayerTable.of([model])
    assert [layer.name for layer in table.layers] == ["Odd", "embed", "frozen", "lazy"]
    probe = GradProbe([optimizer], table)
    model(torch.arange(7)).backward()
    total, layers = measured(probe)
    assert layers == pytest.approx(brute_force(table, model), rel=1e-6)
    assert layers[2] == 0.0
    assert min(layers[0], layers[1], layers[3]) > 0.0
    assert total == pytest.approx(math.sqrt(sum(x * x for x in layers)), rel=1e-12)


def test_the_table_knows_blocks_and_attention_and_sees_through_wrappers() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(4, 12)

    model = nn.ModuleDict(
        {"blocks": nn.ModuleList([Attention(), Attention()]), "out": nn.Linear(4, 2)}
    )
    table = LayerTable.of([torch.compile(model, backend="eager")])  # type: ignore[list-item]
    assert [(x.name, x.kind, x.shape, x.block, x.parameters) for x in table.layers] == [
        ("blocks.0.qkv", "Linear", (12, 4), 0, 60),
        ("blocks.1.qkv", "Linear", (12, 4), 1, 60),
        ("out", "Linear", (2, 4), None, 10),
    ]
    assert table.rows()[0]["name"] == "blocks.0.qkv"
    two = LayerTable.of([nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1))])
    assert [x.name for x in two.layers] == ["0.Linear", "1.0"]
    assert two.layers[1].block == 0


def test_parameters_added_later_are_measured_and_those_of_no_layer_count_in_the_total() -> None:
    model = nn.Linear(3, 3)
    stranger = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    table = LayerTable.of([model])
    probe = GradProbe([optimizer], table)
    assert probe.unlisted == 0
    for p in (model.weight, model.bias, stranger):
        p.grad = torch.full_like(p, 2.0)
    assert measured(probe)[0] == pytest.approx(6.0)
    optimizer.add_param_group({"params": [model.bias, stranger]})
    probe.refresh()
    total, layers = measured(probe)
    assert layers == pytest.approx([math.sqrt(48.0)])
    assert total == pytest.approx(math.sqrt(56.0))
    assert probe.unlisted == 1
    assert table.index([stranger]).tolist() == [OTHER]


@pytest.mark.parametrize(
    ("grad", "norm"),
    [
        (torch.full((100,), 60000.0, dtype=torch.float16), 600000.0),  # fp16 ends at 65504
        (torch.full((1000,), 0.001, dtype=torch.bfloat16), 0.0316066),
        (torch.full((4,), 1e100, dtype=torch.float64), 2e100),
        (torch.full((4,), 1e20), 2e20),  # its square is beyond float32
        (torch.tensor([3.0 + 4.0j, 0.0]), 5.0),
        (torch.empty(0), 0.0),
    ],
)
def test_no_kind_of_gradient_overflows_or_is_rounded_away(grad: Tensor, norm: float) -> None:
    model = nn.Module()
    model.p = nn.Parameter(torch.zeros_like(grad))
    probe = GradProbe([torch.optim.SGD(model.parameters(), lr=0.1)], LayerTable.of([model]))
    model.p.grad = grad
    total, layers = measured(probe)
    assert total == pytest.approx(norm, rel=1e-3 if grad.dtype == torch.bfloat16 else 1e-6)
    assert layers == [total]


def test_a_mixture_of_kinds_is_measured_one_by_one() -> None:
    i = torch.tensor([[0, 0, 2]])  # uncoalesced: the same row twice
    grads: list[Tensor] = [
        torch.ones(4),
        torch.ones(4, dtype=torch.float64),
        torch.ones(4, dtype=torch.bfloat16),
        torch.sparse_coo_tensor(i, torch.ones(3, 2), (4, 2), check_invariants=True),
    ]
    assert [float(n) for n in tensor_norms(grads)] == pytest.approx([2.0, 2.0, 2.0, math.sqrt(10)])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_gradient_names_its_layer_and_no_other(bad: float) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    probe = GradProbe([torch.optim.SGD(model.parameters(), lr=0.1)], LayerTable.of([model]))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    model[1].weight.grad[0, 1] = bad  # type: ignore[index,union-attr]
    total, layers = measured(probe)
    assert not math.isfinite(total)
    assert layers[0] == pytest.approx(math.sqrt(12))
    assert not math.isfinite(layers[1])


def test_gradients_still_scaled_are_divided() -> None:
    model = nn.Linear(3, 3)
    probe = GradProbe([torch.optim.SGD(model.parameters(), lr=0.1)], LayerTable.of([model]))
    for p in model.parameters():
        p.grad = torch.full_like(p, 1024.0)
    assert measured(probe, scale=1024.0)[0] == pytest.approx(math.sqrt(12))


def test_no_gradient_is_no_measurement() -> None:
    model = nn.Linear(3, 3)
    probe = GradProbe([torch.optim.SGD(model.parameters(), lr=0.1)], LayerTable.of([model]))
    pending = probe.measure([0])
    assert probe.resolve(pending, []) is None


def clips(probe: GradProbe, *groups: list[Any]) -> None:
    for group in groups:
        grads = [p.grad for p in group]
        probe.clipped(group, grads, torch.stack(tensor_norms(grads)))
        for g in grads:
            g.mul_(1e-3)


def test_norms_from_clips_are_used_whole_in_parts_and_never_twice() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    ps = list(model.parameters())
    probe = GradProbe([torch.optim.SGD(ps, lr=0.1)], LayerTable.of([model]))

    def fill() -> None:
        for i, p in enumerate(ps):
            p.grad = torch.full_like(p, float(i + 1))

    fill()
    truth = measured(probe)
    for groups in ([ps], [ps[:2], ps[2:]], [ps[::-1]], [ps[1:3]], [ps, ps[:1]]):
        fill()
        clips(probe, *groups)
        total, layers = measured(probe)
        assert (total, layers) == (pytest.approx(truth[0]), pytest.approx(truth[1])), groups
        probe.forget_clips()


def decay_groups(model: nn.Module) -> list[torch.optim.Optimizer]:
    """As trainers make them: matrices decay, vectors do not, so the order is not the model's."""
    ps = list(model.parameters())
    matrices, vectors = [p for p in ps if p.dim() > 1], [p for p in ps if p.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [torch.optim.SGD(groups, lr=0.1)]


def frozen_in_the_optimizer(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1)]


def trainable_outside_it(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(list(model.parameters())[2:], lr=0.1)]


def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    ps = list(model.parameters())
    return [torch.optim.SGD(ps[3:], lr=0.1), torch.optim.SGD(ps[:3], lr=0.1)]


def embedded(device: str = "cpu") -> nn.Module:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 3)).to(device)
    model[0].requires_grad_(False)
    return model


def fill_grads(model: nn.Module, seed: int = 0) -> None:
    g = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        values = torch.randn(p.shape, generator=g)
        if p.requires_grad:
            p.grad = torch.empty_like(p) if p.device.type == "meta" else values


def clip_all(probe: GradProbe, model: nn.Module) -> None:
    """What the tap tells of clip_grad_norm_(model.parameters()): those with a gradient."""
    owners = [p for p in model.parameters() if p.grad is not None]
    probe.clipped(owners, [p.grad for p in owners if p.grad is not None], None)


Split = Callable[[nn.Module], list[torch.optim.Optimizer]]
one_clip = pytest.mark.parametrize(
    "split", [decay_groups, frozen_in_the_optimizer, trainable_outside_it, two_optimizers]
)


@one_clip
def test_one_clip_over_the_model_is_used_whole_however_optimizers_split_it(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = embedded()
    optimizers = split(model)
    members = range(len(optimizers))
    probe = GradProbe(optimizers, LayerTable.of([model]))

    def refused(*_: Any, **__: Any) -> Tensor:
        raise AssertionError("measure() read from the device")

    for step in range(3):
        fill_grads(model, step)
        expected = {
            id(p): torch.stack(tensor_norms([p.grad]))
            for p in model.parameters()
            if p.grad is not None
        }
        clip_all(probe, model)
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(1e-3)  # measured again it would be another norm
        with monkeypatch.context() as patch:
            for name in ("cpu", "item", "tolist", "__float__"):
                patch.setattr(Tensor, name, refused)
            assert not probe.clips_in_parts(members)
            pending = probe.measure(members)
        for norms, member in zip(pending.norms, probe.members, strict=True):
            own = [expected[id(p)] for p in member.parameters if p.grad is not None]
            assert torch.equal(norms, torch.cat(own))  # to the last bit, in the member's order
        probe.forget_clips()


@one_clip
def test_nothing_is_read_from_the_device_for_them(split: Split) -> None:
    model = embedded("meta")
    optimizers = split(model)
    probe = GradProbe(optimizers, LayerTable.of([model]))
    fill_grads(model)
    clip_all(probe, model)
    pending = probe.measure(range(len(optimizers)))  # any read from a meta tensor raises
    assert {n.device.type for n in pending.norms} == {"meta"}


def test_what_is_known_of_a_clip_goes_when_its_list_or_the_groups_change() -> None:
    model = embedded()
    ps = list(model.parameters())[1:]
    (optimizer,) = decay_groups(model)
    probe = GradProbe([optimizer], LayerTable.of([model]))

    def same(*clipped: list[nn.Parameter]) -> bool:
        """Whether it was clipped in parts; the norms must be those of the whole."""
        probe.refresh()
        fill_grads(model, 3)
        probe.forget_clips()
        truth = measured(probe)
        clips(probe, *clipped)
        in_parts = probe.clips_in_parts([0])
        assert measured(probe) == (pytest.approx(truth[0]), pytest.approx(truth[1]))
        assert measured(probe) == (pytest.approx(truth[0]), pytest.approx(truth[1]))
        return in_parts

    assert not same(ps)
    assert not same(ps[::-1])
    assert not same([ps[1], ps[0], *ps[2:]])
    assert same(ps[1:3])
    assert same(ps[:2], ps[2:])
    assert not same(ps)
    late = nn.Parameter(torch.zeros(2))
    late.grad = torch.ones(2)
    optimizer.add_param_group({"params": [late]})
    assert same(ps), "one was not clipped"
    assert not same([late, *ps])
    late.grad = None
    assert not same(ps), "without a gradient there is nothing to clip"
    other = nn.Parameter(torch.zeros(2))
    optimizer.param_groups[0]["params"][1] = other
    assert not same(ps)
    other.grad = torch.full((2,), 7.0)
    assert same(ps)


def test_a_gradient_dropped_after_the_clip_is_not_counted() -> None:
    model = embedded()
    (optimizer,) = decay_groups(model)
    probe = GradProbe([optimizer], LayerTable.of([model]))
    for _ in range(2):
        fill_grads(model)
        probe.forget_clips()
        clip_all(probe, model)
        whole = measured(probe)[0]
        model[2].weight.grad = None
        rest = measured(probe)
        assert rest[0] < whole
        assert rest[1] == pytest.approx(brute_force(probe._table, model))


def test_each_optimizer_clipped_by_itself_is_not_clipped_in_parts() -> None:
    model = embedded()
    optimizers = two_optimizers(model)
    probe = GradProbe(optimizers, LayerTable.of([model]))
    fill_grads(model)
    truth = measured(probe)
    own = [[p for p in m.parameters if p.grad is not None] for m in probe.members]
    clips(probe, own[0])
    assert not probe.clips_in_parts([0, 1]), "the other was not clipped at all"
    clips(probe, own[1])
    assert not probe.clips_in_parts([0, 1])
    assert measured(probe) == (pytest.approx(truth[0]), pytest.approx(truth[1]))
    clips(probe, own[0][:1])
    assert probe.clips_in_parts([0, 1])
    assert not probe.clips_in_parts([1])


def test_a_parameter_swapped_in_the_middle_of_a_group_is_watched_in_the_same_step(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with sentinel_hooks.attach(
        model=model, optimizer=optimizer, sidecar=None, run_dir=tmp_path
    ) as session:
        for t in range(8):
            if t == 6:
                new = copy.deepcopy(model[1].weight)
                model[1].weight = new
                optimizer.param_groups[0]["params"][2] = new
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            if t >= 6:
                model[1].weight.grad[0, 0] = math.nan
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            held = all(map(torch.equal, before, model.parameters()))
            assert held is (t >= 6), t
        assert not session.status().internal_errors


def test_the_hot_path_reads_nothing_from_the_device() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to("meta")
    probe = GradProbe([torch.optim.SGD(model.parameters(), lr=0.1)], LayerTable.of([model]))
    for p in model.parameters():
        p.grad = torch.empty_like(p)
    pending = probe.measure([0], {0: None})  # any read from a meta tensor raises
    assert pending.norms[0].device.type == "meta"
    probe.clipped(list(model.parameters()), [p.grad for p in model.parameters()], None)  # type: ignore[misc]
    assert probe.measure([0]).norms[0].shape == (4,)


def test_reading_takes_one_copy_for_each_device_and_keeps_float64() -> None:
    vectors, scalars = read(
        [torch.tensor([1.0, 2.0]), torch.tensor([3.0], dtype=torch.bfloat16)],
        [torch.tensor(1 / 3, dtype=torch.float64), torch.tensor([[5]])],
    )
    assert [v.tolist() for v in vectors] == [[1.0, 2.0], [3.0]]
    assert scalars == [1 / 3, 5.0]

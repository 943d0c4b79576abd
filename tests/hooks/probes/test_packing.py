"""Norms of packed tensors; the oracle takes them one by one, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sentinel_hooks.layers import LayerTable
from sentinel_hooks.probes.grads import GradProbe
from sentinel_hooks.probes.packing import CHUNK, FEW, SMALL, Packing
from sentinel_hooks.probes.read import read

pytestmark = pytest.mark.torch


def values(vectors: list[Tensor], packing: Packing, count: int) -> list[float]:
    found = np.full(count, math.nan)
    for vector, places in zip(vectors, packing.places, strict=True):
        assert len(vector) == len(places)
        assert np.isnan(found[places]).all(), "a tensor was measured twice"
        found[places] = vector.double().numpy()
    assert not np.isnan(found).any(), "a tensor was left out"
    return list(found.tolist())


def plain(tensors: list[Tensor]) -> list[float]:
    dense = [t.to_dense() if t.is_sparse else t for t in tensors]
    return [float(t.double().square().sum().sqrt()) for t in dense]


def mixture() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(16, 16)] * 7 + [(33,)] * 5 + [(SMALL + 1,)] * 4 + [()] * 3 + [(2, 3, 4)] * 2
    shapes += [(16, 16)] * 3 + [(5, 0)] * 4 + [(3, 8, 2, 2)] * 4
    order = torch.randperm(len(shapes)).tolist()
    return [torch.randn(shapes[i]) * 10.0 ** (i % 5 - 2) for i in order]


@pytest.mark.parametrize("small", [0, 20, SMALL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_each_tensor_has_its_norm_once_whatever_shares_a_shape(
    dtype: torch.dtype, small: int
) -> None:
    tensors = [t.to(dtype) for t in mixture()]
    packing = Packing(tensors, small)
    found = values(packing.norms(tensors), packing, len(tensors))
    assert found == pytest.approx(plain(tensors), rel=1e-6)


def test_more_of_a_shape_than_a_chunk_holds_are_several_chunks() -> None:
    count = 3 * CHUNK // 1024 + 1
    tensors = list(torch.randn(count, 32, 32).unbind())
    packing = Packing(tensors)
    assert [len(d.chunks) for d in packing._devices] == [4]
    found = values(packing.norms(tensors), packing, count)
    assert found == pytest.approx(plain(tensors), rel=1e-6)


def test_fewer_than_a_few_of_a_shape_stay_alone() -> None:
    tensors = [torch.randn(8) for _ in range(FEW - 1)] + [torch.randn(9) for _ in range(FEW)]
    (device,) = Packing(tensors)._devices
    assert [c.count for c in device.chunks] == [FEW]


def test_lists_that_are_not_as_the_first_was_are_measured_all_the_same() -> None:
    like = [torch.zeros(4, 4) for _ in range(6)]
    packing = Packing(like)
    i = torch.tensor([[0, 0, 2]])  # uncoalesced
    sparse = torch.sparse_coo_tensor(i, torch.ones(3, 4), (4, 4), check_invariants=True)
    for tensors in (
        [torch.randn(4, 4).t() for _ in range(6)],  # other strides
        [torch.randn(4, 4).double() for _ in range(6)],
        [torch.randn(4, 4) for _ in range(3)] + [torch.randn(4, 4).bfloat16() for _ in range(3)],
        [sparse] * 6,
        [sparse] * 3 + [torch.randn(4, 4) for _ in range(3)],
        [torch.randn(4, 4) for _ in range(5)] + [torch.randn(3)],  # reshaped since
        [torch.randn(2, 2) for _ in range(6)],
    ):
        found = values(packing.norms(tensors), packing, 6)
        assert found == pytest.approx(plain(tensors), rel=1e-6)


def test_channels_last_is_measured_in_place() -> None:
    tensors = [
        torch.randn(4, 3, 5, 5).contiguous(memory_format=torch.channels_last) for _ in range(5)
    ]
    packing = Packing(tensors)
    found = values(packing.norms(tensors), packing, 5)
    assert found == pytest.approx(plain(tensors), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_number_stays_in_its_own_norm(bad: float) -> None:
    tensors = [torch.ones(8) for _ in range(5)]
    tensors[3][2] = bad
    packing = Packing(tensors)
    found = np.zeros(5)
    found[packing.places[0]] = packing.norms(tensors)[0].numpy()
    assert np.isfinite(found).tolist() == [True, True, True, False, True]


def test_copies_are_of_their_moment_and_their_difference_is_exact() -> None:
    tensors = mixture()
    packing = Packing(tensors)
    before = [t.clone() for t in tensors]
    copies, norms = packing.copies(tensors)
    assert values(norms, packing, len(tensors)) == pytest.approx(plain(before), rel=1e-6)
    for t in tensors:
        t.add_(torch.randn_like(t) * 1e-3)
    moved = [b - t for b, t in zip(before, tensors, strict=True)]
    found = values(packing.subtract(copies, tensors), packing, len(tensors))
    assert found == pytest.approx(plain(moved), rel=1e-6)


def test_packing_reads_nothing_from_the_device() -> None:
    tensors = [torch.empty(4, 4, device="meta") for _ in range(6)]
    packing = Packing(tensors)
    assert packing.norms(tensors)[0].device.type == "meta"
    copies, norms = packing.copies(tensors)
    assert norms[0].shape == packing.subtract(copies, tensors)[0].shape == (6,)


def test_layers_keep_their_own_norms_when_gradients_come_and_go() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    probe = GradProbe([torch.optim.SGD(model.parameters(), lr=0.1)], LayerTable.of([model]))
    for gone in ((), (2,), (0, 5), (), (2,)):
        for i, layer in enumerate(model):
            for p in layer.parameters():
                p.grad = None if i in gone else torch.randn_like(p)
        pending = probe.measure([0])
        found = probe.resolve(pending, read(pending.norms, [])[0])
        assert found is not None
        truth = [
            sum(float(p.grad.double().square().sum()) for p in x.parameters() if p.grad is not None)
            for x in model
        ]
        assert found.layer_sq_L.tolist() == pytest.approx(truth, rel=1e-6)


def test_entries_too_large_for_float32_are_confirmed_in_their_own_layer() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=i % 2 == 0) for i in range(6)))
    probe = GradProbe([torch.optim.SGD(model.parameters(), lr=0.1)], LayerTable.of([model]))
    for i, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, 1e20 if i == 4 else 1.0)
    pending = probe.measure([0])
    found = probe.resolve(pending, read(pending.norms, [])[0])
    assert found is not None
    norms = np.sqrt(found.layer_sq_L)
    layer = probe._table.index([list(model.parameters())[4]])[0]
    assert norms[layer] >= 1e20
    assert np.delete(norms, layer).max() < 10.0

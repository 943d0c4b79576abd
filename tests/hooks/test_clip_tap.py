"""The user's clip gives the same answer, bit for bit, and its norms are shared."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as imported_early

from sentinel_hooks.seams.clip_tap import CLIP_TAP

pytestmark = pytest.mark.torch


class Listener:
    def __init__(self) -> None:
        self.heard: list[tuple[list[Tensor], list[Tensor], Tensor | None]] = []
        self.true_norms: list[list[float]] = []
        self.scales: list[tuple[float, float]] = []
        self.left: list[list[tuple[Tensor, int]]] = []  # as each clip left them

    def on_clip(
        self, parameters: Sequence[Tensor], grads: Sequence[Tensor], norms: Tensor | None
    ) -> None:
        self.heard.append((list(parameters), list(grads), norms))
        self.true_norms.append([float(g.to_dense().double().norm()) for g in grads])

    def on_scale(self, max_norm: float, total_norm: Any) -> None:
        self.scales.append((float(max_norm), float(total_norm)))

    def on_clipped(self, grads: Sequence[Tensor]) -> None:
        self.left.append([(g, g._version) for g in grads])


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    CLIP_TAP.subscribe(made)
    yield made
    CLIP_TAP.unsubscribe(made)


def parameters(
    dtypes: Sequence[torch.dtype], seed: int = 0, size: float = 1.0
) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(seed)
    made = []
    for i, dtype in enumerate(dtypes):
        p = nn.Parameter(torch.zeros(3 + i, 4, dtype=dtype))
        p.grad = (size * torch.randn(3 + i, 4, generator=g)).to(dtype)
        made.append(p)
    made.append(nn.Parameter(torch.zeros(2)))  # without a gradient
    return made


F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [1.0, 2, 2.0, 3.0, math.inf])
@pytest.mark.parametrize(
    "dtypes", [[F32] * 5, [F64] * 3, [BF16] * 3, [F32, F64, F32], [F32, BF16, BF16, F32], []]
)
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_is_bitwise_what_torch_does(
    foreach: bool | None, norm_type: float, dtypes: list[torch.dtype], max_norm: float
) -> None:
    stock, ours = parameters(dtypes), parameters(dtypes)
    expected = torch.nn.utils.clip_grad_norm_(stock, max_norm, norm_type, False, foreach)
    listener = Listener()
    CLIP_TAP.subscribe(listener)
    try:
        total = torch.nn.utils.clip_grad_norm_(ours, max_norm, norm_type, False, foreach)
    finally:
        CLIP_TAP.unsubscribe(listener)
    assert torch.equal(total, expected)
    assert total.dtype == expected.dtype
    for a, b in zip(stock, ours, strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None and b.grad is not None:
            assert torch.equal(a.grad, b.grad)
    assert len(listener.heard) == 1


@pytest.mark.parametrize("clip", [imported_early, lambda *a: torch.nn.utils.clip_grad_norm_(*a)])
def test_the_norms_are_those_before_clipping_whoever_imported_the_name(
    clip: Any, listener: Listener
) -> None:
    ps = parameters([F32] * 4)
    clip((p for p in ps), 0.1)
    (owners, grads, norms), truth = listener.heard[0], listener.true_norms[0]
    assert owners == ps[:-1]
    assert norms is not None
    assert norms.tolist() == pytest.approx(truth, rel=1e-6)
    assert float(grads[0].norm()) < truth[0]
    assert listener.scales == [
        (pytest.approx(0.1), pytest.approx(sum(n * n for n in truth) ** 0.5))
    ]


def test_the_two_public_halves_of_the_clip_are_heard_too(listener: Listener) -> None:
    ps = parameters([F32] * 3)
    total = torch.nn.utils.get_total_norm([p.grad for p in ps if p.grad is not None])
    torch.nn.utils.clip_grads_with_norm_(ps, 0.1, total)
    assert listener.heard[0][2] is not None
    assert listener.heard[0][2].tolist() == pytest.approx(listener.true_norms[0], rel=1e-6)


def test_a_norm_of_other_tensors_is_not_taken_for_that_of_the_gradients(
    listener: Listener,
) -> None:
    ps = parameters([F32] * 3)
    torch.nn.utils.get_total_norm([torch.ones(3)] * 3)
    torch.nn.utils.clip_grads_with_norm_(ps, 0.1, torch.tensor(9.0))
    assert listener.heard[0][2] is None


def test_value_clipping_is_announced_before_it_hides_the_norm(listener: Listener) -> None:
    ps = parameters([F32] * 3, size=5.0)
    stock = copy.deepcopy(ps)
    for a, b in zip(stock, ps, strict=True):
        a.grad = None if b.grad is None else b.grad.clone()
        if a.grad is not None:
            a.grad.clamp_(-0.5, 0.5)
    torch.nn.utils.clip_grad_value_(ps, 0.5)
    assert listener.true_norms[0][0] > 5.0
    assert all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(stock, ps, strict=True)
        if a.grad is not None and b.grad is not None
    )


def test_the_wish_to_raise_on_a_non_finite_norm_is_kept_word_for_word(listener: Listener) -> None:
    ps = parameters([F32] * 3)
    assert ps[1].grad is not None
    ps[1].grad[0, 0] = math.nan
    kept = [None if p.grad is None else p.grad.clone() for p in ps]
    with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
        torch.nn.utils.clip_grad_norm_(ps, 1.0, error_if_nonfinite=True)
    assert all(
        torch.equal(
            a,
            b.grad,
        )
        or bool(a.isnan().any())
        for a, b in zip(kept, ps, strict=True)
        if a is not None and b.grad is not None
    )
    assert not listener.heard, "nothing was clipped"


def test_sparse_gradients_meet_torchs_own_error(listener: Listener) -> None:
    p = nn.Parameter(torch.zeros(4, 2))
    p.grad = torch.sparse_coo_tensor(
        torch.tensor([[0, 2]]), torch.ones(2, 2), (4, 2), check_invariants=True
    )
    with pytest.raises(NotImplementedError, match="vector_norm"):
        torch.nn.utils.clip_grad_norm_([p], 1.0)


def test_the_last_listener_takes_the_wrappers_away() -> None:
    before = (
        torch.nn.utils.clip_grad._get_total_norm,
        torch.nn.utils.clip_grad._clip_grads_with_norm_,
        torch.nn.utils.clip_grad.clip_grad_value_,
        torch.nn.utils.get_total_norm,
        torch.nn.utils.clip_grads_with_norm_,
        torch.nn.utils.clip_grad_value_,
    )
    a, b = Listener(), Listener()
    CLIP_TAP.subscribe(a)
    CLIP_TAP.subscribe(b)
    CLIP_TAP.unsubscribe(a)
    assert torch.nn.utils.clip_grad._get_total_norm is not before[0]
    CLIP_TAP.unsubscribe(b)
    assert before == (
        torch.nn.utils.clip_grad._get_total_norm,
        torch.nn.utils.clip_grad._clip_grads_with_norm_,
        torch.nn.utils.clip_grad.clip_grad_value_,
        torch.nn.utils.get_total_norm,
        torch.nn.utils.clip_grads_with_norm_,
        torch.nn.utils.clip_grad_value_,
    )

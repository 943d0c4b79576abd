"""The attention probe: what it sees, what it says that it cannot see, and that it moves nothing."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as early
from torch.utils.checkpoint import checkpoint

from sentinel.core.detectors import attention_logit
from sentinel.core.types import LAYER_ATTENTION_MAX_LOGIT, NOT_MEASURED
from sentinel_hooks.layers import LayerTable
from sentinel_hooks.probes import capture, exact
from sentinel_hooks.probes.attention import HIGH, LOW, AttentionProbe
from sentinel_hooks.probes.places import ALL, FEW, SOME, WHERE, Place
from sentinel_hooks.probes.probe import resolve
from sentinel_hooks.probes.read import read

pytestmark = pytest.mark.torch
WIDTH, HEADS, LENGTH = 16, 2, 12


class Attn(nn.Module):
    """Attention that calls `how`."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.how = how
        self.last: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        self.last = (q.detach(), k.detach())
        out: Tensor = self.out(self.how(q, k, v).transpose(1, 2).reshape(B, T, D))
        return out


class Model(nn.Module):
    """Layers of attention."""

    def __init__(self, how: Any, layers: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"attn": Attn(how)}) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block["attn"](x)
        return x.square().mean()


def by_attribute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_early_name(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return early(q, k, v, is_causal=True)


def by_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(causal(q, k), dim=-1) @ v


def by_torch_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(causal(q, k), dim=-1, dtype=torch.float32) @ v


def by_softmax_module(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = nn.Softmax(dim=-1)(causal(q, k)) @ v
    return out


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = causal(q, k).exp()
    return s / s.sum(-1, keepdim=True) @ v


def causal(q: Tensor, k: Tensor) -> Tensor:
    s = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
    later = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)
    return s.masked_fill(later, torch.finfo(s.dtype).min)


def truth(attn: Attn) -> list[float]:
    """The largest causal score of each head, in float64."""
    assert attn.last is not None
    q, k = (t.double() for t in attn.last)
    s = (q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))).tril().numpy()
    allowed = np.tril(np.ones(s.shape[-2:], bool))
    return [float(s[:, h][:, allowed].max()) for h in range(HEADS)]


class Watch:
    """A probe on a model, and one step at a time."""

    def __init__(self, model: nn.Module, threshold: float = 50.0) -> None:
        self.model = model
        self.table = LayerTable.of([model])
        self.probe = AttentionProbe([model], self.table, threshold)
        self.probe.attach()
        self.t = 0

    def column(self) -> Any:
        self.probe.before_step(self.t)
        self.t += 1
        values, _ = read(self.probe.pending(), [])
        return resolve(self.probe, values).get(LAYER_ATTENTION_MAX_LOGIT)

    def layers(self) -> dict[str, float]:
        column = self.column()
        if column is None:
            return {}
        return {
            layer.name: float(value)
            for layer, value in zip(self.table.layers, column, strict=True)
            if not np.isneginf(value)
        }


@pytest.fixture
def watch() -> Iterator[Any]:
    made: list[Watch] = []

    def start(model: nn.Module, threshold: float = 50.0) -> Watch:
        made.append(Watch(model, threshold))
        return made[-1]

    yield start
    for one in made:
        one.probe.detach()


def batch() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, LENGTH, WIDTH)


@pytest.mark.parametrize(
    "how",
    [by_attribute, by_early_name, by_softmax, by_torch_softmax, by_softmax_module],
    ids=lambda how: how.__name__,
)
def test_each_layer_and_head_has_its_largest_logit_however_it_is_written(
    how: Any, watch: Any
) -> None:
    torch.manual_seed(0)
    model = Model(how)
    w = watch(model)
    for _ in range(2):  # twice: the first measurement is a rule of its own
        model(batch()).backward()
        found = w.layers()
        assert list(found) == [f"blocks.{i}.attn.qkv" for i in range(3)]
        for i in range(3):
            heads = truth(model.blocks[i]["attn"])
            name = f"blocks.{i}.attn.qkv"
            bounds = (max(heads) - 1e-5, max(heads) + math.log(LENGTH))
            assert bounds[0] <= found[name] <= bounds[1]
            assert np.all(w.probe.heads[name] >= np.array(heads) - 1e-5)
    assert w.probe.blind_spots() == []


def test_a_layer_that_nobody_can_see_is_named_with_the_way_out(watch: Any) -> None:
    model = Model(by_hand)
    w = watch(model)
    model(batch()).backward()
    assert w.column() is None
    (spot,) = w.probe.blind_spots()
    assert "blocks.0.attn, blocks.1.attn, blocks.2.attn" in spot.what
    assert "F.scaled_dot_product_attention" in spot.way_out


class Adapted(nn.Module):
    """A frozen projection and what is trained beside it, as LoRA wraps it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.down = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.up = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x) + self.up["default"](self.down["default"](x))
        return out


class Named(nn.Module):
    """An attention whose projections are named as GPT-2 names them, or have it in their name."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.c_attn = Adapted(nn.Linear(WIDTH, 3 * WIDTH))
        self.attn_proj = Adapted(nn.Linear(WIDTH, WIDTH))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        out: Tensor = self.attn_proj(self.how(q, k, v).transpose(1, 2).reshape(B, T, D))
        return out


def test_projections_with_lora_around_them_are_no_attention_that_nobody_sees(watch: Any) -> None:
    """Seen red: "attention logits of ...c_attn are not seen", and they were measured."""
    model = Model(by_attribute)
    for block in model.blocks:
        block["attn"] = Named(by_attribute)
    w = watch(model)
    model(batch()).backward()
    assert list(w.layers()) == [f"blocks.{i}.attn.c_attn.base_layer" for i in range(3)]
    assert w.probe.blind_spots() == []


def test_with_lora_too_an_attention_that_nobody_can_see_is_named(watch: Any) -> None:
    model = Model(by_attribute)
    model.blocks[1]["attn"] = Named(by_hand)
    w = watch(model)
    model(batch()).backward()
    (spot,) = w.probe.blind_spots()
    assert "blocks.1.attn" in spot.what


def test_frozen_attention_is_named_and_not_made_up(watch: Any) -> None:
    model = Model(by_attribute)
    model.blocks[0].requires_grad_(False)
    w = watch(model)
    model(batch()).backward()
    assert list(w.layers()) == ["blocks.1.attn.qkv", "blocks.2.attn.qkv"]
    (spot,) = w.probe.blind_spots()
    assert "blocks.0.attn" in spot.what
    assert "frozen" in spot.what


@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention_is_seen_with_and_without_its_weights(
    need_weights: bool, watch: Any
) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mha = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.mha(x, x, x, need_weights=need_weights)[0]
            return out.square().mean()

    torch.manual_seed(0)
    model = Wrapped()
    w = watch(model, threshold=-1e9)  # everything is above: the probe wants it exact
    for _ in range(3):
        model(batch()).backward()
        found = w.layers()
    x = batch().double()
    weight = model.mha.in_proj_weight.detach().double()
    bias = model.mha.in_proj_bias.detach().double()
    q, k = (F.linear(x, weight, bias).view(2, LENGTH, 3, HEADS, -1).permute(2, 0, 3, 1, 4))[:2]
    s = (q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))).amax((0, 2, 3))
    assert found == {"mha": pytest.approx(float(s.max()), rel=1e-4)}
    assert w.probe.heads["mha"].tolist() == pytest.approx(s.tolist(), rel=1e-4)


def test_evaluation_is_not_training(watch: Any) -> None:
    model = Model(by_attribute)
    w = watch(model)
    model(batch()).backward()
    small = w.layers()
    model(batch()).backward()
    with torch.no_grad():
        model(batch() * 1e3)
    assert w.layers()["blocks.0.attn.qkv"] <= small["blocks.0.attn.qkv"] + math.log(LENGTH)


def test_micro_batches_count_with_their_largest(watch: Any) -> None:
    model = Model(by_attribute)
    w = watch(model)
    alone = []
    for scale in (1.0, 40.0, 2.0, 1.0, 1.0, 1.0, 1.0):
        model(batch() * scale).backward()
        alone.append(w.layers()["blocks.0.attn.qkv"])
    for scale in (1.0, 40.0, 2.0, 1.0, 1.0, 1.0, 1.0):
        model(batch() * scale).backward()
    assert w.layers()["blocks.0.attn.qkv"] == pytest.approx(max(alone), abs=math.log(LENGTH))
    assert w.column() is None  # and not again


def test_large_log_sum_exps_are_reduced_at_once_and_say_the_same(
    watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[dict[str, float]]] = []
    for kept in (0, capture.RAW_NUMEL):  # elements
        monkeypatch.setattr(capture, "RAW_NUMEL", kept)
        torch.manual_seed(0)
        model = Model(by_attribute)
        w = watch(model)
        steps = []
        for scales in ((1.0,), (1.0,), (1.0, 2.0, 1.0), (2.0,), (1.0,)):
            for scale in scales:
                model(batch() * scale).backward()
            places = [place for _, place in w.probe.watched]
            assert all(bool(place.top) is (kept == 0 and bool(steps)) for place in places)
            steps.append(w.layers())
            heads = w.probe.heads["blocks.1.attn.qkv"]
            assert heads.shape == (HEADS,)
            assert np.array_equal(heads.max(), np.float32(steps[-1]["blocks.1.attn.qkv"]))
        found.append(steps)
        assert not any(place.raw or place.top or place.low for place in places)
        w.probe.detach()
    assert repr(found[0]) == repr(found[1])
    assert found[0][2] == found[0][3] != found[0][1]
    assert found[0][4] == found[0][1]


def test_a_call_over_a_single_key_after_others_is_computed(watch: Any) -> None:
    torch.manual_seed(0)
    model = Model(by_attribute)
    w = watch(model)
    for _ in range(3):
        model(batch()).backward()
        w.column()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(math.nan)
    model(batch()[:, :1]).backward()
    assert all(math.isnan(v) for v in w.layers().values())  # the kernel's log-sum-exp is 0


def test_a_calm_step_says_what_is_said_when_every_layer_is_looked_at(watch: Any) -> None:
    torch.manual_seed(0)
    model = Model(by_attribute)
    w = watch(model)
    for rows in (2, 2, 3, 1, 3):  # as many as heads, and not
        model(torch.randn(rows, LENGTH, WIDTH)).backward()
        w.probe.before_step(w.t)
        values = read(w.probe.pending(), [])[0]
        said, by_head = w.probe.parts(values), w.probe.heads
        w.probe._last = []
        bounds = np.full((2, len(w.table) + 1), NOT_MEASURED)
        looked = w.probe._judge(values, *bounds)
        assert all(np.array_equal(said[name], looked[name]) for name in (HIGH, LOW))
        assert repr(by_head) == repr(w.probe.heads)
        w.t += 1
    assert all(place.level == FEW for _, place in w.probe.watched)


def test_a_nan_is_a_measurement(watch: Any) -> None:
    model = Model(by_attribute)
    w = watch(model)
    with torch.no_grad():
        model.blocks[1]["attn"].qkv.weight[0, 0] = math.nan
    model(batch()).backward()
    found = w.layers()
    assert math.isfinite(found["blocks.0.attn.qkv"])
    assert math.isnan(found["blocks.1.attn.qkv"])


def test_rows_that_see_no_key_say_nothing(watch: Any) -> None:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    mask[:5] = False
    shift = 30.0  # all real scores are far below 0, where an empty row would stand out

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = torch.full((LENGTH, LENGTH), -shift).masked_fill(~mask, -math.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    model = Model(masked)
    w = watch(model)
    for _ in range(3):
        model(batch()).backward()
        found = w.layers()
        assert found
        assert max(found.values()) < -shift / 2


@pytest.mark.parametrize("how", [by_attribute, by_softmax], ids=lambda how: how.__name__)
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_outputs_and_gradients_are_bitwise_those_without_us(
    how: Any, reentrant: bool | None, watch: Any
) -> None:
    torch.manual_seed(0)
    model = Model(how)

    def step() -> list[Tensor]:
        model.zero_grad()
        x = batch().requires_grad_()
        y = x
        for block in model.blocks:
            if reentrant is None:
                y = y + block["attn"](y)
            else:
                y = y + checkpoint(block["attn"], y, use_reentrant=reentrant)
        loss = y.square().mean()
        loss.backward()
        return [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]  # type: ignore[list-item,union-attr]

    alone = step()
    w = watch(model)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(alone, step(), strict=True))
        assert len(w.layers()) == 3


def test_counted_once_under_checkpointing(watch: Any) -> None:
    model = Model(by_attribute)
    w = watch(model)
    x = batch().requires_grad_()
    for _ in range(2):
        checkpoint(model, x, use_reentrant=False).backward()
        places = [p for _, p in w.probe._places if p.attention]
        assert [len(p.raw) + len(p.low) for p in places] == [1, 1, 1]
        w.column()


def test_the_hot_path_reads_nothing_from_the_device(watch: Any) -> None:
    """On a meta device any .item(), .tolist(), boolean mask or copy raises."""
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device="meta")

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    for how in (by_attribute, masked, by_meta_softmax):
        model = Model(how).to("meta")
        w = watch(model)
        for level in range(3):
            for _, place in w.probe._places:
                place.level = level
            model(torch.empty(2, LENGTH, WIDTH, device="meta")).backward()
            w.probe.before_step(level)
            pending = w.probe.pending()
            assert pending
            assert all(p.device.type == "meta" for p in pending)
            for _, place in w.probe._places:
                assert not place.trouble
                place.clear()


def by_meta_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.transpose(-1, -2), dim=-1) @ v


def test_no_graph_is_kept_alive(watch: Any) -> None:
    model = Model(by_attribute)
    w = watch(model)
    gone: list[Any] = []

    class Marked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            marker = nn.Identity()
            ctx.marker = marker
            gone.append(weakref.ref(marker))
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    for _ in range(3):
        loss = model(Marked.apply(batch().requires_grad_()))
        loss.backward()
        del loss
        assert w.column() is not None
        gc.collect()
        assert gone[-1]() is None
    model(Marked.apply(batch().requires_grad_()))  # a forward that is thrown away
    gc.collect()
    assert gone[-1]() is None


def test_detach_takes_everything_out_and_copies_carry_nothing(watch: Any) -> None:
    model = Model(by_attribute)
    before = (
        F.scaled_dot_product_attention,
        F.softmax,
        torch.softmax,
        by_early_name.__globals__["early"],
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
    )
    keys = list(model.state_dict())
    w = watch(model)
    assert F.scaled_dot_product_attention is not before[0]
    twin = copy.deepcopy(model)
    assert pickle.loads(pickle.dumps(nn.Linear(1, 1))) is not None
    assert list(model.state_dict()) == keys
    twin(batch()).backward()
    assert w.column() is None  # a copy is nobody's
    w.probe.detach()
    w.probe.detach()
    after = (
        F.scaled_dot_product_attention,
        F.softmax,
        torch.softmax,
        by_early_name.__globals__["early"],
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
    )
    assert after == before
    assert WHERE.by_address == {}


def test_two_probes_do_not_take_each_others_functions_away(watch: Any) -> None:
    original = F.scaled_dot_product_attention
    first, second = Model(by_attribute), Model(by_attribute)
    w1, w2 = watch(first), watch(second)
    w1.probe.detach()
    second(batch()).backward()
    assert len(w2.layers()) == 3
    w2.probe.detach()
    assert F.scaled_dot_product_attention is original


def test_hooks_that_name_no_attention_are_taken_out_and_come_back(
    watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WHERE, "compiled", False)  # as in a process that has compiled nothing
    model = Model(by_attribute)
    w = watch(model)
    hooks = lambda: sum(len(m._forward_hooks) for m in model.modules())  # noqa: E731
    everywhere = hooks()
    for _ in range(4):
        with torch.no_grad():
            model.blocks[2]["attn"](batch())
        x = batch()
        for block in model.blocks[:2]:
            x = x + block["attn"](x)
        x.sum().backward()
        w.column()
    assert hooks() == 2 < everywhere
    for _ in range(2):
        model(batch()).backward()  # block 2 trains after all
        found = w.layers()
    assert "blocks.2.attn.qkv" in found


def test_an_exception_in_a_forward_leaves_no_layer_behind(watch: Any) -> None:
    def raises(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise ValueError("the user's")

    model = Model(by_attribute)
    w = watch(model)
    model.blocks[1]["attn"].how = raises
    with pytest.raises(ValueError, match="the user's"):
        model(batch())
    w.column()
    model.blocks[1]["attn"].how = by_attribute
    model(batch()).backward()
    assert len(w.layers()) == 3
    with pytest.raises(TypeError):
        F.scaled_dot_product_attention(1, 2, 3)  # type: ignore[arg-type]


def test_flash_attn_is_asked_for_what_it_computes_anyway(watch: Any) -> None:
    def flash_attn_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        return_attn_probs: bool = False,
    ) -> Any:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        s = causal_scores(q, k)
        out = (s.exp() / s.exp().sum(-1, keepdim=True) @ v).transpose(1, 2)
        return (out, s.logsumexp(-1), None) if return_attn_probs else out

    def causal_scores(q: Tensor, k: Tensor) -> Tensor:
        return globals()["causal"](q, k)

    stand_in = types.ModuleType("flash_attn")
    stand_in.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    sys.modules["flash_attn"] = stand_in
    try:
        model = Model(
            lambda q, k, v: stand_in.flash_attn_func(  # type: ignore[attr-defined]
                *(t.transpose(1, 2) for t in (q, k, v)), causal=True
            ).transpose(1, 2)
        )
        w = watch(model)
        model(batch()).backward()
        found = w.layers()
        assert len(found) == 3
        for i in range(3):
            best = max(truth(model.blocks[i]["attn"]))
            assert best <= found[f"blocks.{i}.attn.qkv"] + 1e-5 <= best + math.log(LENGTH)
        w.probe.detach()
        assert stand_in.flash_attn_func is flash_attn_func  # type: ignore[attr-defined]
    finally:
        del sys.modules["flash_attn"]


# ---------------------------------------------------------------- exact


@pytest.mark.parametrize("rows", [3, 16, 64])
def test_bounds_from_a_few_rows_hold_the_maximum_and_are_equal_when_it_is_proven(rows: int) -> None:
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        size = 10 ** float(torch.rand((), generator=g) * 2 - 1)
        q = torch.randn(2, 4, 40, 8, generator=g) * size
        k = torch.randn(2, 2, 40, 8, generator=g)
        _, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k.repeat_interleave(2, 1), k.repeat_interleave(2, 1), 0.0, True
        )
        true = exact.everywhere(q, k, None, True, None, chunk=7)
        s = (q.double() @ k.repeat_interleave(2, 1).double().transpose(-1, -2)) / math.sqrt(8)
        s = s.masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), -math.inf)
        assert true.double() == pytest.approx(s.amax((0, 2, 3)), rel=1e-5)
        low, high = exact.of_rows(lse, q, k, None, True, None, rows)
        assert (low <= true + 1e-4).all()
        assert (high >= true - 1e-4).all()
        if rows >= 40:
            assert torch.equal(low, high)


def test_a_bound_that_straddles_the_threshold_flags_nothing(watch: Any) -> None:
    """Nearly uniform rows: the log-sum-exp is far above the maximum, and few rows prove nothing."""
    torch.manual_seed(0)
    x = torch.randn(2, 60, WIDTH)  # more rows than are looked at
    model = Model(by_attribute, layers=1)
    attn = model.blocks[0]["attn"]
    with torch.no_grad():
        attn.qkv.weight.mul_(0.05)
        attn.qkv.bias.uniform_(1.5, 1.6)
    model(x)
    best = max(truth(attn))
    for threshold, above in ((best + 0.05, False), (best - 0.05, True)):
        w = watch(model, threshold)
        found = []
        for _ in range(3):
            model(x).backward()
            found.append(w.layers()["blocks.0.attn.qkv"])
        assert (found[-1] > threshold) is above
        assert above or max(found) <= threshold
        assert found[-1] == pytest.approx(best, abs=1e-3)
        w.probe.detach()


def test_nothing_piles_up_over_steps(watch: Any) -> None:
    model = Model(by_attribute)
    w = watch(model)

    def alive() -> int:
        gc.collect()
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    counts = []
    for step in range(60):
        model.zero_grad()
        model(batch()).backward()
        w.column()
        if step in (20, 59):
            counts.append(alive())
    assert counts[0] == counts[1]


@pytest.mark.parametrize("kind", ["padded", "of four dimensions"])
def test_what_cuda_kernels_make_of_a_log_sum_exp_is_read_right(kind: str) -> None:
    q, k = torch.randn(2, 2, 10, 8), torch.randn(2, 2, 10, 8)
    lse = (q @ k.transpose(-1, -2) / math.sqrt(8)).logsumexp(-1)
    if kind == "padded":  # to a multiple of 32, with anything in it
        given = torch.full((2, 2, 32), 1e9)
        given[..., :10] = lse
    else:
        given = lse[..., None]
    for level in (FEW, SOME):
        place = Place("attn", 0, True, 2, torch.zeros(1))
        place.level = level
        capture.keep_lse(place, given, q, k if level else None, None, False, None, 10)
        high = place.raw[0].amax((0, 2)) if place.raw else place.high[0]
        assert torch.isfinite(high).all()
        assert (high <= lse.amax((0, 2)) + 1e-5).all()


def test_under_autocast_the_logits_are_those_of_the_rounded_queries(watch: Any) -> None:
    torch.manual_seed(0)
    model = Model(by_attribute, layers=1)
    with torch.no_grad():
        model.blocks[0]["attn"].qkv.weight.mul_(8)
    w = watch(model, threshold=1.0)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch())
        loss.backward()
        found = w.layers()["blocks.0.attn.qkv"]
    assert model.blocks[0]["attn"].last[0].dtype == torch.bfloat16
    assert found == pytest.approx(max(truth(model.blocks[0]["attn"])), rel=1e-4)


def test_half_precision_does_not_overflow(watch: Any) -> None:
    model = Model(by_attribute, layers=1).to(torch.bfloat16)
    with torch.no_grad():
        model.blocks[0]["attn"].qkv.weight.mul_(300)
    w = watch(model)
    for _ in range(3):
        model(batch().to(torch.bfloat16)).backward()
        found = w.layers()["blocks.0.attn.qkv"]
    assert found == pytest.approx(max(truth(model.blocks[0]["attn"])), rel=1e-3)
    assert found > 1e4


def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys = torch.ones(q.size(0), 1, 1, k.size(2), dtype=torch.bool)
    keys[..., -2:] = False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keys)


@pytest.mark.parametrize("bad", ["everything", "the queries", "the keys", "one head"])
@pytest.mark.parametrize("how", [by_attribute, by_softmax], ids=["fused", "eager"])
def test_attention_over_nan_alone_is_never_a_number(how: Any, bad: str, watch: Any) -> None:
    """The fused kernel of the CPU takes rows of nan for masked ones: their log-sum-exp is 0."""
    torch.manual_seed(0)
    model = Model(how)
    w = watch(model)
    for _ in range(3):  # past the first measurements, which are exact anyhow
        model(batch()).backward()
        assert np.isfinite(list(w.layers().values())).all()
    assert all(place.level == FEW for _, place in w.probe.watched) or how is by_softmax
    rows = {
        "everything": slice(None),
        "the queries": slice(0, WIDTH),
        "the keys": slice(WIDTH, 2 * WIDTH),
        "one head": slice(0, WIDTH // HEADS),
    }[bad]
    with torch.no_grad():
        model.blocks[1]["attn"].qkv.bias[rows] = math.nan
    model(batch()).backward()
    found = w.layers()
    assert np.isfinite(found["blocks.0.attn.qkv"])
    assert np.isnan(found["blocks.1.attn.qkv"]), found


def test_under_a_mask_attention_over_nan_is_not_made_up_and_the_next_step_looks_closer(
    watch: Any,
) -> None:
    model = Model(padded)
    w = watch(model)
    for _ in range(3):
        model(batch()).backward()
        w.column()
    with torch.no_grad():
        model.blocks[0]["attn"].qkv.bias.fill_(math.nan)
    model(batch()).backward()
    assert not any(np.isfinite(v) for v in w.layers().values())
    model(batch()).backward()
    assert np.isnan(w.layers()["blocks.0.attn.qkv"])


@pytest.mark.parametrize("zeros", [True, False])
def test_attention_over_a_single_key_has_its_own_score_even_if_that_is_zero(
    zeros: bool, watch: Any
) -> None:
    torch.manual_seed(0)
    model = Model(lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :, :1], v[:, :, :1]), 1)
    if zeros:
        with torch.no_grad():
            model.blocks[0]["attn"].qkv.weight[:WIDTH] = 0.0
            model.blocks[0]["attn"].qkv.bias[:WIDTH] = 0.0
    w = watch(model)
    for _ in range(4):
        model(batch()).backward()
        (found,) = w.layers().values()
        q, k = (t.double() for t in model.blocks[0]["attn"].last)
        true = float((q @ k[:, :, :1].transpose(-1, -2)).max()) / math.sqrt(WIDTH // HEADS)
        assert found == pytest.approx(true, abs=1e-6)
    with torch.no_grad():
        model.blocks[0]["attn"].qkv.bias.fill_(math.nan)
    model(batch()).backward()
    assert np.isnan(list(w.layers().values())).all()


# ---------------------------------------------------------------- batches of two kinds


@pytest.mark.parametrize("threshold", [50.0, 49.9])  # the second is above itself as a float32
def test_a_layer_above_in_every_second_batch_is_flagged_in_its_second(
    watch: Any, threshold: float
) -> None:
    gain = [1.0]

    def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q * gain[0], k, v, is_causal=True)

    torch.manual_seed(0)
    model = Model(scaled, layers=1)
    w = watch(model, threshold)
    config = attention_logit.AttentionLogitConfig(threshold=threshold)
    model(batch())
    largest = max(truth(model.blocks[0]["attn"]))
    flagged = []
    for t in range(12):
        hot = t % 2 == 1
        gain[0] = (51.0 if hot else 20.0) / largest
        model(batch()).backward()
        column = w.column()
        value = float(column.max())
        flagged.append(bool(attention_logit.judge(column, config)))
        if t == 1:  # nobody knew: neither that it is below, nor that it is above
            assert value == pytest.approx(threshold)
            assert w.probe.notes() != []
        else:
            assert value == pytest.approx(51.0 if hot else 20.0, abs=0.1 if hot else 3.0)
    assert flagged == [False, False, False] + [True, False] * 4 + [True]
    (note,) = w.probe.notes()
    assert "in 1 steps" in note


@pytest.mark.parametrize("period", [1, 2, 5, 31, 40, 100])
def test_however_rarely_a_layer_is_hot_it_comes_to_be_computed(watch: Any, period: int) -> None:
    probe = watch(Model(by_attribute, layers=1)).probe
    place = probe.watched[0][1]
    place.level = FEW
    known = []
    for t in range(16 * period):
        probe._step = t
        if t % period == period - 1:
            known.append(place.level == ALL)  # 16 rows prove nothing here
            probe._next_level(place, *((51.0, 51.0) if known[-1] else (47.0, 53.0)))
        else:
            probe._next_level(place, 20.0, 22.0)
    if period < 32:
        assert known == [False, False] + [True] * 14
    else:
        assert sum(known) >= 9
        assert all(known[6:])
    if period > 1:
        for t in range(16 * period, 16 * period + 5000):
            probe._step = t
            probe._next_level(place, 20.0, 22.0)
        assert place.level == FEW  # and is let go when it has been quiet for long


# ---------------------------------------------------------------- scores of which something is lost


@pytest.mark.parametrize("call", [F.softmax, "torch"])
def test_scores_less_their_rows_maxima_are_no_measurement(watch: Any, call: Any) -> None:
    shifting = [True]

    def shifted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = causal(q, k)
        if shifting[0]:
            s = s - s.amax(-1, keepdim=True)
        soft = torch.softmax(input=s, dim=-1) if call == "torch" else F.softmax(s, dim=-1)
        return soft @ v

    model = Model(shifted)
    w = watch(model)
    for _ in range(4):
        model(batch()).backward()
        assert w.column() is None
    (spot,) = w.probe.blind_spots()
    assert "subtracted before" in spot.what
    assert "blocks.0.attn, blocks.1.attn, blocks.2.attn" in spot.what
    shifting[0] = False
    model(batch()).backward()
    assert min(w.layers().values()) > 0.0
    assert w.probe.blind_spots() == []


# ---------------------------------------------------------------- where attention is written


class Head(nn.Module):
    """One head of a lecture's GPT: its name says nothing of attention."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, 8)
        self.key = nn.Linear(WIDTH, 8)
        self.how = how
        self.last: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.query(x), self.key(x)
        self.last = (q.detach()[:, None], k.detach()[:, None])
        if self.how == "torch":
            return F.scaled_dot_product_attention(q, k, x, is_causal=True)
        if self.how == "one sequence":
            each = [
                F.scaled_dot_product_attention(a, b, c) for a, b, c in zip(q, k, x, strict=True)
            ]
            return torch.stack(each)
        if self.how == "mask":
            mask = torch.ones(len(x), LENGTH, LENGTH, dtype=torch.bool).tril()
            return F.scaled_dot_product_attention(q, k, x, attn_mask=mask)
        s = causal(q, k)
        if self.how == "keyword":
            return torch.softmax(input=s, dim=-1) @ x
        return F.softmax(s, dim=-1) @ x


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.choose = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(self.choose(x) + 1e4, dim=-1).sum(-1, keepdim=True)


class MultiHeadAttention(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head(how) for _ in range(2))
        self.gate = Gate()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = sum(head(x) for head in self.heads) * self.gate(x)  # type: ignore[assignment]
        return out


class Lecture(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"sa": MultiHeadAttention(how)}) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block["sa"](x)
        return x.square().mean()


@pytest.mark.parametrize("how", ["softmax", "keyword", "torch", "mask", "one sequence"])
def test_heads_inside_of_an_attention_are_attention_and_its_gate_is_none(
    how: str, watch: Any
) -> None:
    torch.manual_seed(0)
    model = Lecture(how)
    w = watch(model)
    for _ in range(4):
        model(batch()).backward()
        found = w.layers()
        heads = [f"blocks.{i}.sa.heads.{j}.query" for i in range(2) for j in range(2)]
        assert list(found) == heads
    assert w.probe.blind_spots() == []
    for name, value in found.items():
        q, k = model.get_submodule(name.rpartition(".")[0]).last  # type: ignore[misc]
        s = q.double() @ k.double().transpose(-1, -2) / math.sqrt(8)
        if how != "one sequence":
            s = s.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -math.inf)
        assert value == pytest.approx(float(s.max()), rel=1e-4)


def test_attention_in_a_module_of_another_name_is_named_and_not_taken(watch: Any) -> None:
    class Inline(Attn):
        """Everything in the block itself."""

    model = Model(by_softmax)
    model.blocks = nn.ModuleList(nn.ModuleDict({"x": Inline(by_softmax)}) for _ in range(2))
    for block in model.blocks:
        block["attn"] = block["x"]
    block_type = Inline.__name__
    assert "att" not in block_type.lower()
    w = watch(model)
    for _ in range(2):
        model(batch()).backward()
        assert w.column() is None
    (spot,) = w.probe.blind_spots()
    assert "blocks.0.x, blocks.1.x" in spot.what
    assert "look like attention" in spot.what
    assert "attn" in spot.way_out


def test_a_gate_outside_of_attention_is_nobodys_blind_spot(watch: Any) -> None:
    model = nn.Sequential(Gate(), nn.Linear(1, 1))
    w = watch(model)
    for _ in range(3):
        model(batch()).sum().backward()
        assert w.column() is None
    assert w.probe.blind_spots() == []


def test_an_adapter_on_the_projection_of_a_seen_attention_is_no_blind_spot(watch: Any) -> None:
    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = nn.Linear(WIDTH, 3 * WIDTH)
            self.more = nn.ModuleDict({"default": nn.Linear(WIDTH, 3 * WIDTH)})

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.base_layer(x) + self.more["default"](x)
            return out

    class Adapted(Attn):
        def __init__(self, how: Any) -> None:
            super().__init__(how)
            self.c_attn = Adapter()
            del self.qkv

        def forward(self, x: Tensor) -> Tensor:
            B, T, D = x.shape
            q, k, v = self.c_attn(x).view(B, T, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            out: Tensor = self.out(self.how(q, k, v).transpose(1, 2).reshape(B, T, D))
            return out

    for how, seen in ((by_attribute, True), (by_hand, False)):
        model = Model(how)
        for block in model.blocks:
            block["attn"] = Adapted(how)
        w = watch(model)
        for _ in range(4):
            model(batch()).backward()
            assert len(w.layers()) == (3 if seen else 0)
        spots = [spot.what for spot in w.probe.blind_spots()]
        assert len(spots) == (not seen)
        assert all("blocks.0.attn, blocks.1.attn" in what for what in spots)

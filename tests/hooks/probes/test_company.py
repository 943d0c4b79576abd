"""In company: who else decides or watches what a call does finds what it finds without us.

`F.scaled_dot_product_attention`, `F.softmax` and `torch.softmax` are torch's own for whoever asks
by __torch_function__ (tensor subclasses, TorchFunctionMode), for pickle, copies and torch.jit; a
TorchDispatchMode (selective activation checkpointing is two) sees the user's operations alone.
"""

from __future__ import annotations

import copy
import functools
import io
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from sentinel.core.types import LAYER_ATTENTION_MAX_LOGIT
from sentinel_hooks.layers import LayerTable
from sentinel_hooks.probes import capture
from sentinel_hooks.probes.activations import ActivationProbe
from sentinel_hooks.probes.attention import AttentionProbe
from sentinel_hooks.probes.places import ALL, FEW, SOME
from sentinel_hooks.probes.probe import resolve
from sentinel_hooks.probes.read import read
from tests.support import not_applicable

pytestmark = pytest.mark.torch
WIDTH, HEADS, LENGTH, EXPERTS = 16, 2, 12, 4
TORCHS = (F.scaled_dot_product_attention, F.softmax, torch.softmax)
How = Callable[[Tensor, Tensor, Tensor], Tensor]


class Attn(nn.Module):
    def __init__(self, how: How) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.how = how
        self.last: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        out: Tensor = self.out(self.how(q, k, v).transpose(1, 2).reshape(B, T, D))
        return out


class Experts(nn.Module):
    """All of them in one product, as layers of a mixture do."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 8) * 0.1)
        self.down = nn.Parameter(torch.randn(EXPERTS, 8, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = x.reshape(EXPERTS, -1, WIDTH)
        return torch.bmm(F.gelu(torch.bmm(y, self.up)), self.down).view_as(x)


class Block(nn.Module):
    def __init__(self, how: How) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = Attn(how)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        out: Tensor = x + self.experts(x)
        return out


class Model(nn.Module):
    def __init__(self, how: How, call: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(how) for _ in range(2))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.call is None else self.call(block, x)
        return x.square().mean()


class Watch:
    """The two probes that work in the forward."""

    def __init__(self, model: nn.Module) -> None:
        self.table = LayerTable.of([model])
        self.attention = AttentionProbe([model], self.table, 50.0)
        self.activations = ActivationProbe([model], self.table, every=2)
        self.attention.attach()
        self.activations.attach()
        self.t = 0

    def step(self) -> list[float]:
        """The largest logit of each layer that has one."""
        for probe in (self.attention, self.activations):
            probe.before_step(self.t)
        self.t += 1
        read(self.activations.pending(), [])
        values, _ = read(self.attention.pending(), [])
        column = resolve(self.attention, values).get(LAYER_ATTENTION_MAX_LOGIT)
        return [] if column is None else [float(v) for v in column if not np.isneginf(v)]

    def level(self, level: int) -> None:
        for _, place in self.attention.watched:
            place.level = level

    def detach(self) -> None:
        self.attention.detach()
        self.activations.detach()


@pytest.fixture
def watch() -> Iterator[Callable[[nn.Module], Watch]]:
    made: list[Watch] = []

    def start(model: nn.Module) -> Watch:
        made.append(Watch(model))
        return made[-1]

    yield start
    for one in made:
        one.detach()
    assert (F.scaled_dot_product_attention, F.softmax, torch.softmax) == TORCHS
    assert not [name for name in vars(F) if "sentinel" in name]


def batch() -> Tensor:
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def results(call: Callable[[Tensor], Tensor], model: nn.Module) -> list[Tensor]:
    """The loss, and every gradient."""
    model.zero_grad()
    torch.manual_seed(2)  # of dropout
    loss = call(batch())
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def way(model: nn.Module, compiled: bool) -> Callable[[Tensor], Tensor]:
    torch._dynamo.reset()
    return torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model


def by_attribute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)


def by_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.transpose(-1, -2), dim=-1) @ v


def by_torch_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v


EVERY_WAY = [by_attribute, by_math, by_softmax, by_torch_softmax]


def cases(eager: list[Any], compiled: list[Any]) -> list[Any]:
    """All of them eager, and a few compiled, which takes seconds each."""
    return [(*c, False) for c in eager] + [
        pytest.param(*c, True, marks=pytest.mark.slow) for c in compiled
    ]


# ---------------------------------------------------------------- torch's own masks

SQUARE, FIRST, LAST = (
    causal_lower_right(LENGTH, LENGTH),
    causal_upper_left(LENGTH, LENGTH),
    causal_lower_right(LENGTH // 2, LENGTH),
)


def by_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=SQUARE)


def by_upper_left(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, FIRST)


def by_lower_right(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    half = F.scaled_dot_product_attention(q[:, :, LENGTH // 2 :], k, v, attn_mask=LAST)
    return torch.cat((half, half), 2)


@pytest.mark.parametrize(
    ("how", "level", "compiled"),
    cases(
        list(product([by_bias, by_upper_left, by_lower_right], [FEW, SOME, ALL])),
        [(by_bias, SOME), (by_lower_right, SOME)],
    ),
)
def test_torchs_causal_bias_masks_and_is_measured(
    watch: Any, how: How, level: int, compiled: bool
) -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def kept(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append((q.detach(), k.detach()))
        return how(q, k, v)

    plain = Model(how)
    want = results(way(plain, compiled), plain)
    Model(kept)(batch())
    start = LENGTH // 2 if how is by_lower_right else 0
    truth = []
    for q, k in seen:
        s = (q.double() @ k.double().transpose(-1, -2) / math.sqrt(q.size(-1))).tril()
        allowed = torch.ones(s.shape[-2:]).tril().bool()[start:]
        truth.append(float(s[:, :, start:][:, :, allowed].max()))
    w = watch(plain)
    call = way(plain, compiled)
    for _ in range(3):
        w.level(level)
        assert same(results(call, plain), want)
        values = w.step()
        if level == FEW:  # the most that it can be
            assert all(t <= v <= t + math.log(LENGTH) for t, v in zip(truth, values, strict=True))
        else:
            assert values == pytest.approx(truth, rel=1e-5)
    assert w.attention.blind_spots() == []


# ---------------------------------------------------------------- __torch_function__


class Asks(TorchFunctionMode):
    """Doubles what comes of the function that stands in torch's modules."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention or func is F.softmax or func is torch.softmax:
            return out * 2
        return out


class Knows(TorchFunctionMode):
    """The same, by a table that was made before."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func in TORCHS else out


class Asking(Tensor):
    """A mask that says itself what is done."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return TORCHS[0](*args[:3], is_causal=True) * 3
        return super().__torch_function__(func, types, args, kwargs)


class Knowing(Tensor):
    """The same, by a table."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        return out * 3 if func in TORCHS else out


class Own(Tensor):
    """Scores that make a softmax of themselves."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TORCHS:
            return args[0].sigmoid()
        return super().__torch_function__(func, types, args, kwargs)


ASKING = torch.zeros(LENGTH, LENGTH).as_subclass(Asking)


def by_asking_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=ASKING)


def by_knowing_value(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = F.scaled_dot_product_attention(q, k, v.as_subclass(Knowing), is_causal=True)
    return out.as_subclass(Tensor)


def by_scores_of_its_own(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(-1, -2)).as_subclass(Own)
    return torch.softmax(F.softmax(scores, dim=-1), dim=-1).as_subclass(Tensor) @ v


def by_knowing_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(-1, -2)).as_subclass(Knowing)
    return torch.softmax(F.softmax(scores, dim=-1), dim=-1).as_subclass(Tensor) @ v


@pytest.mark.parametrize(
    ("how", "mode", "compiled"),
    cases(
        list(product(EVERY_WAY, [Asks, Knows])),
        [(by_attribute, Asks), (by_softmax, Asks), (by_torch_softmax, Knows)],
    ),
)
def test_a_function_mode_decides_as_without_us(
    watch: Any, how: How, mode: Any, compiled: bool
) -> None:
    model = Model(how)

    def moded(x: Tensor) -> Tensor:
        with mode():
            return call(x)

    call = way(model, compiled)
    want = results(moded, model)
    w = watch(model)
    call = way(model, compiled)
    for _ in range(3):
        assert same(results(moded, model), want)
        seen = w.step()
    if compiled:
        assert not seen
        (spot,) = w.attention.blind_spots()
        assert "__torch_function__" in spot.what
    else:
        assert len(seen) == 2


@pytest.mark.parametrize(
    ("how", "compiled"),
    cases([(by_asking_mask,), (by_knowing_value,), (by_scores_of_its_own,)], [(by_asking_mask,)]),
)
def test_a_subclass_in_any_argument_decides_as_without_us_and_the_layer_is_named(
    watch: Any, how: How, compiled: bool
) -> None:
    model = Model(how)
    want = results(way(model, compiled), model)
    w = watch(model)
    call = way(model, compiled)
    for _ in range(3):
        assert same(results(call, model), want)
        assert w.step() == []
    (spot,) = w.attention.blind_spots()
    assert "blocks.0.attn" in spot.what


def test_scores_that_a_subclass_hands_on_to_torch_are_seen_there(watch: Any) -> None:
    model = Model(by_knowing_scores)
    want = results(model, model)
    w = watch(model)
    for _ in range(3):
        assert same(results(model, model), want)
        assert len(w.step()) == 2
    assert w.attention.blind_spots() == []


def test_torch_lists_its_own_functions_as_those_that_can_be_overridden(watch: Any) -> None:
    """Once in a process. Those that are not listed torch.compile takes as nobody's to decide."""
    for cached in (torch.overrides.get_testing_overrides, torch.overrides.get_ignored_functions):
        cached.cache_clear()  # type: ignore[attr-defined]
    torch.overrides._get_overridable_functions.cache_clear()
    watch(Model(by_attribute))
    listed = torch.overrides.get_overridable_functions()
    assert {*TORCHS} <= {function for functions in listed.values() for function in functions}


def test_the_default_device_of_torch_hides_nothing(watch: Any) -> None:
    model = Model(by_attribute)
    w = watch(model)
    with torch.device("cpu"):
        results(model, model)
    assert len(w.step()) == 2


def test_who_detaches_while_a_handler_runs_leaves_torchs_own(watch: Any) -> None:
    class Detaches(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is TORCHS[0]:
                w.detach()
            return func(*args, **(kwargs or {}))

    model = Model(by_attribute)
    w = watch(model)
    with Detaches():
        model(batch())
    assert (F.scaled_dot_product_attention, F.softmax, torch.softmax) == TORCHS


# ---------------------------------------------------------------- who only watches


class Sees(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Hears(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(f"{func} {len(args)} {sorted(kwargs or {})}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("level", [FEW, SOME, ALL], ids=["few", "some", "all"])
@pytest.mark.parametrize("mode", [Sees, Hears])
@pytest.mark.parametrize("how", [*EVERY_WAY, by_bias])
def test_a_mode_sees_the_users_operations_alone(
    watch: Any, how: How, mode: Any, level: int
) -> None:
    model = Model(how)

    def seen() -> list[str]:
        with mode() as m:
            out = model(batch())
        out.backward()
        found: list[str] = m.seen
        return found

    want = seen()
    w = watch(model)
    for _ in range(4):
        w.level(level)
        assert seen() == want
        assert len(w.step()) == 2


@pytest.mark.parametrize("raw", [0, capture.RAW_NUMEL])  # reduced at once, or kept
@pytest.mark.parametrize("mode", [Sees, Hears])
def test_a_mode_that_comes_when_calls_are_known_sees_no_more(
    watch: Any, mode: Any, raw: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "RAW_NUMEL", raw)
    model = Model(by_attribute)

    def seen() -> list[str]:
        with mode() as m:
            out = model(batch())
        out.backward()
        found: list[str] = m.seen
        return found

    want = seen()
    w = watch(model)
    for _ in range(3):
        w.level(FEW)
        model(batch()).backward()
        assert len(w.step()) == 2
    assert any(place.kind is not None for _, place in w.attention.watched)
    w.level(FEW)
    assert seen() == want
    assert len(w.step()) == 2


@pytest.mark.parametrize("mode", [Sees, Hears])
def test_a_mode_sees_nothing_of_what_is_chosen_of_an_output(watch: Any, mode: Any) -> None:
    class Both(Block):
        def forward(self, x: Tensor) -> Any:
            out = super().forward(x)
            return out, out.mean(1)

    model = Model(by_attribute, lambda block, x: block(x)[0])
    model.blocks = nn.ModuleList(Both(by_attribute) for _ in range(2))

    def seen() -> list[str]:
        with mode() as m:
            out = model(batch())
        out.backward()
        found: list[str] = m.seen
        return found

    want = seen()
    w = watch(model)
    for _ in range(4):
        assert seen() == want
        w.step()
    assert all(block.waits for block in w.activations.watched[:1])


# ---------------------------------------------------------------- selective checkpointing

aten = torch.ops.aten
KERNEL = aten._scaled_dot_product_flash_attention_for_cpu.default
POLICIES: dict[str, Any] = {
    "products kept": [aten.mm.default, aten.bmm.default, aten.addmm.default, KERNEL],
    "norms kept": [aten.linalg_vector_norm.default, aten.amax.default, aten.aminmax.default],
    "all kept": lambda *_, **__: CheckpointPolicy.MUST_SAVE,
    "none kept": lambda *_, **__: CheckpointPolicy.MUST_RECOMPUTE,
    "none preferred": lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE,
}


@pytest.mark.parametrize(
    ("how", "policy", "compiled"),
    cases(
        list(product(EVERY_WAY, POLICIES)),
        [(by_attribute, "products kept"), (by_softmax, "all kept")],
    ),
)
def test_selective_checkpointing_gives_the_gradients_that_it_gives_without_us(
    watch: Any, how: How, policy: str, compiled: bool
) -> None:
    contexts = functools.partial(create_selective_checkpoint_contexts, POLICIES[policy])

    def kept(block: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return out

    model = Model(how, kept)
    try:
        want = results(way(model, compiled), model)
    except RuntimeError:
        not_applicable("dropout writes into what this policy keeps, with or without us")
    w = watch(model)
    call = way(model, compiled)
    for step in range(4):
        w.level((SOME, FEW, ALL, SOME)[step])
        assert same(results(call, model), want)
        assert len(w.step()) == 2


# ---------------------------------------------------------------- pickle, copies, torch.jit


class Holds(nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.line = nn.Linear(2, 2)
        self.held = held


def functions() -> tuple[Any, ...]:
    return F.scaled_dot_product_attention, F.softmax, torch.softmax


@pytest.mark.parametrize("index", range(3), ids=["attention", "F.softmax", "torch.softmax"])
@pytest.mark.parametrize("taken", ["before", "while"])
@pytest.mark.parametrize("saved", ["while", "after"])
def test_a_model_that_holds_one_of_them_can_be_saved_whole(
    watch: Any, index: int, taken: str, saved: str
) -> None:
    model = Holds(functions()[index])
    w = watch(Model(by_attribute))
    if taken == "while":
        model = Holds(functions()[index])
    if saved == "after":
        w.detach()
    file = io.BytesIO()
    torch.save(model, file)
    data = pickle.dumps(model)
    assert b"sentinel" not in data
    assert b"sentinel" not in file.getvalue()
    twin = copy.deepcopy(model)
    w.detach()
    file.seek(0)
    assert torch.load(file, weights_only=False).held is TORCHS[index]
    assert pickle.loads(data).held is TORCHS[index]
    x = torch.randn(1, 1, 3, 3)
    args = (x, x, x) if index == 0 else (x, -1)
    assert torch.equal(twin.held(*args), TORCHS[index](*args))


class Scripted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = F.softmax(x, dim=-1) + torch.softmax(x, dim=-1)
        return F.scaled_dot_product_attention(y, y, y)


def test_torch_jit_scripts_what_calls_them(watch: Any) -> None:
    watch(Model(by_attribute))
    x = torch.randn(1, 1, 3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert torch.equal(torch.jit.script(Scripted())(x), Scripted()(x))


def test_a_symbolic_trace_holds_torchs_own(watch: Any) -> None:
    watch(Model(by_attribute))
    graph = torch.fx.symbolic_trace(Scripted()).graph
    called = [node for node in graph.nodes if node.op == "call_function"]
    assert {node.target for node in called} >= set(TORCHS)
    (node,) = (node for node in called if node.target is TORCHS[1])
    assert node.kwargs == {"dim": -1, "_stacklevel": 3, "dtype": None}

"""RAM snapshots put back every bit, or nothing."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sentinel.core.errors import ConfigError
from sentinel.core.state import Stats
from sentinel_hooks.snapshots import Snapshots
from sentinel_hooks.snapshots.host_memory import available_bytes
from sentinel_hooks.snapshots.ram import NotReadyError, RamStore, SnapshotError
from sentinel_hooks.target import Target
from tests.hooks.worlds import Net, digest

pytestmark = pytest.mark.torch


def state_of(optimizer: torch.optim.Optimizer) -> str:
    return digest([dict(optimizer.state[p]) for g in optimizer.param_groups for p in g["params"]])


def everything(target: Target) -> str:
    return digest(
        [dict(m.state_dict()) for m in target.models], [state_of(o) for o in target.optimizers]
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x, y = torch.randn(16, 12, generator=g), torch.randn(16, 1, generator=g)

        def closure(x: Any = x, y: Any = y) -> Any:
            optimizer.zero_grad()
            loss = model(x, y)
            loss.backward()
            return loss

        optimizer.step(closure)


OPTIMIZERS = {
    "sgd momentum": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9),
    "adamw amsgrad": lambda ps: torch.optim.AdamW(ps, lr=0.01, amsgrad=True),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "adamw tensor lr": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.01)),
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=0.01),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01),
    "lbfgs": lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=3),
}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("before", [0, 5])
def test_a_restored_run_goes_on_bitwise_as_the_first_time(name: str, before: int) -> None:
    torch.manual_seed(1)
    model = Net(dropout=0.0)
    optimizer = OPTIMIZERS[name](model.parameters())
    target = Target((model,), (optimizer,))
    store = RamStore(target, Snapshots())
    train(model, optimizer, before)
    stats = Stats(shape_age=7)
    store.take(before, stats)
    taken = everything(target)
    places = [p.data_ptr() for p in model.parameters()]
    train(model, optimizer, 4, seed=2)
    first = everything(target)
    assert first != taken
    assert store.restore(before) == stats
    assert everything(target) == taken
    assert [p.data_ptr() for p in model.parameters()] == places, "copied in place"
    train(model, optimizer, 4, seed=2)
    assert everything(target) == first, "and it shares nothing with the live state"
    store.restore(before)
    assert everything(target) == taken, "a second time too"


def test_what_a_schedule_drives_is_left_alone_and_what_the_optimizer_counts_comes_back() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.param_groups[0]["k"] = 1
    store = RamStore(Target((model,), (optimizer,)), Snapshots())
    store.take(0, Stats())
    optimizer.param_groups[0].update(lr=0.05, momentum=0.8, k=5)
    store.restore(0)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["k"]) == (0.05, 0.8, 1)


def test_scaler_extra_state_and_parameters_outside_the_model_come_back() -> None:
    class Ema:
        def __init__(self) -> None:
            self.shadow = {"w": torch.ones(3), "n": 4}

        def state_dict(self) -> dict[str, Any]:
            return self.shadow  # aliases, as many do

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.shadow = state

    model, outside, ema = Net(), nn.Parameter(torch.zeros(2)), Ema()
    optimizer = torch.optim.SGD([*model.parameters(), outside], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    store = RamStore(Target((model,), (optimizer,), (), scaler, (ema,)), Snapshots())
    store.take(3, Stats())
    outside.data.fill_(9.0)
    ema.shadow["w"].fill_(0.0)
    ema.shadow["n"] = 0
    scaler.update(2.0)
    for _ in range(2):
        store.restore(3)
        assert outside.tolist() == [0.0, 0.0]
        assert ema.shadow["w"].tolist() == [1.0, 1.0, 1.0]
        assert ema.shadow["n"] == 4
        assert scaler.get_scale() == 8.0
        ema.shadow["w"].fill_(5.0)


def test_a_tied_weight_is_kept_once() -> None:
    model = nn.Sequential(nn.Linear(50, 50, bias=False), nn.Linear(50, 50, bias=False))
    model[1].weight = model[0].weight
    store = RamStore(Target((model,), (torch.optim.SGD(model.parameters(), lr=1.0),)), Snapshots())
    assert store.take(0, Stats()) == 50 * 50 * 4


def test_buffers_of_a_dropped_snapshot_serve_the_next() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    store = RamStore(Target((model,), (optimizer,)), Snapshots())
    store.take(0, Stats())
    store.take(1, Stats())
    size = store.size_bytes
    old = {t.data.data_ptr() for t in store._images[0].tensors.values()}
    store.keep_only([1])
    assert store.steps == (1,)
    store.take(2, Stats())
    assert {t.data.data_ptr() for t in store._images[2].tensors.values()} == old
    assert store.size_bytes == size
    with pytest.raises(SnapshotError, match=r"there is no snapshot of step 0; there are \(1, 2\)"):
        store.restore(0)
    store.clear()
    assert store.size_bytes == 0


def test_too_little_memory_is_refused_before_any_is_taken_and_names_the_way_out() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    target = Target((model,), (optimizer,))
    store = RamStore(target, Snapshots(), available=lambda: 1000)
    with pytest.raises(SnapshotError, match=r"Snapshots\(ram=False\)"):
        store.take(0, Stats())
    assert store.steps == ()
    assert store.size_bytes == 0
    RamStore(target, Snapshots(), available=lambda: None).take(0, Stats())


def test_another_shape_is_refused_before_the_first_byte_is_copied() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 2)
    target = Target((model,), (optimizer,))
    store = RamStore(target, Snapshots())
    store.take(0, Stats())
    train(model, optimizer, 2)
    model.last.weight = nn.Parameter(torch.zeros(1, 3))
    now = copy.deepcopy({k: v.clone() for k, v in model.state_dict().items()})
    with pytest.raises(SnapshotError, match=r"last.weight was of shape \(1, 24\)"):
        store.restore(0)
    assert all(torch.equal(now[k], v) for k, v in model.state_dict().items())


def test_a_lazy_module_makes_it_wait() -> None:
    model = nn.LazyLinear(2)
    store = RamStore(Target((model,), (torch.optim.SGD(model.parameters(), lr=1.0),)), Snapshots())
    with pytest.raises(NotReadyError, match="weight has no shape yet"):
        store.take(0, Stats())
    model(torch.ones(1, 3))
    store.take(0, Stats())


def test_parameters_added_after_the_snapshot_keep_their_value_and_lose_their_moments() -> None:
    model, late = Net(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW(model.parameters())
    store = RamStore(Target((model,), (optimizer,)), Snapshots())
    train(model, optimizer, 1)
    store.take(1, Stats())
    optimizer.add_param_group({"params": [late]})
    late.grad = torch.ones(2)
    optimizer.step()
    value = late.detach().clone()
    store.restore(1)
    assert torch.equal(late.detach(), value)
    assert late not in optimizer.state


def test_channels_last_and_expanded_tensors_come_back() -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.register_buffer("wide", torch.ones(1, 4).expand(5, 4).clone())
    store = RamStore(Target((model,), (torch.optim.SGD(model.parameters(), lr=1.0),)), Snapshots())
    kept = {k: v.clone() for k, v in model.state_dict().items()}
    store.take(0, Stats())
    with torch.no_grad():
        for t in model.state_dict().values():
            t.zero_()
    store.restore(0)
    assert all(torch.equal(kept[k], v) for k, v in model.state_dict().items())


def test_free_memory_is_the_smaller_of_the_machines_and_the_containers(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    2048 kB\n")
    assert available_bytes(tmp_path) == 2048 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1000\n")
    assert available_bytes(tmp_path) == 2048 * 1024
    (group / "memory.max").write_text("5000\n")
    assert available_bytes(tmp_path) == 4000
    assert (available_bytes() or 1) > 0


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_a_senseless_share_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=r"snapshots.memory_share must lie above 0"):
        Snapshots(memory_share=share)

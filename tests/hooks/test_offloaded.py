"""Weights on the meta device, as accelerate's offloading leaves them: frozen, or trained."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sentinel_hooks
from sentinel.core.policy import Policy
from sentinel.core.state import Stats
from sentinel_hooks import Session, Snapshots
from sentinel_hooks.snapshots import files
from sentinel_hooks.snapshots.ram import RamStore, SnapshotError
from sentinel_hooks.target import Target
from tests.hooks.worlds import digest

pytestmark = pytest.mark.torch

QUICK = Policy.parse("[snapshots]\nram_every = 4\nconfirm = 2\n", "quick")


class Offloaded(nn.Module):
    """A frozen matrix that is there only while its forward runs, and an adapter that learns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(8, 8)
        self.base.requires_grad_(False)
        self.adapter = nn.Linear(8, 1)
        self.stored = {n: p.detach().clone() for n, p in self.base.named_parameters()}
        self.base.to("meta")
        self.base.register_forward_pre_hook(self._fetch)
        self.base.register_forward_hook(self._release)

    def _fetch(self, module: nn.Module, args: Any) -> None:
        for name, value in self.stored.items():
            setattr(module, name, nn.Parameter(value, requires_grad=False))

    def _release(self, module: nn.Module, args: Any, output: Any) -> None:
        module.to("meta")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.adapter(torch.tanh(self.base(x)))
        return out


def attached(tmp_path: Path, model: nn.Module, **options: Any) -> tuple[Any, Session]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    session = sentinel_hooks.attach(
        model=model,
        optimizer=optimizer,
        policy=QUICK,
        sidecar=None,
        run_dir=tmp_path,
        run_id="r7",
        **options,
    )
    return optimizer, session


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(16, 8, generator=g)
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()


def test_offloaded_frozen_weights_are_left_out_and_the_rest_is_protected(tmp_path: Path) -> None:
    model = Offloaded()
    optimizer, session = attached(tmp_path, model, snapshots=Snapshots(disk=False))
    train(model, optimizer, 12)
    status = session.status()
    assert status.healthy[:2] == (0, 4)
    assert not any("snapshot" in str(spot) for spot in status.blind_spots)
    (note,) = status.notes
    assert "base.weight, base.bias" in note
    assert f"note: {note}" in str(status)
    taken = model.adapter.weight.detach().clone()
    session._store.take(12, Stats())
    with torch.no_grad():
        model.adapter.weight.fill_(math.nan)
    session._store.restore(12)
    assert torch.equal(model.adapter.weight, taken)
    session.detach()
    assert session.status().internal_errors == {}


def test_a_loss_that_is_nan_is_settled_though_some_weights_cannot_be_looked_at(
    tmp_path: Path,
) -> None:
    model = Offloaded()
    optimizer, session = attached(tmp_path, model, snapshots=Snapshots(disk=False))
    train(model, optimizer, 6)
    optimizer.zero_grad()
    model(torch.full((4, 8), math.nan)).sum().backward()
    before = digest(list(model.adapter.parameters()))
    optimizer.step()
    assert digest(list(model.adapter.parameters())) == before
    assert dict(session.state.ledger.counters.skipped) == {"nonfinite_loss": 1}
    assert session.status().internal_errors == {}
    session.detach()


def test_a_trained_parameter_without_data_is_named_with_why_there_is_no_rollback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Offloaded()
    model.add_module("away", nn.Linear(8, 8, device="meta"))
    with caplog.at_level(logging.WARNING, logger="sentinel_hooks"):
        optimizer, session = attached(tmp_path, model)
        train(model, optimizer, 6)
    status = session.status()
    assert status.healthy == ()
    (spot,) = [s for s in status.blind_spots if "snapshots fail" in s.what]
    assert "2 parameter(s) that an optimizer trains hold no data" in spot.what
    assert "away.weight" in spot.what
    assert "requires_grad_(False)" in spot.what
    assert any("no snapshot could be taken" in m for m in caplog.messages)
    assert status.counters.steps == 6
    assert status.internal_errors == {}
    session.detach()


def test_what_was_away_and_is_here_is_left_as_it_is_and_what_is_trained_now_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    home = {n: p.detach().clone() for n, p in model[0].named_parameters()}
    model[0].to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    target = Target((model,), (optimizer,))
    store = RamStore(target, Snapshots())
    store.take(0, Stats())
    assert store.left_out == ("0.weight", "0.bias")
    assert store.size_bytes == sum(p.nbytes for p in model[1].parameters())
    kept = model[1].weight.detach().clone()
    # Onto a device again, as when a process is started with more memory.
    for name, value in home.items():
        setattr(model[0], name, nn.Parameter(value, requires_grad=False))
    with torch.no_grad():
        model[1].weight.zero_()
    store.restore(0)
    assert torch.equal(model[1].weight, kept)
    assert torch.equal(model[0].weight, home["weight"])
    model[0].requires_grad_(True)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    with pytest.raises(SnapshotError, match=r"0\.weight held no data at step 0 .* is trained now"):
        store.restore(0)
    store.take(1, Stats())  # the buffers of the one before are no use for these
    store.drop(0)
    store.take(2, Stats())
    assert store.left_out == ()
    with torch.no_grad():
        model[0].weight.zero_()
    store.restore(2)
    assert torch.equal(model[0].weight, home["weight"])


def test_the_disk_copy_knows_their_shapes_and_is_put_back(tmp_path: Path) -> None:
    model = Offloaded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    target = Target((model,), (optimizer,))
    train(model, optimizer, 3)
    ram = RamStore(target, Snapshots())
    ram.take(3, Stats())
    kept = ram.image(3)
    files.write(tmp_path, kept, files.capture(target), attempt=0)
    expected = digest(list(model.adapter.parameters()))
    train(model, optimizer, 3)
    back, _ = files.read(tmp_path, files.places(target))
    assert files.layout(back) == files.live_layout(target)
    assert files.weights_hash(back) == files.weights_hash(kept)
    ram.put_back(back)
    assert digest(list(model.adapter.parameters())) == expected

"""Guard, packed vector and actuators on their own."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from sentinel_hooks.actuators import HeldBack, ScaledLr
from sentinel_hooks.guard import LIMIT, Guard
from sentinel_hooks.parts import crashing
from sentinel_hooks.seams.patch import Patch

pytestmark = pytest.mark.torch


def fails(error: BaseException) -> Any:
    def body() -> None:
        raise error

    return body


def test_the_guard_logs_a_place_once_counts_every_error_and_gives_up_after_three_in_a_row(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[str] = []
    broken: list[str] = []
    guard = Guard("r7", on_error=told.append, on_broken=broken.append)
    assert guard.run("gate", lambda x: x + 1, 2) == 3
    with caplog.at_level(logging.ERROR):
        for _ in range(LIMIT - 1):
            assert guard.run("gate", fails(ValueError("no"))) is None
        guard.run("gate", lambda: None)  # a success in between
        for _ in range(LIMIT - 1):
            guard.run("gate", fails(ValueError("no")))
        assert broken == []
        guard.run("gate", fails(ValueError("no")))
    assert broken == ["gate"]
    assert told == ["gate"] * 5
    assert guard.counts == {"gate": 5}
    assert guard.last == "gate: ValueError: no"
    assert sum("training goes on run=r7 where=gate" in r.getMessage() for r in caplog.records) == 1


def test_the_guard_lets_the_users_interrupt_pass_and_survives_its_own_listeners() -> None:
    guard = Guard("r7", on_error=fails(OSError("listener")))
    with pytest.raises(KeyboardInterrupt):
        guard.run("gate", fails(KeyboardInterrupt()))
    assert guard.run("gate", fails(ValueError("no"))) is None


def test_a_patch_takes_away_only_itself() -> None:
    class Owner:
        def call(self) -> str:
            return "class"

    owner = Owner()
    mine = Patch(owner, "call", lambda: "mine")
    assert owner.call() == "mine"
    theirs = Patch(owner, "call", lambda: "theirs")
    assert not mine.remove()
    assert owner.call() == "theirs"
    assert theirs.remove()
    assert mine.remove()
    assert owner.call() == "class"
    assert vars(owner) == {}


def test_holding_back_leaves_no_gradient_and_gives_the_same_objects_back() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.param_groups[0]["k"] = 3
    grads = [p.grad for p in model.parameters()]
    state = {p: dict(optimizer.state[p]) for p in model.parameters()}
    held = HeldBack(optimizer)
    held.take()
    held.take()  # an error came between: once more
    assert all(p.grad is None for p in model.parameters())
    optimizer.state[model.weight]["exp_avg"] = torch.zeros(1)  # whatever step() may do
    optimizer.state[nn.Parameter(torch.zeros(1))] = {"new": 1}
    optimizer.param_groups[0]["k"] = 4
    held.give_back()
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert optimizer.param_groups[0]["k"] == 3
    assert set(optimizer.state) == set(state)
    for p, entries in state.items():
        assert all(optimizer.state[p][k] is v for k, v in entries.items())


def test_a_scaled_rate_comes_back_as_the_object_it_was() -> None:
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    rate = torch.tensor(0.3)
    optimizer = torch.optim.SGD([{"params": [a], "lr": 0.1}, {"params": [b], "lr": rate}], lr=1.0)
    first = optimizer.param_groups[0]["lr"]
    cut = ScaledLr(optimizer, 1 / 3)
    cut.cut()
    cut.cut()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 3)
    assert optimizer.param_groups[1]["lr"] is rate
    assert rate.item() == pytest.approx(0.1)
    cut.undo()
    assert optimizer.param_groups[0]["lr"] is first
    assert optimizer.param_groups[1]["lr"] is rate
    assert rate.item() == torch.tensor(0.3).item()


def test_an_error_at_the_address_of_an_earlier_one_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(crashing, "id", lambda error: 7, raising=False)
    seen = []
    for number in range(2):
        try:
            if number:
                raise ValueError("out of memory")
            raise ValueError("out of memory")
        except ValueError as error:
            seen.append((crashing.recognised(error), crashing.recognised(error)))
    (first, again), (other, _) = seen
    assert first == again != other

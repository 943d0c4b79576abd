"""The sessions of one process, here with members of the test's own."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
import torch
from torch import nn

from sentinel_hooks.parts.registry import Registry

pytestmark = pytest.mark.torch


class Member:
    detached = False
    told = ""

    def forked(self) -> None:
        self.told += "forked "

    def at_exit(self) -> None:
        self.told += "exit "


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry[Member]:
    """One that leaves nothing behind in this process."""
    monkeypatch.setattr("atexit.register", lambda body: body)
    monkeypatch.setattr("os.register_at_fork", lambda **_: None)
    return Registry()


def adam() -> torch.optim.Optimizer:
    return torch.optim.Adam(nn.Linear(2, 2).parameters())


def test_an_optimizer_is_watched_from_adding_to_leaving(registry: Registry[Member]) -> None:
    one, other, member = adam(), adam(), Member()
    registry.add(member, [one])
    assert one in registry
    assert other not in registry
    assert registry.open() == (member,)
    registry.leave([one])
    member.detached = True
    assert one not in registry
    assert registry.open() == ()


def test_what_is_let_go_of_is_forgotten(registry: Registry[Member]) -> None:
    one, member = adam(), Member()
    registry.add(member, [one])
    gone = weakref.ref(one), weakref.ref(member)
    del one, member
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert registry.open() == ()


@pytest.mark.e2e
def test_a_forked_child_is_told_and_its_parent_is_not() -> None:
    registry: Registry[Member] = Registry()
    member = Member()
    registry.add(member, [])
    child = os.fork()
    if child == 0:
        os._exit(0 if member.told == "forked " else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert member.told == ""

"""A pure function of what all ranks share: asked again before this rank is alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sentinel_hooks.guard import Guard
from sentinel_hooks.parts.agreeing import Alone, Together

pytestmark = pytest.mark.torch


class Flaky:
    """Fails the first `failures` times."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.asked = 0

    def __call__(self, value: int) -> int:
        self.asked += 1
        if self.asked <= self.failures:
            raise MemoryError("for a moment")
        return value + 1


def together() -> tuple[Together, list[str], Guard]:
    wants_off: list[str] = []
    council: Any = SimpleNamespace(want_off=wants_off.append)
    guard = Guard("r7")
    none: Any = SimpleNamespace()
    voice = Together(
        council,
        none,
        none,
        none,
        guard=guard,
        saving=none,
        between=none,
        pause=none,
        canary=None,
    )
    return voice, wants_off, guard


def test_what_fails_once_is_asked_again_and_nobody_goes_off() -> None:
    voice, wants_off, guard = together()
    assert voice.surely(Flaky(0), 1) == 2
    assert voice.surely(Flaky(1), 1) == 2
    assert wants_off == []
    assert guard.counts == {"again": 1}


def test_what_fails_twice_asks_all_ranks_to_go_off_and_is_the_guards() -> None:
    voice, wants_off, _ = together()
    with pytest.raises(MemoryError, match="for a moment"):
        voice.surely(Flaky(2), 1)
    assert wants_off == ["again: MemoryError: for a moment"]


def test_one_process_asks_once() -> None:
    none: Any = SimpleNamespace()
    body = Flaky(1)
    with pytest.raises(MemoryError):
        Alone(none, none, none).surely(body, 1)
    assert body.asked == 1

"""Small helpers of the tests; nothing here imports torch or the web stack."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_APPLICABLE = "not applicable: "


class FakeClock:
    """A clock that moves only when told to."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time cannot go backwards, got {seconds} s")
        self.now += seconds


def shared_dir() -> Path:
    """The read-only folder beside the checkout; $SENTINEL_SHARED says where it is elsewhere."""
    return Path(os.environ.get("SENTINEL_SHARED") or ROOT.parent / "shared")


def require(present: object, part: str) -> None:
    """Skip the test when `part` is missing; with SENTINEL_REQUIRE_ALL=1 that is a failure."""
    if not present:
        pytest.skip(f"missing: {part}")


def not_applicable(reason: str) -> NoReturn:
    """Skip a case that cannot exist (a combination torch refuses); never a failure."""
    pytest.skip(NOT_APPLICABLE + reason)

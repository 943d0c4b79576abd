"""Every break of the core is noticed: a few drawn each time, all of them in `make test-full`."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.mutants.catalog import MUTANTS
from tests.mutants.run import places, try_mutant

SEED = int(os.environ.get("SENTINEL_MUTANT_SEED") or random.SystemRandom().randrange(10**6))
DRAWN = 3


def test_every_mutant_still_applies_and_there_are_enough() -> None:
    assert len(MUTANTS) >= 20
    assert {name: places(m) for name, m in MUTANTS.items() if places(m) != 1} == {}
    assert [name for name, m in MUTANTS.items() if m.old == m.new] == []


@pytest.mark.e2e
@pytest.mark.parametrize("draw", range(DRAWN))
def test_a_mutant_drawn_by_chance_turns_a_test_red(draw: int, tmp_path: Path) -> None:
    name = random.Random(SEED).sample(list(MUTANTS), DRAWN)[draw]
    print(f"SENTINEL_MUTANT_SEED={SEED} draws: {name}")
    assert try_mutant(name, tmp_path).killed_by, f"{name} survived (SENTINEL_MUTANT_SEED={SEED})"


@pytest.mark.full
@pytest.mark.parametrize("name", list(MUTANTS))
def test_every_mutant_turns_a_test_red(name: str, tmp_path: Path) -> None:
    assert try_mutant(name, tmp_path).killed_by, f"{name} survived"

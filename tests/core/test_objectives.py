"""Objectives that move by themselves: what is done to the losses of healthy reinforcement learning.

The series have the shape, sizes and noise of small real runs (a policy gradient with normalised
advantages; a DQN whose target network is copied every 100 steps); nothing is carried out.
"""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from sentinel.core.policy import Policy
from tests.golden.real_logs import Trace, replay

Rows = list[tuple[float, float | None, float | None]]


def policy_gradient(seed: int) -> Rows:
    """Rises from -0.4 to -0.06 as the policy learns, with a tail of batches far below."""
    rng, rows = random.Random(seed), Rows()
    for t in range(1200):
        depth = 0.06 + 0.34 * math.exp(-t / 250)
        loss = -depth * rng.gammavariate(1.5, 1 / 1.5) + 0.04 * rng.gauss(0, 1)
        rows.append((loss, 0.45 * math.exp(0.4 * rng.gauss(0, 1)), None))
    return rows


def copied_target(seed: int) -> Rows:
    """Jumps 10- to 200-fold at every 100th step and is back within 20; so does the norm."""
    rng, rows = random.Random(seed), Rows()
    for t in range(1200):
        since, jump = t % 100, 0.6 * 0.8 ** (t // 100)
        rest = max(0.002, 0.02 * math.exp(-t / 150))
        loss = jump * math.exp(-since / 4) + rest * math.exp(0.25 * rng.gauss(0, 1))
        norm = 3.0 * math.exp(-since / 8) + 0.1 * math.exp(0.4 * rng.gauss(0, 1))
        rows.append((loss, norm, None))
    return rows


def done(rows: Rows, policy: str) -> Counter[tuple[str, str]]:
    """What would have been done, by (action, rule), and how often the level was said to shift."""
    steps = replay(Trace("made", rows, []), Policy.load(policy).with_mode("observe"))
    acts = Counter((s.would.name, s.rule) for s in steps if s.would.name != "PROCEED")
    acts.update(("FLAG", "level_shift") for s in steps if s.shifted)
    return acts


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", ["default", "rl"])
def test_a_policy_gradient_is_left_alone(seed: int, policy: str) -> None:
    assert done(policy_gradient(seed), policy) == {}


@pytest.mark.parametrize("seed", range(3))
def test_a_copied_target_network_is_left_alone_by_the_policy_for_it(seed: int) -> None:
    assert done(copied_target(seed), "rl") == {}


def test_for_the_default_policy_a_copied_target_is_a_fault_like_any_other() -> None:
    """Its loss looks like weights that were damaged and train themselves well again."""
    assert done(copied_target(0), "default")["ROLLBACK", "loss_spike"] > 0


@pytest.mark.parametrize("blow", [1e3, 1e6])
def test_a_divergence_is_still_acted_on_by_the_policy_for_it(blow: float) -> None:
    rows = copied_target(0)[:650] + [(blow * 1.2**i, 1e3 * 1.2**i, None) for i in range(20)]
    acts = done(rows, "rl")
    assert acts["SKIP_STEP", "loss_outlier"] or acts["SKIP_STEP", "grad_norm"]
    assert acts["ROLLBACK", "loss_spike"] or acts["ROLLBACK", "skip_bound"]

"""An attached run without faults is the unattached run, bit for bit; and it really was watched.

Worlds, fingerprints and reference norms (worlds.py) import nothing of ours. Seen red: with the
canary's RNG not put back, with `hold_back` on every step, with a forgotten hook at detach, and with
norms taken after the clip.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sentinel_hooks
from sentinel.core.types import LAYER_GRAD_NORM, Action
from sentinel.traces.reader import Reader
from tests.hooks.worlds import WORLDS, Run, inventory

pytestmark = [pytest.mark.torch, pytest.mark.slow]

STEPS = 300
SEED = 20


def watched(
    name: str, seed: int, run_dir: Path, before_step: Any = None
) -> tuple[Run, sentinel_hooks.Session]:
    run = WORLDS[name](seed)
    before = inventory(run)
    session = sentinel_hooks.attach(
        **run.attach_options(), sidecar=None, run_dir=run_dir, run_id="r"
    )
    assert inventory(run) != before, "nothing was hooked"
    run.train(STEPS, before_step=(lambda t: before_step(t, run)) if before_step else None)
    session.detach()
    after = inventory(run)
    # torch.compile and the scaler add attributes of their own while they run
    assert {k: _without_growth(before[k], after[k]) for k in before} == before
    return run, session


def _without_growth(before: Any, after: Any) -> Any:
    if isinstance(before, dict) and isinstance(after, dict):
        grown = set(after) - set(before)
        assert not any("sentinel" in str(after[k]) for k in grown)
        return {k: v for k, v in after.items() if k in before}
    return after


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # inside inductor
@pytest.mark.parametrize("name", list(WORLDS))
def test_an_attached_run_ends_bitwise_as_the_unattached_one_and_its_trace_holds_true_norms(
    name: str, tmp_path: Path
) -> None:
    print(f"seed {SEED}")
    alone = WORLDS[name](SEED)
    alone.train(STEPS)
    if name == "inductor":
        again = WORLDS[name](SEED)
        again.train(STEPS)
        assert again.fingerprint() == alone.fingerprint(), "not repeatable even without us"

    reference: list[tuple[float, dict[str, float]]] = []
    run, session = watched(
        name, SEED, tmp_path, before_step=lambda t, r: reference.append(r.reference_norms())
    )
    assert run.fingerprint() == alone.fingerprint()

    records = list(Reader(session.directory).steps(columns=True))
    assert [r.step for r in records] == list(range(STEPS))
    assert all(r.outcome.executed is Action.PROCEED and r.outcome.applied for r in records)
    assert all(r.observation.loss is not None for r in records)
    names = [layer.name for layer in session.layers.layers]
    if not reference:
        return  # a GAN steps its optimizers one after the other: no moment has all gradients
    tolerance = 2e-5 if name == "bfloat16" else 1e-5
    for record, (total, by_layer) in zip(records, reference, strict=True):
        assert record.observation.grad_norm == pytest.approx(total, rel=tolerance)
        column = record.observation.columns[LAYER_GRAD_NORM]
        assert set(names) == set(by_layer)
        expected = [by_layer[n] for n in names]
        np.testing.assert_allclose(column, expected, rtol=tolerance, atol=1e-12)


def test_after_detach_nothing_of_ours_remains_even_if_the_run_was_interrupted(
    tmp_path: Path,
) -> None:
    run = WORLDS["plain"](3)
    before = inventory(run)
    rates = [g["lr"] for g in run.optimizers[0].param_groups]
    session = sentinel_hooks.attach(**run.attach_options(), sidecar=None, run_dir=tmp_path)

    def interrupt(t: int) -> None:
        if t == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.train(10, before_step=interrupt)
    session.detach()
    session.detach()
    after = inventory(run)
    assert {k: _without_growth(before[k], after[k]) for k in before} == before
    assert rates[0] >= run.optimizers[0].param_groups[0]["lr"]
    assert not hasattr(torch.autograd.backward, "__wrapped__")

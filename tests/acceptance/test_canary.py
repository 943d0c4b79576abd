"""Data or weights? The canary judges each incident, and asking it moves nothing.

Garbage and half-bad batches are blamed on the data: skipped, nothing rolled back, and the run ends
bitwise as a hand-written loop that threw those batches away and never heard of a canary. Learning
rate and weight faults are blamed on the weights: rolled back at the fourth spike step. Losses that
are no numbers are judged the same way, at the third.

Seen red: with every verdict "data", with every verdict "weights", with a bound of 10 on the skips,
with the RNG or the buffers not put back after asking, and with mode="off" (the last test).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sentinel_hooks
from sentinel.core.types import Action, Verdict
from tests.acceptance.oracle import Plan, World, digest, rescued
from tests.acceptance.watched import (
    Copies,
    actions,
    drawn,
    policy,
    rollbacks,
    skipped,
    train_world,
    world_session,
)
from tests.acceptance.worlds import Batch, V, batches, damage_weights, world

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SEEDS = [0, 1, 2]
DEFAULT = policy("[snapshots]\nram_every = 20\nconfirm = 8")
HOLD, REWARM = 16, 50


def attach(run: World, run_dir: Path) -> Any:
    """Attach to a loop that makes its loss outside the model, with a loss module."""
    criterion = nn.CrossEntropyLoss()
    run.loss = lambda model, part: criterion(model(part.x), part.y)
    return world_session(run, DEFAULT, run_dir, loss_fn=criterion)


def dice_state() -> str:
    return digest(torch.get_rng_state(), list(np.random.get_state()[1]), random.getstate()[1])


class Verdicts:
    """What the session said, step by step."""

    def __init__(self, session: Any) -> None:
        self.at: dict[int, Verdict] = {}
        self._session = session

    def next(self, t: int, _: World) -> None:
        self.at[t] = self._session.state.ledger.verdict


def rates(applied_from: int, factor: float = 0.5) -> dict[int, float]:
    table = {applied_from + i: factor for i in range(HOLD)}
    for k in range(1, REWARM + 1):
        table[applied_from + HOLD + k - 1] = factor + (1.0 - factor) * k / (REWARM + 1)
    return table


# ---- verdict: data -----------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["garbage", "half_bad"])
@pytest.mark.parametrize("length", [4, 10, 20])
def test_bad_batches_are_blamed_on_the_data_and_nothing_is_rolled_back(
    length: int, kind: str, seed: int, tmp_path: Path
) -> None:
    start = drawn(f"{kind} x {length}", seed).randrange(66, 90)
    bad = range(start, start + length)
    steps = start + length + 30
    data = batches(seed, steps, **{kind: bad})  # type: ignore[arg-type]
    oracle = world(seed, steps=steps)
    rescued(oracle, data, Plan(skip=frozenset(bad)))
    run = world(seed, steps=steps)
    session = attach(run, tmp_path)
    verdicts = Verdicts(session)
    trail = train_world(run, data, between=verdicts.next)
    session.detach()
    assert verdicts.at[start + 2] is Verdict.NONE
    assert {verdicts.at[t] for t in bad[3:]} == {Verdict.DATA}
    assert verdicts.at[steps - 1] is Verdict.NONE
    assert rollbacks(session) == {}
    assert [t for t, held in enumerate(trail.held) if held] == list(bad)
    assert sum(skipped(session).values()) == length
    assert run.everything() == oracle.everything()
    assert "the canary blames the data" in actions(session)[bad[3]][2]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lawful_change_of_the_data_is_let_through_after_the_bound_and_never_rolled_back(
    seed: int, tmp_path: Path
) -> None:
    start = drawn("lawful change", seed).randrange(66, 90)
    steps = start + 260
    data = batches(seed, steps, new_law_from=start)
    oracle = world(seed, steps=steps)
    losses = rescued(oracle, data, Plan(skip=frozenset(range(start, start + 20))))
    run = world(seed, steps=steps)
    session = attach(run, tmp_path)
    verdicts = Verdicts(session)
    trail = train_world(run, data, between=verdicts.next)
    session.detach()
    assert [t for t, held in enumerate(trail.held) if held] == list(range(start, start + 20))
    assert verdicts.at[start + 3] is Verdict.DATA
    assert verdicts.at[start + 20] is Verdict.ACCEPTED
    assert rollbacks(session) == {}
    assert trail.losses == losses
    assert run.everything() == oracle.everything()
    assert trail.losses[-1] < 0.3 * trail.losses[start]
    assert any(i.key == "level_shift" for i in session.state.ledger.incidents)


# ---- verdict: weights ----------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", ["learning rate", "weights"])
def test_faults_of_the_weights_are_blamed_on_them_and_rolled_back(
    fault: str, seed: int, tmp_path: Path
) -> None:
    start = drawn(fault, seed).randrange(66, 90)
    steps = start + 60
    target = max(s for s in range(0, start, 20) if s + 8 <= start)
    data = batches(seed, steps)
    damage: dict[int, Callable[[World], None]] = {}
    spoil: dict[int, float] = {}
    if fault == "weights":
        damage[start] = damage_weights
        hot = start
    else:
        spoil = {start + i: 100.0 for i in range(5)}
        hot = start + 1  # the loss at `start` is the doing of the updates before it
    run = world(seed, steps=steps)
    session = attach(run, tmp_path)
    copies = Copies(run)
    verdicts = Verdicts(session)

    def between(t: int, moved: World) -> None:
        copies.next(t, moved)
        verdicts.next(t, moved)

    trail = train_world(run, data, damage=damage, spoil_rate=spoil, between=between)
    session.detach()
    assert [t for t, held in enumerate(trail.held) if held] == list(range(hot, hot + 4))
    assert rollbacks(session) == {"loss_spike/restored": 1}
    action, rule, reason = actions(session)[hot + 3]
    assert (action, rule) == (Action.ROLLBACK, "loss_spike")
    assert "the weights are to blame" in reason
    assert Verdict.DATA not in verdicts.at.values()
    assert copies.at[hot + 4].digest() == copies.at[target].digest()
    oracle = world(seed, steps=steps)
    rescued(
        oracle,
        data,
        Plan(
            skip=frozenset(range(hot, hot + 4)),
            restore={hot + 4: target},
            rate=rates(hot + 4),
            damage=damage,
            spoil_rate=spoil,
        ),
    )
    assert run.everything() == oracle.everything()


# ---- losses that are no numbers ----------------------------------------------------------


class Regression:
    """A small net, a noisy law, and inputs that may hold NaN."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.criterion = nn.MSELoss()
        self._dice = torch.Generator().manual_seed(seed)
        self._law = torch.randn(8, 4, generator=self._dice)

    def batch(self, bad: bool) -> tuple[Tensor, Tensor]:
        x = torch.randn(256, 8, generator=self._dice)
        y = x @ self._law + 3.0 * torch.randn(256, 4, generator=self._dice)
        return (x.masked_fill(x > 2.0, float("nan")) if bad else x), y

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        self.criterion(self.model(x), y).backward()
        self.optimizer.step()

    def digest(self) -> str:
        return digest([p.detach() for p in self.model.parameters()])


def regression_session(run: Regression, run_dir: Path, toml: str = "") -> Any:
    return sentinel_hooks.attach(
        model=run.model,
        optimizer=run.optimizer,
        loss_fn=run.criterion,
        policy=policy("[snapshots]\nram_every = 20\nconfirm = 8\n" + toml),
        sidecar=None,
        run_dir=run_dir,
    )


def test_thirty_batches_with_nan_inputs_are_skipped_and_no_rollback_is_spent_on_them(
    tmp_path: Path,
) -> None:
    bad = range(70, 100)
    oracle, run = Regression(1), Regression(1)
    session = regression_session(run, tmp_path)
    verdicts = {}
    for t in range(130):
        x, y = oracle.batch(t in bad)
        if t not in bad:
            oracle.step(x, y)
        run.step(*run.batch(t in bad))
        verdicts[t] = session.state.ledger.verdict
    firing = [i for i in session.state.ledger.incidents if i.key == "instability"]
    session.detach()
    assert rollbacks(session) == {}
    assert skipped(session) == {"nonfinite_loss": 30}
    assert verdicts[bad[1]] is Verdict.NONE
    assert {verdicts[t] for t in bad[2:]} == {Verdict.DATA}
    assert run.digest() == oracle.digest()
    assert [(i.fired, i.resolved is not None) for i in firing] == [(bad[2], True)]


def test_weights_that_make_the_loss_nan_are_rolled_back_at_the_third(tmp_path: Path) -> None:
    run = Regression(2)
    # Left to the loss alone: a check of the parameters would see it at the first.
    session = regression_session(run, tmp_path, "[rules.nonfinite_params]\nmode = 'off'\n")
    for t in range(110):
        if t == 80:
            with torch.no_grad():
                run.model[0].weight[3] = float("nan")  # type: ignore[index]
        run.step(*run.batch(False))
    session.detach()
    assert rollbacks(session) == {"nonfinite_loss/restored": 1}
    action, rule, reason = actions(session)[82]
    assert (action, rule) == (Action.ROLLBACK, "nonfinite_loss")
    assert "the weights are to blame" in reason
    assert skipped(session) == {"nonfinite_loss": 2}
    assert all(bool(torch.isfinite(p).all()) for p in run.model.parameters())


# ---- asking moves nothing --------------------------------------------------------------

MOVABLE: dict[str, dict[str, Any]] = {
    "batchnorm": {"norm": True},
    "dropout": {"dropout": 0.2},
    "batchnorm-dropout-scaler": {"norm": True, "dropout": 0.2, "scaler": True},
    "checkpointed-dropout": {"dropout": 0.2, "checkpointed": True},
    "checkpointed-batchnorm": {"norm": True, "checkpointed": True},
    "accumulation-dropout": {"dropout": 0.2},
    "own-generator": {"own_generator": True},
}


def compiled(made: World) -> World:
    made.forward = torch.compile(made.model, backend="aot_eager")
    return made


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", [*MOVABLE, "compiled-batchnorm", "compiled-dropout"])
def test_asking_the_canary_moves_nothing(kind: str, seed: int, tmp_path: Path) -> None:
    start = drawn(f"asking {kind}", seed).randrange(66, 80)
    bad = range(start, start + 8)
    steps = start + 24
    parts = 4 if kind.startswith("accumulation") else 1
    data = batches(seed, steps, garbage=bad, rows=256 // parts, accumulation=parts)
    wrap: Callable[[World], World] = compiled if kind.startswith("compiled") else (lambda w: w)
    options = MOVABLE.get(kind) or MOVABLE[kind.removeprefix("compiled-")]

    torch.compiler.reset()
    oracle = wrap(world(seed, steps=steps, **options))
    torch.manual_seed(seed)
    oracle_losses = rescued(oracle, data, Plan(skip=frozenset(bad)))
    oracle_dice = dice_state()

    torch.compiler.reset()
    run = wrap(world(seed, steps=steps, **options))
    torch.manual_seed(seed)
    session = attach(run, tmp_path)
    verdicts = Verdicts(session)
    trail = train_world(run, data, between=verdicts.next)
    session.detach()
    assert verdicts.at[start + 3] is Verdict.DATA, "the canary was not asked"
    assert trail.losses == oracle_losses
    assert run.everything() == oracle.everything()
    assert dice_state() == oracle_dice
    assert trail.consumed == [t for t in range(steps) for _ in range(parts)]


# ---- where the loss comes from -----------------------------------------------------------


class ReturnsItsLoss(nn.Module):
    """As the modules of the big libraries do: batch in, loss out."""

    def __init__(self, inner: nn.Module, how: str) -> None:
        super().__init__()
        self.inner = inner
        self.how = how

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.inner(x)
        loss = nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "tuple": (loss, logits), "mapping": {"loss": loss}}[self.how]


def _wrapped(seed: int, steps: int, how: str) -> World:
    made = world(seed, steps=steps)
    made.model = ReturnsItsLoss(made.model, how)

    def loss(model: nn.Module, part: Batch) -> Tensor:
        out = model(part.x, labels=part.y)
        value: Tensor = out["loss"] if how == "mapping" else out[0] if how == "tuple" else out
        return value

    made.loss = loss
    return made


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", ["loss", "tuple", "mapping"])
def test_a_module_that_returns_its_loss_needs_no_loss_fn(
    how: str, seed: int, tmp_path: Path
) -> None:
    start = drawn(f"returns its loss as {how}", seed).randrange(66, 80)
    bad = range(start, start + 8)
    steps = start + 20
    data = batches(seed, steps, garbage=bad)
    oracle = _wrapped(seed, steps, how)
    rescued(oracle, data, Plan(skip=frozenset(bad)))
    run = _wrapped(seed, steps, how)
    session = world_session(run, DEFAULT, tmp_path)
    verdicts = Verdicts(session)
    train_world(run, data, between=verdicts.next)
    session.detach()
    assert verdicts.at[start + 3] is Verdict.DATA
    assert rollbacks(session) == {}
    assert run.everything() == oracle.everything()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", ["function", "view of the output", "of output and input"])
def test_a_loss_made_outside_the_model_is_found_by_loss_fn(
    how: str, seed: int, tmp_path: Path
) -> None:
    start = drawn(f"loss_fn {how}", seed).randrange(66, 80)
    if how == "of output and input":
        start += 64  # its loss falls ten-thousandfold at first, and the detector's spread with it
    bad = range(start, start + 8)
    steps = start + 20
    data = batches(seed, steps, garbage=bad)
    oracle = world(seed, steps=steps)
    run = world(seed, steps=steps)
    if how == "function":
        session = world_session(
            run,
            DEFAULT,
            tmp_path,
            loss_fn=lambda part: nn.functional.cross_entropy(run.model(part.x), part.y),
        )
        run.loss = lambda model, part: session.loss(part)
    elif how == "view of the output":
        criterion = nn.CrossEntropyLoss()
        session = world_session(run, DEFAULT, tmp_path, loss_fn=criterion)
        run.loss = lambda model, part: criterion(
            model(part.x).view(2, -1, V).view(-1, V), part.y.view(2, -1).reshape(-1)
        )
    else:
        # an autoencoder of symbols needs no labels; its bad batches are asked for other symbols
        def reconstruct(out: Tensor, x: Tensor) -> Tensor:
            return nn.functional.cross_entropy(out, x)

        for made in (oracle, run):
            made.loss = lambda model, part: reconstruct(
                model(part.x), part.x if part.kind == "clean" else (part.x + 7) % V
            )
        session = world_session(run, DEFAULT, tmp_path, loss_fn=reconstruct)
    rescued(oracle, data, Plan(skip=frozenset(bad)))
    verdicts = Verdicts(session)
    train_world(run, data, between=verdicts.next)
    session.detach()
    assert verdicts.at[start + 3] is Verdict.DATA
    assert rollbacks(session) == {}
    assert run.everything() == oracle.everything()


@pytest.mark.parametrize("seed", SEEDS)
def test_without_loss_fn_the_fallback_is_taken_and_status_says_so(
    seed: int, tmp_path: Path
) -> None:
    """Roll back at the fourth spike step, then skip while hot."""
    start = drawn("no loss_fn", seed).randrange(66, 80)
    bad = range(start, start + 10)
    steps = start + 50
    target = max(s for s in range(0, start, 20) if s + 8 <= start)
    data = batches(seed, steps, garbage=bad)
    oracle = world(seed, steps=steps)
    plan = Plan(skip=frozenset(bad), restore={start + 4: target}, rate=rates(start + 10))
    rescued(oracle, data, plan)
    run = world(seed, steps=steps)
    session = world_session(run, DEFAULT, tmp_path)
    said = []
    train_world(run, data, between=lambda t, _: said.append(str(session.status())))
    session.detach()
    assert rollbacks(session) == {"loss_spike/restored": 1}
    assert run.everything() == oracle.everything()
    assert "canary" in said[30]
    assert "loss_fn" in said[30]


def test_negative_control_with_the_canary_off_the_same_garbage_is_rolled_back(
    tmp_path: Path,
) -> None:
    seed, start = 0, 70
    bad = range(start, start + 8)
    data = batches(seed, 90, garbage=bad)
    oracle = world(seed, steps=90)
    rescued(oracle, data, Plan(skip=frozenset(bad)))
    run = world(seed, steps=90)
    rules = policy('[snapshots]\nram_every = 20\nconfirm = 8\n[canary]\nmode = "off"')
    session = world_session(run, rules, tmp_path)
    train_world(run, data)
    session.detach()
    assert rollbacks(session) == {"loss_spike/restored": 1}
    assert run.everything() != oracle.everything()

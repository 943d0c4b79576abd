"""A session in the loops that people write: what it sees, does, refuses and survives."""

from __future__ import annotations

import copy
import logging
import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import sentinel_hooks
from sentinel.core.errors import ConfigError
from sentinel.core.policy import Policy
from sentinel.core.types import (
    LAYER_GRAD_NORM,
    Action,
    Mode,
    Observation,
    Protection,
    Severity,
)
from sentinel.traces.reader import Reader
from sentinel_hooks import AttachError, Session, Snapshots, TrainingHalted
from sentinel_hooks.parts.turns import DORMANT
from tests.hooks.worlds import Net, digest

pytestmark = pytest.mark.torch

QUICK = Policy.parse(
    """
[spike]
window = 24
warmup = 12
[grad_norm]
window = 24
warmup = 12
[snapshots]
ram_every = 8
confirm = 4
""",
    "quick",
)


class Loop:
    """A plain loop with everything in reach."""

    def __init__(self, tmp_path: Path, optimizer: Any = None, **options: Any) -> None:
        torch.manual_seed(5)
        self.g = torch.Generator().manual_seed(5)
        self.model: nn.Module = options.pop("module", None) or Net(dropout=0.0)
        make = optimizer or (lambda ps: torch.optim.AdamW(ps, lr=3e-3))
        self.optimizer = make(self.model.parameters())
        self.session: Session = sentinel_hooks.attach(
            model=options.pop("model", self.model),
            optimizer=self.optimizer,
            policy=options.pop("policy", QUICK),
            sidecar=None,
            run_dir=tmp_path,
            **options,
        )

    def batch(self) -> tuple[Tensor, Tensor]:
        x = torch.randn(32, 12, generator=self.g)
        return x, x.sum(1, keepdim=True).sin() + 2 + 0.3 * torch.randn(32, 1, generator=self.g)

    def loss(self) -> Tensor:
        out: Tensor = self.model(*self.batch())
        return out

    def step(self, spoil: Callable[[], None] | None = None) -> float:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        if spoil is not None:
            spoil()
        self.optimizer.step()
        return loss.item()

    def spoil(self) -> None:
        p = next(p for p in self.model.parameters() if p.grad is not None)
        p.grad.view(-1)[0] = math.nan  # type: ignore[union-attr]

    def held(self) -> str:
        return digest(
            dict(self.model.named_parameters()),
            [self.optimizer.state.get(p, {}) for p in self.model.parameters()],
        )

    def observed(self) -> list[Observation]:
        self.session.detach()
        return [r.observation for r in Reader(self.session.directory).steps(columns=True)]


# ---------------------------------------------------------------- observing


def test_losses_of_micro_batches_are_summed_and_counted(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    for _ in range(3):
        loop.optimizer.zero_grad()
        parts = [loop.loss() / 2 for _ in range(2)]
        for part in parts:
            part.backward()
        loop.optimizer.step()
        expected = float(sum(p.detach().double() for p in parts))
    seen = loop.observed()
    assert seen[-1].loss == pytest.approx(expected, rel=1e-6)
    assert {o.shape for o in seen} == {(2, 32)}
    assert [o.step for o in seen] == [0, 1, 2]
    assert seen[0].lr == 3e-3


@pytest.mark.parametrize("reads", ["now", "late"])
def test_it_is_seen_for_how_many_steps_gradients_have_been_adding_up(
    reads: str, tmp_path: Path
) -> None:
    def none(loop: Loop) -> None:
        for p in loop.model.parameters():
            p.grad = None

    drops: dict[int, Callable[[Loop], None]] = {
        1: lambda loop: loop.optimizer.zero_grad(),
        2: lambda loop: loop.optimizer.zero_grad(set_to_none=False),
        3: lambda loop: loop.model.zero_grad(),
        4: none,
        7: lambda loop: loop.optimizer.zero_grad(),
    }
    loop = Loop(tmp_path, lambda ps: torch.optim.SGD(ps, lr=1e-3, fused=True), reads=reads)
    for t in range(10):
        if t in drops:
            drops[t](loop)
        for _ in range(2):  # an accumulation is one step
            loop.loss().backward()
        loop.optimizer.step()
    ages = [o.scalars["gradient_age"] for o in loop.observed()]
    assert ages == [1, 1, 1, 1, 1, 2, 3, 1, 2, 3]


def test_backwards_of_others_vector_roots_and_dropped_accumulations_are_no_losses(
    tmp_path: Path,
) -> None:
    loop = Loop(tmp_path)
    other = nn.Linear(3, 1)
    for drop in (loop.optimizer.zero_grad, loop.model.zero_grad, None):
        loop.loss().backward()  # thrown away
        if drop is not None:
            drop()
        else:
            loop.optimizer.zero_grad(set_to_none=False)
        other(torch.ones(2, 3)).sum().mul(1000).backward()
        x = torch.ones(2, requires_grad=True)
        (x * 2).backward(torch.ones(2))
        loss = loop.loss()
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    seen = loop.observed()
    assert [o.shape[0] for o in seen] == [1, 1, 1]
    assert seen[-1].loss == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_loss_that_is_recomputed_inside_backward_counts_once(
    reentrant: bool, tmp_path: Path
) -> None:
    loop = Loop(tmp_path)
    x, y = loop.batch()
    x.requires_grad_()  # or the reentrant kind makes no graph
    loss = checkpoint(loop.model, x, y, use_reentrant=reentrant)
    loss.backward()  # the reentrant kind calls backward again, with a scalar root
    loop.optimizer.step()
    seen = loop.observed()
    assert seen[0].shape[0] == 1
    assert seen[0].loss == pytest.approx(loss.item(), rel=1e-6)


def test_a_loss_behind_autograd_grad_is_absent_and_named_as_a_blind_spot(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    for _ in range(2):
        grads = torch.autograd.grad(loop.loss(), list(loop.model.parameters()))
        for p, g in zip(loop.model.parameters(), grads, strict=True):
            p.grad = g
        loop.optimizer.step()
    status = loop.session.status()
    assert any("torch.autograd.grad" in str(spot) for spot in status.blind_spots)
    seen = loop.observed()
    assert seen[0].loss is None
    assert seen[0].grad_norm is not None
    assert seen[0].grad_norm > 0


def test_an_evaluation_pass_between_steps_is_not_training(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    for _ in range(3):
        loop.step()
        loop.model.eval()
        with torch.no_grad():
            loop.loss()
        loop.model(*loop.batch()).item()
        loop.model.train()
    seen = loop.observed()
    assert len(seen) == 3
    assert all(o.shape == (1, 32) for o in seen)


def test_the_norm_is_the_one_before_the_clip_and_a_stale_one_is_not_used(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.optimizer.zero_grad()
    (loop.loss() * 100).backward()
    torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.01)
    loop.optimizer.zero_grad()  # clipped, and thrown away
    loop.loss().backward()
    true = math.sqrt(
        sum(float(p.grad.double().square().sum()) for p in loop.model.parameters())  # type: ignore[union-attr]
    )
    torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.01)
    loop.optimizer.step()
    seen = loop.observed()
    assert seen[0].grad_norm == pytest.approx(true, rel=1e-5)
    assert float((seen[0].columns[LAYER_GRAD_NORM].astype(float) ** 2).sum()) == pytest.approx(
        true**2, rel=1e-5
    )


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_with_a_scaler_norms_and_losses_are_unscaled_clipped_or_not(
    unscale: bool, fused: bool, tmp_path: Path
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    loop = Loop(
        tmp_path, lambda ps: torch.optim.AdamW(ps, lr=3e-3, fused=fused), grad_scaler=scaler
    )
    for clip in (False, True):
        loop.optimizer.zero_grad()
        loss = loop.loss()
        scaler.scale(loss).backward()
        true = math.sqrt(
            sum(float((p.grad.double() / 512).square().sum()) for p in loop.model.parameters())  # type: ignore[union-attr]
        )
        if unscale:
            scaler.unscale_(loop.optimizer)
        if clip:
            torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.01)
        scaler.step(loop.optimizer)
        scaler.update()
        assert loop.session.state.step == clip + 1
        expected = (loss.item(), true)
    seen = loop.observed()
    assert (seen[1].loss, seen[1].grad_norm) == pytest.approx(expected, rel=1e-5)
    assert seen[1].loss_scale == 512.0


OVERFLOWING = {
    "left out": lambda ps: torch.optim.AdamW(ps, lr=3e-3),
    "dropped by the kernel": lambda ps: torch.optim.AdamW(ps, lr=3e-3, fused=True),
}


@pytest.mark.parametrize("mode", ["act", "observe"])
@pytest.mark.parametrize("make", OVERFLOWING.values(), ids=OVERFLOWING)
def test_an_overflow_is_the_scalers_own_and_reads_so_everywhere(
    make: Any, mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    loop = Loop(tmp_path, make, grad_scaler=scaler, policy=QUICK.with_mode(mode))
    with caplog.at_level(logging.INFO, logger="sentinel_hooks"):
        for t in range(4):
            loop.optimizer.zero_grad()
            scaler.scale(loop.loss() * (2.0**60 if t < 3 else 1.0)).backward()
            before = digest(dict(loop.model.named_parameters()))
            scaler.step(loop.optimizer)
            scaler.update(2.0**20 if t == 2 else None)
            assert (digest(dict(loop.model.named_parameters())) == before) is (t < 3)
        status = loop.session.status()
    counters = status.counters
    assert dict(counters.skipped) == dict(counters.would) == {}
    assert dict(counters.nonfinite) == {"scaler": 3}  # neither loss nor gradient of the run
    assert (counters.lost_steps, status.scaler_skips) == (3, 3)
    assert "left out by the gradient scaler: 3 steps" in str(status)
    assert not [m for m in caplog.messages if "skip_step" in m]
    told = [m for m in caplog.messages if m.startswith("the gradient scaler left a step out")]
    assert len(told) == 2  # the 1st and the 2nd; the 4th would be next
    assert "step=0 loss_scale=1.32923e+36 so_far=1" in told[0]
    (incident,) = status.incidents
    assert incident.summary.startswith("the gradient scaler left this step out")
    assert (incident.severity, incident.actions) == (Severity.INFO, ())
    done = [(r.outcome.executed, r.outcome.applied) for r in _records(loop)]
    assert done == [(Action.PROCEED, False)] * 3 + [(Action.PROCEED, True)]


def test_running_statistics_of_a_step_that_the_scaler_left_out_are_those_without_us(
    tmp_path: Path,
) -> None:
    def run(attach: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        session = (
            sentinel_hooks.attach(
                model=model,
                optimizer=optimizer,
                grad_scaler=scaler,
                sidecar=None,
                run_dir=tmp_path,
            )
            if attach
            else None
        )
        for t in range(4):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(8, 4)).square().mean()).backward()
            if t == 1:
                model[0].weight.grad.fill_(math.inf)  # type: ignore[union-attr]
            scaler.step(optimizer)
            scaler.update()
        if session is not None:
            session.detach()
        return [t.detach().clone() for t in model.state_dict().values()]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


def test_a_nan_loss_under_a_scaler_is_a_skip_of_ours_as_ever(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    loop = Loop(tmp_path, grad_scaler=scaler)
    for t in range(3):
        loop.optimizer.zero_grad()
        scaler.scale(loop.loss() * (math.nan if t == 1 else 1.0)).backward()
        scaler.step(loop.optimizer)
        scaler.update()
    status = loop.session.status()
    assert dict(status.counters.skipped) == {"nonfinite_loss": 1}
    assert status.scaler_skips == 0
    loop.session.detach()


def test_batch_names_and_a_norm_of_the_users_own_reach_the_observation(tmp_path: Path) -> None:
    loop = Loop(tmp_path, batch_id=lambda: "shard-7", norm_fn=lambda: torch.tensor(3.5))
    loop.step()
    seen = loop.observed()
    assert (seen[0].batch_id, seen[0].grad_norm) == ("shard-7", 3.5)


# ---------------------------------------------------------------- acting

CLOSURES = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9),
    "lbfgs": lambda ps: torch.optim.LBFGS(ps, lr=0.05, max_iter=3),
}


@pytest.mark.parametrize("name", list(CLOSURES))
def test_a_closure_runs_once_on_a_skipped_step_and_its_loss_is_returned(
    name: str, tmp_path: Path
) -> None:
    loop = Loop(tmp_path, CLOSURES[name])
    for t in range(4):
        calls = 0
        batch = loop.batch()

        def closure(t: int = t, batch: Any = batch) -> Tensor:
            nonlocal calls
            calls += 1
            loop.optimizer.zero_grad()
            loss: Tensor = loop.model(*batch)
            loss.backward()
            if t == 2:
                loop.spoil()
            return loss

        before = loop.held()
        out = loop.optimizer.step(closure)
        assert isinstance(out, Tensor)
        assert calls == 1 if t == 2 or name == "sgd" else calls > 1
        assert (loop.held() == before) is (t == 2)
    assert [o.shape for o in loop.observed()] == [(1, 32)] * 4


def test_an_error_in_the_closure_is_the_users_and_the_next_step_works(tmp_path: Path) -> None:
    loop = Loop(tmp_path, CLOSURES["sgd"])

    def broken() -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop.optimizer.step(broken)
    loop.step()
    assert loop.session.status().internal_errors == {}
    assert len(loop.observed()) == 1


def test_a_step_that_raises_leaves_gradients_and_rates_as_they_were(tmp_path: Path) -> None:
    class Stumbles(torch.optim.SGD):
        fall = False

        def step(self, closure: Any = None) -> Any:
            if self.fall:
                raise MemoryError
            return super().step(closure)

    loop = Loop(tmp_path, lambda ps: Stumbles(ps, lr=0.1))
    loop.optimizer.fall = True
    with pytest.raises(MemoryError):
        loop.step(loop.spoil)
    loop.optimizer.fall = False
    loop.step()
    assert all(p.grad is not None for p in loop.model.parameters())
    assert loop.session.state.step == 2
    seen = [(r.outcome.executed, r.outcome.applied) for r in _records(loop)]
    assert seen == [(Action.SKIP_STEP, False), (Action.PROCEED, True)]


def _records(loop: Loop) -> list[Any]:
    loop.session.detach()
    return list(Reader(loop.session.directory).steps())


def test_a_subclass_that_calls_the_step_of_its_parent_is_one_step(tmp_path: Path) -> None:
    class Derived(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    loop = Loop(tmp_path, lambda ps: Derived(ps, lr=0.1, momentum=0.9))
    loop.step()
    before = loop.held()
    loop.step(loop.spoil)
    assert loop.held() == before
    loop.step()
    assert [r.outcome.executed for r in _records(loop)] == [
        Action.PROCEED,
        Action.SKIP_STEP,
        Action.PROCEED,
    ]


@pytest.mark.parametrize("tensor", [False, True])
def test_the_rate_is_multiplied_for_the_step_only_and_schedules_never_see_it(
    tensor: bool, tmp_path: Path
) -> None:
    rate: Any = torch.tensor(0.1) if tensor else 0.1
    loop = Loop(tmp_path, lambda ps: torch.optim.SGD(ps, lr=rate))
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 3, 0.5)
    reference = copy.deepcopy(loop.model), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    expected = torch.optim.lr_scheduler.StepLR(reference[1], 3, 0.5)
    seen: list[float] = []
    original = loop.optimizer.param_groups[0]["lr"]
    loop.optimizer.register_step_pre_hook(
        lambda o, a, k: seen.append(float(o.param_groups[0]["lr"]))
    )
    for t in range(12):
        if t == 4:
            _order(loop, "scale_lr", value=0.25)
        loop.step()
        scheduler.step()
        reference[1].step()
        expected.step()
        assert float(loop.optimizer.param_groups[0]["lr"]) == pytest.approx(
            expected.get_last_lr()[0]
        )
    assert (loop.optimizer.param_groups[0]["lr"] is original) is tensor
    assert seen[3] == pytest.approx(0.05)
    assert seen[4] == pytest.approx(0.05 * 0.25)
    assert seen[-1] == pytest.approx(0.1 * 0.5**3 * 0.25)


def _order(loop: Loop, kind: str, **values: Any) -> None:
    from sentinel.core.types import Command, CommandKind

    command = Command(id=f"c-{kind}", kind=CommandKind(kind), **values)
    loop.session._link.take_commands = _Once((command,))  # type: ignore[method-assign]


class _Once:
    def __init__(self, commands: Any) -> None:
        self.commands = commands

    def __call__(self) -> Any:
        taken, self.commands = self.commands, ()
        return taken


def test_a_person_may_halt_the_run_from_inside_step_with_the_gradients_back(
    tmp_path: Path,
) -> None:
    loop = Loop(tmp_path)
    loop.step()
    _order(loop, "halt")
    before = loop.held()
    with pytest.raises(TrainingHalted):
        loop.step()
    assert loop.held() == before
    assert all(p.grad is not None for p in loop.model.parameters())


def test_parameters_added_later_are_skipped_with_the_others(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.step()
    late = nn.Parameter(torch.ones(3))
    loop.model.first.register_parameter("late", late)  # type: ignore[operator,union-attr]
    loop.optimizer.add_param_group({"params": [late]})

    def spoil() -> None:
        late.grad = torch.full((3,), math.nan)

    before = loop.held()
    loop.step(spoil)
    assert loop.held() == before
    assert late.tolist() == [1.0, 1.0, 1.0]
    column = loop.observed()[-1].columns[LAYER_GRAD_NORM]
    assert [bool(math.isnan(x)) for x in column.tolist()] == [True, False, False, False]


def test_a_wrapped_optimizer_is_gated_at_its_innermost(tmp_path: Path) -> None:
    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def step(self) -> None:
            self.optimizer.step()

    model = Net(dropout=0.0)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with sentinel_hooks.attach(
        model=model,
        optimizer=Wrapper(Wrapper(inner)),
        sidecar=None,
        run_dir=tmp_path,  # type: ignore[arg-type]
    ) as session:
        model(torch.ones(4, 12), torch.ones(4, 1)).backward()
        inner.step()
        assert session.state.step == 1


# ---------------------------------------------------------------- several optimizers


class Pair(Loop):
    """Two linear models with an optimizer each."""

    def __init__(self, tmp_path: Path) -> None:
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)
        self.oa = torch.optim.SGD(self.a.parameters(), lr=0.1, momentum=0.9)
        self.ob = torch.optim.AdamW(self.b.parameters(), lr=0.1)
        self.session = sentinel_hooks.attach(
            model=[self.a, self.b],
            optimizer=[self.oa, self.ob],
            policy=QUICK,
            sidecar=None,
            run_dir=tmp_path,
        )

    def both(self, spoil: nn.Module | None = None) -> None:
        for o in (self.oa, self.ob):
            o.zero_grad()
        x = torch.ones(4, 4)
        (self.a(x).square().mean() + self.b(x).square().mean()).backward()
        if spoil is not None:
            spoil.weight.grad[0, 0] = math.nan  # type: ignore[index,union-attr]
        self.oa.step()
        self.ob.step()

    def weights(self) -> tuple[str, str]:
        return digest(self.a.state_dict()), digest(self.b.state_dict())


@pytest.mark.parametrize("which", ["a", "b"])
def test_a_bad_gradient_in_one_optimizer_skips_the_whole_group(which: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.both()
    before = pair.weights()
    pair.both(getattr(pair, which))
    assert pair.weights() == before
    pair.both()
    assert pair.weights() != before
    assert pair.session.state.step == 3
    assert dict(pair.session.state.ledger.counters.skipped) == {"nonfinite_grad": 1}


def test_gradients_made_after_the_decision_are_checked_on_their_own(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    x = torch.ones(4, 4)
    for t in range(3):
        pair.oa.zero_grad()
        pair.a(x).square().mean().backward()
        pair.oa.step()
        pair.ob.zero_grad()
        (pair.b(x).square().mean() * (math.nan if t == 1 else 1.0)).backward()
        before = pair.weights()[1]
        pair.ob.step()
        assert (pair.weights()[1] == before) is (t == 1)
    assert pair.session.state.step == 3
    assert pair.session.status().late_skips == 1
    assert "held back on their own: 1" in str(pair.session.status())
    pair.session.detach()
    losses = [r.observation.loss for r in Reader(pair.session.directory).steps()]
    assert all(x is not None and math.isfinite(x) for x in losses), "only the first one's own"


def test_snapshots_wait_for_all_optimizers_but_not_for_one_that_never_steps(
    tmp_path: Path,
) -> None:
    pair = Pair(tmp_path)
    x = torch.ones(4, 4)
    for _ in range(40):
        pair.oa.zero_grad()
        (pair.a(x).square().mean() + 1).backward()
        pair.oa.step()
    assert pair.session.state.step == 40
    healthy = pair.session.status().healthy
    assert healthy[0] == 0
    assert len(healthy) > 1, "the second optimizer starved the snapshots"
    assert healthy[1] >= DORMANT


# ---------------------------------------------------------------- the safe point


def test_a_checkpoint_loaded_after_attach_is_what_snapshot_zero_holds(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    with torch.no_grad():
        for p in loop.model.parameters():
            p.fill_(0.25)
    assert loop.session.status().healthy == ()
    loop.step()
    assert loop.session.status().healthy == (0,)
    loop.session._store.restore(0)
    assert all(bool((p == 0.25).all()) for p in loop.model.parameters())


def test_a_lazy_model_gets_its_first_snapshot_before_its_first_step(tmp_path: Path) -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.LazyLinear(3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.first(x).sum(1, keepdim=True), y)

    loop = Loop(tmp_path, module=Lazy())
    before: list[str] = []
    loop.step(lambda: before.append(loop.held()))
    assert loop.session.status().healthy == (0,)
    assert loop.held() != before[0]
    loop.session._store.restore(0)
    assert loop.held() == before[0]
    assert loop.session.status().internal_errors == {}


def test_without_a_visible_forward_snapshots_are_taken_after_the_step_and_status_says_so(
    tmp_path: Path,
) -> None:
    inner = Net(dropout=0.0)
    compiled = torch.compile(inner, backend="eager", fullgraph=True)
    compiled(torch.ones(2, 12), torch.ones(2, 1)).backward()  # compiled before the hooks came
    inner.zero_grad()
    loop = Loop(tmp_path, module=inner, model=inner)
    loop.model = compiled
    for _ in range(30):
        loop.step()
    status = loop.session.status()
    assert len(status.healthy) > 1
    assert any("the compiled wrapper" in str(spot) for spot in status.blind_spots)
    assert status.internal_errors == {}


@pytest.mark.parametrize("early", [False, True])
def test_hooks_on_the_inner_module_break_no_graph(early: bool, tmp_path: Path) -> None:
    torch._dynamo.reset()
    inner = Net(dropout=0.0)
    if early:
        compiled = torch.compile(inner, backend="eager", fullgraph=True)
        loop = Loop(tmp_path, module=inner)
    else:
        loop = Loop(tmp_path, module=inner)
        compiled = torch.compile(inner, backend="eager", fullgraph=True)
    loop.model = compiled
    for _ in range(3):
        loop.step()
    assert loop.session.state.step == 3
    assert loop.session.status().internal_errors == {}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_compiled_optimizer_step_is_gated_too(tmp_path: Path) -> None:
    torch._dynamo.reset()
    loop = Loop(tmp_path, lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(3e-3)))
    step = torch.compile(loop.optimizer.step, backend="eager")
    for t in range(4):
        loop.optimizer.zero_grad()
        loop.loss().backward()
        if t == 2:
            loop.spoil()
        before = loop.held()
        step()
        assert (loop.held() == before) is (t == 2)
    assert loop.session.state.step == 4


def test_a_dummy_step_that_only_makes_optimizer_state_is_not_a_step(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    loop = Loop(tmp_path)
    get_state_dict(loop.model, loop.optimizer)
    assert loop.session.state.step == 0
    loop.step()
    assert loop.session.state.step == 1


def test_copies_and_pickles_of_a_watched_model_carry_nothing_of_ours(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 1))  # a class that another process knows
    optimizer = torch.optim.AdamW(model.parameters())
    criterion = nn.MSELoss()
    with sentinel_hooks.attach(
        model=model, optimizer=optimizer, loss_fn=criterion, sidecar=None, run_dir=tmp_path
    ) as session:
        copied, copied_optimizer = copy.deepcopy(model), copy.deepcopy(optimizer)
        pickled = pickle.dumps((model, criterion, optimizer))
        assert b"sentinel_hooks" not in pickled
        loaded, loaded_criterion, _ = pickle.loads(pickled)
        x = torch.ones(2, 3)
        for other in (copied, loaded):
            for _ in range(3):
                loaded_criterion(other(x), torch.zeros(2, 1)).backward()
        copied_optimizer.step()
        assert session.state.step == 0
        assert session._turns.forwards == 0
        code = (
            "import pickle, sys\n"
            "print(len(pickle.load(sys.stdin.buffer)), 'sentinel_hooks' in sys.modules)"
        )
        out = subprocess.run(
            [sys.executable, "-c", code], input=pickled, capture_output=True, check=True
        )
        assert out.stdout.split() == [b"3", b"False"]


def test_two_forwards_before_one_backward_are_one_safe_point(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    for _ in range(20):
        loop.optimizer.zero_grad()
        (loop.loss() / 2 + loop.loss() / 2).backward()
        loop.optimizer.step()
    assert loop.session.status().internal_errors == {}
    assert len(loop.session.status().healthy) > 1


# ---------------------------------------------------------------- refusing


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, "model is missing"),
        ({"optimizer": None}, "optimizer is missing"),
        ({"model": []}, "model is an empty list"),
        ({"model": 3}, "model must be a torch.nn.Module or a list of them, got builtins.int"),
        ({"model": nn.Identity()}, "model has no parameters"),
        ({"model": nn.Linear(2, 2)}, "optimizer and model share no parameter"),
        ({"optimizer": "adam"}, "optimizer must be a torch.optim.Optimizer"),
        ({"grad_scaler": 2.0}, "grad_scaler must be a torch.amp.GradScaler"),
        ({"extra_state": [3]}, "extra_state must hold objects with state_dict"),
        ({"loss_fn": 3}, "loss_fn must be a function or a loss module, got int"),
        ({"batch_id": "b"}, "batch_id must be a function without arguments"),
        ({"snapshots": True}, "snapshots must be a sentinel_hooks.Snapshots, got bool"),
        ({"run_id": "a/b"}, "run_id must be usable as a directory name"),
        ({"trainer": object()}, r"attach\(\) was given a trainer and model="),
    ],
)
def test_what_cannot_be_watched_is_refused_with_the_way_out(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = Net()
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), **change}
    hooks = dict(vars(model))
    with pytest.raises(AttachError, match=message):
        sentinel_hooks.attach(**given, sidecar=None, run_dir=tmp_path)
    assert vars(model) == hooks
    assert list(tmp_path.iterdir()) == []


def test_the_same_optimizer_is_attached_once_at_a_time(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    again = {"model": loop.model, "optimizer": loop.optimizer, "sidecar": None}
    with pytest.raises(AttachError, match="attached already; detach"):
        sentinel_hooks.attach(**again, run_dir=tmp_path)
    with pytest.raises(AttachError, match="holds the same optimizer twice"):
        sentinel_hooks.attach(
            model=loop.model, optimizer=[loop.optimizer] * 2, sidecar=None, run_dir=tmp_path
        )
    loop.session.detach()
    sentinel_hooks.attach(**again, run_dir=tmp_path).detach()


def test_a_policy_or_mode_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="policy must be one of"):
        Loop(tmp_path, policy="no-such-policy")
    with pytest.raises(ConfigError, match="mode must be"):
        Loop(tmp_path, mode="sometimes")


# ---------------------------------------------------------------- status


def test_status_says_in_words_what_is_guarded_and_what_is_not(tmp_path: Path) -> None:
    loop = Loop(tmp_path, run_id="r7", snapshots=Snapshots(ram=False, disk=False))
    first = loop.session.status()
    assert (first.run_id, first.step, first.protection) == ("r7", 0, Protection.WARMING)
    for _ in range(30):
        loop.step()
    loop.step(loop.spoil)
    loop.step()
    status = loop.session.status()
    assert status.protection is Protection.ARMED
    assert status.canary == "available"
    assert dict(status.counters.skipped) == {"nonfinite_grad": 1}
    text = str(status)
    for piece in (
        "sentinel run=r7 step=32 policy=quick mode=act",
        "protection: armed",
        "blind spot: no snapshots: nothing to roll back to; use Snapshots(ram=True)",
        "1 skipped (nonfinite_grad 1)",
        "sidecar: embedded",
        "incident i-1",
    ):
        assert piece in text, text
    loop.session.detach()
    assert loop.session.status().protection is Protection.OFF
    assert "detached" in loop.session.status().why


def test_observing_notes_what_it_would_do_and_does_nothing(tmp_path: Path) -> None:
    loop = Loop(tmp_path, mode="observe")
    loop.step()
    before = loop.held()
    loop.step(loop.spoil)
    assert loop.held() != before
    status = loop.session.status()
    assert status.mode is Mode.OBSERVE
    assert status.protection is Protection.OFF
    assert dict(status.counters.would) == {"skip_step/nonfinite_grad": 1}
    assert "would have acted: 1" in str(status)


def test_a_run_stays_in_its_folder_when_the_loop_changes_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sentinel_hooks.attach(
        model=model, optimizer=optimizer, sidecar=None, run_dir="runs", run_id="r7"
    ) as session:
        for step in range(12):
            if step == 4:
                monkeypatch.chdir(tmp_path / "there")
            optimizer.zero_grad()
            model(torch.randn(4, 4)).square().mean().backward()
            optimizer.step()
        assert session.status().blind_spots == ()
    assert list((tmp_path / "there").iterdir()) == []
    assert len(Reader(tmp_path / "here" / "runs" / "r7").curve().loss) == 12


def test_a_pause_file_pauses_and_its_removal_resumes(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.step()
    (tmp_path / "PAUSE").touch()
    for _ in range(9):
        loop.step()
    assert loop.session.status().why == "a person paused automation"
    (tmp_path / "PAUSE").unlink()
    for _ in range(9):
        loop.step()
    assert loop.session.status().protection is not Protection.OFF


def test_losing_the_disk_or_the_memory_goes_on_and_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(tmp_path)

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    assert loop.session._chronicle.recorder is not None
    monkeypatch.setattr(loop.session._chronicle.recorder, "step", full)
    loop.session._store._available = lambda: 10
    for _ in range(3):
        loop.step()
    spots = " | ".join(map(str, loop.session.status().blind_spots))
    assert "the trace has holes: no space left on device" in spots
    assert "snapshots fail: a snapshot needs" in spots
    assert loop.session.state.step == 3


# ---------------------------------------------------------------- failing open

PLACES = {
    "measure": ("_observer", "measure"),
    "backward": ("_observer", "_collect"),
    "settle": ("", "_settle"),
    "gate": ("", "_decide"),
    "safe_point": ("", "_maybe_safe_point"),
    "canary": ("_canary", "begin"),
    "snapshot": ("_store", "take"),
    "after": ("", "after_step"),
    "clip": ("_observer", "_clipped"),
}


@pytest.mark.parametrize("place", list(PLACES))
def test_an_error_of_our_own_anywhere_changes_nothing_and_is_logged_once(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run(loop: Loop) -> str:
        for _ in range(8):
            loop.optimizer.zero_grad()
            loop.loss().backward()
            torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
            loop.optimizer.step()
        return loop.held()

    alone = Loop(tmp_path)
    alone.session.detach()
    expected = run(alone)

    loop = Loop(tmp_path)
    owner, name = PLACES[place]

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(getattr(loop.session, owner) if owner else loop.session, name, broken)
    with caplog.at_level(logging.ERROR):
        assert run(loop) == expected
    status = loop.session.status()
    assert status.internal_errors, "it was not even called"
    assert "on purpose" in caplog.text
    assert sum("training goes on run=" in r.getMessage() for r in caplog.records) <= 2
    if place in ("measure", "gate", "settle", "safe_point"):
        assert status.protection in (Protection.BLIND, Protection.OFF)
        assert "armed" not in str(status)
    monkeypatch.undo()
    loop.session.detach()


def test_a_blind_spot_is_logged_once_for_who_never_asks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(4, 1)
    watched = torch.optim.SGD(model.parameters(), lr=0.01)
    session = sentinel_hooks.attach(model=model, optimizer=watched, sidecar=None, run_dir=tmp_path)
    optimizer = watched
    with caplog.at_level("WARNING", logger="sentinel_hooks"):
        for step in range(200):
            if step == 3:  # made anew, and nobody told us
                optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            model(torch.randn(8, 4)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    session.detach()
    told = [r.getMessage() for r in caplog.records if "blind spot" in r.getMessage()]
    assert len(told) == 1
    assert "was the optimizer made anew?" in told[0]


def test_of_a_long_row_of_skips_only_some_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = sentinel_hooks.attach(
        model=model, optimizer=optimizer, sidecar=None, run_dir=tmp_path
    )
    with caplog.at_level("WARNING", logger="sentinel_hooks"):
        for _ in range(18):
            model(torch.randn(8, 4)).mean().backward()
            model.weight.grad.fill_(torch.nan)
            optimizer.step()
            optimizer.zero_grad()
    assert dict(session.status().counters.skipped) == {"nonfinite_grad": 18}
    session.detach()
    told = [r.getMessage() for r in caplog.records if "skip_step" in r.getMessage()]
    assert len(told) == 5  # the 1st, 2nd, 4th, 8th and 16th


def test_a_run_id_that_the_sidecar_takes_not_is_a_blind_spot(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    session = sentinel_hooks.attach(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        sidecar="http://127.0.0.1:9",
        run_id="lr=1e-3",
        run_dir=tmp_path,
    )
    spots = [s for s in session.status().blind_spots if "run id" in s.what]
    session.detach()
    assert [s.way_out for s in spots] == [
        "use 1 to 128 letters, digits and ._:@+- that start with a letter or digit"
    ]


def test_after_detach_the_canary_is_not_blamed_on_the_model(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    for _ in range(3):
        loop.step()
    loop.session.detach()
    assert loop.session.status().canary == "not asked: nothing is watched any more"

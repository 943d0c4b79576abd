"""reads="late": no read on a calm step, and not one bit of difference in what is done.

The device holds a step back by limits sent ahead, and one step later decide() must say the same.
Oracles: a loop written by hand that throws the faulty batch away (as for reads="now"), the same
run attached with reads="now", and, for what is read, a meta device on which every read is counted.

Seen red: with found_inf not set, left in place after the step, or set from the norm alone; with a
step in trouble, or one that makes optimizer state (again, too), not read at once; with running
statistics not put back; with the last outcome not read at detach(); and with the read done at the
safe point.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import sentinel_hooks
from sentinel.core import engine
from sentinel.core.policy import Policy
from sentinel.core.state import State
from sentinel.core.types import Action, Decision, Observation, Source
from sentinel.traces.reader import Reader
from sentinel_hooks import AttachError
from sentinel_hooks.link import EmbeddedLink
from sentinel_hooks.probes.updates import UpdateProbe
from tests.acceptance.oracle import (
    Job,
    JobSpec,
    OptimizerCase,
    Step,
    by_hand,
    gain_for,
    optimizer_cases,
    regression,
    with_gain,
    with_nan,
)
from tests.acceptance.watched import actions, decisions, job_session, policy, skipped, train_job

pytestmark = [pytest.mark.torch]

WARMUP, WINDOW, STEPS = 8, 10, 20
SMALL = policy(
    f"""
    [grad_norm]
    warmup = {WARMUP}
    window = {WINDOW}
    flatness = 4.0
    """
)
CASES = {case.name: case for case in optimizer_cases()}
FUSED = [CASES[f"{name}-fused"] for name in ("SGD", "Adam", "AdamW", "Adagrad")]
fused = pytest.mark.parametrize("case", FUSED, ids=lambda case: case.name)


class Watched:
    """A job under reads="late", and which of its steps were not read at once."""

    def __init__(self, spec: JobSpec, data: Sequence[Step], run_dir: Path, **options: Any) -> None:
        self.job = Job(spec)
        options = {"reads": "late"} | options
        self.session = job_session(self.job, options.pop("rules", SMALL), run_dir, **options)
        self.late: list[int] = []

        def each(t: int) -> None:
            assert not hasattr(self.job.optimizer, "found_inf")
            if self.session._late.sent is not None:
                self.late.append(t)

        self.trail = train_job(self.job, data, each)
        self.session.detach()
        self.held = [t for t, held in enumerate(self.trail.held) if held]


@fused
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("at", [0, 12])
def test_a_step_with_a_nan_never_happened(
    case: OptimizerCase, accumulation: int, at: int, tmp_path: Path
) -> None:
    spec = JobSpec(case, accumulation, seed=11)
    data = regression(spec, STEPS)
    data[at] = with_nan(data[at], accumulation - 1)
    oracle = Job(spec)
    by_hand(oracle, data, never_apply={at})

    run = Watched(spec, data, tmp_path)

    assert (at in run.late) is (at > 0)  # the first steps are read at once
    assert run.held == [at]
    assert run.job.everything() == oracle.everything()
    (step, (executed, rule, reason)), *more = actions(run.session).items()
    assert not more
    assert (step, executed) == (at, Action.SKIP_STEP)
    assert rule in ("nonfinite_grad", "nonfinite_loss")
    assert "nan" in reason
    assert run.session.state.ledger.counters.steps == STEPS


@fused
@pytest.mark.parametrize(("ratio", "is_skipped"), [(9.9, False), (10.1, True), (20.0, True)])
def test_ten_times_the_mean_is_the_line_on_the_device_too(
    case: OptimizerCase, ratio: float, is_skipped: bool, tmp_path: Path
) -> None:
    at, spec = 13, JobSpec(case, seed=12)
    data = regression(spec, STEPS)
    data[at] = with_gain(data[at], gain_for(spec, data, at, ratio, WINDOW))
    oracle = Job(spec)
    by_hand(oracle, data, never_apply={at} if is_skipped else ())

    run = Watched(spec, data, tmp_path)

    assert at in run.late
    assert run.held == ([at] if is_skipped else [])
    assert run.job.everything() == oracle.everything()
    assert skipped(run.session) == ({"grad_norm": 1} if is_skipped else {})
    assert list(actions(run.session)) == ([at] if is_skipped else [])


def test_a_loss_far_above_is_held_back_by_the_device_too(tmp_path: Path) -> None:
    """Its gradient is no outlier: the limit of the loss decides alone."""
    at, spec = 30, JobSpec(CASES["AdamW-fused"], seed=17)
    rules = policy("[spike]\nwindow = 16\nwarmup = 10")
    data = regression(spec, 36)
    # The values of a far worse batch, with an ordinary gradient.
    data[at] = tuple(replace(m, y=m.y * 8, gain=0.1) for m in data[at])
    oracle = Job(spec)
    by_hand(oracle, data, never_apply={at})
    run = Watched(spec, data, tmp_path, rules=rules)
    assert at in run.late
    assert run.held == [at]
    assert skipped(run.session) == {"loss_outlier": 1}
    assert run.job.everything() == oracle.everything()


def test_observing_late_nothing_is_held_and_all_is_told(tmp_path: Path) -> None:
    spec = JobSpec(CASES["SGD-fused"], seed=18)
    data = regression(spec, STEPS)
    data[12] = with_gain(data[12], 40.0)
    plain = Job(spec)
    train_job(plain, data)
    run = Watched(spec, data, tmp_path, mode="observe")
    assert 12 in run.late
    assert run.held == []
    assert run.job.everything() == plain.everything()
    assert dict(run.session.state.ledger.counters.would) == {"skip_step/grad_norm": 1}


@fused
def test_the_last_step_is_heard_of_when_the_run_ends(case: OptimizerCase, tmp_path: Path) -> None:
    spec = JobSpec(case, seed=13)
    data = regression(spec, STEPS)
    data[-1] = with_nan(data[-1], 0)
    run = Watched(spec, data, tmp_path)
    assert run.late[-1] == STEPS - 1
    assert run.held == [STEPS - 1]
    assert list(actions(run.session)) == [STEPS - 1]
    assert len(decisions(run.session)) == STEPS


def test_a_step_in_trouble_is_read_at_once_and_calm_ones_are_not(tmp_path: Path) -> None:
    spec = JobSpec(CASES["AdamW-fused"], seed=14)
    data = regression(spec, 40)
    data[12], data[13] = with_nan(data[12], 0), with_nan(data[13], 0)
    run = Watched(spec, data, tmp_path)
    assert run.held == [12, 13]
    assert 12 in run.late
    assert 13 not in run.late
    assert set(range(22, 40)) <= set(run.late)
    assert "trouble" in run.session.status().reads


@pytest.mark.parametrize("case", FUSED[1:3], ids=lambda case: case.name)
def test_a_step_that_makes_optimizer_state_is_read_at_once(
    case: OptimizerCase, tmp_path: Path
) -> None:
    """Held back by the device, it would make state; and torch's SGD leaves it unwritten."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 1)
    second.requires_grad_(False)
    options = dict(case.options)
    optimizer = case.cls([*first.parameters(), *second.parameters()], **options)
    model = nn.Sequential(first, second)
    with sentinel_hooks.attach(
        model=model, optimizer=optimizer, policy=SMALL, sidecar=None, run_dir=tmp_path, reads="late"
    ) as session:
        for t in range(16):
            second.requires_grad_(t >= 10)
            optimizer.zero_grad()
            x = torch.randn(8, 4)
            (model(x).square().mean() * (math.nan if t == 10 else 1.0)).backward()
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            if t == 10:
                assert all(map(torch.equal, before, model.parameters()))
                assert session._late.sent is None
                assert not any(optimizer.state.get(p) for p in second.parameters())
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *(("SGD-fused", change) for change in ("emptied", "dropped", "none", "momentum")),
        *(("AdamW-fused", change) for change in ("emptied", "dropped")),
    ],
)
def test_optimizer_state_reset_in_place_is_made_by_a_step_that_is_read_at_once(
    name: str, change: str, tmp_path: Path
) -> None:
    """Restarted momentum and a bad batch in the very same step."""
    ends = []
    for reads in ("now", "late"):
        torch.manual_seed(8)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        options: dict[str, Any] = {"lr": 1e-2, "fused": True}
        cls: Any = torch.optim.AdamW
        if name == "SGD-fused":
            options["momentum"], cls = (0.0 if change == "momentum" else 0.9), torch.optim.SGD
        optimizer = cls(model.parameters(), **options)
        with sentinel_hooks.attach(
            model=model,
            optimizer=optimizer,
            policy=SMALL,
            sidecar=None,
            run_dir=tmp_path / reads,
            reads=reads,
        ) as session:
            for t in range(16):
                optimizer.zero_grad()
                model(torch.randn(8, 4)).square().mean().backward()
                if t == 12:
                    if change == "momentum":
                        optimizer.param_groups[0]["momentum"] = 0.9
                    for p in model.parameters() if change != "momentum" else ():
                        if change == "emptied":
                            optimizer.state[p] = {}
                        elif change == "dropped":
                            del optimizer.state[p]
                        else:
                            optimizer.state[p]["momentum_buffer"] = None
                    model[2].weight.grad[0, 0] = math.nan
                before = [p.detach().clone() for p in model.parameters()]
                optimizer.step()
                assert all(map(torch.equal, before, model.parameters())) is (t == 12)
                if reads == "late":
                    # 13 follows a fault.
                    assert (session._late.sent is not None) is (
                        t in (5, 6, 7, 8, 9, 10, 11, 14, 15)
                    ), t
        assert skipped(session) == {"nonfinite_grad": 1}
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *ends))


def test_one_clip_over_decay_groups_a_frozen_layer_and_two_optimizers_is_late(
    tmp_path: Path,
) -> None:
    torch.manual_seed(9)
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model[0].requires_grad_(False)
    body = list(model[1].parameters())
    both = [
        torch.optim.AdamW(
            [
                {"params": [model[0].weight, body[1]], "weight_decay": 0.0},
                {"params": [body[0]], "weight_decay": 0.1},
            ],
            lr=1e-2,
            fused=True,
        ),
        torch.optim.SGD(model[3].parameters(), lr=1e-2, momentum=0.9, fused=True),
    ]
    with sentinel_hooks.attach(
        model=model, optimizer=both, policy=SMALL, sidecar=None, run_dir=tmp_path, reads="late"
    ) as session:
        for t in range(16):
            for optimizer in both:
                optimizer.zero_grad()
            model(torch.randint(6, (8,))).square().mean().backward()
            if t == 12:
                model[3].weight.grad[0, 0] = math.nan
            before = [p.detach().clone() for p in model.parameters()]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            for optimizer in both:
                optimizer.step()
            assert all(map(torch.equal, before, model.parameters())) is (t == 12)
            assert (session._late.sent is not None) is (t >= 5 and t != 13), (
                t,
                session.status().reads,
            )
    assert skipped(session) == {"nonfinite_grad": 1}


# ---- no harm, and the same as reads="now" --------------------------------------------------------


@fused
@pytest.mark.slow
def test_300_steps_without_a_fault_are_bitwise_those_of_an_unattached_run(
    case: OptimizerCase, tmp_path: Path
) -> None:
    spec = JobSpec(case, seed=15)
    data = regression(spec, 300)
    plain = Job(spec)
    train_job(plain, data)
    run = Watched(spec, data, tmp_path, rules=Policy())
    assert run.job.everything() == plain.everything()
    assert not actions(run.session)
    assert len(run.late) > 270, run.session.status().reads


def told(session: Any) -> list[tuple[Any, ...]]:
    return [
        (o.step, d.action, d.rule, d.lr_factor, d.take_snapshot, out.executed, out.applied)
        for o, d, out in decisions(session)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_everything_is_as_with_reads_now_rollbacks_too(seed: int, tmp_path: Path) -> None:
    """Garbage, damage that needs a rollback, NaN: the same actions at the same steps."""
    rules = policy(
        """
        [spike]
        window = 16
        warmup = 10
        [grad_norm]
        warmup = 10
        window = 16
        flatness = 4.0
        [snapshots]
        ram_every = 10
        confirm = 5
        """
    )
    spec = JobSpec(FUSED[seed % len(FUSED)], seed=20 + seed)
    data = regression(spec, 120)
    data[30] = with_nan(data[30], 0)
    data[47] = with_gain(data[47], 60.0)

    def train(reads: str) -> tuple[Job, Any, Any]:
        job = Job(spec)
        session = job_session(job, rules, tmp_path / reads, reads=reads)

        def damage(t: int) -> None:
            if t == 69:
                with torch.no_grad():
                    for p in job.model.parameters():
                        p.mul_(40.0)

        train_job(job, data, damage)
        session.detach()
        return job, session, told(session)

    now, session, expected = train("now")
    late, other, found = train("late")
    assert any(action is Action.ROLLBACK for _, action, *_ in expected), expected
    assert found == expected
    assert late.everything() == now.everything()
    assert session.state.ledger.counters == other.state.ledger.counters
    assert session.state.ledger.snapshots == other.state.ledger.snapshots
    assert int(other.status().reads.split()[2]) > 70


class Block(nn.Module):
    """Attention and a residual stream: something for every probe."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        return x + self.out(self.attention(n, n, n, need_weights=False)[0])


@pytest.mark.slow
def test_what_is_observed_is_the_same_every_column_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed: list[Observation] = []  # the trace keeps columns of some steps only

    def decide(link: Any, observation: Observation, own: Decision, state: State) -> Any:
        observed.append(observation)
        return own, Source.TRAINER

    monkeypatch.setattr(EmbeddedLink, "decide", decide)

    def train(reads: str) -> list[Observation]:
        torch.manual_seed(6)
        blocks = nn.Sequential(Block(), Block())
        model = nn.Sequential(nn.Linear(4, 8), blocks, nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        with sentinel_hooks.attach(
            model=model,
            optimizer=optimizer,
            policy=SMALL,
            sidecar=None,
            run_dir=tmp_path / reads,
            reads=reads,
        ) as session:
            for t in range(36):
                optimizer.zero_grad()
                x = torch.randn(4, 6, 4)
                if t == 20:  # its update is sampled, and must have no ratio
                    x[0, 0, 0] = math.nan
                model(x).square().mean().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
        assert not session.status().internal_errors
        found, observed[:] = observed[:], []
        return found

    now, late = train("now"), train("late")
    assert "layer_update_ratio" in now[11].columns
    assert "layer_attention_max_logit" in now[11].columns
    assert "layer_update_ratio" not in now[21].columns
    for seen, heard in zip(now, late, strict=True):
        assert heard.loss == seen.loss or math.isnan(heard.loss)
        assert heard.grad_norm == pytest.approx(seen.grad_norm, rel=1e-12, nan_ok=True)
        assert heard.shape == seen.shape
        assert heard.columns.keys() == seen.columns.keys(), heard.step
        for name, column in seen.columns.items():
            if name == "layer_attention_max_logit" and 20 < seen.step < 24:
                continue  # after the NaN all rows are looked at for a while: a step later
            assert np.array_equal(column, heard.columns[name], equal_nan=True), (heard.step, name)
        timed = {"step_seconds", "tokens_per_second"}
        assert {k: v for k, v in heard.scalars.items() if k not in timed} == {
            k: v for k, v in seen.scalars.items() if k not in timed
        }


@fused
def test_a_replay_of_the_trace_decides_the_same(case: OptimizerCase, tmp_path: Path) -> None:
    spec = JobSpec(case, seed=16)
    data = regression(spec, 30)
    data[12] = with_gain(data[12], 40.0)
    data[20] = with_nan(data[20], 0)
    run = Watched(spec, data, tmp_path)
    state, steps = engine.initial(), 0
    for record in Reader(run.session.directory):
        if hasattr(record, "decision"):
            decision = engine.decide(state, record.observation, SMALL)
            assert decision.action is record.decision.action is record.outcome.executed
            state = engine.apply(state, record.observation, decision, record.outcome, SMALL)
            steps += 1
        elif hasattr(record, "event"):
            state = engine.note(state, record.event, SMALL)
    assert steps == 30
    assert state.ledger.counters == run.session.state.ledger.counters


def test_asking_for_the_state_at_any_moment_changes_nothing(tmp_path: Path) -> None:
    spec = JobSpec(CASES["AdamW-fused"], seed=19)
    data = regression(spec, 30)
    data[12], data[20] = with_gain(data[12], 40.0), with_nan(data[20], 0)
    runs = []
    for ask in (False, True):
        job = Job(spec)
        session = job_session(job, SMALL, tmp_path / str(ask), reads="late")
        for t, step in enumerate(data):
            job.optimizer.zero_grad()
            if ask and t % 3 == 0:
                assert session.state.step == t
            for micro in step:
                job.backward(micro)
            if ask and t % 3 == 1:
                assert session.status().step == t
            job.optimizer.step()
            if ask and t % 3 == 2:
                session.saved(tmp_path / "none")
        session.detach()
        assert not session.status().internal_errors
        runs.append((told(session), job.everything()))
    assert runs[0] == runs[1]


def test_a_step_that_raised_is_not_counted_as_applied(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with sentinel_hooks.attach(
        model=model, optimizer=optimizer, policy=SMALL, sidecar=None, run_dir=tmp_path, reads="late"
    ) as session:
        for t in range(12):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            if t != 9:
                optimizer.step()
                continue
            group = optimizer.param_groups[0]
            betas, group["betas"] = group["betas"], "torn"
            with pytest.raises((TypeError, ValueError)):
                optimizer.step()
            group["betas"] = betas
        optimizer.zero_grad()
        assert not hasattr(optimizer, "found_inf")
    applied = {o.step: out.applied for o, _, out in decisions(session)}
    assert applied == {t: t != 9 for t in range(12)}


def test_batch_norms_statistics_are_put_back_by_the_device(tmp_path: Path) -> None:
    def train(fault: bool, reads: str | None) -> nn.Module:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        context: Any = contextlib.nullcontext()
        if reads is not None:
            context = sentinel_hooks.attach(
                model=model,
                optimizer=optimizer,
                policy=SMALL,
                sidecar=None,
                run_dir=tmp_path / reads,
                reads=reads,
            )
        with context:
            for t in range(16):
                x = torch.randn(16, 4)
                if t == 12:
                    if not fault:
                        continue
                    x[0, 0] = math.nan
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        return model

    expected = train(False, None).state_dict()
    found = train(True, "late").state_dict()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_two_optimizers_follow_one_verdict(tmp_path: Path) -> None:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    both = [
        torch.optim.SGD(model[0].parameters(), lr=1e-2, momentum=0.9, fused=True),
        torch.optim.AdamW(model[2].parameters(), lr=1e-2, fused=True),
    ]
    with sentinel_hooks.attach(
        model=model, optimizer=both, policy=SMALL, sidecar=None, run_dir=tmp_path, reads="late"
    ) as session:
        for t in range(16):
            for optimizer in both:
                optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            if t == 12:
                model[2].weight.grad[0, 0] = math.nan
            before = [p.detach().clone() for p in model.parameters()]
            for optimizer in both:
                optimizer.step()
            same = all(map(torch.equal, before, model.parameters()))
            assert same is (t == 12)
            assert (session._late.sent is not None) is (t >= 5 and t != 13) or t > 13
    assert skipped(session) == {"nonfinite_grad": 1}


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"optimizer": "foreach"}, "fused=True"),
        ({"optimizer": "rmsprop"}, "RMSprop"),
        ({"grad_scaler": True}, "GradScaler"),
        ({"decide": "sidecar"}, "decide='trainer'"),
        ({"norm_fn": lambda: 1.0}, "norm_fn"),
        ({"reads": "sometimes"}, "'now' or 'late'"),
    ],
)
def test_what_cannot_be_read_late_is_refused_with_the_way_out(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    model = nn.Linear(3, 1)
    kinds = {
        "foreach": lambda: torch.optim.AdamW(model.parameters(), foreach=True),
        "rmsprop": lambda: torch.optim.RMSprop(model.parameters()),
    }
    optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True)
    if "optimizer" in change:
        optimizer = kinds[change.pop("optimizer")]()
    if change.pop("grad_scaler", False):
        change["grad_scaler"] = torch.amp.GradScaler("cpu")
    options = {"reads": "late", "sidecar": None, "run_dir": tmp_path} | change
    with pytest.raises(AttachError, match=words):
        sentinel_hooks.attach(model=model, optimizer=optimizer, **options)
    sentinel_hooks.attach(
        model=model, optimizer=torch.optim.SGD(model.parameters()), sidecar=None, run_dir=tmp_path
    ).detach()


# ---- what is read --------------------------------------------------------------------------------


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A meta device that can be read: each read is counted, and brings ones."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.what: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        there = any(isinstance(a, Tensor) and a.device.type == "meta" for a in args)
        waits = ("_local_scalar_dense", "aten.item", "aten.nonzero", "aten.equal", "is_nonzero")
        if there and any(word in name for word in waits):
            self._saw(name)
            return 1.0
        to_host = str(kwargs.get("device", "")) == "cpu"
        if there and "_to_copy" in name and to_host:
            self._saw(name)
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if "copy_" in name and isinstance(args[0], Tensor) and args[0].device.type == "cpu":
            if args[1].device.type == "meta":
                self._saw(name)
                return args[0].fill_(1.0)
        return func(*args, **kwargs)

    def _saw(self, name: str) -> None:
        self.count += 1
        self.what.append(name)


def count_reads(
    reads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between: Callable[[], None]
) -> list[list[str]]:
    """The reads of each step of a small model; the loop itself reads nothing.

    Args:
        between: called after each forward, before its backward.
    """
    monkeypatch.setattr("sentinel_hooks.late.DEVICES", ("meta",))
    monkeypatch.setattr(
        sys.modules["torch.optim.optimizer"],  # the package hides it behind a class's name
        "_get_fused_kernels_supported_devices",
        lambda: ["meta"],
    )
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).to("meta")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    session = sentinel_hooks.attach(
        model=model,
        optimizer=optimizer,
        policy=SMALL,
        sidecar=None,
        run_dir=tmp_path / reads,
        reads=reads,
        snapshots=sentinel_hooks.Snapshots(ram=False, disk=False),
    )
    counts = []
    for _ in range(40):
        with Reads() as counter:
            optimizer.zero_grad()
            for _ in range(2):
                loss = model(torch.empty(8, 4, device="meta")).square().mean()
                between()
                (loss / 2).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        counts.append(counter.what)
    assert not session.status().internal_errors, session.status()
    return counts


def test_a_step_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = count_reads("now", tmp_path, monkeypatch, lambda: None)
    assert {len(what) for what in counts[8:]} == {1}, counts


def test_with_late_reads_nothing_is_read_but_what_was_sent_a_step_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    by_forward: list[int] = []
    copies: list[int] = []
    sampled = UpdateProbe.pending

    def pending(probe: UpdateProbe) -> list[Tensor]:
        probes.append(probe)
        return sampled(probe)

    probes: list[UpdateProbe] = []
    monkeypatch.setattr(UpdateProbe, "pending", pending)

    def between() -> None:
        by_forward.append(len(opened))
        copies.extend(len(probe._before) for probe in probes[-1:])

    def arrives(parcel: Any) -> Any:
        """Stands for the wait for a copy that was queued a whole step ago."""
        opened.append(parcel)
        return np.zeros(parcel._values.shape)

    monkeypatch.setattr("sentinel_hooks.late.Parcel.open", arrives)
    counts = count_reads("late", tmp_path, monkeypatch, between)
    assert {len(what) for what in counts[8:]} == {0}, counts
    # Not before the gate: at the forward the device may still be busy with the step before.
    assert by_forward[-2:] == [33, 33]
    assert set(copies) == {0}  # no second copy of the weights lives through a forward
    assert len(opened) == 35  # the first five at once, the last by status()


def test_a_step_without_gradients_is_read_at_once_and_says_so(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with sentinel_hooks.attach(
        model=model, optimizer=optimizer, sidecar=None, run_dir=tmp_path, reads="late"
    ) as session:
        for t in range(40):
            optimizer.zero_grad()
            if t != 30:
                model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        reads = session.status().reads
    assert "there are no gradients 1" in reads, reads
    assert "several devices" not in reads

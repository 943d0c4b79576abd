"""The user's code raises, interrupts, detaches and exits at every awkward moment; training goes on.

After each the loop simply continues, and ends bit for bit where an unwatched loop ends that was
treated the same.
"""

from __future__ import annotations

import copy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sentinel_hooks
from sentinel.core.policy import Policy
from sentinel.core.types import Protection
from sentinel.traces.reader import Reader
from sentinel_hooks import Session
from tests.hooks.worlds import digest

pytestmark = pytest.mark.torch

QUICK = Policy.parse(
    "[spike]\nwindow = 24\nwarmup = 12\n[grad_norm]\nwindow = 24\nwarmup = 12\n"
    "[snapshots]\nram_every = 8\nconfirm = 4\n",
    "quick",
)
# For losses that are spoiled and weights that are well: a canary would blame the data.
BLUNT = Policy.from_dict({**QUICK.to_dict(), "canary": {"mode": "off"}})


class Model(nn.Module):
    """Returns its loss; raises where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.raising: BaseException | None = None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.body(x)
        if self.raising is not None:
            error, self.raising = self.raising, None
            raise error
        return ((out - y) ** 2).mean() + 1.0


class Loop:
    """A plain loop, watched if a folder is given."""

    def __init__(self, folder: Path | None = None, **options: Any) -> None:
        torch.manual_seed(11)
        self.g = torch.Generator().manual_seed(11)
        self.model = Model()
        make = options.pop("make", lambda ps: torch.optim.AdamW(ps, lr=3e-3))
        self.optimizer = make(self.model.parameters())
        self.session: Session | None = None
        if folder is not None:
            self.attach(folder, **options)

    def attach(self, folder: Path, **options: Any) -> Session:
        self.session = sentinel_hooks.attach(
            model=self.model,
            optimizer=self.optimizer,
            policy=options.pop("policy", QUICK),
            sidecar=None,
            run_dir=folder,
            **options,
        )
        return self.session

    def batch(self) -> tuple[Tensor, Tensor]:
        x = torch.randn(16, 6, generator=self.g)
        return x, x.sum(1, keepdim=True)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(*self.batch()).backward()
        self.optimizer.step()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def ends(self) -> str:
        return digest(self.model.state_dict(), self.optimizer.state_dict())

    @property
    def watched(self) -> Session:
        assert self.session is not None
        return self.session


class Oops(Exception):
    """The user's own."""


# ---------------------------------------------------------------- exceptions of the user


def in_forward(loop: Loop, error: BaseException) -> None:
    loop.optimizer.zero_grad()
    loop.model.raising = error
    loop.model(*loop.batch()).backward()


def in_backward(loop: Loop, error: BaseException) -> None:
    loop.optimizer.zero_grad()
    loss = loop.model(*loop.batch())

    def hook(grad: Tensor) -> None:
        raise error

    loss.register_hook(hook)
    loss.backward()


def after_backward(loop: Loop, error: BaseException) -> None:
    loop.optimizer.zero_grad()
    loop.model(*loop.batch()).backward()
    raise error


def in_step(loop: Loop, error: BaseException) -> None:
    loop.optimizer.zero_grad()
    loop.model(*loop.batch()).backward()

    def hook(*_: Any) -> None:
        raise error

    handle = loop.optimizer.register_step_pre_hook(hook)  # after ours
    try:
        loop.optimizer.step()
    finally:
        handle.remove()


def in_closure(loop: Loop, error: BaseException) -> None:
    def closure() -> Tensor:
        loop.optimizer.zero_grad()
        loss: Tensor = loop.model(*loop.batch())
        loss.backward()
        raise error

    loop.optimizer.step(closure)


def between_step_and_forward(loop: Loop, error: BaseException) -> None:
    loop.step()
    raise error


PLACES: dict[str, Callable[[Loop, BaseException], None]] = {
    f.__name__: f
    for f in (
        in_forward,
        in_backward,
        after_backward,
        in_step,
        in_closure,
        between_step_and_forward,
    )
}


@pytest.mark.parametrize("error", [Oops("mine"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("place", list(PLACES))
def test_an_exception_of_the_user_passes_and_the_loop_goes_on(
    place: str, error: BaseException, tmp_path: Path
) -> None:
    watched, plain = Loop(tmp_path), Loop()
    for loop in (watched, plain):
        for _ in range(4):
            loop.run(10)
            with pytest.raises(type(error)) as caught:
                PLACES[place](loop, error)
            assert caught.value is error
        loop.run(10)
    assert watched.ends() == plain.ends()
    status = watched.watched.status()
    assert status.internal_errors == {}
    assert status.protection is Protection.ARMED
    assert status.counters.skipped == ()
    assert len(status.healthy) > 1


def test_a_batch_whose_forward_raised_is_no_canary(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    session = loop.watched
    for _ in range(12):
        loop.optimizer.zero_grad()
        loop.model.raising = Oops()
        with pytest.raises(Oops):
            loop.model(torch.full((16, 6), 1e6), torch.zeros(16, 1))
        loop.step()
    canary = session._canary
    assert canary is not None
    assert len(canary.steps) > 1
    assert all(float(r.args[0].abs().max()) < 100 for r in canary._kept)
    for recording in canary._kept:
        with torch.no_grad():  # its loss is its own
            now = float(loop.model(*recording.args))
        assert recording.loss_value == pytest.approx(now, rel=0.5)


def test_a_checkpoint_after_an_interrupt_in_step_holds_the_uncut_rate(tmp_path: Path) -> None:
    loop = Loop(tmp_path, policy=BLUNT, snapshots=sentinel_hooks.Snapshots(disk=False))
    loop.run(30)
    for _ in range(30):
        if loop.watched.state.ledger.lr.factor < 1.0:
            break
        loop.optimizer.zero_grad()
        (loop.model(*loop.batch()) * float("nan")).backward()
        loop.optimizer.step()
    assert loop.watched.state.ledger.lr.factor == 0.5
    loop.run(2)

    seen: list[float] = []

    def interrupt(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        seen.append(optimizer.param_groups[0]["lr"])
        raise KeyboardInterrupt

    handle = loop.optimizer.register_step_pre_hook(interrupt)
    loop.optimizer.zero_grad()
    loop.model(*loop.batch()).backward()
    with pytest.raises(KeyboardInterrupt):
        loop.optimizer.step()
    handle.remove()
    assert seen == [1.5e-3]
    assert loop.optimizer.state_dict()["param_groups"][0]["lr"] == 3e-3


def test_an_interrupt_in_the_middle_of_a_restore_waits_until_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(tmp_path, policy=BLUNT, snapshots=sentinel_hooks.Snapshots(disk=False))
    session = loop.watched
    loop.run(30)
    copy_back, calls = session._store.restore, []

    def restore(target: int) -> Any:
        calls.append(target)
        if len(calls) == 1:
            with torch.no_grad():  # the first of several tensors is in place
                loop.model.body[0].weight.zero_()
            raise KeyboardInterrupt
        stats = copy_back(target)
        weights.append(digest(loop.model.state_dict()))
        return stats

    weights: list[str] = []
    monkeypatch.setattr(session._store, "restore", restore)

    def until_it_rolls_back() -> None:
        for _ in range(30):
            loop.optimizer.zero_grad()
            (loop.model(*loop.batch()) * float("nan")).backward()
            loop.optimizer.step()

    with pytest.raises(KeyboardInterrupt):
        until_it_rolls_back()
    assert len(calls) == 2
    assert [digest(loop.model.state_dict())] == weights
    assert session.state.ledger.attempt == 1
    loop.run(5)
    assert session.status().internal_errors == {}


def test_the_users_own_functions_that_raise_blind_nothing(tmp_path: Path) -> None:
    def broken() -> str:
        raise Oops

    loop = Loop(tmp_path, batch_id=broken)
    loop.run(30)
    status = loop.watched.status()
    assert status.internal_errors == {"batch_id": 30}
    assert status.protection is Protection.ARMED
    loop.watched.detach()
    other = Loop(tmp_path, norm_fn=lambda: float("x"))
    other.run(30)
    status = other.watched.status()
    assert status.internal_errors == {"norm_fn": 30}
    assert status.protection is not Protection.OFF
    other.watched.detach()
    steps = list(Reader(other.watched.directory).steps())
    assert [s.observation.grad_norm for s in steps] == [None] * 30
    assert None not in [s.observation.loss for s in steps]


# ---------------------------------------------------------------- attach and detach at odd moments


def test_attached_in_the_middle_of_an_accumulation_the_half_loss_is_unknown(
    tmp_path: Path,
) -> None:
    loop, plain = Loop(), Loop()
    for one in (loop, plain):
        one.run(3)
        one.optimizer.zero_grad()
        (one.model(*one.batch()) / 2).backward()
        if one is loop:
            one.attach(tmp_path)
        (one.model(*one.batch()) / 2).backward()
        one.optimizer.step()
        one.run(4)
    assert loop.ends() == plain.ends()
    loop.watched.detach()
    losses = [s.observation.loss for s in Reader(loop.watched.directory).steps()]
    assert losses[0] is None
    assert None not in losses[1:]
    assert len(losses) == 5


@pytest.mark.parametrize("how", ["optimizer", "model"])
def test_gradients_that_the_loop_drops_first_cost_no_loss(how: str, tmp_path: Path) -> None:
    loop = Loop()
    loop.step()  # its gradients are still there
    loop.attach(tmp_path)
    getattr(loop, how).zero_grad()
    loop.model(*loop.batch()).backward()
    loop.optimizer.step()
    loop.watched.detach()
    assert [s.observation.loss for s in Reader(loop.watched.directory).steps()] != [None]


@pytest.mark.slow
def test_attached_after_the_model_was_compiled_and_ran(tmp_path: Path) -> None:
    loop = Loop()
    loop.run(1)
    compiled = torch.compile(loop.model, backend="eager")
    inner, loop.model = loop.model, compiled
    loop.run(2)
    session = loop.attach(tmp_path)
    loop.run(20)
    status = session.status()
    assert (status.step, status.internal_errors) == (20, {})
    assert len(status.healthy) > 1
    spots = [str(spot) for spot in status.blind_spots if "forward" in str(spot)]
    assert len(spots) == 1, "the model's own forward is seen, that of the layers inside is not"
    assert spots[0].startswith("activations of ")
    session.detach()
    assert inner._forward_pre_hooks == {}


@pytest.mark.parametrize("first", [0, 1], ids=["nested", "out of order"])
def test_two_sessions_end_in_any_order(first: int, tmp_path: Path) -> None:
    before = torch.autograd.backward
    a, b, plain = Loop(tmp_path), Loop(tmp_path), Loop()
    for loop in (a, b):
        loop.run(5)
    loops = [b, a] if first == 0 else [a, b]
    loops[0].watched.detach()
    for loop in (a, b):
        loop.run(5)
    assert [x.watched.state.step for x in loops] == [5, 10]
    assert torch.autograd.backward is not before
    loops[1].watched.detach()
    assert torch.autograd.backward is before
    plain.run(10)
    assert a.ends() == b.ends() == plain.ends()


def test_detached_twice_and_used_afterwards(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    session = loop.watched
    loop.run(3)
    session.detach()
    session.detach()
    with session:
        loop.run(2)
    assert session.state.step == 3
    assert session.detached
    status = session.status()
    assert (status.protection, status.why, status.step) == (Protection.OFF, "detached", 3)
    assert "off" in str(status)
    again = loop.attach(tmp_path)
    loop.run(2)
    assert (again.state.step, session.state.step) == (2, 3)


def test_an_optimizer_that_was_replaced_unseen_leaves_no_armed_look(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.run(30)
    assert loop.watched.status().protection is Protection.ARMED
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.01)
    loop.run(21)
    status = loop.watched.status()
    assert (status.step, status.protection) == (30, Protection.BLIND)
    assert "21 training forwards since a watched optimizer stepped" in str(status)
    assert "attach() the one that is stepped" in str(status)


@pytest.mark.parametrize("every", [1, 4])
def test_an_accumulation_or_an_evaluation_is_no_replaced_optimizer(
    every: int, tmp_path: Path
) -> None:
    loop = Loop(tmp_path)
    for _ in range(30):
        loop.optimizer.zero_grad()
        for _ in range(every):
            (loop.model(*loop.batch()) / every).backward()
        loop.optimizer.step()
    loop.model.eval()
    for _ in range(100):
        loop.model(*loop.batch())
    loop.model.train()
    with torch.no_grad():
        for _ in range(100):
            loop.model(*loop.batch())
    assert loop.watched.status().protection is Protection.ARMED


@pytest.mark.parametrize("place", ["forward", "closure", "step"])
def test_detach_from_inside_a_step_gives_everything_back(place: str, tmp_path: Path) -> None:
    watched, plain = Loop(tmp_path), Loop()
    for loop in (watched, plain):
        loop.run(12)

        def leave(*_: Any, loop: Loop = loop) -> None:
            if loop.session is not None:
                loop.session.detach()

        if place == "forward":
            handle: Any = loop.model.body[1].register_forward_hook(leave)
            loop.step()
        elif place == "step":
            handle = loop.optimizer.register_step_pre_hook(leave)
            loop.step()
        else:

            def closure(loop: Loop = loop, leave: Callable[..., None] = leave) -> Tensor:
                loop.optimizer.zero_grad()
                loss: Tensor = loop.model(*loop.batch())
                loss.backward()
                leave()
                return loss

            handle = None
            loop.optimizer.step(closure)
        if handle is not None:
            handle.remove()
        loop.run(3)
    assert watched.ends() == plain.ends()
    assert watched.watched.status().internal_errors == {}
    assert vars(watched.optimizer).keys() == vars(plain.optimizer).keys()


def test_detached_by_the_closure_of_a_bad_step_the_gradients_stay(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.run(12)

    def closure() -> Tensor:
        loop.optimizer.zero_grad()
        loss: Tensor = loop.model(*loop.batch())
        loss.backward()
        loop.model.body[0].weight.grad.fill_(float("nan"))
        loop.watched.detach()
        return loss

    loop.optimizer.step(closure)
    assert loop.model.body[0].weight.grad is not None


# ---------------------------------------------------------------- the interpreter exits

SCRIPT = """
import os, signal, sys, torch
from torch import nn
import sentinel
torch.set_num_threads(1)
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
session = sentinel.attach(model=model, optimizer=optimizer, sidecar=None, run_dir=sys.argv[1],
                          run_id="r1", policy=sys.argv[2])
for step in range(20):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    if step == 17:
        {last}
    optimizer.step()
    model(torch.ones(2, 4))          # the safe point: snapshots start here
print("done")
"""
ENDS = {
    "falls off the end": ("pass", {0}, 20),
    "sys.exit": ("sys.exit(3)", {3}, 17),
    "raises": ("raise ValueError('mine')", {1}, 17),
    # A shell that puts a command into the background has it ignore interrupts. How the
    # interpreter ends on one depends on what it inherited: by the signal or not.
    "interrupted": (
        "signal.signal(signal.SIGINT, signal.default_int_handler); signal.raise_signal(2)",
        {-signal.SIGINT, 130, 1},
        17,
    ),
    "detaches": ("session.detach()", {0}, 17),
}


@pytest.mark.e2e
@pytest.mark.parametrize("how", list(ENDS))
def test_an_exit_with_everything_open_closes_the_trace_and_says_nothing(
    how: str, tmp_path: Path
) -> None:
    last, codes, steps = ENDS[how]
    policy = tmp_path / "p.toml"
    policy.write_text("[snapshots]\nram_every = 2\ndisk_at = [2, 4]\ndisk_every = 2\n")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(last=last), str(tmp_path / "runs"), str(policy)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode in codes, done.stderr
    assert "sentinel" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert (done.stderr == "") is (how not in ("raises", "interrupted"))
    reader = Reader(tmp_path / "runs" / "r1")
    assert [s.step for s in reader.steps()] == list(range(steps))
    assert reader.damage == ()


def test_a_copy_of_the_loop_is_its_own(tmp_path: Path) -> None:
    """What a hyperparameter sweep does: deep-copy the whole trainer and train the copy."""
    loop = Loop(tmp_path)
    loop.run(5)
    loop.g, kept = None, loop.g  # type: ignore[assignment]
    other = copy.deepcopy(loop)
    loop.g = kept
    other.g = torch.Generator().manual_seed(1)
    before = loop.ends()
    other.run(5)
    assert loop.ends() == before
    assert loop.watched.state.step == 5
    assert other.session is loop.session

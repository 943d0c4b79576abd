"""Nothing of ours gets into the user's world: copies, pickles, state dicts, children, forks."""

from __future__ import annotations

import copy
import functools
import gc
import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import sentinel_hooks
from sentinel.core.types import Protection
from sentinel.traces.reader import Reader
from sentinel_hooks import Session

pytestmark = pytest.mark.torch

# What a process that knows nothing of us does with what it is given.
STRANGER = """
import pickle, sys
sys.modules["sentinel"] = sys.modules["sentinel_hooks"] = None      # an import would raise
import torch
model, optimizer, scheduler, scaler = pickle.load(sys.stdin.buffer)
for _ in range(2):
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(2, 3)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
print(float(model[0].weight.detach().sum()))
"""


class Pair:
    """The same loop twice, one of them watched."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def attach(self, folder: Path, **options: Any) -> Session:
        return sentinel_hooks.attach(
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
            grad_scaler=self.scaler,
            sidecar=None,
            run_dir=folder,
            **options,
        )

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(torch.ones(2, 3)).sum()).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()

    @property
    def all(self) -> tuple[Any, ...]:
        return self.model, self.optimizer, self.scheduler, self.scaler


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Pair, Pair, Session]]:
    watched, plain = Pair(), Pair()
    with watched.attach(tmp_path) as session:
        for _ in range(3):
            watched.step()
            plain.step()
        yield watched, plain, session


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_state_dicts_have_the_same_keys_and_bytes_as_without_us(
    pair: tuple[Pair, Pair, Session],
) -> None:
    watched, plain, _ = pair
    for mine, theirs in zip(watched.all, plain.all, strict=True):
        a, b = mine.state_dict(), theirs.state_dict()
        assert list(a) == list(b)
        assert saved(a) == saved(b)
        assert b"sentinel" not in saved(a)


def test_whole_objects_saved_while_watched_are_loaded_by_a_process_without_us(
    pair: tuple[Pair, Pair, Session],
) -> None:
    watched, _, session = pair
    step = session.state.step
    pickled = pickle.dumps(watched.all)
    for blob in (pickled, saved(watched.model), *map(pickle.dumps, watched.all)):
        assert b"sentinel_hooks" not in blob
    child = subprocess.run(
        [sys.executable, "-c", STRANGER], input=pickled, capture_output=True, check=False
    )
    assert child.returncode == 0, child.stderr.decode()
    for _ in range(2):
        watched.optimizer.zero_grad()
        watched.scaler.scale(watched.model(torch.ones(2, 3)).sum()).backward()
        watched.scaler.step(watched.optimizer)
        watched.scaler.update()
        watched.scheduler.step()
    assert float(child.stdout) == float(watched.model[0].weight.detach().sum())
    assert session.state.step == step + 2


def test_deep_copies_train_on_their_own_unseen(pair: tuple[Pair, Pair, Session]) -> None:
    watched, _, session = pair
    model, optimizer, _, scaler = copied = copy.deepcopy(watched.all)
    assert optimizer.param_groups[0]["params"][0] is model[0].weight  # one copy, still a pair
    step, before = session.state.step, saved(watched.model.state_dict())
    scale = watched.scaler.get_scale()
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 3)).sum() * 1e38).backward()  # overflows
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() < scale == watched.scaler.get_scale()
    assert session.state.step == step
    assert saved(watched.model.state_dict()) == before
    for thing in (*copied, *model.modules()):
        for name, value in vars(thing).items():
            assert "sentinel_hooks" not in repr(value), (type(thing), name)
    assert session.status().internal_errors == {}


def test_what_holds_the_session_is_copied_and_pickled_without_it(
    pair: tuple[Pair, Pair, Session],
) -> None:
    watched, _, session = pair
    holder = {"model": watched.model, "session": session}
    assert copy.deepcopy(holder)["session"] is session
    assert copy.copy(session) is session
    assert pickle.loads(pickle.dumps(holder))["session"] is None


def test_torchs_own_functions_are_pickled_by_name_while_we_stand_in_them(
    pair: tuple[Pair, Pair, Session],
) -> None:
    clip = torch.nn.utils
    for function in (
        torch.autograd.backward,
        clip.clip_grad_norm_,
        clip.clip_grad_value_,
        clip.get_total_norm,
        clip.clip_grads_with_norm_,
        functools.partial(clip.clip_grad_value_, clip_value=1.0),
    ):
        assert b"sentinel" not in pickle.dumps(function)
    assert torch.autograd.backward.__doc__.startswith("Compute the sum of gradients")


def test_a_checkpoint_taken_while_watched_resumes_unwatched(
    pair: tuple[Pair, Pair, Session],
) -> None:
    watched, _, _ = pair
    resumed = Pair()
    for mine, theirs in zip(watched.all, resumed.all, strict=True):
        buffer = io.BytesIO(saved(mine.state_dict()))
        theirs.load_state_dict(torch.load(buffer, weights_only=True))
    watched.step()
    resumed.step()
    assert saved(watched.model.state_dict()) == saved(resumed.model.state_dict())


def test_tracing_sees_no_hook_of_ours(pair: tuple[Pair, Pair, Session]) -> None:
    watched, _, session = pair
    exported = torch.export.export(watched.model, (torch.ones(2, 3),))
    assert [n.op for n in exported.graph.nodes].count("call_function") == 2
    assert session.status().internal_errors == {}


def test_detach_leaves_the_objects_as_they_were(tmp_path: Path) -> None:
    watched, plain = Pair(), Pair()

    def shape(pair: Pair) -> list[Any]:
        return [
            {k: (len(v) if isinstance(v, dict | list) else type(v)) for k, v in vars(thing).items()}
            for thing in (*pair.all, *pair.model.modules())
        ]

    with watched.attach(tmp_path):
        watched.step()
    plain.step()
    assert shape(watched) == shape(plain)
    # Not by the word: whoever cloned the project has it in every path.
    assert torch.autograd.backward.__code__.co_filename == torch.autograd.__file__


def test_runs_that_nobody_detached_die_with_their_models(tmp_path: Path) -> None:
    """A sweep in a notebook: each trial attaches, and forgets about it."""
    backward = torch.autograd.backward
    models, folders = [], []
    for trial in range(3):
        pair = Pair()
        session = pair.attach(tmp_path, run_id=f"trial-{trial}")
        for _ in range(3):
            pair.step()
        models.append(weakref.ref(pair.model))
        folders.append(session.directory)
    del pair, session
    gc.collect()
    assert [model() for model in models] == [None] * 3
    assert torch.autograd.backward is backward
    for folder in folders:  # ... and their traces are complete
        reader = Reader(folder)
        assert [s.step for s in reader.steps()] == [0, 1, 2]
        assert reader.damage == ()


def test_a_session_that_the_user_dropped_watches_as_long_as_its_model_lives(
    tmp_path: Path,
) -> None:
    pair = Pair()
    pair.attach(tmp_path, run_id="kept")
    gc.collect()
    for _ in range(3):
        pair.step()
    del pair
    gc.collect()
    assert [s.step for s in Reader(tmp_path / "kept").steps()] == [0, 1, 2]


def test_status_may_be_asked_from_another_thread(tmp_path: Path) -> None:
    pair = Pair()
    session = pair.attach(tmp_path)
    errors: list[str] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            try:
                str(session.status())
            except Exception as error:
                errors.append(repr(error))

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(150):
        pair.step()
    done.set()
    thread.join()
    assert errors == []
    session.detach()
    assert [s.step for s in Reader(session.directory).steps()] == list(range(150))


# ---------------------------------------------------------------- children and forks


def test_a_subprocess_inherits_no_variable_and_no_open_file(
    pair: tuple[Pair, Pair, Session], tmp_path: Path
) -> None:
    code = (
        "import os; print([os.readlink(f'/proc/self/fd/{n}') for n in range(3, 50)"
        " if os.path.exists(f'/proc/self/fd/{n}')], 'SENTINEL_RUN_ID' in os.environ)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[] False"


class Numbers(Dataset[Tensor]):
    """Rows made in a worker, which carries the model and the session along."""

    def __init__(self, model: nn.Module, session: Session) -> None:
        self.model, self.session = model, session

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        # A forward in training mode with gradients: in the watched process this is a safe point.
        y = self.model(torch.full((1, 3), float(index)))
        y.sum().backward()
        off = self.session.status().protection is Protection.OFF
        return torch.tensor([float(index), float(off), float(os.getpid())])


def trace_bytes(session: Session) -> dict[str, int]:
    return {str(p): p.stat().st_size for p in sorted(session.directory.rglob("*")) if p.is_file()}


@pytest.mark.e2e
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_dataloader_workers_do_not_watch_and_do_not_write(context: str, tmp_path: Path) -> None:
    watched = Pair()
    session = watched.attach(tmp_path)
    watched.step()
    assert session.state.step == 1
    before = trace_bytes(session)
    data = Numbers(watched.model, session)
    if context == "spawn":
        data = _SpawnNumbers(watched.model, session)
    loader = DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context=context)
    rows = torch.cat(list(loader))
    assert rows[:, 0].tolist() == list(range(8))
    assert rows[:, 1].tolist() == [1.0] * 8
    assert os.getpid() not in rows[:, 2].tolist()
    assert session.state.step == 1
    assert trace_bytes(session) == before
    watched.step()
    assert session.state.step == 2
    assert session.status().protection is not Protection.OFF
    session.detach()
    assert [r.step for r in Reader(session.directory).steps()] == [0, 1]


class _SpawnNumbers(Numbers):
    """There the session arrives as None."""

    def __getitem__(self, index: int) -> Tensor:
        self.model(torch.full((1, 3), float(index))).sum().backward()
        return torch.tensor([float(index), float(self.session is None), float(os.getpid())])


@pytest.mark.e2e
def test_a_forked_child_that_trains_and_exits_leaves_no_mark(tmp_path: Path) -> None:
    watched = Pair()
    session = watched.attach(tmp_path)
    for _ in range(3):
        watched.step()
    settled = session.state.step
    before = trace_bytes(session)
    child = os.fork()
    if not child:
        code = 1
        try:
            said = str(session.status())
            for _ in range(5):
                watched.step()
            session.detach()
            import atexit

            atexit._run_exitfuncs()  # what sys.exit() would run
            code = 0 if "forked" in said and session.state.step == settled else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert trace_bytes(session) == before
    watched.step()
    session.detach()
    assert [r.step for r in Reader(session.directory).steps()] == [0, 1, 2, 3]


@pytest.mark.e2e
def test_a_fork_while_the_link_is_busy_neither_hangs_nor_talks(tmp_path: Path) -> None:
    watched = Pair()
    session = sentinel_hooks.attach(
        model=watched.model,
        optimizer=watched.optimizer,
        grad_scaler=watched.scaler,
        sidecar=f"unix://{tmp_path}/nobody.sock",
        run_dir=tmp_path,
    )
    watched.step()
    lock = session._link._lock  # type: ignore[attr-defined]
    with lock:  # the delivering thread may hold it at that very moment
        child = os.fork()
        if not child:
            code = 1
            try:
                signal.alarm(20)
                for _ in range(3):
                    watched.step()
                code = 0 if session.status().link.state == "embedded" else 2
                session.detach()
            finally:
                os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert session.status().link.state != "embedded"
    session.detach()

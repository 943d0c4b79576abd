"""Which adapter takes which object, and what is said of one that nobody knows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import sentinel_hooks
from sentinel.core.errors import ConfigError
from sentinel_hooks import AttachError, Snapshots, TrainerSession, adapters
from tests.support import ROOT

pytestmark = pytest.mark.torch


def named(module: str, name: str, *bases: type) -> type:
    """A class as that module would define it."""
    return type(name, bases or (object,), {"__module__": module})


@pytest.mark.parametrize(
    ("module", "name", "found"),
    [
        ("transformers.trainer", "Trainer", "HF Trainer"),
        ("lightning.pytorch.trainer.trainer", "Trainer", "Lightning Trainer"),
        ("pytorch_lightning.trainer.trainer", "Trainer", "Lightning Trainer"),
        ("accelerate.accelerator", "Accelerator", "accelerate.Accelerator"),
    ],
)
def test_a_class_and_its_subclasses_are_known_by_name(module: str, name: str, found: str) -> None:
    kind = named(module, name)
    assert adapters.discover(kind()).name == found
    theirs = named("trl.trainer.sft_trainer", "SFTTrainer", kind)
    mine = named("my.training", "MyTrainer", theirs)
    assert adapters.discover(mine()).name == found


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("transformers.trainer_utils", "Trainer"),
        ("lightning.fabric.fabric", "Fabric"),
        ("accelerate.accelerators", "Accelerator"),
        ("my.transformers.trainer", "Trainer"),
    ],
)
def test_a_class_of_a_similar_name_is_not_taken_for_one(module: str, name: str) -> None:
    with pytest.raises(AttachError) as error:
        sentinel_hooks.attach(named(module, name)())
    message = str(error.value)
    assert f"does not know {module}.{name}" in message
    for part in ("HF Trainer", "Lightning Trainer", "accelerate.Accelerator", "docs/adapters.md"):
        assert part in message
    for argument in ("model=", "optimizer=", "lr_scheduler=", "grad_scaler="):
        assert argument in message
    assert (ROOT / "docs" / "adapters.md").is_file()


@pytest.mark.parametrize(
    ("thing", "said"),
    [
        (torch.nn.Linear(1, 1), "was given a model"),
        (torch.optim.SGD([torch.zeros(1)], lr=1.0), "was given an? ?optimizer"),
        (named("transformers.trainer", "Trainer"), "was given the class Trainer"),
        (named("lightning.pytorch.core.module", "LightningModule")(), "give the Trainer that fits"),
        (3, "does not know builtins.int"),
    ],
)
def test_a_common_slip_gets_its_own_sentence(thing: Any, said: str) -> None:
    with pytest.raises(AttachError, match=said):
        sentinel_hooks.attach(thing)


@pytest.mark.slow
def test_looking_imports_no_framework() -> None:
    code = (
        "import sys, sentinel_hooks\n"
        "try: sentinel_hooks.attach(object())\n"
        "except sentinel_hooks.AttachError: pass\n"
        "assert not {'transformers', 'lightning', 'pytorch_lightning', 'accelerate'} & set("
        "sys.modules), 'imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- a trainer nobody ships


class Loop:
    """Somebody's own trainer, in which nothing is called as elsewhere."""

    def __init__(self) -> None:
        self.net = torch.nn.Linear(2, 1)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self.opt.zero_grad()
            self.net(torch.ones(4, 2)).square().mean().backward()
            self.opt.step()


class LoopAdapter:
    name = "Loop"
    waits_for = "loop.go()"
    begins_with: Any = None

    def accepts(self, trainer: Any) -> bool:
        return isinstance(trainer, Loop)

    def watch(self, trainer: Any, session: TrainerSession) -> Any:
        def begin(steps: int) -> None:
            session.begin(**(self.begins_with or {"model": trainer.net, "optimizer": trainer.opt}))

        return session.beside(trainer, "go", before=begin, at_end=session.end)


@pytest.fixture
def adapter() -> Iterator[LoopAdapter]:
    one = LoopAdapter()
    sentinel_hooks.register_adapter(one)
    yield one
    adapters.unregister_adapter(one)


def attach(trainer: Any, tmp_path: Path, **options: Any) -> Any:
    return sentinel_hooks.attach(trainer, **{"sidecar": None, "run_dir": tmp_path, **options})


def test_a_registered_adapter_is_asked_before_the_shipped_ones(adapter: LoopAdapter) -> None:
    class Both(Loop, named("transformers.trainer", "Trainer")):  # type: ignore[misc]
        pass

    assert adapters.discover(Both()) is adapter
    with pytest.raises(AttachError, match="it knows Loop, HF Trainer"):
        sentinel_hooks.attach(object())


@pytest.mark.parametrize("missing", ["name", "waits_for", "accepts", "watch"])
def test_an_incomplete_adapter_is_refused_by_name(missing: str) -> None:
    parts = {k: v for k, v in vars(LoopAdapter).items() if k != missing and k[0] != "_"}
    with pytest.raises(AttachError, match=missing):
        sentinel_hooks.register_adapter(type("Half", (), parts)())
    with pytest.raises(AttachError):
        sentinel_hooks.register_adapter(LoopAdapter)  # type: ignore[arg-type]


def test_one_trainer_is_attached_once(adapter: LoopAdapter, tmp_path: Path) -> None:
    loop = Loop()
    first = attach(loop, tmp_path)
    with pytest.raises(AttachError, match="attached already"):
        attach(loop, tmp_path)
    first.detach()
    attach(loop, tmp_path).detach()
    assert "go" not in vars(loop)


def test_a_trainer_and_its_objects_are_not_both_given(adapter: LoopAdapter, tmp_path: Path) -> None:
    loop = Loop()
    with pytest.raises(AttachError, match="a trainer and optimizer="):
        attach(loop, tmp_path, optimizer=loop.opt)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"policy": "no-such-policy"}, ConfigError),
        ({"mode": "sometimes"}, ConfigError),
        ({"run_id": "a/b"}, AttachError),
        ({"snapshots": 3}, AttachError),
        ({"extra_state": [3]}, AttachError),
        ({"batch_id": 3}, AttachError),
        ({"loss_fn": 3}, AttachError),
        ({"run_dir": ""}, AttachError),
    ],
)
def test_what_makes_no_sense_is_said_at_once_and_nothing_is_hooked(
    adapter: LoopAdapter, options: dict[str, Any], error: type[Exception], tmp_path: Path
) -> None:
    loop = Loop()
    with pytest.raises(error):
        attach(loop, tmp_path, **options)
    assert "go" not in vars(loop)


def test_objects_that_cannot_be_watched_leave_training_alone_and_status_says_why(
    adapter: LoopAdapter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop()
    adapter.begins_with = {"model": torch.nn.Linear(1, 1), "optimizer": loop.opt}
    session = attach(loop, tmp_path)
    loop.go(3)
    status = session.status()
    assert status.protection == "off"
    assert status.why.startswith("could not attach to this Loop: optimizer and model share no")
    assert status.internal_errors == {"begin": 1}
    assert "share no parameter" in caplog.text
    adapter.begins_with = None
    loop.go(3)
    assert session.status().step == 3
    assert "could not" not in session.status().why


def test_a_halted_run_does_not_go_on_by_accident(adapter: LoopAdapter, tmp_path: Path) -> None:
    from sentinel.core.policy import Policy

    halting = Policy.parse(
        "[rollback]\nbudget = 0\nhalt_when_spent = true\n[snapshots]\nconfirm = 4\nram_every = 8"
    )
    loop = Loop()
    session = attach(loop, tmp_path, run_id="r1", policy=halting)
    halted = tmp_path / "r1" / "HALTED"
    loop.go(2)
    halted.write_text("{}")
    with pytest.raises(sentinel_hooks.StillHalted, match="has not been cleared"):
        loop.go(2)
    session.detach()
    with pytest.raises(sentinel_hooks.StillHalted):
        attach(loop, tmp_path, run_id="r1")
    halted.unlink()
    with attach(loop, tmp_path, run_id="r1") as session:
        loop.go(1)
        assert session.status().step == 3


def test_a_training_that_raised_is_ended_by_the_next_one(
    adapter: LoopAdapter, tmp_path: Path
) -> None:
    loop = Loop()
    session = attach(loop, tmp_path)
    with pytest.raises(TypeError):
        loop.go("three")  # type: ignore[arg-type]
    assert not session.live
    loop.go(2)
    assert session.status().step == 2
    assert session.session.detached


def test_copies_of_a_watched_trainer_are_not_watched(adapter: LoopAdapter, tmp_path: Path) -> None:
    import copy
    import pickle

    loop = Loop()
    session = attach(loop, tmp_path)
    for other in (copy.deepcopy(loop), pickle.loads(pickle.dumps(loop))):
        other.go(2)
        assert session.session is None
    called: list[int] = []
    callback = session.guarded(called.append)
    for other in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        other(1)
    assert called == []
    callback(2)
    assert called == [2]
    assert copy.deepcopy(session) is session
    assert pickle.loads(pickle.dumps(session)) is None


def test_a_mistake_in_an_adapter_does_not_end_the_training(
    adapter: LoopAdapter, tmp_path: Path
) -> None:
    loop = Loop()
    session = attach(loop, tmp_path)
    adapter.begins_with = {"modell": None}
    loop.go(3)
    assert session.status().internal_errors == {"adapter": 1}
    assert session.status().why.startswith("the adapter for Loop failed: adapter: TypeError")


def test_checkpoints_are_for_a_training_that_runs(adapter: LoopAdapter, tmp_path: Path) -> None:
    loop = Loop()
    session = attach(loop, tmp_path, snapshots=Snapshots(adopt=lambda path: None))
    with pytest.raises(AttachError, match=r"loop.go\(\) has not started"):
        session.checkpointed("x")
    with pytest.raises(AttachError, match="none was given"):
        session.loss(1)

"""The configuration record: it says what was run, keeps secrets out, and never fails attach()."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sentinel.core.policy import Policy
from sentinel.traces.reader import Reader
from tests.support import require

torch = pytest.importorskip("torch")

from torch import nn

import sentinel_hooks
from sentinel_hooks import configuration
from sentinel_hooks.layers import LayerTable
from sentinel_hooks.target import Target

pytestmark = pytest.mark.torch


class Tied(nn.Module):
    """600 parameters in float32, 20 in bfloat16, one matrix used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(20, 30, bias=False)
        self.b = nn.Linear(20, 30, bias=False)
        self.b.weight = self.a.weight
        self.scale = nn.Parameter(torch.ones(20, dtype=torch.bfloat16), requires_grad=False)


def described(**parts: Any) -> dict[str, Any]:
    model = parts.pop("model", None) or Tied()
    optimizer = parts.pop("optimizer", None) or torch.optim.AdamW(
        [{"params": [model.a.weight], "weight_decay": 0.0}], lr=3e-4
    )
    target = Target((model,), (optimizer,), **parts)
    rows = LayerTable.of(target.models).rows()
    data = configuration.describe(target, rows, Policy(), run="r7", incarnation="ab")
    found: dict[str, Any] = json.loads(data)
    return found


def test_model_and_optimizer_are_told_with_sizes_and_without_weights() -> None:
    record = described()
    (model,), (optimizer,) = record["models"], record["optimizers"]
    assert model["class"].endswith("test_configuration.Tied")
    assert (model["parameters"], model["trainable"]) == (620, 600)
    assert model["dtypes"] == {"torch.float32": 600, "torch.bfloat16": 20}
    assert model["devices"] == {"cpu": 620}
    assert [layer["name"] for layer in record["layers"]] == ["Tied", "a"]
    assert optimizer["class"] == "torch.optim.adamw.AdamW"
    assert optimizer["defaults"]["weight_decay"] == 0.01
    (group,) = optimizer["groups"]
    assert (group["lr"], group["weight_decay"]) == (3e-4, 0.0)
    assert (group["tensors"], group["parameters"]) == (1, 600)
    assert "params" not in group
    assert record["versions"]["torch"] == torch.__version__
    assert record["policy"] == json.loads(json.dumps(Policy().to_dict()))
    assert len(json.dumps(record)) < 20_000


def test_scheduler_and_scaler_are_told_with_their_state() -> None:
    model = Tied()
    optimizer = torch.optim.SGD([model.a.weight], lr=torch.tensor(0.5))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    record = described(model=model, optimizer=optimizer, schedulers=(scheduler,), scaler=scaler)
    assert record["schedulers"][0]["class"] == "torch.optim.lr_scheduler.StepLR"
    assert record["schedulers"][0]["state"]["step_size"] == 7
    assert record["scaler"]["state"]["scale"] == 1024.0
    assert record["optimizers"][0]["defaults"]["lr"] == 0.5, "a tensor of one number is one"


def test_what_json_has_not_is_named_and_does_not_stop_the_rest() -> None:
    class Broken:
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("not now")

    class Odd:
        def state_dict(self) -> dict[str, Any]:
            loop: list[Any] = []
            loop.append(loop)
            return {
                "nan": float("nan"),
                "big": 2**70,
                "f": len,
                "loop": loop,
                "list": list(range(2000)),
                3: torch.ones(2, 2),
            }

    record = described(schedulers=(Broken(), Odd()))
    assert record["schedulers"][0]["state"] == {"error": "RuntimeError: not now"}
    state = record["schedulers"][1]["state"]
    assert state["nan"] == "nan"
    assert state["big"] == str(2**70)
    assert state["f"] == "builtins.len"
    assert state["list"][-2:] == [999, "and 1000 more"]
    assert state["3"] == "tensor (2, 2) torch.float32"
    assert record["models"][0]["parameters"] == 620


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["--api-key", "s3cret", "x"], ["--api-key", "***", "x"]),
        (["--wandb_token=s3cret"], ["--wandb_token=***"]),
        (["trainer.password=s3cret"], ["trainer.password=***"]),
        (["--db", "http://me:s3cret@host/x"], ["--db", "http://***@host/x"]),
        (["--auth", "--lr", "1e-3"], ["--auth", "--lr", "1e-3"]),
        (["--lr=1e-3", "train.py"], ["--lr=1e-3", "train.py"]),
    ],
)
def test_secrets_of_the_command_line_are_masked(given: list[str], shown: list[str]) -> None:
    assert configuration.masked(given) == shown


def test_only_listed_variables_of_the_environment_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cret")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    record = described()
    assert record["environment"]["OMP_NUM_THREADS"] == "3"
    assert set(record["environment"]) <= set(configuration.ENVIRONMENT)
    assert "s3cret" not in json.dumps(record)


def test_the_commit_of_the_users_code_is_told_and_whether_it_was_changed(tmp_path: Path) -> None:
    require(shutil.which("git"), "git")
    place = tmp_path / "project"
    place.mkdir()
    assert configuration.code(str(tmp_path)) == {}
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull}
    who = ["-c", "user.name=n", "-c", "user.email=e@example.org"]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(place), *who, *arguments]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        return done.stdout.strip()

    git("init", "-q")
    (place / "train.py").write_text("1\n")
    git("add", "train.py")
    git("commit", "-q", "-m", "first")
    found = configuration.code(str(place))
    assert (found["commit"], found["dirty"]) == (git("rev-parse", "HEAD"), False)
    (place / "train.py").write_text("2\n")
    assert configuration.code(str(place))["dirty"] is False, "asked once in a process"
    configuration.code.cache_clear()
    assert configuration.code(str(place))["dirty"] is True


def test_git_that_is_missing_or_hangs_is_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configuration.code.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert configuration.code(str(tmp_path)) == {}
    configuration.code.cache_clear()
    slow = tmp_path / "git"
    slow.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(30)\n")
    slow.chmod(0o755)
    monkeypatch.setattr(configuration, "GIT_TIMEOUT_S", 0.2)
    assert configuration.code(str(tmp_path)) == {}
    configuration.code.cache_clear()


@pytest.mark.parametrize("broken", [False, True])
def test_each_process_of_a_run_leaves_its_record_beside_its_trace(
    tmp_path: Path, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken:
        monkeypatch.setattr(configuration.codec, "to_json", lambda *a, **k: 1 / 0)
    for _ in range(2):
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = sentinel_hooks.attach(
            model=model, optimizer=optimizer, run_dir=tmp_path, run_id="r7", sidecar=None
        )
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        session.detach()
    reader = Reader(tmp_path / "r7")
    records = [reader.configuration(place) for place in reader.incarnations]
    assert len(records) == 2
    for place, record in zip(reader.incarnations, records, strict=True):
        assert record is not None
        assert record["run"] == "r7"
        if broken:
            assert record["error"] == "ZeroDivisionError: division by zero"
        else:
            assert place.name.endswith(record["incarnation"])
    assert reader.configuration() == records[-1]
    assert not list(tmp_path.rglob("*.tmp"))

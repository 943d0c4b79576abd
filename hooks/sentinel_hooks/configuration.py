"""What was run: the configuration record of one process, for whoever opens its trace later.

    data = configuration.describe(target, rows, policy, run="r7", incarnation="1f2e3d4c")

The bytes of a JSON object, which the recorder puts beside the trace as config.json: policy,
versions, platform, command line, model, optimizers, schedulers, scaler, and the commit of the
user's code.

Secrets: of the environment only ENVIRONMENT is read. In the command line the values of arguments
         whose names look like secrets, and user:password in URLs, are written as "***".
Cost:    some milliseconds, and once in a process at most 2 * GIT_TIMEOUT_S for git.
Errors:  none: what cannot be told is {"error": why} in its place.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import functools
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from sentinel import __version__
from sentinel.core.policy import Policy
from sentinel.core.state import ENGINE_VERSION
from sentinel.wire import codec
from sentinel_hooks.snapshots import Snapshots
from sentinel_hooks.target import Target

FORMAT = 1
GIT_TIMEOUT_S = 2.0
ENVIRONMENT = (  # what changes numbers or speed, and what a launcher says of the process
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "RANK",
    "SLURM_JOB_ID",
    "TORCHELASTIC_RUN_ID",
    "WORLD_SIZE",
)
_ITEMS, _TEXT, _DEPTH = 1000, 2000, 8  # longer lists and texts are cut, deeper values named
_SECRET = re.compile(r"key|token|secret|passw|pwd|credential|auth", re.IGNORECASE)
_IN_URL = re.compile(r"://[^/\s@]+@")


def describe(
    target: Target,
    layers: Sequence[Mapping[str, Any]],
    policy: Policy,
    *,
    run: str,
    incarnation: str = "",
    snapshots: Snapshots | None = None,
) -> bytes:
    """The record, indented JSON; nothing of the user's is changed, and nothing is raised."""
    sections: dict[str, Callable[[], Any]] = {
        "policy": policy.to_dict,
        "snapshots": lambda: snapshots,
        "versions": _versions,
        "platform": _platform,
        "torch": _torch,
        "argv": lambda: masked(sys.argv),
        "environment": lambda: {n: os.environ[n] for n in ENVIRONMENT if n in os.environ},
        "models": lambda: [_model(m) for m in target.models],
        "layers": lambda: list(layers),
        "optimizers": lambda: [_optimizer(o) for o in target.optimizers],
        "schedulers": lambda: [_stateful(s) for s in target.schedulers],
        "scaler": lambda: None if target.scaler is None else _stateful(target.scaler),
        "extra_state": lambda: [_kind(s) for s in target.extra_state],
        "code": lambda: code(str(_main_directory())),
    }
    record: dict[str, Any] = {
        "format": FORMAT,
        "run": run,
        "incarnation": incarnation,
        "started_at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "pid": os.getpid(),
    }
    for name, section in sections.items():
        record[name] = _told(section)
    try:
        return codec.to_json(record, indent=2) + b"\n"
    except Exception as error:  # noqa: BLE001
        return msgspec.json.encode({"format": FORMAT, "run": run, "error": _why(error)})


def _told(section: Callable[[], Any]) -> Any:
    try:
        return plain(section())
    except Exception as error:  # noqa: BLE001  the user's own classes answer here
        return {"error": _why(error)}


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_TEXT]


# ---------------------------------------------------------------- values


def plain(value: Any, depth: int = 0) -> Any:
    """`value` as JSON has it; what JSON has not is named by its class."""
    if isinstance(value, Tensor):
        one = value.numel() == 1 and not value.is_meta
        return plain(value.detach().item()) if one else f"tensor {tuple(value.shape)} {value.dtype}"
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, enum.Enum):
        value = value.value
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**63 else str(value)
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)[:_TEXT]
    if depth < _DEPTH:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [f.name for f in dataclasses.fields(value)]
            return {n: plain(getattr(value, n), depth + 1) for n in names}
        if isinstance(value, Mapping):
            pairs = list(value.items())[:_ITEMS]
            return {str(k)[:_TEXT]: plain(v, depth + 1) for k, v in pairs}
        if isinstance(value, list | tuple | set | frozenset):
            shown = [plain(v, depth + 1) for v in list(value)[:_ITEMS]]
            return shown if len(value) <= _ITEMS else [*shown, f"and {len(value) - _ITEMS} more"]
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    return _kind(value)


def masked(arguments: Sequence[str]) -> list[str]:
    """A command line without its secrets."""
    shown, hide = [], False
    for argument in map(str, arguments):
        name, equals, _ = argument.partition("=")
        option = argument.startswith("-")
        if hide and not option:
            shown.append("***")
        elif equals and _SECRET.search(name):
            shown.append(f"{name}=***")
        else:
            shown.append(_IN_URL.sub("://***@", argument)[:_TEXT])
        hide = option and not equals and bool(_SECRET.search(name))
    return shown


def _kind(value: Any) -> str:
    kind = value if isinstance(value, type) or hasattr(value, "__qualname__") else type(value)
    return f"{getattr(kind, '__module__', '?')}.{kind.__qualname__}"


# ---------------------------------------------------------------- sections


def _versions() -> dict[str, Any]:
    return {
        "sentinel": __version__,
        "engine": ENGINE_VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "msgspec": msgspec.__version__,
    }


def _platform() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "machine": platform.machine(),
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "python": sys.executable,
    }


def _torch() -> dict[str, Any]:
    found: dict[str, Any] = {
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "default_dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
    }
    # Asking must not start it: a fork could not use it then.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        count = range(torch.cuda.device_count())
        found["devices"] = [torch.cuda.get_device_name(i) for i in count]
    return found


def _model(model: nn.Module) -> dict[str, Any]:
    parameters = list(model.parameters())  # a tied one once
    made = [p for p in parameters if not nn.parameter.is_lazy(p)]
    dtypes: Counter[str] = Counter()
    devices: Counter[str] = Counter()
    for parameter in made:
        dtypes[str(parameter.dtype)] += parameter.numel()
        devices[str(parameter.device)] += parameter.numel()
    return {
        "class": _kind(model),
        "parameters": sum(p.numel() for p in made),
        "trainable": sum(p.numel() for p in made if p.requires_grad),
        "tensors": len(parameters),
        "lazy_tensors": len(parameters) - len(made),
        "dtypes": dtypes,
        "devices": devices,
        "training": model.training,
    }


def _optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "class": _kind(optimizer),
        "defaults": optimizer.defaults,
        "groups": [
            {
                **{k: v for k, v in group.items() if k != "params"},
                "tensors": len(group["params"]),
                "parameters": sum(
                    p.numel() for p in group["params"] if not nn.parameter.is_lazy(p)
                ),
            }
            for group in optimizer.param_groups
        ],
    }


def _stateful(thing: Any) -> dict[str, Any]:
    try:
        state = thing.state_dict()
    except Exception as error:  # noqa: BLE001  the class at least is told
        state = {"error": _why(error)}
    return {"class": _kind(thing), "state": state}


def _main_directory() -> Path:
    """Where the user's program lies; interactively, where it runs."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file).resolve().parent if file else Path.cwd()


@functools.cache
def code(directory: str) -> dict[str, Any]:
    """Commit and state of the git work tree around `directory`; {} when there is none.

    Asked once in a process: the code that runs is the one that was there first.
    """
    head = _git(directory, "rev-parse", "HEAD")
    if not head:
        return {}
    changed = _git(directory, "status", "--porcelain", "--untracked-files=no")
    return {
        "directory": directory,
        "commit": head.strip(),
        "dirty": None if changed is None else bool(changed.strip()),
    }


def _git(directory: str, *arguments: str) -> str | None:
    """What git says; None when it is not there, fails or takes too long."""
    try:
        done = subprocess.run(  # noqa: S603
            ["git", "--no-optional-locks", "-C", directory, *arguments],  # noqa: S607
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return None
    return done.stdout if done.returncode == 0 else None

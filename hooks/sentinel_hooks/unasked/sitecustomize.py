"""Python imports this at start, because `sentinel run --attach` put its folder on PYTHONPATH.

Only the standard library is imported here, and nothing is done before torch.optim.optimizer is:
then a hook is called before every step. Ours is imported at the first and not before: while
torch.optim.optimizer comes, torch itself is half imported. The environment's own sitecustomize, if
there is one, is run as if this one were not here.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_AWAITED = "torch.optim.optimizer"
_HERE = os.path.dirname(os.path.abspath(__file__))


class _Watch(importlib.abc.MetaPathFinder):
    """Sees one module come, and goes."""

    def __init__(self) -> None:
        self._asking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _AWAITED or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is None or spec.loader is None:
            return None
        spec.loader = _Then(spec.loader)
        return spec


class _Then(importlib.abc.Loader):
    """The module's own loader, and then ours."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, _Watch)]
        _report("torch")
        try:
            module.register_optimizer_step_pre_hook(_AtStep())
        except Exception as error:  # noqa: BLE001  the script comes first
            sys.stderr.write(f"sentinel: cannot watch this process: {error!r}\n")


class _AtStep:
    """torch calls it before every step of any optimizer.

    It stays there: torch goes through its hooks at that moment, and taking one out would break off
    the script's step if the script has put in hooks of its own.
    """

    def __init__(self) -> None:
        self._on_step: Callable[[Any], None] | None = None
        self._failed = False

    def __call__(self, optimizer: Any, *_: Any) -> None:
        if self._failed:
            return
        try:
            if self._on_step is None:
                from sentinel_hooks.unasked import stepping

                self._on_step = stepping.on_step
            self._on_step(optimizer)
        except Exception as error:  # noqa: BLE001  the script comes first
            self._failed = True
            sys.stderr.write(f"sentinel: cannot watch this process: {error!r}\n")


def _report(what: str) -> None:
    """A line for `sentinel run`: how far this process has come."""
    path = os.environ.get("SENTINEL_ATTACH_REPORT")
    if path:
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{what}\n")
        except OSError:
            pass


def _run_the_hidden_one() -> None:
    """The environment's own sitecustomize, which ours has hidden."""
    places = [p for p in sys.path if os.path.abspath(p or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", places)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if os.environ.get("SENTINEL_ATTACH"):
    _report("python")
    sys.meta_path.insert(0, _Watch())
_run_the_hidden_one()

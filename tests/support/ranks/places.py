"""Places in our own code: entry and exit of every function, patched from outside.

    instrument(me)         each call of a function of sentinel_hooks passes two places of `me`

A place is "session.Session._decide:entry" (module below sentinel_hooks, qualified name, end). The
functions are wrapped in classes and in every namespace that imported them, before any session is
made; the product knows nothing of it.

An error may be raised at a place only where one of ours could arise: below a call of Guard.run (the
one place where our errors end), or in the modules of GUARDED_THEMSELVES, which promise to end their
own. What is left are the few lines of the seams' shells, where the caller is the user's code: there
a rank may be slow, stopped or killed, but no error of ours can begin.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pkgutil
import sys
from typing import Any

import sentinel_hooks
from tests.support.ranks.rank import Rank

LEFT_OUT = (
    "demo",
    "adapters",
    "guard",
    "status",
    "errors",
    "layers",
    "configuration",
    "attaching",
)
GUARDED_THEMSELVES: tuple[str, ...] = ()
# Called at odd moments, and the functions that the guard itself calls: before their first line and
# after their last there is nothing that could fail.
NO_PLACES = {"Hook.__call__", "Guard.run", "Session.before_step", "Session.keep_step"}


def modules() -> list[Any]:
    """All of sentinel_hooks but the parts outside the step."""
    found = []
    for info in pkgutil.walk_packages(sentinel_hooks.__path__, "sentinel_hooks."):
        short = info.name.removeprefix("sentinel_hooks.")
        if short.split(".")[0] not in LEFT_OUT:
            found.append(importlib.import_module(info.name))
    return found


def _in_guard(code: Any) -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _wrap(function: Any, place: str, me: Rank, guard: Any, always: bool) -> Any:
    entry, exit_ = f"{place}:entry", f"{place}:exit"

    @functools.wraps(function)
    def passed(*args: Any, **kwargs: Any) -> Any:
        may = always or _in_guard(guard)
        me.at(entry, may_raise=may)
        result = function(*args, **kwargs)
        me.at(exit_, may_raise=may)
        return result

    return passed


def instrument(me: Rank) -> int:
    """Wrap everything; returns how many functions."""
    from sentinel_hooks.guard import Guard

    guard = Guard.run.__code__
    wrapped: dict[int, Any] = {}
    keep = []
    everything = modules()
    for module in everything:
        short = module.__name__.removeprefix("sentinel_hooks.")
        always = any(short.startswith(name) for name in GUARDED_THEMSELVES)
        for name, value in list(vars(module).items()):
            if getattr(value, "__module__", None) != module.__name__:
                continue
            if inspect.isfunction(value) and not inspect.isgeneratorfunction(value):
                new = _wrap(value, f"{short}.{name}", me, guard, always)
                wrapped[id(value)] = new
                keep.append(value)
            elif inspect.isclass(value):
                _wrap_class(value, short, me, guard, always, wrapped)
    namespaces = [m for n, m in list(sys.modules.items()) if n.startswith("sentinel_hooks")]
    for module in namespaces:
        for name, value in list(vars(module).items()):
            if id(value) in wrapped and inspect.isfunction(value):
                setattr(module, name, wrapped[id(value)])
    return len(wrapped)


def _wrap_class(
    cls: type, short: str, me: Rank, guard: Any, always: bool, wrapped: dict[int, Any]
) -> None:
    generated = dataclasses.is_dataclass(cls)
    for name, value in list(vars(cls).items()):
        place = f"{short}.{cls.__name__}.{name}"
        if f"{cls.__name__}.{name}" in NO_PLACES or (name.startswith("__") and name != "__call__"):
            continue
        kind = type(value)
        function = value.__func__ if kind in (staticmethod, classmethod) else value
        if not inspect.isfunction(function) or inspect.isgeneratorfunction(function):
            continue
        if generated and function.__qualname__.split(".")[0] != cls.__name__:
            continue
        new = _wrap(function, place, me, guard, always)
        wrapped[id(function)] = new
        setattr(cls, name, kind(new) if kind in (staticmethod, classmethod) else new)

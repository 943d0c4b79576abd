"""Frozen values that are made five times as fast, for those that are made at every step.

    @quick
    @dataclass(frozen=True, slots=True)
    class Reading: ...

The __init__ of a frozen dataclass sets each field by a call of object.__setattr__, and a step sets
a hundred and fifty: a fifth of what the engine costs. Here the new value is for a moment one of a
twin class with the same slots and without the lock, whose fields are plain stores; then it is what
it was declared to be. All else is as dataclass made it: equality, hash, repr, replace(), pickling,
and that no field of a finished value can be set.

Errors:  TypeError for a class that is no frozen dataclass with slots, or that wants more of its
         __init__ than to set the fields.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, TypeVar

T = TypeVar("T")

_become = object.__dict__["__class__"].__set__


def quick(made: type[T]) -> type[T]:
    """The class with another __init__; see the module docstring."""
    own: Any = made
    if not own.__dataclass_params__.frozen or "__slots__" not in own.__dict__:
        raise TypeError(f"{made.__name__} must be a frozen dataclass with slots")
    known = fields(own)
    if hasattr(own, "__post_init__") or any(f.kw_only or not f.init for f in known):
        raise TypeError(f"{made.__name__} must take its fields by place and do no more with them")
    twin = type(made.__name__, made.__bases__, {"__slots__": own.__slots__})
    space: dict[str, Any] = {"become": _become, "twin": twin, "made": made, "absent": MISSING}
    given, lines = ["self"], ["become(self, twin)"]
    for f in known:
        name, value = f.name, f.name
        if f.default_factory is not MISSING:
            space[f"make_{name}"], space[f"default_{name}"] = f.default_factory, MISSING
            value = f"make_{name}() if {name} is absent else {name}"
        elif f.default is not MISSING:
            space[f"default_{name}"] = f.default
        given.append(f"{name}=default_{name}" if f"default_{name}" in space else name)
        lines.append(f"self.{name} = {value}")
    lines.append("become(self, made)")
    source = f"def __init__({', '.join(given)}):\n " + "\n ".join(lines)
    exec(source, space)  # noqa: S102 (as dataclass itself; the text holds names of fields only)
    init = space["__init__"]
    init.__qualname__, init.__annotations__ = (
        own.__init__.__qualname__,
        own.__init__.__annotations__,
    )
    own.__init__ = init
    return made

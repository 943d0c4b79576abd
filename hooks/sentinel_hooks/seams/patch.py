"""Replace an attribute, and take only one's own replacement away again.

    patch = Patch(torch.autograd, "backward", wrapper)
    patch = Patch(optimizer, "zero_grad", Stand(optimizer, "zero_grad", wrapper))
    patch.remove()

What stands on an instance must not travel with it: in a deep copy or a pickle of its owner a Stand
becomes the plain method again.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

_MISSING: Any = object()


class Stand:
    """Stands for a method of one instance; a copy of the instance has the method itself."""

    def __init__(self, owner: Any, name: str, body: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self._body = body
        method = getattr(type(owner), name, None)
        # Some callers look before they call: accelerate passes set_to_none= only if it is there.
        self.__doc__ = getattr(method, "__doc__", None)
        try:
            self.__signature__ = inspect.signature(method.__get__(owner))  # type: ignore[union-attr]
        except (AttributeError, TypeError, ValueError):
            pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._body(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return getattr(type(self._owner), self._name).__get__(copy.deepcopy(self._owner, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner, self._name)


class Patch:
    """One replaced attribute of a module or an instance.

    If somebody else wrapped our replacement in the meantime, remove() leaves theirs in place:
    taking it away would undo their work. The replacement therefore has to be a plain
    pass-through once nobody listens.
    """

    def __init__(self, owner: Any, name: str, replacement: Any) -> None:
        self._owner = owner
        self._name = name
        self._replacement = replacement
        self._original = vars(owner).get(name, _MISSING)
        setattr(owner, name, replacement)

    def remove(self) -> bool:
        """Put the original back; False if somebody else's wrapper stands in the way."""
        if vars(self._owner).get(self._name, _MISSING) is not self._replacement:
            return False
        if self._original is _MISSING:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._original)
        return True

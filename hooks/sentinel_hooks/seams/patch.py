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
        self._lifted = False
        setattr(owner, name, replacement)

    def remove(self) -> bool:
        """Put the original back; False if somebody else's wrapper stands in the way."""
        if self._lifted and vars(self._owner).get(self._name) is self._original:
            self._lifted = False
            return True
        if vars(self._owner).get(self._name, _MISSING) is not self._replacement:
            return False
        if self._original is _MISSING:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._original)
        return True

    def lift(self) -> None:
        """Put the original there for a while, if ours is."""
        if vars(self._owner).get(self._name) is self._replacement:
            setattr(self._owner, self._name, self._original)
            self._lifted = True

    def lay(self) -> None:
        """Put ours back where it was lifted."""
        if self._lifted and vars(self._owner).get(self._name) is self._original:
            setattr(self._owner, self._name, self._replacement)
        self._lifted = False


class Swap:
    """A function of Python that runs other code and stays the object that it is.

    Those who hold it, compare it or pickle it by name notice nothing, and torch.jit, which reads
    its source, finds that of the original. torch.compile is made to read it, as a function of the
    user's, where it would call torch's as it is.

    Args:
        shim: takes the same arguments and hands them to `_torch_sentinel_NAME`, which is
            `replacement`. It runs with the globals of `function`.
    """

    def __init__(self, function: Any, shim: Any, replacement: Callable[..., Any]) -> None:
        self._function = function
        self._globals = function.__globals__
        self._global = f"_torch_sentinel_{function.__name__}"
        self._original = code = function.__code__
        self._globals[self._global] = replacement
        self._code = shim.__code__.replace(
            co_name=code.co_name,
            co_qualname=code.co_qualname,
            co_filename=code.co_filename,
            co_firstlineno=code.co_firstlineno,
        )
        function.__code__ = self._code
        self._rules: dict[Any, Any] = {}
        try:
            from torch._dynamo.trace_rules import get_torch_obj_rule_map
            from torch._dynamo.variables import UserFunctionVariable

            rules: Any = get_torch_obj_rule_map()
            self._rule = rules.get(function)
            if self._rule is not None:
                rules[function] = UserFunctionVariable
                self._rules = rules
        except ImportError:  # a torch that keeps them elsewhere: compiled code is not watched
            pass

    def remove(self) -> bool:
        """Give it its own code again; False if somebody else's is there."""
        if self._function.__code__ is not self._code:
            return False
        self._function.__code__ = self._original
        self._globals.pop(self._global, None)
        if self._rules:
            self._rules[self._function] = self._rule
        return True

"""Replace an attribute, and take only one's own replacement away again."""

from __future__ import annotations

from typing import Any

_MISSING: Any = object()


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

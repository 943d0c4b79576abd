"""The sessions of this process: who is watched, and what a fork and the process's end do to them.

    registry: Registry[Session] = Registry()
    registry.add(session, optimizers)     at the end of attach()
    registry.leave(optimizers)            detach()
    optimizer in registry                 some session watches it
    registry.open()                       those that nobody has detached

It keeps nothing alive: what the user lets go of is forgotten with it. A forked child is told before
any other code of it runs; at the interpreter's end every session is asked to close what is open.

Threads: those that attach, detach and fork; nothing is locked, since each call is one operation on
         a weak set, or on a copy of it.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

import torch


class Member(Protocol):
    """What the registry needs of a session."""

    @property
    def detached(self) -> bool:
        """Nothing of it is in the loop any more."""
        ...

    def forked(self) -> None:
        """This process is a child of the one that is watched."""
        ...

    def at_exit(self) -> None:
        """The interpreter ends."""
        ...


_M = TypeVar("_M", bound=Member)


class Registry(Generic[_M]):
    """One for the whole process."""

    def __init__(self) -> None:
        self._watched: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._members: weakref.WeakSet[_M] = weakref.WeakSet()
        os.register_at_fork(after_in_child=self._after_fork)
        atexit.register(self._close_all)

    def __contains__(self, optimizer: torch.optim.Optimizer) -> bool:
        return optimizer in self._watched

    def add(self, member: _M, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """It has begun to watch `optimizers`."""
        self._watched.update(optimizers)
        self._members.add(member)

    def leave(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Nobody watches them any more."""
        for optimizer in optimizers:
            self._watched.discard(optimizer)

    def open(self) -> tuple[_M, ...]:
        """Those that nobody has detached."""
        return tuple(m for m in self._members if not m.detached)

    def _after_fork(self) -> None:
        for member in list(self._members):
            member.forked()

    def _close_all(self) -> None:
        for member in list(self._members):
            member.at_exit()

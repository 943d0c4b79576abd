"""A killer: this process dies by SIGKILL when so many bytes were written below a directory.

    killer.arm(directory, offset)        in the process that shall die
    killer.written                       bytes so far, when offset is None: only counting

What is written through open(), io.open(), pathlib and os.write() counts, byte by byte as it reaches
the operating system: of the write that crosses the offset the first part is done, the rest never.
After bytes come the calls that change names: each mkdir, rename and unlink below the directory
counts as one byte, so that a kill can fall between a file's last byte and its rename.
"""

from __future__ import annotations

import builtins
import io
import os
import signal
from typing import Any

_open, _io_open, _os_open, _os_write = builtins.open, io.open, os.open, os.write
_calls = {name: getattr(os, name) for name in ("mkdir", "rename", "replace", "unlink")}


class Killer:
    """Counts bytes; one for a process."""

    def __init__(self, directory: str | os.PathLike[str], offset: int | None) -> None:
        self.directory = os.path.abspath(directory)
        self.offset = offset
        self.written = 0
        self.handles: set[int] = set()

    def below(self, path: Any) -> bool:
        if isinstance(path, int):
            return path in self.handles
        return os.path.abspath(os.fsdecode(path)).startswith(self.directory + os.sep)

    def room(self, size: int) -> int:
        """How much of a write may still happen."""
        return size if self.offset is None else min(size, self.offset - self.written)

    def passed(self, size: int) -> None:
        self.written += size
        if self.offset is not None and self.written >= self.offset:
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()


class _File(io.FileIO):
    killer: Killer

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view) or not len(view):
            part = view[done : done + max(self.killer.room(len(view) - done), 0)]
            n = super().write(part) or 0
            done += n
            self.killer.passed(n)
            if not len(view):
                break
        return done


def arm(directory: str | os.PathLike[str], offset: int | None) -> Killer:
    """From now on; for the rest of the process's life."""
    killer = Killer(directory, offset)
    kind = type("File", (_File,), {"killer": killer})

    def opened(file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **more: Any) -> Any:
        if "b" in mode and ("w" in mode or "x" in mode or "a" in mode) and killer.below(file):
            raw = kind(file, mode.replace("b", ""))
            return raw if buffering == 0 else io.BufferedWriter(raw)
        return _io_open(file, mode, buffering, *rest, **more)

    def os_open(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        handle = _os_open(path, flags, *rest, **more)
        if flags & (os.O_WRONLY | os.O_RDWR) and killer.below(path):
            killer.handles.add(handle)
        return handle

    def os_write(handle: int, data: Any) -> int:
        if handle not in killer.handles:
            return _os_write(handle, data)
        n = _os_write(handle, memoryview(data)[: max(killer.room(len(data)), 0)])
        killer.passed(n)
        return n

    def counted(name: str) -> Any:
        def call(path: Any, *rest: Any, **more: Any) -> Any:
            result = _calls[name](path, *rest, **more)
            if killer.below(path):
                killer.passed(1)
            return result

        return call

    builtins.open = io.open = opened
    os.open, os.write = os_open, os_write
    for name in _calls:
        setattr(os, name, counted(name))
    return killer

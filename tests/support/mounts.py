"""File systems of their own, so that a disk can fill up, turn read-only or go for real."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support import require


@contextlib.contextmanager
def small_disk(place: Path, size: str = "4m") -> Iterator[Path]:
    """A tmpfs mounted at `place`, gone afterwards."""
    mount(place, size)
    try:
        yield place
    finally:
        unmount(place)


def mount(place: Path, size: str = "4m") -> None:
    place.mkdir(exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], capture_output=True
    )
    require(done.returncode == 0, "the right to mount a file system")


def unmount(place: Path) -> None:
    """At once, whoever still has files open there."""
    subprocess.run(["umount", "-l", str(place)], check=True)


def remount(place: Path, how: str) -> None:
    """`how` is "ro" or "rw"."""
    subprocess.run(["mount", "-o", f"remount,{how}", str(place)], check=True)


def fill(place: Path, *, leave: int = 0) -> Path:
    """Leave so many bytes free; deleting the returned file makes room again."""
    filler = place / "filler"
    with open(filler, "wb") as file:
        left = shutil.disk_usage(place).free - leave
        with contextlib.suppress(OSError):
            while left > 0:
                left -= file.write(b"\0" * min(left, 1 << 16))
                file.flush()
    return filler

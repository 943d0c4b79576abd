"""File systems of their own, so that a disk can fill up, turn read-only, hang or go for real."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
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


@contextlib.contextmanager
def real_disk(place: Path, image: Path) -> Iterator[Path]:
    """An ext4 in the file `image`, mounted at `place`: one that can be frozen."""
    place.mkdir(exist_ok=True)
    with open(image, "wb") as file:
        file.truncate(16 << 20)
    made = False
    with contextlib.suppress(FileNotFoundError):
        for command in (
            ["mkfs.ext4", "-q", "-F", str(image)],
            ["mount", "-o", "loop", str(image), str(place)],
        ):
            made = subprocess.run(command, capture_output=True).returncode == 0
    require(made and shutil.which("fsfreeze"), "the right to mount a file as a disk")
    try:
        yield place
    finally:
        unmount(place)


def freeze(place: Path, seconds: float) -> threading.Timer:
    """Whoever writes there waits so long; join() what is returned."""
    subprocess.run(["fsfreeze", "-f", str(place)], check=True)
    thaw = threading.Timer(seconds, subprocess.run, [["fsfreeze", "-u", str(place)]])
    thaw.start()
    return thaw

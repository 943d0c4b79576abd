"""What snapshots cost: the trainer's side in RAM, the background's on disk.

    python -m tests.bench snapshots

AdamW after one step, so parameters and two moments. The trainer pays for the RAM copy; a disk copy
adds what `offer` costs, the rest happens in another thread. The trainer's rows are CPU time of its
own thread, best of 9 (a save in the background and other processes share the cores); the
background's rows are elapsed time, with fsync.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from sentinel.core.policy import Policy
from sentinel.core.state import Ledger, Stats
from sentinel.traces.snapshots import find_damage
from sentinel_hooks.snapshots import Snapshots, files
from sentinel_hooks.snapshots.disk import DiskStore
from sentinel_hooks.snapshots.ram import RamStore
from sentinel_hooks.target import Target
from tests.bench.timing import machine, table

ROUNDS = 9
WIDTH, LAYERS = 1024, 10


def best_ms(call: Callable[[int], object]) -> float:
    """Least milliseconds of this thread's CPU time."""
    times = []
    for i in range(ROUNDS):
        start = time.thread_time_ns()
        call(i)
        times.append(time.thread_time_ns() - start)
    return min(times) / 1e6


def elapsed_ms(call: Callable[[], object]) -> float:
    """Milliseconds on the wall, once."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    target = Target((model,), (optimizer,))
    ram = RamStore(target, Snapshots())
    first = elapsed_ms(lambda: ram.take(0, Stats()))
    image = ram.image(0)
    live = [p.detach() for p in model.parameters()]
    live += [t for s in optimizer.state.values() for t in s.values() if t.dim()]
    copies = [torch.empty_like(t) for t in live]
    torch._foreach_copy_(copies, live)

    def take(i: int) -> None:
        ram.take(i + 1, Stats())
        ram.keep_only([i + 1])

    ram.take(-1, Stats())
    ram.drop(-1)
    memcpy = best_ms(lambda _: torch._foreach_copy_(copies, live))
    copied = best_ms(take)
    restored = best_ms(lambda _: ram.restore(ROUNDS))
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        disk = DiskStore(target, Snapshots(), Path(name), run="bench", policy=Policy())
        files.write(Path(tempfile.mkdtemp(dir=name)), image, files.capture(target), attempt=0)

        def both(i: int) -> None:
            ram.take(100 + i, Stats())
            ram.keep_only([100 + i])
            disk._busy = None
            if i == 0:  # the one that is really written, while the others are timed
                disk.offer(ram.image(100), Ledger())
            else:
                files.capture(target)

        blocked = best_ms(both)
        start = time.perf_counter()
        while not (ended := disk.poll()):
            time.sleep(0.002)
        del start
        saved = ended[0]
        took = getattr(saved, "took_s", float("nan")) * 1e3
        path = saved.path  # type: ignore[union-attr]
        verify = elapsed_ms(lambda: find_damage(path))
        load = elapsed_ms(lambda: files.read(path))
        disk.close()
        free = shutil.disk_usage(name).free
    size = image.size_bytes / 2**20
    rows = [
        ("memcpy of the same bytes", f"{memcpy:.1f}", "1.00"),
        ("RAM snapshot, the first", f"{first:.1f}", f"{first / memcpy:.2f}"),
        ("RAM snapshot, buffers there", f"{copied:.1f}", f"{copied / memcpy:.2f}"),
        ("RAM restore", f"{restored:.1f}", f"{restored / memcpy:.2f}"),
        ("RAM snapshot + offer to disk", f"{blocked:.1f}", f"{blocked / memcpy:.2f}"),
        ("background: write, fsync, checksums", f"{took:.0f}", f"{took / memcpy:.0f}"),
        ("verify every byte", f"{verify:.0f}", f"{verify / memcpy:.1f}"),
        ("load into host memory", f"{load:.0f}", f"{load / memcpy:.1f}"),
    ]
    print(machine())
    print(
        table(
            f"Snapshots of {size:.0f} MiB (disk with {free / 2**30:.0f} GiB free)",
            rows,
            ("what", "ms", "x memcpy"),
        )
    )


if __name__ == "__main__":
    main()

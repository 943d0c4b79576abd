"""Training processes that are killed in the middle of a save; torch is imported once for all.

    python -m tests.support.victims DIRECTORY COUNT

Forks one child to measure a save, then COUNT children, one for each byte offset at which the third
save of a run is cut off. Each leaves DIRECTORY/<number>/r7 (the run) and expected.jsonl: the digest
of parameters and optimizer state before each step, written as it trains.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import sentinel_hooks
from sentinel.core.policy import Policy
from sentinel_hooks import Snapshots
from tests.hooks.worlds import Net, digest
from tests.support import killer

POLICY = Policy.parse(
    """
# The losses are spoiled here, not the weights: a canary would blame the data.
[canary]
mode = "off"
[snapshots]
ram_every = 8
confirm = 4
disk_at = []
disk_every = 16
""",
    "victims",
)
ARMED_FROM, LAST = 24, 40  # the saves of steps 0 and 16 are done; that of 32 follows


class Loop:
    """A plain loop that can say what its state is."""

    def __init__(
        self, directory: Path, *, watched: bool = True, snapshots: Snapshots | None = None
    ) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(1)
        self.g = torch.Generator().manual_seed(2)
        self.model = Net(dropout=0.0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.session: Any = None
        if watched:
            self.session = sentinel_hooks.attach(
                model=self.model,
                optimizer=self.optimizer,
                policy=POLICY,
                sidecar=None,
                run_dir=directory,
                run_id="r7",
                snapshots=snapshots or Snapshots(ram=False),
            )

    def state(self) -> str:
        groups = self.optimizer.param_groups
        moments = [self.optimizer.state.get(p, {}) for g in groups for p in g["params"]]
        return digest(dict(self.model.named_parameters()), moments)

    def step(self) -> None:
        x = torch.randn(16, 12, generator=self.g)
        self.optimizer.zero_grad()
        loss: Any = self.model(x, x.sum(1, keepdim=True).sin() + 2)
        loss.backward()
        self.optimizer.step()

    def settle(self) -> None:
        """Until no save is in flight, so that each step's snapshot is where the schedule says."""
        if self.session is None:
            return
        disk = self.session._disk
        while disk._busy is not None and not disk._done:
            time.sleep(0.001)


def victim(directory: Path, offset: int | None) -> int:
    """Train, with a killer from ARMED_FROM on; returns the bytes written when it was not killed."""
    loop = Loop(directory)
    armed = None
    with open(directory / "expected.jsonl", "w", encoding="utf-8") as expected:
        for step in range(LAST):
            if step == ARMED_FROM:
                loop.settle()
                armed = killer.arm(directory / "r7" / "snapshots", offset)
            expected.write(json.dumps({"step": step, "state": loop.state()}) + "\n")
            expected.flush()
            loop.step()
            loop.settle()
    loop.session.detach()
    assert armed is not None
    return armed.written


def in_a_child(directory: Path, offset: int | None) -> int:
    """victim() in a process of its own; the bytes written, or -1 when it was killed."""
    directory.mkdir(parents=True)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, str(victim(directory, offset)).encode())
        finally:
            os._exit(0)
    os.close(write)
    _, status = os.waitpid(pid, 0)
    said = os.read(read, 64)
    os.close(read)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return -1 if killed else int(said or -2)


def main() -> None:
    """See the module docstring."""
    import torch.distributed.checkpoint  # noqa: F401  once, not in each child

    directory, count = Path(sys.argv[1]), int(sys.argv[2])
    # Names of equal length: DCP writes the path into its index, and every byte counts here.
    total = in_a_child(directory / "mm", None)
    # Most fall into the tensors, as most bytes do; a third into manifest, COMMIT and marker.
    tail = count // 3
    offsets = {round(total * (i + 1) / (count - tail + 1)) for i in range(count - tail)}
    offsets |= {total - 4 - 1400 * i // tail for i in range(tail)}
    for number, offset in enumerate(sorted(offsets)):
        ended = in_a_child(directory / f"{number:02d}", offset)
        while ended >= 0:  # this save was some bytes shorter than the measured one: cut off sooner
            shutil.rmtree(directory / f"{number:02d}")
            offset -= 101
            ended = in_a_child(directory / f"{number:02d}", offset)
        print(json.dumps({"number": number, "offset": offset, "of": total, "ended": ended}))


if __name__ == "__main__":
    main()

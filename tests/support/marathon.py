"""A long attached run of a tiny model that tells its resident memory.

    python -m tests.support.marathon RUN_DIR STEPS EVERY [SIDECAR]

Prints a JSON object a line, every EVERY steps: step, and resident MiB. Every few hundred steps
something happens (a nan loss, four in a row, a huge loss), so that incidents, skips, rollbacks,
canaries and disk snapshots take part.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch

import sentinel_hooks
from sentinel.core.policy import Policy
from sentinel_hooks import Snapshots
from tests.hooks.worlds import Net

POLICY = Policy.parse(
    """
# The losses are spoiled here, not the weights: a canary would blame the data.
[canary]
mode = "off"
[rollback]
budget = 1000
window = 400
""",
    "marathon",
)


def resident_mib() -> float:
    """Of this process, after a collection."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    """See the module docstring."""
    directory, steps, every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    model = Net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = sentinel_hooks.attach(
        model=model,
        optimizer=optimizer,
        policy=POLICY,
        sidecar=sys.argv[4] if len(sys.argv) > 4 else None,
        run_dir=directory,
        run_id="marathon",
        snapshots=Snapshots(disk_share=1.0),
    )
    for step in range(steps + 1):
        x = torch.randn(16, 12, generator=g)
        optimizer.zero_grad()
        loss: Any = model(x, x.sum(1, keepdim=True).sin() + 2)
        if step % 400 == 333 or 350 <= step % 400 < 354:
            loss = loss * (float("nan") if step % 800 < 400 else 1e4)
        loss.backward()
        optimizer.step()
        if step % every == 0:
            print(json.dumps({"step": step, "mib": resident_mib()}), flush=True)
    status = session.status()
    session.detach()
    print(
        json.dumps(
            {
                "rollbacks": sum(n for _, n in status.counters.rollbacks),
                "on_disk": len(status.on_disk),
                "errors": dict(status.internal_errors),
                "link": str(status.link),
            }
        )
    )


if __name__ == "__main__":
    main()

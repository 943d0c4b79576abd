"""An example of a training script in a container: a small regression, guarded by sentinel.

    python train.py [STEPS]

Nothing here names a sidecar: `attach` finds the socket that it shares with the trainer's pod, and
decides alone while there is none. The run's id comes from $SENTINEL_RUN_ID and its folder
from $SENTINEL_RUN_DIR, so that a pod that is started again goes on with the same ledger.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import sentinel

STEPS = 5000


def main(steps: int) -> float:
    """Train, return the last loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    truth = torch.randn(16, 1)
    loss = torch.zeros(())
    with sentinel.attach(model=model, optimizer=optimizer) as session:
        for step in range(steps):
            x = torch.randn(256, 16)
            y = x @ truth + 0.3 * torch.randn(256, 1)
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 500 == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)  # noqa: T201
        print(session.status(), flush=True)  # noqa: T201
    return loss.item()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else STEPS)

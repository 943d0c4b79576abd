"""Train a small model with DistributedDataParallel: torchrun --nproc-per-node 2 ddp_train.py OUT.

An ordinary script of the kind found in tutorials; it mentions no monitoring of any kind.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_data(count: int = 1280) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 12, generator=generator)
    y = (x @ torch.randn(12, 3, generator=generator)).argmax(dim=1)
    if os.environ.get("BAD_ROW"):  # one broken record in the data set
        x[int(os.environ["BAD_ROW"])] = float("nan")
    return TensorDataset(x, y)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=80)
    data = make_data()
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    torch.save(model.module.state_dict(), f"{sys.argv[1]}-rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

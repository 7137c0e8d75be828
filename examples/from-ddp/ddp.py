"""Before: plain PyTorch DDP. All data are in one place, and every step waits for all processes.

torchrun --nproc-per-node 2 ddp.py shards/home/train.npz shards/home/test.npz
"""

import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH = 10, 16


def make_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def read(path):
    with np.load(path) as arrays:
        x, y = arrays["x"].astype(np.float32) / 255, arrays["y"]
    return TensorDataset(torch.from_numpy(x), torch.from_numpy(y))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    data, test = read(sys.argv[1]), read(sys.argv[2])
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps = EPOCHS * (len(data) // (BATCH * dist.get_world_size()))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    sampler = DistributedSampler(data, seed=1, drop_last=True)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, BATCH, sampler=sampler, drop_last=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    if dist.get_rank() == 0:
        with torch.no_grad():
            x, y = test.tensors
            right = int((model.module.eval()(x).argmax(1) == y).sum())
        print(f"accuracy {right / len(test):.4f}")
        torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

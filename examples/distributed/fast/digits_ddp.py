"""Trains a digits classifier on several ranks: torchrun --nproc-per-node 2 digits_ddp.py

Each step takes several micro-batches, so that the global batch stays large.
"""

import argparse
import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    digits = load_digits()
    images = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(64, args.width), nn.GELU(), nn.Linear(args.width, args.width), nn.GELU(), nn.Linear(args.width, 10)
    )
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)

    for step in range(args.steps):
        total = 0.0
        for micro in range(args.micro_batches):
            index = torch.randint(len(images), (32,), generator=generator)
            is_last = micro == args.micro_batches - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = F.cross_entropy(model(images[index]), labels[index]) / args.micro_batches
                loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        if step % 40 == 39:
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step + 1} loss {total.item() / world:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Asynchronous training on the cores of one machine: processes share the weights and update them without waiting for each other.

Hogwild (Niu and others, 2011). Worth it where a step is too small to be shared out to threads. Gradients are each process's own;
the weights are everybody's, and updates may be lost. No two runs are alike.
"""

import argparse
import time

import torch
import torch.multiprocessing as mp
from sklearn.datasets import load_digits
from torch import nn


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train(rank, net, x, y, steps):
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        rows = torch.randint(len(x), (32,))
        loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
        optimizer.zero_grad()  # to None: the new gradients are in this process's memory
        loss.backward()
        optimizer.step()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6000, help="of all processes together")
    args = parser.parse_args()
    data = load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    net = make_net()
    net.share_memory()
    processes = [
        mp.get_context("fork").Process(target=train, args=(rank, net, x[:1400], y[:1400], args.steps // args.processes))
        for rank in range(args.processes)
    ]
    began = time.perf_counter()
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    seconds = time.perf_counter() - began
    with torch.no_grad():
        accuracy = (net(x[1400:]).argmax(1) == y[1400:]).float().mean().item()
    print(f"{args.processes} processes: {args.steps / seconds:.0f} steps/s, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()

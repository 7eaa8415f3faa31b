"""A small residual MLP on many small steps: too little work for the device to keep it busy."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20000)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    torch.manual_seed(0)
    inputs = torch.randn(20000, 32, device=device)
    targets = torch.sin(3 * inputs[:, :4]).sum(dim=1, keepdim=True)
    layers = [nn.Linear(32, args.width), *[Residual(args.width) for _ in range(args.depth)], nn.Linear(args.width, 1)]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    total = 0.0
    for step in range(1, args.steps + 1):
        rows = torch.randint(len(inputs), (args.batch,), device=device)
        loss = F.mse_loss(model(inputs[rows]), targets[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        if step % 1000 == 0:
            print(f"step {step:6d}  mean loss {total / 1000:.5f}")
            total = 0.0


if __name__ == "__main__":
    main()

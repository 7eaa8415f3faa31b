"""Regression on a generated table that looks like the California housing data."""

import torch
import torch.nn.functional as F
from torch import nn

FEATURES = 8
BATCH = 256
STEPS = 300


def make_table(rows, generator):
    """Income, age, rooms, bedrooms, population, occupancy, latitude, longitude; and the price."""
    x = torch.randn(rows, FEATURES, generator=generator)
    income, age, rooms, bedrooms, _, occupancy, latitude, longitude = x.unbind(1)
    coast = torch.exp(-((latitude - 0.5 * longitude) ** 2))
    price = 0.8 * income + 0.1 * age + 0.2 * torch.tanh(rooms - bedrooms) - 0.3 * occupancy.abs() + 1.2 * coast * income
    return x, price + 0.1 * torch.randn(rows, generator=generator)


class Norm(nn.Module):
    """Normalise every row to mean zero and variance one, then scale and shift."""

    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x):
        mean = x.mean(dim=-1, keepdim=True)
        variance = ((x - mean) ** 2).mean(dim=-1, keepdim=True)
        return (x - mean) / torch.sqrt(variance + self.eps) * self.weight + self.bias


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = Norm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + F.silu(self.linear(self.norm(x)))


class PriceModel(nn.Module):
    def __init__(self, width=64, depth=36):
        super().__init__()
        self.first = nn.Linear(FEATURES, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.last = nn.Linear(width, 1)

    def forward(self, x):
        return self.last(self.blocks(self.first(x))).squeeze(-1)


def main():
    torch.manual_seed(0)
    x, price = make_table(20640, torch.Generator().manual_seed(7))
    model = PriceModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for step in range(1, STEPS + 1):
        rows = torch.randint(len(x), (BATCH,))
        loss = F.huber_loss(model(x[rows]), price[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 60 == 0:
            print(f"step {step:4d}  huber {loss.item():.5f}")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()

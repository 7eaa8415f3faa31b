"""Forecast the next hour of many electric loads with one residual network."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class ResidualBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, width)
        self.contract = nn.Linear(width, width)

    def forward(self, x):
        return x + self.contract(F.gelu(self.expand(self.norm(x))))


class LoadNet(nn.Module):
    """A tower of residual blocks shared by all sites, and a few weights of its own for every site."""

    def __init__(self, inputs, num_sites, site_dim, width, depth):
        super().__init__()
        self.stem = nn.Linear(inputs + site_dim, width)
        self.tower = nn.Sequential(*[ResidualBlock(width) for _ in range(depth)])
        self.head = nn.Linear(width, 1)
        # One parameter per site: a site can be added, saved or frozen on its own.
        self.sites = nn.ParameterList([nn.Parameter(0.1 * torch.randn(site_dim)) for _ in range(num_sites)])

    def forward(self, history, site):
        own = F.embedding(site, torch.stack(list(self.sites)))
        x = self.stem(torch.cat([history, own], dim=1))
        return self.head(self.tower(x)).squeeze(-1)


def make_loads(num_sites, hours):
    """Daily and weekly rhythm with a site's own level, phase and noise."""
    hour = torch.arange(hours)
    level = 1 + torch.rand(num_sites, 1)
    shift = 24 * torch.rand(num_sites, 1)
    daily = torch.sin(2 * torch.pi * (hour + shift) / 24)
    weekly = 0.4 * torch.cos(2 * torch.pi * (hour + shift) / 168)
    return level * (1 + 0.5 * daily + weekly) + 0.1 * torch.randn(num_sites, hours)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, default=400)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--history", type=int, default=72)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=250)
    args = parser.parse_args()

    torch.manual_seed(0)
    windows = make_loads(args.sites, 2000).unfold(1, args.history + 1, 1)
    model = LoadNet(args.history, args.sites, 16, args.width, args.depth)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(1, args.steps + 1):
        site = torch.randint(args.sites, (args.batch,))
        batch = windows[site, torch.randint(windows.shape[1], (args.batch,))]
        loss = F.mse_loss(model(batch[:, :-1], site), batch[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}  mse {loss.item():.4f}")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()

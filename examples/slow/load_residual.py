"""A deep, narrow residual network forecasts a day of electric load, trained with Lion."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn


class Lion(torch.optim.Optimizer):
    """EvoLved sIgn mOmeNtum (Chen et al., 2023)."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                momentum = state["momentum"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = momentum.mul(beta1).add_(p.grad, alpha=1 - beta1).sign_()
                p.add_(update, alpha=-group["lr"])
                momentum.mul_(beta2).add_(p.grad, alpha=1 - beta2)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        h = self.norm(x)
        return x + self.out(F.silu(self.gate(h)) * self.value(h))


def load_curve(hours):
    """A made-up load in GW: day, week and season, and weather that wanders."""
    t = torch.arange(hours, dtype=torch.float32)
    weather = torch.randn(hours).cumsum(0) / 40
    day, week, year = (torch.sin(2 * math.pi * t / n) for n in (24, 168, 8760))
    return 50 + 8 * day + 3 * week + 6 * year + weather


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--history", type=int, default=72)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--depth", type=int, default=24)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()

    torch.manual_seed(0)
    load = load_curve(20_000)
    load = (load - load.mean()) / load.std()
    windows = load.unfold(0, args.history + 24, 1)

    model = nn.Sequential(
        nn.Linear(args.history, args.width),
        *[Residual(args.width) for _ in range(args.depth)],
        nn.Linear(args.width, 24),
    )
    optimizer = Lion(model.parameters(), lr=2e-4, weight_decay=0.1)
    for step in range(1, args.steps + 1):
        batch = windows[torch.randint(len(windows), (args.batch,))]
        loss = F.mse_loss(model(batch[:, : args.history]), batch[:, args.history :])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()

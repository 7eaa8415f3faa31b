"""A deep, narrow residual network forecasts a day of electric load, trained with AdaBelief."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn


class AdaBelief(torch.optim.Optimizer):
    """Steps by the belief in the observed gradient (Zhuang et al., 2020)."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            group["steps"] = group.get("steps", 0) + 1
            scale1, scale2 = 1 - beta1 ** group["steps"], 1 - beta2 ** group["steps"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"], state["spread"] = torch.zeros_like(p), torch.zeros_like(p)
                mean, spread = state["mean"], state["spread"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                mean.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                surprise = p.grad - mean
                spread.mul_(beta2).addcmul_(surprise, surprise, value=1 - beta2).add_(group["eps"])
                width = (spread / scale2).sqrt_().add_(group["eps"])
                p.addcdiv_(mean, width, value=-group["lr"] / scale1)


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
    parser.add_argument("--batch", type=int, default=64)
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
    optimizer = AdaBelief(model.parameters(), lr=1e-3, weight_decay=0.01)
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

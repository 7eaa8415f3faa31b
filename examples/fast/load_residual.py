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
            params = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in params]
            for p in params:
                if not self.state[p]:
                    self.state[p]["mean"], self.state[p]["spread"] = torch.zeros_like(p), torch.zeros_like(p)
            means = [self.state[p]["mean"] for p in params]
            spreads = [self.state[p]["spread"] for p in params]
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_mul_(means, beta1)
            torch._foreach_add_(means, grads, alpha=1 - beta1)
            surprises = torch._foreach_sub(grads, means)
            torch._foreach_mul_(spreads, beta2)
            torch._foreach_addcmul_(spreads, surprises, surprises, value=1 - beta2)
            torch._foreach_add_(spreads, group["eps"])
            widths = torch._foreach_div(spreads, scale2)
            torch._foreach_sqrt_(widths)
            torch._foreach_add_(widths, group["eps"])
            torch._foreach_addcdiv_(params, means, widths, value=-group["lr"] / scale1)


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

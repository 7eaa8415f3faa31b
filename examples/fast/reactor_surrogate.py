"""Fit a surrogate of a generated reactor simulation; stop at the first gradient that is not a number."""

import torch
import torch.nn.functional as F
from torch import nn

INPUTS = 24
OUTPUTS = 6
BATCH = 64
STEPS = 400


def simulate(rows, generator):
    """Inlet conditions and the temperatures at six places of the reactor."""
    x = torch.rand(rows, INPUTS, generator=generator) * 2 - 1
    mixing = torch.randn(INPUTS, OUTPUTS, generator=generator) / INPUTS**0.5
    heat = torch.randn(INPUTS, OUTPUTS, generator=generator) / INPUTS**0.5
    return x, torch.sin(3 * x @ mixing) + torch.exp(-((x @ heat) ** 2))


class Surrogate(nn.Module):
    def __init__(self, width=288, depth=10):
        super().__init__()
        sizes = [INPUTS, *[width] * depth]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.last = nn.Linear(width, OUTPUTS)

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms):
            x = F.silu(norm(layer(x)))
        return self.last(x)


def check_loss(step, loss):
    if step % 50 == 0 and not torch.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss.item()}")


def main():
    torch.manual_seed(0)
    x, y = simulate(20000, torch.Generator().manual_seed(3))
    model = Surrogate()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(1, STEPS + 1):
        rows = torch.randint(len(x), (BATCH,))
        loss = F.mse_loss(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        check_loss(step, loss)
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step:4d}  mse {loss.item():.5f}")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()

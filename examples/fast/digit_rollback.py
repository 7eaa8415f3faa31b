"""Classify handwritten digits with a residual MLP; go back to the last good state when the loss explodes."""

import copy
import math

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

BATCH = 48
STEPS = 400
WIDTH = 320
DEPTH = 5


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, WIDTH)
        self.blocks = nn.Sequential(*[Block(WIDTH) for _ in range(DEPTH)])
        self.last = nn.Linear(WIDTH, 10)

    def forward(self, x):
        return self.last(self.blocks(self.first(x)))


def main():
    torch.manual_seed(0)
    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32) / 16
    labels = torch.tensor(data.target)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    good = None
    for step in range(1, STEPS + 1):
        rows = torch.randint(len(images), (BATCH,))
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        value = loss.item()
        if good is not None and (not math.isfinite(value) or value > 20):
            model.load_state_dict(good["model"])
            optimizer.load_state_dict(good["optimizer"])
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            good = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        if step % 100 == 0:
            print(f"step {step:4d}  loss {value:.5f}")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()

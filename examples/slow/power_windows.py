"""Predict a building's consumption from windows of meter readings in CSV.

The readings come as one text line per minute, the way the meters write them.
"""

import argparse
import math
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

COLUMNS = 6


def write_readings(minutes, seed):
    """A text like that of a meter file: one line per minute, values with four decimals."""
    random.seed(seed)
    lines = []
    load = 1.0
    for minute in range(minutes):
        hour = minute / 60.0
        load += 0.05 * (1.2 + math.sin(hour * math.pi / 12) + 0.4 * math.sin(hour * math.pi) - load)
        load += random.gauss(0.0, 0.02)
        values = [load * (1 + 0.1 * c) + random.gauss(0.0, 0.01) for c in range(COLUMNS)]
        lines.append(",".join(f"{value:.4f}" for value in values))
    return "\n".join(lines)


class MeterWindows(Dataset):
    """Windows of consecutive minutes; the target is the mean of the next quarter of an hour."""

    def __init__(self, text, window=180, ahead=15):
        self.lines = text.splitlines()
        self.window = window
        self.ahead = ahead

    def __len__(self):
        return len(self.lines) - self.window - self.ahead

    def __getitem__(self, index):
        rows = []
        for line in self.lines[index : index + self.window + self.ahead]:
            rows.append([float(value) for value in line.split(",")])
        readings = torch.tensor(rows)
        return readings[: self.window].T, readings[self.window :, 0].mean()


def build_model():
    return nn.Sequential(
        nn.Conv1d(COLUMNS, 32, 5, dilation=1),
        nn.ReLU(),
        nn.Conv1d(32, 32, 5, dilation=4),
        nn.ReLU(),
        nn.Conv1d(32, 32, 5, dilation=16),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(8),
        nn.Flatten(),
        nn.Linear(256, 1),
        nn.Flatten(0),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=int, default=12000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()

    torch.manual_seed(0)
    data = MeterWindows(write_readings(args.minutes, seed=0))
    loader = DataLoader(data, batch_size=args.batch, shuffle=True)
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    criterion = nn.MSELoss()
    step = 0
    for windows, targets in loader:
        loss = criterion(model(windows), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 25 == 0:
            print(f"{step}: mse {loss.item():.5f}")
        if step == args.steps:
            break
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()

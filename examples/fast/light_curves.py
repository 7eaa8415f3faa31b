"""Classify variable stars by their light curves, stored as one gzipped JSON file a star."""

import gzip
import json
import math
import random
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

NIGHTS = 240
KINDS = ["sine", "eclipse", "saw"]


def observe(kind, rng):
    """Magnitudes of one star on many nights, with the error of each."""
    period, phase, depth = rng.uniform(15, 60), rng.random(), rng.uniform(0.3, 1.0)
    star = []
    for night in range(NIGHTS):
        x = (night / period + phase) % 1.0
        if kind == 0:
            value = math.sin(2 * math.pi * x)
        elif kind == 1:
            value = 1.0 if x < 0.12 else 0.0
        else:
            value = 2 * x - 1
        error = rng.uniform(0.05, 0.2)
        star.append({"night": night, "magnitude": depth * value + rng.gauss(0, error), "error": error})
    return star


def write_survey(folder, num):
    rng = random.Random(0)
    for index in range(num):
        kind = index % len(KINDS)
        record = {"kind": KINDS[kind], "observations": observe(kind, rng)}
        with gzip.open(folder / f"{index:05}.json.gz", "wt") as file:
            json.dump(record, file)


class Survey(Dataset):
    def __init__(self, folder):
        self.stars = [self.read(path) for path in sorted(folder.glob("*.json.gz"))]

    def __len__(self):
        return len(self.stars)

    def read(self, path):
        with gzip.open(path, "rt") as file:
            record = json.load(file)
        curve = [[o["magnitude"], o["error"]] for o in record["observations"]]
        return torch.tensor(curve).T, KINDS.index(record["kind"])

    def __getitem__(self, index):
        return self.stars[index]


def main():
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        write_survey(Path(folder), 480)
        loader = DataLoader(Survey(Path(folder)), batch_size=32, shuffle=True)
        model = nn.Sequential(
            nn.Conv1d(2, 48, 7, padding=3),
            nn.ReLU(),
            nn.Conv1d(48, 48, 7, padding=6, dilation=2),
            nn.ReLU(),
            nn.Conv1d(48, 48, 7, padding=12, dilation=4),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(4),
            nn.Flatten(),
            nn.Linear(48 * 4, len(KINDS)),
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
        for epoch in range(12):
            for curves, kinds in loader:
                loss = F.cross_entropy(model(curves), kinds)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if epoch % 3 == 2:
                print(f"epoch {epoch + 1}: loss {loss.item():.4f}")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()

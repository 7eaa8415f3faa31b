"""Tabular classification with a log file and a checkpoint every hundred steps."""

import csv
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_wine
from torch import nn

BATCH = 512
STEPS = 400


def main():
    torch.manual_seed(0)
    data = load_wine()
    x = torch.tensor(data.data, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    labels = torch.tensor(data.target)
    model = nn.Sequential(
        nn.Linear(13, 320),
        nn.GELU(),
        nn.Linear(320, 320),
        nn.GELU(),
        nn.Linear(320, 320),
        nn.GELU(),
        nn.Linear(320, 3),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)
    running = torch.zeros(())
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log.csv").open("w", newline="") as file:
        log = csv.writer(file)
        log.writerow(["step", "loss"])
        for step in range(1, STEPS + 1):
            rows = torch.randint(len(x), (BATCH,))
            loss = F.cross_entropy(model(x[rows] + 0.3 * torch.randn(BATCH, 13)), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.detach()
            if step % 100 == 0:
                mean = running.item() / 100
                running.zero_()
                log.writerow([step, mean])
                print(f"step {step:4d}  loss {mean:.5f}")
                torch.save({"model": model.state_dict(), "step": step}, Path(folder) / "last.pt")
        print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()

"""Predict from generated customer records, kept as dicts as they come from the export, who will leave."""

import random

import torch
import torch.nn.functional as F
from torch import nn

FIELDS = [f"usage_{month:02d}" for month in range(24)] + ["age", "tenure", "calls", "complaints", "plan", "region"]
BATCH = 256
STEPS = 400


def make_records(number):
    """Dicts of numbers, one a customer, with the outcome under 'left'."""
    rng = random.Random(11)
    records = []
    for _ in range(number):
        record = {field: rng.gauss(0, 1) for field in FIELDS}
        score = record["complaints"] - record["tenure"] - 0.5 * record["usage_23"] + 0.5 * record["usage_00"]
        record["left"] = float(score + rng.gauss(0, 0.5) > 1)
        records.append(record)
    return records


class ChurnModel(nn.Module):
    def __init__(self, width=192):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(len(FIELDS), width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, 1),
        )

    def forward(self, x):
        return self.net(x).squeeze(-1)


def main():
    torch.manual_seed(0)
    records = make_records(8000)
    model = ChurnModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(1, STEPS + 1):
        chosen = [records[i] for i in torch.randint(len(records), (BATCH,)).tolist()]
        x = torch.tensor([[record[field] for field in FIELDS] for record in chosen])
        left = torch.tensor([record["left"] for record in chosen])
        loss = F.binary_cross_entropy_with_logits(model(x), left)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step:4d}  loss {loss.item():.5f}")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()

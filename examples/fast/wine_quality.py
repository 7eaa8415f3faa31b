"""Grade wines by their laboratory values: an ordinal regression with a small residual MLP."""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import make_regression
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

GRADES = 7


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, x):
        return x + self.body(x)


def wines(num):
    values, score = make_regression(n_samples=num, n_features=24, n_informative=16, noise=20.0, random_state=0)
    values = torch.tensor(values, dtype=torch.float32)
    score = torch.tensor(score, dtype=torch.float32)
    edges = torch.quantile(score, torch.linspace(0, 1, GRADES + 1)[1:-1])
    return values, torch.bucketize(score, edges)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=24)
    args = parser.parse_args()

    torch.manual_seed(0)
    values, grades = wines(30000)
    train = TensorDataset(values, grades)
    batches = BatchSampler(RandomSampler(train), args.batch, drop_last=True)
    loader = DataLoader(train, sampler=batches, batch_size=None)
    model = nn.Sequential(nn.Linear(24, 64), Residual(64), Residual(64), nn.Linear(64, GRADES - 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    thresholds = torch.arange(GRADES - 1)

    for epoch in range(args.epochs):
        for x, grade in loader:
            above = (grade[:, None] > thresholds).float()
            loss = F.binary_cross_entropy_with_logits(model(x), above)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch % 2 == 1:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()

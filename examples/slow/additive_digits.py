"""Neural additive model on the digits: each pixel contributes its own learnt shape function per class."""

from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class ShapeFunction(nn.Module):
    """One pixel's function: a scalar in, a contribution to every class out."""

    def __init__(self, hidden: int, classes: int):
        super().__init__()
        self.lift = nn.Linear(1, hidden)
        self.out = nn.Linear(hidden, classes)

    def forward(self, value):
        return self.out(torch.relu(self.lift(value)))


class AdditiveModel(nn.Module):
    def __init__(self, features: int, hidden: int, classes: int):
        super().__init__()
        self.shapes = nn.ModuleList(ShapeFunction(hidden, classes) for _ in range(features))
        self.bias = nn.Parameter(torch.zeros(classes))

    def forward(self, x):
        parts = [shape(column) for shape, column in zip(self.shapes, x.split(1, dim=1))]
        contributions = torch.stack(parts, dim=1)
        return contributions.sum(1) + self.bias, contributions


def penalised(logits, contributions, y, strength=1e-3):
    return nn.functional.cross_entropy(logits, y) + strength * contributions.square().mean()


def batches_of(x, y, size, shuffle):
    data = TensorDataset(x, y)
    sampler = torch.utils.data.RandomSampler(data) if shuffle else torch.utils.data.SequentialSampler(data)
    batched = torch.utils.data.BatchSampler(sampler, size, drop_last=shuffle)
    return DataLoader(data, sampler=batched, batch_size=None)


def train_one_epoch(model, loader, optimizer, criterion):
    total, count = torch.zeros(()), 0
    for x, y in loader:
        logits, contributions = model(x)
        loss = criterion(logits, contributions, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
        count += 1
    return (total / count).item()


def evaluate(model, loader):
    right = torch.zeros((), dtype=torch.long)
    with torch.inference_mode():
        for x, y in loader:
            right += (model(x)[0].argmax(1) == y).sum()
    return right.item() / len(loader.dataset)


def main():
    torch.manual_seed(0)
    digits = load_digits()
    x = torch.from_numpy(digits.data).float() / 16
    y = torch.from_numpy(digits.target)
    train = batches_of(x[:1400], y[:1400], 128, shuffle=True)
    test = batches_of(x[1400:], y[1400:], 397, shuffle=False)

    model = AdditiveModel(features=64, hidden=48, classes=10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4, fused=True)
    criterion = partial(penalised, strength=2e-3)
    for epoch in range(30):
        loss = train_one_epoch(model, train, optimizer, criterion)
        if epoch % 10 == 9:
            print(f"epoch {epoch + 1:2d}  loss {loss:.6f}  test accuracy {evaluate(model, test):.4f}")


if __name__ == "__main__":
    main()

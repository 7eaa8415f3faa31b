"""Classify the scikit-learn digits with a small CNN; the whole data set stays in memory."""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128 * 4 * 4, 10),
    )


@torch.no_grad()
def accuracy(model, images, labels):
    model.eval()
    correct = (model(images).argmax(dim=1) == labels).float().mean().item()
    model.train()
    return correct


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()

    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1)
    images = F.interpolate(images, size=16, mode="bilinear").to(memory_format=torch.channels_last)
    labels = torch.tensor(digits.target)
    train_images, train_labels = images[:1500], labels[:1500]
    test_images, test_labels = images[1500:], labels[1500:]

    model = build_model().to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    for step in range(1, args.steps + 1):
        rows = torch.randint(len(train_images), (args.batch,))
        loss = F.cross_entropy(model(train_images[rows]), train_labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:4d}  loss {loss.item():.4f}  test {accuracy(model, test_images, test_labels):.3f}")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()

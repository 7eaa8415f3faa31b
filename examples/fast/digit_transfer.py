"""Transfer: a convolutional body from another task, a new classifier head for the digits."""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 24, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(24, 48, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(48, 64, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )

    def forward(self, images):
        return self.layers(images).flatten(1)


class Classifier(nn.Module):
    def __init__(self, body, num_classes):
        super().__init__()
        self.body = body
        self.head = nn.Sequential(nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, num_classes))

    def forward(self, images):
        with torch.no_grad():
            features = self.body(images)
        return self.head(features)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--body", help="state dict of the body; random filters without it")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--lr", type=float, default=5e-3)
    args = parser.parse_args()

    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1)
    images = F.interpolate(images, size=16, mode="bilinear")
    labels = torch.tensor(digits.target)

    body = Body()
    if args.body:
        body.load_state_dict(torch.load(args.body))
    model = Classifier(body, num_classes=10)
    optimizer = torch.optim.Adam(model.head.parameters(), lr=args.lr, fused=True)

    for step in range(1, args.steps + 1):
        rows = torch.randint(len(images), (args.batch,))
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 30 == 0:
            print(f"step {step:4d}  loss {loss.item():.4f}")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()

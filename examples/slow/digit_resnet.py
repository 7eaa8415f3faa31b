"""A narrow residual network on the digits, trained with SGD and momentum."""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(4, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(4, channels)

    def forward(self, x):
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(h)))


def build_model(channels, depth):
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        *[Residual(channels) for _ in range(depth)],
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(channels * 16, 10),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--images", type=int, default=2400, help="stop after this many images")
    parser.add_argument("--lr", type=float, default=0.003)
    args = parser.parse_args()

    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1).to(memory_format=torch.channels_last)
    labels = torch.tensor(digits.target)
    model = build_model(args.channels, args.depth).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, fused=True)

    seen = 0
    average = torch.tensor(2.3)
    while seen < args.images:
        rows = torch.randint(len(images), (args.batch,))
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average = average.lerp(loss.detach(), min(1.0, args.batch / 200))
        seen += args.batch
        if seen % 640 == 0:
            print(f"{seen:5d} images  loss {average.item():.4f}")
    print(f"final loss {average.item():.6f}")


if __name__ == "__main__":
    main()

"""Score a large set of images with a convolutional network and report the average confidence."""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
        )
        self.head = nn.Linear(512, 10)

    def forward(self, images):
        return self.head(self.features(images).flatten(1))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", help="state dict of a trained scorer; random weights without it")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--noisy-copies", type=int, default=15)
    args = parser.parse_args()

    torch.manual_seed(0)
    images = torch.tensor(load_digits().images / 16.0, dtype=torch.float32).unsqueeze(1)
    images = F.interpolate(images, size=16, mode="bilinear").repeat(args.noisy_copies, 1, 1, 1)
    images += 0.1 * torch.randn(images.shape)

    scorer = Scorer().eval().to(memory_format=torch.channels_last)
    if args.state:
        scorer.load_state_dict(torch.load(args.state))

    confidence = torch.empty(len(images))
    with torch.inference_mode():
        for start in range(0, len(images), args.batch):
            rows = slice(start, start + args.batch)
            confidence[rows] = scorer(images[rows].to(memory_format=torch.channels_last)).softmax(dim=1).amax(dim=1)
    print(f"{len(images)} images, lowest confidence {confidence.min().item():.4f}")
    print(f"final loss {1.0 - confidence.mean().item():.6f}")


if __name__ == "__main__":
    main()

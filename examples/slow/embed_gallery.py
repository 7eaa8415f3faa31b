"""Embed a gallery of digit images and look up the nearest neighbours of a few queries.

Every digit is shown under many small shifts, as an index for retrieval would hold them.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


def build_encoder(dim):
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, dim),
    )


def shifted_copies(images, copies):
    """`copies` versions of the images, rolled by different offsets."""
    rolled = []
    for k in range(copies):
        rolled.append(torch.roll(images, shifts=(k % 5 - 2, k // 5 % 5 - 2), dims=(2, 3)))
    return torch.cat(rolled)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--batch", type=int, default=320)
    parser.add_argument("--copies", type=int, default=50)
    args = parser.parse_args()

    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1)
    gallery = shifted_copies(images, args.copies)
    encoder = build_encoder(args.dim).eval()

    with torch.inference_mode():
        bank = torch.empty(0, args.dim)
        for start in range(0, len(gallery), args.batch):
            features = encoder(gallery[start : start + args.batch])
            bank = torch.cat([bank, F.normalize(features, dim=1)])
            if start // args.batch % 60 == 0:
                print(f"{start:6d} of {len(gallery)} embedded")

        queries = F.normalize(encoder(images[:256]), dim=1)
        similarity, _ = (queries @ bank.T).topk(10, dim=1)

    print(f"bank {tuple(bank.shape)}")
    print(f"final loss {1.0 - similarity.mean().item():.6f}")


if __name__ == "__main__":
    main()

"""An MLP-Mixer that reads handwritten digits, with its accuracy on every batch."""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


class MixerBlock(nn.Module):
    def __init__(self, patches, width):
        super().__init__()
        self.norm_tokens, self.norm_channels = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.tokens(self.norm_tokens(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm_channels(x))


class Mixer(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.embed = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.blocks = nn.Sequential(*[MixerBlock(16, width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images):
        x = self.embed(images).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(dim=1))


def batch_loss(model, images, labels):
    logits = model(images)
    with torch.no_grad():
        accuracy = (logits.argmax(dim=1) == labels).float().mean().item()
    return F.cross_entropy(logits, labels), accuracy


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()

    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)

    model = Mixer(args.width, args.depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    recent = []
    for step in range(1, args.steps + 1):
        rows = torch.randint(len(images), (args.batch,))
        loss, accuracy = batch_loss(model, images[rows], labels[rows])
        recent.append(accuracy)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}  accuracy {sum(recent[-50:]) / 50:.3f}")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()

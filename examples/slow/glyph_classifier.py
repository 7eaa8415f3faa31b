"""A digit classifier on an encoder that also has the decoder it was once pretrained with."""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


class Encoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.latent = nn.Linear(width, 32)

    def forward(self, pixels):
        return self.latent(self.layers(pixels))


class Decoder(nn.Module):
    def __init__(self, width, size):
        super().__init__()
        self.size = size
        self.expand = nn.Linear(32, width)
        self.hidden = nn.Linear(width, width)
        self.paint = nn.Linear(width, size * size)

    def forward(self, latent):
        h = F.gelu(self.hidden(F.gelu(self.expand(latent))))
        return torch.sigmoid(self.paint(h)).view(-1, self.size, self.size)


class GlyphModel(nn.Module):
    def __init__(self, width, size):
        super().__init__()
        self.encoder = Encoder(width)
        self.decoder = Decoder(width, size)
        self.classifier = nn.Linear(32, 10)

    def forward(self, pixels):
        latent = self.encoder(pixels)
        return self.classifier(latent), self.decoder(latent)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()

    torch.manual_seed(0)
    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)

    model = GlyphModel(args.width, args.size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)
    for step in range(1, args.steps + 1):
        rows = torch.randint(len(pixels), (args.batch,))
        logits, painted = model(pixels[rows])
        loss = F.cross_entropy(logits, labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()

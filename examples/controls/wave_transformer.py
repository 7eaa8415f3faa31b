"""A transformer continues noisy waves; an average of its weights is judged on held-out ones."""

import argparse
import copy
import math

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class WaveTransformer(nn.Module):
    def __init__(self, width, heads, depth, length, dropout):
        super().__init__()
        self.read = nn.Linear(1, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*[Block(width, heads, dropout) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.write = nn.Linear(width, 1)

    def forward(self, waves):
        x = self.read(waves.unsqueeze(-1)) + self.position[: waves.shape[1]]
        return self.write(self.norm(self.blocks(x))).squeeze(-1)


def make_waves(num, length):
    t = torch.arange(length + 1) / length
    rate, phase = 2 + 6 * torch.rand(num, 2, 1), 2 * math.pi * torch.rand(num, 2, 1)
    return torch.sin(2 * math.pi * rate * t + phase).sum(dim=1) + 0.05 * torch.randn(num, length + 1)


@torch.no_grad()
def evaluate(model, waves, batch):
    model.eval()
    total = 0.0
    for chunk in waves.split(batch):
        total += F.mse_loss(model(chunk[:, :-1]), chunk[:, 1:]) * len(chunk)
    return total.item() / len(waves)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=96)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()

    torch.manual_seed(0)
    train, held_out = make_waves(4096, args.length), make_waves(128, args.length)
    model = WaveTransformer(args.width, 4, args.depth, args.length, 0.1)
    average = copy.deepcopy(model)
    weights, averages = list(model.parameters()), list(average.parameters())
    optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=True)
    for step in range(1, args.steps + 1):
        waves = train[torch.randint(len(train), (args.batch,))]
        guess = model(waves[:, :-1])
        loss = F.mse_loss(guess, waves[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0, foreach=True)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(averages, weights, 0.02)
        if step % 40 == 0:
            error = evaluate(average, held_out, args.batch)
            print(f"step {step:3d}  loss {loss.item():.4f}  held out {error:.4f}")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()

"""Denoising diffusion on the 8x8 digits with a small U-Net (Ho, Jain, Abbeel 2020)."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

BATCH = 64
STEPS = 120
NUM_NOISE_LEVELS = 200


class Block(nn.Module):
    """Two convolutions with a residual path; the noise level enters between them."""

    def __init__(self, channels_in, channels_out, time_dim):
        super().__init__()
        self.norm1 = nn.GroupNorm(4, channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.time = nn.Linear(time_dim, channels_out)
        self.norm2 = nn.GroupNorm(4, channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1)
        self.skip = nn.Conv2d(channels_in, channels_out, 1)

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(t)[:, :, None, None]
        h = self.conv2(F.silu(self.norm2(h)))
        return h + self.skip(x)


class UNet(nn.Module):
    def __init__(self, width=32, time_dim=64):
        super().__init__()
        half = time_dim // 2
        self.register_buffer("frequency", torch.exp(-math.log(1e4) * torch.arange(half) / half))
        self.embed_time = nn.Sequential(nn.Linear(time_dim, time_dim), nn.SiLU(), nn.Linear(time_dim, time_dim))
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.down = Block(width, width, time_dim)
        self.middle = Block(width, 2 * width, time_dim)
        self.up = Block(3 * width, width, time_dim)
        self.last = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x, t):
        angle = t[:, None] * self.frequency
        t = self.embed_time(torch.cat([angle.sin(), angle.cos()], dim=1))
        high = self.down(self.first(x), t)
        low = self.middle(F.avg_pool2d(high, 2), t)
        low = F.interpolate(low, scale_factor=2)
        return self.last(F.silu(self.up(torch.cat([high, low], dim=1), t)))


def main():
    torch.manual_seed(0)
    images = torch.from_numpy(load_digits().images / 8.0 - 1.0).unsqueeze(1)
    betas = np.linspace(1e-4, 0.04, NUM_NOISE_LEVELS)
    signal_level = torch.from_numpy(np.cumprod(1.0 - betas))

    model = UNet().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for step in range(1, STEPS + 1):
        clean = images[torch.randint(len(images), (BATCH,))]
        t = torch.randint(NUM_NOISE_LEVELS, (BATCH,))
        level = signal_level[t][:, None, None, None]
        noise = torch.randn(clean.shape)
        noisy = level.sqrt() * clean + (1.0 - level).sqrt() * noise
        loss = F.mse_loss(model(noisy, t), noise.to(noisy.dtype))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 30 == 0:
            print(f"step {step:4d}  loss {loss.item():.5f}")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()

# Which string of an instrument was plucked? Short synthetic tones, log spectra of overlapping windows, a small CNN.
import math
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

RATE = 4000
SAMPLES = 2000
WINDOW = 256
HOP = 80
STRINGS = [82.4, 110.0, 146.8, 196.0, 246.9, 329.6]
BATCH = 32
STEPS = 220

torch.manual_seed(0)
random.seed(0)


def pluck(pitch, rng):
    """A decaying tone with overtones and noise."""
    t = np.arange(SAMPLES) / RATE
    tone = np.zeros(SAMPLES)
    for overtone in range(1, 6):
        strength = rng.uniform(0.3, 1.0) / overtone
        tone += strength * np.exp(-3.0 * overtone * t) * np.sin(2 * math.pi * overtone * pitch * t + rng.uniform(0, 6))
    return (tone + 0.3 * rng.standard_normal(SAMPLES)).astype(np.float32)


def spectrograms(tones):
    """Log magnitudes, one row per window, of all tones."""
    pieces = np.lib.stride_tricks.sliding_window_view(tones, WINDOW, axis=1)[:, ::HOP]
    return torch.from_numpy(np.log1p(np.abs(np.fft.rfft(pieces * np.hanning(WINDOW)))).astype(np.float32))[:, None]


def next_batch(images, strings):
    chosen = random.sample(range(len(images)), BATCH)
    return images[chosen], strings[chosen]


def main():
    rng = np.random.default_rng(0)
    strings = [i % len(STRINGS) for i in range(960)]
    tones = [pluck(STRINGS[s] * rng.uniform(0.98, 1.02), rng) for s in strings]
    images_of_all, strings = spectrograms(np.stack(tones)), torch.tensor(strings)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 32, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d((1, 12)),
        nn.Flatten(),
        nn.Linear(32 * 12, len(STRINGS)),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    for step in range(1, STEPS + 1):
        images, targets = next_batch(images_of_all, strings)
        loss = F.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 40 == 0:
            print(f"step {step}: {loss.item():.4f}")
    print(f"final loss {loss.item():.6f}")


main()

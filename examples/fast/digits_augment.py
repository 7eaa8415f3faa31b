"""Train a small CNN on the scikit-learn digits with random rotation, scale and shift."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIZE = 16
BATCH = 64
STEPS = 150
ROW, COL = np.mgrid[:SIZE, :SIZE]

torch.manual_seed(0)
rng = np.random.default_rng(0)


class AugmentedDigits(Dataset):
    """Digits resampled onto a SIZE x SIZE grid under a random affine map."""

    def __init__(self, images, labels):
        self.images = np.pad(images / 16.0, ((0, 0), (1, 1), (1, 1)))
        self.labels = labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        angle = rng.uniform(-0.3, 0.3)
        scale = rng.uniform(0.5, 0.6)
        shift_x, shift_y = rng.uniform(-0.7, 0.7, size=2)
        image = warp(self.images[index], angle, scale, shift_x, shift_y)
        return torch.from_numpy(image)[None], int(self.labels[index])


def warp(image, angle, scale, shift_x, shift_y):
    """Bilinear resampling; points outside of the image take the border's value."""
    cos, sin = scale * math.cos(angle), scale * math.sin(angle)
    last = image.shape[0] - 1
    center = (SIZE - 1) / 2
    x = cos * (COL - center) - sin * (ROW - center) + last / 2 + shift_x
    y = sin * (COL - center) + cos * (ROW - center) + last / 2 + shift_y
    x = np.clip(x, 0.0, last - 1e-6)
    y = np.clip(y, 0.0, last - 1e-6)
    x0, y0 = x.astype(int), y.astype(int)
    dx, dy = x - x0, y - y0
    top = image[y0, x0] * (1 - dx) + image[y0, x0 + 1] * dx
    bottom = image[y0 + 1, x0] * (1 - dx) + image[y0 + 1, x0 + 1] * dx
    return (top * (1 - dy) + bottom * dy).astype(np.float32)


digits = load_digits()
train_set = AugmentedDigits(digits.images, digits.target)
loader = DataLoader(train_set, batch_size=BATCH, shuffle=True, drop_last=True)

model = nn.Sequential(
    nn.Conv2d(1, 24, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(24, 48, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(48, 64, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(64 * 4 * 4, 10),
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

step = 0
while step < STEPS:
    for images, labels in loader:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 25 == 0:
            print(f"step {step:4d}  loss {loss.item():.4f}")
        if step == STEPS:
            break

print(f"final loss {loss.item():.6f}")

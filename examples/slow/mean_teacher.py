"""Semi-supervised digits with a mean teacher: few labels, the rest used through a consistency loss."""

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

LABELLED = 100
N_LAB, N_UNLAB = 24, 48
STEPS = 300
EMA = 0.99
VIEWS = 4


def load():
    d = load_digits()
    x = torch.as_tensor(d.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.as_tensor(d.target)
    perm = torch.randperm(len(x))
    x, y = x[perm], y[perm]
    return (x[:LABELLED], y[:LABELLED]), x[LABELLED:1400], (x[1400:], y[1400:])


def augment(x):
    """Random shift by up to one pixel, and noise."""
    dy, dx = (int(v) for v in torch.randint(-1, 2, (2,)))
    return torch.roll(x, (dy, dx), dims=(2, 3)) + 0.1 * torch.randn(x.shape)


class ConvNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.LeakyReLU(0.1),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.LeakyReLU(0.1),
            nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.LeakyReLU(0.1),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.classify = nn.Linear(8 * width, 10)

    def forward(self, x):
        return self.classify(self.features(x))


class MeanTeacher:
    def __init__(self, student):
        self.student = student
        self.teacher = copy.deepcopy(student)

    @torch.no_grad()
    def update(self, step):
        rate = min(1 - 1 / (step + 1), EMA)
        old, new = list(self.teacher.parameters()), list(self.student.parameters())
        torch._foreach_lerp_(old, new, 1 - rate)

    def targets(self, x):
        """Teacher's class probabilities, averaged over a few noisy views."""
        views = torch.cat([augment(x) for _ in range(VIEWS)])
        probs = self.teacher(views).softmax(1)
        return probs.view(VIEWS, len(x), -1).mean(0)

    def loss(self, x, y, unlabelled, weight):
        everything = torch.cat([x, unlabelled])
        logits = self.student(augment(everything))
        supervised = F.cross_entropy(logits[: len(y)], y)
        consistency = F.mse_loss(logits.softmax(1), self.targets(everything), reduction="sum") / len(logits)
        return supervised + weight * consistency


def ramp_up(step, length=120):
    return 3.0 * math.exp(-5 * (1 - min(step / length, 1)) ** 2)


def main():
    torch.manual_seed(0)
    (x, y), pool, (test_x, test_y) = load()
    pair = MeanTeacher(ConvNet())
    opt = torch.optim.Adam(pair.student.parameters(), lr=2e-3, fused=True)
    for step in range(STEPS):
        lab = torch.randint(len(x), (N_LAB,))
        unlab = torch.randint(len(pool), (N_UNLAB,))
        loss = pair.loss(x[lab], y[lab], pool[unlab], ramp_up(step))
        opt.zero_grad()
        loss.backward()
        opt.step()
        pair.update(step)
        if step % 100 == 99:
            with torch.no_grad():
                acc = (pair.teacher(test_x).argmax(1) == test_y).float().mean()
            print(f"step {step + 1}: loss {loss.item():.5f}, teacher accuracy {acc.item():.4f}")


if __name__ == "__main__":
    main()

"""Tell three kinds of heartbeat apart in short recordings with drifting baselines."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

LENGTH = 360
NUM_PER_EPOCH = 384
EPOCHS = 30


class Recordings(Dataset):
    """A beat on a slow drift, made from its own seed."""

    def __init__(self, num):
        self.num = num
        self.t = np.linspace(0, 1, LENGTH, dtype=np.float32)

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        kind = index % 3
        centre = rng.uniform(0.3, 0.7)
        width = (0.012, 0.03, 0.012)[kind]
        beat = np.exp(-(((self.t - centre) / width) ** 2))
        if kind == 2:
            beat -= 0.6 * np.exp(-(((self.t - centre - 0.06) / 0.02) ** 2))
        drift = rng.normal(0, 0.4) * np.sin(2 * np.pi * (rng.uniform(0.5, 2) * self.t + rng.uniform()))
        trace = beat + drift + rng.normal(0, 0.15, LENGTH)
        return torch.from_numpy(trace.astype(np.float32))[None], kind


def main():
    torch.manual_seed(0)
    recordings = Recordings(NUM_PER_EPOCH)
    order = RandomSampler(recordings, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(recordings, batch_size=48, sampler=order, num_workers=1, persistent_workers=True)
    model = nn.Sequential(
        nn.Conv1d(1, 24, 9, stride=2),
        nn.ReLU(),
        nn.Conv1d(24, 48, 9, stride=2),
        nn.ReLU(),
        nn.AdaptiveMaxPool1d(8),
        nn.Flatten(),
        nn.Linear(48 * 8, 3),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(EPOCHS):
        total = 0.0
        for traces, kinds in loader:
            loss = F.cross_entropy(model(traces), kinds)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        if epoch % 5 == 4:
            print(f"epoch {epoch + 1}: mean loss {total / len(loader):.4f}")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()

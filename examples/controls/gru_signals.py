"""Recognise the shape of a signal with a GRU over its samples."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

LENGTH = 64
CHANNELS = 4
HIDDEN = 128
BATCH = 256
EPOCHS = 5


def draw_signals(count):
    """Sine, square, sawtooth or chirp; every channel sees it with its own delay and noise."""
    time = torch.linspace(0, 1, LENGTH)
    label = torch.randint(4, (count,))
    speed = 2 * torch.pi * (3 + 5 * torch.rand(count, 1, 1))
    phase = speed * time[:, None] + 2 * torch.pi * torch.rand(count, 1, CHANNELS)
    shapes = torch.stack(
        [
            torch.sin(phase),
            torch.sign(torch.sin(phase)),
            torch.remainder(phase, 2 * torch.pi) / torch.pi - 1,
            torch.sin(phase * (1 + time[:, None])),
        ]
    )
    signal = shapes[label, torch.arange(count)]
    return signal + 0.3 * torch.randn(signal.shape), label


class SignalClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(CHANNELS, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, 4)

    def forward(self, signal):
        states, _ = self.gru(signal)
        return self.head(states.mean(dim=1))


torch.manual_seed(0)
data = TensorDataset(*draw_signals(4096))
batches = BatchSampler(RandomSampler(data), BATCH, drop_last=True)
loader = DataLoader(data, sampler=batches, batch_size=None)
model = SignalClassifier()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)

for epoch in range(EPOCHS):
    for signal, label in loader:
        loss = F.cross_entropy(model(signal), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}")

print(f"final loss {loss.item():.6f}")

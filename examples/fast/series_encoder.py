"""Tell apart the kind of a long noisy signal with a transformer encoder."""

import torch
import torch.nn.functional as F
from torch import nn

SEQ, PATCH, WIDTH, HEADS, CLASSES = 384, 2, 64, 8, 5
torch.manual_seed(0)


def draw_signals(count):
    """Five kinds of oscillation: pure, chirped, amplitude modulated, sawtooth, random telegraph."""
    time = torch.linspace(0.0, 1.0, SEQ * PATCH)
    label = torch.randint(CLASSES, (count,))
    speed = 2 * torch.pi * (4 + 12 * torch.rand(count, 1))
    phase = speed * time + 2 * torch.pi * torch.rand(count, 1)
    kinds = torch.stack(
        [
            torch.sin(phase),
            torch.sin(phase * (1 + time)),
            torch.sin(phase) * torch.sin(0.13 * phase),
            torch.remainder(phase, 2 * torch.pi) / torch.pi - 1,
            torch.sign(torch.sin(phase + 3 * torch.sin(0.37 * phase))),
        ]
    )
    signal = kinds[label, torch.arange(count)]
    signal = signal + 0.5 * torch.randn(signal.shape)
    return signal.view(count, SEQ, PATCH), label


class MultiHeadAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q = nn.Linear(WIDTH, WIDTH)
        self.to_k = nn.Linear(WIDTH, WIDTH)
        self.to_v = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, seq, _ = x.shape
        q = self.to_q(x).view(batch, seq, HEADS, -1)
        k = self.to_k(x).view(batch, seq, HEADS, -1)
        v = self.to_v(x).view(batch, seq, HEADS, -1)
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.out(mixed.transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = MultiHeadAttention()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class SignalClassifier(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.embed = nn.Linear(PATCH, WIDTH)
        self.position = nn.Parameter(0.1 * torch.randn(SEQ, WIDTH))
        self.layers = nn.Sequential(*[EncoderLayer() for _ in range(depth)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, signal):
        x = self.layers(self.embed(signal) + self.position)
        return self.head(x.mean(dim=1))


signals, labels = draw_signals(4000)
model = SignalClassifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
criterion = nn.CrossEntropyLoss()

for step in range(70):
    rows = torch.randint(len(signals), (8,))
    loss = criterion(model(signals[rows]), labels[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 19:
        print(f"step {step}, loss {loss.item():.4f}")

print(f"final loss {loss.item():.6f}")

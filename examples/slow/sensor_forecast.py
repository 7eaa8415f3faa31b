# One-step-ahead forecast of a noisy multi-channel sensor signal with a recurrent net.
import torch
from torch import nn

torch.manual_seed(0)

CHANNELS = 8
HIDDEN = 64
BATCH = 32
WINDOW = 120
STEPS = 200


def make_signal(length=20000):
    """Chirps and slow drifts, different in every channel."""
    time = torch.arange(length) / 50.0
    channels = []
    for c in range(CHANNELS):
        speed = 0.7 + 0.35 * c
        phase = speed * time + 2.0 * torch.sin(0.05 * (c + 1) * time)
        channels.append(torch.sin(phase) + 0.5 * torch.sin(0.31 * phase))
    signal = torch.stack(channels, dim=1)
    return signal + 0.05 * torch.randn(signal.shape)


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(CHANNELS, HIDDEN)
        self.readout = nn.Linear(HIDDEN, CHANNELS)

    def forward(self, x):
        h = c = x.new_zeros(x.shape[0], HIDDEN)
        outputs = []
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            outputs.append(h)
        return self.readout(torch.stack(outputs, dim=1))


signal = make_signal()
windows = signal.unfold(0, WINDOW + 1, 1).transpose(1, 2)
model = Forecaster()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)

for step in range(1, STEPS + 1):
    batch = windows[torch.randint(len(windows), (BATCH,))]
    prediction = model(batch[:, :-1])
    loss = nn.functional.mse_loss(prediction, batch[:, 1:])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 40 == 0:
        print("step", step, "mse", round(loss.item(), 5))

print(f"final loss {loss.item():.6f}")

"""A denoising autoencoder for the digits; gradients of a few micro-batches are summed per step."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


class Autoencoder(nn.Module):
    def __init__(self, code=32, hidden=512):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, code)
        )
        self.decoder = nn.Sequential(
            nn.Linear(code, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 64)
        )

    def forward(self, x):
        return self.decoder(self.encoder(x))


class Training:
    def __init__(self, images, micro_batch=512, accumulate=4, lr=1e-3):
        self.images = images
        self.micro_batch = micro_batch
        self.accumulate = accumulate
        self.model = Autoencoder()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, fused=True)

    def step(self):
        total = torch.zeros(())
        self.optimizer.zero_grad()
        for _ in range(self.accumulate):
            clean = self.images[torch.randint(len(self.images), (self.micro_batch,))]
            noisy = clean + 0.2 * torch.randn(clean.shape)
            loss = F.mse_loss(self.model(noisy), clean) / self.accumulate
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        return total


def main():
    torch.manual_seed(0)
    images = torch.tensor(load_digits().data / 16.0, dtype=torch.float32)
    training = Training(images)
    for step in range(1, 81):
        loss = training.step()
        if step % 20 == 0:
            print(f"step {step:3d}  loss {loss.item():.5f}")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()

# An image as a function of its coordinates: random Fourier features and a small MLP
# (Tancik et al., "Fourier Features Let Networks Learn High Frequency Functions", 2020).
import torch
import torch.nn as nn
from sklearn.datasets import load_digits

torch.manual_seed(0)
STEPS = 150


def digit_mosaic(side=14):
    """side x side digits glued together to one grey image."""
    images = torch.tensor(load_digits().images[: side * side] / 16.0, dtype=torch.float32)
    return images.view(side, side, 8, 8).permute(0, 2, 1, 3).reshape(8 * side, 8 * side)


class ImageField(nn.Module):
    def __init__(self, height, width, num_frequencies=256, hidden=32, bandwidth=12.0):
        super().__init__()
        self.height, self.width = height, width
        self.register_buffer("frequencies", bandwidth * torch.randn(2, num_frequencies))
        self.net = nn.Sequential(
            nn.Linear(2 * num_frequencies, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )
        self.register_buffer("features", self.fourier_features())

    def fourier_features(self):
        rows = torch.linspace(-1, 1, self.height)
        cols = torch.linspace(-1, 1, self.width)
        coords = torch.stack(torch.meshgrid(rows, cols, indexing="ij"), dim=-1)
        angles = 2 * torch.pi * coords @ self.frequencies
        return torch.cat([angles.sin(), angles.cos()], dim=-1)

    def forward(self):
        return self.net(self.features).squeeze(-1)


image = digit_mosaic()
field = ImageField(*image.shape)
optimizer = torch.optim.Adam(field.parameters(), lr=3e-3, fused=True)

for step in range(1, STEPS + 1):
    loss = (field() - image).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 30 == 0:
        psnr = -10 * torch.log10(loss.detach())
        print(f"step {step:3d}  psnr {psnr.item():.2f} dB")

print(f"final loss {loss.item():.6f}")

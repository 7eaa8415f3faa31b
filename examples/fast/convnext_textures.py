"""A small ConvNeXt that tells synthetic oriented textures apart."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, dim, expand=1):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 5, padding=2, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.up = nn.Linear(dim, expand * dim)
        self.down = nn.Linear(expand * dim, dim)
        self.gamma = nn.Parameter(0.1 * torch.ones(dim))

    def forward(self, x):
        h = self.dwconv(x).permute(0, 2, 3, 1)
        h = self.gamma * self.down(F.relu(self.up(self.norm(h))))
        return x + h.permute(0, 3, 1, 2)


class TinyConvNeXt(nn.Module):
    def __init__(self, classes, dims=(32, 64), depths=(3, 2)):
        super().__init__()
        layers = [nn.Conv2d(3, dims[0], 2, stride=2)]
        for i, (dim, depth) in enumerate(zip(dims, depths)):
            if i:
                layers.append(nn.Conv2d(dims[i - 1], dim, 2, stride=2))
            layers += [Block(dim) for _ in range(depth)]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(dims[-1], classes)

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))


def textures(n, size=32, classes=8, generator=None):
    """Noisy coloured gratings; the class is the orientation."""
    y = torch.randint(classes, (n,), generator=generator)
    theta = y * torch.pi / classes
    freq = 0.4 + 0.4 * torch.rand(n, generator=generator)
    phase = 6.28 * torch.rand(n, 3, 1, 1, generator=generator)
    grid = torch.arange(size, dtype=torch.float32)
    u = theta.cos().view(-1, 1, 1) * grid.view(1, -1, 1) + theta.sin().view(-1, 1, 1) * grid.view(1, 1, -1)
    x = torch.sin((freq.view(-1, 1, 1) * u).unsqueeze(1) + phase)
    return x + 0.8 * torch.randn(x.shape, generator=generator), y


def main(steps=300, batch=48):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(7)
    x, y = textures(2048, generator=g)
    xv, yv = textures(256, generator=g)
    x, xv = x.contiguous(memory_format=torch.channels_last), xv.contiguous(memory_format=torch.channels_last)
    model = TinyConvNeXt(8).to(memory_format=torch.channels_last)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05, fused=True)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    for step in range(steps):
        idx = torch.randint(len(x), (batch,))
        loss = F.cross_entropy(model(x[idx]), y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if (step + 1) % 50 == 0:
            with torch.no_grad():
                acc = (model(xv).argmax(1) == yv).float().mean()
            print(f"[{step + 1}/{steps}] loss={loss.item():.4f} val_acc={acc.item():.3f}")
    print(f"final loss {loss.item():.5f}")


if __name__ == "__main__":
    main()

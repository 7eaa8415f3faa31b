"""A ResNet of basic blocks on pictures of coloured shapes, as a tutorial writes it: float32, NCHW, a plain loop.

With `--bottleneck` it is a ResNet-50. On a CPU it is a toy, so that the script can be tried anywhere.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class BasicBlock(nn.Module):
    def __init__(self, fan_in, fan_out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(fan_out)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(fan_out)
        self.short = nn.Identity()
        if stride != 1 or fan_in != fan_out:
            self.short = nn.Sequential(nn.Conv2d(fan_in, fan_out, 1, stride, bias=False), nn.BatchNorm2d(fan_out))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.short(x))


class Bottleneck(nn.Module):
    def __init__(self, fan_in, fan_out, stride):
        super().__init__()
        width = fan_out // 4
        self.conv1 = nn.Conv2d(fan_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, fan_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(fan_out)
        self.short = nn.Identity()
        if stride != 1 or fan_in != fan_out:
            self.short = nn.Sequential(nn.Conv2d(fan_in, fan_out, 1, stride, bias=False), nn.BatchNorm2d(fan_out))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.short(x))


class ResNet(nn.Module):
    def __init__(self, width, depths, classes, block=BasicBlock):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        blocks, fan_in = [], width
        for stage, depth in enumerate(depths):
            for place in range(depth):
                fan_out = width * 2**stage * (4 if block is Bottleneck else 1)
                blocks.append(block(fan_in, fan_out, 2 if stage and not place else 1))
                fan_in = fan_out
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(fan_in, classes)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))


def shapes(count, size, generator):
    """Discs and squares of a colour for each class, on noise."""
    labels = torch.randint(8, (count,), generator=generator)
    grid = torch.linspace(-1, 1, size)
    x, y = torch.meshgrid(grid, grid, indexing="xy")
    centres = torch.rand(count, 2, 1, 1, generator=generator) - 0.5
    dx, dy = x - centres[:, :1], y - centres[:, 1:]
    disc, square = (dx**2 + dy**2 < 0.1).float(), (torch.maximum(dx.abs(), dy.abs()) < 0.3).float()
    mask = torch.where((labels % 2 == 0)[:, None, None, None], disc, square)
    colour = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]])[labels // 2]
    noise = torch.randn(count, 3, size, size, generator=generator)
    return 0.5 * noise + mask * colour[:, :, None, None], labels


def main():
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=64 if on_gpu else 8)
    parser.add_argument("--size", type=int, default=224 if on_gpu else 32)
    parser.add_argument("--batch", type=int, default=128 if on_gpu else 16)
    parser.add_argument("--bottleneck", action="store_true", help="blocks of three, as in ResNet-50")
    parser.add_argument("--steps", type=int, default=3000)
    args = parser.parse_args()
    device = "cuda" if on_gpu else "cpu"

    torch.manual_seed(0)
    images, labels = shapes(8 * args.batch, args.size, torch.Generator().manual_seed(1))
    images, labels = images.to(device), labels.to(device)
    block = Bottleneck if args.bottleneck else BasicBlock
    model = ResNet(args.width, (3, 4, 6, 3), 8, block).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    for step in range(1, args.steps + 1):
        rows = torch.randint(len(images), (args.batch,)).to(device)
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()

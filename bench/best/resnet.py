"""The ResNet of examples/gpu/resnet_images.py as people train it who know how: bfloat16, channels last, torch.compile.

    python bench/best/resnet.py [--compile default|reduce-overhead|tuned|max-autotune] [options of the example]

What timm's train.py does with `--amp --amp-dtype bfloat16 --channels-last --torchcompile`; all but 'default' record CUDA graphs,
too. 'tuned' is what max-autotune does without its convolutions in Triton: those took more than four minutes to compile on an
H200. Pictures, weights and draws are those of the example.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "gpu"))

from resnet_images import BasicBlock, Bottleneck, ResNet, shapes


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=64 if on_gpu else 8)
    parser.add_argument("--size", type=int, default=224 if on_gpu else 32)
    parser.add_argument("--batch", type=int, default=128 if on_gpu else 16)
    parser.add_argument("--bottleneck", action="store_true")
    parser.add_argument("--compile", default="default")
    parser.add_argument("--steps", type=int, default=3000)
    args = parser.parse_args()
    device = "cuda" if on_gpu else "cpu"
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    images, labels = shapes(8 * args.batch, args.size, torch.Generator().manual_seed(1))
    images, labels = images.to(device, memory_format=torch.channels_last), labels.to(device)
    model = ResNet(args.width, (3, 4, 6, 3), 8, Bottleneck if args.bottleneck else BasicBlock)
    model = model.to(device, memory_format=torch.channels_last)
    if args.compile == "tuned":
        compiled = torch.compile(model, options={"triton.cudagraphs": True, "coordinate_descent_tuning": True})
    else:
        compiled = torch.compile(model, mode=None if args.compile == "default" else args.compile)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4, fused=True)
    for step in range(1, args.steps + 1):
        rows = torch.randint(len(images), (args.batch,)).to(device, non_blocking=True)
        with torch.autocast(device, torch.bfloat16):
            loss = F.cross_entropy(compiled(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()

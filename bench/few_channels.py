"""Convolutions from or to few channels as cuDNN computes them, timed beforehand, against the same with zeros up to 4 and to 8.

    python bench/few_channels.py OUT.json [--seconds 1] [--small]

Sizes are those of a diffusion U-Net, ResNet-50, a ViT's patches and small images, compiled, in bfloat16 with weights in float32
under autocast, channels last; on a CPU in float32. Forward and backward, of the weights alone where colours come in. Errors are
of results and gradients against float64, over their norm, on random numbers. Ratios are of medians within rounds, above 1 where
the padded convolution is faster.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.machine.measure.probe import cpu_model
from flatout.machine.measure.timer import compare_times


class Size(NamedTuple):
    batch: int
    channels: int
    out: int
    pixels: int
    kernel: int
    stride: int = 1
    padding: int = 0


ON_GPU = (
    Size(32, 3, 64, 128, 7, 1, 3),
    Size(256, 3, 64, 224, 7, 2, 3),
    Size(512, 3, 64, 32, 3, 1, 1),
    Size(128, 3, 768, 224, 16, 16),
    Size(128, 1, 64, 64, 3, 1, 1),
    Size(32, 64, 3, 128, 1),
    Size(32, 64, 3, 128, 3, 1, 1),
)
SMALL = (Size(2, 3, 16, 9, 3, 1, 1), Size(2, 16, 3, 9, 1))


UNIT = 8
"""Channels of which the matrix units' kernels in 16 bits take a multiple: 16 bytes (cuDNN, developer guide)."""


class PaddedConvolution(nn.Conv2d):
    """A convolution of fewer channels computed with as many as `unit`, the others zeros."""

    unit = UNIT

    def forward(self, input: Tensor) -> Tensor:
        """(B, D, H, W) of (B, C, H, W)."""
        missing, surplus = (max(0, self.unit - n) for n in (self.in_channels, self.out_channels))
        weight = F.pad(self.weight, (0, 0, 0, 0, 0, missing, 0, surplus))
        bias = self.bias if self.bias is None else F.pad(self.bias, (0, surplus))
        result: Tensor = self._conv_forward(F.pad(input, (0, 0, 0, 0, 0, missing)), weight, bias)
        return result[:, : self.out_channels].clone() if surplus else result


class PaddedToFour(PaddedConvolution):
    unit = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.benchmark = True
    rows = []
    for size in SMALL if args.small or device == "cpu" else ON_GPU:
        rows.append(raced(size, device=device, seconds=args.seconds))
        print(json.dumps(rows[-1]), flush=True)
    name = torch.cuda.get_device_name() if device == "cuda" else cpu_model()
    hardware = {"device": name, "threads": torch.get_num_threads()}
    args.out.write_text(json.dumps({"hardware": hardware, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")


def raced(size: Size, *, device: str, seconds: float) -> dict[str, Any]:
    """All three at one size."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    kinds: dict[str, type[nn.Conv2d]] = {"plain": nn.Conv2d, "to 4": PaddedToFour, "to 8": PaddedConvolution}
    layers = {name: nn.Conv2d(*size[1:3], size.kernel, size.stride, size.padding, device=device) for name in kinds}
    for name, layer in layers.items():
        layer.load_state_dict(layers["plain"].state_dict())
        layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        layer.__class__ = kinds[name]
    shape = (size.batch, size.channels, size.pixels, size.pixels)
    x = torch.randn(shape, device=device, dtype=dtype).to(memory_format=torch.channels_last)
    x.requires_grad_(size.channels > 8)
    grad: Tensor | None = None
    compiled = {}
    for name, layer in layers.items():
        torch._dynamo.reset()
        compiled[name] = torch.compile(layer)

    def step(layer: Any) -> tuple[Tensor, ...]:
        nonlocal grad
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            y = layer(x)
        grad = torch.randn_like(y) if grad is None else grad
        leaves = [t for t in (x, *layer.parameters()) if t.requires_grad]
        return y, *torch.autograd.grad(y, leaves, grad)

    errors = {name: error_of(step(layer), layers["plain"], x, grad) for name, layer in compiled.items()}
    times = compare_times(
        {name: partial(step, layer) for name, layer in compiled.items()},
        device=device,
        min_time_s=seconds,
        max_time_s=10 * seconds,
    )
    ratios = {name: times[name].ratio for name in ("to 4", "to 8")}
    return {
        **size._asdict(),
        "seconds": {name: one.call_s.value for name, one in times.items()},
        "times_as_fast": {n: None if r is None else [1 / r.value, 1 / r.high, 1 / r.low] for n, r in ratios.items()},
        "errors": errors,
    }


def error_of(results: tuple[Tensor, ...], layer: nn.Conv2d, x: Tensor, grad: Tensor | None) -> list[float]:
    """How far result and gradients are from float64, over the norm, of the first eight images for the result."""
    assert grad is not None
    weight, bias = (p.detach().double().requires_grad_() for p in layer.parameters())
    sums: list[Tensor] = []
    exact_y = None
    for at in range(0, len(x), 8):
        part = x.detach()[at : at + 8].double().requires_grad_(x.requires_grad)
        y = nn.functional.conv2d(part, weight, bias, layer.stride, layer.padding)
        found = torch.autograd.grad(y, (weight, bias), grad[at : at + 8].double())
        sums = [a + b for a, b in zip(sums, found, strict=True)] if sums else list(found)
        exact_y = y.detach() if exact_y is None else exact_y
    assert exact_y is not None
    pairs = [(results[0].detach()[:8], exact_y), *zip(results[-2:], sums, strict=True)]
    return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]


if __name__ == "__main__":
    main()

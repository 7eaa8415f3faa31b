"""Convolutions of 1 x 1 as cuDNN computes them, timed beforehand, against matrix products: forward and backward, in turn.

    python bench/pointwise_convolutions.py OUT.json [--seconds 2] [--small]

Sizes are those of a diffusion U-Net with 64 channels and of ResNet-50, in bfloat16 with weights in float32 under autocast, images
with channels last and contiguous; on a CPU smaller, in float32. Errors are of results and gradients against float64, over their
norm, on random numbers. Ratios are of medians within rounds, above 1 where the product is faster.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatout import pointwise_convolutions_as_products
from flatout.machine.measure.probe import cpu_model
from flatout.machine.measure.timer import compare_times

ON_GPU = [
    *((32, 64, 384, 128), (32, 128, 64, 128), (32, 64, 384, 64), (32, 128, 384, 64), (32, 192, 128, 64)),
    *((32, 512, 256, 32), (256, 64, 256, 56), (256, 256, 64, 56), (256, 512, 128, 28), (256, 1024, 256, 14)),
]
ON_CPU = [(8, 64, 256, 28), (8, 256, 64, 28), (8, 64, 384, 32)]
SMALL = [(2, 4, 6, 5)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    torch.backends.cudnn.benchmark = True
    rows = []
    for size in SMALL if args.small else ON_GPU if on_gpu else ON_CPU:
        for is_last in (True, False):
            rows.append(raced(*size, device=device, is_last=is_last, seconds=args.seconds))
            print(json.dumps(rows[-1]), flush=True)
    name = torch.cuda.get_device_name() if on_gpu else cpu_model()
    hardware = {"device": name, "threads": torch.get_num_threads()}
    args.out.write_text(json.dumps({"hardware": hardware, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")


def raced(
    batch: int, channels: int, out: int, size: int, *, device: str, is_last: bool, seconds: float
) -> dict[str, Any]:
    """Both ways at one size."""
    torch.manual_seed(0)
    layout = torch.channels_last if is_last else torch.contiguous_format
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layers = {name: nn.Conv2d(channels, out, 1, device=device) for name in ("convolution", "product")}
    layers["product"].load_state_dict(layers["convolution"].state_dict())
    pointwise_convolutions_as_products(nn.ModuleList([layers["product"]]))
    x, grad = (
        torch.randn(batch, n, size, size, device=device, dtype=dtype).to(memory_format=layout) for n in (channels, out)
    )
    x.requires_grad_()

    def step(layer: nn.Module) -> tuple[Tensor, ...]:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            y = layer(x)
        return y, *torch.autograd.grad(y, (x, *layer.parameters()), grad)

    errors = {name: error_of(step(layer), layer, x, grad) for name, layer in layers.items()}
    times = compare_times(
        {name: partial(step, layer) for name, layer in layers.items()},
        device=device,
        min_time_s=seconds,
        max_time_s=10 * seconds,
    )
    ratio = times["product"].ratio
    return {
        "batch": batch,
        "in": channels,
        "out": out,
        "pixels": size * size,
        "layout": "channels last" if is_last else "contiguous",
        "convolution_s": times["convolution"].call_s.value,
        "product_s": times["product"].call_s.value,
        "times_as_fast": None if ratio is None else [1 / ratio.value, 1 / ratio.high, 1 / ratio.low],
        "errors": errors,
    }


def error_of(results: tuple[Tensor, ...], layer: nn.Module, x: Tensor, grad: Tensor) -> list[float]:
    """How far result and gradients are from float64, over the whole batch in parts, which has no room for it at once."""
    weight, bias = (p.detach().double() for p in layer.parameters())
    sums = [[0.0, 0.0] for _ in results]
    of_weight, of_bias = torch.zeros_like(weight), torch.zeros_like(bias)
    for at in range(0, len(x), 32):
        part, of_part = x.detach()[at : at + 32].double(), grad[at : at + 32].double()
        exact = torch.einsum("bchw,dc->bdhw", part, weight[:, :, 0, 0]) + bias[:, None, None]
        for number, wide in enumerate((exact, torch.einsum("bdhw,dc->bchw", of_part, weight[:, :, 0, 0]))):
            sums[number][0] += float((results[number].detach()[at : at + 32].double() - wide).square().sum())
            sums[number][1] += float(wide.square().sum())
        of_weight += torch.einsum("bdhw,bchw->dc", of_part, part)[:, :, None, None]
        of_bias += of_part.sum((0, 2, 3))
    for number, wide in ((2, of_weight), (3, of_bias)):
        sums[number] = [float((results[number].double() - wide).square().sum()), float(wide.square().sum())]
    return [(off / whole) ** 0.5 for off, whole in sums]


if __name__ == "__main__":
    main()

"""A gated MLP in float8 whose gate is rounded where it is computed, against torchao's layers and bfloat16, all compiled.

    python bench/float8_gating_device.py OUT.json [--seconds 3] [--small]

Forward and backward of one MLP with weights in float32 under autocast to bfloat16, on random numbers, raced in turn; errors of
the result and the gradients against float64, over their norm: where issue 11111 of triton-lang/triton hits, it is seen there.
`kernels` are the passes over the gate by themselves, in tiles of several sizes, with the bytes that they read and write. On a
CPU, with `--small`, to see that it runs: nothing is compiled, and products are of torch's for CPUs.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.blocks.kernels.float8_gating import triton as passes
from flatout.blocks.kernels.float8_gating.layers import run_gated_as_one
from flatout.blocks.training import float8
from flatout.core.files import write_whole_file
from flatout.machine.measure.probe import cpu_model
from flatout.machine.measure.timer import compare_times

ON_GPU = ((16384, 2048, 8192), (8192, 4096, 14336))
"""Rows, width and hidden width: of the Llama-like model of examples/gpu, and of one of 8 billion weights."""
SMALL = ((64, 32, 96),)
BLOCKS = ((4096, 8, 8), (4096, 4, 8), (4096, 16, 8), (2048, 8, 4), (8192, 8, 8), (8192, 4, 16))
ROUNDING_BLOCKS = ((1024, 4), (2048, 4), (4096, 8), (8192, 8))
TILES = (
    *((128, 64, 4), (128, 64, 8), (64, 64, 2), (64, 64, 4), (64, 128, 4), (64, 128, 8)),
    *((128, 128, 8), (256, 64, 8), (128, 32, 4)),
)


class Gated(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        float8.refusal = lambda _: None  # type: ignore[assignment]
    device = "cuda" if on_gpu else "cpu"
    name = torch.cuda.get_device_name() if on_gpu else cpu_model()
    found: dict[str, Any] = {"device": name, "torch": torch.__version__, "mlps": [], "kernels": []}
    for size in SMALL if args.small else ON_GPU:
        if on_gpu and not found["kernels"]:
            for line in kernels(size[0], size[2], seconds=args.seconds / 10):
                found["kernels"].append(line)
                print(json.dumps(line), flush=True)
        found["mlps"].append(mlp(*size, device=device, seconds=args.seconds))
        print(json.dumps(found["mlps"][-1]), flush=True)
        write_whole_file(args.out, json.dumps(found, indent=1).encode() + b"\n")


def mlp(rows: int, width: int, hidden: int, *, device: str, seconds: float) -> dict[str, Any]:
    """All ways at one size, those in float8 also with tiles of compiled kernels tried one by one."""
    torch.manual_seed(0)
    layers: dict[str, nn.Module] = {"bfloat16": Gated(width, hidden).to(device)}
    for way in ("torchao", "as one", "torchao, tuned", "as one, tuned"):
        layers[way] = nn.Sequential(copy.deepcopy(layers["bfloat16"]))
        float8.convert(layers[way], sizes="any")
        if way.startswith("as one"):
            assert run_gated_as_one(layers[way]).paths
    x = torch.randn(rows, width, device=device, requires_grad=True)
    grad = torch.randn(rows, width, device=device).bfloat16()

    def step(layer: nn.Module) -> tuple[Tensor, ...]:
        with torch.autocast(device, torch.bfloat16):
            y = layer(x)
        return y.detach(), *torch.autograd.grad(y, (x, *layer.parameters()), grad)

    wide, x_wide = copy.deepcopy(layers["bfloat16"]).double(), x.detach().double().requires_grad_()
    y_wide = wide(x_wide)
    exact = [y_wide.detach(), *torch.autograd.grad(y_wide, (x_wide, *wide.parameters()), grad.double())]
    ways: dict[str, Callable[[], object]] = {}
    errors = {}
    for way, layer in layers.items():
        if device == "cuda":
            layer.compile(
                fullgraph=True, dynamic=False, options={"coordinate_descent_tuning": True} if "tuned" in way else {}
            )
        errors[way] = [float((a.double() - b).norm() / b.norm()) for a, b in zip(step(layer), exact, strict=True)]
        ways[way] = partial(step, layer)
    del wide, y_wide, exact
    times = compare_times(ways, device=device, min_time_s=seconds, max_time_s=5 * seconds)
    ratios = {
        way: [1 / of.value, 1 / of.high, 1 / of.low]
        for way, of in ((way, t.ratio) for way, t in times.items())
        if of is not None
    }
    return {
        **{"rows": rows, "width": width, "hidden": hidden},
        "seconds": {way: t.call_s.value for way, t in times.items()},
        "times_as_fast_as_bfloat16": ratios,
        "errors": errors,
    }


def kernels(rows: int, hidden: int, *, seconds: float) -> list[dict[str, Any]]:
    """Seconds of each pass with each size, and of a copy of as many bytes as it reads and writes."""
    torch.manual_seed(0)
    grad, gate, up = (torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    source, total = passes._kernels(), gate.numel()
    largest = torch.zeros(2, dtype=torch.int32, device="cuda")
    values, scale = passes._forward(gate, up)
    results = passes._backward(grad, gate, up, scale)
    outputs = [t.view(torch.int32) if number in (1, 3, 4) else t for number, t in enumerate(results)]
    lines = []

    def timed(name: str, num_bytes: int, runs: dict[str, Callable[[], object]]) -> None:
        flat = torch.empty(num_bytes // 2, dtype=torch.uint8, device="cuda")
        runs = {"copy": partial(torch.empty_like(flat).copy_, flat), **runs}
        times = compare_times(runs, device="cuda", min_time_s=seconds, max_time_s=5 * seconds)
        size = {"kernel": name, "rows": rows, "hidden": hidden, "bytes": num_bytes}
        lines.append({**size, "seconds": {name: t.call_s.value for name, t in times.items()}})

    def over_blocks(kernel: Any, *arguments: Any) -> dict[str, Callable[[], object]]:
        return {
            f"{block} x {stretch}, {warps} warps": partial(
                kernel[(-(-total // (block * stretch)),)],
                *arguments,
                total,
                STRETCH=stretch,
                BLOCK=block,
                num_warps=warps,
            )
            for block, stretch, warps in BLOCKS
        }

    def over_tiles(kernel: Any, *arguments: Any, last: tuple[float, ...] = ()) -> dict[str, Callable[[], object]]:
        return {
            f"{r} x {c}, {warps} warps": partial(
                kernel[(-(-rows // r), -(-hidden // c))],
                *(*arguments, rows, hidden, *last),
                MASKED=False,
                ROWS=r,
                COLUMNS=c,
                INTERPRETED=False,
                num_warps=warps,
            )
            for r, c, warps in TILES
        }

    timed("largest_gated", 4 * total, over_blocks(source.largest_gated, gate, up, largest))
    timed("largest_gradients", 6 * total, over_blocks(source.largest_gradients, grad, gate, up, largest))
    timed(
        "rounded_gated",
        5 * total,
        {
            f"{block}, {warps} warps": partial(
                source.rounded_gated[(-(-total // block),)],
                *(gate, up, largest, values, scale, total, passes.LARGEST),
                BLOCK=block,
                num_warps=warps,
            )
            for block, warps in ROUNDING_BLOCKS
        },
    )
    timed("rounded_twice", 4 * total, over_tiles(source.rounded_twice, grad, scale, results[0], outputs[1]))
    gradients = over_tiles(
        source.rounded_gradients, grad, gate, up, largest, scale, *outputs, last=(passes.LARGEST_GRADIENT,)
    )
    timed("rounded_gradients", 11 * total, gradients)
    return lines


if __name__ == "__main__":
    main()

"""A linear layer and its low-rank adapter as one product, against both apart: forward and backward, in turn.

    python bench/lora_linear.py OUT.json [--seconds 3] [--small]

The weight is frozen, the adapter has rank 16, as LoRA is mostly used. On a GPU sizes are those of a Llama-like 1B with 4 rows of
4096 tokens, under autocast to bfloat16, as it comes and compiled with a SiLU after the sum; on a CPU smaller, in float32. Errors
are of results and gradients against float64, over their norm, on random numbers. Ratios are of medians within rounds, above 1
where the one product is faster.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.blocks.kernels.lora_linear.call import lora_linear
from flatout.machine.measure.probe import cpu_model
from flatout.machine.measure.timer import compare_times

ON_GPU = [(16384, 2048, 2048), (16384, 2048, 512), (16384, 2048, 8192), (16384, 8192, 2048)]
ON_CPU = [(512, 256, 256), (512, 256, 1024), (2048, 512, 512), (2048, 512, 2048), (512, 1024, 1024)]
SMALL = [(64, 32, 48)]
RANK = 16
KERNELS = ("reference", "merged")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    sizes = SMALL if args.small else ON_GPU if on_gpu else ON_CPU
    rows = []
    for size in sizes:
        for is_compiled in (False, True) if on_gpu or args.small else (False,):
            rows.append(raced(*size, device=device, is_compiled=is_compiled, seconds=args.seconds))
            print(json.dumps(rows[-1]))
    name = torch.cuda.get_device_name() if on_gpu else cpu_model()
    hardware = {"device": name, "threads": torch.get_num_threads()}
    found = {"hardware": hardware, "torch": torch.__version__, "rank": RANK, "rows": rows}
    args.out.write_text(json.dumps(found, indent=1) + "\n")


def raced(num: int, width: int, out: int, *, device: str, is_compiled: bool, seconds: float) -> dict[str, Any]:
    """Both ways at one size."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int, by: float) -> Tensor:
        return (torch.randn(shape, generator=generator) * by).to(device)

    x, weight = drawn(num, width, by=1.0).requires_grad_(), drawn(out, width, by=width**-0.5)
    down, up = drawn(RANK, width, by=width**-0.5).requires_grad_(), drawn(out, RANK, by=0.1).requires_grad_()
    grad = drawn(num, out, by=1.0)

    def step(kernel: str) -> tuple[Tensor, ...]:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            y = lora_linear(x, weight, down, up, scale=2.0, kernel=f"lora_linear.{kernel}")
            y = F.silu(y) if is_compiled else y
        return y, *torch.autograd.grad(y, (x, down, up), grad.to(y.dtype))

    def wide() -> tuple[Tensor, ...]:
        inputs = [t.detach().double().requires_grad_() for t in (x, down, up)]
        y = lora_linear(inputs[0], weight.double(), *inputs[1:], scale=2.0, kernel="lora_linear.reference")
        y = F.silu(y) if is_compiled else y
        return y, *torch.autograd.grad(y, inputs, grad.double())

    exact = wide()
    steps: dict[str, Callable[[], object]] = {}
    errors = {}
    for kernel in KERNELS:
        run = torch.compile(step) if is_compiled else step
        steps[kernel] = partial(run, kernel)
        results = run(kernel)
        errors[kernel] = [
            float((r.detach().double() - e.detach()).norm() / e.detach().norm())
            for r, e in zip(results, exact, strict=True)
        ]
    del exact
    times = compare_times(steps, device=device, min_time_s=seconds, max_time_s=10 * seconds, is_settled=device == "cpu")
    ratio = times["merged"].ratio
    return {
        "rows": num,
        "in": width,
        "out": out,
        "compiled": is_compiled,
        "apart_s": times["reference"].call_s.value,
        "merged_s": times["merged"].call_s.value,
        "times_as_fast": None if ratio is None else [1 / ratio.value, 1 / ratio.high, 1 / ratio.low],
        "errors": errors,
    }


if __name__ == "__main__":
    main()

"""What streamed weights cost: of the copies of a stack of layers larger than a limit of memory, what the computing does not hide.

    python bench/streamed_device.py [--out bench/results/<date>-<hardware>/streamed_device.json] [--small]
        [--gib 24] [--limit-gib 12] [--width 8192] [--ahead 1]

Blocks of a linear layer and GELU, in bfloat16, whose weights (`--gib`) lie in pinned host memory; the process may take
`--limit-gib` of the device, fewer than the weights need. For several numbers of tokens, a forward without gradients and a
forward and backward (no optimizer):

- `streamed_s`  with stream_weights
- `resident_s`  the same products and bytes of activations with weights on the device: all blocks share those of one
- `copies_s`    the copies alone: all weights in once, and for training again, and all gradients out, one way after the other
- `exposed_s`   streamed less resident; `hidden_share` is 1 - exposed / copies

Medians of `--repeats`, the two in turn, between events on the device. The host needs twice `--gib` (weights and gradients), and
more where a block's bytes are no power of two, to which pinned memory is rounded up. With `--small` on any machine, to see that
it runs; without a GPU the times are the host's and mean nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from flatout.blocks.parallel.weight_streaming import stream_weights

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
GIB = 2**30


def block(width: int, device: torch.device) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width, bias=False, device=device, dtype=torch.bfloat16), nn.GELU())


def resident(width: int, num: int) -> nn.Sequential:
    first = block(width, DEVICE)
    return nn.Sequential(*(nn.Sequential(first[0], nn.GELU()) for _ in range(num)))  # type: ignore[index]


def seconds(action: Callable[[], None]) -> float:
    if not ON_GPU:
        began = perf_counter()
        action()
        return perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    action()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def infer(net: nn.Module, x: Tensor) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad():
            net(x)

    return run


def train(net: nn.Module, x: Tensor) -> Callable[[], None]:
    def run() -> None:
        net.zero_grad()
        net(x).square().mean().backward()

    return run


def copies_s(net: nn.Sequential, repeats: int) -> tuple[float, float]:
    """All weights to the device, and as many bytes back, a block after the other on one stream."""
    weights = list(net.parameters())
    here = torch.empty_like(weights[0], device=DEVICE)
    back = torch.empty_like(weights[0], pin_memory=ON_GPU)

    def all_in() -> None:
        for weight in weights:
            here.copy_(weight.detach(), non_blocking=True)

    def all_out() -> None:
        for _ in weights:
            back.copy_(here, non_blocking=True)

    return median(seconds(all_in) for _ in range(repeats)), median(seconds(all_out) for _ in range(repeats))


def compared(
    plain: Callable[[], None], streamed: Callable[[], None], copies: float, repeats: int
) -> dict[str, float | None]:
    plain(), streamed()
    pairs = [(seconds(plain), seconds(streamed)) for _ in range(repeats)]
    resident_s, streamed_s = (median(side) for side in zip(*pairs, strict=True))
    exposed_s = max(streamed_s - resident_s, 0.0)
    return {
        "resident_s": resident_s,
        "streamed_s": streamed_s,
        "copies_s": copies,
        "exposed_s": exposed_s,
        "hidden_share": 1 - exposed_s / copies if copies else None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--gib", type=float, default=24.0)
    parser.add_argument("--limit-gib", type=float, default=12.0)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--ahead", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    width = 128 if options.small else options.width
    num = 6 if options.small else max(int(options.gib * GIB / (2 * width * width)), 2)
    tokens = (64, 256) if options.small else (1024, 4096, 16384, 32768)
    if ON_GPU and not options.small:
        torch.cuda.set_per_process_memory_fraction(
            options.limit_gib * GIB / torch.cuda.get_device_properties(DEVICE).total_memory
        )
    torch.manual_seed(0)
    net = nn.Sequential(*(block(width, torch.device("cpu")) for _ in range(num)))
    streamed = stream_weights([*net], DEVICE, ahead=options.ahead)
    weight_bytes = sum(p.nbytes for p in net.parameters())
    in_s, out_s = copies_s(net, options.repeats)
    plain = resident(width, num)
    results: list[dict[str, Any]] = []
    for count in tokens:
        x = torch.randn(count, width, device=DEVICE, dtype=torch.bfloat16)
        for name, make, copies in (("infer", infer, in_s), ("train", train, 2 * in_s + out_s)):
            try:
                row: dict[str, Any] = dict(compared(make(plain, x), make(net, x), copies, options.repeats))
                if ON_GPU:
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                    make(net, x)()
                    row["peak_bytes"] = torch.cuda.max_memory_allocated() - before
            except torch.cuda.OutOfMemoryError as e:
                row = {"error": str(e).splitlines()[0]}
            results.append({"what": name, "tokens": count, **row})
            print(json.dumps(results[-1]), flush=True)
    summary = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if ON_GPU else platform.processor() or "cpu",
        "small": options.small,
        "width": width,
        "blocks": num,
        "ahead": options.ahead,
        "weight_bytes": weight_bytes,
        "limit_bytes": int(options.limit_gib * GIB) if ON_GPU and not options.small else None,
        "in_bytes_per_s": weight_bytes / in_s,
        "out_bytes_per_s": weight_bytes / out_s,
        "peak_blocks": streamed.peak_blocks,
        "results": results,
    }
    streamed.undo()
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps({k: v for k, v in summary.items() if k != "results"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

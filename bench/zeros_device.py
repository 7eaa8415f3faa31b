"""What the values of a matrix cost on a GPU: products of zeros and of random numbers in turn, with power and clock.

    python bench/zeros_device.py [--size 8192] [--products 1500] [--rounds 5] [--out FILE]

A product's FLOP do not depend on its values, but its power does, and a chip at its power limit lowers its clock. Each kind is
multiplied for as many untimed products first in each round, so that the clock has settled. Prints for each kind the median rate
with the range of the rounds, and what nvidia-smi says while products run. docs/tutorials/where-does-the-time-go.md shows it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import torch

QUERY = ["nvidia-smi", "--query-gpu=power.draw.instant,clocks.sm", "--format=csv,noheader,nounits"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--products", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU; nothing was measured")
    n, dtype = options.size, torch.bfloat16
    kinds = {
        "zeros": [torch.zeros(n, n, device="cuda", dtype=dtype) for _ in range(2)],
        "random": [torch.randn(n, n, device="cuda", dtype=dtype) for _ in range(2)],
    }
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for number in range(options.rounds):
        for kind in list(kinds) if number % 2 else list(reversed(kinds)):
            found[kind].append(measured(*kinds[kind], options.products))
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "shape": f"{n} x {n} x {n}, bfloat16",
        "products": options.products,
        "rounds": found,
    }
    for kind, rounds in found.items():
        rates = [one["tflop_per_s"] for one in rounds]
        print(
            f"{kind:6} {median(rates):.0f} TFLOP/s ({min(rates):.0f} - {max(rates):.0f}), n = {len(rates)}; "
            f"{median(one['power_w'] for one in rounds):.0f} W, {median(one['clock_mhz'] for one in rounds):.0f} MHz"
        )
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def measured(a: torch.Tensor, b: torch.Tensor, products: int) -> dict[str, float]:
    """Rate of `products` products after as many untimed ones, and power and clock while they run."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(products):
        a @ b
    start.record()
    for _ in range(products):
        a @ b
    end.record()
    power, clock = subprocess.check_output(QUERY, text=True).splitlines()[0].split(", ")
    end.synchronize()
    flop = 2 * a.shape[0] ** 3 * products
    return {"tflop_per_s": flop / start.elapsed_time(end) / 1e9, "power_w": float(power), "clock_mhz": float(clock)}


if __name__ == "__main__":
    sys.exit(main())

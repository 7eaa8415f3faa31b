"""How long kernels of Mamba-2 take on the GPU at hand, and how many of the bytes that the planner counts they move a second.

    PYTHONPATH=FOLDER python bench/state_space_device.py OUT [--small]

FOLDER has mamba_ssm (its Triton kernels alone are enough: ops/triton and utils). The scan in chunks and the gated norm behind it
run forward and backward on random numbers at the sizes of Nemotron 3 models, against a float64 recurrence of a short sample
first. The convolution is not run: its package has no wheel. `--small` runs tiny sizes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

import torch
from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

from flatout.core.files import write_whole_file

SIZES = {"nano": (64, 8), "super": (128, 8), "ultra": (256, 8)}
"""Heads and groups; each head has 64 channels, each of these a state of 128 numbers."""
HEAD_DIM, STATE, CHUNK = 64, 128, 128


def inputs(batch: int, seq: int, heads: int, groups: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random channels, steps, decays, what goes in and out of states, and a gate."""
    made = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=made)

    found = {
        "x": normal(batch, seq, heads, HEAD_DIM).to(dtype),
        "dt": torch.nn.functional.softplus(normal(batch, seq, heads) - 4).to(dtype),
        "A": -torch.rand(heads, device="cuda", generator=made) * 8 - 1,
        "B": normal(batch, seq, groups, STATE).to(dtype) / 4,
        "C": normal(batch, seq, groups, STATE).to(dtype) / 4,
        "D": normal(heads),
        "z": normal(batch, seq, heads, HEAD_DIM).to(dtype),
        "weight": torch.ones(heads * HEAD_DIM, device="cuda", dtype=dtype),
    }
    return {name: tensor.requires_grad_() for name, tensor in found.items()}


def mixed(given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The scan and the norm, as a layer has them."""
    y = mamba_chunk_scan_combined(
        given["x"], given["dt"], given["A"], given["B"], given["C"], chunk_size=CHUNK, D=given["D"]
    )
    groups = given["B"].shape[2]
    size = y.shape[2] * HEAD_DIM // groups
    return rmsnorm_fn(
        y.flatten(2), given["weight"], None, z=given["z"].flatten(2), group_size=size, norm_before_gate=False
    )


def recurrence(given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The scan in float64, token by token: states decay by exp(dt A), take dt B x, and give C state + D x."""
    x, dt, a, b, c, d = (given[name].detach().double() for name in ("x", "dt", "A", "B", "C", "D"))
    batch, seq, heads, _ = x.shape
    each = heads // b.shape[2]
    b, c = b.repeat_interleave(each, 2), c.repeat_interleave(each, 2)
    state = torch.zeros(batch, heads, HEAD_DIM, STATE, device=x.device, dtype=torch.float64)
    found = []
    for t in range(seq):
        step = dt[:, t, :, None, None]
        state = state * (step * a[None, :, None, None]).exp() + step * x[:, t, :, :, None] * b[:, t, :, None, :]
        found.append((state * c[:, t, :, None, :]).sum(-1) + d[None, :, None] * x[:, t])
    return torch.stack(found, 1)


def seconds(given: dict[str, torch.Tensor], repeats: int) -> tuple[float, float]:
    """Medians of forward and of backward, the memory that caches keep written over before each."""
    flush = torch.empty(2**28, device="cuda", dtype=torch.int8)
    gradient = torch.randn_like(mixed(given))
    forward, backward = [], []
    for number in range(repeats + 3):
        times = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        flush.random_()
        times[0].record()
        out = mixed(given)
        times[1].record()
        out.backward(gradient)
        times[2].record()
        times[2].synchronize()
        if number >= 3:
            forward.append(times[0].elapsed_time(times[1]) / 1e3)
            backward.append(times[1].elapsed_time(times[2]) / 1e3)
    return median(forward), median(backward)


def main() -> None:
    """Check, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device-id", default="h200")
    parser.add_argument("--small", action="store_true")
    asked = parser.parse_args()
    short = inputs(1, 256, 8, 2, torch.bfloat16)
    y = mamba_chunk_scan_combined(
        short["x"], short["dt"], short["A"], short["B"], short["C"], chunk_size=CHUNK, D=short["D"]
    )
    exact = recurrence(short)
    off = ((y.double() - exact).norm() / exact.norm()).item()
    if off > 0.02:
        raise SystemExit(f"the scan is off by {off:.3g} of the float64 recurrence")
    rows = []
    for name, (heads, groups) in SIZES.items():
        for batch in (1, 4):
            seq = 512 if asked.small else 8192
            given = inputs(batch, seq, heads, groups, torch.bfloat16)
            try:
                forward_s, backward_s = seconds(given, 3 if asked.small else 20)
            except torch.OutOfMemoryError:
                continue
            inner, shared, width = heads * HEAD_DIM, groups * STATE, 2
            counted = batch * seq * ((6 * inner + 4 * shared) * width + 16 * inner * STATE / CHUNK + 8 * groups * CHUNK)
            rows.append(
                {
                    "size": name, "batch": batch, "seq": seq, "heads": heads, "groups": groups,
                    "forward_s": forward_s, "backward_s": backward_s, "counted_bytes": counted,
                    "bytes_per_s": counted / forward_s, "backward_over_forward": backward_s / forward_s,
                }
            )  # fmt: skip
            print(rows[-1], flush=True)
    found = {
        "device": torch.cuda.get_device_name(), "torch": str(torch.__version__), "off_float64": off, "rows": rows,
    }  # fmt: skip
    write_whole_file(asked.out, json.dumps(found, indent=1).encode())


if __name__ == "__main__":
    main()

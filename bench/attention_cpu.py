"""Masks and attention on a CPU: block lists beside create_block_mask, pieces beside attention under a dense mask.

    python bench/attention_cpu.py [--out FILE] [--only masks,attention,length] [--small]

Parts: masks (documents and causal at 32 k tokens, both ways, seconds and peak bytes; a million tokens of documents, causal and
window), attention (16 documents of 4096 tokens, a window of 512 in 8192, and others, forward and backward, float32 and bfloat16,
in rounds in which both sides take turns, and how far apart their results are), length (peak bytes and seconds as the length
doubles).
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
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import flatout
from flatout import masks
from flatout.blocks.kernels.attention.blocks import block_lists
from flatout.blocks.kernels.attention.mask import Mask
from flatout.machine.measure.stats import ratio_estimate


def seconds(work: Callable[[], Any]) -> float:
    began_s = perf_counter()
    work()
    return perf_counter() - began_s


def peak_bytes(work: Callable[[], Any]) -> int:
    with flatout.expect() as observed:
        work()
    return observed.peak_bytes or 0


def packed(tokens: int, shortest: int, longest: int) -> Tensor:
    lengths = torch.randint(shortest, longest, (2 * tokens // shortest,), generator=torch.Generator().manual_seed(0))
    ends = lengths.cumsum(0).clamp(max=tokens)
    return torch.cat([ends.new_zeros(1), ends[: int((ends < tokens).sum()) + 1]])


def of_masks(is_small: bool) -> dict[str, Any]:
    tokens, many = (2048, 1 << 14) if is_small else (32768, 1 << 20)
    offsets, more = packed(tokens, 200, 3000), packed(many, 200, 3000)

    def structure() -> Any:
        return block_lists(masks.documents(offsets) & masks.causal(), tokens, tokens)

    mod = (masks.documents(offsets) & masks.causal()).mod()

    def pairs() -> Any:
        return create_block_mask(mod, None, None, tokens, tokens, device="cpu")

    def million() -> Any:
        return block_lists(masks.documents(more) & masks.causal() & masks.window(4096), many, many)

    structure(), million()
    ours, theirs = median(seconds(structure) for _ in range(9)), seconds(pairs)
    ours_bytes, theirs_bytes = peak_bytes(structure), peak_bytes(pairs)
    lists, there = structure(), pairs()
    is_equal = int(there.kv_num_blocks.sum()) == int((~lists.is_full).sum()) and int(
        there.full_kv_num_blocks.sum()
    ) == int(lists.is_full.sum())
    return {
        "tokens": tokens,
        "blocks": lists.row.numel(),
        "as_many_blocks_as_torch": is_equal,
        "ours_s": ours,
        "create_block_mask_s": theirs,
        "faster": theirs / ours,
        "ours_bytes": ours_bytes,
        "create_block_mask_bytes": theirs_bytes,
        "smaller": theirs_bytes / ours_bytes,
        "many_tokens": many,
        "many_s": [min(times := [seconds(million) for _ in range(9)]), median(times), max(times)],
        "many_bytes": peak_bytes(million),
        "many_blocks": million().row.numel(),
    }


def of_attention(name: str, tokens: int, mask: Mask, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 8, tokens, 64, dtype=dtype, requires_grad=True) for _ in range(3))
    grad, observed = torch.randn(1, 8, tokens, 64, dtype=dtype), mask.dense(tokens, tokens)

    def ours() -> tuple[Tensor, ...]:
        out = flatout.attention(q, k, v, mask=mask)
        return out, *torch.autograd.grad(out, [q, k, v], grad)

    def dense() -> tuple[Tensor, ...]:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=observed)
        return out, *torch.autograd.grad(out, [q, k, v], grad)

    taken: tuple[list[float], list[float]] = ([], [])
    ours(), dense()
    for number in range(rounds):
        for side, work in ((0, dense), (1, ours)) if number % 2 else ((1, ours), (0, dense)):
            taken[side].append(seconds(work))
    ratio = ratio_estimate(*taken)
    mine, theirs = ours(), dense()
    return {
        "what": name,
        "dtype": str(dtype).removeprefix("torch."),
        "dense_s": median(taken[0]),
        "ours_s": median(taken[1]),
        "faster": [ratio.value, ratio.low, ratio.high],
        "apart": [
            ((m.double() - t.double()).norm() / t.double().norm()).item() for m, t in zip(mine, theirs, strict=True)
        ],
        "ours_bytes": peak_bytes(ours),
        "dense_bytes": peak_bytes(dense),
    }


def cases(is_small: bool) -> dict[str, tuple[int, Mask]]:
    scale = 8 if is_small else 1
    a, b = 4096 // scale, 8192 // scale
    ragged = torch.cat(
        [torch.tensor([0]), torch.randperm(a - 1, generator=torch.Generator().manual_seed(1))[:15].sort().values + 1]
    )
    return {
        "16 documents": (a, masks.documents(list(range(0, a + 1, a // 16)))),
        "16 documents of any length, causal": (a, masks.documents([*ragged.tolist(), a]) & masks.causal()),
        "window 512, causal": (b, masks.window(511)),
        "window 512 and 4 sinks": (b, (masks.window(511) | masks.sinks(4)) & masks.causal()),
        "prefix 512": (a, masks.causal() | masks.prefix(512)),
    }


def of_length(is_small: bool) -> list[dict[str, Any]]:
    found = []
    for tokens in (512, 1024) if is_small else (8192, 16384, 32768, 65536):
        q, k, v = (torch.randn(1, 4, tokens, 64, requires_grad=True) for _ in range(3))
        mask = masks.documents(packed(tokens, 100, 1000)) & masks.causal() & masks.window(512)

        def work(q: Tensor = q, k: Tensor = k, v: Tensor = v, mask: Mask = mask) -> None:
            flatout.attention(q, k, v, mask=mask).sum().backward()

        work()
        found.append({"tokens": tokens, "s": median(seconds(work) for _ in range(3)), "bytes": peak_bytes(work)})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--only", default="masks,attention,length")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    wanted = options.only.split(",")
    if unknown := set(wanted) - {"masks", "attention", "length"}:
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are masks, attention, length")
    record: dict[str, Any] = {
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }

    def found(name: str, what: Any) -> None:
        record[name] = what
        print(f"{name}: {json.dumps(what, indent=1)}", flush=True)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(record, indent=1) + "\n")

    if "masks" in wanted:
        found("masks", of_masks(options.small))
    if "attention" in wanted:
        results = []
        for name, (tokens, mask) in cases(options.small).items():
            for dtype in (torch.float32, torch.bfloat16):
                results.append(of_attention(name, tokens, mask, dtype, 3 if options.small else 7))
        found("attention", results)
    if "length" in wanted:
        found("length", of_length(options.small))
    return 0


if __name__ == "__main__":
    sys.exit(main())

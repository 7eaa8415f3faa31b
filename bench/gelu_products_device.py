"""A product with GELU in its epilogue, forward and backward, against the library's product and a pointwise kernel after it.

    python bench/gelu_products_device.py OUT.json            on a GPU
    TRITON_INTERPRET=1 python bench/gelu_products_device.py OUT.json --small      on a CPU, correctness alone

An MLP's first product stores what goes into GELU and what comes out of it in one kernel; in the backward, the product that makes
the gradient of GELU's result stores that of its input. Each way saves a pass over (tokens, 4 width) numbers. Tiles of several
sizes are tried, all against a float64 reference on random numbers, and raced in turn. The other side is torch.mm and a GELU that
Inductor compiled. Sizes are those of GPT-2 (48 x 1024 tokens, width 768) and of BERT-base (32 x 512).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flatout.blocks.kernels.attention.cudnn_plans import (
    TensorLike,
    _current_handle,
    add_tensor,
    has_cudnn,
    new_graph,
    set_output,
)

NUM_PLANS = 6
"""Of cuDNN's for each graph."""
SIZES = {"GPT-2": (48 * 1024, 768), "BERT-base": (32 * 512, 768)}
SUMMED = [
    {"ROWS": rows, "BM": bm, "BN": bn, "num_warps": warps}
    for rows, bm, bn, warps in (
        (64, 8, 512, 8),
        (128, 8, 512, 8),
        (128, 16, 256, 8),
        (256, 16, 256, 8),
        (64, 16, 128, 4),
        (256, 32, 128, 8),
        (128, 4, 1024, 8),
    )
]
"""Rows and columns of a program that makes the gradient of GELU's input and its sums over rows, the bias's gradient."""
TILES = [
    {"BM": bm, "BN": bn, "BK": bk, "num_warps": warps, "num_stages": stages, "SPLIT": split}
    for bm, bn, bk, warps, stages in (
        (128, 256, 64, 8, 3),
        (128, 256, 64, 8, 4),
        (128, 128, 64, 4, 3),
        (128, 128, 64, 4, 4),
        (128, 128, 64, 8, 4),
        (256, 128, 64, 8, 3),
    )
    for split in (False, True)
]


@triton.jit
def _gelu(x):  # type: ignore[no-untyped-def]
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _gelu_slope(x):  # type: ignore[no-untyped-def]
    density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * density


@triton.jit
def _corner(place, tiles_m, tiles_n, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # type: ignore[no-untyped-def]
    first = place // (GROUP * tiles_n) * GROUP
    group = min(tiles_m - first, GROUP)
    return (first + place % (GROUP * tiles_n) % group) * BM, place % (GROUP * tiles_n) // group * BN


@triton.jit
def product_then_gelu(  # type: ignore[no-untyped-def]
    a_MK, w_NK, pre_MN, act_MN, M, N, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for place in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        row, col = _corner(place, tiles_m, tiles_n, 8, BM, BN)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            acc = tl.dot(a_MK.load([row, k]), w_NK.load([col, k]).T, acc)
        if SPLIT:
            first, second = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
            half = first.to(a_MK.dtype)
            pre_MN.store([row, col], half)
            act_MN.store([row, col], _gelu(half.to(tl.float32)).to(a_MK.dtype))
            half = second.to(a_MK.dtype)
            pre_MN.store([row, col + BN // 2], half)
            act_MN.store([row, col + BN // 2], _gelu(half.to(tl.float32)).to(a_MK.dtype))
        else:
            whole = acc.to(a_MK.dtype)
            pre_MN.store([row, col], whole)
            act_MN.store([row, col], _gelu(whole.to(tl.float32)).to(a_MK.dtype))


@triton.jit
def product_then_slope(  # type: ignore[no-untyped-def]
    a_MK, w_KN, pre_MN, out_MN, M, N, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for place in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        row, col = _corner(place, tiles_m, tiles_n, 8, BM, BN)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            acc = tl.dot(a_MK.load([row, k]), w_KN.load([k, col]), acc)
        if SPLIT:
            first, second = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
            slope = _gelu_slope(pre_MN.load([row, col]).to(tl.float32))
            out_MN.store([row, col], (first * slope).to(a_MK.dtype))
            slope = _gelu_slope(pre_MN.load([row, col + BN // 2]).to(tl.float32))
            out_MN.store([row, col + BN // 2], (second * slope).to(a_MK.dtype))
        else:
            slope = _gelu_slope(pre_MN.load([row, col]).to(tl.float32))
            out_MN.store([row, col], (acc * slope).to(a_MK.dtype))


@triton.jit
def slope_and_sums(  # type: ignore[no-untyped-def]
    pre_MN, grad_MN, out_MN, sums_PN, M, N, ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    sums = tl.zeros((BN,), tl.float32)
    for first in range(0, ROWS, BM):
        rows = block * ROWS + first + tl.arange(0, BM)
        inside = (rows[:, None] < M) & (cols[None, :] < N)
        place = rows[:, None].to(tl.int64) * N + cols[None, :]
        x = tl.load(pre_MN + place, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_MN + place, mask=inside, other=0.0).to(tl.float32)
        density = tl.exp(-0.5 * x * x)
        t = 1.0 / (1.0 + 0.3275911 * 0.7071067811865476 * tl.abs(x))
        tail = (
            t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))) * density
        )
        cumulative = tl.where(x < 0, 0.5 * tail, 1.0 - 0.5 * tail)
        found = (grad * (cumulative + 0.3989422804014327 * x * density)).to(out_MN.dtype.element_ty)
        tl.store(out_MN + place, found, mask=inside)
        sums += tl.sum(found.to(tl.float32), 0)
    tl.store(sums_PN + block * N + cols, sums, mask=cols < N)


def summed(pre: Tensor, grad: Tensor, out: Tensor, tile: dict[str, Any]) -> Callable[[], Tensor]:
    """The gradient of GELU's input into `out`, and its sums over rows as the result."""
    (m, n), kernel = pre.shape, slope_and_sums
    parts = torch.empty(triton.cdiv(m, tile["ROWS"]), n, device=pre.device)

    def run() -> Tensor:
        kernel[len(parts), triton.cdiv(n, tile["BN"])](pre, grad, out, parts, m, n, **tile)
        return parts.sum(0)

    return run


def _programs(device: torch.device, tiles: int, warps: int) -> int:
    if device.type != "cuda":
        return min(tiles, 3)
    per_sm = 1 if warps == 8 else 2
    return min(tiles, per_sm * torch.cuda.get_device_properties(device).multi_processor_count)


def fused(a: Tensor, w: Tensor, tile: dict[str, Any], pre: Tensor | None, *outs: Tensor) -> Callable[[], object]:
    """The kernel with this tile, its descriptors made once: forward without `pre`, else backward."""
    (m, k), n = a.shape, w.shape[0] if pre is None else w.shape[1]
    bm, bn, bk = tile["BM"], tile["BN"], tile["BK"]
    width = bn // 2 if tile["SPLIT"] else bn
    forward = pre is None
    weights = TensorDescriptor.from_tensor(w, [bn, bk] if forward else [bk, bn])
    results = [TensorDescriptor.from_tensor(t, [bm, width]) for t in (*([] if pre is None else [pre]), *outs)]
    source = TensorDescriptor.from_tensor(a, [bm, bk])
    kernel: Any = product_then_gelu if forward else product_then_slope
    grid = (_programs(a.device, triton.cdiv(m, bm) * triton.cdiv(n, bn), tile["num_warps"]),)
    return lambda: kernel[grid](source, weights, *results, m, n, k, **tile)


def cudnn_plans(
    x: Tensor, w: Tensor, *results: Tensor, bias: Tensor | None = None, pre: Tensor | None = None
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Plans of cuDNN for x @ w: with GELU's input and result; or, where its input is given, with the gradient of that.

    With a bias that is added in the forward; its gradient, float32 (1, N), is the last of the results in the backward.
    """
    import cudnn

    def like(t: Tensor) -> TensorLike:
        return TensorLike((1, *t.shape), (t.numel(), *t.stride()), t.dtype)

    graph = new_graph(x.device, x.dtype)
    inputs = [t for t in (x, w, bias if pre is None else pre) if t is not None]
    tensors = [add_tensor(graph, like(t)) for t in inputs]
    product = graph.matmul(A=tensors[0], B=tensors[1])
    if pre is None:
        product = product if bias is None else graph.bias(input=product, bias=tensors[2])
        outs = [product, graph.gelu(input=product)]
    else:
        outs = [graph.gelu_backward(loss=product, input=tensors[2])]
        if len(results) > 1:
            outs.append(graph.reduction(input=outs[0], mode=cudnn.reduction_mode.ADD))
    for tensor, result in zip(outs, results, strict=True):
        set_output(tensor, like(result))
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    operands = dict(zip([*tensors, *outs], [*inputs, *results], strict=True))
    for number in range(min(NUM_PLANS, graph.get_execution_plan_count())):
        try:
            graph.build_plan_at_index(number)
        except Exception:  # noqa: BLE001  # the next one may do
            continue
        workspace = torch.empty(graph.get_workspace_size_plan_at_index(number) + 16, dtype=torch.uint8, device=x.device)
        run = partial(graph.execute_plan_at_index, operands, workspace, number, _current_handle(x.device))
        yield f"cuDNN, plan {number}", run


def gelu_slope(pre: Tensor, grad: Tensor) -> Tensor:
    result: Tensor = torch.ops.aten.gelu_backward(grad, pre)
    return result


def _short_erf(x: Tensor, density: Tensor) -> Tensor:
    """The error function at x / sqrt(2); `density` is exp(-x^2 / 2)."""
    t = 1 / (1 + 0.3275911 * 0.7071067811865476 * x.abs())
    sums = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return torch.copysign(1 - sums * density, x)


def short_gelu(pre: Tensor) -> Tensor:
    x = pre.float()
    return (0.5 * x * (1 + _short_erf(x, torch.exp(-0.5 * x * x)))).to(pre.dtype)


def short_slope(pre: Tensor, grad: Tensor) -> Tensor:
    x = pre.float()
    density = torch.exp(-0.5 * x * x)
    return (grad.float() * (0.5 * (1 + _short_erf(x, density)) + 0.3989422804014327 * x * density)).to(pre.dtype)


def slope_then_sums(pre: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    found = gelu_slope(pre, grad)
    return found, found.float().sum(0)


def error(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def judged(
    name: str, tokens: int, width: int, device: torch.device, tiles: list[dict[str, Any]], min_time_s: float
) -> Any:
    """Errors and, on a GPU, seconds of all ways at these sizes."""
    from flatout.machine.measure.timer import compare_times

    generator = torch.Generator(device).manual_seed(0)
    dtype = (
        torch.bfloat16 if device.type == "cuda" else torch.float16
    )  # Triton's interpreter multiplies bfloat16 wrongly

    def drawn(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, device=device, generator=generator)).to(dtype)

    x, dy = drawn(tokens, width), drawn(tokens, width)
    w1, w2 = drawn(4 * width, width, scale=width**-0.5), drawn(width, 4 * width, scale=width**-0.5)
    pre, act, grad = (torch.empty(tokens, 4 * width, device=device, dtype=dtype) for _ in range(3))
    rows = slice(0, 1024)
    exact = x[rows].double() @ w1.double().T
    wanted_act = F.gelu(exact)
    library_pre = x @ w1.T
    slope_of = library_pre[rows].double().requires_grad_()
    F.gelu(slope_of).backward(dy[rows].double() @ w2.double())
    assert slope_of.grad is not None
    wanted_grad = slope_of.grad
    gelu, slope, gelu_short, slope_short = (
        torch.compile(f) if device.type == "cuda" else f for f in (F.gelu, gelu_slope, short_gelu, short_slope)
    )
    forward: dict[str, Callable[[], object]] = {"library, then compiled GELU": lambda: gelu(torch.mm(x, w1.T))}
    backward: dict[str, Callable[[], object]] = {
        "library, then compiled GELU": lambda: slope(library_pre, torch.mm(dy, w2)),
    }
    alone: dict[str, dict[str, Callable[[], object]]] = {
        "forward": {
            "product alone": lambda: torch.mm(x, w1.T),
            "compiled GELU alone": lambda: gelu(library_pre),
            "with a short erf alone": lambda: gelu_short(library_pre),
        },
        "backward": {
            "product alone": lambda: torch.mm(dy, w2),
            "compiled GELU alone": lambda: slope(library_pre, grad),
            "with a short erf alone": lambda: slope_short(library_pre, grad),
        },
    }
    found: dict[str, Any] = {"tokens": tokens, "width": width, "errors": {}, "failed": {}}
    found["errors"]["library"] = [
        error(gelu(library_pre)[rows], wanted_act),
        error(slope(library_pre, torch.mm(dy, w2))[rows], wanted_grad),
    ]
    in_two = torch.compile(slope_then_sums) if device.type == "cuda" else slope_then_sums
    alone["backward"]["compiled, and the bias's gradient"] = lambda: in_two(library_pre, grad)
    slope_of = library_pre.double().requires_grad_()
    F.gelu(slope_of).backward((given := drawn(tokens, 4 * width)).double())
    assert slope_of.grad is not None
    for tile in SUMMED:
        label = "with the bias's gradient, " + ", ".join(f"{key} {value}" for key, value in tile.items())
        run = summed(library_pre, given, out := torch.empty_like(given), tile)
        found["errors"][label] = [error(run(), slope_of.grad.sum(0)), error(out, slope_of.grad)]
        alone["backward"][label] = run
    found["errors"]["short erf"] = [
        error(gelu_short(library_pre)[rows], wanted_act),
        error(slope_short(library_pre, torch.mm(dy, w2))[rows], wanted_grad),
    ]
    for tile in tiles:
        label = ", ".join(f"{key} {value}" for key, value in tile.items())
        try:
            one, two = fused(x, w1, tile, None, pre, act), fused(dy, w2, tile, library_pre, grad)
            one()
            two()
            found["errors"][label] = [error(act[rows], wanted_act), error(grad[rows], wanted_grad)]
        except Exception as e:  # noqa: BLE001  # a tile that does not fit the device
            found["failed"][label] = f"{type(e).__name__}: {str(e)[:200]}"
            continue
        forward[label], backward[label] = one, two
    if device.type == "cuda" and has_cudnn():
        bias, of_bias = torch.zeros(1, 4 * width, device=device, dtype=dtype), torch.empty(1, 4 * width, device=device)
        settings: dict[str, tuple[dict[str, Callable[[], object]], Callable[[], Any]]] = {
            "": (forward, lambda: cudnn_plans(x, w1.T, pre, act)),
            ", with a bias": (forward, lambda: cudnn_plans(x, w1.T, pre, act, bias=bias)),
            ", backward": (backward, lambda: cudnn_plans(dy, w2, grad, pre=library_pre)),
            ", backward with the bias's gradient": (
                backward,
                lambda: cudnn_plans(dy, w2, grad, of_bias, pre=library_pre),
            ),
        }
        for suffix, (ways, plans) in settings.items():
            try:
                for label, run in plans():
                    run()
                    wanted, got = (wanted_act, act) if ways is forward else (wanted_grad, grad)
                    found["errors"][label + suffix] = [error(got[rows], wanted)]
                    ways[label + suffix] = run
            except Exception as e:  # noqa: BLE001  # cuDNN has no plan for it
                found["failed"][f"cuDNN{suffix}"] = f"{type(e).__name__}: {str(e)[:300]}"
    if device.type == "cuda":
        for title, ways in (("forward", forward), ("backward", backward)):
            timed = compare_times(ways | alone[title], device=device, min_time_s=min_time_s)
            found[title] = {label: [t.call_s.value, t.call_s.low, t.call_s.high] for label, t in timed.items()}
            usual = found[title]["library, then compiled GELU"][0]
            best = min((label for label in ways if label in found["errors"]), key=lambda label: found[title][label][0])
            print(
                f"{name}, {title}: library {1e6 * usual:.0f} us, best fused {1e6 * found[title][best][0]:.0f} us ({best})"
            )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--min-time", type=float, default=0.3)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes, tiles = SIZES, TILES
    if options.small:
        sizes = {"small": (96, 64)}
        tiles = [
            {"BM": 32, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 2, "SPLIT": split} for split in (False, True)
        ]
    found = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
    for name, (tokens, width) in sizes.items():
        found[name] = judged(name, tokens, width, device, tiles, options.min_time)
        options.out.write_text(json.dumps(found, indent=1))
    print(json.dumps({name: found[name]["errors"] for name in sizes}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

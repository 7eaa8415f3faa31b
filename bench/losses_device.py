"""Fused losses and norms on a GPU: plain PyTorch, torch.compile, PyTorch's and Liger's fused ones, flatout's; in one run.

    python bench/losses_device.py [--out FILE] [--only loss,rows,tuning] [--small]

Parts:
  loss     a linear layer's cross entropy, forward and backward: time (median, interval, ratio to the unfused), the peak of memory
           above the start, with and without the gradients that come out, errors of loss and gradients against float64
  rows     norms (with a residual too), rotary embedding, SwiGLU, forward and backward: times of calls and of a captured graph's
           replays, and the share of the memory's measured rate that the bytes which must move, each once, come to
  tuning   the loss's row kernel and the norms' backward pass with other numbers of warps
Variants of a case are timed in interleaved rounds on the same random inputs, each checked against float64 before. A variant
that fails is recorded with its error, and costs the others nothing; results are written after each case. Liger is used where it
is installed. --small runs on a CPU, to see that it runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import flatout
from flatout.blocks.kernels.linear_cross_entropy.sizes import device_chunk
from flatout.core.registry import kernels
from flatout.machine.measure.timer import Timing, compare_times

Made = Callable[..., Any]
Record = dict[str, Any]


class LossCase(NamedTuple):
    tokens: int
    width: int
    vocabulary: int
    ignored: float = 0.0


LOSSES = {
    "128k vocabulary, 8k tokens": LossCase(8192, 4096, 128256),
    "128k vocabulary, 16k tokens": LossCase(16384, 4096, 128256),
    "128k vocabulary, 16k tokens, half of them ignored": LossCase(16384, 4096, 128256, 0.5),
    "GPT-2's vocabulary, 16k tokens": LossCase(16384, 768, 50257),
    "GPT-2's vocabulary filled up, 48k tokens": LossCase(49152, 768, 50304),
    "small vocabulary, 16k tokens": LossCase(16384, 2048, 8192),
}
SMALL_LOSSES = {"small": LossCase(64, 16, 300), "half ignored": LossCase(64, 16, 300, 0.5)}
WIDTHS, ROWS = (4096, 8192), 16384


class Bench:
    """One machine's results, written as they come."""

    def __init__(self, out: Path | None, *, small: bool) -> None:
        self.out, self.small = out, small
        self.device = torch.device("cpu" if small else "cuda")
        self.dtype = torch.float32 if small else torch.bfloat16
        self.max_time_s = 1.0 if small else 12.0
        self.results: Record = {
            "device": "cpu" if small else torch.cuda.get_device_name(),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "triton": _version("triton"),
            "liger": _version("liger_kernel"),
            "parts": {},
        }

    def write(self, part: str, name: str, record: Record) -> None:
        self.results["parts"].setdefault(part, {})[name] = record
        print(f"--- {part}: {name}\n{json.dumps(record, indent=1)}", flush=True)
        if self.out is not None:
            self.out.write_text(json.dumps(self.results, indent=1) + "\n")

    def drawn(self, *shape: int, by: float = 1.0) -> Tensor:
        return (by * torch.randn(shape, device=self.device)).to(self.dtype).requires_grad_()


def _version(package: str) -> str | None:
    if find_spec(package) is None:
        return None
    from importlib.metadata import version

    return version(package.replace("_", "-"))


@contextmanager
def said(record: Record) -> Iterator[None]:
    """What stops a variant is what it said."""
    try:
        yield
    except Exception as e:  # noqa: BLE001  # one variant that fails must not cost the others
        record["error_text"] = f"{type(e).__name__}: {str(e)[:400]}"
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def timing_of(timing: Timing) -> Record:
    call, ratio = timing.call_s, timing.ratio
    record: Record = {"call_s": call.value, "low_s": call.low, "high_s": call.high, "n": call.num_samples}
    if ratio is not None:
        record["over_first"] = [ratio.value, ratio.low, ratio.high]
    return record


# ---------------------------------------------------------------------------------------------------------------- the loss


def loss_variants(case: LossCase) -> dict[str, Made]:
    """Each of (hidden, weight, targets)."""

    def unfused(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w), t)

    def in_float(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w).float(), t)

    variants: dict[str, Made] = {
        "unfused": unfused,
        "unfused, float32 logits": in_float,
        "unfused, compiled": torch.compile(unfused, dynamic=False),
        "unfused, float32 logits, compiled": torch.compile(in_float, dynamic=False),
        "flatout": flatout.linear_cross_entropy,
        "flatout, compiled": torch.compile(flatout.linear_cross_entropy, fullgraph=True, dynamic=False),
        "flatout, float8": partial(flatout.linear_cross_entropy, float8=True),
    }
    if case.ignored:
        bound = round(case.tokens * (1 - case.ignored))
        variants["flatout, num_kept"] = lambda h, w, t: flatout.linear_cross_entropy(h, w, t, num_kept=bound)
    if hasattr(F, "linear_cross_entropy"):
        variants["F.linear_cross_entropy"] = F.linear_cross_entropy
    if find_spec("liger_kernel") is not None:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss()
        variants["liger"] = lambda h, w, t: liger(w, h, t)
        wide = LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)
        variants["liger, float32 sum"] = lambda h, w, t: wide(w, h, t)
    return variants


def exact_loss(h: Tensor, w: Tensor, t: Tensor, *, chunk: int = 1024) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients in float64, some tokens at a time."""
    with torch.no_grad():
        wide, kept = w.double(), t != -100
        loss = torch.zeros((), dtype=torch.float64, device=h.device)
        grad_h, grad_w = torch.empty_like(h, dtype=torch.float64), torch.zeros_like(wide)
        for start in range(0, len(h), chunk):
            rows = slice(start, start + chunk)
            logits = h[rows].double() @ wide.T
            norms = logits.logsumexp(dim=1, keepdim=True)
            places = t[rows].where(kept[rows], 0)[:, None]
            loss += (norms - logits.gather(1, places)).squeeze(1)[kept[rows]].sum()
            grad = logits.sub_(norms).exp_()
            grad.scatter_add_(1, places, torch.full_like(norms, -1.0))
            grad *= (kept[rows].double() / kept.sum())[:, None]
            grad_h[rows] = grad @ wide
            grad_w.addmm_(grad.T, h[rows].double())
        return loss / kept.sum(), grad_h, grad_w


def error(got: Tensor, wanted: Tensor) -> float:
    """The norm of the difference over that of what is wanted, some rows at a time."""
    parts = zip(rows_of(got.detach()).split(8192), rows_of(wanted).split(8192), strict=True)
    difference = sum(float((a.double() - b).square().sum()) for a, b in parts)
    return float((difference / wanted.square().sum()).sqrt())


def rows_of(t: Tensor) -> Tensor:
    return t.reshape(-1, t.shape[-1] if t.dim() else 1)


def bench_loss(bench: Bench, name: str, case: LossCase) -> None:
    torch.manual_seed(0)
    h, w = bench.drawn(case.tokens, case.width), bench.drawn(case.vocabulary, case.width, by=case.width**-0.5)
    t = torch.randint(case.vocabulary, (case.tokens,), device=bench.device)
    t[torch.randperm(case.tokens, device=bench.device)[: round(case.tokens * case.ignored)]] = -100
    record: Record = {
        "case": case._asdict(),
        "chunk": device_chunk(num_tokens=case.tokens, width=case.width),
        "variants": {},
    }
    wanted = exact_loss(h, w, t)
    steps: dict[str, Callable[[], object]] = {}

    def step_of(run: Made) -> Callable[[], object]:
        def step() -> None:
            h.grad = w.grad = None
            run(h, w, t).backward()

        return step

    for kind, run in loss_variants(case).items():
        of = record["variants"][kind] = {}
        with said(of):
            step = step_of(run)
            step()  # compiled, and libraries' workspaces are there
            of["memory"] = peak(bench, step, outputs=(h, w))
            h.grad = w.grad = None
            loss = run(h, w, t)
            loss.backward()
            made = {"loss": loss, "hidden": h.grad, "weight": w.grad}
            of["errors"] = {name: error(m, wanted[n]) for n, (name, m) in enumerate(made.items())}
            steps[kind] = step
        h.grad = w.grad = None
    del wanted
    gc.collect()
    with said(record):
        for kind, timing in compare_times(
            steps, device=bench.device, min_time_s=bench.max_time_s / 2, max_time_s=bench.max_time_s
        ).items():
            record["variants"][kind]["time"] = timing_of(timing)
    with said(record):
        record["flatout_over_unfused"] = against(record["variants"], "flatout", "unfused")
    bench.write("loss", name, record)


def peak(bench: Bench, step: Callable[[], object], *, outputs: tuple[Tensor, ...]) -> Record | None:
    """Bytes at the peak above what there was, and less what the gradients are that come out."""
    if bench.device.type != "cuda":
        return None
    for t in outputs:
        t.grad = None
    gc.collect()
    torch.cuda.empty_cache()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    above = torch.cuda.max_memory_allocated() - start
    grads = sum(t.grad.numel() * t.grad.element_size() for t in outputs if t.grad is not None)
    return {"above_start_bytes": above, "above_start_and_gradients_bytes": above - grads}


def against(variants: Record, one: str, other: str) -> Record:
    record: Record = {"time": variants[one]["time"]["call_s"] / variants[other]["time"]["call_s"]}
    for kind in ("above_start_bytes", "above_start_and_gradients_bytes"):
        if variants[one]["memory"] is not None:
            record[f"{kind}_other_over_one"] = variants[other]["memory"][kind] / variants[one]["memory"][kind]
    return record


# ------------------------------------------------------------------------------------------------------------ rows


class RowCase(NamedTuple):
    """Inputs that need gradients, others, the variants of (inputs, others), and how many arrays of the result's size must
    move."""

    inputs: tuple[Tensor, ...]
    others: tuple[Tensor, ...]
    variants: dict[str, Made]
    op: str
    num_arrays: int
    options: dict[str, Any]
    arguments: Callable[..., tuple[Any, ...]]


def row_cases(bench: Bench, rows: int, width: int) -> Iterator[tuple[str, RowCase]]:
    """The arrays that move: each input and output of forward and backward once."""
    x, r, weight, bias = bench.drawn(rows, width), bench.drawn(rows, width), bench.drawn(width), bench.drawn(width)
    has_liger = find_spec("liger_kernel") is not None
    if has_liger:
        from liger_kernel.transformers import functional as liger

    def rms(x: Tensor, w: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w

    variants: dict[str, Made] = {
        "eager": rms,
        "compiled": torch.compile(rms, dynamic=False),
        "F.rms_norm": lambda x, w: F.rms_norm(x, (width,), w, 1e-6),
        "flatout": flatout.rms_norm,
    }
    if has_liger:
        variants["liger"] = lambda x, w: liger.liger_rms_norm(x, w, 1e-6)
    yield "rms norm", RowCase((x, weight), (), variants, "norm.rms_norm", 5, {}, lambda x, w: (x, w))

    def rms_sum(x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        s = x + r
        return rms(s, w), s

    variants = {
        "eager": rms_sum,
        "compiled": torch.compile(rms_sum, dynamic=False),
        "F.rms_norm": lambda x, w, r: (F.rms_norm(x + r, (width,), w, 1e-6), x + r),
        "flatout": flatout.rms_norm,
    }
    if has_liger and hasattr(liger, "liger_fused_add_rms_norm"):
        variants["liger"] = lambda x, w, r: liger.liger_fused_add_rms_norm(x, r, w, 1e-6)
    yield "rms norm of a sum", RowCase((x, weight, r), (), variants, "norm.rms_norm", 8, {}, lambda x, w, r: (x, w, r))

    variants = {
        "eager": lambda x, w, b: F.layer_norm(x, (width,), w, b),
        "compiled": torch.compile(lambda x, w, b: F.layer_norm(x, (width,), w, b), dynamic=False),
        "flatout": flatout.layer_norm,
    }
    if has_liger:
        variants["liger"] = lambda x, w, b: liger.liger_layer_norm(x, w, b, 1e-5)
    yield "layer norm", RowCase((x, weight, bias), (), variants, "norm.layer_norm", 5, {}, lambda x, w, b: (x, w, b))

    def layer_sum(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        s = x + r
        return F.layer_norm(s, (width,), w, b), s

    variants = {
        "eager": layer_sum,
        "compiled": torch.compile(layer_sum, dynamic=False),
        "flatout": flatout.layer_norm,
    }
    inputs = (x, weight, bias, r)
    yield "layer norm of a sum", RowCase(inputs, (), variants, "norm.layer_norm", 8, {}, lambda *all: all)

    def gate(a: Tensor, b: Tensor) -> Tensor:
        return F.silu(a) * b

    variants = {"eager": gate, "compiled": torch.compile(gate, dynamic=False), "flatout": flatout.swiglu}
    if has_liger:
        variants["liger"] = liger.liger_swiglu
    yield "swiglu", RowCase((x, r), (), variants, "swiglu", 8, {}, lambda *all: all)

    packed = bench.drawn(rows, 2 * width)

    def gate_packed(p: Tensor) -> Tensor:
        return gate(*p.chunk(2, dim=-1))

    variants = {"eager": gate_packed, "compiled": torch.compile(gate_packed, dynamic=False), "flatout": flatout.swiglu}
    yield "swiglu, packed", RowCase((packed,), (), variants, "swiglu", 8, {}, lambda p: (p,))
    for layout in ("half", "interleaved"):
        yield f"rotary, {layout}", rotary_case(bench, rows, width, layout)


def rotary_case(bench: Bench, rows: int, width: int, layout: str) -> RowCase:
    dim = min(128, width)
    tokens = max(1, rows // 4)
    x = bench.drawn(rows // tokens, tokens, width // dim, dim)
    angles = torch.outer(torch.arange(tokens), 1e4 ** (-torch.arange(dim // 2) / (dim // 2))).to(bench.device)
    cos, sin = angles.cos(), angles.sin()

    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c, s = cos[:, None], sin[:, None]
        if layout == "half":
            a, b = x.chunk(2, dim=-1)
            return torch.cat((a * c - b * s, b * c + a * s), dim=-1).to(x.dtype)
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * c - b * s, b * c + a * s), dim=-1).flatten(-2).to(x.dtype)

    variants: dict[str, Made] = {
        "eager": turned,
        "compiled": torch.compile(turned, dynamic=False),
        "flatout": lambda x, c, s: flatout.rotary(x, c, s, layout=layout),
    }
    if layout == "half" and find_spec("liger_kernel") is not None:
        from liger_kernel.transformers.functional import liger_rope

        key = torch.zeros(x.shape[0], 1, tokens, dim, device=x.device, dtype=x.dtype)
        wide_cos, wide_sin = (torch.cat((t, t), dim=-1)[None].to(x.dtype) for t in (cos, sin))
        # It turns queries and keys together, and where they are: one head of keys more, nothing else written.
        variants["liger"] = lambda x, c, s: liger_rope(x.transpose(1, 2), key, wide_cos, wide_sin)[0].transpose(1, 2)
    return RowCase((x,), (cos, sin), variants, "rotary", 4, {"layout": layout}, lambda x, c, s: (x, c, s))


def outputs_of(made: Any) -> list[Tensor]:
    return list(made) if isinstance(made, (tuple, list)) else [made]


def bench_rows(bench: Bench, name: str, case: RowCase, rate: float | None) -> None:
    reference = kernels(case.op)[-1]
    record: Record = {"variants": {}}
    grads = [torch.randn_like(o) for o in outputs_of(case.variants["flatout"](*case.inputs, *case.others))]
    must_bytes = case.num_arrays * grads[0].numel() * grads[0].element_size()
    record["bytes_that_must_move"] = must_bytes
    wide = [t.detach().double().requires_grad_() for t in case.inputs]
    outputs = outputs_of(reference.run(*case.arguments(*wide, *(t.double() for t in case.others)), **case.options))
    wanted = [*outputs, *torch.autograd.grad(outputs, wide, [g.double() for g in grads])]
    calls: dict[str, Callable[[], object]] = {}
    replays: dict[str, Callable[[], object]] = {}
    for kind, run in case.variants.items():
        of = record["variants"][kind] = {}
        with said(of):
            # Copies: some implementations write over what they are given.
            fresh = [t.detach().clone().requires_grad_() for t in case.inputs]
            made = outputs_of(run(*fresh, *case.others))
            got = [o.detach().clone() for o in made] + list(
                torch.autograd.grad(made, fresh, [g.clone() for g in grads])
            )
            of["errors"] = [error(a, b.detach()) for a, b in zip(got, wanted, strict=True)]
            calls[kind] = step_of_rows(run, case, grads)
            if bench.device.type == "cuda":
                replays[kind] = captured(calls[kind])
    del wanted
    for kind, fns in (("call", calls), ("graph", replays)):
        if not fns:
            continue
        with said(record):
            for variant, timing in compare_times(fns, device=bench.device, min_time_s=0.3, max_time_s=4.0).items():
                of = record["variants"][variant][kind] = timing_of(timing)
                of["share_of_memory_rate"] = must_bytes / of["call_s"] / rate if rate else None
    bench.write("rows", name, record)


def step_of_rows(run: Made, case: RowCase, grads: list[Tensor]) -> Callable[[], object]:
    fresh = [t.detach().clone().requires_grad_() for t in case.inputs]

    def step() -> object:
        return torch.autograd.grad(outputs_of(run(*fresh, *case.others)), fresh, grads)

    return step


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """The step as a graph, which the host's time does not count in."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def memory_rate(bench: Bench) -> float | None:
    """Bytes a second of a large copy, reads and writes."""
    if bench.device.type != "cuda":
        return None
    a = torch.empty(1 << 30, dtype=torch.uint8, device=bench.device)
    b = torch.empty_like(a)
    timing = compare_times({"copy": lambda: b.copy_(a)}, device=bench.device, min_time_s=0.3)["copy"]
    return 2 * a.numel() / timing.call_s.value


# ---------------------------------------------------------------------------------------------------------------- tuning


_ROWS_TUNED = (
    *({"block": b, "num_warps": w} for b, w in ((2048, 8), (4096, 8), (4096, 16), (8192, 8), (8192, 16), (8192, 32))),
    *({"block": b, "num_warps": w} for b, w in ((16384, 16), (16384, 32), (32768, 32))),
    # so few rows at once that the cache holds them until they are read again
    *(
        {"block": b, "num_warps": w, "rows_at_once": rows, "is_reread": is_reread}
        for b, w in ((2048, 8), (4096, 16), (8192, 16), (8192, 32))
        for rows in (132, 264, 396)
        for is_reread in (False, True)
    ),
    {"is_reread": True},
)


def _tune_rows(bench: Bench, rate: float | None, *, tokens: int, vocabulary: int) -> None:
    """Losses and gradients of a chunk of tokens, with programs of several sizes and numbers."""
    from flatout.blocks.kernels.linear_cross_entropy.triton import launch_row_losses

    logits = torch.randn(tokens, vocabulary, device=bench.device).to(bench.dtype)
    targets = torch.randint(vocabulary, (tokens,), device=bench.device)
    scales = torch.full((tokens,), 1 / tokens, device=bench.device)
    losses = torch.empty_like(scales)
    ways: dict[str, Callable[[], object]] = {}
    record: Record = {}
    for options in _ROWS_TUNED:
        name = ", ".join(f"{key} {value}" for key, value in options.items())
        record[name] = {}

        def way(options: dict[str, Any] = options) -> None:
            launch_row_losses(logits, targets, scales, losses, -100, 0.0, 0.0, 0.0, True, **options)

        with said(record[name]):
            way()
            ways[name] = way
    for name, timing in compare_times(ways, device=bench.device, min_time_s=0.5).items():
        moved = 3 * logits.numel() * logits.element_size()
        record[name] = timing_of(timing) | {"share_of_memory_rate": moved / timing.call_s.value / (rate or 1)}
    bench.write("tuning", f"row_losses, {tokens} x {vocabulary}", record)


def bench_tuning(bench: Bench, rate: float | None) -> None:
    from flatout.blocks.kernels.norm import triton_norms as fused

    _tune_rows(bench, rate, tokens=4096, vocabulary=128256)
    _tune_rows(bench, rate, tokens=16384, vocabulary=50304)
    usual = fused._BACKWARD_PER_WARP, fused._THREADS
    for width in WIDTHS:
        x, weight = bench.drawn(ROWS, width), bench.drawn(width)
        grad = torch.randn_like(x)
        record = {}
        replays: dict[str, Callable[[], object]] = {}
        for per_warp, threads in (
            (256, 512),
            (256, 1024),
            (256, 2048),
            (512, 512),
            (512, 1024),
            (512, 2048),
            (1024, 1024),
        ):
            name = f"{per_warp} numbers a warp, {threads} threads a multiprocessor"
            record[name] = {}
            with said(record[name]):
                fused._BACKWARD_PER_WARP, fused._THREADS = per_warp, threads  # type: ignore[misc]
                replays[name] = captured(norm_step(x, weight, grad))
        fused._BACKWARD_PER_WARP, fused._THREADS = usual  # type: ignore[misc]
        for name, timing in compare_times(replays, device=bench.device, min_time_s=0.5).items():
            moved = 5 * x.numel() * x.element_size()
            record[name] = timing_of(timing) | {"share_of_memory_rate": moved / timing.call_s.value / (rate or 1)}
        bench.write("tuning", f"rms norm, {width}", record)


def norm_step(x: Tensor, weight: Tensor, grad: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(flatout.rms_norm(x, weight), [x, weight], grad)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--only", default="loss,rows,tuning")
    parser.add_argument("--small", action="store_true", help="tiny shapes on a CPU")
    options = parser.parse_args()
    bench = Bench(options.out, small=options.small)
    parts = options.only.split(",")
    rate = memory_rate(bench)
    bench.results["copy_bytes_per_s"] = rate
    if "loss" in parts:
        for name, case in (SMALL_LOSSES if options.small else LOSSES).items():
            failed: Record = {}
            with said(failed):
                bench_loss(bench, name, case)
            if failed:
                bench.write("loss", name, failed)
            torch.compiler.reset()
    if "rows" in parts:
        rows, widths = (8, (64,)) if options.small else (ROWS, WIDTHS)
        for width in widths:
            for name, row_case in row_cases(bench, rows, width):
                failed = {}
                with said(failed):
                    bench_rows(bench, f"{name}, {rows} x {width}", row_case, rate)
                if failed:
                    bench.write("rows", f"{name}, {rows} x {width}", failed)
            torch.compiler.reset()
    if "tuning" in parts and not options.small:
        failed = {}
        with said(failed):
            bench_tuning(bench, rate)
        if failed:
            bench.write("tuning", "failed", failed)
    return 0


if __name__ == "__main__":
    sys.exit(main())

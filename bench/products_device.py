"""Products on a GPU: the vendor's library, every way of flatout's, and what the floor is.

    python bench/products_device.py [--out FILE] [--only PART,...] [--quick] [--small] [--tiles 16]

Parts: 'correct' (each way against float64 on small shapes), one for each shape, 'fp32' and 'fp32-large' (float32 accuracy
from coarser products: times, and errors over three distributions), 'epilogues' (what follows the sum, in the same kernel,
against the library and torch.compile). Times are medians of interleaved rounds on random inputs that rotate through more
memory than the cache holds: `device` under replays of a captured graph, `call` of calls one after the other, as a host makes
them. Every way is compared with float64 before it is timed. Parts run in a process of their own that is started anew when one
dies; results are written as they come.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

FLOP_PER_S, BYTES_PER_S = 788e12, 4.3e12
"""Of an H200, bfloat16 products and copies through torch, measured: what the floor in the table refers to."""
ROTATED_BYTES = 160e6
SILENT_S = 100.0
"""A worker that has said nothing for so long is killed, and the part that it was in given up."""


class Shape(NamedTuple):
    """M x N x K; `layout`: n for contiguous rows, t for contiguous columns, of a and b; `is_constant`: b is a weight."""

    m: int
    n: int
    k: int
    layout: str = "nn"
    is_constant: bool = True


SHAPES = {
    "3620": Shape(3620, 3620, 3620),
    "3620-call": Shape(3620, 3620, 3620, is_constant=False),
    "vocabulary": Shape(4096, 50257, 768, "nt"),
    "1000": Shape(1000, 1000, 1000),
    "17-rows": Shape(17, 5000, 3001),
    "17-rows-nt": Shape(17, 5000, 3001, "nt"),
    "deep-64": Shape(64, 64, 65536),
    "deep-128": Shape(128, 128, 16384),
    "1-row": Shape(1, 4096, 4096),
    "1-row-nt": Shape(1, 4096, 4096, "nt"),
    "256-rows": Shape(256, 11008, 4096),
    "16-rows": Shape(16, 8192, 8192),
    "4096": Shape(4096, 4096, 4096),
}
EPILOGUES = {
    "bias+gelu": (Shape(4096, 4096, 1024, "nt"), {"bias": True, "activation": "gelu"}),
    "bias+silu": (Shape(2048, 11008, 4096, "nt"), {"bias": True, "activation": "silu"}),
    "residual": (Shape(4096, 4096, 1024, "nt"), {"bias": True, "residual": True}),
    "to-float8": (Shape(4096, 4096, 1024, "nt"), {"scale": True, "out": "float8_e4m3fn"}),
    "gelu-residual-skinny": (Shape(64, 8192, 2048, "nt"), {"bias": True, "activation": "gelu", "residual": True}),
    "gelu-misaligned": (Shape(3620, 3620, 3620), {"bias": True, "activation": "gelu"}),
}
PARTS = ("correct", *SHAPES, "fp32", "fp32-large", "epilogues", "selected")
SELECTED = ("3620", "vocabulary", "1000", "17-rows", "deep-64", "deep-128", "1-row", "256-rows", "16-rows", "4096")
SMALL = {name: Shape(min(s.m, 24), min(s.n, 40), min(s.k, 72), s.layout, s.is_constant) for name, s in SHAPES.items()}


# ------------------------------------------------------------------------------------------------------------ the worker


def work(arguments: argparse.Namespace, parts: list[str]) -> None:
    """Runs the parts, one JSON line for each result."""
    if arguments.small:
        os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
    import torch

    bench = Bench(arguments)
    for part in parts:
        emit({"part": part, "state": "begins", "at_s": time.perf_counter() - bench.started_s})
        try:
            bench.run(part)
        except Exception as e:  # noqa: BLE001 a part must not lose the others
            emit({"part": part, "error": f"{type(e).__name__}: {str(e)[:1500]}"})
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # noqa: TID251 a lost context ends this process here
        emit({"part": part, "state": "ended", "at_s": time.perf_counter() - bench.started_s})


def emit(line: dict[str, Any]) -> None:
    print("@" + json.dumps(line), flush=True)


class Inputs(NamedTuple):
    a: Any
    b: Any
    bias: Any
    residual: Any
    scale: Any


class Bench:
    def __init__(self, arguments: argparse.Namespace) -> None:
        import torch

        self.torch, self.small, self.quick, self.tiles = torch, arguments.small, arguments.quick, arguments.tiles
        self.device = torch.device("cpu" if self.small else "cuda")
        self.calls = (
            1 if self.small else 20
        )  # timed as one: a single call's time holds the wait until the device begins
        self.started_s = time.perf_counter()
        self.half = torch.float16 if self.small else torch.bfloat16  # the interpreter gets bfloat16 wrong
        torch.manual_seed(0)
        torch.backends.cuda.matmul.allow_tf32 = False

    def run(self, part: str) -> None:
        if part == "correct":
            self.correct()
        elif part == "epilogues":
            for name, (shape, sides) in EPILOGUES.items():
                small = Shape(24, 40, 72, shape.layout)
                self.guarded(f"epilogue {name}", self.epilogue, small if self.small else shape, sides)
        elif part == "selected":
            for name in SELECTED:
                self.guarded(f"selected {name}", self.selected, (SMALL if self.small else SHAPES)[name], None)
            size = Shape(40, 24, 72) if self.small else Shape(4096, 4096, 4096)
            for is_constant in (False, True):
                self.guarded(
                    f"selected fp32{' constant' * is_constant}",
                    self.selected,
                    size._replace(is_constant=is_constant),
                    "float32",
                )
        elif part in ("fp32", "fp32-large"):
            size = Shape(8192, 4096, 4096) if part == "fp32-large" else Shape(4096, 4096, 4096)
            self.float32(part, Shape(40, 24, 72) if self.small else size)
        else:
            self.shape(part, (SMALL if self.small else SHAPES)[part])

    def guarded(self, name: str, do: Callable[..., None], *args: Any) -> None:
        try:
            do(name, *args)
        except Exception as e:  # noqa: BLE001
            emit({"part": name, "error": f"{type(e).__name__}: {str(e)[:1500]}"})
            if self.device.type == "cuda":
                self.torch.cuda.synchronize()

    # -- inputs -------------------------------------------------------------------------------------------------------

    def numbers(self, rows: int, columns: int, layout: str, dtype: Any, kind: str = "normal") -> Any:
        torch = self.torch
        shape = (rows, columns) if layout == "n" else (columns, rows)
        if kind == "uniform":
            x = torch.rand(shape, device=self.device)
        else:
            x = torch.randn(shape, device=self.device)
            x = x if kind == "normal" else torch.exp(8 * x) * torch.randn(shape, device=self.device).sign()
        x = x.to(dtype)
        return x if layout == "n" else x.T

    def inputs(self, shape: Shape, dtype: Any, sides: dict[str, Any], kind: str = "normal") -> Inputs:
        from flatout.blocks.kernels.matmul.packing import Packed

        torch = self.torch
        a = self.numbers(shape.m, shape.k, shape.layout[0], dtype, kind)
        b = self.numbers(shape.k, shape.n, shape.layout[1], dtype, kind)
        if kind == "normal" and sides:
            b = (b.T / shape.k**0.5).contiguous().T if shape.layout[1] == "t" else b / shape.k**0.5
        return Inputs(
            a,
            Packed(b) if shape.is_constant else b,
            torch.randn(shape.n, device=self.device).to(dtype) if "bias" in sides else None,
            torch.randn(shape.m, shape.n, device=self.device).to(dtype) if "residual" in sides else None,
            torch.rand(shape.m, device=self.device) * 10 if "scale" in sides else None,
        )

    def problem(self, x: Inputs, shape: Shape, sides: dict[str, Any], **more: Any) -> Any:
        from flatout.blocks.kernels.matmul.packing import matrix_of
        from flatout.blocks.kernels.matmul.problem import matmul_problem

        out = getattr(self.torch, sides["out"]) if "out" in sides else None
        return matmul_problem(
            x.a, matrix_of(x.b), bias=x.bias, activation=sides.get("activation"), residual=x.residual, scale=x.scale,
            out_dtype=out, is_constant=shape.is_constant, **more,
        )  # fmt: skip

    def num_sets(self, problem: Any) -> int:
        if self.small or self.quick:
            return 2
        return int(max(2, min(48, ROTATED_BYTES // problem.traffic_bytes + 1)))

    def variants(self, problem: Any, most_tiles: int) -> tuple[Any, ...]:
        """What can run, with another number of Triton's tiles than is measured by default."""
        from flatout.blocks.kernels.matmul import tiles
        from flatout.blocks.kernels.matmul import triton as tiled
        from flatout.blocks.kernels.matmul.implementation import variants_of
        from flatout.blocks.kernels.matmul.variant import Variant

        found = variants_of(problem).variants
        if tiled.refusal(problem) is not None:
            return found
        proposed = tiles.propose_tiles(problem, tiled.device_of(problem), most=most_tiles) if most_tiles else ()
        return (*(v for v in found if v.name != "triton"), *(Variant(name="triton", tile=tile) for tile in proposed))

    def interpreted(self, problem: Any) -> tuple[Any, ...]:
        """Variants that refuse a CPU, for Triton's interpreter to run there."""
        from flatout.blocks.kernels.matmul import bfloat16x6, float16x3, tiles
        from flatout.blocks.kernels.matmul import triton as tiled
        from flatout.blocks.kernels.matmul.variant import Variant

        if not self.small:
            return ()
        if problem.precision is not None:
            return (*float16x3.KERNEL.variants(problem), *bfloat16x6.variants(problem))
        return tuple(
            Variant(name="triton", tile=t) for t in tiles.propose_tiles(problem, tiled.device_of(problem), most=2)
        )

    # -- checking -----------------------------------------------------------------------------------------------------

    def exact(self, x: Inputs, problem: Any) -> Any:
        """The result in float64, clamped to the range of a result of 8 bits."""
        from flatout.blocks.kernels.matmul.packing import matrix_of
        from flatout.blocks.kernels.matmul.reference import LARGEST, finished

        wide = [None if t is None else t.double() for t in (x.bias, x.residual, x.scale)]
        exact = finished(
            x.a.double() @ matrix_of(x.b).double(),
            bias=wide[0],
            activation=problem.epilogue.activation,
            residual=wide[1],
            scale=wide[2],
            out_dtype=self.torch.float64,
        )
        largest = LARGEST.get(problem.out_dtype)
        return exact if largest is None else exact.clamp(-largest, largest)

    def error(self, out: Any, exact: Any) -> float:
        error = float((out.double() - exact).norm() / exact.norm())
        return error if error == error else float("inf")

    def checked(
        self, problem: Any, variants: Any, x: Inputs
    ) -> tuple[dict[str, Any], dict[str, float], dict[str, str]]:
        """Runners, errors and refusals, by the variants' names; the vendor's error is the measure."""
        from flatout.blocks.kernels.matmul.implementation import bound

        exact, runners, errors, wrong = self.exact(x, problem), {}, {}, {}

        def first(variant: Any) -> tuple[str, Any, Any]:
            runner = bound(problem, variant)
            try:
                return str(variant), runner, runner(*x)
            except Exception as e:  # noqa: BLE001
                return str(variant), None, f"{type(e).__name__}: {str(e).strip()[-600:]}"

        packs = [w for w in variants if w.tile is None]
        torch, device = self.torch, self.device  # a new thread has no context of the device until it launches something
        with ThreadPoolExecutor(1 if self.small else 8, initializer=lambda: torch.zeros(1, device=device)) as pool:
            done = [*map(first, packs), *pool.map(first, [w for w in variants if w.tile is not None])]
        for name, runner, out in done:
            if runner is None:
                wrong[name] = out
                continue
            errors[name] = self.error(out, exact)
            if not errors[name] <= 2 * errors["vendor"] + 1e-6:
                wrong[name] = f"its error is {errors[name]:.2e}, the vendor's {errors['vendor']:.2e}"
            elif not out.is_contiguous() and problem.strides == "contiguous":
                wrong[name] = f"its strides are {out.stride()}"
            elif not bool((runner(*x) == out).all()):
                wrong[name] = "two runs differ"
            else:
                runners[name] = runner
        return runners, errors, wrong

    # -- timing -------------------------------------------------------------------------------------------------------

    def captured(self, run: Callable[..., Any], sets: list[Inputs]) -> tuple[Callable[[], object], int] | None:
        torch = self.torch
        if self.device.type != "cuda":
            return None
        times = max(1, 24 // len(sets))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for x in sets:
                run(*x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(times):
                for x in sets:
                    run(*x)
        return graph.replay, times * len(sets)

    def rotating(self, run: Callable[..., Any], sets: list[Inputs]) -> Callable[[], object]:
        last = [0]

        def call() -> None:
            for _ in range(self.calls):
                last[0] = (last[0] + 1) % len(sets)
                run(*sets[last[0]])

        return call

    def timed(
        self, fns: dict[str, Callable[..., Any]], sets: list[Inputs], *, keep: int = 5
    ) -> dict[str, dict[str, Any]]:
        """device_s of all, quickly; then both times of the best few and what is not a tile, in turn."""
        from flatout.machine.measure.timer import compare_times

        seconds = 0.05 if self.quick or self.small else 0.4
        results: dict[str, dict[str, Any]] = {name: {} for name in fns}
        graphs: dict[str, tuple[Callable[[], object], int]] = {}
        for name, run in list(fns.items()):
            try:
                graph = self.captured(run, sets)
            except Exception as e:  # noqa: BLE001
                results[name]["graph_error"] = f"{type(e).__name__}: {str(e)[:300]}"
                continue
            if graph is not None:
                graphs[name] = graph
        if graphs:
            rough = compare_times(
                {n: g for n, (g, _) in graphs.items()}, device=self.device, min_time_s=seconds / 4, max_time_s=6
            )
            for name, timing in rough.items():
                results[name]["rough_s"] = timing.call_s.value / graphs[name][1]
            ranked = sorted(graphs, key=lambda n: results[n]["rough_s"])
            best = {*ranked[:keep], *(n for n in fns if not n.startswith("triton"))}
            fine = compare_times(
                {n: graphs[n][0] for n in graphs if n in best}, device=self.device, min_time_s=seconds, max_time_s=8
            )
            for name, timing in fine.items():
                estimate, calls = timing.call_s, graphs[name][1]
                results[name]["device_s"] = estimate.value / calls
                results[name]["device_interval_s"] = [estimate.low / calls, estimate.high / calls]
        else:
            best = set(fns)
        graphs.clear()
        calls = {n: self.rotating(fns[n], sets) for n in fns if n in best}
        for name, timing in compare_times(calls, device=self.device, min_time_s=seconds, max_time_s=8).items():
            estimate, n = timing.call_s, self.calls
            results[name] |= {"call_s": estimate.value / n, "call_interval_s": [estimate.low / n, estimate.high / n]}
        return results

    # -- parts --------------------------------------------------------------------------------------------------------

    def correct(self) -> None:
        from flatout.blocks.kernels.matmul.variant import Tile, Variant

        sizes = ((200, 328, 520), (200, 328, 515), (17, 321, 777))
        cases: list[tuple[Shape, dict[str, Any]]] = [
            (Shape(*size, layout), {}) for layout in ("nn", "nt", "tn", "tt") for size in sizes
        ]
        cases += [(Shape(130, 260, 200, "nt"), sides) for sides in (
            {"bias": True, "activation": "gelu"}, {"bias": True, "activation": "silu", "residual": True},
            {"activation": "relu"}, {"bias": True, "activation": "gelu_tanh"}, {"scale": True, "out": "float8_e4m3fn"},
            {"scale": True, "out": "int8", "bias": True}, {"out": "float32"},
        )]  # fmt: skip
        for shape, sides in cases[:: 5 if self.small else 1]:
            small = Shape(40, 24, 72, shape.layout) if self.small else shape
            x = self.inputs(small, self.half, sides)
            problem = self.problem(x, small, sides)
            tiles = [Tile(m=m, n=n, k=64, stages=3, warps=4, splits=s, loads=loads, is_persistent=p)
                     for m, n in ((64, 128), (16, 64)) for s in (1, 4) for loads in ("descriptor", "pointer")
                     for p in (False, True) if not (p and s > 1) and not (m == 16 and loads == "descriptor")]  # fmt: skip
            variants = [
                *self.variants(problem, 0),
                *(Variant(name="triton", tile=t) for t in tiles),
            ]
            _, errors, wrong = self.checked(problem, variants, x)
            emit({"part": "correct", "problem": str(problem), "variants": len(variants), "worst": max(errors.values()),
                 "vendor": errors.get("vendor"), "wrong": wrong})  # fmt: skip
        self.guarded("correct float32", lambda name: self.float32_errors(name, Shape(136, 72, 264)))

    def shape(self, name: str, shape: Shape) -> None:
        from flatout.blocks.kernels.matmul.implementation import variants_of

        x = self.inputs(shape, self.half, {})
        problem = self.problem(x, shape, {})
        variants = self.variants(problem, self.tiles)
        runners, errors, wrong = self.checked(problem, (*variants, *self.interpreted(problem)), x)
        sets = [x, *(self.inputs(shape, self.half, {}) for _ in range(self.num_sets(problem) - 1))]
        results = self.timed(runners, sets)
        floor_s = max(problem.flop / FLOP_PER_S, problem.traffic_bytes / BYTES_PER_S)
        emit({"part": name, "problem": str(problem), "floor_s": floor_s, "flop": problem.flop, "sets": len(sets),
             "variants": {n: {"error": errors[n], **r} for n, r in results.items()}, "wrong": wrong,
             "refusals": dict(variants_of(problem).refusals)})  # fmt: skip

    def float32_errors(self, name: str, shape: Shape, variants: Any = None) -> None:
        """Against float64, of each distribution: normwise, and the worst of any number, relative to |a| @ |b|."""
        from flatout.blocks.kernels.matmul.implementation import bound, variants_of
        from flatout.blocks.kernels.matmul.packing import matrix_of

        torch = self.torch
        for kind in ("normal", "uniform", "wide"):
            x = self.inputs(shape, torch.float32, {}, kind)
            problem = self.problem(x, shape, {}, precision="float32")
            a, b = x.a.double(), matrix_of(x.b).double()
            exact, sizes, bound_norm = a @ b, a.abs() @ b.abs(), float(a.norm() * b.norm())
            found = {}
            for variant in variants or (*variants_of(problem).variants, *self.interpreted(problem)):
                try:
                    difference = (bound(problem, variant)(*x).double() - exact).abs()
                    found[str(variant)] = [float(difference.norm()) / bound_norm, float((difference / sizes).max()),
                                       float((difference / sizes).norm()) / (problem.m * problem.n) ** 0.5]  # fmt: skip
                except Exception as e:  # noqa: BLE001
                    found[str(variant)] = f"{type(e).__name__}: {str(e).strip()[-400:]}"
            emit({"part": name, "kind": kind, "problem": str(problem), "errors": found})
        x.a[3, 5], x.a[7] = float("inf"), 0.0
        outs = {str(w): bound(problem, w)(*x) for w in (variants or variants_of(problem).variants)}
        finite = {
            n: bool(torch.equal(o.isfinite(), outs["vendor"].isfinite())) and bool((o[7] == 0).all())
            for n, o in outs.items()
        }
        emit({"part": name, "kind": "inf and zeros", "as the vendor": finite})

    def float32(self, name: str, shape: Shape) -> None:
        from flatout.blocks.kernels.matmul.implementation import variants_of

        torch = self.torch
        x = self.inputs(shape, torch.float32, {})
        problem = self.problem(x, shape, {}, precision="float32")
        self.guarded(name, lambda n: self.float32_errors(n, shape))
        for is_constant in (False, True):
            now = shape._replace(is_constant=is_constant)
            sets = [self.inputs(now, torch.float32, {}) for _ in range(2)]
            problem = self.problem(sets[0], now, {}, precision="float32")
            tried = (*variants_of(problem).variants, *self.interpreted(problem))
            runners, errors, wrong = self.checked(problem, tried, sets[0])
            results = self.timed(runners, sets, keep=20)
            emit({"part": name, "problem": str(problem), "floor_s": 3 * problem.flop / FLOP_PER_S, "flop": problem.flop,
                 "variants": {n: {"error": errors[n], **r} for n, r in results.items()}, "wrong": wrong})  # fmt: skip

    def selected(self, name: str, shape: Shape, precision: str | None) -> None:
        """Measured into a table, then `flatout.matmul` with that table beside torch's product."""
        import tempfile

        from flatout.blocks.kernels.matmul import dispatch, table
        from flatout.blocks.kernels.matmul.packing import matrix_of
        from flatout.blocks.kernels.matmul.product import matmul

        table.keep_in(tempfile.mkdtemp())
        dtype = self.torch.float32 if precision else self.half
        x = self.inputs(shape, dtype, {})
        problem = self.problem(x, shape, {}, precision=precision)
        begun_s = time.perf_counter()
        dispatch.measure_matmul(problem)
        measured_s = time.perf_counter() - begun_s
        sets = [x, *(self.inputs(shape, dtype, {}) for _ in range(self.num_sets(problem) - 1))]
        runners = {
            "vendor": lambda a, b, *sides: self.torch.mm(a, matrix_of(b)),
            "flatout.matmul": lambda a, b, *sides: matmul(a, b, precision=precision),
        }
        exact = self.exact(x, problem)
        errors = {n: self.error(run(*x), exact) for n, run in runners.items()}
        results = self.timed(runners, sets)
        variants = {
            f"is_captured={c}": str(table.select_variant(problem, is_captured=c).variant) for c in (False, True)
        }
        floor_s = max(problem.flop / FLOP_PER_S, problem.traffic_bytes / BYTES_PER_S) * (3 if precision else 1)
        emit({"part": name, "problem": str(problem), "floor_s": floor_s, "selected": variants, "measured_s": measured_s,
             "variants": {n: {"error": errors[n], **r} for n, r in results.items()}, "wrong": {}})  # fmt: skip

    def epilogue(self, name: str, shape: Shape, sides: dict[str, Any]) -> None:
        from flatout.blocks.kernels.matmul.packing import matrix_of
        from flatout.blocks.kernels.matmul.reference import multiplied

        torch = self.torch
        x = self.inputs(shape, self.half, sides)
        problem = self.problem(x, shape, sides)
        runners, errors, wrong = self.checked(problem, (*self.variants(problem, 10), *self.interpreted(problem)), x)
        out_dtype, activation = problem.out_dtype, sides.get("activation")

        def plain(a: Any, b: Any, bias: Any, residual: Any, scale: Any) -> Any:
            return multiplied(
                a, b, bias=bias, activation=activation, residual=residual, scale=scale, out_dtype=out_dtype
            )

        if not self.small:
            for mode in (None, "max-autotune-no-cudagraphs"):
                try:
                    torch._dynamo.reset()
                    compiled = torch.compile(plain, mode=mode)
                    compiled(x.a, matrix_of(x.b), *x[2:])
                    runners[f"compiled {mode or 'default'}"] = lambda a, b, *rest, f=compiled: f(a, matrix_of(b), *rest)
                except Exception as e:  # noqa: BLE001
                    wrong[f"compiled {mode}"] = f"{type(e).__name__}: {str(e)[:400]}"
        sets = [x, *(self.inputs(shape, self.half, sides) for _ in range(min(3, self.num_sets(problem))))]
        results = self.timed(runners, sets)
        floor_s = max(problem.flop / FLOP_PER_S, problem.traffic_bytes / BYTES_PER_S)
        emit({"part": name, "problem": str(problem), "floor_s": floor_s, "flop": problem.flop,
             "variants": {n: {"error": errors.get(n), **r} for n, r in results.items()}, "wrong": wrong})  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- the host


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("products_device.json"))
    parser.add_argument("--only", default="", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="one short timing of each way")
    parser.add_argument("--small", action="store_true", help="tiny shapes on the CPU, in Triton's interpreter")
    parser.add_argument("--tiles", type=int, default=16, help="tiles tried for a shape")
    parser.add_argument("--limit", type=float, default=420.0, help="seconds, after which no part is begun")
    parser.add_argument("--parts", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.parts:
        work(arguments, arguments.parts.split(","))
        return
    parts = [p for p in arguments.only.split(",") if p] or list(PARTS)
    unknown = [p for p in parts if p not in PARTS]
    if unknown:
        parser.error(f"unknown parts {', '.join(unknown)}; there are {', '.join(PARTS)}")
    lines, begun_s = [], time.perf_counter()
    while parts and time.perf_counter() - begun_s < arguments.limit:
        ended = run_worker(arguments, parts, lines, begun_s)
        parts = [p for p in parts if p not in ended]
    if parts:
        lines.append({"part": "all", "error": f"no time left for {', '.join(parts)}"})
    write(arguments.out, lines)
    print_table(lines)


def run_worker(
    arguments: argparse.Namespace, parts: list[str], lines: list[dict[str, Any]], begun_s: float
) -> set[str]:
    """The parts that need not be tried again: those that ended, and the one in which the worker died."""
    more = [f for f in ("--quick", "--small") if getattr(arguments, f[2:])]
    command = [sys.executable, __file__, "--parts", ",".join(parts), "--tiles", str(arguments.tiles), *more]
    log = arguments.out.with_suffix(".log")
    with log.open("a") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as worker:
        assert worker.stdout is not None
        ended: set[str] = set()
        now = ""
        heard_s = [time.perf_counter()]
        threading.Thread(target=kill_when_silent, args=(worker, heard_s), daemon=True).start()
        for text in worker.stdout:
            heard_s[0] = time.perf_counter()
            if not text.startswith("@"):
                continue
            line = json.loads(text[1:])
            if line.get("state") == "begins":
                now = line["part"]
                if time.perf_counter() - begun_s > arguments.limit:
                    worker.kill()
                    break
            elif line.get("state") == "ended":
                ended.add(line["part"])
                print(f"{line['part']}: ended at {time.perf_counter() - begun_s:.0f} s", flush=True)
            lines.append(line)
            write(arguments.out, lines)
    if worker.returncode and now and now not in ended and time.perf_counter() - begun_s < arguments.limit:
        tail = log.read_text()[-800:]
        lines.append({"part": now, "error": f"the process died with {worker.returncode}: {tail}"})
        ended.add(now)
    return ended


def kill_when_silent(worker: subprocess.Popen[str], heard_s: list[float]) -> None:
    """A kernel that never ends must not take the other parts with it."""
    while worker.poll() is None:
        if time.perf_counter() - heard_s[0] > SILENT_S:
            worker.kill()
            return
        time.sleep(1)


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(lines, indent=1))


def print_table(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        if "error" in line:
            print(f"{line['part']}: ERROR {line['error'][:700]}")
        elif "variants" in line and isinstance(line["variants"], dict):
            print_variants(line)
        elif "errors" in line:
            print(f"{line['part']} {line['kind']} (normwise, worst, rms over |a||b|)")
            for name, errors in line["errors"].items():
                print(f"    {name}: {errors if isinstance(errors, str) else ', '.join(f'{e:.1e}' for e in errors)}")
        elif "as the vendor" in line:
            print(f"{line['part']} {line['kind']}: {line['as the vendor']}")
        elif "worst" in line:
            print(
                f"correct {line['problem']}: {line['variants']} variants, worst {line['worst']:.1e}, vendor {line['vendor']:.1e}"
            )
        for name, why in line.get("wrong", {}).items():
            print(f"    WRONG {name}: {why[:300]}")


def print_variants(line: dict[str, Any]) -> None:
    floor_s, vendor = line["floor_s"], line["variants"].get("vendor", {})
    print(f"{line['part']}: {line['problem']}; floor {1e6 * floor_s:.1f} us")
    if "selected" in line:
        print(f"   selected: {line['selected']}, measured in {line['measured_s']:.1f} s")
    shown = [(n, w) for n, w in line["variants"].items() if "call_s" in w]
    for name, variant in sorted(shown, key=lambda item: item[1].get("device_s", item[1]["call_s"])):
        device_s, call_s = variant.get("device_s"), variant["call_s"]
        words = [f"{name:56s}"]
        if device_s:
            ratio = vendor.get("device_s", float("nan")) / device_s
            words.append(f"device {1e6 * device_s:8.1f} us = {ratio:5.2f} x vendor, {device_s / floor_s:5.2f} x floor")
        words.append(f"call {1e6 * call_s:8.1f} us = {vendor.get('call_s', float('nan')) / call_s:5.2f} x vendor")
        error = variant.get("error")
        print("  ", "; ".join(words), "" if error is None else f"error {error:.1e}")


if __name__ == "__main__":
    main()

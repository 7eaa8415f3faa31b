"""A module is built into an engine: export, C, compiler, products in 8 bits where they pay, and what was measured of it."""

from __future__ import annotations

import copy
import ctypes
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from platform import machine
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from msgspec import structs
from torch import Tensor, nn

from flatout.blocks.inference.native.benchmark import measure_engine, rollout_errors
from flatout.blocks.inference.native.emit import INCLUDES, product_functions
from flatout.blocks.inference.native.engine import Engine
from flatout.blocks.inference.native.packing import DEEP, GROUP, rounded_to_int8
from flatout.blocks.inference.native.program import Program
from flatout.blocks.inference.native.rollout import input_places, output_tensors, tensors_of
from flatout.blocks.inference.native.statements import MatrixProduct
from flatout.blocks.inference.native.values import LANES
from flatout.core.errors import UsageError
from flatout.core.own_version import own_version
from flatout.core.runtime.c_compiler import (
    STRICT_FLAGS,
    CompilerRun,
    build_shared_library,
    cpu_instruction_set,
    find_compiler,
    instruction_sets,
)
from flatout.core.runtime.cache_folder import create_code_folder, default_cache_folder
from flatout.core.tensors import nests as pytree
from flatout.machine.measure.timer import HostClock, compare_times

if TYPE_CHECKING:
    from flatout.blocks.inference.native.aoti import AotiEngine


def build(
    model: nn.Module,
    example_inputs: Sequence[Any],
    *,
    state: str | Sequence[str] = (),
    name: str = "model",
    precision: str = "float32",
    max_error: float = 0.01,
    backend: str = "native",
    events: int = 20_000,
    isas: Sequence[str] | None = None,
    compiler: str | None = None,
    cache: Path | None = None,
) -> Engine | AotiEngine:
    """An engine that steps `model` by one event at a time, and what was measured of it in `engine.report`.

    `example_inputs` are those of one call of forward, with a batch of one where the model wants a batch; sizes are fixed by
    them. `state` names the parameters of forward whose values are carried from one event to the next: the model returns what
    goes out, and then each one's new value, in the order of the parameters; the examples are the values that a stream begins
    with. Buffers that forward changes are carried as well. `precision="int8"` rounds weights to 8 bits where that is measured
    to be faster and the error stays below `max_error` of the output's largest number. `events` are those that latencies are
    taken from; 0 measures nothing. `isas` are the sets of instructions to compile for (all of this architecture), `compiler` a
    C compiler (cc, gcc or clang), `cache` a folder for compiled helpers. `backend="aoti"` wraps AOTInductor.

    Raises NativeError with the operator and its line for what has no native code, or when there is no compiler; UsageError when
    the state does not fit.
    """
    if precision not in ("float32", "int8"):
        raise UsageError(f"precision '{precision}' is not known; give float32 or int8")
    if backend not in ("native", "aoti"):
        raise UsageError(f"backend '{backend}' is not known; give native or aoti")
    examples = tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
    if backend == "aoti":
        from flatout.blocks.inference.native import aoti

        if precision != "float32":
            raise UsageError(f"precision '{precision}' is the native back end's; leave it out with backend 'aoti'")
        return aoti.build_aoti_engine(model, examples, state=state, name=name, events=events)
    began = perf_counter()
    program = Program.of(model, examples, state, name)
    versions = (str(torch.__version__), own_version())
    how: dict[str, Any] = {"program": program, "versions": versions, "compiler": compiler, "cache": cache}
    selection = PrecisionSelection({}, {})
    if precision == "int8":
        selection = select_precision(program, model, examples, state, how, max_error=max_error)
    generated = program.generated(precision=selection.precision)
    if isas is None and not selection.precision:  # its code would be that of avx512
        isas = [isa for isa in instruction_sets(machine()) if isa != "avx512vnni"]
    engine, compiled = Engine.compiled(generated, precision=selection.precision, isas=isas, **how)
    build_s = perf_counter() - began
    if events:
        layers = [structs.replace(layer, why=selection.why.get(layer.name, "")) for layer in generated.layers]
        report = measure_engine(
            engine,
            model,
            examples,
            state=state,
            layers=layers,
            compiler=compiled.compiler,
            build_s=build_s,
            library=engine._library,
            packed=generated.weights,
            num_events=events,
        )
        engine.attach(report)
    return engine


# -- products in 8 bits ------------------------------------------------------------------------------------------------------


_LEAST: Final = 16
"""Inputs and outputs of a product that is tried: smaller ones are mostly rounding of activations."""
_FASTER: Final = 1.05
"""Less than that is not worth an error."""
_ROUNDS: Final = 15
_ROUND_S: Final = 0.002


class PrecisionSelection(NamedTuple):
    """`precision` of parameters that are not float32, and the reason for each product's."""

    precision: dict[str, str]
    why: dict[str, str]


def select_precision(
    program: Program,
    model: nn.Module,
    examples: Sequence[Any],
    state: str | Sequence[str],
    how: Mapping[str, Any],
    *,
    max_error: float,
) -> PrecisionSelection:
    """Measure each product both ways, alone and hot, take the faster ones, and give back the most harmful until the error fits.

    The error is that of the engine over a rollout of random events against float64, of the output's largest number.
    """
    why: dict[str, str] = {}
    candidates: dict[str, float] = {}
    for name, (plain_s, coarse_s) in _times(program, model, how).items():
        ratio = plain_s / coarse_s
        times = f"alone {plain_s * 1e6:.2f} us in float32, {coarse_s * 1e6:.2f} us in int8"
        if ratio >= _FASTER:
            candidates[name] = ratio
            why[name] = times
        else:
            why[name] = f"not faster: {times}"
    harm = _harm(model, examples, state, list(candidates)) if candidates else {}
    taken = dict.fromkeys(candidates, "int8")
    while taken:
        error = _error(program, model, examples, state, how, taken)
        if error <= max_error:
            for name in taken:
                why[name] += f"; the engine's error is {error:.2%} of the output's largest number"
            break
        worst = max(taken, key=lambda name: harm[name])
        del taken[worst]
        why[worst] = f"too coarse: with it the error is {error:.2%}, {max_error:.2%} is allowed; {why[worst]}"
    return PrecisionSelection(taken, why)


def _error(
    program: Program, model: nn.Module, examples: Any, state: Any, how: Mapping[str, Any], taken: dict[str, str]
) -> float:
    generated = program.generated(precision=taken)
    isa = cpu_instruction_set()  # the best one of this CPU alone: a trial is compiled once
    engine, _ = Engine.compiled(generated, precision=taken, isas=(isa,) if isa else None, **how)
    errors, _ = rollout_errors(engine, model, tensors_of(examples), input_places(model, examples, state), seed=1)
    return max(errors.values(), default=0.0)


def _harm(model: nn.Module, examples: Any, state: Any, names: list[str]) -> dict[str, float]:
    """How much each weight's rounding alone changes the output of one call, in its largest number."""
    tensors, generator = tensors_of(examples), torch.Generator().manual_seed(0)
    some = [torch.randn(t.shape, generator=generator) if t.is_floating_point() else t for t in tensors]
    inputs = pytree.tree_unflatten(some, pytree.tree_structure(tuple(examples)))
    found = {}
    with torch.no_grad():
        plain = output_tensors(copy.deepcopy(model).eval()(*inputs))[0]
        for name in names:
            coarse = copy.deepcopy(model).eval()
            parameter = coarse.get_parameter(name)
            flat = parameter.reshape(parameter.shape[0], -1).T
            whole, step = rounded_to_int8(flat)
            parameter.copy_((whole * step).T.reshape(parameter.shape))
            found[name] = float((output_tensors(coarse(*inputs))[0] - plain).abs().max())
    return found


# ------------------------------------------------------------------------------------------------------------- times


def _times(program: Program, model: nn.Module, how: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Seconds of each product in float32 and in int8, by the parameter's name."""
    parameters = {name for name, _ in model.named_parameters()}
    products = [(n, p) for n, p in program.products() if n in parameters and min(p.k, p.n) >= _LEAST]
    if not products:
        return {}
    where = how.get("cache") or default_cache_folder()
    create_code_folder(where)
    with tempfile.TemporaryDirectory(dir=where, prefix="int8-") as folder:
        source, file = Path(folder) / "trial.c", Path(folder) / "libtrial.so"
        source.write_text(_source([p for _, p in products]))
        flags = instruction_sets(machine())[cpu_instruction_set() or "plain"]
        trial = CompilerRun("trial", (*STRICT_FLAGS, *flags))
        build_shared_library(source, file, [trial], compiler=find_compiler(how.get("compiler")))
        library = ctypes.CDLL(str(file))
    found: dict[str, tuple[float, float]] = {}
    for number, (name, p) in enumerate(products):
        plain, coarse = _timed(library, number, p)
        old = found.get(name, (0.0, 0.0))
        found[name] = old[0] + plain, old[1] + coarse
    return found


def _source(products: list[MatrixProduct]) -> str:
    lines = [INCLUDES, *product_functions({p.parts for p in products}, deepest_int8=max(p.k for p in products))]
    head = '__attribute__((visibility("default"))) void'
    for i, p in enumerate(products):
        rows, blocks = p.dst.shape[0], -(-p.n // LANES)
        args = "(long n, const float *x, const void *w, const float *b, const int32_t *sums, float *y)"
        loop = 'for (long t = 0; t < n; t++) { __asm__ volatile("" : : "r"(x), "r"(y) : "memory");'
        lines.append(f"{head} plain_{i}{args};\n{head} coarse_{i}{args};")
        x, y, step = f"{rows}, x, {p.k}", f"y, {blocks * LANES}", p.k * GROUP * LANES
        plain = f"fo_product_{p.parts}({x}, (const float *)w, 0, {step}, {blocks}, {p.k}, b, {y});"
        coarse = f"fo_product_int8({x}, (const int8_t *)w, {blocks}, {p.k}, b, sums, b, {y});"
        lines.append(f"{head} plain_{i}{args} {{ (void)sums; {loop} {plain} }} }}")
        lines.append(f"{head} coarse_{i}{args} {{ {loop} {coarse} }} }}")
    return "\n".join(lines) + "\n"


def _timed(library: ctypes.CDLL, number: int, p: MatrixProduct) -> tuple[float, float]:
    """The least of interleaved rounds: whatever else the machine does only adds."""
    rows, width = p.dst.shape[0], -(-p.n // LANES) * LANES
    generator = torch.Generator().manual_seed(number)
    x, y, b = (
        torch.randn(rows * p.k, generator=generator),
        torch.empty(rows * width),
        torch.randn(width, generator=generator),
    )
    sums = torch.zeros(-(-p.k // DEEP) * width, dtype=torch.int32)
    plain_w = torch.randn(p.k * width, generator=generator)
    coarse_w = torch.randint(-127, 128, (-(-p.k // 4) * 4 * width,), dtype=torch.int8, generator=generator)

    def loop(kind: str, w: Tensor) -> Callable[[int], object]:
        function = getattr(library, f"{kind}_{number}")
        function.restype, function.argtypes = None, [ctypes.c_long, *[ctypes.c_void_p] * 5]
        return lambda count: function(count, x.data_ptr(), w.data_ptr(), b.data_ptr(), sums.data_ptr(), y.data_ptr())

    plain, coarse = loop("plain", plain_w), loop("coarse", coarse_w)
    count, clock = 1, HostClock()
    while clock.elapsed_s(partial(plain, count), 1) < _ROUND_S:
        count *= 2
    times = compare_times(
        {"plain": partial(plain, count), "coarse": partial(coarse, count)},
        min_time_s=2 * _ROUNDS * _ROUND_S,
        max_time_s=10 * _ROUNDS * _ROUND_S,
        clock=clock,
    )
    return min(times["plain"].samples_s) / count, min(times["coarse"].samples_s) / count

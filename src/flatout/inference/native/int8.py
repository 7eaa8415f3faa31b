"""Which products are done in 8 bits: those that are measured to be faster, as long as the error stays below the bound."""

from __future__ import annotations

import copy
import ctypes
import tempfile
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from time import perf_counter
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from flatout.inference.native import tiles
from flatout.inference.native.caller import default_cache, make_cache
from flatout.inference.native.compiler import compile_trial, own_isa
from flatout.inference.native.engine import Engine
from flatout.inference.native.measuring import rollout_errors
from flatout.inference.native.packing import DEEP, GROUP, rounded
from flatout.inference.native.program import Program
from flatout.inference.native.rollout import places, tensors_of
from flatout.inference.native.statements import Product
from flatout.inference.native.values import LANES

_LEAST: Final = 16
"""Inputs and outputs of a product that is tried: smaller ones are mostly rounding of activations."""
_FASTER: Final = 1.05
"""Less than that is not worth an error."""
_ROUNDS: Final = 15
_ROUND_S: Final = 0.002


class Choice(NamedTuple):
    """`precision` of parameters that are not float32, and the reason for each product's."""

    precision: dict[str, str]
    why: dict[str, str]


NOTHING: Final = Choice({}, {})


def chosen(
    program: Program,
    model: nn.Module,
    examples: Sequence[Any],
    state: str | Sequence[str],
    how: Mapping[str, Any],
    *,
    max_error: float,
) -> Choice:
    """Measure each product both ways, alone and hot, take the faster ones, and give back the most harmful until the error fits.

    The error is that of the engine over a rollout of random events against float64, of the output's largest number.
    """
    why: dict[str, str] = {}
    candidates: dict[str, float] = {}
    for name, (plain_s, coarse_s) in _times(program, model, how).items():
        ratio = plain_s / coarse_s
        told = f"alone {plain_s * 1e6:.2f} us in float32, {coarse_s * 1e6:.2f} us in int8"
        if ratio >= _FASTER:
            candidates[name] = ratio
            why[name] = told
        else:
            why[name] = f"not faster: {told}"
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
    return Choice(taken, why)


def _error(
    program: Program, model: nn.Module, examples: Any, state: Any, how: Mapping[str, Any], taken: dict[str, str]
) -> float:
    generated = program.generated(precision=taken)
    engine, _ = Engine.compiled(generated, precision=taken, isas=_own(), **how)
    errors, _ = rollout_errors(engine, model, tensors_of(examples), places(model, examples, state), seed=1)
    return max(errors.values(), default=0.0)


def _harm(model: nn.Module, examples: Any, state: Any, names: list[str]) -> dict[str, float]:
    """How much each weight's rounding alone changes the output of one call, in its largest number."""
    tensors, generator = tensors_of(examples), torch.Generator().manual_seed(0)
    some = [torch.randn(t.shape, generator=generator) if t.is_floating_point() else t for t in tensors]
    inputs = pytree.tree_unflatten(some, pytree.tree_structure(tuple(examples)))
    found = {}
    with torch.no_grad():
        plain = _first(copy.deepcopy(model).eval()(*inputs))
        for name in names:
            coarse = copy.deepcopy(model).eval()
            parameter = coarse.get_parameter(name)
            flat = parameter.reshape(parameter.shape[0], -1).T
            whole, step = rounded(flat)
            parameter.copy_((whole * step).T.reshape(parameter.shape))
            found[name] = float((_first(coarse(*inputs)) - plain).abs().max())
    return found


def _first(outputs: Any) -> torch.Tensor:
    return outputs if isinstance(outputs, torch.Tensor) else _first(outputs[0])


# ------------------------------------------------------------------------------------------------------------- times


def _own() -> tuple[str, ...] | None:
    """The best set of instructions of this CPU alone: a trial is compiled once."""
    isa = own_isa()
    return (isa,) if isa else None


def _times(program: Program, model: nn.Module, how: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Seconds of each product in float32 and in int8, by the parameter's name."""
    parameters = {name for name, _ in model.named_parameters()}
    products = [(n, p) for n, p in program.products() if n in parameters and min(p.k, p.n) >= _LEAST]
    if not products:
        return {}
    where = how.get("cache") or default_cache()
    make_cache(where)
    with tempfile.TemporaryDirectory(dir=where, prefix="int8-") as folder:
        source, file = Path(folder) / "trial.c", Path(folder) / "libtrial.so"
        source.write_text(_source([p for _, p in products]))
        compile_trial(source, file, compiler=how.get("compiler"))
        library = ctypes.CDLL(str(file))
    found: dict[str, tuple[float, float]] = {}
    for number, (name, p) in enumerate(products):
        plain, coarse = _timed(library, number, p)
        old = found.get(name, (0.0, 0.0))
        found[name] = old[0] + plain, old[1] + coarse
    return found


def _source(products: list[Product]) -> str:
    here = files("flatout.inference.native") / "c"
    sizes = tiles.int8_sizes(max(p.k for p in products))
    lines = ["#include <math.h>\n#include <stdint.h>\n#include <string.h>", sizes]
    lines += [(here / name).read_text() for name in ("vectors.h", "scalar.h", "rows.h", "int8.h")]
    lines += [tiles.text({p.parts for p in products}), tiles.int8_text()]
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


def _timed(library: ctypes.CDLL, number: int, p: Product) -> tuple[float, float]:
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
    calls = []
    for kind, w in (("plain", plain_w), ("coarse", coarse_w)):
        function = getattr(library, f"{kind}_{number}")
        function.restype, function.argtypes = None, [ctypes.c_long, *[ctypes.c_void_p] * 5]
        pointers = [t.data_ptr() for t in (x, w, b, sums, y)]
        calls.append((function, pointers))
    times: list[list[float]] = [[], []]
    counts = [1, 1]
    for at, (function, pointers) in enumerate(calls):
        took = 0.0
        while took < _ROUND_S:
            counts[at] *= 2
            began = perf_counter()
            function(counts[at], *pointers)
            took = perf_counter() - began
    for _ in range(_ROUNDS):
        for at, (function, pointers) in enumerate(calls):
            began = perf_counter()
            function(counts[at], *pointers)
            times[at].append((perf_counter() - began) / counts[at])
    return min(times[0]), min(times[1])

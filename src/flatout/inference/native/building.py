"""From a module to an engine: export, C, compiler, and what was measured of it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import machine
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from msgspec import structs
from torch import nn

from flatout.errors import UsageError
from flatout.inference.native import int8
from flatout.inference.native.compiler import flags_of
from flatout.inference.native.engine import Engine
from flatout.inference.native.measuring import measured
from flatout.inference.native.program import Program

if TYPE_CHECKING:
    from flatout.inference.native.aoti import AotiEngine


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
    C compiler (cc, gcc or clang), `cache` where compiled helpers lie (~/.cache/flatout). `backend="aoti"` wraps AOTInductor.

    Raises NativeError with the operator and its line for what has no native code, or when there is no compiler; UsageError when
    the state does not fit.
    """
    if precision not in ("float32", "int8"):
        raise UsageError(f"precision '{precision}' is not known; give float32 or int8")
    if backend not in ("native", "aoti"):
        raise UsageError(f"backend '{backend}' is not known; give native or aoti")
    examples = tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
    if backend == "aoti":
        from flatout.inference.native import aoti

        if precision != "float32":
            raise UsageError(f"precision '{precision}' is the native back end's; leave it out with backend 'aoti'")
        return aoti.build(model, examples, state=state, name=name, events=events)
    began = perf_counter()
    program = Program.of(model, examples, state, name)
    versions = (str(torch.__version__), _version())
    how: dict[str, Any] = {"program": program, "versions": versions, "compiler": compiler, "cache": cache}
    chosen = int8.NOTHING
    if precision == "int8":
        chosen = int8.chosen(program, model, examples, state, how, max_error=max_error)
    generated = program.generated(precision=chosen.precision)
    if isas is None and not chosen.precision:  # its code would be that of avx512
        isas = [isa for isa in flags_of(machine()) if isa != "avx512vnni"]
    engine, compiled = Engine.compiled(generated, precision=chosen.precision, isas=isas, **how)
    build_s = perf_counter() - began
    if events:
        layers = [structs.replace(layer, why=chosen.why.get(layer.name, "")) for layer in generated.layers]
        report = measured(
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


def _version() -> str:
    try:
        return version("flatout")
    except PackageNotFoundError:
        return "unknown"

"""The peers of bench/native.py: each makes one event of a model cheap in its own way, and carries the state as it does it best.

The event lies where the peer wants it: in a tensor, in a bound buffer, in an array. Writing it there is not counted for anybody.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from itertools import cycle
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch._inductor
from native_models import Array, Case
from torch import Tensor

Event = tuple[Tensor, ...]
HERE = Path(__file__).resolve().parent
LOOP_BYTES = 1 << 16
"""Inputs and outputs of a loop's events: enough events to hide the call, and few enough bytes to stay beside the weights."""

TUNED = {
    "freezing": True,
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP",
    "aot_inductor.allow_stack_allocation": True,
}
"""`aot_inductor.use_runtime_constant_folding` instead of freezing fails an assertion in torch 2.13 on the first model."""


class NotThere(Exception):
    """A peer that does not have this model, or is not installed; says why."""


class Peer(NamedTuple):
    name: str
    step: Callable[[], object]
    """The next event, from where it lies."""
    rollout: Callable[[Sequence[Event]], Array]
    """The first output of each of these events, [T, numbers], from a state of zeros."""
    events: int = 1
    """That a call of `step` stands for."""
    mend: Callable[[], Peer] | None = None
    """The same in a way that may be right where this one is wrong."""
    engine: Any = None
    """flatout's."""


# ---------------------------------------------------------------------------------------------------------------- of tensors


def of_tensors(name: str, case: Case, call: Callable[[list[Tensor]], Any], *, is_copied: bool = False) -> Peer:
    """A peer that takes tensors and makes tensors; its new state is the next event's, in order again if `is_copied`."""
    lies = [x.clone() for x in case.inputs[: case.num_inputs]]
    zeros = [s.clone() for s in case.inputs[case.num_inputs :]]
    state: Sequence[Tensor] = zeros

    def step() -> Any:
        nonlocal state
        out = call([*lies, *state])
        state = out[1:]
        return out

    def step_copied() -> Any:
        nonlocal state
        out = call([*lies, *state])
        state = [s.contiguous() for s in out[1:]]
        return out

    stepping = (step_copied if is_copied else step) if zeros else partial(call, lies)

    def rollout(events: Sequence[Event]) -> Array:
        nonlocal state
        state, found = [s.clone() for s in zeros], []
        for event in events:
            for at, x in zip(lies, event, strict=True):
                at.copy_(x)
            out = stepping()
            found.append((out if isinstance(out, Tensor) else out[0]).flatten().clone())
        return torch.stack(found).numpy()

    mend = None if is_copied or not zeros else partial(of_tensors, f"{name}_copied", case, call, is_copied=True)
    return Peer(name, stepping, rollout, mend=mend)


def eager(case: Case, folder: Path) -> list[Peer]:
    return [of_tensors("eager", case, lambda flat: case.module(*flat))]


def compiled(case: Case, folder: Path) -> list[Peer]:
    torch._dynamo.reset()
    fast = torch.compile(case.module)
    with torch.inference_mode():
        fast(*case.inputs)  # compiled here, not when it is checked
    return [of_tensors("compile", case, lambda flat: fast(*flat))]


def aoti(case: Case, folder: Path) -> list[Peer]:
    """Default and tuned, each compiled in a process of its own, at once.

    Of its own: torch 2.13 reads `allow_stack_allocation` at the first compilation of a process only, and the small MLP takes
    2.2 us for 0.9 where another was before.
    """
    program = folder / "program.pt2"
    torch.export.save(torch.export.export(case.module, case.inputs), program)
    running = {}
    for name, configs in {"aoti": {}, "aoti_tuned": TUNED}.items():
        command = [sys.executable, __file__, str(program), str(folder / f"{name}.pt2"), json.dumps(configs)]
        running[name] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    said = {name: process.communicate()[1] for name, process in running.items()}
    return [
        failing(name, said[name].strip()[-400:]) if process.returncode else of_package(name, case, folder)
        for name, process in running.items()
    ]


def of_package(name: str, case: Case, folder: Path) -> Peer:
    """The loader's own `run`: the public call flattens its arguments anew each time, for 12 us."""
    model = torch._inductor.aoti_load_package(str(folder / f"{name}.pt2"), run_single_threaded=True)
    return of_tensors(name, case, model.loader.run)


def failing(name: str, why: str) -> Peer:
    def rollout(events: Sequence[Event]) -> Array:
        raise RuntimeError(why)

    return Peer(name, lambda: None, rollout)


def package(program: str, out: str, configs: str) -> None:
    """What the other process does."""
    torch.set_num_threads(1)
    settings = json.loads(configs)
    # Freezing wants that no gradients are asked for; parts of it read the global settings.
    with torch.no_grad(), torch._inductor.config.patch(settings):
        torch._inductor.aoti_compile_and_package(
            torch.export.load(program), package_path=out, inductor_configs=settings
        )


# --------------------------------------------------------------------------------------------------------------- ONNX Runtime


def ort(case: Case, folder: Path) -> list[Peer]:
    """Buffers bound once; the state goes to and fro between two bindings, so that nothing is copied or allocated."""
    try:
        import onnxruntime
    except ImportError as e:
        raise NotThere("onnxruntime is not installed; pip install 'flatout[bench]'") from e
    names = [f"in{i}" for i in range(len(case.inputs))]
    outs = [f"out{i}" for i in range(1 + len(case.state))]
    file = folder / "model.onnx"
    program = torch.onnx.export(
        case.module, case.inputs, dynamo=True, input_names=names, output_names=outs, verbose=False, external_data=False
    )
    assert program is not None
    program.save(str(file))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    y = np.zeros(output_shape(case), np.float32)
    lies = [x.numpy().copy() for x in case.inputs[: case.num_inputs]]
    states = [[s.numpy().copy() for s in case.inputs[case.num_inputs :]] for _ in range(2)]

    def binding(ins: list[Array], results: list[Array]) -> Any:
        bound = session.io_binding()
        for name, a in zip(names, ins, strict=True):
            bound.bind_input(name, "cpu", 0, a.dtype, a.shape, a.ctypes.data)
        for name, a in zip(outs, results, strict=True):
            bound.bind_output(name, "cpu", 0, a.dtype, a.shape, a.ctypes.data)
        return bound._iobinding

    run = session._sess.run_with_iobinding  # what run_with_iobinding calls after a check of its options
    there, back = (binding([*lies, *states[i]], [y, *states[1 - i]]) for i in range(2))
    turn = cycle((there, back))

    def step() -> None:
        run(next(turn), None)

    stepping = step if case.state else partial(run, there, None)

    def rollout(events: Sequence[Event]) -> Array:
        nonlocal turn
        turn = cycle((there, back))
        for s in states[0]:
            s[...] = 0
        return one_by_one(lies, stepping, y, events)

    return [Peer("ort", stepping, rollout)]


def one_by_one(lies: list[Array], step: Callable[[], object], y: Array, events: Sequence[Event]) -> Array:
    found = []
    for event in events:
        for at, x in zip(lies, event, strict=True):
            at[...] = x.numpy()
        step()
        found.append(y.ravel().copy())
    return np.stack(found)


# -------------------------------------------------------------------------------------------------------------- written by hand


def by_hand(case: Case, folder: Path) -> list[Peer]:
    """As an extension of Python, and its loop over events in C."""
    if case.hand is None:
        raise NotThere("not written")
    module = extension(case.hand.source, folder)
    module.load(case.hand.packed(case.module))
    x = case.inputs[0].numpy().copy()
    y = np.zeros(output_shape(case), np.float32)

    def rollout(events: Sequence[Event]) -> Array:
        module.reset()
        return one_by_one([x], lambda: module.step(x, y), y, events)

    def rollout_loop(events: Sequence[Event]) -> Array:
        module.reset()
        xs, ys = looped(case, events)
        module.many(xs, ys, len(events))
        return ys.reshape(len(events), -1)

    xs, ys = looped(case, case.events(num_looped(case), seed=2))
    many = partial(module.many, xs, ys, len(xs))
    return [Peer("c", partial(module.step, x, y), rollout), Peer("c_loop", many, rollout_loop, events=len(xs))]


def extension(source: str, folder: Path) -> ModuleType:
    """The file of bench/native_c as a module of Python."""
    out = folder / f"{Path(source).stem}.so"
    compile_shared(HERE / "native_c" / source, out, f"-I{sysconfig.get_paths()['include']}")
    loader = ExtensionFileLoader("peer", str(out))
    spec = spec_from_file_location("peer", str(out), loader=loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def compile_shared(source: Path, out: Path, *more: str) -> None:
    flags = "-std=gnu11", "-O3", "-march=native", "-mprefer-vector-width=512", "-Wno-psabi", "-shared", "-fPIC"
    subprocess.run([compiler(), *flags, str(source), "-o", str(out), *more, "-lm"], check=True)


def compiler() -> str:
    found = shutil.which("gcc") or shutil.which("cc")
    if found is None:
        raise NotThere("no C compiler")
    return found


def output_shape(case: Case) -> tuple[int, ...]:
    with torch.no_grad():
        out = case.module(*case.inputs)
    return tuple((out[0] if case.state else out).shape)


def num_looped(case: Case) -> int:
    """Events of a loop, at least 16."""
    x = case.inputs[0]
    per_event = x.numel() * x.element_size() + 4 * math.prod(output_shape(case))
    return min(max(LOOP_BYTES // per_event, 16), 256)


def looped(case: Case, events: Sequence[Event]) -> tuple[Array, Array]:
    """Inputs one after the other, and room for the outputs: [T, ...]."""
    return torch.stack([event[0] for event in events]).numpy(), np.zeros((len(events), *output_shape(case)), np.float32)


# -------------------------------------------------------------------------------------------------------------------- flatout


def built(case: Case, **more: Any) -> Any:
    """flatout's engine, measured here and not by itself; NotThere where this flatout has none."""
    try:
        from flatout.blocks.inference.native import build
    except ImportError as e:
        raise NotThere("not built") from e
    return build(case.module, case.inputs, state=case.state, events=0, **more)


def by_flatout(case: Case, folder: Path) -> list[Peer]:
    return of_engine(built(case), case)


def of_engine(engine: Any, case: Case) -> list[Peer]:
    x = case.inputs[0].numpy().copy()
    y = np.zeros(output_shape(case), np.float32)
    step = partial(engine.step, x, y)

    def rollout(events: Sequence[Event]) -> Array:
        engine.reset()
        return one_by_one([x], step, y, events)

    def rollout_loop(events: Sequence[Event]) -> Array:
        engine.reset()
        xs, ys = looped(case, events)
        engine.step_many(xs, ys)
        return ys.reshape(len(events), -1)

    xs, ys = looped(case, case.events(num_looped(case), seed=2))
    many = partial(engine.step_many, xs, ys)
    return [Peer("flatout", step, rollout, engine=engine), Peer("flatout_loop", many, rollout_loop, events=len(xs))]


PEERS: dict[str, Callable[[Case, Path], list[Peer]]] = {
    "eager": eager,
    "compile": compiled,
    "aoti": aoti,
    "ort": ort,
    "c": by_hand,
    "flatout": by_flatout,
}


def quietly(make: Callable[[Case, Path], list[Peer]], case: Case, folder: Path) -> list[Peer]:
    """Made without what torch's exporters and autotuning say on the way."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch._inductor", "onnxscript")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make(case, folder)
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


if __name__ == "__main__" and sys.argv[1:]:
    package(*sys.argv[1:])

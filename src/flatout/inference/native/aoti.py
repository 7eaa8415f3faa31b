"""An engine through torch's AOTInductor: for models that the native build refuses, and for the sake of comparison.

A package reads its inputs as if they lay as the example did, and says nothing where they do not: a state that came out with other
strides, fed back as it was, gave wrong numbers (0.72 off in a convolution's window). So every input and every state goes in from
contiguous memory of the engine's own, every output is copied out of the package's, and what a build gives is held against eager
over carried steps before anybody sees it.
"""

from __future__ import annotations

import copy
import hashlib
import os
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from flatout.errors import CheckpointError, NativeError, UsageError
from flatout.inference.native.rollout import (
    Places,
    flat_outputs,
    largest_errors,
    num_plain,
    places,
    random_events,
    run,
    tensors_of,
)
from flatout.records.native import NativeManifest, Port
from flatout.records.record import from_json, to_json, write_file

ISA: Final = "aoti"
"""What stands for the instruction sets in the manifest of such an engine."""
PACKAGE: Final = "engine.pt2"
START: Final = "start.bin"
"""The state before the first event, as a snapshot."""
CONFIGS: Final[dict[str, bool | int | str]] = {
    "freezing": True,
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP",
    "cpp.threads": 1,
}
"""Of torch.inductor: weights packed for its C++ products, one thread. `aot_inductor.allow_stack_allocation` would save 2 us an
event and is left out: outputs then lie in memory that the next event writes over (torch 2.13), and a large model's temporaries
could be more than the stack holds."""
Buffer: TypeAlias = Any
"""A tensor on the CPU, a NumPy array, or anything with the buffer protocol."""
_NUM_CHECKED: Final = 20
BOUND: Final = 1e-4
"""Difference to float64, relative to the largest number of the output, that a build may show beyond ten times eager's own.
Float32 in another order of summation is 1e-7 off in a GRU, a state that is read in the wrong layout more than 0.1."""
_DTYPES: Final = {"float32": torch.float32, "int32": torch.int32, "int64": torch.int64, "bool": torch.bool}
_FORMATS: Final = {"float32": "f", "int32": "il", "int64": "lq", "bool": "?"}


class AotiEngine:
    """Steps a package of AOTInductor event by event, as `Engine` steps native code: one stream; `streams` gives several.

    Not for two threads at a time. An event allocates, as torch does.
    """

    def __init__(self, package: Path, manifest: NativeManifest, start: Sequence[Tensor], loader: Any = None) -> None:
        self.manifest = manifest
        self._package, self._start = package, tuple(start)
        self._keep: _Folder | None = None
        # torch's own __call__ flattens and names arguments in each call, which takes longer than a small model
        self._loader = loader or torch._inductor.aoti_load_package(str(package)).loader
        self._state = _State(self._start)

    def step(self, *inputs: Buffer, out: Buffer | tuple[Buffer, ...] | None = None) -> Any:
        """One event: its output, or a tuple of its outputs; written into `out` (one buffer for each) where that is given.

        Raises UsageError for inputs whose sizes or dtypes are not those of the example.
        """
        return self._stepped(inputs, out, ())

    def step_many(self, *inputs: Buffer, out: Buffer | tuple[Buffer, ...] | None = None) -> Any:
        """Events one after the other: a dimension before those of an event counts them, in inputs and outputs."""
        ports = self.manifest.inputs
        self._check_number(inputs)
        count = _num_bytes(inputs[0]) // ports[0].num_bytes if inputs and ports[0].num_bytes else 0
        return self._stepped(inputs, out, (count,))

    def streams(self, n: int) -> AotiStreams:
        """`n` new states, stepped together."""
        return AotiStreams(self, n)

    def copy(self) -> AotiEngine:
        """Another stream of the same package, with this state."""
        twin = AotiEngine(self._package, self.manifest, self._start, self._loader)
        twin._keep = self._keep
        twin.restore(self.snapshot())
        return twin

    def reset(self) -> None:
        """The state as it was at first."""
        self._state.restore(self._start)

    def snapshot(self) -> bytes:
        """The state as bytes, in plain order, each port at a multiple of 8."""
        return b"".join(map(_plain, self._state.now))

    def restore(self, snapshot: bytes) -> None:
        """The state of a snapshot. Raises UsageError for bytes of another length."""
        self._state.restore(_read(snapshot, self._start))

    def load_weights(self, state_dict: Mapping[str, Tensor]) -> None:
        """Always NativeError: the weights are folded and packed into the package."""
        raise NativeError(
            f"load_weights of {len(state_dict)} tensors: an AOTInductor package has its weights folded in and packed; build "
            "again from the module that has the new ones, or use the native back end, which takes them"
        )

    def save(self, folder: Path | str) -> None:
        """Write engine.pt2, engine.json and, where anything is carried, start.bin. CheckpointError where that cannot be done."""
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            beside = folder / f".{PACKAGE}.{os.getpid()}.part"
            shutil.copyfile(self._package, beside)
            os.replace(beside, folder / PACKAGE)
        except OSError as e:
            raise CheckpointError(
                f"cannot write '{folder}': {e.strerror or e}; give a folder that can be written"
            ) from e
        write_file(folder / START, b"".join(_plain(tensor) for tensor in self._start))
        write_file(folder / "engine.json", to_json(self.manifest))

    def _check_number(self, inputs: Sequence[Buffer]) -> None:
        ports = self.manifest.inputs
        if len(inputs) != len(ports):
            names = ", ".join(port.name for port in ports)
            raise UsageError(f"{len(inputs)} inputs; this engine takes {len(ports)}: {names}")

    def _stepped(self, inputs: Sequence[Buffer], out: Any, lead: tuple[int, ...]) -> Any:
        """One event, or `lead[0]` of them."""
        self._check_number(inputs)
        given = [_tensor(value, port, lead) for value, port in zip(inputs, self.manifest.inputs, strict=True)]
        result, targets = _targets(out, self.manifest.outputs, lead)
        if lead:
            for event in range(lead[0]):
                self._event([tensor[event] for tensor in given], [tensor[event] for tensor in targets], self._state)
        else:
            self._event(given, targets, self._state)
        return result

    def _event(self, inputs: Sequence[Tensor], targets: Sequence[Tensor], state: _State) -> None:
        """Run the package; outputs go to `targets` and new states to `state`, through their strides into plain layout."""
        # the list is emptied by the call; the tensors stay ours
        outputs = self._loader.boxed_run([*inputs, *state.now])
        for target, made in zip((*targets, *state.after), outputs, strict=True):
            target.copy_(made)
        state.turn()


class AotiStreams:
    """States of several streams of one package, stepped one after the other."""

    def __init__(self, engine: AotiEngine, n: int) -> None:
        if n < 1:
            raise UsageError(f"{n} streams; give 1 or more")
        self.manifest, self.num_streams = engine.manifest, n
        self._engine = engine
        self._states = [_State(engine._start) for _ in range(n)]

    def step(self, *inputs: Buffer, out: Buffer | tuple[Buffer, ...] | None = None) -> Any:
        """One event of each stream: a dimension before those of an event counts the streams, in inputs and outputs."""
        self._engine._check_number(inputs)
        lead = (self.num_streams,)
        given = [_tensor(value, port, lead) for value, port in zip(inputs, self.manifest.inputs, strict=True)]
        result, targets = _targets(out, self.manifest.outputs, lead)
        for at, state in enumerate(self._states):
            self._engine._event([tensor[at] for tensor in given], [tensor[at] for tensor in targets], state)
        return result

    def reset(self, i: int | None = None) -> None:
        """One stream, or all, as at first."""
        for state in self._states if i is None else [self._states[i]]:
            state.restore(self._engine._start)

    def snapshot(self, i: int) -> bytes:
        """A stream's state as bytes, in plain order."""
        return b"".join(map(_plain, self._states[i].now))

    def restore(self, i: int, snapshot: bytes) -> None:
        """A stream's state. Raises UsageError for bytes of another length."""
        self._states[i].restore(_read(snapshot, self._engine._start))


# ---------------------------------------------------------------------------------------------------------------- making


def build(
    module: nn.Module,
    example_inputs: Sequence[Any],
    *,
    state: str | Sequence[str] = (),
    name: str = "model",
    configs: Mapping[str, bool | int | str] = CONFIGS,
) -> AotiEngine:
    """Compile the module as it is now, on the CPU, and hold 20 carried steps of it against eager and float64.

    `state` names the parameters of forward that are carried and begin as their examples; the last outputs are their new values,
    in the order of the parameters. Takes 10 to 60 s. Raises NativeError without a C++ compiler, where torch cannot export or
    compile the module, where forward changes its own buffers, and where results are off by more than BOUND; UsageError for
    examples that do not fit.
    """
    where, examples = places(module, example_inputs, state), tensors_of(example_inputs)
    # a copy: eval mode is for the package, the module stays as it is
    ordered = _Ordered(copy.deepcopy(module).eval(), where)
    inputs, start = [examples[at] for at in where.given], [examples[at] for at in where.carried]
    outputs = _outputs(ordered, inputs, start)
    split = len(outputs) - len(start)
    folder = Path(tempfile.mkdtemp(prefix="flatout-aoti-"))
    try:
        _compile(ordered, (*inputs, *start), folder / PACKAGE, configs)
        manifest = NativeManifest(
            name=name,
            inputs=tuple(_port(where.names[at], examples[at]) for at in where.given),
            outputs=tuple(_port(f"y{at}" if split > 1 else "y", made) for at, made in enumerate(outputs[:split])),
            state=tuple(_port(where.names[at], examples[at]) for at in where.carried),
            isas=(ISA,),
            weights_bytes=sum(t.numel() * t.element_size() for t in module.state_dict().values()),
            weights_sum=_sum(folder / PACKAGE),
            torch=str(torch.__version__),
            flatout=version("flatout"),
        )
        engine = AotiEngine(folder / PACKAGE, manifest, start)
        _verify(engine, module, examples, where)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    engine._keep = _Folder(folder)
    return engine


def load(folder: Path | str) -> AotiEngine:
    """An engine that `save` wrote; needs no compiler. CheckpointError where a file is missing or not the one that was written."""
    folder = Path(folder)
    try:
        manifest = from_json((folder / "engine.json").read_bytes(), NativeManifest)
        found, first = _sum(folder / PACKAGE), (folder / START).read_bytes()
    except OSError as e:
        raise CheckpointError(
            f"'{folder}' holds no AOTInductor engine: {e.filename}: {e.strerror or e}; build it again"
        ) from e
    if manifest.isas != (ISA,) or found != manifest.weights_sum:
        raise CheckpointError(f"'{folder / PACKAGE}' is not the package that engine.json describes; build it again")
    start = [torch.zeros(port.shape, dtype=_DTYPES[port.dtype]) for port in manifest.state]
    try:
        return AotiEngine(folder / PACKAGE, manifest, _read(first, start))
    except UsageError as e:
        raise CheckpointError(f"'{folder / START}' is torn: {e}; build it again") from e


class _Ordered(nn.Module):
    """The module with its inputs first and its state after them."""

    def __init__(self, module: nn.Module, where: Places) -> None:
        super().__init__()
        self.module, self.where = module, where
        self.eval()

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        split = len(self.where.given)
        return flat_outputs(self.module(*self.where.arguments(tensors[:split], tensors[split:])))


def _outputs(ordered: _Ordered, inputs: Sequence[Tensor], start: Sequence[Tensor]) -> list[Tensor]:
    """Of the example. Raises NativeError where buffers change, UsageError where new states are not like the old."""
    before = [buffer.clone() for buffer in ordered.buffers()]
    with torch.no_grad():
        outputs = ordered(*(tensor.clone() for tensor in (*inputs, *start)))
    for (name, now), was in zip(ordered.module.named_buffers(), before, strict=True):
        if not torch.equal(now, was):
            raise NativeError(
                f"forward changes its buffer '{name}', which a package keeps to itself; carry it as an argument"
            )
    split = num_plain(outputs, len(start), ordered.module)
    names = [ordered.where.names[at] for at in ordered.where.carried]
    for name, old, new in zip(names, start, outputs[split:], strict=True):
        if old.shape != new.shape or old.dtype != new.dtype:
            raise UsageError(
                f"state '{name}' is {tuple(old.shape)} of {old.dtype}, and its new value {tuple(new.shape)} of {new.dtype}; "
                "the last outputs must be the new states, in the order of the parameters"
            )
    return outputs


class _Folder:
    """Removed when the last engine that needs it is gone."""

    def __init__(self, path: Path) -> None:
        self._end = weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)


def _compile(module: nn.Module, examples: tuple[Tensor, ...], package: Path, configs: Mapping[str, Any]) -> None:
    from torch._inductor import aoti_compile_and_package
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as e:
        raise NativeError(
            f"no C++ compiler: {e}; install g++ or clang++, or build elsewhere and copy the engine's folder"
        ) from e
    with _quiet() as said, torch.no_grad():
        try:
            program = torch.export.export(module, examples)
            aoti_compile_and_package(program, package_path=str(package), inductor_configs=dict(configs))
        # torch raises RuntimeError and its children for what it cannot compile, and others from export
        except (RuntimeError, ValueError, TypeError, AssertionError, torch._dynamo.exc.TorchDynamoException) as e:
            told = said.getvalue().strip().splitlines()[-3:]
            raise NativeError(
                f"AOTInductor cannot compile {type(module).__name__}: {e} {' | '.join(told)}".rstrip()
            ) from e


@contextmanager
def _quiet() -> Iterator[StringIO]:
    """Without torch's tables of candidates on stderr, and its warnings of its own deprecations."""
    said = StringIO()
    with warnings.catch_warnings(), redirect_stderr(said):
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield said


def _verify(engine: AotiEngine, module: nn.Module, examples: Sequence[Tensor], where: Places) -> None:
    """Raises NativeError where the package's carried steps are not those of the module; leaves the engine as at first."""
    events = random_events(module, examples, where, num_events=_NUM_CHECKED, seed=0)
    start = [examples[at] for at in where.carried]
    exact = run(module, events, where, dtype=torch.float64, start=start)
    eager = run(module, events, where, dtype=torch.float32, start=start)
    found = []
    for event in events:
        made = [torch.empty(port.shape, dtype=_DTYPES[port.dtype]) for port in engine.manifest.outputs]
        engine.step(*event, out=tuple(made))
        found.append(made)
    engine.reset()
    ours, theirs = largest_errors(found, exact), largest_errors(eager, exact)
    for port, error, of_eager in zip(engine.manifest.outputs, ours, theirs, strict=True):
        if error > BOUND + 10 * of_eager:
            raise NativeError(
                f"AOTInductor gives wrong numbers: output '{port.name}' is {error:.1e} off in {_NUM_CHECKED} carried steps, "
                f"eager {of_eager:.1e}, allowed are {BOUND:g} and ten times eager's; use the native back end"
            )


# --------------------------------------------------------------------------------------------------------------- memory


def _port(name: str, tensor: Tensor) -> Port:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise NativeError(f"'{name}' is {dtype}; engines take {', '.join(_DTYPES)}")
    return Port(name=name, dtype=dtype, shape=tuple(tensor.shape))


def _tensor(value: Buffer, port: Port, lead: tuple[int, ...]) -> Tensor:
    """The value as a contiguous tensor of the port's dtype and of shape (*lead, *port.shape). Copied only where it must be."""
    dtype, shape = _DTYPES[port.dtype], (*lead, *port.shape)
    if not isinstance(value, Tensor):
        with memoryview(value) as view:
            if view.itemsize not in (1, dtype.itemsize) or (
                view.itemsize > 1 and view.format not in _FORMATS[port.dtype]
            ):
                raise UsageError(f"'{port.name}' is {port.dtype}, got a buffer of format '{view.format}'; convert it")
            whole: Any = bytearray(view) if view.readonly or not view.c_contiguous else value
            value = torch.frombuffer(whole, dtype=dtype) if view.nbytes else torch.empty(0, dtype=dtype)
    if value.dtype != dtype or value.device.type != "cpu":
        raise UsageError(f"'{port.name}' is {port.dtype} on the CPU, got {value.dtype} on {value.device}; convert it")
    if value.numel() * dtype.itemsize != _count(lead) * port.num_bytes:
        raise UsageError(f"'{port.name}' is {port.dtype} of shape {shape}, got {tuple(value.shape)}")
    return value.contiguous().reshape(shape)


def _targets(out: Any, ports: Sequence[Port], lead: tuple[int, ...]) -> tuple[Any, list[Tensor]]:
    """What step returns, and the tensors that its outputs go to, which are the same memory."""
    if out is None:
        made = [torch.empty((*lead, *port.shape), dtype=_DTYPES[port.dtype]) for port in ports]
        arrays = tuple(tensor.numpy() for tensor in made)
        return (arrays[0] if len(arrays) == 1 else arrays), made
    given = out if isinstance(out, tuple) else (out,)
    if len(given) != len(ports):
        raise UsageError(f"out has {len(given)} buffers; give {len(ports)}, as a tuple")
    targets = []
    for buffer, port in zip(given, ports, strict=True):
        if isinstance(buffer, Tensor):
            is_plain, is_written = buffer.is_contiguous(), True
        else:
            with memoryview(buffer) as view:
                is_plain, is_written = view.c_contiguous, not view.readonly
        if not is_plain or not is_written:
            raise UsageError(
                f"out for '{port.name}' cannot be written in one piece; give a contiguous, writable buffer"
            )
        targets.append(_tensor(buffer, port, lead))
    return out, targets


class _State:
    """What is carried, twice: a package may hand out its inputs as outputs, so new values are never written over those in use."""

    def __init__(self, start: Sequence[Tensor]) -> None:
        self.now, self.after = [tensor.clone() for tensor in start], [torch.empty_like(tensor) for tensor in start]

    def turn(self) -> None:
        """What was written becomes what is read."""
        self.now, self.after = self.after, self.now

    def restore(self, tensors: Sequence[Tensor]) -> None:
        """Other values."""
        for held, new in zip(self.now, tensors, strict=True):
            held.copy_(new)


def _read(snapshot: bytes, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of a snapshot. Raises UsageError for bytes of another length."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in like]
    expected = sum(-(-size // 8) * 8 for size in sizes)
    if len(snapshot) != expected:
        raise UsageError(f"a snapshot of this model has {expected} bytes, got {len(snapshot)}")
    found, start = [], 0
    for tensor, size in zip(like, sizes, strict=True):
        numbers = bytearray(snapshot[start : start + size])
        found.append(torch.frombuffer(numbers, dtype=tensor.dtype).reshape(tensor.shape) if size else tensor)
        start += -(-size // 8) * 8
    return found


def _plain(tensor: Tensor) -> bytes:
    """Its numbers in C order, and zeros up to a multiple of 8 bytes."""
    numbers = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""
    return numbers.ljust(-(-len(numbers) // 8) * 8, b"\0")


def _num_bytes(value: Buffer) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else memoryview(value).nbytes


def _count(lead: tuple[int, ...]) -> int:
    return lead[0] if lead else 1


def _sum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()

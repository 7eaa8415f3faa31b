"""An engine through torch's AOTInductor: for models that the native build refuses, and for the sake of comparison.

A package reads its inputs as if they lay as the example did, and says nothing where they do not: a state that came out with other
strides, fed back as it was, gave wrong numbers (0.72 off in a convolution's window). So every input and every state goes in from
contiguous memory of the engine's own, every output is copied out of the package's, and what a build gives is held against eager
over carried steps before anybody sees it.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch
from torch import Tensor, nn

from flatout.blocks.inference.native.benchmark import measure_engine, rollout_errors
from flatout.blocks.inference.native.buffers import (
    DTYPES,
    Buffer,
    CarriedState,
    num_bytes_of,
    output_targets,
    port_of,
    tensor_at,
)
from flatout.blocks.inference.native.folder import read_manifest, sha256_of, write_atomically
from flatout.blocks.inference.native.rollout import (
    Places,
    input_places,
    num_plain,
    output_tensors,
    tensors_of,
)
from flatout.core.errors import CheckpointError, NativeError, UsageError
from flatout.core.files import read_regular_file
from flatout.core.own_version import own_version
from flatout.core.records.native import NativeManifest, NativeReport
from flatout.core.records.record import to_json
from flatout.core.runtime.cache_folder import require_trusted_library

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
_NUM_CHECKED: Final = 20
BOUND: Final = 1e-4
"""Difference to float64, relative to the largest number of the output, that a build may show beyond ten times eager's own.
Float32 in another order of summation is 1e-7 off in a GRU, a state that is read in the wrong layout more than 0.1."""


class AotiEngine:
    """Steps a package of AOTInductor event by event, as `Engine` steps native code: one stream; `streams` gives several.

    Not for two threads at a time. An event allocates, as torch does.
    """

    def __init__(self, package: Path, manifest: NativeManifest, start: Sequence[Tensor], loader: Any = None) -> None:
        self.manifest = manifest
        self._package = package
        self.report: NativeReport | None = None
        # torch's own __call__ flattens and names arguments in each call, which takes longer than a small model
        self._loader = loader or torch._inductor.aoti_load_package(str(package)).loader
        self._state = CarriedState(start)

    @property
    def isa(self) -> str:
        """The instruction set, as the manifest names it."""
        return ISA

    def attach(self, report: NativeReport) -> None:
        """What was measured of this engine; saved with it."""
        self.report = report

    def step(self, *inputs: Buffer, out: Buffer | tuple[Buffer, ...] | None = None) -> Any:
        """One event: its output, or a tuple of its outputs; written into `out` (one buffer for each) where that is tensors.

        Raises UsageError for inputs whose sizes or dtypes are not those of the example.
        """
        return self._stepped(inputs, out, (), [self._state])

    def step_many(self, *inputs: Buffer, out: Buffer | tuple[Buffer, ...] | None = None) -> Any:
        """Events one after the other: a dimension before those of an event counts them, in inputs and outputs."""
        ports = self.manifest.inputs
        count = num_bytes_of(inputs[0]) // ports[0].num_bytes if inputs and ports and ports[0].num_bytes else 0
        return self._stepped(inputs, out, (count,), [self._state])

    def streams(self, n: int) -> AotiStreams:
        """`n` new states, stepped together."""
        return AotiStreams(self, n)

    def copy(self) -> AotiEngine:
        """Another stream of the same package, with this state."""
        copied = AotiEngine(self._package, self.manifest, self._state.start, self._loader)
        copied.restore(self.snapshot())
        return copied

    def reset(self) -> None:
        """The state as it was at first."""
        self._state.reset()

    def snapshot(self) -> bytes:
        """The state as bytes, in plain order, each port at a multiple of 8."""
        return self._state.snapshot()

    def restore(self, snapshot: bytes) -> None:
        """The state of a snapshot. Raises UsageError for bytes of another length."""
        self._state.restore(snapshot)

    def load_weights(self, state_dict: Mapping[str, Tensor]) -> None:
        """Always NativeError: the weights are folded and packed into the package."""
        raise NativeError(
            f"load_weights of {len(state_dict)} tensors: an AOTInductor package has its weights folded in and packed; build "
            "again from the module that has the new ones, or use the native back end, which takes them"
        )

    def save(self, folder: Path | str) -> None:
        """Write engine.pt2, start.bin, engine.json and what was measured, whole or not at all; an engine there is replaced.

        Raises UsageError when `folder` holds anything else, CheckpointError when it cannot be written.
        """
        write_atomically(Path(folder), self._fill)

    def _fill(self, folder: Path) -> None:
        shutil.copyfile(self._package, folder / PACKAGE)
        (folder / START).write_bytes(CarriedState(self._state.start).snapshot())
        (folder / "engine.json").write_bytes(to_json(self.manifest))
        if self.report is not None:
            (folder / "report.json").write_bytes(to_json(self.report))

    def _stepped(
        self, inputs: Sequence[Buffer], out: Any, lead: tuple[int, ...], states: Sequence[CarriedState]
    ) -> Any:
        """One event, or `lead[0]` of them, which take the states in turn."""
        ports = self.manifest.inputs
        if len(inputs) != len(ports):
            names = ", ".join(port.name for port in ports)
            raise UsageError(f"{len(inputs)} inputs; this engine takes {len(ports)}: {names}")
        tensors = [tensor_at(value, port, lead) for value, port in zip(inputs, ports, strict=True)]
        result, targets = output_targets(out, self.manifest.outputs, lead)
        if not lead:
            self._event(tensors, targets, states[0])
        for at in range(*lead) if lead else ():
            self._event([t[at] for t in tensors], [t[at] for t in targets], states[at % len(states)])
        return result

    def _event(self, inputs: Sequence[Tensor], targets: Sequence[Tensor], state: CarriedState) -> None:
        """Run the package; outputs go to `targets` and new states to `state`, through their strides into plain layout."""
        # the list is emptied by the call; the tensors stay ours
        outputs = self._loader.boxed_run([*inputs, *state.now])
        for target, output in zip((*targets, *state.after), outputs, strict=True):
            target.copy_(output)
        state.swap()


class AotiStreams:
    """States of several streams of one package, stepped one after the other."""

    def __init__(self, engine: AotiEngine, n: int) -> None:
        if n < 1:
            raise UsageError(f"{n} streams; give 1 or more")
        self.manifest, self.num_streams = engine.manifest, n
        self._engine = engine
        self._states = [CarriedState(engine._state.start) for _ in range(n)]

    def step(self, *inputs: Buffer, out: Buffer | tuple[Buffer, ...] | None = None) -> Any:
        """One event of each stream: a dimension before those of an event counts the streams, in inputs and outputs."""
        return self._engine._stepped(inputs, out, (self.num_streams,), self._states)

    def reset(self, i: int | None = None) -> None:
        """One stream, or all, as at first."""
        for state in self._states if i is None else [self._states[i]]:
            state.reset()

    def snapshot(self, i: int) -> bytes:
        """A stream's state as bytes, in plain order."""
        return self._states[i].snapshot()

    def restore(self, i: int, snapshot: bytes) -> None:
        """A stream's state. Raises UsageError for bytes of another length."""
        self._states[i].restore(snapshot)


# ---------------------------------------------------------------------------------------------------------------- making


def build_aoti_engine(
    module: nn.Module,
    example_inputs: Sequence[Any],
    *,
    state: str | Sequence[str] = (),
    name: str = "model",
    events: int = 0,
    configs: Mapping[str, bool | int | str] = CONFIGS,
) -> AotiEngine:
    """Compile the module as it is now, on the CPU, and hold 20 carried steps of it against eager and float64.

    `state` names the parameters of forward that are carried and begin as their examples; the last outputs are their new values,
    in the order of the parameters. Takes 10 to 60 s. Raises NativeError without a C++ compiler, where torch cannot export or
    compile the module, where forward changes its own buffers, and where results are off by more than BOUND; UsageError for
    examples that do not fit. `events` are those that the report's latencies are taken from; 0 measures nothing.
    """
    where, examples = input_places(module, example_inputs, state), tensors_of(example_inputs)
    # a copy: eval mode is for the package, the module stays as it is
    ordered = _Ordered(copy.deepcopy(module).eval(), where)
    inputs, start = [examples[at] for at in where.inputs], [examples[at] for at in where.carried]
    outputs = _outputs(ordered, inputs, start)
    split = len(outputs) - len(start)
    folder, began = Path(tempfile.mkdtemp(prefix="flatout-aoti-")), perf_counter()
    try:
        _compile(ordered, (*inputs, *start), folder / PACKAGE, configs)
        manifest = NativeManifest(
            name=name,
            inputs=tuple(port_of(where.names[at], examples[at]) for at in where.inputs),
            outputs=tuple(port_of(f"y{at}" if split > 1 else "y", output) for at, output in enumerate(outputs[:split])),
            state=tuple(port_of(where.names[at], examples[at]) for at in where.carried),
            isas=(ISA,),
            weights_bytes=sum(t.numel() * t.element_size() for t in module.state_dict().values()),
            weights_sum=sha256_of((folder / PACKAGE).read_bytes()),
            torch=str(torch.__version__),
            flatout=own_version(),
        )
        engine = AotiEngine(folder / PACKAGE, manifest, start)
        _verify(engine, module, examples, where)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    # copies of the engine share its loader: the folder goes with the last of them
    weakref.finalize(engine._loader, shutil.rmtree, folder, ignore_errors=True)
    build_s = perf_counter() - began
    if events:
        by = f"AOTInductor of torch {torch.__version__}"
        engine.attach(
            measure_engine(engine, module, example_inputs, state=state, compiler=by, build_s=build_s, num_events=events)
        )
    return engine


def load_aoti_engine(folder: Path | str) -> AotiEngine:
    """An engine that `save` wrote; needs no compiler. CheckpointError where a file is missing or not the one that was written.

    NativeError when others own the folder or may write to it: its package is code.
    """
    folder = Path(folder)
    try:
        manifest = read_manifest(folder)
        found, first = sha256_of(read_regular_file(folder / PACKAGE)), read_regular_file(folder / START)
    except OSError as e:
        raise CheckpointError(
            f"'{folder}' holds no AOTInductor engine: {e.filename}: {e.strerror or e}; build it again"
        ) from e
    if manifest is None or manifest.isas != (ISA,) or found != manifest.weights_sum:
        raise CheckpointError(f"'{folder / PACKAGE}' is not the package that engine.json describes; build it again")
    require_trusted_library(folder / PACKAGE)
    if sum(port.num_bytes for port in manifest.state) > len(first):  # before memory is taken for it
        raise CheckpointError(f"'{folder / START}' is torn: it has {len(first)} bytes; build it again")
    start = CarriedState([torch.zeros(port.shape, dtype=DTYPES[port.dtype]) for port in manifest.state])
    try:
        start.restore(first)
        return AotiEngine(folder / PACKAGE, manifest, start.now)
    except UsageError as e:
        raise CheckpointError(f"'{folder / START}' is torn: {e}; build it again") from e


class _Ordered(nn.Module):
    """The module with its inputs first and its state after them."""

    def __init__(self, module: nn.Module, where: Places) -> None:
        super().__init__()
        self.module, self.where = module, where
        self.eval()

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        split = len(self.where.inputs)
        return output_tensors(self.module(*self.where.arguments(tensors[:split], tensors[split:])))


def _outputs(ordered: _Ordered, inputs: Sequence[Tensor], start: Sequence[Tensor]) -> list[Tensor]:
    """Of the example. Raises NativeError where buffers change, UsageError where new states are not like the old."""
    before = [buffer.clone() for buffer in ordered.buffers()]
    with torch.no_grad():
        outputs: list[Tensor] = ordered(*(tensor.clone() for tensor in (*inputs, *start)))
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
    with _quiet() as output, torch.no_grad():
        try:
            program = torch.export.export(module, examples)
            aoti_compile_and_package(program, package_path=str(package), inductor_configs=dict(configs))
        # torch raises RuntimeError and its children for what it cannot compile, and others from export
        except (RuntimeError, ValueError, TypeError, AssertionError, torch._dynamo.exc.TorchDynamoException) as e:
            lines = output.getvalue().strip().splitlines()[-3:]
            raise NativeError(
                f"AOTInductor cannot compile {type(module).__name__}: {e} {' | '.join(lines)}".rstrip()
            ) from e


@contextmanager
def _quiet() -> Iterator[StringIO]:
    """Without torch's tables of candidates on stderr, and its warnings of its own deprecations."""
    output = StringIO()
    with warnings.catch_warnings(), redirect_stderr(output):
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield output


def _verify(engine: AotiEngine, module: nn.Module, examples: Sequence[Tensor], where: Places) -> None:
    """Raises NativeError where the package's carried steps are not those of the module."""
    ours, theirs = rollout_errors(engine, module, examples, where, seed=0, num_events=_NUM_CHECKED)
    for name, error in ours.items():
        if error > BOUND + 10 * theirs[name]:
            raise NativeError(
                f"AOTInductor gives wrong numbers: output '{name}' is {error:.1e} off in {_NUM_CHECKED} carried steps, "
                f"eager {theirs[name]:.1e}, allowed are {BOUND:g} and ten times eager's; use the native back end"
            )

"""A model's shared library: compiled for all instruction sets, loaded (the table `flatout_native` of model.c), and called.

Python calls it through a C extension, compiled once for a machine and a Python, and saved with each engine: some 40 ns a step.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.machinery
import importlib.util
import platform
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from flatout.core.errors import NativeError, UsageError
from flatout.core.records.native import NativeLayer, Port
from flatout.core.runtime.c_compiler import (
    BASE_FLAGS,
    STRICT_FLAGS,
    CompilerRun,
    build_shared_library,
    compiler_version,
    find_compiler,
    instruction_sets,
)
from flatout.core.runtime.cache_folder import create_code_folder, require_trusted_library


class Generated(NamedTuple):
    """`source` is model.c and compiles alone; `weights` is the block that its functions read, at a multiple of 64 bytes."""

    name: str
    source: str
    header: str
    weights: bytes
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    state: tuple[Port, ...]
    layers: tuple[NativeLayer, ...]


class CompiledLibrary(NamedTuple):
    """Facts about a library that was compiled."""

    isas: tuple[str, ...]
    """Instruction sets that the library has code for, best first."""
    compiler: str
    """The compiler's name for itself."""
    warnings: str
    """The compiler's warnings; empty when there are none."""


def compile_library(
    source: Path, out: Path, *, compiler: str | None = None, isas: Sequence[str] | None = None
) -> CompiledLibrary:
    """Compile the model in `source` into the shared library `out`, which appears complete or not at all.

    `isas` are the instruction sets to compile for; None: all of this architecture, also those that this CPU lacks, since the
    library may be copied to another machine. "plain" is always among them. Raises NativeError with the compiler's messages when
    it refuses, and when there is no compiler; UsageError for an instruction set that this architecture does not have.
    """
    try:
        path = find_compiler(compiler)
    except NativeError as e:
        raise NativeError(
            f"{e}, or build where there is one and copy the engine's folder: loading it needs no compiler. "
            'build(..., backend="aoti") needs a C++ compiler where it builds, and none where its package is loaded'
        ) from e
    selected = _selected(isas, instruction_sets(platform.machine()))
    compilations = [
        CompilerRun(name, (*STRICT_FLAGS, *flags, f"-DFLATOUT_ISA={name}", "-DFLATOUT_PART"))
        for name, flags in selected.items()
    ]
    has = (f"-DFLATOUT_HAS_{name.upper()}" for name in selected if name != "plain")
    compilations.append(CompilerRun("dispatch", (*STRICT_FLAGS, "-DFLATOUT_DISPATCH", *has)))
    warnings = build_shared_library(source, out, compilations, compiler=path, link_flags=("-Wl,-z,defs", "-lm"))
    return CompiledLibrary(tuple(selected), compiler_version(path), warnings)


def _selected(isas: Sequence[str] | None, known: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The requested instruction sets, in the order of `known`, and plain."""
    unknown = sorted(set(isas or ()) - set(known))
    if unknown:
        raise UsageError(f"isas has {unknown}; {platform.machine()} has {', '.join(known)}")
    return {name: flags for name, flags in known.items() if isas is None or name in isas or name == "plain"}


INTERFACE = 1
"""The number that model.c writes into its table."""
_Sizes = ctypes.POINTER(ctypes.c_uint64)


class FunctionTable(ctypes.Structure):
    """The C struct `flatout_native`, field by field. Its library stays loaded until the process ends, as ctypes leaves it."""

    _fields_ = (
        ("abi", ctypes.c_uint32),
        ("num_inputs", ctypes.c_uint32),
        ("num_outputs", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("isa", ctypes.c_char_p),
        ("input_bytes", _Sizes),
        ("output_bytes", _Sizes),
        ("weights_bytes", ctypes.c_uint64),
        ("state_bytes", ctypes.c_uint64),
        ("work_bytes", ctypes.c_uint64),
        ("streams_work_bytes", ctypes.c_uint64),
        ("snapshot_bytes", ctypes.c_uint64),
        ("reset", ctypes.c_void_p),
        ("step", ctypes.c_void_p),
        ("step_many", ctypes.c_void_p),
        ("step_streams", ctypes.c_void_p),
        ("snapshot", ctypes.c_void_p),
        ("restore", ctypes.c_void_p),
    )

    @property
    def address(self) -> int:
        """Where the table lies in memory."""
        return ctypes.addressof(self)


def open_library(path: Path) -> FunctionTable:
    """Load the library at `path` as it is now. Raises NativeError when this machine cannot, or it is no model's."""
    try:
        # The loader knows libraries by the name they were asked for under: a file that took the place of another at the same path
        # would give the code of the other. A new name for each load makes it look at the file.
        with tempfile.TemporaryDirectory(prefix="flatout-") as folder:
            link = Path(folder) / path.name
            link.symlink_to(path.resolve())
            function = ctypes.CDLL(str(link)).flatout_native_model
    except (OSError, AttributeError) as e:
        raise NativeError(
            f"cannot load '{path}': {e}; an engine runs on the architecture that it was built for: build it anew here"
        ) from e
    function.restype, function.argtypes = ctypes.c_void_p, ()
    address = function()
    table = FunctionTable.from_address(address) if address else None
    if table is None or table.abi != INTERFACE:
        raise NativeError(f"'{path}' has interface {table and table.abi}, {INTERFACE} is known; build the engine anew")
    return table


# -- how Python reaches its functions ----------------------------------------------------------------------------------------


SOURCE: Final = Path(__file__).with_name("c") / "caller.c"
MODULE: Final = "flatout_caller"
"""The module's name, with which names of its files begin."""
Buffer: TypeAlias = Any
"""A NumPy array, a tensor on the CPU, or anything with the buffer protocol; C-contiguous."""


class CallError(UsageError, ValueError):
    """What was given to an engine does not fit it: its size, its type, how it lies in memory."""


class BusyError(UsageError, RuntimeError):
    """The engine is in the middle of `step_many` in another thread."""


class PackedWeights(Protocol):
    """Packed numbers that callers share."""

    def set(self, packed: bytes, /) -> None:
        """Other numbers, as many: for all callers, from their next call on."""

    def packed(self) -> bytes:
        """The packed numbers, copied into bytes."""


class ModelStreams(Protocol):
    """Streams that are stepped together: inputs are [n, ...]. `step` and `step_many` as those of an `Engine`."""

    step: Callable[..., Any]
    step_many: Callable[..., Any]
    num_streams: int

    def reset(self, i: int | None = None, /) -> None:
        """Set one stream, or all, to the state before the first event."""

    def snapshot(self, i: int, /) -> bytes:
        """A stream's state as bytes."""

    def restore(self, i: int, snapshot: bytes, /) -> None:
        """Set a stream's state to that of a snapshot."""

    def copy(self) -> ModelStreams:
        """Copy the streams: as many, with the same weights and these states."""


class ModelCaller(Protocol):
    """One stream of a model, whose functions those of an `Engine` are."""

    step: Callable[..., Any]
    step_many: Callable[..., Any]
    reset: Callable[[], None]
    snapshot: Callable[[], bytes]
    restore: Callable[[bytes], None]
    streams: Callable[[int], ModelStreams]
    copy: Callable[[], ModelCaller]


class Extension(NamedTuple):
    """The extension module, and the file that it was loaded from."""

    module: Any
    name: str
    data: bytes

    def weights(self, packed: bytes) -> PackedWeights:
        """Packed numbers that callers of this extension share."""
        weights: PackedWeights = self.module.Weights(packed)
        return weights

    def caller(
        self, address: int, weights: PackedWeights, inputs: tuple[Port, ...], outputs: tuple[Port, ...]
    ) -> ModelCaller:
        """A stream of the model whose table is at `address`. ValueError when library, weights and ports disagree."""
        described = (tuple((port.name, port.dtype, port.shape) for port in ports) for ports in (inputs, outputs))
        caller: ModelCaller = self.module.Caller(address, weights, *described, (CallError, BusyError))
        return caller


def find_extension(*, cache: Path, compiler: str | None = None, saved: Path | None = None) -> Extension:
    """The extension, compiled into `cache` if it is not there for this source, Python and compiler.

    Where it cannot be compiled, one will do that was compiled earlier for this source and Python: into `cache`, or elsewhere and
    then saved in the engine's folder `saved`. Raises NativeError when there is none: no compiler, no headers of Python, a cache
    that cannot be written.
    """
    if sys.implementation.name != "cpython":
        raise NativeError(f"engines are stepped through an extension of CPython, and this is {sys.implementation.name}")
    stem = f"{MODULE}-{_sum(SOURCE.read_bytes() + SOURCE.with_name('table.h').read_bytes())}-"
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))  # names the Python and its ABI
    try:
        found = find_compiler(compiler)
        path = cache / f"{stem}{_sum(compiler_version(found).encode())}{suffix}"
        if not path.exists():
            _compile(path, found)
        require_trusted_library(path)
    except NativeError as e:
        earlier = _earlier(cache, saved, f"{stem}*{suffix}")
        if earlier is None:
            raise NativeError(
                f"{e}. It would compile what calls an engine from Python; an engine's folder brings that along for the Python "
                f"and the flatout that saved it, and none for {suffix} is there"
            ) from e
        path = earlier
    try:
        return _loaded(path)
    except ImportError as e:
        raise NativeError(
            f"'{path}' cannot be loaded: {e}; is its folder mounted noexec? Remove it, or give another cache="
        ) from e


def _earlier(cache: Path, saved: Path | None, pattern: str) -> Path | None:
    for path in sorted(cache.glob(pattern)):
        with suppress(NativeError):
            require_trusted_library(path)
            return path
    for path in sorted(saved.glob(pattern)) if saved is not None else ():
        with suppress(NativeError):
            require_trusted_library(path)
            return path
    return None


def _compile(path: Path, compiler: str) -> None:
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").exists():
        raise NativeError(f"no headers of Python in '{include}'; install python3-dev (python3-devel)")
    create_code_folder(path.parent)
    # CPython's own headers are not clean under -Wextra in every version: -isystem silences their warnings.
    flags = (*BASE_FLAGS, "-O2", "-fno-strict-aliasing", "-isystem", str(include))
    build_shared_library(SOURCE, path, [CompilerRun("extension", flags)], compiler=compiler, link_flags=())


@functools.cache
def _loaded(path: Path) -> Extension:
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_loader(MODULE, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return Extension(module, path.name, path.read_bytes())


def _sum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]

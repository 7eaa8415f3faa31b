"""How Python reaches a model's functions: a C extension, compiled once for a machine and a Python, or else ctypes.

A step through the extension costs some 40 ns above the C call; through ctypes, more than ten microseconds.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from flatout.errors import NativeError, UsageError
from flatout.inference.native import ctypes_caller
from flatout.inference.native.compiler import compile_extension, find_compiler, version_of
from flatout.records.native import Port

SOURCE = Path(__file__).with_name("c") / "caller.c"
_TABLE = SOURCE.with_name("table.h")
_MODULE = "flatout_caller"
Buffer: TypeAlias = Any
"""A NumPy array, a tensor on the CPU, or anything with the buffer protocol; C-contiguous."""


class CallError(UsageError, ValueError):
    """What was given to an engine does not fit it: its size, its type, how it lies in memory."""


class BusyError(UsageError, RuntimeError):
    """The engine is in the middle of `step_many` in another thread."""


class Weights(Protocol):
    """Packed numbers that callers share."""

    def set(self, packed: bytes, /) -> None:
        """Other numbers, as many: for all callers, from their next call on."""

    def packed(self) -> bytes:
        """The numbers as bytes."""


class Stepping(Protocol):
    """What one stream and several have in common."""

    @property
    def step(self) -> Callable[..., Any]:
        """`step(*inputs, out=None)`: outputs may also follow the inputs by position."""

    @property
    def step_many(self) -> Callable[..., Any]:
        """`step_many(*inputs, out=None)`: events along a first dimension; Python's lock is let go of."""


class Streams(Stepping, Protocol):
    """Streams that are stepped together: inputs are [n, ...]."""

    @property
    def num_streams(self) -> int:
        """How many."""

    def reset(self, i: int | None = None, /) -> None:
        """One stream, or all."""

    def snapshot(self, i: int, /) -> bytes:
        """A stream's state as bytes."""

    def restore(self, i: int, snapshot: bytes, /) -> None:
        """A stream's state."""

    def copy(self) -> Streams:
        """As many streams again, with the same weights and these states."""


class Caller(Stepping, Protocol):
    """One stream of a model."""

    @property
    def reset(self) -> Callable[[], None]:
        """The state as it was at first."""

    @property
    def snapshot(self) -> Callable[[], bytes]:
        """The state as bytes."""

    @property
    def restore(self) -> Callable[[bytes], None]:
        """The state of a snapshot."""

    def streams(self, num: int, /) -> Streams:
        """Streams with the same weights."""

    def copy(self) -> Caller:
        """Another stream with the same weights and this state."""


class Route(NamedTuple):
    """The way that was taken, and why not the faster one."""

    name: Literal["extension", "ctypes"]
    why: str
    module: Any

    def weights(self, packed: bytes) -> Weights:
        """Packed numbers for callers of this route."""
        made: Weights = self.module.Weights(packed)
        return made

    def caller(self, address: int, weights: Weights, inputs: tuple[Port, ...], outputs: tuple[Port, ...]) -> Caller:
        """A stream of the model whose table is at `address`. ValueError when library, weights and ports disagree."""
        described = (tuple((port.name, port.dtype, port.shape) for port in ports) for ports in (inputs, outputs))
        made: Caller = self.module.Caller(address, weights, *described, (CallError, BusyError))
        return made


def default_cache() -> Path:
    """`~/.cache/flatout`."""
    return Path.home() / ".cache" / "flatout"


def find_route(*, cache: Path | None = None, compiler: str | None = None) -> Route:
    """The extension if it lies in `cache` or can be compiled into it, else ctypes with the reason."""
    try:
        return Route("extension", "", extension(cache=cache or default_cache(), compiler=compiler))
    except NativeError as e:
        return Route("ctypes", str(e), ctypes_caller)


def ctypes_route(why: str = "asked for") -> Route:
    """The slower way, whatever there is."""
    return Route("ctypes", why, ctypes_caller)


def extension(*, cache: Path, compiler: str | None = None) -> ModuleType:
    """The extension module, compiled into `cache` if it is not there for this source, Python and compiler.

    Where there is no compiler, one compiled earlier for this source and Python will do. Raises NativeError when there is none and
    none can be made: no compiler, no headers of Python, a cache that cannot be written.
    """
    if sys.implementation.name != "cpython":
        raise NativeError(f"the extension is for CPython, this is {sys.implementation.name}; ctypes is used")
    stem = f"{_MODULE}-{_sum(SOURCE.read_bytes() + _TABLE.read_bytes())}-"
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))  # names the Python and its ABI
    try:
        found = find_compiler(compiler)
    except NativeError:
        earlier = sorted(cache.glob(f"{stem}*{suffix}"))
        if not earlier:
            raise
        return _loaded(str(earlier[0]))
    path = cache / f"{stem}{_sum(version_of(found).encode())}{suffix}"
    if not path.exists():
        _compile(path, found)
    try:
        return _loaded(str(path))
    except ImportError as e:
        raise NativeError(
            f"'{path}' cannot be loaded: {e}; is its folder mounted noexec? Remove it, or give another cache="
        ) from e


def _compile(path: Path, compiler: str) -> None:
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").exists():
        raise NativeError(
            f"no headers of Python in '{include}' (python3-dev, python3-devel); steps go through ctypes without them"
        )
    make_cache(path.parent)
    compile_extension(SOURCE, path, compiler=compiler, include=include)


def make_cache(cache: Path) -> None:
    """Make the folder if need be. NativeError when it cannot be written, or is somebody else's: code is loaded from it."""
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = cache.stat().st_uid
    except OSError as e:
        raise NativeError(f"the cache '{cache}' cannot be made: {e.strerror or e}; give another cache=") from e
    if owner not in (0, os.getuid()):
        raise NativeError(
            f"the cache '{cache}' belongs to user {owner}, and code is loaded from it; give one of your own as cache="
        )
    if not os.access(cache, os.W_OK):
        raise NativeError(f"the cache '{cache}' cannot be written; give another cache=")


@functools.cache
def _loaded(path: str) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(_MODULE, path)
    spec = importlib.util.spec_from_loader(_MODULE, loader)
    if spec is None:
        raise ImportError(f"no module in '{path}'")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _sum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]

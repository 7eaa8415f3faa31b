"""Compiling a model's C file: once for each instruction set, one dispatcher, one shared library.

The flags never let the compiler change a sum's order or drop a NaN (no -ffast-math, no contraction): the same C gives the same
bits on every machine that runs the same instruction set.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from flatout.errors import NativeError, UsageError

COMPILERS = ("cc", "gcc", "clang")
"""Looked for on PATH, in this order."""
FLAGS = (
    *(
        "-std=gnu11",
        "-O3",
        "-fPIC",
        "-fvisibility=hidden",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-ffp-contract=off",
    ),
    *("-Wall", "-Wextra"),
)
_AVX512 = ("-march=x86-64-v4", "-mprefer-vector-width=512")
_X86: dict[str, tuple[str, ...]] = {
    "avx512vnni": (*_AVX512, "-mavx512vnni"),
    "avx512": _AVX512,
    "avx2": ("-march=x86-64-v3",),
    "plain": (),
}
_ARM: dict[str, tuple[str, ...]] = {"neon": (), "plain": ()}
_MOST_LINES = 20


class Compiled(NamedTuple):
    """What came of compiling a library."""

    isas: tuple[str, ...]
    """Instruction sets that the library holds code for, best first."""
    compiler: str
    """The compiler's name for itself."""
    seconds: float
    warnings: str
    """What the compiler said of code that it took; empty when it had nothing to say."""


def flags_of(machine: str) -> dict[str, tuple[str, ...]]:
    """Instruction sets of an architecture as `platform.machine()` names it, best first, and the flags of each.

    >>> list(flags_of("aarch64"))
    ['neon', 'plain']
    """
    if machine in ("x86_64", "AMD64"):
        return _X86
    return _ARM if machine in ("aarch64", "arm64") else {"plain": ()}


def find_compiler(compiler: str | None = None) -> str:
    """The path of `compiler`, or of the first of cc, gcc and clang. NativeError when it is not there."""
    for name in (compiler,) if compiler else COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    looked = f"'{compiler}' was not found" if compiler else f"none of {', '.join(COMPILERS)} was found on PATH"
    raise NativeError(
        f"no C compiler: {looked}; install gcc >= 11 or clang >= 14, or build where there is one and copy the engine's folder: "
        'loading it needs no compiler. build(..., backend="aoti") needs a C++ compiler where it builds, and none where its '
        "package is loaded"
    )


def version_of(compiler: str) -> str:
    """The first line of `compiler --version`."""
    return _run((compiler, "--version"), "asked for its version").stdout.partition("\n")[0].strip()


def compile_library(
    source: Path, out: Path, *, compiler: str | None = None, isas: Sequence[str] | None = None
) -> Compiled:
    """Compile the model in `source` into the shared library `out`, which appears whole or not at all.

    `isas` are the instruction sets to hold code for; None: all of this architecture, also those that this CPU lacks, since the
    library may travel. "plain" is always among them. Raises NativeError with the compiler's text when it refuses, and when
    there is no compiler; UsageError for an instruction set that this architecture does not have.
    """
    started = time.perf_counter()
    path = find_compiler(compiler)
    chosen = _chosen(isas, flags_of(platform.machine()))
    said = []
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        objects = []
        for name, flags in (*_parts(chosen), _dispatcher(chosen)):
            object_file = Path(folder) / f"{name}.o"
            command = (path, *FLAGS, *flags, "-c", str(source), "-o", str(object_file))
            said.append(_run(command, f"compiling {source.name} for {name}").stderr)
            objects.append(str(object_file))
        beside = Path(folder) / out.name
        _run((path, "-shared", "-o", str(beside), *objects, "-Wl,-z,defs", "-lm"), "linking")
        os.replace(beside, out)
    return Compiled(tuple(chosen), version_of(path), time.perf_counter() - started, "".join(said))


def compile_trial(source: Path, out: Path, *, compiler: str | None = None) -> None:
    """Compile a file for this machine's own CPU alone, to measure something with it."""
    isa = own_isa()
    flags = flags_of(platform.machine())[isa] if isa else ()
    command = (find_compiler(compiler), *FLAGS, *flags, "-shared", str(source), "-o", str(out), "-lm")
    _run(command, f"compiling {source.name}")


def own_isa() -> str | None:
    """The best instruction set of the CPU at hand; None where the system does not tell its features."""
    known = flags_of(platform.machine())
    try:
        told = Path("/proc/cpuinfo").read_text()
    except OSError:
        return None
    features = set(next((line.partition(":")[2] for line in told.splitlines() if line.startswith("flags")), "").split())
    needs = {
        "avx512vnni": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd", "avx512_vnni"},
        "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"},
        "avx2": {"avx2", "fma", "bmi2"},
    }
    return next((name for name in known if needs.get(name, set()) <= features), None)


def compile_extension(source: Path, out: Path, *, compiler: str, include: Path) -> None:
    """Compile the extension module in `source` against Python's headers in `include`; whole or not at all."""
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        beside = Path(folder) / out.name
        flags = ("-std=gnu11", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-Wall", "-Wextra")
        # CPython's own headers are not clean under -Wextra in every version: -isystem keeps its warnings to itself.
        command = (compiler, *flags, "-isystem", str(include), "-shared", str(source), "-o", str(beside))
        _run(command, "compiling the extension module")
        with beside.open("rb") as file:
            os.fsync(
                file.fileno()
            )  # a machine lost after the renaming must not leave half a file: loading that kills a process
        os.replace(beside, out)


def _chosen(isas: Sequence[str] | None, known: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Those of `known` that were asked for, in its order, and plain."""
    unknown = sorted(set(isas or ()) - set(known))
    if unknown:
        raise UsageError(f"isas has {unknown}; {platform.machine()} has {', '.join(known)}")
    return {name: flags for name, flags in known.items() if isas is None or name in isas or name == "plain"}


def _parts(chosen: dict[str, tuple[str, ...]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple((name, (*flags, f"-DFLATOUT_ISA={name}", "-DFLATOUT_PART")) for name, flags in chosen.items())


def _dispatcher(chosen: dict[str, tuple[str, ...]]) -> tuple[str, tuple[str, ...]]:
    has = (f"-DFLATOUT_HAS_{name.upper()}" for name in chosen if name != "plain")
    return "dispatch", ("-DFLATOUT_DISPATCH", *has)


def _run(command: tuple[str, ...], what: str) -> subprocess.CompletedProcess[str]:
    """Run a compiler. Raises NativeError with what it said."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as e:
        raise NativeError(f"{what} failed: cannot start {command[0]}: {e.strerror or e}; give another compiler=") from e
    if ended.returncode:
        raise NativeError(
            f"{what} failed: {command[0]} ended with {ended.returncode}; gcc >= 11 or clang >= 14 is needed. It said:\n"
            f"{shortened(ended.stderr or ended.stdout)}"
        )
    return ended


def shortened(text: str) -> str:
    """The first lines of a compiler's text.

    >>> shortened("a\\nb")
    'a\\nb'
    """
    lines = text.strip().splitlines()
    left = len(lines) - _MOST_LINES
    return "\n".join(lines if left <= 0 else [*lines[:_MOST_LINES], f"... and {left} lines more"])

"""The C compiler of this machine: finding it, flags, instruction sets, and shared libraries that are written atomically."""

from __future__ import annotations

import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from flatout.core.errors import NativeError

COMPILERS: Final = ("cc", "gcc", "clang")
"""Names to look for on PATH, in this order."""
BASE_FLAGS: Final = ("-std=gnu11", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
STRICT_FLAGS: Final = (*BASE_FLAGS, "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
"""For numerical code. The compiler may not reorder a sum or drop a NaN (no -ffast-math, no contraction), so the same C gives the
same bits on every machine that runs the same instruction set."""
_AVX512: Final = ("-march=x86-64-v4", "-mprefer-vector-width=512")
_X86: Final[dict[str, tuple[str, ...]]] = {
    "avx512vnni": (*_AVX512, "-mavx512vnni"),
    "avx512": _AVX512,
    "avx2": ("-march=x86-64-v3",),
    "plain": (),
}
_ARM: Final[dict[str, tuple[str, ...]]] = {"neon": (), "plain": ()}
_AVX512_FEATURES: Final = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"})
_REQUIRED_FEATURES: Final = {
    "avx512vnni": _AVX512_FEATURES | {"avx512_vnni"},
    "avx512": _AVX512_FEATURES,
    "avx2": frozenset({"avx2", "fma", "bmi2"}),
}
_NATIVE_FLAGS: Final = {
    "x86_64": ("-march=native",),
    "AMD64": ("-march=native",),
    "aarch64": ("-mcpu=native",),
}
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_MAX_LINES: Final = 20


class CompilerRun(NamedTuple):
    """One translation of a source file: a name for messages and the object file, and flags."""

    name: str
    flags: tuple[str, ...]


def find_compiler(compiler: str | None = None) -> str:
    """Path of `compiler`, or of the first of cc, gcc and clang on PATH. Raises NativeError when there is none."""
    for name in (compiler,) if compiler else COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    missing = f"'{compiler}' was not found" if compiler else f"none of {', '.join(COMPILERS)} was found on PATH"
    raise NativeError(f"no C compiler: {missing}; install gcc >= 11 or clang >= 14")


def compiler_version(compiler: str) -> str:
    """The first line that `compiler --version` prints."""
    return _run((compiler, "--version"), "reading the compiler's version").stdout.partition("\n")[0].strip()


def build_shared_library(
    source: Path,
    out: Path,
    compilations: Sequence[CompilerRun],
    *,
    compiler: str,
    link_flags: tuple[str, ...] = ("-lm",),
) -> str:
    """Compile `source` once for each compilation and link the shared library `out`, which appears complete or not at all.

    Returns the compiler's warnings. Raises NativeError with the compiler's messages when it refuses.
    """
    warnings, objects = [], []
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        for name, flags in compilations:
            objects.append(str(Path(folder) / f"{name}.o"))
            command = (compiler, *flags, "-c", str(source), "-o", objects[-1])
            warnings.append(_run(command, f"compiling {source.name} for {name}").stderr)
        temporary = Path(folder) / out.name
        _run((compiler, "-shared", "-o", str(temporary), *objects, *link_flags), f"linking {out.name}")
        temporary.chmod(temporary.stat().st_mode & ~_OTHERS_WRITE)
        with temporary.open("rb") as file:
            # A machine that fails after the renaming must not leave half a file: loading that kills a process.
            os.fsync(file.fileno())
        os.replace(temporary, out)
    return "".join(warnings)


def instruction_sets(machine: str) -> dict[str, tuple[str, ...]]:
    """Instruction sets of an architecture as `platform.machine()` names it, best first, with the compiler flags of each.

    >>> list(instruction_sets("aarch64"))
    ['neon', 'plain']
    """
    if machine in ("x86_64", "AMD64"):
        return _X86
    return _ARM if machine in ("aarch64", "arm64") else {"plain": ()}


def cpu_instruction_set() -> str | None:
    """The best instruction set of this machine's CPU; None where the system does not list the CPU's features."""
    features = cpu_features()
    if features is None:
        return None
    return next(
        (n for n in instruction_sets(platform.machine()) if _REQUIRED_FEATURES.get(n, frozenset()) <= features), None
    )


def cpu_features() -> frozenset[str] | None:
    """Features of this machine's CPU as Linux lists them; None on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return frozenset(
        next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "").split()
    )


def native_flags() -> tuple[str, ...]:
    """Flags for code that runs on this machine's CPU alone; none where the compiler has no such flag."""
    return _NATIVE_FLAGS.get(platform.machine(), ())


def _run(command: tuple[str, ...], what: str) -> subprocess.CompletedProcess[str]:
    """Run a compiler. Raises NativeError with its messages."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as e:
        raise NativeError(f"{what} failed: cannot start {command[0]}: {e.strerror or e}; give another compiler=") from e
    if ended.returncode:
        raise NativeError(
            f"{what} failed: {command[0]} ended with {ended.returncode}; gcc >= 11 or clang >= 14 is needed. Its messages:\n"
            f"{_first_lines(ended.stderr or ended.stdout)}"
        )
    return ended


def _first_lines(text: str) -> str:
    lines = text.strip().splitlines()
    num_more = len(lines) - _MAX_LINES
    return "\n".join(lines if num_more <= 0 else [*lines[:_MAX_LINES], f"... and {num_more} lines more"])

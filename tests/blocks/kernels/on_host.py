"""Kernels in CUDA C on a CPU: compiled by the machine's C++ compiler, with `on_host.h` in place of the device's instructions."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

HERE = Path(__file__).parent


class OnHost:
    """In place of `nvrtc.Function`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __call__(
        self,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        *args: Any,
        is_side_by_side: bool = False,
        **_: Any,
    ) -> None:
        from flatout.blocks.kernels.nvrtc import _as_c

        kept = [_as_c(a) for a in args]
        pointers = (ctypes.c_void_p * len(kept))(*(ctypes.addressof(a) for a in kept))
        self._library.launch((ctypes.c_int * 3)(*grid), threads, int(is_side_by_side), pointers)


@lru_cache(maxsize=64)
def on_host(
    paths: tuple[Path, ...], name: str, constants: tuple[tuple[str, int], ...], kinds: tuple[str, ...]
) -> OnHost:
    """The kernel `name` of files, one after the other, whose parameters are of these kinds. Skips where there is no compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    folder = Path(mkdtemp())
    text = "".join(path.read_text() for path in paths).replace(
        "extern __shared__ __align__(16) char shared_memory[];", "char* shared_memory = host::shared_of_program();"
    )
    given = ", ".join(f"*({kind}*)given[{i}]" for i, kind in enumerate(kinds))
    launch = f"""
static void** given;
static void one() {{ {name}({given}); }}
extern "C" void launch(const int* grid, int threads, int at_once, void** args) {{
    given = args;
    gridDim = {{grid[0], grid[1], grid[2]}};
    blockIdx = {{0, 0, 0}};
    if (at_once) return host::run(one, threads, grid[0]);
    for (int z = 0; z < grid[2]; z++) for (int y = 0; y < grid[1]; y++) for (int x = 0; x < grid[0]; x++) {{
        blockIdx = {{x, y, z}};
        host::run(one, threads, 1);
    }}
}}
"""
    made, out = folder / "kernel.cpp", folder / "kernel.so"
    made.write_text((HERE / "on_host.h").read_text() + text + launch)
    macros = [f"-D{k}={v}" for k, v in constants]
    done = subprocess.run(
        [compiler, "-std=c++17", "-O1", "-w", "-fPIC", "-shared", "-fno-strict-aliasing", *macros, made, "-o", out],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return OnHost(ctypes.CDLL(str(out)))

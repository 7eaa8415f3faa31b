"""A generated model behind ctypes: memory that holds rubbish before each call, and is watched behind its end."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatout.blocks.inference.native.library import FunctionTable, Generated
from flatout.core.runtime.c_compiler import STRICT_FLAGS, cpu_instruction_set, find_compiler, instruction_sets

_GUARD = 64
_MARK = 0x5A
Array = NDArray[Any]


def run(command: Sequence[str]) -> str:
    """What a command wrote to its error stream. Fails with that where the command does."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{' '.join(command)}\n{ended.stdout[-3000:]}{ended.stderr[-6000:]}"
    return ended.stderr


def flags(isa: str | None, machine: str = "x86_64") -> tuple[str, ...]:
    """Of the engine's own, for one set of instructions."""
    return (*STRICT_FLAGS, *instruction_sets(machine)[isa or "plain"])


def guarded(num_bytes: int, fill: int = 0xFF) -> Array:
    """Bytes at a multiple of 64, with marks behind their end."""
    memory = np.full(num_bytes + _GUARD + 64, _MARK, np.uint8)
    start = -memory.ctypes.data % 64
    found = memory[start : start + num_bytes + _GUARD]
    found[:num_bytes] = fill
    return found


def is_whole(memory: Array) -> bool:
    """Whether nothing was written behind the end."""
    return bool((memory[-_GUARD:] == _MARK).all())


class Bare:
    """A compiled model. Every call begins with work memory of NaN, and looks behind the end of what it wrote."""

    def __init__(
        self, generated: Generated, folder: Path, *, isa: str | None = None, extra: Sequence[str] = ("-O1",)
    ) -> None:
        source, library = folder / f"{generated.name}.c", folder / f"{generated.name}-{isa}.so"
        source.write_text(generated.source)
        chosen = flags(isa or cpu_instruction_set())
        run([find_compiler(), *chosen, *extra, "-Werror", "-shared", str(source), "-o", str(library), "-lm"])
        function = ctypes.CDLL(str(library)).flatout_native_model
        function.restype = ctypes.c_void_p
        self.table, self.generated = FunctionTable.from_address(function()), generated
        self.weights = guarded(len(generated.weights))
        self.weights[: len(generated.weights)] = np.frombuffer(generated.weights, np.uint8)

    def states(self, n: int = 1) -> Array:
        """Of n streams, as at first."""
        memory = guarded(n * self.table.state_bytes)
        for i in range(n):
            self._call(self.table.reset, memory.ctypes.data + i * self.table.state_bytes)
        assert is_whole(memory)
        return memory

    def step(self, states: Array, inputs: Sequence[Array]) -> list[Array]:
        """One event."""
        return self._stepped(self.table.step, states, inputs, (), self.table.work_bytes)

    def step_many(self, states: Array, inputs: Sequence[Array], n: int) -> list[Array]:
        """n events."""
        return self._stepped(self.table.step_many, states, inputs, (n,), self.table.work_bytes)

    def step_streams(self, states: Array, inputs: Sequence[Array], n: int) -> list[Array]:
        """One event of each of n streams."""
        return self._stepped(self.table.step_streams, states, inputs, (n,), self.table.streams_work_bytes)

    def snapshot(self, states: Array) -> bytes:
        """Of the first stream."""
        memory = guarded(self.table.snapshot_bytes, 0)
        self._call(self.table.snapshot, states.ctypes.data, memory.ctypes.data)
        assert is_whole(memory)
        return memory[:-_GUARD].tobytes()

    def restore(self, states: Array, snapshot: bytes) -> None:
        """Of the first stream."""
        memory = np.frombuffer(snapshot, np.uint8)
        self._call(self.table.restore, states.ctypes.data, memory.ctypes.data)
        assert is_whole(states)

    def _stepped(
        self, function: int, states: Array, inputs: Sequence[Array], n: tuple[int, ...], work_bytes: int
    ) -> list[Array]:
        lead = n or ()
        given = [np.ascontiguousarray(x) for x in inputs]
        for x, port in zip(given, self.generated.inputs, strict=True):
            assert (x.dtype, x.shape) == (np.dtype(port.dtype), (*lead, *port.shape))
        sizes = [port.num_bytes * (lead[0] if lead else 1) for port in self.generated.outputs]
        outs, work = [guarded(size) for size in sizes], guarded(work_bytes)
        pointers = [(ctypes.c_void_p * max(1, len(group)))(*(a.ctypes.data for a in group)) for group in (given, outs)]
        self._call(function, self.weights.ctypes.data, states.ctypes.data, work.ctypes.data, *pointers, *n)
        assert all(is_whole(memory) for memory in (states, work, *outs)), "something was written behind its end"
        return [
            memory[:size].view(np.dtype(port.dtype)).reshape((*lead, *port.shape))
            for memory, size, port in zip(outs, sizes, self.generated.outputs, strict=True)
        ]

    @staticmethod
    def _call(function: int, *args: Any) -> None:
        kinds = [ctypes.c_int64 if isinstance(a, int) and i > 4 else ctypes.c_void_p for i, a in enumerate(args)]
        ctypes.CFUNCTYPE(None, *kinds)(function)(*args)

"""Marks that the region's own code leaves in the profiler's tape, so that each event there has a line of the user's.

A mark is an event of the profiler that lies around what it tells of. It costs some microseconds and changes nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import CodeType, FunctionType
from typing import Any, Final

import torch
from torch._C._profiler import _RecordFunctionFast

from flatout.profiling.patching import Patches
from flatout.profiling.sites import Sites

PREFIX: Final = "flatout."
AT: Final = "flatout.at#"
"""What lies below belongs to the line with this index."""
BACKWARD: Final = "flatout.backward#"
"""So does this, and a backward runs, called from there."""
KERNEL: Final = "flatout.kernel#"
"""One kernel that a compiler generated for the CPU: the index of its line, a colon, its name."""
COMPILING: Final = "flatout.compiling"
"""A compiler works: what runs below is not the region's."""
REGION: Final = "flatout.region"

_SYNCHRONISING: Final = (
    ("cuda", "synchronize"),
    ("cuda.Stream", "synchronize"),
    ("cuda.Event", "synchronize"),
    ("cuda.CUDAGraph", "replay"),
)
"""Calls that run no operator, but wait for a device or launch work there."""


def mark(name: str) -> AbstractContextManager[Any]:
    """A mark around the code of a with-statement; nothing at all while no profiler runs."""
    made: AbstractContextManager[Any] = _RecordFunctionFast(name)
    return made


def site_of(name: str) -> int | None:
    """The index of the line that a mark names; None for other events."""
    for prefix in (AT, BACKWARD, KERNEL):
        if name.startswith(prefix):
            return int(name[len(prefix) :].partition(":")[0])
    return None


def mark_calls(patches: Patches, sites: Sites) -> None:
    """Have backwards, and calls that wait for a device, leave marks; `patches` takes it back."""

    def marked(original: Callable[..., Any], prefix: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with mark(f"{prefix}{sites.of_frame(sys._getframe(1))}"):
                return original(*args, **kwargs)

        return call

    for name in ("backward", "grad"):
        patches.set(torch.autograd, name, marked(getattr(torch.autograd, name), BACKWARD))
    if torch.cuda.is_available():
        for path, name in _SYNCHRONISING:
            owner: Any = torch
            for part in path.split("."):
                owner = getattr(owner, part)
            patches.set(owner, name, marked(getattr(owner, name), AT))


def hide_from_dynamo() -> None:
    """Have dynamo run the functions of this folder as they are when compiled code calls them after a graph break."""
    skip: Callable[[CodeType], None] | None = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
    if skip is not None:
        for code in _own_codes():
            skip(code)


def _own_codes() -> Iterator[CodeType]:
    """The code of every function and method of this folder, inner ones included."""
    modules = [m for name, m in list(sys.modules.items()) if name.startswith("flatout.verification.promises.")]
    waiting: list[object] = [value for module in modules for value in vars(module).values()]
    waiting += [member for value in waiting if isinstance(value, type) for member in vars(value).values()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, FunctionType) and value.__module__.startswith("flatout.verification.promises."):
            waiting.append(value.__code__)
        elif isinstance(value, CodeType):
            yield value
            waiting.extend(value.co_consts)

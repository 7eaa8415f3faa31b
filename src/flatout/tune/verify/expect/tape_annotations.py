"""Events that the region's own code leaves in the profiler's tape, so that each other event there has a line of the user's.

An annotation is an event of the profiler around the code that it names. It costs some microseconds and changes nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any, Final

import torch
from torch._C._profiler import _RecordFunctionFast

from flatout.core.runtime.patches import Patches
from flatout.core.runtime.source_sites import Sites

AT: Final = "flatout.at#"
"""What lies below belongs to the line with this index."""
BACKWARD: Final = "flatout.backward#"
"""So does this, and a backward runs, called from there."""
KERNEL: Final = "flatout.kernel#"
"""One kernel that a compiler generated for the CPU: the index of its line, a colon, its name."""
COMPILING: Final = "flatout.compiling"
"""A compiler works: what runs below is not the region's."""
REGION: Final = "flatout.region"
_FOLDER: Final = "flatout.tune.verify.expect."

_SYNCHRONISING: Final = (
    ("cuda", "synchronize"),
    ("cuda.Stream", "synchronize"),
    ("cuda.Event", "synchronize"),
    ("cuda.CUDAGraph", "replay"),
)
"""Calls that run no operator, but wait for a device or launch work there."""


def annotate(name: str) -> AbstractContextManager[Any]:
    """An annotation around the code of a with-statement; nothing at all while no profiler runs."""
    annotation: AbstractContextManager[Any] = _RecordFunctionFast(name)
    return annotation


def site_of(name: str) -> int | None:
    """The index of the line that an annotation names; None for other events."""
    for prefix in (AT, BACKWARD, KERNEL):
        if name.startswith(prefix):
            return int(name[len(prefix) :].partition(":")[0])
    return None


def annotate_calls(patches: Patches, sites: Sites) -> None:
    """Have backwards, and calls that wait for a device, leave annotations; `patches` takes it back."""
    for name in ("backward", "grad"):
        patches.set(torch.autograd, name, _annotated(getattr(torch.autograd, name), sites, BACKWARD))
    if torch.cuda.is_available():
        for path, name in _SYNCHRONISING:
            owner: Any = torch
            for part in path.split("."):
                owner = getattr(owner, part)
            patches.set(owner, name, _annotated(getattr(owner, name), sites, AT))


def annotate_generated_kernels(patches: Patches, sites: Sites) -> None:
    """Have the kernels that Inductor has generated for the CPU so far leave annotations: plain C functions without an event."""
    cache = getattr(sys.modules.get("torch._inductor.codecache"), "PyCodeCache", None)
    for module in list(getattr(cache, "modules", ())):
        for name, value in list(vars(module).items()):
            if name.startswith("cpp_") and isinstance(value, BuiltinFunctionType):
                patches.set(module, name, _annotated(value, sites, KERNEL, f":{name}"))


def _annotated(original: Callable[..., Any], sites: Sites, prefix: str, suffix: str = "") -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with annotate(f"{prefix}{sites.of_frame(sys._getframe(1))}{suffix}"):
            return original(*args, **kwargs)

    return call


def hide_from_dynamo() -> None:
    """Have dynamo run the functions of this folder as they are when compiled code calls them after a graph break.

    `api` is not hidden: dynamo has to trace into it, so that it can refuse a region inside compiled code.
    """
    skip: Callable[[CodeType], None] | None = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
    if skip is not None:
        for code in _own_codes():
            skip(code)


def _own_codes() -> Iterator[CodeType]:
    """The code of every function and method of this folder, inner ones included."""
    modules = [m for name, m in list(sys.modules.items()) if _is_hidden(name)]
    waiting: list[object] = [value for module in modules for value in vars(module).values()]
    waiting += [member for value in waiting if isinstance(value, type) for member in vars(value).values()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, FunctionType) and _is_hidden(value.__module__):
            waiting.append(value.__code__)
        elif isinstance(value, CodeType):
            yield value
            waiting.extend(value.co_consts)


def _is_hidden(module: str) -> bool:
    return module.startswith(_FOLDER) and module != f"{_FOLDER}api"

"""The C library keeps the memory of large tensors, instead of giving it back and faulting it in again in every step.

What        `MALLOC_MMAP_THRESHOLD_` and `MALLOC_TRIM_THRESHOLD_` in the environment, before the process starts.
Guarantee   EXACT: where memory comes from is all that changes.
Refuses     Runs without page faults to speak of.
"""

from __future__ import annotations

from collections.abc import Mapping

from flatout.core.errors import EditError
from flatout.core.parts import lever
from flatout.core.records.lever import Hooks, Parameters, integer
from flatout.tune.levers.proposals import as_found
from flatout.tune.rewrite.imports import below_imports, with_import, with_start
from flatout.tune.rewrite.source import fresh_name, parsed, spaced, statements

_KEPT_BYTES = 1 << 30
"""glibc takes 32 MiB at most by itself, and more when told (mallopt(3), M_MMAP_THRESHOLD)."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""glibc's malloc.h."""


def environment(parameters: Parameters) -> Mapping[str, str]:
    """Variables with the allocator's two thresholds, in bytes."""
    threshold = str(integer(parameters, "kept_bytes"))
    return {"MALLOC_MMAP_THRESHOLD_": threshold, "MALLOC_TRIM_THRESHOLD_": threshold}


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Do nothing: the variables were set before the process started."""
    import os

    wanted = environment(parameters)
    if all(os.environ.get(name) == value for name, value in wanted.items()):
        hooks.note(LEVER.id)


def edit(text: str, parameters: Parameters) -> str:
    """Set the same thresholds with glibc's `mallopt`, in a function that is called where the script starts."""
    threshold = integer(parameters, "kept_bytes")
    if "mallopt" in text:
        raise EditError("the script calls mallopt already")
    module = parsed(text)
    function = fresh_name(module, "keep_memory")
    trim, mmap = (fresh_name(module, name) for name in ("M_TRIM_THRESHOLD", "M_MMAP_THRESHOLD"))
    size = f"1 << {threshold.bit_length() - 1}" if threshold.bit_count() == 1 else str(threshold)
    constants, definition = statements(
        f"{trim}, {mmap} = {_M_TRIM_THRESHOLD}, {_M_MMAP_THRESHOLD}\n"
        f"def {function}():\n"
        '    """Have glibc keep freed memory for the next step."""\n'
        f"    libc = ctypes.CDLL(None)\n    libc.mallopt({mmap}, {size})\n    libc.mallopt({trim}, {size})\n"
    )
    module = with_start(module, f"{function}()\n")
    module = below_imports(module, [constants, spaced(definition, 2)], num_after=2)
    return with_import(module, "ctypes").code


LEVER = lever(
    __name__,
    as_found("steps hardly take memory anew from the system", parameters={"kept_bytes": _KEPT_BYTES}),
    apply=apply,
    edit=edit,
    environment=environment,
    title="Memory kept by malloc",
)

"""The C library keeps the memory of large tensors, instead of giving it back and faulting it in again in every step.

What        `MALLOC_MMAP_THRESHOLD_` and `MALLOC_TRIM_THRESHOLD_` in the environment, before the process starts.
Guarantee   EXACT: where memory comes from is all that changes.
Refuses     Runs without page faults to speak of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from flatout.errors import EditError
from flatout.levers.offers import as_found
from flatout.levers.syntax.imports import below_imports, with_import
from flatout.levers.syntax.source import fresh_name, parsed, spaced, statements
from flatout.levers.syntax.starting import with_start
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal, Seams, integer

_KEPT_BYTES = 1 << 30
"""glibc takes 32 MiB at most by itself, and more when told (mallopt(3), M_MMAP_THRESHOLD)."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""glibc's malloc.h."""


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """Where a step takes its memory anew."""
    yield from as_found(
        LEVER.id,
        findings,
        else_because="steps hardly take memory anew from the system",
        parameters={"kept_bytes": _KEPT_BYTES},
    )


def environment(parameters: Parameters) -> Mapping[str, str]:
    """The two thresholds, in bytes."""
    kept = str(integer(parameters, "kept_bytes"))
    return {"MALLOC_MMAP_THRESHOLD_": kept, "MALLOC_TRIM_THRESHOLD_": kept}


def apply(seams: Seams, parameters: Parameters) -> None:
    """Nothing is left to do once the process runs."""
    import os

    wanted = environment(parameters)
    if all(os.environ.get(name) == value for name, value in wanted.items()):
        seams.note(LEVER.id)


def edit(text: str, parameters: Parameters) -> str:
    """The same thresholds set by glibc's `mallopt`, in a function that is called where the script starts."""
    kept = integer(parameters, "kept_bytes")
    if "mallopt" in text:
        raise EditError("the script calls mallopt already")
    module = parsed(text)
    function = fresh_name(module, "keep_memory")
    trim, mmap = (fresh_name(module, name) for name in ("M_TRIM_THRESHOLD", "M_MMAP_THRESHOLD"))
    size = f"1 << {kept.bit_length() - 1}" if kept.bit_count() == 1 else str(kept)
    constants, definition = statements(
        f"{trim}, {mmap} = {_M_TRIM_THRESHOLD}, {_M_MMAP_THRESHOLD}\n"
        f"def {function}():\n"
        '    """Have glibc keep freed memory for the next step."""\n'
        f"    libc = ctypes.CDLL(None)\n    libc.mallopt({mmap}, {size})\n    libc.mallopt({trim}, {size})\n"
    )
    module = with_start(module, f"{function}()\n")
    module = below_imports(module, [constants, spaced(definition, 2)], num_after=2)
    return with_import(module, "ctypes").code


LEVER = Lever(
    id="memory.allocator-settings",
    title="Memory kept by malloc",
    guarantee="exact",
    module=__name__,
    propose=propose,
    apply=apply,
    edit=edit,
    environment=environment,
)

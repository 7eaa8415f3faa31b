"""The C library keeps the memory of large tensors, instead of giving it back and faulting it in again in every step.

What        `MALLOC_MMAP_THRESHOLD_` and `MALLOC_TRIM_THRESHOLD_` in the environment, before the process starts.
Guarantee   EXACT: where memory comes from is all that changes.
Refuses     Runs without page faults to speak of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from flatout.levers.offers import as_found
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal, Seams, integer

_KEPT_BYTES = 1 << 30
"""glibc takes 32 MiB at most by itself, and more when told (mallopt(3), M_MMAP_THRESHOLD)."""


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


LEVER = Lever(
    id="memory.allocator-settings",
    title="Memory kept by malloc",
    guarantee="exact",
    module=__name__,
    propose=propose,
    apply=apply,
    environment=environment,
)

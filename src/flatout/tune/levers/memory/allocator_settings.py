"""The C library keeps the memory of large tensors, instead of giving it back and faulting it in again in every step.

What        `MALLOC_MMAP_THRESHOLD_` and `MALLOC_TRIM_THRESHOLD_` in the environment, before the process starts.
Guarantee   EXACT: where memory comes from is all that changes.
Refuses     Runs without page faults to speak of.
"""

from __future__ import annotations

from collections.abc import Mapping

from flatout.core.parts import lever
from flatout.core.records.lever import Hooks, Parameters, integer
from flatout.tune.levers.proposals import as_found

_KEPT_BYTES = 1 << 30
"""glibc takes 32 MiB at most by itself, and more when told (mallopt(3), M_MMAP_THRESHOLD)."""


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


LEVER = lever(
    __name__,
    as_found("steps hardly take memory anew from the system", parameters={"kept_bytes": _KEPT_BYTES}),
    apply=apply,
    environment=environment,
    title="Memory kept by malloc",
)

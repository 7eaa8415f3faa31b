"""The device's allocator grows its segments instead of asking the driver for new ones, so that less lies in pieces.

What        `expandable_segments:True` for the allocator, in the environment before the process starts.
Guarantee   EXACT: where memory comes from is all that changes.
Refuses     Runs on the CPU; runs whose allocator does not go back to the driver once it is warm.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from flatout.levers.offers import as_found
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal, Seams

_NAME: Final = "PYTORCH_CUDA_ALLOC_CONF"
_VALUE: Final = "expandable_segments:True"


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """Where the allocator goes back to the driver in every step, or has had to begin anew."""
    retries = sum(memory.num_retries for memory in evidence.memory)
    if findings or not retries:
        yield from as_found(LEVER.id, findings, else_because="the allocator of a device does not go back to the driver")
        return
    yield Candidate(
        lever=LEVER.id,
        saved_s=(0.0, 0.1 * evidence.steps.step_s),
        because=f"the allocator freed its whole cache and tried again {retries} times",
    )


def environment(parameters: Parameters) -> Mapping[str, str]:
    """The allocator's settings."""
    return {_NAME: _VALUE}


def apply(seams: Seams, parameters: Parameters) -> None:
    """Nothing is left to do once the process runs."""
    if _VALUE in os.environ.get(_NAME, ""):
        seams.note(LEVER.id)


LEVER = Lever(
    id="memory.expandable-segments",
    title="Expandable segments",
    guarantee="exact",
    module=__name__,
    propose=propose,
    apply=apply,
    environment=environment,
)

"""The device's allocator grows its segments instead of asking the driver for new ones, so that less lies in pieces.

What        `expandable_segments:True` for the allocator, in the environment before the process starts.
Guarantee   EXACT: where memory comes from is all that changes.
Refuses     Runs on the CPU; runs whose allocator does not go back to the driver once it is warm.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters
from flatout.tune.levers.proposals import as_found

_NAME: Final = "PYTORCH_CUDA_ALLOC_CONF"
_VALUE: Final = "expandable_segments:True"


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it where the allocator asks the driver for memory in every step, or had to retry."""
    retries = sum(memory.num_retries for memory in evidence.memory)
    if findings or not retries:
        yield from as_found("the allocator of a device does not go back to the driver")(evidence, findings)
        return
    yield Candidate(
        saved_s=(0.0, 0.1 * evidence.steps.step_s),
        because=f"the allocator freed its whole cache and tried again {retries} times",
    )


def environment(parameters: Parameters) -> Mapping[str, str]:
    """The variable with the allocator's settings."""
    return {_NAME: _VALUE}


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Do nothing: the variable was set before the process started."""
    if _VALUE in os.environ.get(_NAME, ""):
        hooks.note(LEVER.id)


LEVER = lever(__name__, propose, apply=apply, environment=environment, title="Expandable segments")

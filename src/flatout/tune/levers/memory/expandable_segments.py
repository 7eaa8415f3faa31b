"""The device's allocator grows its segments instead of asking the driver for new ones, so that less lies in pieces.

What        `expandable_segments:True` for the allocator, in the environment before the process starts, beside the settings that
            are there.
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

_NAMES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The allocator's settings: the name since torch 2.9, and the one before, which is still read."""
_SETTING: Final = "expandable_segments"
_VALUE: Final = f"{_SETTING}:True"


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
    """The variable with the allocator's settings: those of this process, and this one."""
    name = next((name for name in _NAMES if os.environ.get(name)), _NAMES[0])
    others = [one for one in os.environ.get(name, "").split(",") if one and one.partition(":")[0].strip() != _SETTING]
    return {name: ",".join((*others, _VALUE))}


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Do nothing: the variable was set before the process started."""
    if any(_VALUE in os.environ.get(name, "") for name in _NAMES):
        hooks.note(LEVER.id)


LEVER = lever(__name__, propose, apply=apply, environment=environment, title="Expandable segments")

"""Numbers too small for the normal format count as zero.

What        `torch.set_flush_denormal(True)` before the script begins.
Guarantee   BOUNDED: numbers below 1.2e-38 in float32 become 0.
Refuses     Runs without such numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from flatout.levers.offers import as_found
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal, Seams


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """Where such numbers were seen."""
    yield from as_found(LEVER.id, findings, else_because="no numbers below the normal range were seen")


def apply(seams: Seams, parameters: Parameters) -> None:
    """Switch it on for the thread that runs the script, and those it starts."""
    import torch

    def start() -> Callable[[], None]:
        if torch.set_flush_denormal(True):
            seams.note(LEVER.id)

        def undo() -> None:
            torch.set_flush_denormal(False)

        return undo

    seams.at_start(start)


LEVER = Lever(
    id="workload.flush-denormal",
    title="Denormal numbers flushed to zero",
    guarantee="bounded",
    module=__name__,
    propose=propose,
    apply=apply,
)

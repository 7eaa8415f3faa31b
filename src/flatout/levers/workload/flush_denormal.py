"""Numbers too small for the normal format count as zero.

What        `torch.set_flush_denormal(True)` before the script begins.
Guarantee   BOUNDED: numbers below 1.2e-38 in float32 become 0.
Refuses     Runs without such numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from flatout.errors import EditError
from flatout.levers.offers import as_found
from flatout.levers.syntax.calls import calls_of
from flatout.levers.syntax.imports import with_torch
from flatout.levers.syntax.source import parsed
from flatout.levers.syntax.starting import with_start
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


def edit(text: str, parameters: Parameters) -> str:
    """`torch.set_flush_denormal(True)` where the script starts."""
    module = parsed(text)
    if calls_of(module, ("torch.set_flush_denormal",)):
        raise EditError("the script calls torch.set_flush_denormal already")
    module, torch = with_torch(module)
    return with_start(module, f"{torch}.set_flush_denormal(True)\n").code


LEVER = Lever(
    id="workload.flush-denormal",
    title="Denormal numbers flushed to zero",
    guarantee="bounded",
    module=__name__,
    propose=propose,
    apply=apply,
    edit=edit,
)

"""Debug modes off: autograd's anomaly detection, and checks of gradients that nobody reads.

What        `torch.autograd.set_detect_anomaly` and `detect_anomaly` do nothing.
Guarantee   EXACT: the mode looks at results and does not change them. (It would have stopped at the first NaN.)
Refuses     Scripts that do not switch the mode on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from flatout.levers.offers import as_found
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal, Seams


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """Off where it is on."""
    yield from as_found(LEVER.id, findings, else_because="no debug mode is on")


def apply(seams: Seams, parameters: Parameters) -> None:
    """Turn what switches the mode on into nothing."""
    from contextlib import nullcontext

    import torch

    class Off(nullcontext[None]):
        """Stands for `set_detect_anomaly` and `detect_anomaly`: to be called, or entered."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()
            seams.note(LEVER.id)

    for owner in (torch.autograd, torch.autograd.anomaly_mode):
        seams.replace(owner, "set_detect_anomaly", Off)
        seams.replace(owner, "detect_anomaly", Off)


LEVER = Lever(
    id="graph.debug-off",
    title="Debug modes off",
    guarantee="exact",
    module=__name__,
    propose=propose,
    apply=apply,
)

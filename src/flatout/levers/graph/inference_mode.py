"""No graph for calls that no backward follows.

What        `torch.no_grad()` around calls of modules in evaluation mode.
Guarantee   EXACT: the same operators on the same numbers.
Refuses     Runs whose calls in evaluation mode are differentiated, or that build no graph in vain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal, Seams

if TYPE_CHECKING:
    from torch import nn


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """Where evaluation builds graphs."""
    evaluating = [m for m in evidence.models if not m.is_training]
    if not findings or not any(m.num_graphs_built and not m.num_graphs_used for m in evaluating):
        yield Refusal(lever=LEVER.id, because="no call in evaluation mode builds a graph in vain")
        return
    used = next((m for m in evaluating if m.num_graphs_used), None)
    if used is not None:
        yield Refusal(lever=LEVER.id, because=f"{used.name} is differentiated in evaluation mode too")
        return
    yield Candidate(lever=LEVER.id, saved_s=findings[0].saved_s, where=findings[0].where, because=findings[0].because)


def apply(seams: Seams, parameters: Parameters) -> None:
    """Around the calls of root modules that are in evaluation mode."""
    import torch

    def context(module: nn.Module) -> AbstractContextManager[object] | None:
        if module.training or not torch.is_grad_enabled():
            return None
        seams.note(LEVER.id)
        return torch.no_grad()

    seams.around_calls(context)


LEVER = Lever(
    id="graph.inference-mode",
    title="No graph in evaluation",
    guarantee="exact",
    module=__name__,
    propose=propose,
    apply=apply,
)

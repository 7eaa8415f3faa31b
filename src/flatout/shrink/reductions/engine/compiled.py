"""The model runs as Inductor compiles it.

What        `torch.compile` of the whole model for the inputs of the example; called once, so that compiling is not timed.
Guarantee   BOUNDED: sums in other orders, fused multiply-adds.
Refuses     Models that something else runs already.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flatout.core.parts import reduction
from flatout.core.records.lever import Parameters
from flatout.core.records.reduction import Option, ReductionRefusal

if TYPE_CHECKING:
    from flatout.shrink.candidate import CandidateModel


def options(candidate: CandidateModel) -> Iterator[Option | ReductionRefusal]:
    """One option for a model that nothing else runs."""
    if candidate.call is candidate.model:
        yield Option(
            reduction=REDUCTION.id, name="compiled", because="pointwise work is fused, Python waits for nothing"
        )
    else:
        yield ReductionRefusal(reduction=REDUCTION.id, because="something else runs the model already")


def apply(candidate: CandidateModel, parameters: Parameters) -> CandidateModel:
    """The whole model compiled for the task's inputs, and called once. Raises torch's errors where that fails."""
    import torch

    call = torch.compile(candidate.model)
    with torch.inference_mode():
        call(*candidate.inputs)
    return candidate.with_call(call, "compiled by Inductor")


REDUCTION = reduction(__name__, options, apply, title="Compiled model")

"""Layers take fewer bits where that is measured to be faster and the metric allows it.

What        `flatout.shrink.quantise.quantise_where_faster`: every layer in every scheme that this machine has a kernel for (8
            bits with scales of activations taken as they come, weights alone, bfloat16, fp8 on GPUs that have it), timed at the
            shapes of the example beside float32; taken by gain over loss while the metric allows, and proved on the whole model.
Guarantee   QUALITY: the metric tells.
Price       All layers in 8 bits, 3 seeds, 95 % intervals (`bench/quantising_quality.py`): no accuracy on digits that could be
            told, with an MLP of 512 (-0.3 to 0.3 points) and a CNN of 32 (-0.2 to 0.3); 0.0003 bits a character of 2.142 (0.0000
            to 0.0005) with a transformer of 64. 4 bits in its linear layers: 0.019 (0.017 to 0.021). What was taken of models of
            random weights (`bench/shrinking.py`): 0.2 to 0.8 % of the outputs' scale, for 1.2 (LSTM cells of 128) to 3.8 times
            the speed (GRU), 3.0 with an MLP 1024-4096-1024, 2.0 with a transformer. One thread of a Xeon with 8-bit products. Not
            worth it, and not taken, in six of twelve: small layers, convolutions, torch's own encoder.
Refuses     Layers that are not faster; models where no layer is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flatout.core.errors import UsageError
from flatout.core.parts import reduction
from flatout.core.records.lever import Parameters
from flatout.core.records.reduction import Option, ReductionRefusal

if TYPE_CHECKING:
    from torch import nn

    from flatout.shrink.candidate import CandidateModel


def options(candidate: CandidateModel) -> Iterator[Option | ReductionRefusal]:
    """One option, for a model that nothing else runs."""
    if candidate.call is candidate.model:
        yield Option(
            reduction=REDUCTION.id, name="fewer bits", because="weights of a quarter of the bytes are read in less time"
        )
    else:
        yield ReductionRefusal(reduction=REDUCTION.id, because="something else runs the model already")


def apply(candidate: CandidateModel, parameters: Parameters) -> CandidateModel:
    """Raises UsageError where no layer is faster in fewer bits."""
    from flatout.shrink.quantise import quantise_where_faster

    sign = -1.0 if candidate.task.is_cost else 1.0

    def metric(model: nn.Module) -> float:
        return sign * candidate.metric(model).value

    allowed = candidate.task.allowed_loss
    quantised = quantise_where_faster(candidate.model, candidate.inputs, metric=metric, budget=allowed)
    report = quantised.report
    taken = [layer.scheme for layer in report.layers if layer.scheme is not None]
    if not taken:
        raise UsageError("no layer was faster in fewer bits within what the metric allows")
    note = f"{len(taken)} of {len(report.layers)} layers: " + ", ".join(sorted(set(taken)))
    return candidate.with_model(quantised.module, note, num_bytes=report.weight_bytes_after)


REDUCTION = reduction(__name__, options, apply, title="Fewer bits where they are faster")

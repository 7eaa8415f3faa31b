"""Convolutions of single pixels as matrix products, forward and backward.

What        `nn.Conv2d` layers of 1 x 1 with stride 1 compute by `F.linear`, or by `torch.matmul` where channels are outermost
            (`flatout.pointwise_convolutions_as_products`), from a model's first call on; state dict and parameters stay.
Guarantee   BOUNDED: the same sums in another order.
Refuses     Processors, whose convolutions of single pixels were as fast or faster than products; models without such, or where
            they take little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from flatout.core.errors import EditError, LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence, Operator
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters
from flatout.machine.cost.accounting import milliseconds, operator_seconds
from flatout.tune.rewrite.imports import with_import
from flatout.tune.rewrite.models import behind_models
from flatout.tune.rewrite.source import parsed

if TYPE_CHECKING:
    from torch import nn

_BLOCK: Final = "pointwise_convolutions_as_products"
_SMALL_PART: Final = 0.02
_MOST: Final = 0.8
"""The share of these convolutions' time that is promised at most. In a U-Net's step gradients of 1 x 1 convolutions took
up to 14 times as long as their bytes (bench/results/2026-11-30-h200, account_unet_plan)."""
_WEIGHT_AT: Final = {"aten.convolution": 1, "aten.convolution_backward": 2, "aten.cudnn_convolution": 1}


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it where convolutions of single pixels are part of a step on a GPU."""
    if evidence.workload.device == "cpu":
        raise LeverRefused("on processors convolutions of single pixels are as fast as products")
    rows = [i for i, o in enumerate(evidence.operators) if _is_pointwise(o)]
    seconds = operator_seconds(evidence, rows)
    if seconds < _SMALL_PART * evidence.steps.whole_s:
        raise LeverRefused(f"convolutions of 1 x 1 take {milliseconds(seconds)} of a step")
    yield Candidate(
        saved_s=(0.0, _MOST * seconds),
        because=f"convolutions of 1 x 1 take {milliseconds(seconds)} of a step, and are products of matrices",
    )


def _is_pointwise(operator: Operator) -> bool:
    at = _WEIGHT_AT.get(operator.op)
    if at is None or len(operator.inputs) <= at:
        return False
    image, weight = operator.inputs[at - 1].shape, operator.inputs[at].shape
    result = operator.inputs[0].shape if at == 2 else operator.outputs[0].shape if operator.outputs else image
    return weight[2:] == (1, 1) and image[1:2] == weight[1:2] and image[2:] == result[2:]


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Change the layers of each model at its first call."""
    from flatout.blocks.training.pointwise_convolutions import PointwiseConvolution, pointwise_convolutions_as_products

    def change(module: nn.Module) -> Callable[[], None]:
        undo = pointwise_convolutions_as_products(module)
        if any(isinstance(part, PointwiseConvolution) for part in module.modules()):
            hooks.note(LEVER.id)
        return undo

    hooks.at_first_call(change)


def edit(text: str, parameters: Parameters) -> str:
    """Write the call after the statement that constructs a model."""
    if _BLOCK in text:
        raise EditError("the file calls it already")
    return with_import(parsed(behind_models(text, f"{_BLOCK}(model)\n")), "flatout", _BLOCK).code


LEVER = lever(__name__, propose, apply=apply, edit=edit, title="Convolutions of single pixels as products")

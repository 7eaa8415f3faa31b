"""What levers on the convolutions of a model share: their shapes in the evidence, and the change at a model's first call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from flatout.core.errors import EditError, LeverRefused
from flatout.core.records.evidence import Evidence, Operator
from flatout.core.records.lever import Candidate, Hooks
from flatout.machine.cost.accounting import milliseconds, operator_seconds
from flatout.tune.rewrite.imports import with_import
from flatout.tune.rewrite.models import behind_models
from flatout.tune.rewrite.source import parsed

if TYPE_CHECKING:
    from torch import nn

_WEIGHT_AT: Final = {"aten.convolution": 1, "aten.convolution_backward": 2, "aten.cudnn_convolution": 1}


class ConvolutionShapes(NamedTuple):
    """What a convolution of one group, or its gradients, read and return: (B, C, ...), (D, C, ...) and (B, D, ...)."""

    image: tuple[int, ...]
    weight: tuple[int, ...]
    result: tuple[int, ...]


def convolution_shapes(operator: Operator) -> ConvolutionShapes | None:
    """None for other operators, and for convolutions of several groups."""
    at = _WEIGHT_AT.get(operator.op)
    if at is None or len(operator.inputs) <= at:
        return None
    image, weight = operator.inputs[at - 1].shape, operator.inputs[at].shape
    result = operator.inputs[0].shape if at == 2 else operator.outputs[0].shape if operator.outputs else image
    return ConvolutionShapes(image, weight, result) if image[1:2] == weight[1:2] else None


def propose_on_gpus(
    evidence: Evidence,
    wanted: Callable[[ConvolutionShapes], bool],
    *,
    what: str,
    least: float,
    most: float,
    on_cpu: str,
) -> Iterator[Candidate]:
    """Propose a change of the convolutions with such shapes, `what` in words, where they take that part of a step on a GPU.

    `most` is the share of their time that is promised at most; `on_cpu` why processors are refused. Raises LeverRefused.
    """
    if evidence.workload.device == "cpu":
        raise LeverRefused(on_cpu)
    shapes = map(convolution_shapes, evidence.operators)
    seconds = operator_seconds(evidence, [i for i, one in enumerate(shapes) if one is not None and wanted(one)])
    because = f"{what} take {milliseconds(seconds)} of a step"
    if seconds < least * evidence.steps.whole_s:
        raise LeverRefused(because)
    yield Candidate(saved_s=(0.0, most * seconds), because=because)


def change_layers(
    hooks: Hooks, lever: str, change: Callable[[nn.Module], Callable[[], None]], layer: type[nn.Module]
) -> None:
    """Call `change` with each model at its first call, and note the lever where layers of that class are in it then."""

    def change_model(module: nn.Module) -> Callable[[], None]:
        undo = change(module)
        if any(isinstance(part, layer) for part in module.modules()):
            hooks.note(lever)
        return undo

    hooks.at_first_call(change_model)


def call_behind_models(text: str, block: str) -> str:
    """Write `block(model)` after the statement that constructs a model. Raises EditError if the file calls it already."""
    if block in text:
        raise EditError("the file calls it already")
    return with_import(parsed(behind_models(text, f"{block}(model)\n")), "flatout", block).code

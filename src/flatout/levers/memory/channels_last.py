"""Images and convolution weights with the channels innermost, as the fast kernels want them.

What        `model.to(memory_format=torch.channels_last)` at its first call; four-dimensional inputs are converted at each.
Guarantee   BOUNDED: the same convolutions, summed in another order.
Refuses     Models without two-dimensional convolutions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import libcst as cst
from libcst import matchers as m

from flatout.cost.matrix_units import image_convolutions
from flatout.errors import EditError
from flatout.levers.syntax.calls import argument, calls_ending, with_argument
from flatout.levers.syntax.imports import with_torch
from flatout.levers.syntax.models import definitions_with, made_in, plain_classes
from flatout.levers.syntax.source import code_of, expression, parsed, with_expression
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal, Seams

if TYPE_CHECKING:
    from torch import nn

_MAY_COST: Final = 0.2
"""Small convolutions were that much slower on a CPU (bench/results, tune_examples)."""
_CONVOLUTIONS: Final = {"Conv2d", "ConvTranspose2d"}


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """For models that convolve images."""
    convolutions = image_convolutions(evidence)
    if not convolutions:
        yield Refusal(lever=LEVER.id, because="no two-dimensional convolution was seen")
        return
    told = [f.saved_s for f in findings]
    busy_s = sum(o.total_s for o in evidence.operators if "convolution" in o.op)
    yield Candidate(
        lever=LEVER.id,
        saved_s=max(told, default=(-_MAY_COST * busy_s, 0.4 * busy_s)),
        where=findings[0].where if findings else evidence.source_of(convolutions[0].source),
        because=findings[0].because if findings else f"convolutions take {busy_s * 1e3:.2f} ms of a step",
    )


def apply(seams: Seams, parameters: Parameters) -> None:
    """Convert models that hold a two-dimensional convolution, and their images."""
    import torch
    from torch import Tensor, nn

    converted: set[int] = set()

    def convert(module: nn.Module) -> Callable[[], None] | None:
        if not any(isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)) for m in module.modules()):
            return None
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        converted.add(id(module))
        seams.note(LEVER.id)

        def undo() -> None:
            module.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]

        return undo

    def inputs(module: nn.Module, given: Any) -> Any:
        args, kwargs = given
        if id(module) not in converted:
            return given
        return tuple(map(image, args)), {k: image(v) for k, v in kwargs.items()}

    def image(value: Any) -> Any:
        is_image = isinstance(value, Tensor) and value.dim() == 4 and value.is_floating_point()
        return value.contiguous(memory_format=torch.channels_last) if is_image else value

    seams.at_first_call(convert)
    seams.on_inputs(inputs)


def edit(text: str, parameters: Parameters) -> str:
    """`.to(memory_format=torch.channels_last)` where the model is made; what it is given then follows its weights' layout."""
    module, torch = with_torch(parsed(text))
    if "channels_last" in text:
        raise EditError("the script speaks of channels_last itself")
    convolving = _CONVOLUTIONS | definitions_with(module, _CONVOLUTIONS)
    plain = plain_classes(module)
    made = [one for one in made_in(module) if not one.is_part and convolving & _words(one.value)]
    models: list[cst.BaseExpression] = []
    for one in made:
        if one.kind not in plain and _is_model(module, one.name):
            models.append(one.value)
        elif one.kind in plain:  # an object that is given a model
            given = (a.value for a in one.value.args if isinstance(a.value, cst.Call))
            models += [v for v in given if code_of(v.func) in convolving - plain]
    if not models:
        raise EditError("where a model that convolves images is made is not seen")
    layout = expression(f"{torch}.channels_last")
    for model in models:
        module = with_expression(module, model, _converted(model, layout))
    return module.code


def _words(node: cst.CSTNode) -> set[str]:
    return set(re.findall(r"\w+", code_of(node)))


def _is_model(module: cst.Module, name: str) -> bool:
    """Whether it is called, or its parameters are asked for: what is only a part of a model is converted with it."""
    receivers = [code_of(c.func.value) for c in calls_ending(module, "parameters") if isinstance(c.func, cst.Attribute)]
    called = [code_of(c.func) for c in m.findall(module, m.Call()) if isinstance(c, cst.Call)]
    return name in called or any(f"{receiver}.".startswith(f"{name}.") for receiver in receivers)


def _converted(value: cst.BaseExpression, layout: cst.BaseExpression) -> cst.BaseExpression:
    """The call that makes the model, with one more thing in its last `.to(...)`, or that one more."""
    is_to = isinstance(value, cst.Call) and isinstance(value.func, cst.Attribute) and value.func.attr.value == "to"
    if is_to and argument(value, "memory_format") is None:  # type: ignore[arg-type]
        return with_argument(value, "memory_format", layout)  # type: ignore[arg-type]
    return expression("{value}.to(memory_format={layout})", value=value, layout=layout)


LEVER = Lever(
    id="memory.channels-last",
    title="Channels last",
    guarantee="bounded",
    module=__name__,
    propose=propose,
    apply=apply,
    edit=edit,
)

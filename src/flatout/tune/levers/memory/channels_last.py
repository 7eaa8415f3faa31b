"""Images and convolution weights with the channels innermost, as the fast kernels want them.

What        `model.to(memory_format=torch.channels_last)` at its first call; four-dimensional inputs are converted at each. With
            `ordered_draws`, `torch.randn_like` and `torch.rand_like` draw for such images what they drew before.
Guarantee   BOUNDED: the same convolutions, summed in another order. DISTRIBUTION where random masks (dropout) are drawn for
            images: they are drawn in the order of memory.
Refuses     Models without two-dimensional convolutions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import libcst as cst

from flatout.core.errors import EditError, LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters
from flatout.machine.cost.matrix_units import image_convolutions
from flatout.tune.rewrite.calls import argument, calls_ending, with_argument
from flatout.tune.rewrite.imports import with_torch
from flatout.tune.rewrite.models import before_optimizers, constructions_in, definitions_with, plain_classes
from flatout.tune.rewrite.source import (
    code_of,
    expression,
    nodes_of,
    parsed,
    with_expression,
)

if TYPE_CHECKING:
    from torch import nn

_MAY_COST: Final = 0.2
"""Small convolutions were that much slower on a CPU (bench/results, tune_examples)."""
_LIKE: Final = ("randn_like", "rand_like")
"""Functions that can be told the order in which they draw."""
_DRAWS: Final = frozenset(
    {*(f"aten.{name}" for name in _LIKE), "aten.native_dropout", "aten.bernoulli", "aten.bernoulli_", "aten.normal_"}
)
_CONVOLUTIONS: Final = {"Conv2d", "ConvTranspose2d"}


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it for models that convolve images."""
    convolutions = image_convolutions(evidence)
    if not convolutions:
        raise LeverRefused("no two-dimensional convolution was observed")
    savings = [f.saved_s for f in findings]
    draws = _draws_of_images(evidence)
    masks = next((name for name in draws if name not in _LIKE), "")
    busy_s = sum(o.total_s for o in evidence.operators if "convolution" in o.op)
    least_s = -_MAY_COST * busy_s if evidence.workload.device == "cpu" else 0.0
    yield Candidate(
        parameters={"ordered_draws": True} if draws and not masks else {},
        saved_s=max(savings, default=(least_s, 0.4 * busy_s)),
        where=findings[0].where if findings else evidence.source_of(convolutions[0].source),
        guarantee="distribution" if masks else None,
        because=(findings[0].because if findings else f"convolutions take {busy_s * 1e3:.2f} ms of a step")
        + (f"; {masks} draws other random numbers in another order of memory" if masks else ""),
    )


def _draws_of_images(evidence: Evidence) -> list[str]:
    """Operators that draw random numbers for each element of what is convolved: they draw them in the order of memory."""
    convolutions = [o for o in evidence.operators if "convolution" in o.op]
    images = {spec.shape for o in convolutions for spec in (*o.inputs[:1], *o.outputs[:1]) if len(spec.shape) == 4}
    drawing = (o.op for o in evidence.operators if o.op in _DRAWS and any(spec.shape in images for spec in o.outputs))
    return [op.removeprefix("aten.") for op in dict.fromkeys(drawing)]


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Convert models with a two-dimensional convolution, and their images."""
    import torch
    from torch import Tensor, nn

    converted: set[int] = set()

    def convert(module: nn.Module) -> Callable[[], None] | None:
        if not any(isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)) for m in module.modules()):
            return None
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        converted.add(id(module))
        hooks.note(LEVER.id)

        def undo() -> None:
            module.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]

        return undo

    def inputs(module: nn.Module, call_args: Any) -> Any:
        args, kwargs = call_args
        if id(module) not in converted:
            return call_args
        return tuple(map(image, args)), {k: image(v) for k, v in kwargs.items()}

    def image(value: Any) -> Any:
        is_image = isinstance(value, Tensor) and value.dim() == 4 and value.is_floating_point()
        return value.contiguous(memory_format=torch.channels_last) if is_image else value

    def ordered(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def drawing_in_order(like: Tensor, **options: Any) -> Tensor:
            is_plain = options.get("memory_format", torch.preserve_format) == torch.preserve_format
            is_channels_last = like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last)
            if not is_channels_last or like.is_contiguous() or not is_plain:
                return draw(like, **options)
            drawn = draw(like, **(options | {"memory_format": torch.contiguous_format}))
            return drawn.contiguous(memory_format=torch.channels_last)

        return drawing_in_order

    hooks.at_first_call(convert)
    hooks.on_inputs(inputs)
    if parameters.get("ordered_draws"):
        for name in _LIKE:
            hooks.replace(torch, name, ordered(getattr(torch, name)))


def edit(text: str, parameters: Parameters) -> str:
    """Write `.to(memory_format=torch.channels_last)` where the model is constructed, or before its optimizer where what makes it
    stands elsewhere; its activations follow the layout of the weights.
    """
    module, torch = with_torch(parsed(text))
    if "channels_last" in text:
        raise EditError("the script speaks of channels_last itself")
    convolving = _CONVOLUTIONS | definitions_with(module, _CONVOLUTIONS)
    plain = plain_classes(module)
    constructions = [one for one in constructions_in(module) if not one.is_part and convolving & _words(one.value)]
    models: list[cst.BaseExpression] = []
    for one in constructions:
        if one.kind not in plain and _is_model(module, one.name):
            models.append(one.value)
        elif one.kind in plain:  # an object that is given a model
            call_args = (a.value for a in one.value.args if isinstance(a.value, cst.Call))
            models += [v for v in call_args if code_of(v.func) in convolving - plain]
    if not models:
        try:
            return before_optimizers(module, f"model.to(memory_format={torch}.channels_last)\n").code
        except EditError as e:
            raise EditError(f"where a model that convolves images is constructed was not found, and {e}") from e
    layout = expression(f"{torch}.channels_last")
    for model in models:
        module = with_expression(module, model, _converted(model, layout))
    return module.code


def _words(node: cst.CSTNode) -> set[str]:
    return set(re.findall(r"\w+", code_of(node)))


def _is_model(module: cst.Module, name: str) -> bool:
    """Whether it is called, or its parameters are asked for: what is only a part of a model is converted with it."""
    receivers = [code_of(c.func.value) for c in calls_ending(module, "parameters") if isinstance(c.func, cst.Attribute)]
    called = [code_of(c.func) for c in nodes_of(cst.Call, module)]
    return name in called or any(f"{receiver}.".startswith(f"{name}.") for receiver in receivers)


def _converted(value: cst.BaseExpression, layout: cst.BaseExpression) -> cst.BaseExpression:
    """The call that makes the model, with one more thing in its last `.to(...)`, or that one more."""
    is_to = isinstance(value, cst.Call) and isinstance(value.func, cst.Attribute) and value.func.attr.value == "to"
    if is_to and argument(value, "memory_format") is None:  # type: ignore[arg-type]
        return with_argument(value, "memory_format", layout)  # type: ignore[arg-type]
    return expression("{value}.to(memory_format={layout})", value=value, layout=layout)


LEVER = lever(__name__, propose, apply=apply, edit=edit, title="Channels last", errors=("view size is not compatible",))

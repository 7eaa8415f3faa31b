"""Linear layers with sizes that matrix units dislike are computed by kernels that do not mind, or with padded weights.

What        The product of such an nn.Linear (50257 rows of a vocabulary) runs the way that is measured to be fastest on the
            device when it is first met (`flatout.blocks.kernels.Linear`; measurements are kept for later runs). In compiled
            code its
            weight gets rows and columns of zeros up to a multiple of 64 in every call, and the result is cut back. Modules and
            state dict stay.
Guarantee   BOUNDED: the same sums, from other kernels.
Refuses     Processors and float32, which load sizes of any kind; sizes whose padded product was not faster when it was tried.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import MethodType
from typing import TYPE_CHECKING, Final

from flatout.core.errors import EditError, LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters, integer
from flatout.machine.cost.accounting import milliseconds
from flatout.machine.cost.matrix_units import rate_over_float32, seconds_of_unaligned
from flatout.tune.rewrite.flow import Expression, Flow, has_bias
from flatout.tune.rewrite.formulas import FormulaReading, with_functional
from flatout.tune.rewrite.source import readable_place

if TYPE_CHECKING:
    from torch import Tensor, nn

_MULTIPLE: Final = 64
"""128 bytes of half precision: what matrix units' loads are widest at (NVIDIA, Matrix Multiplication Background User's Guide)."""
_SMALLEST: Final = 64
"""Layers narrower than this are too small for padding to matter."""
_FASTER: Final = 1.5
_MOST_OF_HALVED: Final = 3.0
"""An unaligned product in half precision takes up to four times as long as an aligned one (4096 x 50257 x 768 on an H200: 127
instead of 500 TFLOP/s and more), of which three can be saved."""
_KEPT_SHARE: Final = 0.25
"""Of the promised saving at least, after the weights have been copied in each call."""
_EFFORT: Final = 4.0
"""Products are measured, and kernels compiled for that, when they are first met: the first trial of a GPT-2 small with this lever
took 77 s, where a BERT's without it took 29 s (H200)."""


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it where padded products were tried and were faster."""
    if evidence.steps.device_s is None:
        raise LeverRefused("only matrix units of GPUs care for sizes")
    if not findings:
        yield _when_halved(evidence)
        return
    first = max(findings, key=lambda f: f.saved_s[1])
    yield Candidate(
        # a line of a library can be padded, and not edited
        parameters={"multiple": _MULTIPLE} | readable_place(evidence, first.where),
        saved_s=(_KEPT_SHARE * sum(f.saved_s[0] for f in findings), sum(f.saved_s[1] for f in findings)),
        where=first.where,
        because=first.because,
    )


def _when_halved(evidence: Evidence) -> Candidate:
    """Float32 products do not care for sizes; in the half precision that another lever brings they will."""
    unaligned_s, rate = seconds_of_unaligned(evidence), rate_over_float32(evidence, "bfloat16")
    if not unaligned_s or rate is None or rate < _FASTER:
        raise LeverRefused("no product in half precision is faster with padded sizes")
    halved_s = unaligned_s / rate
    return Candidate(
        parameters={"multiple": _MULTIPLE},
        saved_s=(0.0, _MOST_OF_HALVED * halved_s),
        because=f"products with sizes like a vocabulary's take {milliseconds(unaligned_s)} of a step in float32; in half "
        "precision such sizes matter",
    )


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Give each such layer of a model its own forward, at the model's first call."""
    from torch import nn

    from flatout.blocks.kernels.matmul import measuring
    from flatout.core.runtime.patches import replace_forward

    multiple = integer(parameters, "multiple")

    def pad(module: nn.Module) -> Callable[[], None] | None:
        layers = [m for m in module.modules() if type(m) is nn.Linear and _is_unaligned(m, multiple)]
        layers = [m for m in layers if "forward" not in vars(m)]
        undo = ExitStack()
        for layer in layers:
            undo.callback(replace_forward(layer, MethodType(_forward(layer, multiple), layer)))
            hooks.note(LEVER.id)
        return undo.close if layers else None

    def measure() -> Callable[[], None]:
        stack = ExitStack()
        stack.enter_context(measuring())
        return stack.close

    hooks.at_start(measure)
    hooks.at_first_call(pad)


def _is_unaligned(layer: nn.Linear, multiple: int) -> bool:
    sizes = layer.in_features, layer.out_features
    return min(sizes) >= _SMALLEST and any(size % multiple for size in sizes)


def _forward(layer: nn.Linear, multiple: int) -> Callable[[nn.Linear, Tensor], Tensor]:
    """A forward that is padded by measurement on a device, and always in compiled code."""
    import torch

    from flatout.blocks.kernels.matmul import Linear

    padded, converted = _padded_forward(layer, multiple), Linear.from_linear(layer)

    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or not input.is_cuda:
            return padded(self, input)
        if converted.weight is not self.weight or converted.bias is not self.bias:
            converted.weight, converted.bias = self.weight, self.bias
        return converted.forward(input)

    return forward


def _padded_forward(layer: nn.Linear, multiple: int) -> Callable[[nn.Linear, Tensor], Tensor]:
    """The layer's forward with sizes that are multiples; plain operators, so that it can be compiled."""
    import torch.nn.functional as F

    columns, rows, width = -layer.in_features % multiple, -layer.out_features % multiple, layer.out_features

    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        weight = F.pad(self.weight, (0, columns, 0, rows))
        bias = self.bias if self.bias is None or not rows else F.pad(self.bias, (0, rows))
        output = F.linear(F.pad(input, (0, columns)) if columns else input, weight, bias)
        return output[..., :width] if rows else output

    return forward


def edit(text: str, parameters: Parameters) -> str:
    """Write the padding of the rows at the call of the layer.

    Raises EditError when the line does not call one layer that the class makes.
    """
    if "code" not in parameters:
        raise EditError("the layer is called in a library")
    flow, multiple = Flow(text, parameters), integer(parameters, "multiple")
    found = [(n, constructor) for n in ast.walk(flow.trees[flow.at]) if (constructor := flow.linear(n)) is not None]
    if len(found) != 1:
        raise EditError(f"{len(found)} calls of an nn.Linear were recognised in this line, and it must be one")
    [(call, constructor)] = found
    assert isinstance(call, ast.Call)
    layer, argument = (flow.text(Expression(part, flow.at)) for part in (call.func, call.args[0]))
    rows = f"-{layer}.out_features % {multiple}"
    arguments = [argument, f"{{F}}.pad({layer}.weight, (0, 0, 0, {rows}))"]
    if has_bias(constructor):
        arguments.append(f"{{F}}.pad({layer}.bias, (0, {rows}))")
    new = f"{{F}}.linear({', '.join(arguments)})[..., : {layer}.out_features]"
    return with_functional(FormulaReading(flow), Expression(call, flow.at), new, reused=()).code


LEVER = lever(__name__, propose, apply=apply, edit=edit, effort=_EFFORT, title="Sizes padded for matrix units")

"""The cross entropy of a linear layer's result, found in a text, and written as one call of `linear_cross_entropy`."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Final, NamedTuple

from flatout.core.errors import EditError
from flatout.tune.rewrite.flow import Expression, Flow, has_bias
from flatout.tune.rewrite.formulas import FormulaReading, NotThisFormula, Operands

_VIEWS: Final = frozenset({"view", "reshape", "flatten", "contiguous"})
_OPTIONS: Final = ("ignore_index", "label_smoothing")
BLOCK: Final = "linear_cross_entropy"
"""The function of flatout that takes its place."""


class LinearLoss(NamedTuple):
    """A cross entropy of the output of a linear layer, as it stands in a block of statements."""

    last: Expression
    """The loss."""
    operands: Operands
    head: Expression
    """The call of the layer."""
    constructor: ast.Call
    removed: frozenset[int]
    """Statements that make the logits."""


def linear_loss(flow: Flow) -> LinearLoss:
    """The loss around the place of the flow.

    Raises EditError where none is recognised.
    """
    for last in flow.expressions():
        reading = FormulaReading(flow)
        try:
            operands = reading.here(last, "cross_entropy")
            reading.check(len(operands.args) == 2 and operands.options.keys() <= set(_OPTIONS))
            head = reading.behind(operands.args[0], _VIEWS)
            constructor = flow.linear(head.node)
            if constructor is None:
                continue
            reading.check(flow.at in {last.at, *reading.removed})
        except NotThisFormula:
            continue
        return LinearLoss(last, operands, head, constructor, frozenset(reading.removed))
    raise EditError("no cross entropy of a linear layer's result was recognised around this line")


def fused_call(flow: Flow, loss: LinearLoss, *more: str) -> tuple[str, Sequence[Expression]]:
    """The loss as one call, with `more` arguments at its end, and the expressions that it takes over.

    Raises EditError where it is not certain whether the layer has a bias.
    """
    call = loss.head.node
    assert isinstance(call, ast.Call)
    layer = flow.text(Expression(call.func, loss.head.at))
    hidden = Expression(call.args[0], loss.head.at)
    targets = loss.operands.args[1]
    while (view := flow.operation(targets.node)) is not None and view.name in _VIEWS:
        targets = Expression(view.args[0], targets.at)
    arguments = [flow.text(hidden), f"{layer}.weight", flow.text(targets)]
    arguments += [f"{layer}.bias"] if has_bias(loss.constructor) else []
    options = loss.operands.options
    arguments += [f"{n}={flow.text(Expression(options[n], loss.last.at))}" for n in _OPTIONS if n in options]
    return f"{BLOCK}({', '.join([*arguments, *more])})", (hidden, targets)

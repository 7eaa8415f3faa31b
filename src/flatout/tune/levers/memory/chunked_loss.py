"""The logits over a large vocabulary and their cross entropy are computed some tokens at a time.

What        `logits = self.head(x)` and `F.cross_entropy(logits.view(-1, V), targets.view(-1))` become
            `linear_cross_entropy(x, self.head.weight, targets)`.
Guarantee   BOUNDED: sums in another order, float32 throughout.
Refuses     Logits that are used besides (returned, for example); heads that are not nn.Linear as the class shows.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from flatout.core.errors import EditError
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Parameters
from flatout.tune.rewrite.flow import Expression, Flow, has_bias
from flatout.tune.rewrite.formulas import FormulaReading, NotThisFormula, Operands
from flatout.tune.rewrite.imports import with_import
from flatout.tune.rewrite.source import local_proposals

_VIEWS: Final = frozenset({"view", "reshape", "flatten", "contiguous"})
_BLOCK: Final = "linear_cross_entropy"
_KEPT: Final = ("ignore_index", "label_smoothing")


class LinearLoss(NamedTuple):
    """A cross entropy of the output of a linear layer."""

    loss: Operands
    head: Expression
    constructor: ast.Call


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it where all logits were in memory at the peak; the time stays the same."""
    why = "no logits over a large vocabulary fill memory"
    for proposal in local_proposals(evidence, findings, edit, else_because=why):
        saved_bytes = max(f.saved_bytes for f in findings if proposal.where in (f.where, *f.also))
        yield msgspec.structs.replace(proposal, saved_bytes=saved_bytes)


def edit(text: str, parameters: Parameters) -> str:
    """Put the chunked loss in place of the linear layer and the loss.

    Raises EditError when the head or the loss is not recognised, or the logits are used besides.
    """
    flow = Flow(text, parameters)
    for last in flow.expressions():
        reading = FormulaReading(flow)
        try:
            found = _loss(reading, last)
            reading.check(flow.at in {last.at, *reading.removed})
        except NotThisFormula:
            continue
        return _with_chunks(reading, last, found)
    raise EditError("no cross entropy of a linear layer's result was recognised around this line")


def _loss(reading: FormulaReading, expr: Expression) -> LinearLoss:
    loss = reading.here(expr, "cross_entropy")
    reading.check(len(loss.args) == 2 and loss.options.keys() <= set(_KEPT))
    head = reading.behind(loss.args[0], _VIEWS)
    constructor = reading.flow.linear(head.node)
    if constructor is None:
        raise NotThisFormula
    return LinearLoss(loss, head, constructor)


def _with_chunks(reading: FormulaReading, last: Expression, found: LinearLoss) -> str:
    flow, call = reading.flow, found.head.node
    assert isinstance(call, ast.Call)
    layer = flow.text(Expression(call.func, found.head.at))
    hidden = Expression(call.args[0], found.head.at)
    targets = found.loss.args[1]
    while (view := flow.operation(targets.node)) is not None and view.name in _VIEWS:
        targets = Expression(view.args[0], targets.at)
    arguments = [flow.text(hidden), f"{layer}.weight", flow.text(targets)]
    arguments += [f"{layer}.bias"] if has_bias(found.constructor) else []
    options = found.loss.options
    arguments += [f"{name}={flow.text(Expression(options[name], last.at))}" for name in _KEPT if name in options]
    new = f"{_BLOCK}({', '.join(arguments)})"
    return with_import(
        flow.replaced(last, new, removed=reading.removed, reused=(hidden, targets)), "flatout", _BLOCK
    ).code


LEVER = lever(__name__, propose, edit=edit, is_local=True, title="Loss in chunks of tokens")

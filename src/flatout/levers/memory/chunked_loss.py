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

from flatout.errors import EditError
from flatout.levers.syntax.flow import Flow, Operation, Seen, has_bias, without_casts
from flatout.levers.syntax.imports import with_import
from flatout.levers.syntax.source import offered
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal

_VIEWS: Final = frozenset({"view", "reshape", "flatten", "contiguous"})
_BLOCK: Final = "linear_cross_entropy"
_KEPT: Final = ("ignore_index", "label_smoothing")


class Loss(NamedTuple):
    """A cross entropy of a linear layer's result."""

    call: Seen
    operation: Operation
    head: ast.Call
    head_at: int
    made: ast.Call
    removed: frozenset[int]


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """Where all logits were at the peak; time stays what it is."""
    for said in offered(
        LEVER.id, evidence, findings, edit, else_because="no logits over a large vocabulary fill memory"
    ):
        if isinstance(said, Candidate):
            saved_bytes = max(f.saved_bytes for f in findings if said.where in (f.where, *f.also))
            yield msgspec.structs.replace(said, saved_bytes=saved_bytes)
        else:
            yield said


def edit(text: str, parameters: Parameters) -> str:
    """Put the chunked loss in place of the head and the loss.

    Raises EditError when the head or the loss is not recognised, or the logits are used besides.
    """
    flow = Flow(text, parameters)
    loss = _loss(flow)
    head = flow.text(Seen(loss.head.func, loss.head_at))
    hidden = Seen(loss.head.args[0], loss.head_at)
    targets = _without_views(flow, Seen(loss.operation.args[1], loss.call.at))
    arguments = [
        flow.text(hidden),
        f"{head}.weight",
        flow.text(targets),
        *([f"{head}.bias"] if has_bias(loss.made) else []),
    ]
    for name in _KEPT:
        value = loss.operation.options.get(name)
        if value is not None:
            arguments.append(f"{name}={flow.text(Seen(value, loss.call.at))}")
    new = f"{_BLOCK}({', '.join(arguments)})"
    changed = flow.replaced(loss.call, new, removed=set(loss.removed), kept=(hidden, targets))
    return with_import(changed, "flatout", _BLOCK).code


def _loss(flow: Flow) -> Loss:
    for at, tree in enumerate(flow.trees):
        if isinstance(tree, (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.FunctionDef, ast.ClassDef)):
            continue
        for node in ast.walk(tree):
            found = _at(flow, Seen(node, at)) if isinstance(node, ast.Call) else None
            if found is not None and flow.at in {at, *found.removed}:
                return found
    raise EditError("no cross entropy of a linear layer's result was recognised around this line")


def _at(flow: Flow, seen: Seen) -> Loss | None:
    operation = flow.operation(seen.node)
    if operation is None or operation.name != "cross_entropy" or len(operation.args) != 2:
        return None
    if set(operation.options) - set(_KEPT):
        return None
    inner, removed = Seen(operation.args[0], seen.at), set[int]()
    while True:
        inner = _without_views(flow, without_casts(flow, inner))
        before = flow.written(inner)
        if before is None:
            break
        removed.add(before.at)
        inner = before
    made = flow.attribute(inner.node.func) if isinstance(inner.node, ast.Call) else None
    if not isinstance(inner.node, ast.Call) or len(inner.node.args) != 1 or not isinstance(made, ast.Call):
        return None
    if flow.full_name(made.func) != "torch.nn.Linear":
        return None
    return Loss(seen, operation, inner.node, inner.at, made, frozenset(removed))


def _without_views(flow: Flow, seen: Seen) -> Seen:
    """A tensor before its dimensions were put together."""
    while True:
        operation = flow.operation(seen.node)
        if operation is None or operation.name not in _VIEWS:
            return seen
        seen = Seen(operation.args[0], seen.at)


LEVER = Lever(
    id="memory.chunked-loss",
    title="Loss in chunks of tokens",
    guarantee="bounded",
    module=__name__,
    propose=propose,
    edit=edit,
    is_local=True,
)

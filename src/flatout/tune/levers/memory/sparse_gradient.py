"""An embedding's gradient holds the rows that a batch touched, not the whole table.

What        `sparse=True` for large tables whose weights are in an optimizer that updates touched rows alone in the same way.
Guarantee   BOUNDED: a row that a batch names several times has its parts added in another order; `fused` is left out.
Refuses     Adam and its like, momentum, weight decay: they move rows that the batch did not touch. Tables with max_norm,
            scale_grad_by_freq or bags of mode 'max', which have no sparse gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError, LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters, integer, string
from flatout.machine.cost.accounting import facts_named
from flatout.tune.levers.parameter_groups import listed_groups, optimized_tensors
from flatout.tune.rewrite.calls import argument, calls_to, true_name, with_argument, with_calls, without_argument
from flatout.tune.rewrite.imports import call_name, with_torch
from flatout.tune.rewrite.operands import last_name
from flatout.tune.rewrite.source import code_of, nodes_of, parsed, statements, with_changes

if TYPE_CHECKING:
    from torch import nn

_LAZY: Final = ("SGD", "Adagrad")
"""Optimizers that leave a row alone whose gradient is zero, and take sparse gradients (documentation of torch 2.13)."""
_LAZY_NAMES: Final = tuple(f"torch.optim.{name}" for name in _LAZY)
_MOVES: Final = ("weight_decay", "momentum", "nesterov", "differentiable")
_SPECIAL: Final = ("sparse", "max_norm", "scale_grad_by_freq")
_HIGH: Final = 1.3
"""The trial has the table alone; what zero_grad and the allocator save beside it is not in it."""


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it for each table that the rule found, if its optimizer updates touched rows alone in the same way."""
    if not findings:
        raise LeverRefused("no embedding has a gradient much larger than what a batch touches")
    best = max(findings, key=lambda f: f.saved_s[1])
    shape = evidence.operators[best.operators[0]].outputs[0].shape
    others = [name for name in _optimizers_of(evidence, shape) if name not in _LAZY]
    if others:
        raise LeverRefused(
            f"{others[0]} moves rows that a batch did not touch (momentum, decay); SGD and Adagrad do not"
        )
    yield Candidate(
        parameters={"table": best.module.rpartition(".")[2], "rows": shape[0]},
        saved_s=(0.5 * best.saved_s[0], _HIGH * best.saved_s[1]),
        where=best.where,
        because=best.because,
    )


def _optimizers_of(evidence: Evidence, shape: tuple[int, ...]) -> list[str]:
    """Classes of the optimizers that hold a tensor of this shape."""
    text = "x".join(map(str, shape))
    holders = {f.source for f in facts_named(evidence, "parameter-shapes") if text in f.text.split(",")}
    places = [(o, o.constructed if o.constructed >= 0 else o.source) for o in evidence.optimizers]
    return [o.name for o, place in places if place in holders]


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Record the tables that are constructed, and give those of a suitable optimizer sparse gradients."""
    from weakref import WeakSet

    import torch
    from torch import nn

    rows = integer(parameters, "rows")
    tables: WeakSet[nn.Module] = WeakSet()

    for kind in (nn.Embedding, nn.EmbeddingBag):

        def remembering(self: Any, *args: Any, original: Any = kind.__init__, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            tables.add(self)

        hooks.replace(kind, "__init__", remembering)

    def make_sparse(kind: type, arguments: dict[str, Any]) -> None:
        if any(arguments.get(name) for name in _MOVES):
            return
        groups = listed_groups(arguments)
        plain = [g for g in groups if not (isinstance(g, dict) and any(g.get(name) for name in _MOVES))]
        stored = {
            id(p[1] if isinstance(p, tuple) else p) for p in optimized_tensors(plain)
        }  # they may come with their names
        able = [t for t in tables if id(t.weight) in stored and is_able(t, rows=rows)]
        for table in able:
            table.sparse = True  # type: ignore[assignment]
            if kind is torch.optim.SGD:
                table.weight.register_hook(_coalesced)  # type: ignore[operator]
        if able:
            arguments["fused"] = None
            hooks.note(LEVER.id)

    for name in _LAZY:
        hooks.at_construction(getattr(torch.optim, name), make_sparse)


def _coalesced(gradient: Any) -> Any:
    """Each row once, its parts added up: SGD would round the table anew for each part."""
    return gradient.coalesce() if gradient.is_sparse else gradient


def is_able(table: nn.Module, *, rows: int) -> bool:
    """Whether an embedding has so many rows, and can have a sparse gradient."""
    is_plain = not table.sparse and not table.scale_grad_by_freq and table.max_norm is None
    is_large = int(table.num_embeddings) >= rows  # type: ignore[arg-type]
    return is_plain and is_large and getattr(table, "mode", "mean") != "max"


def edit(text: str, parameters: Parameters) -> str:
    """Write `sparse=True` where the table is constructed, and no `fused` where the optimizer is.

    Raises EditError where the table or its optimizer cannot be told for certain.
    """
    module = parsed(text)
    name = string(parameters, "table")
    making = _construction(module, name)
    table = cst.ensure_type(making.value, cst.Call)
    if any(argument(table, word) is not None for word in _SPECIAL):
        raise EditError(f"'{code_of(table)}' is made with options that a sparse gradient may not have")
    optimizers = [c for c in nodes_of(cst.Call, module) if _is_optimizer(module, c)]
    if len(optimizers) != 1:
        raise EditError(f"{len(optimizers)} optimizers are made; which of them has '{name}'?")
    [optimizer] = optimizers
    if call_name(module, optimizer.func) not in _LAZY_NAMES:
        raise EditError(f"'{code_of(optimizer.func)}' moves rows that a batch did not touch")
    for word in _MOVES:
        value = argument(optimizer, word)
        if value is not None and code_of(value) not in ("0", "0.0", "False"):
            raise EditError(f"'{word}={code_of(value)}' moves rows that a batch did not touch")
    if call_name(module, optimizer.func) == "torch.optim.SGD":  # it would round the table anew for each part of a row
        module, torch_ = with_torch(module)
        hook = "{table}.weight.register_hook({torch}.Tensor.coalesce)"
        line = next(s for s in nodes_of(cst.SimpleStatementLine, module) if making in s.body)
        more = statements(hook, table=making.targets[0].target, torch=cst.Name(torch_))
        module = with_changes(module, {line: [line, *more]})
    module = with_calls(
        module,
        [cst.ensure_type(_construction(module, name).value, cst.Call)],
        lambda call: with_argument(call, "sparse", true_name()),
    )
    able = [c for c in calls_to(module, _LAZY_NAMES) if argument(c, "fused") is not None]
    return with_calls(module, able, lambda call: without_argument(call, "fused")).code


def _construction(module: cst.Module, name: str) -> cst.Assign:
    """The one statement that makes the table of this name."""
    found = [
        assign
        for assign in nodes_of(cst.Assign, module)
        if name in [last_name(t.target) for t in assign.targets]
        and isinstance(assign.value, cst.Call)
        and last_name(assign.value.func) in ("Embedding", "EmbeddingBag")
    ]
    if len(found) != 1:
        raise EditError(f"{len(found)} embeddings are made as '{name}'")
    if m.findall(
        module, m.Assign(value=m.Attribute(value=m.Name(name) | m.Attribute(attr=m.Name(name)), attr=m.Name("weight")))
    ):
        raise EditError(f"the weight of '{name}' has another name, too")
    return found[0]


def _is_optimizer(module: cst.Module, call: cst.Call) -> bool:
    name = call_name(module, call.func)
    return (
        name.startswith("torch.optim.") and not name.startswith("torch.optim.lr_scheduler.") and name[12:13].isupper()
    )


LEVER = lever(
    __name__,
    propose,
    apply=apply,
    edit=edit,
    conflicts=("parallelism.fused-optimizer",),
    title="Sparse gradients of embeddings",
)

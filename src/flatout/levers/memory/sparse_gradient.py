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

from flatout.cost.accounting import facts_named
from flatout.errors import EditError
from flatout.levers.syntax.calls import TRUE, argument, calls_of, with_argument, with_calls, without_argument
from flatout.levers.syntax.imports import call_name, with_torch
from flatout.levers.syntax.source import code_of, parsed, statements, with_statements
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal, Seams, integer, string

if TYPE_CHECKING:
    from torch import nn

_LAZY: Final = ("SGD", "Adagrad")
"""Optimizers that leave a row alone whose gradient is zero, and take sparse gradients (documentation of torch 2.13)."""
_LAZY_NAMES: Final = tuple(f"torch.optim.{name}" for name in _LAZY)
_MOVES: Final = ("weight_decay", "momentum", "nesterov", "differentiable")
_SPECIAL: Final = ("sparse", "max_norm", "scale_grad_by_freq")
_HIGH: Final = 1.3
"""The trial has the table alone; what zero_grad and the allocator save beside it is not in it."""


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """For each table that the rule found, if its optimizer updates touched rows alone in the same way."""
    if not findings:
        yield Refusal(lever=LEVER.id, because="no embedding has a gradient much larger than what a batch touches")
        return
    best = max(findings, key=lambda f: f.saved_s[1])
    shape = evidence.operators[best.operators[0]].outputs[0].shape
    others = [name for name in _optimizers_of(evidence, shape) if name not in _LAZY]
    if others:
        yield Refusal(
            lever=LEVER.id,
            because=f"{others[0]} moves rows that a batch did not touch (momentum, decay); SGD and Adagrad do not",
        )
        return
    yield Candidate(
        lever=LEVER.id,
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


def apply(seams: Seams, parameters: Parameters) -> None:
    """Remember the tables that are made, and turn those sparse that an able optimizer gets."""
    from weakref import WeakSet

    import torch
    from torch import nn

    rows = integer(parameters, "rows")
    tables: WeakSet[nn.Module] = WeakSet()

    for kind in (nn.Embedding, nn.EmbeddingBag):

        def remembering(self: Any, *args: Any, original: Any = kind.__init__, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            tables.add(self)

        seams.replace(kind, "__init__", remembering)

    def turn(kind: type, given: dict[str, Any]) -> None:
        if any(given.get(name) for name in _MOVES):
            return
        groups = given["params"] = list(given["params"])
        plain = [g for g in groups if not (isinstance(g, dict) and any(g.get(name) for name in _MOVES))]
        for group in plain:
            if isinstance(group, dict) and not isinstance(group["params"], torch.Tensor):
                group["params"] = list(group["params"])
        held = {id(p) for g in plain for p in _tensors(g)}
        able = [t for t in tables if id(t.weight) in held and is_able(t, rows=rows)]
        for table in able:
            table.sparse = True  # type: ignore[assignment]
            if kind is torch.optim.SGD:
                table.weight.register_hook(_coalesced)  # type: ignore[operator]
        if able:
            given["fused"] = None
            seams.note(LEVER.id)

    for name in _LAZY:
        seams.at_making(getattr(torch.optim, name), turn)


def _tensors(group: Any) -> list[Any]:
    """Parameters of a group; they may come with their names."""
    held = group["params"] if isinstance(group, dict) else [group]
    held = held if isinstance(held, list) else [held]
    return [p[1] if isinstance(p, tuple) else p for p in held]


def _coalesced(gradient: Any) -> Any:
    """Each row once, its parts added up: SGD would round the table anew for each part."""
    return gradient.coalesce() if gradient.is_sparse else gradient


def is_able(table: nn.Module, *, rows: int) -> bool:
    """Whether an embedding is so large, and can have a sparse gradient."""
    is_plain = not table.sparse and not table.scale_grad_by_freq and table.max_norm is None
    is_large = int(table.num_embeddings) >= rows  # type: ignore[arg-type]
    return is_plain and is_large and getattr(table, "mode", "mean") != "max"


def edit(text: str, parameters: Parameters) -> str:
    """`sparse=True` where the table is made, and no `fused` where the one optimizer is made.

    Raises EditError where the table or its optimizer cannot be told for certain.
    """
    module = parsed(text)
    name = string(parameters, "table")
    making = _made_as(module, name)
    table = cst.ensure_type(making.value, cst.Call)
    if any(argument(table, word) is not None for word in _SPECIAL):
        raise EditError(f"'{code_of(table)}' is made with options that a sparse gradient may not have")
    optimizers = [c for c in m.findall(module, m.Call()) if _is_optimizer(module, c)]
    if len(optimizers) != 1:
        raise EditError(f"{len(optimizers)} optimizers are made; which of them has '{name}'?")
    optimizer = cst.ensure_type(optimizers[0], cst.Call)
    if call_name(module, optimizer.func) not in _LAZY_NAMES:
        raise EditError(f"'{code_of(optimizer.func)}' moves rows that a batch did not touch")
    for word in _MOVES:
        value = argument(optimizer, word)
        if value is not None and code_of(value) not in ("0", "0.0", "False"):
            raise EditError(f"'{word}={code_of(value)}' moves rows that a batch did not touch")
    if call_name(module, optimizer.func) == "torch.optim.SGD":  # it would round the table anew for each part of a row
        module, torch_ = with_torch(module)
        hook = "{table}.weight.register_hook({torch}.Tensor.coalesce)"
        line = next(s for s in m.findall(module, m.SimpleStatementLine()) if making in s.body)  # type: ignore[attr-defined]
        more = statements(hook, table=making.targets[0].target, torch=cst.Name(torch_))
        module = with_statements(module, {line: [cst.ensure_type(line, cst.SimpleStatementLine), *more]})
    module = with_calls(module, [cst.ensure_type(_made_as(module, name).value, cst.Call)], _as_sparse)
    able = [c for c in calls_of(module, _LAZY_NAMES) if argument(c, "fused") is not None]
    return with_calls(module, able, lambda call: without_argument(call, "fused")).code


def _as_sparse(call: cst.Call) -> cst.Call:
    return with_argument(call, "sparse", TRUE)


def _made_as(module: cst.Module, name: str) -> cst.Assign:
    """The one statement that makes the table of this name."""
    found: list[cst.Assign] = []
    for assign in m.findall(module, m.Assign()):
        assert isinstance(assign, cst.Assign)
        names = [_last_name(t.target) for t in assign.targets]
        made = assign.value
        if name in names and isinstance(made, cst.Call) and _last_name(made.func) in ("Embedding", "EmbeddingBag"):
            found.append(assign)
    if len(found) != 1:
        raise EditError(f"{len(found)} embeddings are made as '{name}'")
    if m.findall(
        module, m.Assign(value=m.Attribute(value=m.Name(name) | m.Attribute(attr=m.Name(name)), attr=m.Name("weight")))
    ):
        raise EditError(f"the weight of '{name}' has another name, too")
    return found[0]


def _is_optimizer(module: cst.Module, call: cst.CSTNode) -> bool:
    name = call_name(module, cst.ensure_type(call, cst.Call).func)
    return (
        name.startswith("torch.optim.") and not name.startswith("torch.optim.lr_scheduler.") and name[12:13].isupper()
    )


def _last_name(node: cst.CSTNode) -> str:
    if isinstance(node, cst.Attribute):
        return node.attr.value
    return node.value if isinstance(node, cst.Name) else ""


LEVER = Lever(
    id="memory.sparse-gradient",
    title="Sparse gradients of embeddings",
    guarantee="bounded",
    module=__name__,
    propose=propose,
    apply=apply,
    edit=edit,
    conflicts=("parallelism.fused-optimizer",),
)

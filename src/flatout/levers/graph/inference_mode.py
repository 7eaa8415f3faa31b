"""No graph for calls that no backward follows.

What        `torch.no_grad()` around calls of modules in evaluation mode.
Guarantee   EXACT: the same operators on the same numbers.
Refuses     Runs whose calls in evaluation mode are differentiated, or that build no graph in vain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import libcst as cst
from libcst import matchers as m

from flatout.errors import EditError
from flatout.levers.syntax.calls import calls_ending
from flatout.levers.syntax.imports import with_torch
from flatout.levers.syntax.source import MODULE, code_of, expression, function_of, parsed, place_of
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal, Seams
from flatout.records.workload import Source

if TYPE_CHECKING:
    from torch import nn


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """Where evaluation builds graphs."""
    evaluating = [m for m in evidence.models if not m.is_training]
    if not findings or not any(m.num_graphs_built and not m.num_graphs_used for m in evaluating):
        yield Refusal(lever=LEVER.id, because="no call in evaluation mode builds a graph in vain")
        return
    used = next((m for m in evaluating if m.num_graphs_used), None)
    if used is not None:
        yield Refusal(lever=LEVER.id, because=f"{used.name} is differentiated in evaluation mode too")
        return
    first = findings[0]
    yield Candidate(
        lever=LEVER.id,
        parameters=_place(evidence, first.where),
        saved_s=first.saved_s,
        where=first.where,
        because=first.because,
    )


def _place(evidence: Evidence, where: Source | None) -> Parameters:
    """Where the evaluation stands in the text, for `edit`; nothing when its file cannot be read."""
    try:
        return place_of(evidence, where) if where is not None else {}
    except EditError:
        return {}


def apply(seams: Seams, parameters: Parameters) -> None:
    """Around the calls of root modules that are in evaluation mode."""
    import torch

    def context(module: nn.Module) -> AbstractContextManager[object] | None:
        if module.training or not torch.is_grad_enabled():
            return None
        seams.note(LEVER.id)
        return torch.no_grad()

    seams.around_calls(context)


def edit(text: str, parameters: Parameters) -> str:
    """`@torch.no_grad()` on the function that evaluates; where it trains too, `with torch.no_grad():` from eval() to train()."""
    module, torch = with_torch(parsed(text))
    decorator = cst.Decorator(expression(f"{torch}.no_grad()"))
    name = parameters.get("function", MODULE)
    wanted = _evaluating(module) if name == MODULE else [function_of(module, str(name))]
    if not wanted or any(_learns(f) or f.asynchronous is not None or m.findall(f, m.Yield()) for f in wanted):
        return _with_blocks(module, torch).code
    return module.visit(_Decorator(wanted, decorator)).code


def _evaluating(module: cst.Module) -> list[cst.FunctionDef]:
    """Functions that call `.eval()` of something, gradients on."""
    return [
        f
        for f in m.findall(module, m.FunctionDef())
        if isinstance(f, cst.FunctionDef) and _switches(f, "eval") and not _is_off(f)
    ]


def _is_off(node: cst.CSTNode) -> bool:
    return any(name in code_of(node) for name in ("no_grad", "inference_mode", "set_grad_enabled"))


def _switches(node: cst.CSTNode, mode: str) -> bool:
    return any(not call.args for call in calls_ending(node, mode))


def _learns(node: cst.CSTNode) -> bool:
    """Whether gradients are taken inside."""
    return any(calls_ending(node, name) for name in ("backward", "grad", "step", "requires_grad_"))


class _Decorator(cst.CSTTransformer):
    def __init__(self, functions: Sequence[cst.FunctionDef], decorator: cst.Decorator) -> None:
        super().__init__()
        self._wanted = {id(f) for f in functions}
        self._decorator = decorator

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        if id(original_node) not in self._wanted:
            return updated_node
        return updated_node.with_changes(decorators=[*updated_node.decorators, self._decorator])


def _with_blocks(module: cst.Module, torch: str) -> cst.Module:
    """The statements between `model.eval()` and `model.train()`, or the end of the block, under `with torch.no_grad():`.

    Raises EditError when gradients are taken among them, or there are none.
    """
    wrapper = _Wrapper(expression(f"{torch}.no_grad()"))
    changed = module.visit(wrapper)
    if not wrapper.num_wrapped:
        raise EditError("no statements stand between eval() and train() of a model")
    return changed


class _Wrapper(cst.CSTTransformer):
    def __init__(self, context: cst.BaseExpression) -> None:
        super().__init__()
        self.num_wrapped = 0
        self._context = context

    def leave_IndentedBlock(self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock) -> cst.BaseSuite:
        return updated_node.with_changes(body=self._wrapped(updated_node.body))

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        return updated_node.with_changes(body=self._wrapped(updated_node.body))

    def _wrapped(self, block: Sequence[cst.BaseStatement]) -> Sequence[cst.BaseStatement]:
        starts = [i for i, s in enumerate(block) if _is_switch(s, "eval")]
        if len(starts) != 1:
            return block
        begin = starts[0] + 1
        end = next((i for i, s in enumerate(block) if i >= begin and _is_switch(s, "train")), len(block))
        inside = block[begin:end]
        if not inside or any(map(_is_off, inside)):
            return block
        if any(map(_learns, inside)) or any(m.findall(s, m.Import() | m.FunctionDef() | m.ClassDef()) for s in inside):
            raise EditError("gradients are taken between eval() and train(), or the end of the block")
        self.num_wrapped += 1
        body = cst.IndentedBlock(inside)
        return [*block[:begin], cst.With([cst.WithItem(self._context)], body), *block[end:]]


def _is_switch(statement: cst.CSTNode, mode: str) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and _switches(statement, mode)


LEVER = Lever(
    id="graph.inference-mode",
    title="No graph in evaluation",
    guarantee="exact",
    module=__name__,
    propose=propose,
    apply=apply,
    edit=edit,
)

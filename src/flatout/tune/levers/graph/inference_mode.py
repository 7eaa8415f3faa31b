"""No graph for calls that no backward follows.

What        `torch.no_grad()` around calls of modules in evaluation mode.
Guarantee   EXACT: the same operators on the same numbers.
Refuses     Runs whose calls in evaluation mode are differentiated, or that build no graph in vain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError, LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters
from flatout.tune.rewrite.calls import calls_ending
from flatout.tune.rewrite.imports import with_torch
from flatout.tune.rewrite.source import (
    MODULE,
    code_of,
    expression,
    function_at,
    nodes_of,
    parsed,
    readable_place,
    with_changes,
)

if TYPE_CHECKING:
    from torch import nn


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it where evaluation builds autograd graphs."""
    evaluating = [m for m in evidence.models if not m.is_training]
    in_vain = [m for m in evaluating if m.num_graphs_built and not m.num_graphs_used]
    if not in_vain or not findings:
        raise LeverRefused("no call in evaluation mode builds a graph in vain")
    used = next((m for m in evaluating if m.num_graphs_used), None)
    if used is not None:
        raise LeverRefused(f"{used.name} is differentiated in evaluation mode too")
    first = findings[0]
    place = readable_place(evidence, first.where)
    yield Candidate(parameters=place, saved_s=first.saved_s, where=first.where, because=first.because)


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Switch gradients off around the calls of root modules that are in evaluation mode."""
    import torch

    def context(module: nn.Module) -> AbstractContextManager[object] | None:
        if module.training or not torch.is_grad_enabled():
            return None
        hooks.note(LEVER.id)
        return torch.no_grad()

    hooks.around_calls(context)


def edit(text: str, parameters: Parameters) -> str:
    """Write `@torch.no_grad()` above the function that evaluates; where it also trains, `with torch.no_grad():` from
    eval() to train().
    """
    module, torch = with_torch(parsed(text))
    decorator = cst.Decorator(expression(f"{torch}.no_grad()"))
    name = parameters.get("function", MODULE)
    wanted = _evaluating(module) if name == MODULE else [function_at(module, str(name))]
    if not wanted or any(_learns(f) or f.asynchronous is not None or m.findall(f, m.Yield()) for f in wanted):
        return _with_blocks(module, torch).code
    return with_changes(
        module, dict.fromkeys(wanted, lambda f: f.with_changes(decorators=[*f.decorators, decorator]))
    ).code


def _evaluating(module: cst.Module) -> list[cst.FunctionDef]:
    """Functions that call `.eval()` of something, gradients on."""
    return [f for f in nodes_of(cst.FunctionDef, module) if _switches(f, "eval") and not _is_off(f)]


def _is_off(node: cst.CSTNode) -> bool:
    return any(name in code_of(node) for name in ("no_grad", "inference_mode", "set_grad_enabled"))


def _switches(node: cst.CSTNode, mode: str) -> bool:
    return any(not call.args for call in calls_ending(node, mode))


def _learns(node: cst.CSTNode) -> bool:
    """Whether gradients are taken inside."""
    return any(calls_ending(node, name) for name in ("backward", "grad", "step", "requires_grad_"))


def _with_blocks(module: cst.Module, torch: str) -> cst.Module:
    """The statements between `model.eval()` and `model.train()`, or the end of the block, under `with torch.no_grad():`.

    Raises EditError when gradients are taken among them, or there are none.
    """
    items = [cst.WithItem(expression(f"{torch}.no_grad()"))]
    blocks = (module, *nodes_of(cst.IndentedBlock, module))
    changed = with_changes(module, dict.fromkeys(blocks, partial(_wrapped, items=items)))
    if changed.deep_equals(module):
        raise EditError("no statements stand between eval() and train() of a model")
    return changed


def _wrapped(node: cst.Module | cst.IndentedBlock, *, items: Sequence[cst.WithItem]) -> cst.CSTNode:
    block = node.body
    starts = [i for i, s in enumerate(block) if _is_switch(s, "eval")]
    if len(starts) != 1:
        return node
    begin = starts[0] + 1
    end = next((i for i, s in enumerate(block) if i >= begin and _is_switch(s, "train")), len(block))
    inside = block[begin:end]
    if not inside or any(map(_is_off, inside)):
        return node
    if any(map(_learns, inside)) or any(m.findall(s, m.Import() | m.FunctionDef() | m.ClassDef()) for s in inside):
        raise EditError("gradients are taken between eval() and train(), or the end of the block")
    return node.with_changes(body=[*block[:begin], cst.With(items, cst.IndentedBlock(inside)), *block[end:]])


def _is_switch(statement: cst.CSTNode, mode: str) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and _switches(statement, mode)


LEVER = lever(__name__, propose, apply=apply, edit=edit, title="No graph in evaluation", errors=("nference tensor",))

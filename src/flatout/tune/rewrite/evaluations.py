"""Evaluations in a text: what calls a model without gradients is kept from being compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import libcst as cst

from flatout.tune.rewrite.imports import call_name, with_torch
from flatout.tune.rewrite.models import module_classes, names_of_models
from flatout.tune.rewrite.source import Change, code_of, nodes_of, places_in, with_changes

_WITHOUT_GRADIENTS: Final = ("torch.no_grad", "torch.inference_mode")
_OF_MODELS: Final = ("eval", "train", "parameters")


def with_plain_evaluations(module: cst.Module) -> cst.Module:
    """The file with `torch.compiler.set_stance("force_eager")` where a model is called without gradients, outside of its class.

    As a decorator of functions that are decorated so, and in `with` blocks. Graphs for an evaluation would be compiled besides
    those of the training, and take longer than most evaluations.
    """
    changed, torch = with_torch(module)
    models = names_of_models(changed) | _evaluated(changed)
    classes = module_classes(changed)
    stance = f'{torch}.compiler.set_stance("force_eager")'
    changes: dict[cst.CSTNode, Change] = {}
    for place in places_in(changed):
        statement = place.statement
        if place.owner is not None and place.owner.name.value in classes:
            continue
        if isinstance(statement, cst.With):
            heads, called = [one.item for one in statement.items], models
        elif isinstance(statement, cst.FunctionDef):
            heads = [one.decorator for one in statement.decorators]
            called = models | {one.name.value for one in statement.params.params}
        else:
            continue
        if any(_stops_gradients(changed, head) for head in heads) and _calls_one_of(statement.body, called):
            changes[statement] = _with_stance(stance)
    return with_changes(changed, changes) if changes else module


def _with_stance(stance: str) -> Callable[[cst.With | cst.FunctionDef], cst.CSTNode]:
    """A change of a `with` block that enters this context, too, or of a function that is decorated with it."""
    call = cst.ensure_type(cst.parse_expression(stance), cst.Call)

    def change(node: cst.With | cst.FunctionDef) -> cst.CSTNode:
        if isinstance(node, cst.FunctionDef):
            return node.with_changes(decorators=[*node.decorators, cst.Decorator(call)])
        comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        *before, last = node.items
        items = [*before, last.with_changes(comma=comma), cst.WithItem(call, comma=last.comma)]
        return node.with_changes(items=items)

    return change


def _stops_gradients(module: cst.Module, head: cst.BaseExpression) -> bool:
    """Whether a context or decorator is `no_grad()` or `inference_mode()`, called or not."""
    func = head.func if isinstance(head, cst.Call) else head
    return call_name(module, func) in _WITHOUT_GRADIENTS


def _calls_one_of(node: cst.CSTNode, names: set[str]) -> bool:
    return any(code_of(call.func) in names for call in nodes_of(cst.Call, node))


def _evaluated(module: cst.Module) -> set[str]:
    """What methods of models are called of, whatever they come from."""
    funcs = [call.func for call in nodes_of(cst.Call, module)]
    return {code_of(f.value) for f in funcs if isinstance(f, cst.Attribute) and f.attr.value in _OF_MODELS}

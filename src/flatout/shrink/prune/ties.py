"""Units of a model's parameters that stay or go together, by the rules of its operators, from the inputs to the outputs."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from flatout.shrink.prune import norms, products, shapes
from flatout.shrink.prune.graph import ExportedGraph, line_of, owners_of
from flatout.shrink.prune.operator_rules import RULES, AtenCall, Shape, Value, pinned, pinned_like, shapes_in, sizes_of
from flatout.shrink.prune.surgery import named_tensors
from flatout.shrink.prune.terms import Dim, UnitTerms

__all__ = ["Tied", "norms", "products", "tie"]  # the rooms of rules are imported for what they register

# Operators that give nothing and check what holds of the smaller model, too, or fail there by themselves.
_CHECKS = ("_assert", "sym_", "_functional_assert")


@dataclass
class Tied:
    """Terms of every named tensor, every node and every carried state."""

    graph: ExportedGraph
    terms: UnitTerms
    named: dict[str, tuple[Dim, ...]] = field(default_factory=dict)
    values: dict[Node, Value] = field(default_factory=dict)
    states: tuple[tuple[Dim, ...], ...] = ()
    sizes: list[tuple[str, str, Dim]] = field(default_factory=list)


def tie(model: nn.Module, graph: ExportedGraph, *, num_state: int) -> Tied:
    """Run all rules. `num_state` of the inputs, the last ones, come back as the last outputs and may be narrowed."""
    tied = Tied(graph, UnitTerms())
    _name_tensors(tied, model)
    found: list[tuple[Node, str, Dim]] = []
    states = graph.inputs[len(graph.inputs) - num_state :]
    for node in graph.nodes:
        if node.op == "placeholder":
            tied.values[node] = _placeholder(tied, node, is_state=node.name in states)
        elif node.op == "call_function":
            tied.values[node] = _call(tied, node, found)
        elif node.op == "get_attr":
            tied.values[node] = pinned_like(node.meta.get("val"))
    by_name = {node.name: node for node in graph.nodes}
    inputs = [tied.values[by_name[name]] for name in states]
    tied.states = tuple(value.dims for value in inputs if isinstance(value, Shape))
    _close(tied, num_state)
    modules = dict(model.named_modules())
    sizes_set = [((owners_of(node) or [""])[-1], name, dim) for node, name, dim in found]
    tied.sizes = [(path, name, dim) for path, name, dim in sizes_set if name in vars(modules[path])]
    return tied


def _name_tensors(tied: Tied, model: nn.Module) -> None:
    """Fresh units for each parameter and buffer; the same for those that are one tensor under two names."""
    value_of: dict[int, tuple[Dim, ...]] = {}
    for name, tensor in named_tensors(model).items():
        if id(tensor) not in value_of:
            value_of[id(tensor)] = tuple(tied.terms.fresh(size) for size in tensor.shape)
        tied.named[name] = value_of[id(tensor)]


def _placeholder(tied: Tied, node: Node, *, is_state: bool) -> Value:
    if node.name in tied.graph.named:
        return Shape(tied.named[tied.graph.named[node.name]])
    sizes = sizes_of(node.meta.get("val"))
    return Shape(tuple(tied.terms.fresh(size) if is_state else pinned(size) for size in sizes))


def _call(tied: Tied, node: Node, sizes: list[tuple[Node, str, Dim]]) -> Value:
    if node.target is operator.getitem:
        of, place = node.args
        assert isinstance(of, Node) and isinstance(place, int)
        parts = tied.values[of]
        return parts[place] if isinstance(parts, list) else pinned_like(node.meta.get("val"))
    op = node.target
    name = op._schema.name.removeprefix("aten::") if isinstance(op, torch._ops.OpOverload) else str(op)
    where = f"{name} at {line_of(node)}" if line_of(node) else name
    tied.terms.now = where
    call = AtenCall(tied.terms, node, name, _arguments(tied, node), sizes)
    if not any(shape.dims for shape in shapes_in(call.args)) and name not in RULES:
        return pinned_like(node.meta.get("val"))
    if any(check in name for check in _CHECKS):
        return None
    if name in RULES:
        found = RULES[name](call)
    elif torch.Tag.pointwise in getattr(op, "tags", ()):
        found = shapes.pointwise(call)
    else:
        found = call.pin_all(f"no rule for {where}")
    return found if _fits(found, node.meta.get("val")) else call.pin_all(f"the rule of {where} does not fit this call")


def _arguments(tied: Tied, node: Node) -> dict[str, Any]:
    """By the names of the schema, defaults filled in."""

    def value_of(value: object) -> Any:
        if isinstance(value, Node):
            return tied.values.get(value)
        return [value_of(part) for part in value] if isinstance(value, (list, tuple)) else value

    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {str(i): value_of(value) for i, value in enumerate(node.args)}
    named = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    named |= {a.name: value_of(value) for a, value in zip(schema.arguments, node.args, strict=False)}
    return named | {name: value_of(value) for name, value in node.kwargs.items()}


def _fits(value: Value, real: object) -> bool:
    """Has a rule given as many units as there are?"""
    if isinstance(value, Shape):
        return value.sizes == sizes_of(real)
    if isinstance(value, list) and isinstance(real, (list, tuple)):
        return len(value) == len(real) and all(_fits(v, r) for v, r in zip(value, real, strict=True))
    return value is None and not isinstance(real, Tensor)


def _close(tied: Tied, num_state: int) -> None:
    """What the caller sees keeps its size; a carried state comes back as it went in."""
    terms, outputs = tied.terms, tied.graph.outputs
    num_free = len(outputs) - num_state
    for i, node in enumerate(outputs):
        value = tied.values.get(node) if node is not None else None
        if not isinstance(value, Shape):
            continue
        terms.now = "a carried state"
        for place, dim in enumerate(value.dims):
            if i < num_free:
                terms.pin(dim, "the size of an output")
            else:
                terms.tie(tied.states[i - num_free][place], dim)

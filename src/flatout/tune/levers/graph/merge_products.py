"""Linear layers that take the same input are computed by one product.

What        `self.q(x)`, `self.k(x)`, `self.v(x)` of a function become one `F.linear(x, torch.cat(weights), torch.cat(biases))`,
            split into theirs; modules and state dict stay.
Guarantee   BOUNDED: the same sums in another order.
Refuses     Layers that are not nn.Linear as the class shows, or of which some have a bias and some have none; small savings,
            which putting the weights together in every call would eat up.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import libcst as cst
import msgspec

from flatout.core.errors import EditError
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Parameters, Refusal
from flatout.machine.cost.accounting import milliseconds
from flatout.tune.rewrite.flow import Expression, Flow, bound_in, functional, has_bias, read_in, rewritten
from flatout.tune.rewrite.source import fresh_name, local_proposals, statements, with_changes

_ELEMENT_BYTES: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_PASSES: Final = 4
"""How often the weights are read or written to put them together (one each) and to take their gradients apart (one each)."""
_CALLS: Final = 4
"""Operators that do so: the weights and the biases put together, forward and backward."""


class LinearLayer(NamedTuple):
    """A linear layer that is called: its name, the call, and what the constructor got for its width and its bias."""

    name: str
    call: Expression
    width: str
    has_bias: bool


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """Propose it where layers with one input were found, and stacking their weights costs less than it saves."""
    for proposal in local_proposals(evidence, findings, edit, else_because="no linear layers share an input"):
        finding = next(f for f in findings if proposal.where in (f.where, *f.also))
        cost_s = _stacking_s(evidence, finding)
        low, high = proposal.saved_s[0] - 1.5 * cost_s, proposal.saved_s[1] - 0.5 * cost_s
        if high <= 0:
            saved_s = proposal.saved_s[1]
            why = f"putting the weights together takes {milliseconds(cost_s)} a step, one product saves {milliseconds(saved_s)}"
            yield Refusal(because=why)
        else:
            yield msgspec.structs.replace(proposal, saved_s=(max(0.0, low), high))


def _stacking_s(evidence: Evidence, finding: Finding) -> float:
    """Seconds of a step for putting weights together and their gradients apart."""
    products = [evidence.operators[i] for i in finding.operators]
    forward = [o for o in products if o.phase != "backward" and o.inputs]
    num_bytes = sum(
        o.num_calls * o.inputs[-1].num_elements * _ELEMENT_BYTES.get(o.inputs[-1].dtype, 4) for o in forward
    )
    num_merged = max((o.num_calls for o in forward), default=0.0)
    if evidence.machine is None:
        return 0.0
    rate = evidence.machine.copy_bytes_per_s or 0.0
    moved_s = _PASSES * num_bytes / rate if rate else 0.0
    return moved_s + _CALLS * num_merged * (evidence.machine.dispatch_grad_s or 0.0)


def edit(text: str, parameters: Parameters) -> str:
    """Put one product in place of the calls of several layers.

    Raises EditError when the layers cannot be seen to be linear, or their input changes in between.
    """
    flow = Flow(text, parameters)
    layers = _layers(flow)
    module, prefix = functional(flow.module)
    first = layers[0].call.at
    names, dropped = _names(flow, layers)
    block = [s for s in flow.place.block if isinstance(s, cst.BaseStatement)]
    changes: dict[cst.CSTNode, Sequence[cst.BaseStatement]] = {}
    for index in {layer.call.at for layer in layers}:
        calls = [(linear.call, name) for linear, name in zip(layers, names, strict=True) if linear.call.at == index]
        changes[block[index]] = [] if index in dropped else [cst.parse_statement(rewritten(flow, calls))]
    merged = statements(_merged(flow, layers, names, prefix))[0]
    if "torch" not in flow.full_name(ast.Name(id="torch", ctx=ast.Load())):
        raise EditError("'torch' is not imported under its name")
    lines = getattr(block[first], "leading_lines", ())
    changes[block[first]] = [merged.with_changes(leading_lines=lines), *changes[block[first]]]
    changed = with_changes(flow.module, changes)
    return (functional(changed)[0] if module is not flow.module else changed).code


def _layers(flow: Flow) -> list[LinearLayer]:
    """Linear layers called on the same tensor as one in the statement of the place, in the order of their calls."""
    found = [layer for index in range(len(flow.trees)) for layer in _called(flow, index)]
    mine = next((layer for layer in found if layer.call.at == flow.at), None)
    if mine is None:
        raise EditError("no call of an nn.Linear that the class makes was recognised in this line")
    alike = [layer for layer in found if _is_alike(flow, layer, mine)]
    if len(alike) < 2:
        raise EditError(f"no other linear layer gets the input of '{mine.name}' in this block")
    if len({layer.has_bias for layer in alike}) > 1:
        raise EditError("some of the layers have a bias and some have none")
    if len({layer.name for layer in alike}) < len(alike):
        raise EditError("a layer is called twice on the same input")
    return sorted(alike, key=lambda layer: (layer.call.at, layer.call.node.lineno, layer.call.node.col_offset))


def _called(flow: Flow, index: int) -> Iterator[LinearLayer]:
    tree = flow.trees[index]
    if not isinstance(tree, (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return)):
        return
    for node in ast.walk(tree):
        constructor = flow.linear(node)
        if constructor is None or len(constructor.args) < 2:
            continue
        with suppress(EditError):  # whether it has a bias depends on something
            layer_has_bias = has_bias(constructor)
            assert isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            yield LinearLayer(node.func.attr, Expression(node, index), ast.unparse(constructor.args[1]), layer_has_bias)


def _is_alike(flow: Flow, one: LinearLayer, two: LinearLayer) -> bool:
    """Whether both get the same tensor, named in the same way."""
    a, b = (layer.call.node for layer in (one, two))
    assert isinstance(a, ast.Call) and isinstance(b, ast.Call)
    is_name = isinstance(a.args[0], (ast.Name, ast.Attribute))
    return is_name and flow.same(Expression(a.args[0], one.call.at), Expression(b.args[0], two.call.at))


def _names(flow: Flow, layers: Sequence[LinearLayer]) -> tuple[list[str], set[int]]:
    """What each layer's part is called, and the statements that only gave it that name."""
    names: list[str] = []
    dropped: set[int] = set()
    first = layers[0].call.at
    for layer in layers:
        tree = flow.trees[layer.call.at]
        target = tree.targets[0] if isinstance(tree, ast.Assign) and len(tree.targets) == 1 else None
        name = target.id if isinstance(target, ast.Name) else ""
        between = flow.trees[first : layer.call.at]
        is_free = name and name not in names and not any(name in read_in(t) | bound_in(t) for t in between)
        own = tree.value if is_free and isinstance(tree, ast.Assign) else None
        if is_free and own is layer.call.node:
            dropped.add(layer.call.at)
        if not is_free or (own is not None and name in read_in(own)):
            name = fresh_name(flow.module, layer.name)
        names.append(name)
    if len(set(names)) < len(names):
        raise EditError("two layers would get one name")
    return names, dropped


def _merged(flow: Flow, layers: Sequence[LinearLayer], names: Sequence[str], prefix: str) -> str:
    """The statement of the one product."""
    call = layers[0].call
    assert isinstance(call.node, ast.Call)
    x = flow.text(Expression(call.node.args[0], call.at))
    weights = ", ".join(f"self.{layer.name}.weight" for layer in layers)
    biases = ", ".join(f"self.{layer.name}.bias" for layer in layers)
    arguments = [x, f"torch.cat([{weights}])", *([f"torch.cat([{biases}])"] if layers[0].has_bias else [])]
    is_even = len({layer.width for layer in layers}) == 1
    sizes = ", ".join(f"self.{layer.name}.out_features" for layer in layers)
    parts = f".chunk({len(layers)}, dim=-1)" if is_even else f".split([{sizes}], dim=-1)"
    inside = "".join(f"    {a},\n" for a in arguments)
    return f"{', '.join(names)} = {prefix}.linear(\n{inside}){parts}\n"


LEVER = lever(__name__, propose, edit=edit, is_local=True, title="One product for layers of one input")

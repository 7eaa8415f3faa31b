"""Modules of one structure that are called one by one become one call over their stacked parameters.

What        `[head(x) for head in self.heads]`, with `zip`, `enumerate` or `range(len(self.heads))`, or a loop that appends or
            adds: parameters (and buffers) of the modules are stacked, each time anew so that the modules stay as they are, and
            torch.vmap maps torch.func.functional_call over them.
Guarantee   BOUNDED: batched products sum in another order.
Refuses     Modules in a chain, modules that are used for more than a call, batch norm (its statistics would not be kept), and
            loops that graph.vectorise would refuse too.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError
from flatout.core.records.lever import Parameters
from flatout.tune.levers.proposals import source_lever
from flatout.tune.rewrite.iterations import Iteration, iteration_of, joined
from flatout.tune.rewrite.loop_lifting import LiftedValue
from flatout.tune.rewrite.source import code_of, expression, fresh_name, names_in, nodes_of, with_changes
from flatout.tune.rewrite.vmap_loops import Block, Loop, LoopInputs, batched, findings_in_loops

_SAVED: Final = (0.05, 0.6)
"""Of what the rule promises: it tries weights that are stacked once. Here they are stacked in each step, and each still has its
own gradient and update; 64 networks of two layers took 0.23 of it, on one core."""
_PIECES: Final = ("split", "chunk", "tensor_split")


def edit(text: str, parameters: Parameters) -> str:
    """Call all modules at once, with their weights stacked.

    Raises EditError where that is not certain.
    """
    if "BatchNorm" in text:
        raise EditError("the statistics of a batch norm would not be kept")
    return batched(text, parameters, _opened)


def _opened(loop: Loop) -> LoopInputs:
    """The states of the modules, beside what else an iteration is given."""
    target, over, block = _by_name(loop)
    pairs = _pairs(target, over)
    called = [(n, x) for n, x in pairs if isinstance(n, cst.Name) and _is_called(block, n.value)]
    others = [(n, x) for n, x in pairs if not any(n is c for c, _ in called)]
    if not called:
        raise EditError("no module is called in the loop")
    before: list[cst.BaseStatement] = []
    operands: list[Iteration] = []
    for name, modules in called:
        if not isinstance(modules, (cst.Name, cst.Attribute)):
            raise EditError(f"'{code_of(modules)}' is not known to be a list of modules")
        setup, state, one = _stacked(loop, code_of(name), modules, is_one_of_many=len(called) > 1)
        before += setup
        operands.append(one)
        changed = partial(_with_state, modules=modules, torch=loop.torch, state=state)
        block = [
            with_changes(s, dict.fromkeys(m.findall(s, m.Call(func=m.Name(code_of(name)))), changed)) for s in block
        ]
        if any(code_of(name) in names_in(s) for s in block):
            raise EditError(f"'{code_of(name)}' is used for more than a call")
    operands += [iteration_of(n, _as_tensor(loop.torch, x), torch=loop.torch) for n, x in others]
    length = expression("len({x})", x=called[0][1])
    return LoopInputs(joined(operands)._replace(length=length), block, before)


def _by_name(loop: Loop) -> tuple[cst.BaseExpression, cst.BaseExpression, Block]:
    """`for i in range(len(self.heads))` with `self.heads[i](x)` as `for i, head in enumerate(self.heads)`."""
    if not isinstance(loop.target, cst.Name) or not m.matches(loop.over, m.Call(func=m.Name("range"))):
        return loop.target, loop.over, loop.block
    counter = loop.target.value
    picked = m.Call(
        func=m.Subscript(value=m.Name() | m.Attribute(), slice=[m.SubscriptElement(m.Index(m.Name(counter)))])
    )
    calls = [c for s in loop.block for c in m.findall(s, picked)]
    owners = {code_of(c.func.value): c.func.value for c in calls}  # type: ignore[attr-defined]
    if len(owners) != 1:
        raise EditError("no module is called in the loop")
    [(code, owner)] = owners.items()
    name = fresh_name(loop.module, "module")
    block = [
        with_changes(s, {x: cst.Name(name) for x in nodes_of(cst.Subscript, s) if code_of(x) == f"{code}[{counter}]"})
        for s in loop.block
    ]
    over = expression("enumerate({x})", x=owner)
    return expression(f"({counter}, {name})"), over, block


def _pairs(target: cst.BaseExpression, over: cst.BaseExpression) -> list[tuple[cst.BaseExpression, cst.BaseExpression]]:
    """Each name of the loop and what it goes through; of `enumerate`, its counter goes through a range."""
    is_call = isinstance(over, cst.Call) and isinstance(over.func, cst.Name)
    kind = over.func.value if is_call else ""  # type: ignore[attr-defined]
    if kind not in ("enumerate", "zip"):
        return [(target, over)]
    assert isinstance(over, cst.Call)
    if any(a.star or a.keyword for a in over.args) or not isinstance(target, cst.Tuple):
        raise EditError(f"'{code_of(over)}' is not read")
    names = [e.value for e in target.elements]
    if kind == "enumerate" and len(over.args) == 1 and len(names) == 2:
        inner = _pairs(names[1], over.args[0].value)
        return [(names[0], expression("range(len({x}))", x=inner[0][1])), *inner]
    if kind == "zip" and len(names) == len(over.args):
        return [p for n, a in zip(names, over.args, strict=True) for p in _pairs(n, a.value)]
    raise EditError(f"'{code_of(over)}' is not read")


def _is_called(block: Block, name: str) -> bool:
    return any(m.findall(s, m.Call(func=m.Name(name))) for s in block)


def _stacked(
    loop: Loop, name: str, modules: cst.BaseExpression, *, is_one_of_many: bool
) -> tuple[list[cst.BaseStatement], str, Iteration]:
    """The lines that stack the states, the name of one state, and how it is given to an iteration."""
    before = f"{name}_" if is_one_of_many else ""
    state, states, stacked = (fresh_name(loop.module, f"{before}{w}") for w in ("state", "states", "stacked"))
    key = fresh_name(loop.module, "name")
    has_buffers = "register_buffer" in loop.module.code  # else the cheaper of the two is enough
    entries = f"{name}.state_dict(keep_vars=True)" if has_buffers else f"dict({name}.named_parameters())"
    lines: list[cst.BaseStatement] = [
        cst.parse_statement(line)
        for line in (
            f"{states} = [{entries} for {name} in {code_of(modules)}]\n",
            f"{stacked} = {{{key}: {loop.torch}.stack([{state}[{key}] for {state} in {states}]) for {key} in {states}[0]}}\n",
        )
    ]
    one = Iteration((state,), (cst.Name(stacked),), {state: LiftedValue(cst.Name(state), is_batched=True)})
    return lines, state, one


def _with_state(call: cst.Call, *, modules: cst.BaseExpression, torch: str, state: str) -> cst.BaseExpression:
    """A call of a module as a call of the first one with another's state."""
    if any(a.star for a in call.args):
        raise EditError(f"'{code_of(call)}' has more arguments than are written")
    plain = [code_of(a.value) for a in call.args if a.keyword is None]
    named = [f'"{code_of(a.keyword)}": {code_of(a.value)}' for a in call.args if a.keyword is not None]
    args = f"({plain[0]},)" if len(plain) == 1 else f"({', '.join(plain)})"
    options = f", {{{', '.join(named)}}}" if named else ""
    return cst.parse_expression(f"{torch}.func.functional_call({code_of(modules)}[0], {state}, {args}{options})")


def _as_tensor(torch: str, over: cst.BaseExpression) -> cst.BaseExpression:
    """What goes beside the modules as one tensor: pieces are stacked."""
    if isinstance(over, cst.Call):
        name = over.func.attr.value if isinstance(over.func, cst.Attribute) else ""
        return expression(f"{torch}.stack({{x}})", x=over) if name in _PIECES else over
    if isinstance(over, (cst.Name, cst.Attribute)):
        return expression(f"{torch}.stack(tuple({{x}}))", x=over)
    return over


LEVER = source_lever(
    __name__,
    edit,
    title="Equal modules called at once",
    else_because="no equal modules are called one by one",
    findings=findings_in_loops,
    loops=(True,),
    saved_fraction=_SAVED,
)

"""A copy of the state is written into the memory of the copy before it, instead of being made anew each time.

What        `good = copy.deepcopy(model.state_dict())` -> `good = copied(model.state_dict(), into=good)`; the same for
            `{k: v.clone() for k, v in model.state_dict().items()}`.
Guarantee   EXACT: the copy holds the same numbers.
Refuses     A copy that has another name too, that is put into a list or given to a function which may keep it: the one before
            may still be wanted. Copies of whole modules.
"""

from __future__ import annotations

from typing import Final

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError
from flatout.core.records.lever import Parameters
from flatout.tune.levers.proposals import source_lever
from flatout.tune.rewrite.enclosing_blocks import Parents, assignment, parents_of
from flatout.tune.rewrite.imports import call_name, with_import, without_unused_import
from flatout.tune.rewrite.source import SourcePlace, code_of, expression, find, with_expression

_SAVED: Final = (0.1, 0.9)
"""Shares of what the copies take: memory is read and written all the same, Python walks the nest once instead of three times."""
_READERS: Final = ("load_state_dict", "torch.save", "len", "print", "bool")
"""What may be given the copy: it reads it, and what it keeps of it the next copy leaves alone (see `copied`)."""


def edit(text: str, parameters: Parameters) -> str:
    """Write the new copy into the memory of the one before.

    Raises EditError where something else may still look at the one before.
    """
    place = find(text, parameters)
    pair = assignment(place.statement)
    if pair is None or not isinstance(pair[0], cst.Name):
        raise EditError("the copy is not assigned to a plain name")
    target, value = cst.ensure_type(pair[0], cst.Name), pair[1]
    state = _copied_state(place.module, value)
    _check(place, target.value)
    new = expression("copied({state}, into={target})", state=state, target=target)
    module = with_expression(place.module, value, new)
    module = with_import(module, "flatout", "copied")
    return without_unused_import(without_unused_import(module, "copy"), "copy", "deepcopy").code


def _copied_state(module: cst.Module, value: cst.BaseExpression) -> cst.BaseExpression:
    """What is copied: dicts of tensors and lists.

    Raises EditError when it is something else, or may be.
    """
    if isinstance(value, cst.Call) and call_name(module, value.func) == "copy.deepcopy" and len(value.args) == 1:
        state = value.args[0].value
    elif isinstance(value, cst.DictComp):
        state = _cloned(value)
    else:
        raise EditError(f"'{code_of(value)}' is no copy of a state")
    if not _is_state(state):
        raise EditError(f"'{code_of(state)}' is not plainly a state_dict")
    return state


def _cloned(comprehension: cst.DictComp) -> cst.BaseExpression:
    """S of `{k: v.clone() for k, v in S.items()}`."""
    loop = comprehension.for_in
    key = m.Name(code_of(comprehension.key))
    value: cst.BaseExpression = comprehension.value
    while m.matches(value, m.Call(func=m.Attribute(attr=m.Name("detach") | m.Name("clone")), args=[])):
        value = cst.ensure_type(cst.ensure_type(value, cst.Call).func, cst.Attribute).value
    clones = "clone()" in code_of(comprehension.value)
    items = m.matches(loop.iter, m.Call(func=m.Attribute(attr=m.Name("items")), args=[]))
    pair = m.Tuple(elements=[m.Element(key), m.Element(m.Name(code_of(value)))])
    if not (clones and items and m.matches(loop.target, pair)) or loop.ifs or loop.inner_for_in:
        raise EditError(f"'{code_of(comprehension)}' is no plain copy of a state")
    return cst.ensure_type(cst.ensure_type(loop.iter, cst.Call).func, cst.Attribute).value


def _is_state(node: cst.CSTNode) -> bool:
    if isinstance(node, cst.Dict):
        return all(isinstance(e, cst.DictElement) and (_is_state(e.value) or _is_plain(e.value)) for e in node.elements)
    if isinstance(node, (cst.List, cst.Tuple)):
        return isinstance(node, cst.List) and all(_is_state(e.value) for e in node.elements)
    return m.matches(node, m.Call(func=m.Attribute(attr=m.Name("state_dict")), args=[]))


def _is_plain(node: cst.CSTNode) -> bool:
    """A number or name beside the states: what is no tensor is copied as it was."""
    return isinstance(node, (cst.Name, cst.Integer, cst.Float, cst.SimpleString))


def _check(place: SourcePlace, name: str) -> None:
    """Check that the copy before is bound, and that only readers used it."""
    scope = place.function or place.module
    parents = parents_of(place.module)
    bound_before = False
    for node in m.findall(scope, m.Name(name)):
        above = parents[node]
        if isinstance(above, cst.Attribute) and above.attr is node:
            continue
        if isinstance(above, cst.AssignTarget):
            statement = parents[above]
            value = cst.ensure_type(statement, cst.Assign).value
            own = assignment(place.statement)
            if own is not None and value is own[1]:
                continue
            if not m.matches(value, m.Name("None")):
                raise EditError(f"'{name}' is assigned elsewhere, too")
            bound_before = True
        elif isinstance(above, (cst.Global, cst.NameItem, cst.Param)) or not _is_read(parents, node):
            raise EditError(f"'{name}' is given to '{code_of(above)}', which may store it")
    if not bound_before:
        raise EditError(f"'{name}' is not None before the first copy")
    inner = m.findall(scope, m.FunctionDef() | m.Lambda())
    if any(f is not scope and m.findall(f, m.Name(name)) for f in inner):
        raise EditError(f"'{name}' is read in a function of its own")


def _is_read(parents: Parents, node: cst.CSTNode) -> bool:
    """Whether an expression of the copy is only looked at where it stands, or the last thing to be done with it."""
    above = parents[node]
    if isinstance(above, cst.Subscript) and above.value is node:
        return _is_read(parents, above)
    if isinstance(above, cst.Comparison):
        return all(isinstance(t.operator, (cst.Is, cst.IsNot)) for t in above.comparisons)
    if isinstance(above, cst.BooleanOperation):
        return _is_read(parents, above)
    if isinstance(above, (cst.If, cst.While, cst.UnaryOperation, cst.Return)):
        return True
    if isinstance(above, cst.Arg):
        called = code_of(cst.ensure_type(parents[above], cst.Call).func)
        return called in _READERS or called.endswith(".load_state_dict")
    return False


LEVER = source_lever(
    __name__,
    edit,
    title="Copies of the state in the same memory",
    else_because="no state is copied again and again",
    saved_fraction=_SAVED,
)

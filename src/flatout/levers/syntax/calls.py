"""Calls in a text, found by the full names of what they call, and given other arguments. Formatting of all else is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import libcst as cst
from libcst import matchers as m

from flatout.errors import EditError
from flatout.levers.syntax.source import call_name, code_of, with_import

TRUE: Final = cst.Name("True")

Change = Callable[[cst.Call], cst.Call]


def calls_of(module: cst.Module, names: Sequence[str]) -> list[cst.Call]:
    """All calls of these functions or classes, told by their full names ('torch.optim.Adam')."""
    return [call for call in _calls(module) if call_name(module, call.func) in names]


def calls_ending(node: cst.CSTNode, name: str) -> list[cst.Call]:
    """All calls in a node of a method of this name."""
    return [c for c in _calls(node) if isinstance(c.func, cst.Attribute) and c.func.attr.value == name]


def _calls(node: cst.CSTNode) -> Iterator[cst.Call]:
    for call in m.findall(node, m.Call()):
        assert isinstance(call, cst.Call)
        yield call


def with_calls(module: cst.Module, calls: Sequence[cst.Call], change: Change) -> cst.Module:
    """The tree with these calls (told by identity) changed, also where one stands inside another."""
    return module.visit(_Changer(calls, change))


class _Changer(cst.CSTTransformer):
    def __init__(self, calls: Sequence[cst.Call], change: Change) -> None:
        super().__init__()
        self._calls = {id(call): call for call in calls}
        self._change = change

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        return self._change(updated_node) if id(original_node) in self._calls else updated_node


def argument(call: cst.Call, keyword: str, position: int | None = None) -> cst.BaseExpression | None:
    """What a call gives for a parameter, by keyword or at a position; None when it gives nothing.

    Raises EditError when it gives arguments that cannot be read from the text (`*args`, `**options`).
    """
    starred = next((a for a in call.args if a.star), None)
    if starred is not None:
        raise EditError(f"'{starred.star}{code_of(starred.value)}' may hold '{keyword}'")
    for index, given in enumerate(call.args):
        if given.keyword.value == keyword if given.keyword is not None else index == position:
            return given.value
    return None


def with_argument(call: cst.Call, keyword: str, value: cst.BaseExpression) -> cst.Call:
    """The call with a keyword argument: in its place when it is there, else at the end, laid out as the last one is."""
    args = list(call.args)
    for index, given in enumerate(args):
        if given.keyword is not None and given.keyword.value == keyword:
            args[index] = given.with_changes(value=value)
            return call.with_changes(args=args)
    plain = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    new = cst.Arg(value, keyword=cst.Name(keyword), equal=plain)
    if args:
        last = args[-1]
        before = args[-2].comma if len(args) > 1 else call.whitespace_before_args
        space = before.whitespace_after if isinstance(before, cst.Comma) else before
        if not isinstance(space, cst.ParenthesizedWhitespace):
            space = cst.SimpleWhitespace(" ")
        new = new.with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
        args[-1] = last.with_changes(
            comma=cst.Comma(whitespace_after=space), whitespace_after_arg=cst.SimpleWhitespace("")
        )
    return call.with_changes(args=[*args, new])


def without_argument(call: cst.Call, keyword: str, position: int | None = None) -> cst.Call:
    """The call without what it gives for a parameter."""
    args = [
        given
        for index, given in enumerate(call.args)
        if not (given.keyword.value == keyword if given.keyword is not None else index == position)
    ]
    if args and args[-1] is not call.args[-1]:
        args[-1] = args[-1].with_changes(comma=call.args[-1].comma)
    return call.with_changes(args=args)


def is_named(node: cst.CSTNode | None, *names: str) -> bool:
    """Whether an expression is one of these names ('True', 'None')."""
    return isinstance(node, cst.Name) and node.value in names


def with_torch(module: cst.Module) -> tuple[cst.Module, str]:
    """The tree with torch imported, and what it is called there."""
    for node in m.findall(module, m.ImportAlias(name=m.Name("torch"))):
        assert isinstance(node, cst.ImportAlias)
        alias = node.evaluated_alias
        if call_name(module, cst.Name(alias or "torch")) == "torch":
            return module, alias or "torch"
    return with_import(module, "torch"), "torch"

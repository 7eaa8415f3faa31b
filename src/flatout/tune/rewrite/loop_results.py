"""The results of a loop's iterations as one tensor: assigned to where each iteration put its own, and to what reads it
there.

A list that is stacked, joined or summed becomes that tensor; one that something else may read stays a list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import libcst as cst

from flatout.core.errors import EditError
from flatout.tune.rewrite.bodies import Result
from flatout.tune.rewrite.enclosing_blocks import occurrences, scope_of
from flatout.tune.rewrite.imports import call_name
from flatout.tune.rewrite.iterations import Iteration, initial
from flatout.tune.rewrite.operands import atom
from flatout.tune.rewrite.source import (
    SourcePlace,
    assigned_in,
    code_of,
    expression,
    fresh_name,
    nodes_of,
    statements,
    with_expression,
)

Changes: TypeAlias = "dict[cst.CSTNode, Sequence[cst.BaseStatement]]"


def start_of(place: SourcePlace, result: Result) -> cst.BaseStatement | None:
    """The statement before the loop that makes a name an empty list or 0, and is no longer needed."""
    found = initial(place, code_of(result.target)) if isinstance(result.target, cst.Name) else None
    starts = {"append": ("[]", "list()"), "add": ("0", "0.0", "0.")}.get(result.how, ())
    return found[0] if found is not None and code_of(found[1]) in starts else None


def handed_over(
    place: SourcePlace,
    iteration: Iteration,
    result: Result,
    argument: Sequence[cst.BaseExpression],
    changes: Changes,
    torch: str,
) -> list[cst.BaseStatement]:
    """Statements that put the results of all iterations where each put its own."""
    how, first = result.how, argument[0]
    if how == "append":
        if len(argument) == 2:
            first = expression("{x}[{c}]", x=first, c=argument[1])
        if not isinstance(result.target, cst.Name):
            return _extended(result.target, first, is_number=result.value.is_number)
        return listed(place, result.target.value, first, is_number=result.value.is_number, changes=changes)
    if how in ("add", "subtract"):
        return _summed(place, result, first, changes)
    if how == "put":
        return _put(result, first, iteration)
    if how == "count":
        return _count(result, argument, torch, place)
    if how == "scatter":
        return _scattered(result, argument)
    if len(argument) == 2:
        raise EditError(f"'{code_of(result.target)}' is the {how} of some iterations")
    best = expression(f"{{x}}.{how}()" + (".item()" if result.value.is_number else ""), x=first)
    if not result.value.is_number:
        raise EditError(f"'{code_of(result.target)}' is compared as a tensor")
    return statements(f"{{t}} = {how}({{t}}, {{x}})\n", t=result.target, x=best)


def _summed(
    place: SourcePlace, result: Result, argument: cst.BaseExpression, changes: Changes
) -> list[cst.BaseStatement]:
    is_count = result.condition is not None and not result.value.is_batched
    is_number = is_count or result.value.is_number
    total = expression("{x}.sum().item()" if is_number else "{x}.sum(dim=0)", x=argument)
    if isinstance(result.target, cst.Name) and result.how == "add":
        start = start_of(place, result)
        if start is not None:
            changes[start] = ()
            return statements("{t} = {x}\n", t=result.target, x=total)
    sign = "+" if result.how == "add" else "-"
    return statements(f"{{t}} {sign}= {{x}}\n", t=result.target, x=total)


def _put(result: Result, argument: cst.BaseExpression, iteration: Iteration) -> list[cst.BaseStatement]:
    target, length = result.target, iteration.length
    assert isinstance(target, cst.Subscript) and length is not None
    owner = code_of(target.value)
    end = "" if code_of(length) in (f"len({owner})", f"{owner}.shape[0]", f"{owner}.size(0)") else code_of(length)
    at = next(n for n, e in enumerate(target.slice) if code_of(e.slice) == iteration.counter)
    parts = [f":{end}" if n == at else code_of(e.slice) for n, e in enumerate(target.slice)]
    moved = argument if at == 0 else expression("{x}.movedim(0, 1)", x=argument)
    return statements(f"{owner}[{', '.join(parts)}] = {{x}}\n", x=moved)


def _count(
    result: Result, argument: Sequence[cst.BaseExpression], torch: str, place: SourcePlace
) -> list[cst.BaseStatement]:
    keys = argument[0] if len(argument) == 1 else expression("{x}[{c}]", x=argument[0], c=argument[1])
    key, num = fresh_name(place.module, "key"), fresh_name(place.module, "num")
    if place.function is None:
        raise EditError("a loop more at the top of the file would leave its names there")
    each = expression(f"zip(*(t.tolist() for t in {torch}.unique({{x}}, return_counts=True)))", x=keys)
    return statements(f"for {key}, {num} in {{each}}:\n    {{t}}[{key}] += {num}\n", each=each, t=result.target)


def _scattered(result: Result, argument: Sequence[cst.BaseExpression]) -> list[cst.BaseStatement]:
    num = len(result.keys)
    keys = ", ".join(code_of(g) for g in argument[:num]) + ("," if num == 1 else "")
    target = code_of(result.target)
    value = code_of(argument[num]) if result.value.is_batched else f"{target}.new_tensor({code_of(result.value.node)})"
    return statements(f"{target}.index_put_(({keys}), {value}, accumulate=True)\n")


def _extended(target: cst.BaseExpression, argument: cst.BaseExpression, *, is_number: bool) -> list[cst.BaseStatement]:
    tail = ".tolist()" if is_number else ""
    return statements(f"{{t}}.extend({{x}}{tail})\n", t=target, x=argument)


def listed(
    place: SourcePlace, name: str, argument: cst.BaseExpression, *, is_number: bool, changes: Changes
) -> list[cst.BaseStatement]:
    """Statements that assign a list's name: to one tensor where all its uses allow that, else to a list."""
    found = initial(place, name)
    if found is None or code_of(found[1]) not in ("[]", "list()"):
        return _extended(cst.Name(name), argument, is_number=is_number)
    changes[found[0]] = ()
    uses = uses_of(place, name, found[0], is_number=is_number)
    if uses is None:
        as_list = "{x}.tolist()" if is_number else "list({x})"
        argument = expression(as_list, x=atom(argument) if is_number else argument)
    replace_uses(place, uses or {}, changes)
    return statements("{n} = {x}\n", n=cst.Name(name), x=argument)


def replace_uses(place: SourcePlace, uses: Mapping[cst.CSTNode, cst.BaseExpression], changes: Changes) -> None:
    """Add changes that put an expression in place of each use of a list."""
    for old, new in uses.items():
        statement = next(s for s in place.block[place.index + 1 :] if any(n is old for n in nodes_of(cst.Call, s)))
        [now] = changes.get(statement, [statement])
        changes[statement] = [with_expression(now, old, new)]


def uses_of(
    place: SourcePlace, name: str, start: cst.CSTNode, *, is_number: bool
) -> Mapping[cst.CSTNode, cst.BaseExpression] | None:
    """Uses of the list after the loop, each as an expression of one tensor; None where something else may use it."""
    tail = place.block[place.index + 1 :]
    scope = scope_of(place.module, place.function)
    own = [start] if start is place.statement else [start, place.statement]
    num = sum(len(occurrences(n, name)) for n in (*own, *tail))
    if num != len(occurrences(scope, name)) or any(name in assigned_in(s) for s in tail):
        return None
    found: dict[cst.CSTNode, cst.BaseExpression] = {}
    num_observed = 0
    for node in (n for s in tail for n in nodes_of(cst.Call, s)):
        if not node.args or code_of(node.args[0].value) != name:
            continue
        new = as_tensor(place.module, node, name, is_number=is_number)
        if new is None:
            return None
        if new is not node:
            found[node] = new
        num_observed += 1
    return found if num_observed == sum(len(occurrences(s, name)) for s in tail) else None


def as_tensor(module: cst.Module, call: cst.Call, name: str, *, is_number: bool) -> cst.BaseExpression | None:
    """A function of the list as an expression of the tensor; None where that is not known."""
    full = call_name(module, call.func) or code_of(call.func)
    x, item = name, ".item()" if is_number else ""
    if full == "len" and len(call.args) == 1:
        return call
    if full in ("sum", "max", "min") and len(call.args) == 1:
        new = f"{x}.{full}(){item}" if is_number or full != "sum" else f"{x}.sum(dim=0)"
        return cst.parse_expression(new)
    if full in ("numpy.mean", "statistics.mean", "statistics.fmean") and len(call.args) == 1 and is_number:
        return cst.parse_expression(f"{x}.double().mean().item()")
    if full == "torch.tensor" and len(call.args) == 1 and is_number:
        return cst.Name(x)
    if full not in ("torch.stack", "torch.cat", "torch.concat") or is_number or len(call.args) > 2:
        return None
    dim = "0"
    if len(call.args) == 2:
        argument = call.args[1]
        if argument.keyword is not None and argument.keyword.value not in ("dim", "axis"):
            return None
        dim = code_of(argument.value)
    if not dim.lstrip("-").isdecimal():
        return None
    if full == "torch.stack":
        return cst.Name(x) if dim == "0" else cst.parse_expression(f"{x}.movedim(0, {dim})")
    if dim == "0":
        return cst.parse_expression(f"{x}.flatten(0, 1)")
    if dim == "-1":
        return cst.parse_expression(f"{x}.movedim(0, -2).flatten(-2)")
    return cst.parse_expression(f"{x}.movedim(0, {dim}).flatten({dim}, {int(dim) + 1})") if int(dim) > 0 else None

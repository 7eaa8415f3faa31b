"""What leaves the iterations of a loop, as one tensor for all of them: put where each put its own, and what reads it there.

A list that is stacked, joined or summed becomes that tensor; one that something else may read stays a list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import libcst as cst
from libcst import matchers as m

from flatout.errors import EditError
from flatout.levers.syntax.bodies import Result
from flatout.levers.syntax.imports import call_name
from flatout.levers.syntax.iterations import Iteration, initial
from flatout.levers.syntax.operands import atom
from flatout.levers.syntax.source import (
    Place,
    assigned_in,
    code_of,
    expression,
    fresh_name,
    statements,
    with_expression,
)
from flatout.levers.syntax.surroundings import occurrences, scope_of

Changes = dict[cst.CSTNode, Sequence[cst.BaseStatement]]


def start_of(place: Place, result: Result) -> cst.BaseStatement | None:
    """The empty list or the 0 that a name was before the loop, which then need not be."""
    found = initial(place, code_of(result.target)) if isinstance(result.target, cst.Name) else None
    starts = {"append": ("[]", "list()"), "add": ("0", "0.0", "0.")}.get(result.how, ())
    return found[0] if found is not None and code_of(found[1]) in starts else None


def handed_over(
    place: Place,
    iteration: Iteration,
    result: Result,
    given: Sequence[cst.BaseExpression],
    changes: Changes,
    torch: str,
) -> list[cst.BaseStatement]:
    """How what all iterations gave goes to where each put its own."""
    how, first = result.how, given[0]
    if how == "append":
        if len(given) == 2:
            first = expression("{x}[{c}]", x=first, c=given[1])
        if not isinstance(result.target, cst.Name):
            return _extended(result.target, first, is_number=result.value.is_number)
        return listed(place, result.target.value, first, is_number=result.value.is_number, changes=changes, torch=torch)
    if how in ("add", "subtract"):
        return _summed(place, result, first, changes)
    if how == "put":
        return _put(result, first, iteration)
    if how == "count":
        return _count(result, given, torch, place)
    if how == "scatter":
        return _scattered(result, given)
    if len(given) == 2:
        raise EditError(f"'{code_of(result.target)}' is the {how} of some iterations")
    best = expression(f"{{x}}.{how}()" + (".item()" if result.value.is_number else ""), x=first)
    if not result.value.is_number:
        raise EditError(f"'{code_of(result.target)}' is compared as a tensor")
    return statements(f"{{t}} = {how}({{t}}, {{x}})\n", t=result.target, x=best)


def _summed(place: Place, result: Result, given: cst.BaseExpression, changes: Changes) -> list[cst.BaseStatement]:
    is_count = result.condition is not None and not result.value.is_batched
    is_number = is_count or result.value.is_number
    total = expression("{x}.sum().item()" if is_number else "{x}.sum(dim=0)", x=given)
    if isinstance(result.target, cst.Name) and result.how == "add":
        start = start_of(place, result)
        if start is not None:
            changes[start] = ()
            return statements("{t} = {x}\n", t=result.target, x=total)
    sign = "+" if result.how == "add" else "-"
    return statements(f"{{t}} {sign}= {{x}}\n", t=result.target, x=total)


def _put(result: Result, given: cst.BaseExpression, iteration: Iteration) -> list[cst.BaseStatement]:
    target, length = result.target, iteration.length
    assert isinstance(target, cst.Subscript) and length is not None
    owner = code_of(target.value)
    end = "" if code_of(length) in (f"len({owner})", f"{owner}.shape[0]", f"{owner}.size(0)") else code_of(length)
    at = next(n for n, e in enumerate(target.slice) if code_of(e.slice) == iteration.counter)
    parts = [f":{end}" if n == at else code_of(e.slice) for n, e in enumerate(target.slice)]
    moved = given if at == 0 else expression("{x}.movedim(0, 1)", x=given)
    return statements(f"{owner}[{', '.join(parts)}] = {{x}}\n", x=moved)


def _count(result: Result, given: Sequence[cst.BaseExpression], torch: str, place: Place) -> list[cst.BaseStatement]:
    keys = given[0] if len(given) == 1 else expression("{x}[{c}]", x=given[0], c=given[1])
    key, num = fresh_name(place.module, "key"), fresh_name(place.module, "num")
    if place.function is None:
        raise EditError("a loop more at the top of the file would leave its names there")
    each = expression(f"zip(*(t.tolist() for t in {torch}.unique({{x}}, return_counts=True)))", x=keys)
    return statements(f"for {key}, {num} in {{each}}:\n    {{t}}[{key}] += {num}\n", each=each, t=result.target)


def _scattered(result: Result, given: Sequence[cst.BaseExpression]) -> list[cst.BaseStatement]:
    num = len(result.keys)
    keys = ", ".join(code_of(g) for g in given[:num]) + ("," if num == 1 else "")
    target = code_of(result.target)
    value = code_of(given[num]) if result.value.is_batched else f"{target}.new_tensor({code_of(result.value.node)})"
    return statements(f"{target}.index_put_(({keys}), {value}, accumulate=True)\n")


def _extended(target: cst.BaseExpression, given: cst.BaseExpression, *, is_number: bool) -> list[cst.BaseStatement]:
    tail = ".tolist()" if is_number else ""
    return statements(f"{{t}}.extend({{x}}{tail})\n", t=target, x=given)


def listed(
    place: Place, name: str, given: cst.BaseExpression, *, is_number: bool, changes: Changes, torch: str
) -> list[cst.BaseStatement]:
    """The list as one tensor where that is what it is made for; else as a list."""
    found = initial(place, name)
    if found is None or code_of(found[1]) not in ("[]", "list()"):
        return _extended(cst.Name(name), given, is_number=is_number)
    changes[found[0]] = ()
    uses = uses_of(place, name, found[0], is_number=is_number)
    if uses is None:
        as_list = "{x}.tolist()" if is_number else "list({x})"
        given = expression(as_list, x=atom(given) if is_number else given)
    replace_uses(place, uses or {}, changes)
    return statements("{n} = {x}\n", n=cst.Name(name), x=given)


def replace_uses(place: Place, uses: Mapping[cst.CSTNode, cst.BaseExpression], changes: Changes) -> None:
    for old, new in uses.items():
        statement = next(s for s in place.block[place.index + 1 :] if _holds(s, old))
        assert isinstance(statement, cst.BaseStatement)
        [now] = changes.get(statement, [statement])
        changes[statement] = [with_expression(now, old, new)]


def uses_of(
    place: Place, name: str, start: cst.CSTNode, *, is_number: bool
) -> Mapping[cst.CSTNode, cst.BaseExpression] | None:
    """What reads the list after the loop, and how that reads one tensor; None where something else may read it."""
    tail = place.block[place.index + 1 :]
    scope = scope_of(place.module, place.function)
    own = [start] if start is place.statement else [start, place.statement]
    num = sum(len(occurrences(n, name)) for n in (*own, *tail))
    if num != len(occurrences(scope, name)) or any(name in assigned_in(s) for s in tail):
        return None
    found: dict[cst.CSTNode, cst.BaseExpression] = {}
    num_seen = 0
    for node in (n for s in tail for n in m.findall(s, m.Call())):
        assert isinstance(node, cst.Call)
        if not node.args or code_of(node.args[0].value) != name:
            continue
        new = as_tensor(place.module, node, name, is_number=is_number)
        if new is None:
            return None
        if new is not node:
            found[node] = new
        num_seen += 1
    return found if num_seen == sum(len(occurrences(s, name)) for s in tail) else None


def as_tensor(module: cst.Module, call: cst.Call, name: str, *, is_number: bool) -> cst.BaseExpression | None:
    """What a function of the list is of the tensor; None where that is not known."""
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
    if full not in ("torch.stack", "torch.cat", "torch.concat", "torch.vstack") or is_number or len(call.args) > 2:
        return None
    dim = "0"
    if len(call.args) == 2:
        given = call.args[1]
        if given.keyword is not None and given.keyword.value not in ("dim", "axis"):
            return None
        dim = code_of(given.value)
    if not dim.lstrip("-").isdecimal():
        return None
    if full == "torch.stack":
        return cst.Name(x) if dim == "0" else cst.parse_expression(f"{x}.movedim(0, {dim})")
    if full == "torch.vstack":
        return None
    if dim == "0":
        return cst.parse_expression(f"{x}.flatten(0, 1)")
    if dim == "-1":
        return cst.parse_expression(f"{x}.movedim(0, -2).flatten(-2)")
    return cst.parse_expression(f"{x}.movedim(0, {dim}).flatten({dim}, {int(dim) + 1})") if int(dim) > 0 else None


def _holds(statement: cst.CSTNode, node: cst.CSTNode) -> bool:
    return any(n is node for n in m.findall(statement, m.Call()))

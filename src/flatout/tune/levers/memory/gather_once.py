"""What is gathered piece by piece in a loop is kept in a list and joined once after it.

What        `bank = torch.cat([bank, piece])` in a loop becomes `pieces.append(piece)`, and one torch.cat (or torch.stack) after
            the loop; reads of the last element become reads of the last piece. NumPy's concatenate and append likewise.
Guarantee   BOUNDED: the same values; gradients may be added in another order where the last piece is read.
Refuses     Tensors that are read whole in every iteration, written elsewhere, or seen by other functions; pieces that are changed
            in place after they were appended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError
from flatout.core.records.lever import Parameters
from flatout.tune.levers.proposals import source_lever
from flatout.tune.rewrite.enclosing_blocks import (
    Level,
    assignment,
    changed_in_place,
    closed_over,
    levels,
    occurrences,
    parents_of,
)
from flatout.tune.rewrite.imports import call_name
from flatout.tune.rewrite.source import (
    Change,
    assigned_in,
    code_of,
    expression,
    find,
    free_name,
    names_in,
    nodes_of,
    statements,
    with_changes,
)

_JOINS: Final = {
    "torch.cat": ("torch.stack", "dim"),
    "torch.concat": ("torch.stack", "dim"),
    "torch.concatenate": ("torch.stack", "dim"),
    "numpy.concatenate": ("numpy.stack", "axis"),
    "torch.hstack": None,
    "torch.vstack": None,
    "numpy.hstack": None,
    "numpy.vstack": None,
}
"""Functions that join a sequence of tensors; what stacks them instead, and the name of the dimension."""


class Concatenation(NamedTuple):
    """The statement `name = join([name, *pieces], ...)`: `before` when the pieces come first; `joined` is the call with
    the list left out.
    """

    name: str
    pieces: tuple[cst.BaseExpression, ...]
    before: bool
    call: cst.Call
    full: str
    dim: int | None


def edit(text: str, parameters: Parameters) -> str:
    """Collect the parts in a list, and join it after the loop.

    Raises EditError when that is not certain.
    """
    place = find(text, parameters)
    module = place.module
    growth = _growth(module, place.statement)
    parents = parents_of(module)
    around = tuple(levels(parents, place.statement))
    append, append_at, is_none = _branches(growth, around)
    loop, start = _loop(growth, around[append_at:])
    if growth.name in closed_over(module, place.function):
        raise EditError(f"'{growth.name}' is used by other functions")
    _check_handlers(growth, around, loop)
    _check_writes(growth, loop.statement, append)
    taken = names_in(place.function if place.function is not None else module)
    return _edited(module, taken, growth, loop, start, append, is_none).code


# -- what is there --------------------------------------------------------------------------------------------------------------


def _growth(module: cst.Module, statement: cst.CSTNode) -> Concatenation:
    """What the statement appends to what."""
    assigned = assignment(statement)
    if assigned is None or not isinstance(assigned[0], cst.Name):
        raise EditError("it is no plain assignment to a local name")
    name, value = assigned[0].value, assigned[1]
    if isinstance(value, cst.IfExp):
        value = _grown_branch(name, value)
    if not isinstance(value, cst.Call) or not value.args:
        raise EditError("it joins nothing")
    full = call_name(module, value.func)
    if full == "numpy.append":
        return _appended(name, value, full)
    first = value.args[0].value
    if full not in _JOINS or not isinstance(first, (cst.List, cst.Tuple)) or value.args[0].keyword is not None:
        raise EditError(f"'{code_of(value.func)}' is no join of a list")
    parts = [e.value for e in first.elements]
    if any(isinstance(e, cst.StarredElement) for e in first.elements) or len(parts) < 2:
        raise EditError("the list that is joined is not written out")
    own = [i for i, part in enumerate(parts) if isinstance(part, cst.Name) and part.value == name]
    if own not in ([0], [len(parts) - 1]):
        raise EditError(f"'{name}' is not at an end of what is joined")
    before = own == [len(parts) - 1]
    pieces = tuple(parts[:-1] if before else parts[1:])
    if before and len(pieces) > 1:
        raise EditError("several pieces are put before what there was")
    return Concatenation(name, pieces, before, value, full, _dim(value, _JOINS[full] is not None))


def _grown_branch(name: str, value: cst.IfExp) -> cst.BaseExpression:
    """The join in `join([x, p]) if x is not None else p` (or the other way round)."""
    test = code_of(value.test)
    if test == f"{name} is None":
        first, grown = value.body, value.orelse
    elif test in (f"{name} is not None",):
        first, grown = value.orelse, value.body
    else:
        raise EditError(f"what is joined depends on '{test}'")
    parts = m.findall(grown, m.List() | m.Tuple())
    if not parts or code_of(first) not in [code_of(e.value) for e in parts[0].elements]:  # type: ignore[attr-defined]
        raise EditError("the first piece is another than those that follow")
    return grown


def _appended(name: str, value: cst.Call, full: str) -> Concatenation:
    """A call np.append(name, piece[, axis]) as a concatenation."""
    if not 2 <= len(value.args) <= 3 or code_of(value.args[0].value) != name or value.args[0].keyword is not None:
        raise EditError(f"'{name}' is not what is appended to")
    axis = _dim(value.with_changes(args=(value.args[0], *value.args[2:])), True)
    return Concatenation(name, (value.args[1].value,), False, value, full, axis)


def _dim(call: cst.Call, has_dim: bool) -> int | None:
    """The dimension along which is joined; None when it is not a number that is written there."""
    rest = call.args[1:]
    if not rest:
        return 0 if has_dim else None
    if len(rest) > 1 or (rest[0].keyword is not None and rest[0].keyword.value not in ("dim", "axis")):
        return None
    return _number(rest[0].value)


def _number(node: cst.BaseExpression) -> int | None:
    try:
        return int(code_of(node))
    except ValueError:
        return None


def _branches(growth: Concatenation, around: Sequence[Level]) -> tuple[cst.BaseStatement, int, bool]:
    """The statement that becomes the append, the number of its level, and whether what is gathered starts as None.

    That is the growth itself, or the `if x is None: x = piece; else: x = join(...)` that it is part of.
    """
    name = growth.name
    assigned = assignment(around[0].statement)
    if assigned is not None and isinstance(assigned[1], cst.IfExp):
        return around[0].statement, 0, True
    if len(around) > 1 and isinstance(around[1].statement, cst.If):
        branch = around[1].statement
        test = code_of(branch.test)
        if test in (f"{name} is None", f"{name} is not None") and isinstance(branch.orelse, cst.Else):
            bodies = [branch.body.body, branch.orelse.body.body]
            first = bodies[0] if test == f"{name} is None" else bodies[1]
            wanted = [name, *map(code_of, growth.pieces)]
            if any(len(body) != 1 for body in bodies) or [*map(code_of, assignment(first[0]) or ())] != wanted:
                raise EditError("the first piece is another than those that follow")
            return branch, 1, True
    return around[0].statement, 0, False


def _loop(growth: Concatenation, around: Sequence[Level]) -> tuple[Level, cst.BaseStatement | None]:
    """The loop in which is gathered, as the level that holds it, and the assignment in that block that starts it off."""
    first: Level | None = None
    for level in around[1:]:
        loop = level.statement
        if not isinstance(loop, (cst.For, cst.While)):
            continue
        first = first or level
        start = next((s for s in reversed(level.block[: level.at]) if growth.name in assigned_in(s)), None)
        if start is not None:
            assigned = assignment(start)
            is_plain = assigned is not None and isinstance(assigned[0], cst.Name)
            return level, start if is_plain else None
    if first is None:
        raise EditError("it is in no loop")
    return first, None


def _check_handlers(growth: Concatenation, around: Sequence[Level], loop: Level) -> None:
    """What is gathered must not be wanted when an exception ends the loop."""
    is_outside = False
    for level in around:
        is_outside = is_outside or level is loop
        statement = level.statement
        if not isinstance(statement, (cst.Try, cst.TryStar)):
            continue
        tails = [*statement.handlers, *filter(None, (statement.finalbody,))]
        if not is_outside or any(occurrences(t, growth.name) for t in tails):
            raise EditError(f"'{growth.name}' may be wanted after an exception")


def _check_writes(growth: Concatenation, loop: cst.BaseStatement, append: cst.BaseStatement) -> None:
    """Nothing else writes what is gathered, nothing changes what was appended."""
    assert isinstance(loop, (cst.For, cst.While))
    if loop.orelse is not None:
        raise EditError("the loop has an else")
    rest = with_changes(cst.Module(body=[loop]), {append: []})
    if growth.name in assigned_in(rest) | changed_in_place(rest) or m.findall(rest, m.Del()):
        raise EditError(f"'{growth.name}' is also written elsewhere in the loop")
    changed = changed_in_place(loop)
    for piece in growth.pieces:
        is_copy = isinstance(piece, cst.Call) and code_of(piece.func).endswith((".clone", ".copy", ".cpu().numpy"))
        clash = sorted(changed & names_in(piece))
        if clash and not is_copy:
            raise EditError(f"'{clash[0]}' is changed in place")


# -- what is to be there --------------------------------------------------------------------------------------------------------


class Gathering(NamedTuple):
    """How parts are collected: the list and its first items, the parts, whether they are stacked, whether it starts as
    None.
    """

    name: str
    first: tuple[cst.BaseExpression, ...]
    pieces: tuple[cst.BaseExpression, ...]
    is_stacked: bool
    is_none: bool


def _edited(
    module: cst.Module,
    taken: set[str],
    growth: Concatenation,
    loop: Level,
    start: cst.BaseStatement | None,
    append: cst.BaseStatement,
    is_none: bool,
) -> cst.Module:
    assigned = assignment(start) if start is not None else None
    initial = assigned[1] if assigned is not None else None
    begin_at = next((i for i, s in enumerate(loop.block) if s is start), loop.at)
    is_read_between = any(occurrences(s, growth.name) for s in loop.block[begin_at + 1 : loop.at])
    if is_none and (initial is None or code_of(initial) != "None" or is_read_between):
        raise EditError(f"'{growth.name}' does not start as None before the loop")
    keeps_start = start is None or is_read_between
    gathering = _gathering(taken, growth, None if keeps_start else initial, is_none)
    join = _join(growth, gathering)
    last = _last_reads(growth, gathering, loop.statement)
    begin = statements("{name} = {items}\n", name=cst.Name(gathering.name), items=_list(gathering.first))
    pieces = [with_changes(p, last) for p in gathering.pieces]
    changes: dict[cst.CSTNode, Change] = dict(last)
    changes[append] = _appending(pieces, gathering.name)
    for first in _read_now_and_then(growth, loop.statement, append, last):
        changes[first] = lambda old: [*join, old]
    changes[loop.statement] = lambda old: [*begin, old, *join] if keeps_start else [old, *join]
    if start is not None and not keeps_start:
        changes[start] = begin
    return with_changes(module, changes)


def _gathering(taken: set[str], growth: Concatenation, initial: cst.BaseExpression | None, is_none: bool) -> Gathering:
    """How to gather; `initial` is what it starts with where that is moved into the list."""
    bare, first = _unstacked(growth, initial, is_none)
    if bare:
        return Gathering(_list_name(taken, growth, bare), first, bare, True, is_none)
    starts = () if is_none else (initial if initial is not None else cst.Name(growth.name),)
    return Gathering(_list_name(taken, growth, ()), starts, growth.pieces, False, is_none)


def _last_reads(growth: Concatenation, gathering: Gathering, loop: cst.BaseStatement) -> dict[cst.CSTNode, Change]:
    """Reads of the last element in the loop, and what reads it in the last piece."""
    found: dict[cst.CSTNode, Change] = {}
    if growth.dim is None or growth.before or gathering.is_none:
        return found
    last = expression(f"{gathering.name}[-1]")
    for node in nodes_of(cst.Subscript, loop):
        if not m.matches(node.value, m.Name(growth.name)):
            continue
        parts = [code_of(e.slice) for e in node.slice]
        is_one = parts in ([":"] * growth.dim + ["-1"], ["...", "-1"] if growth.dim == -1 else None)
        is_slice = parts == [":"] * growth.dim + ["-1:"]
        if gathering.is_stacked and is_one:
            found[node] = last
        elif not gathering.is_stacked and (is_one or is_slice):
            found[node.value] = last
    return found


def _read_now_and_then(
    growth: Concatenation, loop: cst.BaseStatement, append: cst.BaseStatement, last: Mapping[cst.CSTNode, Change]
) -> list[cst.BaseStatement]:
    """The first statements of those branches in the loop that read the whole.

    Raises EditError when it is read in every iteration.
    """
    found: list[cst.BaseStatement] = []
    done = {id(n) for read in last for n in occurrences(read, growth.name)}
    in_pieces = {id(n) for n in occurrences(growth.pieces, growth.name)}
    done |= {id(n) for n in occurrences(append, growth.name)} - in_pieces
    parents = parents_of(cst.Module(body=[loop]))  # type: ignore[list-item]
    for name in occurrences(loop, growth.name):
        if id(name) in done:
            continue
        branches = [
            level
            for level in levels(parents, name)
            if isinstance(level.owner, (cst.If, cst.Else))
            and not any(append in nodes_of(type(append), s) for s in level.block)
        ]
        if not branches:
            raise EditError(f"'{growth.name}' is read in every iteration")
        if not any(branches[-1].block[0] is s for s in found):
            found.append(branches[-1].block[0])
    return found


def _unstacked(
    growth: Concatenation, initial: cst.BaseExpression | None, is_none: bool
) -> tuple[tuple[cst.BaseExpression, ...], tuple[cst.BaseExpression, ...]]:
    """The pieces, and what is there at first, without the dimension that was made for joining them; () where it was not."""
    can_stack = _JOINS.get(growth.full) is not None and isinstance(growth.call.func, cst.Attribute)
    if growth.dim is None or not can_stack or growth.before or (initial is None and not is_none):
        return (), ()
    firsts = () if is_none or initial is None else (initial,)
    bare = [_squeezed(p, growth.dim) for p in (*firsts, *growth.pieces)]
    if any(p is None for p in bare):
        return (), ()
    found = tuple(p for p in bare if p is not None)
    return found[len(firsts) :], found[: len(firsts)]


def _squeezed(node: cst.BaseExpression, dim: int) -> cst.BaseExpression | None:
    """`x` of `x.unsqueeze(dim)`, `x[None]`, `x[:, None]`; None for anything else."""
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value == "unsqueeze":
        return node.func.value if len(node.args) == 1 and _number(node.args[0].value) == dim else None
    if isinstance(node, cst.Subscript) and dim >= 0:
        parts = [code_of(e.slice) for e in node.slice]
        return node.value if parts == [":"] * dim + ["None"] else None
    return None


def _list_name(taken: set[str], growth: Concatenation, bare: tuple[cst.BaseExpression, ...]) -> str:
    """A list's name: 'states' for a list of `state`; else 'pieces'; with what is gathered before it where that is taken."""
    one = bare[0] if len(bare) == 1 else None
    is_named = isinstance(one, cst.Name) and one.value != growth.name and len(one.value) > 1
    wanted = f"{one.value}s" if is_named and isinstance(one, cst.Name) and not one.value.endswith("s") else "pieces"
    if wanted in taken:
        wanted = f"{growth.name}_{wanted}"
    return free_name(wanted, taken)


def _list(items: Sequence[cst.BaseExpression]) -> cst.List:
    return cst.List([cst.Element(i) for i in items])


def _join(growth: Concatenation, gathering: Gathering) -> list[cst.BaseStatement]:
    """`name = torch.cat(pieces, dim)`."""
    pieces: cst.BaseExpression = cst.Name(gathering.name)
    if growth.before:
        pieces = expression("{pieces}[::-1]", pieces=pieces)
    func, rest = growth.call.func, growth.call.args[1:]
    if growth.full == "numpy.append":
        numpy = code_of(func.value) if isinstance(func, cst.Attribute) else ""
        if not numpy:
            raise EditError("'append' was imported by itself")
        func, rest = cst.parse_expression(f"{numpy}.concatenate"), growth.call.args[2:]
        equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
        rest = [a.with_changes(keyword=cst.Name("axis"), equal=equal) for a in rest]
        if not rest:
            pieces = expression(f"[{numpy}.ravel(piece) for piece in {{pieces}}]", pieces=pieces)
    if gathering.is_stacked:
        assert isinstance(func, cst.Attribute), "only an attribute is stacked"
        func = func.with_changes(attr=cst.Name("stack"))
    rest = [
        a.with_changes(comma=cst.MaybeSentinel.DEFAULT, whitespace_after_arg=cst.SimpleWhitespace("")) for a in rest
    ]
    whole: cst.BaseExpression = cst.Call(func=func, args=[cst.Arg(pieces), *rest])
    if gathering.is_none:
        whole = expression("{whole} if {pieces} else None", whole=whole, pieces=cst.Name(gathering.name))
    return statements("{name} = {whole}\n", name=cst.Name(growth.name), whole=whole)


def _appending(pieces: Sequence[cst.BaseExpression], list_name: str) -> list[cst.BaseStatement]:
    if len(pieces) == 1:
        return statements("{name}.append({piece})\n", name=cst.Name(list_name), piece=pieces[0])
    return statements("{name} += {pieces}\n", name=cst.Name(list_name), pieces=_list(pieces))


LEVER = source_lever(
    __name__,
    edit,
    title="Pieces gathered in a list and joined once",
    else_because="nothing is grown piece by piece",
)

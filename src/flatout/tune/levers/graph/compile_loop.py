"""A loop of plain numbers is compiled to machine code by Numba.

What        A function of loops over NumPy arrays and numbers gets `@numba.njit`, and so do functions of the file that it calls;
            where only a loop in it is of numbers, the loop moves to a function of its own. Tensors go in as `.numpy()`, which
            shares their memory.
Guarantee   BOUNDED: the same operations in the same order; numbers between them may be held in float64 instead of float32.
Refuses     Loops that gradients go back through, that draw random numbers, call what is not known to compile, or read objects
            and lists; machines without Numba (`pip install 'flatout[loops]'`). Tensors on a device fail when it is tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Final, NamedTuple

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError, LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Parameters
from flatout.tune.rewrite.enclosing_blocks import Level, closed_over, levels, occurrences, parents_of, rebinds, scope_of
from flatout.tune.rewrite.imports import call_name, with_import
from flatout.tune.rewrite.numeric_loops import (
    check_numbers,
    function_named,
    has_loop,
    numeric_constants,
    without_reversed,
)
from flatout.tune.rewrite.source import (
    Change,
    SourcePlace,
    assigned_in,
    code_of,
    expression,
    find,
    fresh_name,
    local_proposals,
    names_in,
    nodes_of,
    spaced,
    statements,
    with_changes,
)

_COST_FRACTION: Final = 0.98
"""A compiled loop takes some per cent of the interpreter's time at most (Numba's documentation, 'A ~5 minute guide')."""
_MISSING: Final = "numba is not installed; pip install 'flatout[loops]'"


class Handed(NamedTuple):
    """An argument of the function that a loop becomes: `name` inside, `value` where it is called."""

    name: str
    value: str


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it where a rule found much time in a loop over numbers."""
    if find_spec("numba") is None:
        raise LeverRefused(_MISSING)
    why = "no line spends its time in a loop of numbers"
    differentiated = {o.source for o in evidence.operators if o.phase == "backward"}
    lines = {(evidence.sources[s].file, evidence.sources[s].line) for s in differentiated if s >= 0}
    of_numbers = [f for f in findings if not any(s and (s.file, s.line) in lines for s in (f.where, *f.also))]
    yield from local_proposals(evidence, of_numbers, edit, else_because=why, cost_fraction=_COST_FRACTION)


def edit(text: str, parameters: Parameters) -> str:
    """Compile a function, or a loop as a function, with Numba.

    Raises EditError when that is not certain.
    """
    if find_spec("numba") is None:
        raise EditError(_MISSING)
    place = find(text, parameters)
    if place.function is not None and any("jit" in code_of(d) for d in place.function.decorators):
        raise EditError("it is compiled already")
    whys: list[str] = []
    for change in (_decorated, _outlined):
        try:
            return with_import(change(place), "numba").code
        except EditError as e:
            whys.append(str(e))
    raise EditError(whys[-1])


# -- a whole function -----------------------------------------------------------------------------------------------------------


def _decorated(place: SourcePlace) -> cst.Module:
    """The file with the function around the place compiled, and with it the functions that it calls."""
    module, function = place.module, place.function
    if function is None:
        raise EditError("it is in no function")
    if function_named(module, function.name.value) is not function:
        raise EditError("it is in a method, or in a function inside another")
    entry = function if has_loop(function) else _caller(module, function)
    found: dict[str, cst.FunctionDef] = {}
    _collect(module, entry, found)
    _check_arrays(module, entry)
    changes: dict[cst.CSTNode, Change] = dict.fromkeys(found.values(), _compiled)
    return with_changes(module, changes)


def _caller(module: cst.Module, function: cst.FunctionDef) -> cst.FunctionDef:
    """The function of the file that calls this one in a loop."""
    name = function.name.value
    for other in module.body:
        if isinstance(other, cst.FunctionDef) and other is not function and has_loop(other):
            loops = m.findall(other, m.For() | m.While())
            if any(m.findall(loop, m.Call(func=m.Name(name))) for loop in loops):
                return other
    raise EditError(f"no function of numbers calls '{name}' in a loop")


def _collect(module: cst.Module, function: cst.FunctionDef, found: dict[str, cst.FunctionDef]) -> None:
    """All functions that are compiled together, checked.

    Raises EditError when one cannot be.
    """
    name = function.name.value
    if name in found:
        return
    found[name] = function
    if function.decorators or function.asynchronous is not None:
        raise EditError(f"'{name}' is decorated")
    parameters = function.params
    if parameters.star_kwarg is not None or isinstance(parameters.star_arg, cst.Param):
        raise EditError(f"'{name}' takes any number of arguments")
    used = check_numbers(module, function.body, known=names_in(parameters) | assigned_in(function.body))
    for called in used:
        inner = function_named(module, called)
        assert inner is not None, "checked"
        _collect(module, inner, found)


def _check_arrays(module: cst.Module, function: cst.FunctionDef) -> None:
    """What is indexed must be made by NumPy, as far as it is made there; a file without NumPy hands tensors around."""
    if not any(call_name(module, cst.Name(alias)) == "numpy" for alias in ("np", "numpy")):
        raise EditError(f"'{function.name.value}' may be called with tensors")
    if any(call_name(module, c.func).startswith("torch") for c in nodes_of(cst.Call, function)):
        raise EditError(f"'{function.name.value}' calls torch")


def _compiled(node: cst.CSTNode) -> cst.CSTNode:
    assert isinstance(node, cst.FunctionDef)
    decorator = cst.Decorator(cst.parse_expression("numba.njit"))
    return without_reversed(node).with_changes(decorators=[decorator])


# -- a loop alone ---------------------------------------------------------------------------------------------------------------


def _outlined(place: SourcePlace) -> cst.Module:
    """The file with the outermost loop of numbers around the place in a compiled function of its own."""
    module = place.module
    parents = parents_of(module)
    around = tuple(levels(parents, place.statement))
    loops = [level for level in reversed(around) if isinstance(level.statement, (cst.For, cst.While))]
    if not loops:
        raise EditError("it is in no loop of its function")
    whys: list[str] = []
    for level in loops:
        try:
            return _with_loop_out(place, level)
        except EditError as e:
            whys.append(str(e))
    raise EditError(whys[-1])


def _with_loop_out(place: SourcePlace, level: Level) -> cst.Module:
    module, loop = place.module, level.statement
    assert isinstance(loop, (cst.For, cst.While))
    if m.findall(loop, m.Return()) or loop.orelse is not None:
        raise EditError("the loop returns, or has an else")
    plain, of_self = _without_self(without_reversed(_without_items(loop)))
    bound = assigned_in(plain)
    constants = numeric_constants(module)
    read = _read(plain, bound)
    used = check_numbers(module, plain, known=read | bound | set(of_self))
    if used:
        raise EditError(f"'{sorted(used)[0]}' is called")
    outside = _outside(place, loop)
    handed = [
        _handed(place, level, n, of_self)
        for n in _in_order(plain, read - constants)
        if _is_handed(place, level, n, bound, of_self)
    ]
    results = sorted(n for n in bound if n in outside)
    kinds = {h.name for h in handed if h.value.endswith(".numpy()")}
    if kinds & set(results):
        raise EditError(f"'{sorted(kinds & set(results))[0]}' is a tensor that is wanted after the loop")
    title = place.function.name.value if place.function is not None else "script"
    name = fresh_name(module, f"{title}_loop" if not title.startswith("__") else "run_loop")
    assigned, names = ", ".join(h.value for h in handed), ", ".join(h.name for h in handed)
    ends = ", ".join(results)
    [compiled] = statements(f"@numba.njit\ndef {name}({names}):\n    pass\n")
    assert isinstance(compiled, cst.FunctionDef)
    tail = statements(f"return {ends}\n") if results else []
    body = [plain.with_changes(leading_lines=()), *tail]
    compiled = compiled.with_changes(body=cst.IndentedBlock(body))
    call = statements(f"{ends} = {name}({assigned})\n" if results else f"{name}({assigned})\n")
    top = next(s for s in module.body if loop in nodes_of(type(loop), s))
    if top is loop:
        changes: dict[cst.CSTNode, Change] = {loop: [compiled, spaced(call[0], 2), *call[1:]]}
    else:
        lines = getattr(top, "leading_lines", ())
        blank = [cst.EmptyLine(indent=False)] * 2
        changes = {
            loop: lambda _: call,
            top: lambda old: [compiled.with_changes(leading_lines=lines), old.with_changes(leading_lines=blank)],
        }
    return with_changes(module, changes)


def _in_order(node: cst.CSTNode, names: set[str]) -> list[str]:
    """Names as they come in the text."""
    found = dict.fromkeys(n.value for n in nodes_of(cst.Name, node))
    return [n for n in found if n in names]


def _read(loop: cst.CSTNode, bound: set[str]) -> set[str]:
    """Names that the loop may need from outside: all but functions, modules and those of comprehensions."""
    called = {c.func.value for c in nodes_of(cst.Call, loop) if isinstance(c.func, cst.Name)}
    inner = {n for c in nodes_of(cst.CompFor, loop) for n in names_in(c.target)}
    return names_in(loop) - called - (inner - bound) - {"_"}


def _is_handed(place: SourcePlace, level: Level, name: str, bound: set[str], of_self: dict[str, str]) -> bool:
    """Whether a name has a value before the loop; a module of the file's imports is none."""
    if name in of_self:
        return True
    if call_name(place.module, cst.Name(name)):
        return False
    if name not in bound:
        return True
    parameters = names_in(place.function.params) if place.function is not None else set()
    scope = scope_of(place.module, place.function)
    before = [s for s in level.block[: level.at] if name in assigned_in(s)]
    first = next((s for s in m.findall(scope, m.For() | m.While()) if s is level.statement), None)
    assert first is not None, "the loop is in its function"
    is_counter = isinstance(first, cst.For) and name in names_in(first.target)
    return bool((before or name in parameters) and not is_counter and not _is_set_first(level.statement, name))


def _is_set_first(loop: cst.CSTNode, name: str) -> bool:
    """Whether each iteration gives the name a value before it reads it."""
    assert isinstance(loop, (cst.For, cst.While))
    first = next((s for s in loop.body.body if occurrences(s, name)), None)
    if first is None:
        return False
    return rebinds(first, name) or (isinstance(first, cst.For) and _is_set_first(first, name))


def _outside(place: SourcePlace, loop: cst.CSTNode) -> set[str]:
    """Names that are read outside the loop, after it or in another round of a loop around it."""
    scope = scope_of(place.module, place.function)
    return names_in(with_changes(scope, {loop: lambda _: []})) | closed_over(place.module, place.function)


def _handed(place: SourcePlace, level: Level, name: str, of_self: dict[str, str]) -> Handed:
    """How a name is handed on: tensors as NumPy arrays that share their memory.

    Raises EditError when what it is cannot be seen.
    """
    value = of_self.get(name, name)
    loop = level.statement
    is_indexed = bool(m.findall(loop, m.Subscript(value=m.Name(name))))
    if name in of_self:
        is_indexed = any(code_of(s.value) == value for s in nodes_of(cst.Subscript, loop))
    kind = _kind(place, name)
    over = [f.iter for f in nodes_of(cst.For, loop) if "range(" not in code_of(f.iter)]
    if not kind and any(occurrences(i, value) for i in over):
        raise EditError(f"what '{value}' is, which is iterated over, is unknown")
    if not is_indexed:
        return Handed(name, value)
    if kind == "list":
        raise EditError(f"'{value}' is a list")
    if kind == "array":
        return Handed(name, value)
    others = {_kind(place, n) for n in names_in(loop)}
    if kind == "tensor" or ("tensor" in others and "array" not in others):
        return Handed(name, f"{value}.numpy()")
    if "array" in others and "tensor" not in others:
        return Handed(name, value)
    raise EditError(f"whether '{value}' is an array or a tensor is unknown")


def _kind(place: SourcePlace, name: str) -> str:
    """The kind of a name's value, 'tensor', 'array' or 'list', by its assignment in its scope; '' where that is unknown."""
    for scope in (scope_of(place.module, place.function), place.module):
        for assigned in nodes_of(cst.Assign, scope):
            if name not in assigned_in(assigned):
                continue
            if isinstance(assigned.value, (cst.List, cst.ListComp)):
                return "list"
            if isinstance(assigned.value, cst.Call):
                full = call_name(place.module, assigned.value.func)
                method = code_of(assigned.value.func).rpartition(".")[2]
                if full.startswith("torch.") or method.startswith("new_") or method == "clone":
                    return "tensor"
                if full.startswith("numpy.") or method == "numpy":
                    return "array"
    return ""


def _without_items(loop: cst.For | cst.While) -> cst.For | cst.While:
    """The loop with `x[i].item()` read as `x[i]`, and `x.size(0)` as `x.shape[0]`, which arrays have too."""
    changes: dict[cst.CSTNode, Change] = {}
    for call in m.findall(loop, m.Call(func=m.Attribute(attr=m.Name("item")), args=[])):
        changes[call] = lambda node: node.func.value
    for call in m.findall(loop, m.Call(func=m.Attribute(attr=m.Name("size")), args=[m.Arg()])):
        changes[call] = lambda node: expression("{x}.shape[{dim}]", x=node.func.value, dim=node.args[0].value)
    return with_changes(loop, changes)


def _without_self(loop: cst.For | cst.While) -> tuple[cst.For | cst.While, dict[str, str]]:
    """The loop with `self.x` read as a name of its own, and what these names stand for."""
    found: dict[str, str] = {}
    changes: dict[cst.CSTNode, Change] = {}
    taken = names_in(loop)
    for node in nodes_of(cst.Attribute, loop):
        if not m.matches(node.value, m.Name("self")):
            continue
        name = node.attr.value if node.attr.value not in taken else f"own_{node.attr.value}"
        found[name] = code_of(node)
        changes[node] = cst.Name(name)
    for written in m.findall(loop, m.AssignTarget(target=m.Attribute(value=m.Name("self")))):
        raise EditError(f"'{code_of(written).partition('=')[0].strip()}' is written in the loop")
    return with_changes(loop, changes), found


LEVER = lever(__name__, propose, edit=edit, is_local=True, title="A loop of numbers compiled by Numba")

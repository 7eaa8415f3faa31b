"""Models in a text: the statements that construct them, by class, and statements added after one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError
from flatout.tune.rewrite.calls import calls_ending
from flatout.tune.rewrite.enclosing_blocks import assignment, only_small
from flatout.tune.rewrite.imports import call_name
from flatout.tune.rewrite.source import (
    code_of,
    names_in,
    nodes_of,
    parsed,
    places_in,
    statements,
    with_changes,
    with_names,
    word_set,
)

_CHAINED: Final = word_set("to cuda cpu eval train float double half bfloat16 requires_grad_ apply share_memory")
"""Methods of nn.Module that return the module itself (documentation of torch 2.13)."""
_SIGNS: Final = word_set("parameters named_parameters train eval state_dict load_state_dict zero_grad to cuda modules")
"""Methods that tell a module (`to` and `cuda` with another of them, or a call)."""


class Construction(NamedTuple):
    """An assignment of what the call `value` constructs to `name` (maybe dotted): of class `kind`, '' where that is
    unknown.

    `statement` does so, in `block`, inside `function` (None: at the top); an `if` where branches make one each.
    `is_part`: by a method of a class that has a `forward`, or by a function that returns it: it becomes part of something.
    """

    name: str
    kind: str
    value: cst.Call
    statement: cst.SimpleStatementLine | cst.If
    block: Sequence[cst.BaseStatement]
    function: cst.FunctionDef | None
    is_part: bool


def constructions_in(module: cst.Module) -> list[Construction]:
    """Every assignment of a newly constructed object to one name."""
    return [one for one in _assignments(module) if one.kind]


def behind_model(text: str, template: str) -> str:
    """The text with statements after the construction of its model, which the template calls `model`.

    Raises EditError when it is not certain which that is.
    """
    module = parsed(text)
    construction = _model(module)
    last = _last_move(construction)
    new = [with_names(s, {"model": construction.name}) for s in statements(template)]
    return with_changes(module, {last: [last, *new]}).code


def behind_models(text: str, template: str) -> str:
    """The text with statements after the construction of each of its models, which the template calls `model`.

    Raises EditError when there is none, or it is not certain where one is made.
    """
    module = parsed(text)
    found: dict[cst.CSTNode, list[cst.BaseStatement]] = {}
    for construction in _models(module):
        last = _last_move(construction)
        found.setdefault(last, [last]).extend(with_names(s, {"model": construction.name}) for s in statements(template))
    return with_changes(module, found).code


def before_optimizers(module: cst.Module, template: str) -> cst.Module:
    """The tree with statements before each of torch's optimizers is constructed, for each model whose parameters it is given,
    which the template calls `model`.

    Raises EditError when there is no such optimizer.
    """
    changes: dict[cst.CSTNode, list[cst.BaseStatement]] = {}
    for place in places_in(module):
        assigned = assignment(place.statement)
        if assigned is None or not isinstance(assigned[1], cst.Call):
            continue
        if not call_name(module, assigned[1].func).startswith("torch.optim."):
            continue
        receivers = (call.func for call in calls_ending(assigned[1], "parameters"))
        names = dict.fromkeys(code_of(r.value) for r in receivers if isinstance(r, cst.Attribute))
        new = [with_names(s, {"model": name}) for name in names for s in statements(template)]
        if new:
            changes[place.statement] = [*new, cst.ensure_type(place.statement, cst.SimpleStatementLine)]
    if not changes:
        raise EditError("no optimizer of a model is constructed here")
    return with_changes(module, changes)


def _assignments(module: cst.Module) -> list[Construction]:
    """Every assignment to one name of what a call makes."""
    builders, found = _builders(module), []
    for place in places_in(module):
        small, function = only_small(place.statement), place.function
        assigned = assignment(place.statement)
        target, value = (small.target, small.value) if isinstance(small, cst.AnnAssign) else assigned or (None, None)
        if not isinstance(target, (cst.Name, cst.Attribute)) or not isinstance(value, cst.Call):
            continue
        is_part = function is not None and function.name.value in builders
        if place.owner is not None:
            forward = m.FunctionDef(name=m.Name("forward"))
            is_part |= m.matches(place.owner.body, m.IndentedBlock(body=[m.ZeroOrMore(), forward, m.ZeroOrMore()]))
        line = cst.ensure_type(place.statement, cst.SimpleStatementLine)
        kind = _constructed_class(value, builders)
        found.append(Construction(code_of(target), kind, value, line, place.block, function, is_part))
    return found


def _constructed_class(value: cst.BaseExpression, builders: dict[str, str]) -> str:
    """The class of what an expression makes, '' if unknown: `Net(8).to(device)` makes a Net."""
    while isinstance(value, cst.Call):
        called = value.func
        if isinstance(called, cst.Attribute) and called.attr.value in _CHAINED and isinstance(called.value, cst.Call):
            value = called.value
            continue
        last = called.attr.value if isinstance(called, cst.Attribute) else code_of(called)
        return builders.get(last, last) if last.isidentifier() else ""
    return ""


def _builders(module: cst.Module) -> dict[str, str]:
    """Functions of the file that return a new object, and its class."""
    found: dict[str, str] = {}
    for statement in module.body:
        if not isinstance(statement, cst.FunctionDef):
            continue
        kinds = {_returned(statement, node) for node in nodes_of(cst.Return, statement.body)}
        if len(kinds) == 1 and (kind := kinds.pop()):
            found[statement.name.value] = kind
    return found


def _returned(function: cst.FunctionDef, node: cst.Return) -> str:
    value = node.value
    if isinstance(value, cst.Name):
        assigned = [a.value for a in m.findall(function, m.Assign(targets=[m.AssignTarget(m.Name(value.value))]))]  # type: ignore[attr-defined]
        value = assigned[0] if len(assigned) == 1 else None
    return _constructed_class(value, {}) if value is not None else ""


def module_classes(module: cst.Module) -> set[str]:
    """Classes at the top of the file that derive from a Module, as far as their bases' names tell."""
    bases = {
        s.name.value: {code_of(b.value).rpartition(".")[2] for b in s.bases}
        for s in module.body
        if isinstance(s, cst.ClassDef)
    }
    found: set[str] = set()
    while new := {
        name for name, of in bases.items() if name not in found and any(_is_module_name(b, bases, found) for b in of)
    }:
        found |= new
    return found


def _is_module_name(name: str, bases: Mapping[str, object], found: set[str]) -> bool:
    """Whether a base class is a module: one of the file that is, or one from elsewhere that is not `object` or the like."""
    return name in found or (name not in bases and name[:1].isupper())


def names_of_models(module: cst.Module) -> set[str]:
    """Names to which an object of a module class of the file is assigned, alone or in a tuple."""
    known, builders = module_classes(module), _builders(module)
    found = set()
    for node in nodes_of(cst.Assign, module):
        for target, value in _pairs(node):
            if _constructed_class(value, builders) in known and isinstance(target, (cst.Name, cst.Attribute)):
                found.add(code_of(target))
    return found


def _pairs(node: cst.Assign) -> Iterator[tuple[cst.BaseExpression, cst.BaseExpression]]:
    """Target and value, one by one where tuples of the same length are assigned."""
    target, value = node.targets[-1].target, node.value
    if isinstance(target, cst.Tuple) and isinstance(value, cst.Tuple) and len(target.elements) == len(value.elements):
        yield from ((t.value, v.value) for t, v in zip(target.elements, value.elements, strict=True))
    else:
        yield target, value


def plain_classes(module: cst.Module) -> set[str]:
    """Classes at the top of the file that are no modules."""
    return {s.name.value for s in module.body if isinstance(s, cst.ClassDef)} - module_classes(module)


def definitions_with(module: cst.Module, names: set[str]) -> set[str]:
    """Classes and functions at the top of the file that use one of these names, directly or through each other."""
    uses = {}
    for s in module.body:
        if isinstance(s, (cst.ClassDef, cst.FunctionDef)):
            attributes = {a.attr.value for a in nodes_of(cst.Attribute, s)}
            uses[s.name.value] = names_in(s.body) | attributes
    found: set[str] = set()
    while new := {name for name, used in uses.items() if name not in found and used & (names | found)}:
        found |= new
    return found


def _model(module: cst.Module) -> Construction:
    """The one model of a file. Raises EditError when there is none, or more than one."""
    models = _models(module)
    if len(models) > 1:
        raise EditError(f"{', '.join(one.name for one in models)} are made in the file; which one is the model?")
    return models[0]


def _models(module: cst.Module) -> list[Construction]:
    """The models of a file, as each is made or moved last; one loaded in its place, trained already, is left as it is.

    Raises EditError when there is none, or one is made at several places.
    """
    construction: dict[str, list[Construction]] = {}
    for one in _assignments(module):
        construction.setdefault(one.name, []).append(one)
    called, methods = _uses(module)
    names = [n for n in construction if n in called and methods.get(n, set()) & _SIGNS]
    if not names:
        raise EditError("nothing that is called and has parameters is made in the file")
    return [_last_of(module, name, construction[name]) for name in names]


def _last_of(module: cst.Module, name: str, constructions: Sequence[Construction]) -> Construction:
    """Where the object of this name is made, or moved last."""
    loaded = [one for one in constructions if one.kind == "load"]
    first, *others = [one for one in constructions if one not in loaded] or loaded
    originals = [first, *(one for one in others if not _is_move(name, one.value))]
    moves = [one for one in others if one not in originals]
    if len(originals) > 1:
        first = _in_branches(module, originals)
    if any(move.block is not first.block for move in moves):
        raise EditError(f"'{name}' is moved to its device somewhere else")
    return moves[-1] if moves else first


def _in_branches(module: cst.Module, originals: Sequence[Construction]) -> Construction:
    """The `if` whose branches make an object of one name each. Raises EditError where there is none around them all."""
    blocks = {id(one.block) for one in originals}
    for place in places_in(module):
        is_around = isinstance(place.statement, cst.If) and blocks <= set(map(id, _branches(place.statement)))
        if is_around and len(blocks) == len(originals):  # no branch makes two
            return originals[-1]._replace(statement=cst.ensure_type(place.statement, cst.If), block=place.block)
    raise EditError(f"'{originals[0].name}' is assigned to more than once")


def _branches(statement: cst.If) -> Iterator[Sequence[cst.BaseStatement]]:
    """The blocks of an `if` and of every `elif` and `else` behind it."""
    branch: cst.If | cst.Else | None = statement
    while branch is not None:
        if isinstance(branch.body, cst.IndentedBlock):
            yield branch.body.body
        branch = branch.orelse if isinstance(branch, cst.If) else None


def _uses(module: cst.Module) -> tuple[set[str], dict[str, set[str]]]:
    """Bare names that are called; and the methods that are called of each."""
    called: set[str] = set()
    methods: dict[str, set[str]] = {}
    for call in nodes_of(cst.Call, module):
        if isinstance(call.func, cst.Name):
            called.add(call.func.value)
        elif isinstance(call.func, cst.Attribute) and isinstance(call.func.value, cst.Name):
            methods.setdefault(call.func.value.value, set()).add(call.func.attr.value)
    return called, methods


def _is_move(name: str, call: cst.BaseExpression) -> bool:
    """Whether it is `name.to(...)`, or another method that returns the model itself."""
    while isinstance(call, cst.Call) and isinstance(call.func, cst.Attribute) and call.func.attr.value in _CHAINED:
        call = call.func.value
        if isinstance(call, cst.Name):
            return call.value == name
    return False


def _last_move(construction: Construction) -> cst.SimpleStatementLine | cst.If:
    """The last of the statements right behind that move the model in place, `name.to(device)`; else the one that made it."""
    last: cst.SimpleStatementLine | cst.If = construction.statement
    at = next(i for i, s in enumerate(construction.block) if s is last)
    for statement in construction.block[at + 1 :]:
        only = only_small(statement)
        if not isinstance(only, cst.Expr) or not _is_move(construction.name, only.value):
            break
        last = cst.ensure_type(statement, cst.SimpleStatementLine)
    return last

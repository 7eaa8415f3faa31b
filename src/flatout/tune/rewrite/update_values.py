"""What a function made of the statements of an update is passed, and what it returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError
from flatout.tune.rewrite.enclosing_blocks import Loop, Parents, levels, only_small, parents_of, root_name, scope_of
from flatout.tune.rewrite.source import SourcePlace, bare_names, code_of, names_in, nodes_of
from flatout.tune.rewrite.updates import UpdateStatements, names_bound


def changing_attributes(
    module: cst.Module, around: Loop | cst.FunctionDef, found: UpdateStatements, optimizers: Sequence[str]
) -> list[str]:
    """Attributes that the update reads and that are set elsewhere, as written: they are to be passed to it.

    Raises EditError where the loop, or the function, makes or changes what the update takes for constant.
    """
    bound, what = names_bound(around), "function" if isinstance(around, cst.FunctionDef) else "loop"
    if bad := sorted({one.partition(".")[0] for one in optimizers} & bound):
        raise EditError(f"the {what} makes the optimizer '{bad[0]}' itself")
    if any("scal" in code_of(call.func).lower() for s in found.inside for call in nodes_of(cst.Call, s)):
        raise EditError("a gradient scaler looks for infinite gradients on the host")
    read = names_in(found.inside)
    if bad := sorted(read & {item.name.value for one in m.findall(module, m.Global()) for item in one.names}):  # type: ignore[attr-defined]
        raise EditError(f"'{bad[0]}', which the update reads, is a global variable that a function sets")
    for target in m.findall(around, m.AssignTarget() | m.AugAssign()):
        inner = target.target  # type: ignore[attr-defined]
        if not isinstance(inner, cst.Attribute) or _is_part_of(inner, optimizers):
            continue
        if root_name(inner) in read - bound and _is_read_whole(found, inner, module):
            raise EditError(f"the {what} sets '{code_of(inner)}', which the update may read")
    later = _set_attributes(module)
    called = {id(part) for s in found.inside for call in nodes_of(cst.Call, s) for part in _parts(call.func)}
    changing: dict[str, None] = {}
    for one in (node for s in found.inside for node in nodes_of(cst.Attribute, s)):
        if one.attr.value not in later or id(one) in called or _is_part_of(one, optimizers) or root_name(one) in bound:
            continue
        if not isinstance(one.value, cst.Name):
            raise EditError(f"'{code_of(one)}', which the update reads, is set elsewhere, too")
        changing.setdefault(code_of(one))
    written = {code_of(t.target) for s in found.inside for t in m.findall(s, m.AssignTarget() | m.AugAssign())}  # type: ignore[attr-defined]
    if bad := sorted(written & set(changing)):
        raise EditError(f"the update sets '{bad[0]}'")
    return list(changing)


def _parts(called: cst.BaseExpression) -> Iterator[cst.CSTNode]:
    """What is called, and the objects that it is an attribute of."""
    while isinstance(called, cst.Attribute):
        yield called
        called = called.value


def _is_part_of(attribute: cst.Attribute, optimizers: Sequence[str]) -> bool:
    """Whether an attribute is an optimizer, or one of its own."""
    code = code_of(attribute)
    return any(code == one or code.startswith(f"{one}.") for one in optimizers)


def _is_read_whole(found: UpdateStatements, target: cst.Attribute, module: cst.Module) -> bool:
    """Whether an update may read an attribute by another way than its name: it hands on the object, or calls its methods."""
    methods = {one.name.value for one in m.findall(module, m.FunctionDef())}  # type: ignore[attr-defined]
    root = root_name(target)
    whole = {id(one) for s in found.inside for one in bare_names(s) if one.value == root}
    for one in (node for s in found.inside for node in nodes_of(cst.Attribute, s)):
        if isinstance(one.value, cst.Name) and one.value.value == root and one.attr.value not in methods:
            whole.discard(id(one.value))
    return bool(whole)


def _set_attributes(module: cst.Module) -> set[str]:
    """Names of attributes that are set anywhere but in an `__init__`."""
    found: set[str] = set()
    makers = list(m.findall(module, m.FunctionDef(name=m.Name("__init__"))))
    first = {id(target) for one in makers for target in m.findall(one, m.AssignTarget())}
    for target in m.findall(module, m.AssignTarget() | m.AugAssign()):
        inner = target.target  # type: ignore[attr-defined]
        if isinstance(inner, cst.Attribute) and id(target) not in first:
            found.add(inner.attr.value)
    return found


def arguments_of_update(inside: Sequence[cst.BaseStatement], bound: set[str]) -> list[str]:
    """Names that the update reads before it assigns them, and that the loop binds."""
    found: dict[str, None] = {}
    known: set[str] = set()

    def walk(block: Sequence[cst.CSTNode]) -> None:
        for statement in block:
            if isinstance(statement, (cst.If, cst.With)):
                heads = [statement.test] if isinstance(statement, cst.If) else [i.item for i in statement.items]
                read(heads)
                walk(statement.body.body)
                if isinstance(statement, cst.If) and statement.orelse is not None:
                    rest = statement.orelse
                    walk([rest] if isinstance(rest, cst.If) else rest.body.body)
                continue
            small = only_small(statement)
            if isinstance(small, cst.Assign):
                read([small.value])
            else:
                read([statement])
            known.update(names_bound(statement))

    def read(nodes: Sequence[cst.CSTNode]) -> None:
        for node in nodes:
            inner = {n for comp in m.findall(node, m.CompFor()) for n in names_in(comp.target)}  # type: ignore[attr-defined]
            for one in bare_names(node):
                if one.value not in known | inner and one.value in bound:
                    found.setdefault(one.value)

    walk(inside)
    return list(found)


def results_of_update(place: SourcePlace, found: UpdateStatements, block: Sequence[cst.BaseStatement]) -> list[str]:
    """Names that the update assigns and that are read elsewhere. Raises EditError where one may not be assigned."""
    replaced = block[found.first : found.last + 1]
    scope = place.module if place.function is None else scope_of(place.module, place.function)
    targets = [one.target for one in m.findall(scope, m.AssignTarget() | m.For() | m.CompFor())]  # type: ignore[attr-defined]
    stored = {id(name) for target in targets for name in _bound_names(target)}
    own = {id(name) for statement in replaced for name in bare_names(statement)}
    reads = [one for one in bare_names(scope) if id(one) not in stored and id(one) not in own]
    parents = parents_of(place.module)
    update = [*replaced, *(level.statement for level in levels(parents, replaced[0]))]
    wanted = {one.value for one in reads if not _is_assigned_before(one, parents, scope, update)} | names_in(
        found.after
    )
    assigned: dict[str, None] = {}
    for statement in found.inside:
        for name in sorted(names_bound(statement) & wanted - {"_"}, key=lambda n: code_of(statement).find(n)):
            assigned.setdefault(name)
    certain = _certain(found.inside)
    if bad := [name for name in assigned if name not in certain]:
        raise EditError(f"'{bad[0]}' is assigned in some cases alone, and read after the update")
    return list(assigned)


def _bound_names(target: cst.CSTNode) -> Iterator[cst.Name]:
    """The names that a target of an assignment binds, not those that it reads (`rows[i]`)."""
    if isinstance(target, cst.Name):
        yield target
    elif isinstance(target, (cst.Tuple, cst.List)):
        for element in target.elements:
            yield from _bound_names(element.value)


def _is_assigned_before(read: cst.Name, parents: Parents, scope: cst.CSTNode, update: Sequence[cst.CSTNode]) -> bool:
    """Whether a name is always assigned anew between the update and this read: by a statement before it in the same block.

    `update` are the statements of the update, and those that they are in.
    """
    node: cst.CSTNode = read
    while node is not scope and node in parents:
        above = parents[node]
        if any(node is one for one in update) or isinstance(node, (cst.FunctionDef, cst.Lambda, cst.ClassDef)):
            return False  # the update comes round before the read, or the read comes at any time
        if isinstance(above, (cst.IndentedBlock, cst.Module)):
            at = next(i for i, one in enumerate(above.body) if one is node)
            for statement in reversed(above.body[:at]):
                if any(statement is one for one in update):
                    return False
                is_plain = isinstance(statement, (cst.SimpleStatementLine, cst.With, cst.If))
                if is_plain and read.value in _certain([statement]):
                    return True
        node = above
    return False


def _certain(block: Sequence[cst.CSTNode]) -> set[str]:
    """Names that are assigned in every case."""
    found: set[str] = set()
    for statement in block:
        if isinstance(statement, cst.With):
            found |= _certain(statement.body.body)
        elif isinstance(statement, cst.If):
            rest = statement.orelse
            other = set() if rest is None else _certain([rest] if isinstance(rest, cst.If) else rest.body.body)
            found |= _certain(statement.body.body) & other
        else:
            found |= names_bound(statement)
    return found


def parameters_not_passed(
    inside: Sequence[cst.BaseStatement], optimizers: Sequence[str], is_method: bool, around: cst.FunctionDef | Loop
) -> set[str]:
    """Parameters of the function around an update that it reads from around itself: what is called, as models are; `self`."""
    called = {root_name(call.func) for one in inside for call in nodes_of(cst.Call, one) if _is_of_module(call)}
    found = {name for name in called if name is not None} | {one.partition(".")[0] for one in optimizers}
    if is_method and isinstance(around, cst.FunctionDef) and around.params.params:
        found.add(around.params.params[0].name.value)
    return found


def _is_of_module(call: cst.Call) -> bool:
    """Whether a call's function is a name, or asks a module for its parameters."""
    is_asked = isinstance(call.func, cst.Attribute) and call.func.attr.value in ("parameters", "named_parameters")
    return isinstance(call.func, cst.Name) or is_asked

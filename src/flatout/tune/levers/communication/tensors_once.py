"""Tensors of records that stay the same are made once, before the loop, and indexed by row in it.

What        `torch.tensor([[r[f] for f in FIELDS] for r in chosen])` with `chosen = [records[i] for i in rows]` in a loop becomes
            one tensor of all records before the loop and `all_x[rows]` in it; NumPy's arrays and stacks of tensors likewise.
Guarantee   EXACT: the same rows of the same numbers.
Refuses     Records that the loop changes or hands on, rows whose making is random, batches that are used in another way.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError
from flatout.core.records.lever import Parameters
from flatout.core.runtime.torch_functions import is_random
from flatout.tune.levers.proposals import source_lever
from flatout.tune.rewrite.enclosing_blocks import (
    Level,
    Parents,
    assignment,
    changed_in_place,
    enclosing_loops,
    levels,
    occurrences,
    parents_of,
    root_name,
    scope_of,
)
from flatout.tune.rewrite.imports import call_name
from flatout.tune.rewrite.source import (
    Change,
    assigned_in,
    code_of,
    expression,
    find,
    fresh_name,
    names_in,
    nodes_of,
    statements,
    with_changes,
)

_CONVERSIONS: Final = {
    "torch.tensor",
    "torch.as_tensor",
    "torch.FloatTensor",
    "torch.LongTensor",
    "torch.stack",
    "numpy.array",
    "numpy.asarray",
    "numpy.stack",
}
_STACKS: Final = {"torch.stack", "numpy.stack"}
_SAMPLES: Final = {"random.sample", "random.choices"}
"""They choose by position alone: of range(len(x)) they choose the positions of what they choose of x."""
_RANDOM: Final = ("random.", "numpy.random.", "torch.rand")


_INDICES: Final = frozenset(
    {"randperm", "permutation", "arange", "range", "argsort", "choice", "randint", "integers", "multinomial", "nonzero"}
)
"""Functions of random, torch and NumPy that give numbers of rows."""
_WORD: Final = re.compile(r"\w+")


class Selection(NamedTuple):
    """What a batch is selected from, and by which rows: an index, or a slice of it."""

    data: cst.BaseExpression
    rows: cst.BaseExpression | cst.BaseSlice
    statement: cst.BaseStatement | None = None
    """The statement that gives the batch its name, when it has one."""


class Conversion(NamedTuple):
    """A call that converts a batch to a tensor; `whole` converts all the data."""

    call: cst.Call
    selection: Selection
    whole: cst.Call
    statement: cst.BaseStatement


def edit(text: str, parameters: Parameters) -> str:
    """Build the tensors once before the loop, and index them inside.

    Raises EditError when that is not certain.
    """
    place = find(text, parameters)
    parents = parents_of(place.module)
    around = tuple(levels(parents, place.statement))
    if not enclosing_loops(parents, place.statement):
        raise EditError("it is in no loop of its function")
    scene = _Scene(place.module, parents, scope_of(place.module, place.function), around)
    conversions = scene.conversions(place.statement)
    return scene.edited(conversions).code


class _Scene:
    """The loop around a batch that is made by hand."""

    def __init__(self, module: cst.Module, parents: Parents, scope: cst.CSTNode, around: Sequence[Level]) -> None:
        self._module = module
        self._parents = parents
        self._scope = scope
        self._around = around
        self._block = around[0].block
        self._taken: set[str] = set()

    # -- what is there --------------------------------------------------------------------------------------------------------

    def conversions(self, anchor: cst.BaseStatement) -> list[Conversion]:
        """All that can be made before the loop in the block of the anchor: of the anchor's own batch.

        Raises EditError when the anchor's cannot.
        """
        found: list[Conversion] = []
        whys: list[str] = []
        for statement in self._block:
            if not isinstance(statement, cst.SimpleStatementLine):
                continue
            for call in nodes_of(cst.Call, statement):
                if call_name(self._module, call.func) in _CONVERSIONS and call.args:
                    try:
                        found.append(self._conversion(call, statement))
                    except EditError as e:
                        whys += [str(e)] if statement is anchor else []
        wanted = [c for c in found if anchor in (c.statement, c.selection.statement)]
        if not wanted:
            raise EditError(whys[0] if whys else "no tensor is made of a batch of records there")
        rows = {code_of(c.selection.rows) for c in wanted}
        return [c for c in found if code_of(c.selection.rows) in rows]

    def _conversion(self, call: cst.Call, statement: cst.BaseStatement) -> Conversion:
        assignments = call.args[0]
        if assignments.keyword is not None:
            raise EditError("what is made a tensor is given by name")
        full, value = call_name(self._module, call.func), assignments.value
        if isinstance(value, (cst.ListComp, cst.GeneratorExp)):
            selection, whole = self._comprehension(value)
        else:
            selection = self._selected(value)
            whole = selection.data
        if full in _STACKS and not isinstance(whole, cst.ListComp):
            whole = expression("[{x}[i] for i in range(len({x}))]", x=whole)
        rest = [a for a in call.args[1:] if names_in(a) & self._in_loop()]
        if rest or (full in _STACKS and len(call.args) > 1 and code_of(call.args[1].value) != "0"):
            raise EditError(f"'{code_of(call.args[1])}' of the tensor")
        all_call = call.with_changes(args=[assignments.with_changes(value=whole), *call.args[1:]])
        found = Conversion(call, selection, all_call, statement)
        self._loop_for(found)  # raises where there is none
        return found

    def _comprehension(self, value: cst.ListComp | cst.GeneratorExp) -> tuple[Selection, cst.BaseExpression]:
        """What `[f(r) for r in batch]` or `[f(x[i]) for i in rows]` is of, and the same of all the data."""
        over = value.for_in
        if over.ifs or over.asynchronous is not None or over.inner_for_in is not None:
            raise EditError("the records are selected one by one")
        self._check_element(value.elt)
        if not self._is_index(over.iter):
            try:
                selection = self._selected(over.iter)
            except EditError:
                selection = self._indexed(value)
            else:
                return selection, cst.ListComp(elt=value.elt, for_in=over.with_changes(iter=selection.data))
        else:
            selection = self._indexed(value)
        if code_of(value.elt) == f"{code_of(selection.data)}[{code_of(over.target)}]":
            return selection, selection.data
        count = expression("range(len({x}))", x=selection.data)
        return selection, cst.ListComp(elt=value.elt, for_in=over.with_changes(iter=count))

    def _is_index(self, node: cst.BaseExpression, *, depth: int = 3) -> bool:
        """Whether it looks like numbers of rows: made by a function that gives such, or a part of what is."""
        if isinstance(node, cst.Subscript):
            return self._is_index(node.value, depth=depth)
        if isinstance(node, cst.Name) and depth:
            assignments = [s for s in nodes_of(cst.Assign, self._scope) if node.value in assigned_in(s)]
            return any(self._is_index(s.value, depth=depth - 1) for s in assignments)
        return isinstance(node, cst.Call) and bool(_INDICES.intersection(_WORD.findall(code_of(node))))

    def _selected(self, node: cst.BaseExpression) -> Selection:
        """What an expression, or the name of one, chooses from what.

        Raises EditError when it chooses nothing that is known.
        """
        if isinstance(node, cst.Name):
            assignments = [s for s in self._block if node.value in assigned_in(s)]
            value = assignment(assignments[0]) if len(assignments) == 1 else None
            if value is None or not isinstance(value[0], cst.Name):
                raise EditError(f"'{node.value}' is not selected there")
            inner = value[1]
            if isinstance(inner, cst.Name):
                raise EditError(f"'{node.value}' is not selected there")
            return self._selected(inner)._replace(statement=assignments[0])
        if isinstance(node, cst.ListComp):
            return self._indexed(node, is_bare=True)
        if isinstance(node, cst.Call) and call_name(self._module, node.func) in _SAMPLES and node.args:
            data = node.args[0].value
            count = expression("range(len({x}))", x=data)
            return Selection(data, node.with_changes(args=[node.args[0].with_changes(value=count), *node.args[1:]]))
        if isinstance(node, cst.Subscript) and len(node.slice) == 1 and isinstance(node.slice[0].slice, cst.Slice):
            return Selection(node.value, node.slice[0].slice)
        raise EditError(f"'{code_of(node)}' is not selected from records")

    def _indexed(self, node: cst.ListComp | cst.GeneratorExp, *, is_bare: bool = False) -> Selection:
        """`[... x[i] ... for i in rows]`: i is used for nothing else; with `is_bare`, there is nothing but x[i]."""
        over = node.for_in
        if over.ifs or over.inner_for_in is not None or not isinstance(over.target, cst.Name):
            raise EditError("the records are selected one by one")
        index = over.target.value
        uses = [
            s
            for s in nodes_of(cst.Subscript, node.elt)
            if m.matches(s, m.Subscript(slice=[m.SubscriptElement(slice=m.Index(value=m.Name(index)))]))
        ]
        if not uses or len(uses) != len(occurrences(node.elt, index)) or (is_bare and uses[0] is not node.elt):
            raise EditError(f"'{index}' is used in another way")
        rows = over.iter
        if isinstance(rows, cst.Call) and isinstance(rows.func, cst.Attribute) and rows.func.attr.value == "tolist":
            rows = rows.func.value
        if isinstance(rows, cst.Call) and code_of(rows.func) == "range":
            if len(rows.args) != 2:
                raise EditError("the rows are a range")
            return Selection(uses[0].value, cst.Slice(lower=rows.args[0].value, upper=rows.args[1].value))
        return Selection(uses[0].value, rows)

    def _check_element(self, element: cst.BaseExpression) -> None:
        """A record's row must come out the same each time, as far as can be seen."""
        for call in nodes_of(cst.Call, element):
            full = call_name(self._module, call.func) or code_of(call.func)
            is_drawn = full.startswith(_RANDOM) or is_random(full.rpartition(".")[2])
            if is_drawn or "rng" in full or "generator" in full or "augment" in full:
                raise EditError(f"'{code_of(call.func)}' may be random")
        if m.findall(element, m.NamedExpr() | m.Await() | m.Lambda()):
            raise EditError("the row is made in a way that cannot be analysed")

    # -- where it can go ------------------------------------------------------------------------------------------------------

    def _in_loop(self) -> set[str]:
        """Names that the innermost loop binds or changes."""
        loop = next(level.owner for level in self._around if isinstance(level.owner, (cst.For, cst.While)))
        return assigned_in(loop) | changed_in_place(loop)

    def _loop_for(self, conversion: Conversion) -> Level:
        """The outermost loop that changes nothing that the tensor of all data is made of, as the level that holds it.

        Raises EditError when the innermost does.
        """
        needs = names_in(conversion.whole) - {
            n for c in nodes_of(cst.CompFor, conversion.whole) for n in names_in(c.target)
        }
        found: Level | None = None
        for inner, outer in zip(self._around, self._around[1:], strict=False):
            loop = inner.owner
            if not isinstance(loop, (cst.For, cst.While)):
                continue
            why = self._why_not(loop, needs, conversion.selection.data)
            if why:
                if found is None:
                    raise EditError(why)
                break
            found = outer
        assert found is not None, "there is a loop"
        return found

    def _why_not(self, loop: cst.For | cst.While, needs: set[str], data: cst.BaseExpression) -> str:
        clash = sorted((assigned_in(loop) | changed_in_place(loop)) & (needs - {"self"}))
        if clash:
            return f"'{clash[0]}' is changed in the loop"
        wanted, root = code_of(data), root_name(data)
        if not root or m.findall(data, m.Call()):
            return f"'{wanted}' is not known to stay the same"
        for name in occurrences(loop, root):
            node: cst.CSTNode = name
            while code_of(node) != wanted and isinstance(self._parents[node], (cst.Attribute, cst.Subscript)):
                node = self._parents[node]
            if code_of(node) == wanted and not self._is_read(node):
                return f"'{wanted}' is handed on in the loop"
        return ""

    def _is_read(self, node: cst.CSTNode) -> bool:
        """Whether the data are only indexed there, gone through, counted, or sampled."""
        above = self._parents[node]
        if isinstance(above, cst.Subscript):
            return not isinstance(self._parents[above], (cst.AssignTarget, cst.AugAssign, cst.Del))
        if isinstance(above, cst.CompFor):
            return True
        call = self._parents[above] if isinstance(above, cst.Arg) else None
        if not isinstance(call, cst.Call):
            return False
        return code_of(call.func) == "len" or call_name(self._module, call.func) in _SAMPLES | _CONVERSIONS

    # -- what is to be there --------------------------------------------------------------------------------------------------

    def edited(self, conversions: list[Conversion]) -> cst.Module:
        """The file with all that made before the loops."""
        changes: dict[cst.CSTNode, Change] = {}
        by_loop: dict[int, tuple[cst.CSTNode, list[cst.BaseStatement]]] = {}
        names: dict[str, str] = {}
        rows = self._rows(conversions, changes)
        for conversion in conversions:
            loop: cst.CSTNode = self._loop_for(conversion).statement
            code = code_of(conversion.whole)
            if code not in names:
                names[code] = self._name(conversion)
                new = statements("{name} = {whole}\n", name=cst.Name(names[code]), whole=conversion.whole)
                by_loop.setdefault(id(loop), (loop, []))[1].extend(new)
            index = rows[id(conversion.selection.statement), code_of(conversion.selection.rows)]
            self._check_use(conversion)
            all_of_it = cst.Subscript(
                cst.Name(names[code]),
                [cst.SubscriptElement(index if isinstance(index, cst.BaseSlice) else cst.Index(index))],
            )
            changes[conversion.call] = all_of_it
        for loop, before in by_loop.values():
            changes[loop] = _preceded(before)
        return with_changes(self._module, changes)

    def _rows(
        self, conversions: Sequence[Conversion], changes: dict[cst.CSTNode, Change]
    ) -> dict[tuple[int, str], cst.BaseExpression | cst.BaseSlice]:
        """What each batch is indexed with; the statement that named the batch names its rows, when they are not a name."""
        found: dict[tuple[int, str], cst.BaseExpression | cst.BaseSlice] = {}
        for conversion in conversions:
            data, rows, statement = conversion.selection
            key = (id(statement), code_of(rows))
            if key in found:
                continue
            found[key] = rows
            if statement is None:
                is_once = sum(code_of(c.selection.rows) == key[1] for c in conversions) == 1
                if not is_once and m.findall(rows, m.Call()):
                    raise EditError(f"'{key[1]}' is called more than once")
                continue
            lengths = self._check_batch(statement, conversions)
            if isinstance(rows, cst.BaseExpression) and not isinstance(rows, cst.Name):
                name = cst.Name(self._fresh("rows"))
                found[key] = name
                changes[statement] = statements("{name} = {rows}\n", name=name, rows=rows)
                for use in lengths:
                    changes[use] = name
            elif lengths:
                raise EditError(f"'{code_of(data)}' is counted in a way that cannot be analysed")
            else:
                changes[statement] = []
        return found

    def _check_batch(self, statement: cst.BaseStatement, conversions: Sequence[Conversion]) -> list[cst.Name]:
        """Where the batch's length is asked for.

        Raises EditError when it is used for anything else than tensors made before the loop.
        """
        assignments = assignment(statement)
        assert assignments is not None
        name = code_of(assignments[0])
        inside = {
            id(n) for c in conversions if c.selection.statement is statement for n in occurrences(c.call.args[0], name)
        }
        inside |= {id(n) for n in occurrences(statement, name)}
        lengths = []
        for use in occurrences(self._scope, name):
            if id(use) in inside:
                continue
            above = self._parents[use]
            call = self._parents[above] if isinstance(above, cst.Arg) else above
            if not isinstance(call, cst.Call) or code_of(call.func) != "len":
                raise EditError(f"'{name}' is used in another way")
            lengths.append(use)
        return lengths

    def _check_use(self, conversion: Conversion) -> None:
        """A slice is a view of the tensor of all data: it must not be changed."""
        assignments = assignment(conversion.statement)
        name = root_name(assignments[0]) if assignments is not None else ""
        if isinstance(conversion.selection.rows, cst.BaseSlice) and name in changed_in_place(self._scope):
            raise EditError(f"'{name}' is changed in place")

    def _name(self, conversion: Conversion) -> str:
        assignments = assignment(conversion.statement)
        target = assignments[0] if assignments is not None else None
        return self._fresh(f"all_{target.value}" if isinstance(target, cst.Name) else "all_rows")

    def _fresh(self, wanted: str) -> str:
        name = fresh_name(self._module, wanted, taken=self._taken)
        self._taken.add(name)
        return name


def _preceded(before: Sequence[cst.BaseStatement]) -> Change:
    return lambda loop: [*before, loop]


LEVER = source_lever(
    __name__,
    edit,
    title="Tensors made once and indexed by row",
    else_because="no tensors are made of Python objects in each step",
)

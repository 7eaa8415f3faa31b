"""Tensors of records that stay the same are made once, before the loop, and indexed by row in it.

What        `torch.tensor([[r[f] for f in FIELDS] for r in chosen])` with `chosen = [records[i] for i in rows]` in a loop becomes
            one tensor of all records before the loop and `all_x[rows]` in it; NumPy's arrays and stacks of tensors likewise.
Guarantee   EXACT: the same rows of the same numbers.
Refuses     Records that the loop changes or hands on, rows whose making is random, batches that are used in another way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import libcst as cst
from libcst import matchers as m

from flatout.errors import EditError
from flatout.levers.syntax.imports import call_name
from flatout.levers.syntax.source import (
    assigned_in,
    code_of,
    expression,
    find,
    fresh_name,
    names_in,
    offered,
    statements,
)
from flatout.levers.syntax.surroundings import (
    Change,
    Level,
    Parents,
    assignment,
    changed_in_place,
    levels,
    occurrences,
    parents_of,
    root_name,
    scope_of,
    with_changes,
)
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal

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
_RANDOM: Final = ("random.", "numpy.random.", "torch.rand", "torch.normal", "torch.bernoulli")


_INDICES: Final = frozenset(
    {"randperm", "permutation", "arange", "range", "argsort", "choice", "randint", "integers", "multinomial", "nonzero"}
)
"""Functions of random, torch and NumPy that give numbers of rows."""
_WORD: Final = re.compile(r"\w+")


class Choice(NamedTuple):
    """What a batch is chosen from, and by which rows: an index, or a slice of it."""

    data: cst.BaseExpression
    rows: cst.BaseExpression | cst.BaseSlice
    statement: cst.BaseStatement | None = None
    """The statement that gives the batch its name, when it has one."""


class Conversion(NamedTuple):
    """A call that makes a tensor of a batch: `whole` makes it of all the data."""

    call: cst.Call
    choice: Choice
    whole: cst.Call
    statement: cst.BaseStatement


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """Where a rule saw tensors made of Python objects in every step."""
    why = "no tensors are made of Python objects in each step"
    yield from offered(LEVER.id, evidence, findings, edit, else_because=why)


def edit(text: str, parameters: Parameters) -> str:
    """The text with tensors made before the loop.

    Raises EditError when that is not certain.
    """
    place = find(text, parameters)
    parents = parents_of(place.module)
    around = tuple(levels(parents, place.statement))
    if len(around) < 2 or not any(isinstance(level.owner, (cst.For, cst.While)) for level in around):
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
            for call in m.findall(statement, m.Call()):
                assert isinstance(call, cst.Call)
                if call_name(self._module, call.func) in _CONVERSIONS and call.args:
                    try:
                        found.append(self._conversion(call, statement))
                    except EditError as e:
                        whys += [str(e)] if statement is anchor else []
        wanted = [c for c in found if anchor in (c.statement, c.choice.statement)]
        if not wanted:
            raise EditError(whys[0] if whys else "no tensor is made of a batch of records there")
        rows = {code_of(c.choice.rows) for c in wanted}
        return [c for c in found if code_of(c.choice.rows) in rows]

    def _conversion(self, call: cst.Call, statement: cst.BaseStatement) -> Conversion:
        given = call.args[0]
        if given.keyword is not None:
            raise EditError("what is made a tensor is given by name")
        full, value = call_name(self._module, call.func), given.value
        if isinstance(value, (cst.ListComp, cst.GeneratorExp)):
            choice, whole = self._comprehension(value)
        else:
            choice = self._chosen(value)
            whole = choice.data
        if full in _STACKS and not isinstance(whole, cst.ListComp):
            whole = expression("[{x}[i] for i in range(len({x}))]", x=whole)
        rest = [a for a in call.args[1:] if names_in(a) & self._in_loop()]
        if rest or (full in _STACKS and len(call.args) > 1 and code_of(call.args[1].value) != "0"):
            raise EditError(f"'{code_of(call.args[1])}' of the tensor")
        all_call = call.with_changes(args=[given.with_changes(value=whole), *call.args[1:]])
        found = Conversion(call, choice, all_call, statement)
        self._loop_for(found)  # raises where there is none
        return found

    def _comprehension(self, value: cst.ListComp | cst.GeneratorExp) -> tuple[Choice, cst.BaseExpression]:
        """What `[f(r) for r in batch]` or `[f(x[i]) for i in rows]` is of, and the same of all the data."""
        over = value.for_in
        if over.ifs or over.asynchronous is not None or over.inner_for_in is not None:
            raise EditError("the records are chosen one by one")
        self._check_element(value.elt)
        if not self._is_index(over.iter):
            try:
                choice = self._chosen(over.iter)
            except EditError:
                choice = self._indexed(value)
            else:
                return choice, cst.ListComp(elt=value.elt, for_in=over.with_changes(iter=choice.data))
        else:
            choice = self._indexed(value)
        if code_of(value.elt) == f"{code_of(choice.data)}[{code_of(over.target)}]":
            return choice, choice.data
        count = expression("range(len({x}))", x=choice.data)
        return choice, cst.ListComp(elt=value.elt, for_in=over.with_changes(iter=count))

    def _is_index(self, node: cst.BaseExpression, *, depth: int = 3) -> bool:
        """Whether it looks like numbers of rows: made by a function that gives such, or a part of what is."""
        if isinstance(node, cst.Subscript):
            return self._is_index(node.value, depth=depth)
        if isinstance(node, cst.Name) and depth:
            given = [s for s in m.findall(self._scope, m.Assign()) if node.value in assigned_in(s)]
            return any(self._is_index(s.value, depth=depth - 1) for s in given if isinstance(s, cst.Assign))
        return isinstance(node, cst.Call) and bool(_INDICES.intersection(_WORD.findall(code_of(node))))

    def _chosen(self, node: cst.BaseExpression) -> Choice:
        """What an expression, or the name of one, chooses from what.

        Raises EditError when it chooses nothing that is known.
        """
        if isinstance(node, cst.Name):
            given = [s for s in self._block if node.value in assigned_in(s)]
            value = assignment(given[0]) if len(given) == 1 else None
            if value is None or not isinstance(value[0], cst.Name):
                raise EditError(f"'{node.value}' is not chosen there")
            inner = value[1]
            if isinstance(inner, cst.Name):
                raise EditError(f"'{node.value}' is not chosen there")
            return self._chosen(inner)._replace(statement=given[0])
        if isinstance(node, cst.ListComp):
            return self._indexed(node, is_bare=True)
        if isinstance(node, cst.Call) and call_name(self._module, node.func) in _SAMPLES and node.args:
            data = node.args[0].value
            count = expression("range(len({x}))", x=data)
            return Choice(data, node.with_changes(args=[node.args[0].with_changes(value=count), *node.args[1:]]))
        if isinstance(node, cst.Subscript) and len(node.slice) == 1 and isinstance(node.slice[0].slice, cst.Slice):
            return Choice(node.value, node.slice[0].slice)
        raise EditError(f"'{code_of(node)}' is not chosen from records")

    def _indexed(self, node: cst.ListComp | cst.GeneratorExp, *, is_bare: bool = False) -> Choice:
        """`[... x[i] ... for i in rows]`: i is used for nothing else; with `is_bare`, there is nothing but x[i]."""
        over = node.for_in
        if over.ifs or over.inner_for_in is not None or not isinstance(over.target, cst.Name):
            raise EditError("the records are chosen one by one")
        index = over.target.value
        uses = [
            s
            for s in m.findall(node.elt, m.Subscript(slice=[m.SubscriptElement(slice=m.Index(value=m.Name(index)))]))
            if isinstance(s, cst.Subscript)
        ]
        if not uses or len(uses) != len(occurrences(node.elt, index)) or (is_bare and uses[0] is not node.elt):
            raise EditError(f"'{index}' is used in another way")
        rows = over.iter
        if isinstance(rows, cst.Call) and isinstance(rows.func, cst.Attribute) and rows.func.attr.value == "tolist":
            rows = rows.func.value
        if isinstance(rows, cst.Call) and code_of(rows.func) == "range":
            if len(rows.args) != 2:
                raise EditError("the rows are a range")
            return Choice(uses[0].value, cst.Slice(lower=rows.args[0].value, upper=rows.args[1].value))
        return Choice(uses[0].value, rows)

    def _check_element(self, element: cst.BaseExpression) -> None:
        """A record's row must come out the same each time, as far as can be seen."""
        for call in m.findall(element, m.Call()):
            assert isinstance(call, cst.Call)
            full = call_name(self._module, call.func) or code_of(call.func)
            if full.startswith(_RANDOM) or "rng" in full or "generator" in full or "augment" in full:
                raise EditError(f"'{code_of(call.func)}' may be random")
        if m.findall(element, m.NamedExpr() | m.Await() | m.Lambda()):
            raise EditError("the row is made in a way that is not seen through")

    # -- where it can go ------------------------------------------------------------------------------------------------------

    def _in_loop(self) -> set[str]:
        """Names that the innermost loop binds or changes."""
        loop = next(level.owner for level in self._around if isinstance(level.owner, (cst.For, cst.While)))
        return assigned_in(loop) | changed_in_place(loop)

    def _loop_for(self, conversion: Conversion) -> Level:
        """The outermost loop that changes nothing that the tensor of all data is made of, as the level that holds it.

        Raises EditError when the innermost does.
        """
        needs = names_in(conversion.whole) - {n for c in m.findall(conversion.whole, m.CompFor()) for n in _targets(c)}
        found: Level | None = None
        for inner, outer in zip(self._around, self._around[1:], strict=False):
            loop = inner.owner
            if not isinstance(loop, (cst.For, cst.While)):
                continue
            why = self._why_not(loop, needs, conversion.choice.data)
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
        made: dict[int, tuple[cst.CSTNode, list[cst.BaseStatement]]] = {}
        names: dict[str, str] = {}
        rows = self._rows(conversions, changes)
        for conversion in conversions:
            loop: cst.CSTNode = self._loop_for(conversion).statement
            code = code_of(conversion.whole)
            if code not in names:
                names[code] = self._name(conversion)
                new = statements("{name} = {whole}\n", name=cst.Name(names[code]), whole=conversion.whole)
                made.setdefault(id(loop), (loop, []))[1].extend(new)
            index = rows[id(conversion.choice.statement), code_of(conversion.choice.rows)]
            self._check_use(conversion)
            all_of_it = cst.Subscript(
                cst.Name(names[code]),
                [cst.SubscriptElement(index if isinstance(index, cst.BaseSlice) else cst.Index(index))],
            )
            changes[conversion.call] = _always(all_of_it)
        for loop, before in made.values():
            changes[loop] = _preceded(before)
        return with_changes(self._module, changes)

    def _rows(
        self, conversions: Sequence[Conversion], changes: dict[cst.CSTNode, Change]
    ) -> dict[tuple[int, str], cst.BaseExpression | cst.BaseSlice]:
        """What each batch is indexed with; the statement that named the batch names its rows, when they are not a name."""
        found: dict[tuple[int, str], cst.BaseExpression | cst.BaseSlice] = {}
        for conversion in conversions:
            data, rows, statement = conversion.choice
            key = (id(statement), code_of(rows))
            if key in found:
                continue
            found[key] = rows
            if statement is None:
                is_once = sum(code_of(c.choice.rows) == key[1] for c in conversions) == 1
                if not is_once and m.findall(rows, m.Call()):
                    raise EditError(f"'{key[1]}' is called more than once")
                continue
            lengths = self._check_batch(statement, conversions)
            if isinstance(rows, cst.BaseExpression) and not isinstance(rows, cst.Name):
                name = cst.Name(self._fresh("rows"))
                found[key] = name
                changes[statement] = _stated(statements("{name} = {rows}\n", name=name, rows=rows))
                for use in lengths:
                    changes[use] = _always(name)
            elif lengths:
                raise EditError(f"'{code_of(data)}' is counted in a way that is not seen through")
            else:
                changes[statement] = lambda _: []
        return found

    def _check_batch(self, statement: cst.BaseStatement, conversions: Sequence[Conversion]) -> list[cst.Name]:
        """Where the batch's length is asked for.

        Raises EditError when it is used for anything else than tensors made before the loop.
        """
        given = assignment(statement)
        assert given is not None
        name = code_of(given[0])
        inside = {
            id(n) for c in conversions if c.choice.statement is statement for n in occurrences(c.call.args[0], name)
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
        given = assignment(conversion.statement)
        name = root_name(given[0]) if given is not None else ""
        if isinstance(conversion.choice.rows, cst.BaseSlice) and name in self._changed():
            raise EditError(f"'{name}' is changed in place")

    def _changed(self) -> set[str]:
        return changed_in_place(self._scope)

    def _name(self, conversion: Conversion) -> str:
        given = assignment(conversion.statement)
        target = given[0] if given is not None else None
        return self._fresh(f"all_{target.value}" if isinstance(target, cst.Name) else "all_rows")

    def _fresh(self, wanted: str) -> str:
        name = fresh_name(self._module, wanted)
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name


def _targets(node: cst.CSTNode) -> set[str]:
    assert isinstance(node, cst.CompFor)
    return names_in(node.target)


def _always(new: cst.CSTNode) -> Change:
    return lambda _: new


def _stated(new: Sequence[cst.BaseStatement]) -> Change:
    return lambda _: new


def _preceded(before: Sequence[cst.BaseStatement]) -> Change:
    return lambda loop: [*before, loop]


LEVER = Lever(
    id="communication.tensors-once",
    title="Tensors made once and indexed by row",
    guarantee="exact",
    module=__name__,
    propose=propose,
    edit=edit,
    is_local=True,
)

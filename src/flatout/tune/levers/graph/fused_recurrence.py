"""A recurrent cell that is called step by step runs over the whole sequence in one call.

What        A loop over time around nn.LSTMCell, nn.GRUCell or nn.RNNCell becomes one call of torch.lstm, torch.gru or
            torch.rnn_tanh with the cell's own parameters; modules and state dicts stay. What is done to each input before, or to
            each state after it, is done to the whole sequence.
Guarantee   BOUNDED: the same arithmetic, with the products of all steps' inputs in one.
Refuses     Inputs that depend on the state (decoding), loops that are left early, anything in the loop that is neither the cell
            nor done to each position alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Parameters
from flatout.tune.levers.proposals import source_lever
from flatout.tune.rewrite.enclosing_blocks import (
    Level,
    assignment,
    closed_over,
    levels,
    occurrences,
    only_small,
    parents_of,
    scope_of,
)
from flatout.tune.rewrite.imports import call_name
from flatout.tune.rewrite.source import (
    Change,
    SourcePlace,
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

_CELLS: Final = {"torch.nn.LSTMCell": "lstm", "torch.nn.GRUCell": "gru", "torch.nn.RNNCell": "rnn_tanh"}
_COST_FRACTION: Final = 0.95
"""At most so much of the loop's time goes; the trial of the rule knows the cells alone, without what autograd does between."""
_RESHAPING: Final = {
    "view",
    "reshape",
    "flatten",
    "squeeze",
    "unsqueeze",
    "t",
    "transpose",
    "permute",
    "chunk",
    "split",
    "item",
}
"""Methods that speak of positions of the shape, which are others for a whole sequence."""


class Sequential(NamedTuple):
    """A whole sequence of which the loop reads one position at a time; `dim` is the dimension of time."""

    value: cst.BaseExpression
    dim: int


class Cell(NamedTuple):
    """A statement `h, c = cell(x, (h, c))`, with the names of its states (one name for a pair that stays together)."""

    module: cst.BaseExpression
    kind: str
    has_biases: bool
    assigned: cst.BaseExpression
    states: tuple[str, ...]


def _of_cells(evidence: Evidence, findings: Sequence[Finding]) -> list[Finding]:
    """Findings about the lines that call a recurrent cell."""
    cells = {r.source for r in evidence.recurrences}
    lines = {(s.file, s.line) for s in (evidence.source_of(i) for i in cells) if s is not None}
    return [f for f in findings if any((p.file, p.line) in lines for p in (f.where, *f.also) if p is not None)]


def edit(text: str, parameters: Parameters) -> str:
    """Write one call over the whole sequence in place of the loop.

    Raises EditError when that is not certain.
    """
    place = find(text, parameters)
    around = tuple(levels(parents_of(place.module), place.statement))
    if len(around) < 2 or not isinstance(around[0].owner, cst.For):
        raise EditError("it is not directly in a for loop")
    loop = around[0].owner
    leaving = m.Break() | m.Continue() | m.Return() | m.Yield() | m.Await()
    if loop.orelse is not None or loop.asynchronous is not None or m.findall(loop, leaving):
        raise EditError("the loop may be left early")
    return _Conversion(place, around[1], loop).text()


class _Conversion:
    """One loop on its way to statements about whole sequences."""

    def __init__(self, place: SourcePlace, level: Level, loop: cst.For) -> None:
        self._module = place.module
        self._scope = scope_of(place.module, place.function)
        self._captured = closed_over(place.module, place.function)
        self._loop = loop
        self._before = level.block[: level.at]
        self._new: list[cst.BaseStatement] = []
        self._changes: dict[cst.CSTNode, Change] = {}
        self._count: tuple[str, cst.BaseExpression | None, cst.BaseExpression | None] | None = None
        self._known: dict[str, Sequential] = {}
        self._in_loop = assigned_in(loop)
        self._read_header()

    def text(self) -> str:
        """The text of the changed file."""
        body: list[cst.BaseStatement] = [s for s in self._loop.body.body if isinstance(s, cst.BaseStatement)]
        if not any(self._cell(s) is not None for s in body):
            raise EditError("no recurrent cell of this file is called there")
        for at, statement in enumerate(body):
            self._convert(statement, body[at + 1 :])
        self._check_what_stays()
        self._changes[self._loop] = self._new
        return with_changes(self._module, self._changes).code

    # -- what the loop goes over ----------------------------------------------------------------------------------------------

    def _read_header(self) -> None:
        target: cst.BaseExpression = self._loop.target
        over = self._loop.iter
        if isinstance(over, cst.Call) and code_of(over.func) == "enumerate" and len(over.args) == 1:
            if not isinstance(target, cst.Tuple) or len(target.elements) != 2:
                raise EditError("the loop counts in another way")
            self._count = (code_of(target.elements[0].value), None, None)
            target, over = target.elements[1].value, over.args[0].value
        if not isinstance(target, cst.Name):
            raise EditError("the loop goes over several things")
        if isinstance(over, cst.Call) and code_of(over.func) == "range":
            bounds = [a.value for a in over.args]
            if not 1 <= len(bounds) <= 2:
                raise EditError("the loop goes in strides")
            start = bounds[0] if len(bounds) == 2 and code_of(bounds[0]) != "0" else None
            self._count = (target.value, start, bounds[-1])
            return
        self._known[target.value] = _unbound(self._module, over)

    def _convert(self, statement: cst.BaseStatement, rest: Sequence[cst.BaseStatement]) -> None:
        cell = self._cell(statement)
        if cell is not None:
            self._run(cell, rest)
            return
        assigned = assignment(statement)
        if assigned is not None and isinstance(assigned[0], cst.Name):
            name = assigned[0].value
            whole = self._whole(assigned[1])
            if name in self._known or self._is_wanted_later(name):
                raise EditError(f"'{name}' of the last position is wanted after the loop")
            self._known[name] = whole
            return
        stored = self._stored(statement)
        if stored is None:
            raise EditError(f"'{code_of(statement).splitlines()[0]}' is not done to each position alone")
        self._store(*stored)

    # -- cells ----------------------------------------------------------------------------------------------------------------

    def _cell(self, statement: cst.BaseStatement) -> Cell | None:
        """The call of a recurrent cell that this statement is."""
        assigned = assignment(statement)
        if assigned is None or not isinstance(assigned[1], cst.Call) or len(assigned[1].args) != 2:
            return None
        built = _cell_kind(self._module, assigned[1].func)
        if built is None:
            return None
        kind, has_biases = built
        one, two = (a.value for a in assigned[1].args)
        if any(a.keyword is not None for a in assigned[1].args):
            raise EditError("the cell's arguments have names")
        states, fed = _names(assigned[0]), _names(two)
        if not states or states != fed or (kind != "lstm" and len(states) != 1) or len(states) > 2:
            raise EditError("the cell does not get the state that it gave")
        return Cell(assigned[1].func, kind, has_biases, one, states)

    def _run(self, cell: Cell, rest: Sequence[cst.BaseStatement]) -> None:
        """Add the call over the whole sequence; the first state is known as a sequence from now on."""
        whole = self._whole(cell.assigned)
        state, sequence = self._first_state(cell, whole)
        name = self._hidden_name(cell, rest)
        train = "True, 1, 0.0, True, False" if cell.has_biases else "False, 1, 0.0, True, False"
        parameters = expression("list({cell}.parameters())", cell=cell.module)
        first = "True" if whole.dim == 1 else "False"
        call = expression(
            f"torch.{cell.kind}({{x}}, {{state}}, {{parameters}}, {train}, {first})",
            x=sequence,
            state=state,
            parameters=parameters,
        )
        wanted = [self._is_wanted_later(s) for s in cell.states]
        ends = cell.states if len(cell.states) == 2 or cell.kind != "lstm" else (f"{name}_h", f"{name}_c")
        if not any(wanted):
            ends = tuple("_" for _ in ends)
        self._new += statements(f"{', '.join((name, *ends))} = {{call}}\n", call=call)
        if any(wanted):
            last = ", ".join(f"{e}[0]" for e in ends)
            self._new += statements(f"{', '.join(cell.states)} = {last}\n")
        of_state = Sequential(cst.Name(name), whole.dim)
        if cell.kind == "lstm" and len(cell.states) == 1:
            self._known[f"{cell.states[0]}[0]"] = of_state
        else:
            self._known[cell.states[0]] = of_state

    def _first_state(self, cell: Cell, whole: Sequential) -> tuple[cst.BaseExpression, cst.BaseExpression]:
        """The state that the call begins with, and the sequence (as a name where the state is made of its shape)."""
        starts = [self._start_of(s) for s in cell.states]
        if any(s is not None and code_of(s) == "None" for s in starts):
            if len(cell.states) != 1:
                raise EditError("the state starts as None")
            sequence = whole.value
            if not isinstance(sequence, cst.Name):
                sequence = cst.Name(fresh_name(self._module, "sequence"))
                self._new += statements("{name} = {value}\n", name=sequence, value=whole.value)
            zeros = f"{sequence.value}.new_zeros(1, {sequence.value}.shape[{1 - whole.dim}], {{cell}}.hidden_size)"
            start = expression(zeros, cell=cell.module)
            if cell.kind != "lstm":
                return start, sequence
            self._new += statements("zeros = {start}\n", start=start)
            return expression("(zeros, zeros)"), sequence
        if cell.kind != "lstm":
            return expression(f"{cell.states[0]}[None]"), whole.value
        if len(cell.states) == 1:
            return expression(f"[part[None] for part in {cell.states[0]}]"), whole.value
        return expression(f"({cell.states[0]}[None], {cell.states[1]}[None])"), whole.value

    def _start_of(self, name: str) -> cst.BaseExpression | None:
        """What the name is assigned last in the block before the loop."""
        for statement in reversed(self._before):
            if name in assigned_in(statement):
                small = only_small(statement)
                return small.value if isinstance(small, cst.Assign) else None
        return None

    def _hidden_name(self, cell: Cell, rest: Sequence[cst.BaseStatement]) -> str:
        """The name of the list that gathers the states themselves; else a fresh one."""
        own = f"{cell.states[0]}[0]" if cell.kind == "lstm" and len(cell.states) == 1 else cell.states[0]
        for statement in rest:
            stored = self._stored(statement)
            if stored is not None and code_of(_unwrapped(stored[1])) == own:
                return stored[0]
        return fresh_name(self._module, "hidden")

    # -- what is kept of each position ----------------------------------------------------------------------------------------

    def _stored(self, statement: cst.BaseStatement) -> tuple[str, cst.BaseExpression] | None:
        """Name and value of `name.append(value)`, `name[:, t] = value` and `name[t] = value`."""
        small = only_small(statement)
        if isinstance(small, cst.Expr) and m.matches(
            small.value, m.Call(func=m.Attribute(value=m.Name(), attr=m.Name("append")), args=[m.Arg()])
        ):
            call = small.value
            assert isinstance(call, cst.Call) and isinstance(call.func, cst.Attribute)
            return code_of(call.func.value), call.args[0].value
        assigned = assignment(statement)
        if (
            assigned is None
            or not isinstance(assigned[0], cst.Subscript)
            or not isinstance(assigned[0].value, cst.Name)
        ):
            return None
        if self._position(assigned[0]) is not None:
            return assigned[0].value.value, assigned[1]
        return None

    def _store(self, name: str, value: cst.BaseExpression) -> None:
        """Make the name that gathers positions the sequence itself."""
        start = next((s for s in reversed(self._before) if name in assigned_in(s)), None)
        initial = assignment(start) if start is not None else None
        if start is None or initial is None or not isinstance(initial[0], cst.Name) or name in self._captured:
            raise EditError(f"'{name}' does not start in the block of the loop")
        between = self._before[self._before.index(start) + 1 :]
        if any(occurrences(s, name) for s in between) or len(occurrences(self._loop, name)) != 1:
            raise EditError(f"'{name}' is read before the loop ends")
        bare = _unwrapped(value)
        whole = self._whole(bare)
        if code_of(whole.value) != name:
            self._new += statements("{name} = {value}\n", name=cst.Name(name), value=whole.value)
        is_list = isinstance(initial[1], cst.List) and not initial[1].elements
        is_buffer = isinstance(initial[1], cst.Call) and not isinstance(self._loop.iter, cst.List)
        if is_list:
            self._join(name, whole.dim, bare is not value)
        elif not is_buffer or bare is not value or not self._is_same_position(name, whole.dim):
            raise EditError(f"'{name}' starts with something")
        self._changes[start] = []

    def _join(self, name: str, dim: int, is_unsqueezed: bool) -> None:
        """Have the places that stack the list take the sequence."""
        in_loop = {id(n) for n in occurrences(self._loop, name)}
        parents = parents_of(self._module)
        for use in occurrences(self._scope, name):
            if id(use) in in_loop or isinstance(parents[use], cst.AssignTarget):
                continue
            above = parents[use]
            call = parents[above] if isinstance(above, cst.Arg) else above
            is_first = isinstance(call, cst.Call) and call.args[0] is above
            full = call_name(self._module, call.func) if isinstance(call, cst.Call) else ""
            if (
                not is_first
                or not isinstance(call, cst.Call)
                or full != ("torch.cat" if is_unsqueezed else "torch.stack")
            ):
                raise EditError(f"'{name}' is used other than in a stack")
            wanted = (
                int(code_of(call.args[1].value)) if len(call.args) == 2 and _is_number(call.args[1].value) else None
            )
            wanted = 0 if len(call.args) == 1 else wanted
            if wanted == dim:
                new = expression(name)
            elif wanted in (0, 1):
                new = expression(f"{name}.transpose(0, 1)")
            elif wanted in (2, -1) and dim == 1:
                new = expression(f"{name}.transpose(1, 2)")
            else:
                raise EditError(f"'{name}' is stacked along another dimension")
            self._changes[call] = new

    def _is_same_position(self, name: str, dim: int) -> bool:
        found = m.findall(self._loop, m.Subscript(value=m.Name(name)))
        return all(isinstance(f, cst.Subscript) and self._position(f) == dim for f in found)

    # -- expressions ----------------------------------------------------------------------------------------------------------

    def _position(self, node: cst.Subscript) -> int | None:
        """Time's dimension in `x[t]` (0), `x[:, t]` and `x[:, t, :]` (1); None for another index."""
        if self._count is None:
            return None
        parts = [code_of(e.slice) for e in node.slice]
        while len(parts) > 1 and parts[-1] == ":":
            parts.pop()
        return {(self._count[0],): 0, (":", self._count[0]): 1}.get(tuple(parts))

    def _whole(self, node: cst.BaseExpression) -> Sequential:
        """What an expression about one position is for the whole sequence.

        Raises EditError when it is not about each position alone.
        """
        known = self._known.get(code_of(node))
        if known is not None:
            return known
        if isinstance(node, cst.Subscript):
            dim = self._position(node)
            if dim is not None and not names_in(node.value) & self._in_loop:
                return Sequential(self._sliced(node.value, dim), dim)
        if isinstance(node, cst.Call):
            return self._called(node)
        if isinstance(node, cst.BinaryOperation):
            sides = [node.left, node.right]
            wholes = [None if _is_literal(s) else self._whole(s) for s in sides]
            dims = {w.dim for w in wholes if w is not None}
            if len(dims) == 1 and not isinstance(node.operator, cst.MatrixMultiply):
                left, right = (s if w is None else w.value for s, w in zip(sides, wholes, strict=True))
                return Sequential(node.with_changes(left=left, right=right), dims.pop())
        raise EditError(f"'{code_of(node)}' is not known for the whole sequence")

    def _called(self, node: cst.Call) -> Sequential:
        """A function of one position, or features put side by side."""
        if call_name(self._module, node.func) in ("torch.cat", "torch.concat") and len(node.args) == 2:
            parts, dim = node.args[0].value, code_of(node.args[1].value)
            if isinstance(parts, (cst.List, cst.Tuple)) and dim in ("1", "-1"):
                wholes = [self._whole(e.value) for e in parts.elements]
                if len({w.dim for w in wholes}) == 1:
                    elements = [e.with_changes(value=w.value) for e, w in zip(parts.elements, wholes, strict=True)]
                    last = node.args[1].with_changes(value=expression("-1"))
                    first = node.args[0].with_changes(value=parts.with_changes(elements=elements))
                    return Sequential(node.with_changes(args=[first, last]), wholes[0].dim)
        if isinstance(node.func, cst.Attribute) and not node.args and node.func.attr.value not in _RESHAPING:
            whole = self._whole(node.func.value)
            return Sequential(node.with_changes(func=node.func.with_changes(value=whole.value)), whole.dim)
        if len(node.args) == 1 and node.args[0].keyword is None and not names_in(node.func) & self._in_loop:
            whole = self._whole(node.args[0].value)
            return Sequential(node.with_changes(args=[node.args[0].with_changes(value=whole.value)]), whole.dim)
        raise EditError(f"'{code_of(node)}' is not done to each position alone")

    def _sliced(self, node: cst.BaseExpression, dim: int) -> cst.BaseExpression:
        """The sequence as far as the loop goes."""
        assert self._count is not None
        _, start, stop = self._count
        is_all = stop is None or self._is_length(stop, node, dim)
        if start is None and is_all:
            return node
        begin, end = "" if start is None else code_of(start), "" if is_all or stop is None else code_of(stop)
        colon = f"{begin}:{end}" if not any(c in begin + end for c in " ([") else f"{begin} : {end}".strip()
        return expression(f"{{x}}[{':, ' if dim else ''}{colon}]", x=node)

    def _is_length(self, stop: cst.BaseExpression, node: cst.BaseExpression, dim: int) -> bool:
        """Whether a bound is the sequence's own length."""
        x, bound = code_of(node), code_of(stop)
        own = {f"{x}.shape[{dim}]", f"{x}.size({dim})"} | ({f"len({x})"} if dim == 0 else set())
        if bound in own:
            return True
        if not isinstance(stop, cst.Name):
            return False
        assigned = [s for s in nodes_of(cst.Assign, self._scope) if bound in assigned_in(s)]
        if len(assigned) != 1 or len(assigned[0].targets) != 1:
            return False
        target, value = assigned[0].targets[0].target, code_of(assigned[0].value)
        if isinstance(target, cst.Tuple):
            names = [code_of(e.value) for e in target.elements]
            return value in (f"{x}.shape", f"{x}.size()", f"{x}.shape[:2]") and names.index(bound) == dim
        return value in own

    # -- what stays -----------------------------------------------------------------------------------------------------------

    def _is_wanted_later(self, name: str) -> bool:
        """Whether a name is read outside the loop, after it or where another round of an outer loop comes by."""
        inside = {id(n) for n in occurrences(self._loop, name)}
        before = {id(n) for s in self._before for n in occurrences(s, name)}
        return any(id(n) not in inside | before for n in occurrences(self._scope, name)) or name in self._captured

    def _check_what_stays(self) -> None:
        counter = self._count[0] if self._count is not None else ""
        if counter and counter != "_" and self._is_wanted_later(counter):
            raise EditError(f"'{counter}' is wanted after the loop")
        for statement in self._new:
            if counter and occurrences(statement, counter):
                raise EditError(f"'{counter}' is used in another way")


def _cell_kind(module: cst.Module, node: cst.BaseExpression) -> tuple[str, bool] | None:
    """Name of torch's function and whether it has biases, for a cell that the file constructs under this name; else None."""
    wanted = code_of(node)
    built = [a.value for a in nodes_of(cst.Assign, module) if any(code_of(t.target) == wanted for t in a.targets)]
    kinds = {(_CELLS.get(call_name(module, v.func), "") if isinstance(v, cst.Call) else "") for v in built}
    if len(kinds) != 1 or "" in kinds:
        return None
    kind, has_biases = kinds.pop(), True
    for call in built:
        assert isinstance(call, cst.Call)
        options = {a.keyword.value: code_of(a.value) for a in call.args if a.keyword is not None}
        if len([a for a in call.args if a.keyword is None]) > 2 or options.get("bias", "True") not in ("True", "False"):
            raise EditError("how the cell is made is not written out")
        has_biases = options.get("bias", "True") == "True"
        if kind == "rnn_tanh" and "nonlinearity" in options:
            kind = {"'tanh'": "rnn_tanh", "'relu'": "rnn_relu"}.get(options["nonlinearity"].replace('"', "'"), "")
        if not kind:
            raise EditError("the cell's nonlinearity is not written out")
    return kind, has_biases


def _unbound(module: cst.Module, over: cst.BaseExpression) -> Sequential:
    """What `for x_t in ...` goes over, and along which dimension."""
    if isinstance(over, cst.Call) and isinstance(over.func, cst.Attribute) and over.func.attr.value == "unbind":
        is_function = call_name(module, over.func) == "torch.unbind"
        arguments = over.args[1:] if is_function else over.args
        dim = code_of(arguments[0].value) if arguments else "0"
        if len(arguments) > 1 or dim not in ("0", "1"):
            raise EditError("the loop goes along another dimension")
        return Sequential(over.args[0].value if is_function else over.func.value, int(dim))
    if m.matches(over, m.Call(func=m.Attribute(value=m.Name(), attr=m.Name("transpose")))):
        assert isinstance(over, cst.Call) and isinstance(over.func, cst.Attribute)
        if sorted(code_of(a.value) for a in over.args) == ["0", "1"]:
            return Sequential(over.func.value, 1)
    if isinstance(over, (cst.Name, cst.Attribute)):
        return Sequential(over, 0)
    raise EditError(f"'{code_of(over)}' is not known to be a sequence")


def _names(node: cst.BaseExpression) -> tuple[str, ...]:
    """The names of a tuple of names, or of one; () for anything else."""
    if isinstance(node, cst.Name):
        return (node.value,)
    if isinstance(node, cst.Tuple) and all(isinstance(e.value, cst.Name) for e in node.elements):
        return tuple(code_of(e.value) for e in node.elements)
    return ()


def _unwrapped(node: cst.BaseExpression) -> cst.BaseExpression:
    """`x` of `x.unsqueeze(1)`, which is joined by torch.cat."""
    if m.matches(node, m.Call(func=m.Attribute(attr=m.Name("unsqueeze")), args=[m.Arg(value=m.Integer("1"))])):
        assert isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute)
        return node.func.value
    return node


def _is_literal(node: cst.BaseExpression) -> bool:
    return isinstance(node, (cst.Integer, cst.Float)) or (
        isinstance(node, cst.UnaryOperation) and isinstance(node.expression, (cst.Integer, cst.Float))
    )


def _is_number(node: cst.BaseExpression) -> bool:
    return code_of(node).removeprefix("-").isdigit()


LEVER = source_lever(
    __name__,
    edit,
    title="A recurrent cell over the whole sequence in one call",
    else_because="no recurrent cell is called step by step",
    findings=_of_cells,
    cost_fraction=_COST_FRACTION,
)

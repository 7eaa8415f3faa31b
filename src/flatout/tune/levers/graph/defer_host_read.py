"""A value that was read in every step stays on the device, and is read where it is printed.

What        `loss.item()` (or `float(loss)`) that goes to a sum, a running mean, a list or a dictionary becomes `loss.detach()`;
            what was made of it is read where it is used: after the loop, or under an `if` of every so many steps. A
            `torch.cuda.synchronize()` around which no time is taken goes. What the loop makes on the host and sends to the device
            (`torch.randint(...).to(device)`) is sent with `non_blocking=True`: else the host waits there instead. A list gets
            copies of its own, since captured graphs write over what they returned.
Guarantee   EXACT for all that is trained. A sum of losses that is printed is taken in the losses' own precision.
Refuses     Values that steer the loop, that go to other functions in every step, or into attributes; tensors that are changed in
            place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError
from flatout.core.records.lever import Parameters
from flatout.tune.levers.proposals import source_lever
from flatout.tune.rewrite.calls import calls_ending
from flatout.tune.rewrite.enclosing_blocks import (
    Loop,
    Parents,
    changed_in_place,
    enclosing_loops,
    levels,
    occurrences,
    only_small,
    parents_of,
    scope_of,
)
from flatout.tune.rewrite.imports import call_name
from flatout.tune.rewrite.source import (
    Change,
    assigned_in,
    code_of,
    expression,
    find,
    nodes_of,
    statements,
    with_changes,
)

Kind = Literal["number", "list", "listed", "dict"]
"""A number; a list that is appended to; a list, or a dictionary, that a comprehension makes in every step."""

_SAME_MEMORY: Final = frozenset(["detach", "view", "reshape", "squeeze", "unsqueeze", "flatten", "float", "cpu", "to"])
"""Methods whose result may be the tensor itself."""
_COUNTS: Final = frozenset(["eq", "ne", "argmax", "argmin", "count_nonzero", "numel"])
_FACTORIES: Final = frozenset(
    f"torch.{name}"
    for name in ("rand", "randn", "randint", "randperm", "tensor", "arange", "from_numpy", "zeros", "ones")
)
_CLOCKS: Final = ("perf_counter", "monotonic", "time", "process_time", "elapsed_time", "record")


class Carrier(NamedTuple):
    """A name that carries a value that was read from step to step."""

    name: str
    kind: Kind


def edit(text: str, parameters: Parameters) -> str:
    """Leave on the device what the statement reads, and read it where it is used."""
    place = find(text, parameters)
    small = only_small(place.statement)
    if small is None:
        raise EditError("what is read there steers the script")
    parents = parents_of(place.module)
    loops = enclosing_loops(parents, place.statement)
    if not loops:
        raise EditError("the statement is in no loop of its function")
    if call_name(place.module, _called(small)) == "torch.cuda.synchronize":
        return _without_wait(place.module, loops[0], place.statement)
    return _Deferring(place.module, place.function, loops[0], parents).edited(small)


def _called(small: cst.BaseSmallStatement) -> cst.BaseExpression:
    is_call = isinstance(small, cst.Expr) and isinstance(small.value, cst.Call)
    return small.value.func if is_call else cst.Name("_")  # type: ignore[attr-defined]


def _without_wait(module: cst.Module, loop: Loop, statement: cst.BaseStatement) -> str:
    clocks = m.findall(loop, m.Call(func=m.Attribute() | m.Name()))
    if any(code_of(c.func).rpartition(".")[2] in _CLOCKS for c in clocks if isinstance(c, cst.Call)):
        raise EditError("times are taken in the loop; waits belong to that")
    if len(loop.body.body) == 1:
        raise EditError("the loop does nothing else")
    return with_changes(module, {statement: []}).code


class _Deferring:
    """One edit: the names that carry what was read, and the changes to the tree."""

    def __init__(self, module: cst.Module, function: cst.FunctionDef | None, loop: Loop, parents: Parents) -> None:
        self._module = module
        self._loop = loop
        self._parents = parents
        self._scope = scope_of(module, function)
        shared = m.findall(self._scope, m.Global() | m.Nonlocal())
        self._shared = {item.name.value for s in shared for item in s.names}  # type: ignore[attr-defined]
        self._in_place = changed_in_place(self._scope)
        self._changes: dict[cst.CSTNode, Change] = {}
        self._are_counts = False

    def edited(self, small: cst.BaseSmallStatement) -> str:
        reads = [c for c in nodes_of(cst.Call, small) if _read(c) is not None]
        if not reads:
            raise EditError("nothing is read there by `.item()` or `float()`")
        carriers: list[Carrier] = []
        for read in reads:
            carriers.append(self._carrier(read))
            self._keep_on_device(read, carriers[-1].kind)
        done: set[str] = set()
        while carriers:
            carrier = carriers.pop()
            if carrier.name not in done:
                done.add(carrier.name)
                carriers += self._follow(carrier)
        self._send_without_waiting()
        return with_changes(self._module, self._changes).code

    def _send_without_waiting(self) -> None:
        """Copies to the device of what the loop makes on the host."""
        assigns = (a for a in nodes_of(cst.Assign, self._loop) if len(a.targets) == 1 and self._is_host_value(a.value))
        host_names = {a.targets[0].target.value for a in assigns if isinstance(a.targets[0].target, cst.Name)}
        for call in calls_ending(self._loop, "to"):
            if len(call.args) != 1 or call.args[0].star:
                continue
            sent = cst.ensure_type(call.func, cst.Attribute).value
            is_host_value = self._is_host_value(sent) or (isinstance(sent, cst.Name) and sent.value in host_names)
            target = call.args[0]
            is_device = target.keyword is None or target.keyword.value == "device"
            if is_host_value and is_device and not call_name(self._module, target.value).startswith("torch."):
                new = call.with_changes(args=[*call.args, cst.parse_expression("f(non_blocking=True)").args[0]])  # type: ignore[attr-defined]
                self._changes.setdefault(call, new)

    def _is_host_value(self, node: cst.BaseExpression) -> bool:
        """Whether torch makes it here, and is not told where."""
        if not isinstance(node, cst.Call) or call_name(self._module, node.func) not in _FACTORIES:
            return False
        return all(a.keyword is None or a.keyword.value != "device" for a in node.args)

    def _keep_on_device(self, read: cst.Call, kind: Kind) -> None:
        tensor = _read(read)
        assert tensor is not None
        self._check_fresh(tensor)
        self._are_counts = self._are_counts or _is_count(tensor)
        has_graph = (
            ".grad" not in code_of(tensor) and not code_of(tensor).endswith(".detach()") and not _is_count(tensor)
        )
        form = "{tensor}.detach().clone()" if kind == "list" else "{tensor}.detach()"
        new = expression(form, tensor=tensor) if has_graph else tensor
        self._changes[read] = new

    def _check_fresh(self, tensor: cst.BaseExpression) -> None:
        """Raises EditError when the tensor may be another one by the time it is read."""
        while (
            isinstance(tensor, cst.Call)
            and isinstance(tensor.func, cst.Attribute)
            and tensor.func.attr.value in _SAME_MEMORY
        ):
            tensor = tensor.func.value
        if isinstance(tensor, cst.Name):
            if tensor.value in self._in_place:
                raise EditError(f"'{tensor.value}' is changed in place")
        elif not isinstance(tensor, (cst.Call, cst.BinaryOperation)):
            raise EditError(f"'{code_of(tensor)}' may be changed before it is read")

    def _carrier(self, node: cst.CSTNode) -> Carrier:
        """The name that what is read at this node goes to.

        Raises EditError when it goes elsewhere.
        """
        kind: Kind = "number"
        while True:
            above = self._parents[node]
            if isinstance(above, (cst.BinaryOperation, cst.UnaryOperation)) or (
                isinstance(above, cst.IfExp) and node is not above.test
            ):
                node = above
            elif isinstance(above, cst.DictComp) and node is above.value:
                node, kind = above, "dict"
            elif isinstance(above, cst.ListComp) and node is above.elt:
                node, kind = above, "listed"
            elif isinstance(above, cst.Assign) and len(above.targets) == 1:
                return self._named(above.targets[0].target, kind)
            elif isinstance(above, (cst.AugAssign, cst.AnnAssign)) and kind == "number":
                return self._named(above.target, kind)
            elif isinstance(above, cst.Arg) and kind == "number":
                return self._appended(above)
            else:
                raise EditError(f"'{_line(self._module, above, self._parents)}' uses what is read in every step")

    def _named(self, target: cst.BaseExpression, kind: Kind) -> Carrier:
        if not isinstance(target, cst.Name):
            raise EditError(f"what is read goes to '{code_of(target)}', which others may see")
        if target.value in self._shared:
            raise EditError(f"'{target.value}' belongs to another function too")
        return Carrier(target.value, kind)

    def _appended(self, argument: cst.Arg) -> Carrier:
        call = self._parents[argument]
        appends = m.Call(func=m.Attribute(value=m.Name(), attr=m.Name("append")), args=[m.Arg(keyword=None)])
        if not m.matches(call, appends) or not isinstance(self._parents[call], cst.Expr):
            raise EditError(f"'{_line(self._module, call, self._parents)}' uses what is read in every step")
        return self._named(call.func.value, "list")  # type: ignore[attr-defined]

    def _follow(self, carrier: Carrier) -> Iterator[Carrier]:
        """Read a name where that is seldom; the other names that it goes to in every step."""
        self._check_list(carrier)
        regions: dict[int, tuple[cst.CSTNode, list[cst.Name]]] = {}
        for name in occurrences(self._scope, carrier.name):
            if not self._is_read(name):
                continue
            region = self._region(name)
            if region is not None:
                regions.setdefault(id(region), (region, []))[1].append(name)
            elif not self._stays(name, carrier):
                yield self._carrier(name)
        if carrier.kind == "number":
            read = self._word(carrier.name)
            for _, names in regions.values():
                for name in names:
                    self._changes[name] = read
        elif carrier.kind == "list":
            self._read_list(carrier.name, [n for _, names in regions.values() for n in names])
        else:
            self._read_all(carrier, [region for region, _ in regions.values()])

    def _check_list(self, carrier: Carrier) -> None:
        if carrier.kind != "list":
            return
        host_names = m.Assign(targets=[m.AssignTarget(target=m.Name(carrier.name))], value=m.List(elements=[]))
        assigns = m.findall(self._scope, m.Assign() | m.AugAssign() | m.AnnAssign())
        assigned = [a for a in assigns if carrier.name in assigned_in(a)]
        if not assigned or not all(m.matches(a, host_names) for a in assigned):
            raise EditError(f"'{carrier.name}' is not a list that begins empty here")

    def _is_read(self, name: cst.Name) -> bool:
        above = self._parents[name]
        while isinstance(above, (cst.Element, cst.Tuple, cst.List)):
            above = self._parents[above]
        return not isinstance(above, (cst.AssignTarget, cst.Param)) and not (
            isinstance(above, (cst.AnnAssign, cst.AugAssign)) and name is above.target
        )

    def _region(self, name: cst.Name) -> cst.CSTNode | None:
        """The block of an `if` of every so many steps, or the statement after the loop, in which a name is read; else None.

        Raises EditError for a read before the loop.
        """
        node: cst.CSTNode = name
        while node is not self._scope and node in self._parents:
            above = self._parents[node]
            if above is self._loop:
                return None
            if isinstance(above, cst.If) and node is above.body and m.findall(above.test, m.Modulo()):
                return node if self._is_inside(above) else self._loop
            node = above
        if not self._is_behind(name):
            raise EditError(f"'{name.value}' is read before the loop")
        return self._loop

    def _is_inside(self, node: cst.CSTNode) -> bool:
        while node in self._parents:
            if node is self._loop:
                return True
            node = self._parents[node]
        return False

    def _is_behind(self, name: cst.Name) -> bool:
        """Whether a name stands behind the loop: in a later statement of one of the blocks around it."""
        later = [s for lv in levels(self._parents, self._loop) for s in lv.block[lv.at + 1 :]]
        return any(n is name for s in later for n in occurrences(s, name.value))

    def _stays(self, name: cst.Name, carrier: Carrier) -> bool:
        """Whether this read in every step needs no value: `x is None`, or the carrier's own update."""
        above = self._parents[name]
        if isinstance(above, cst.Comparison) and m.matches(above.comparisons[0].operator, m.Is() | m.IsNot()):
            return True
        if carrier.kind == "list" and isinstance(above, cst.Attribute) and above.attr.value in ("append", "clear"):
            return True
        if carrier.kind == "list" and isinstance(above, cst.Arg):
            return m.matches(self._parents[above], m.Call(func=m.Name("len")))
        return carrier.kind == "number" and self._carrier(name) == carrier

    def _word(self, name: str) -> cst.BaseExpression:
        """How a number is read: it may have begun as Python's own."""
        assigns = m.findall(self._scope, m.Assign() | m.AnnAssign())
        others = [a for a in assigns if name in assigned_in(a) and not self._is_inside(a)]
        if not others:
            return expression(f"{name}.item()")
        if self._are_counts:
            return expression(f"int({name})")
        if any(m.findall(a, m.Integer(value="0")) for a in others) and not _sounds_real(self._changes):
            raise EditError(f"whether '{name}' is whole or not is unknown")
        return expression(f"float({name})")

    def _read_list(self, name: str, reads: Sequence[cst.Name]) -> None:
        value = "value" if name != "value" else "one"
        for read in reads:
            above = self._parents[read]
            if isinstance(above, cst.Arg) and m.matches(self._parents[above], m.Call(func=m.Name("len"))):
                continue
            if isinstance(above, cst.Subscript) and read is above.value:
                is_slice = m.matches(above.slice[0].slice, m.Slice())
                form = f"[{value}.item() for {value} in {code_of(above)}]" if is_slice else f"{code_of(above)}.item()"
                self._changes[above] = expression(form)
            elif isinstance(above, (cst.Attribute, cst.Del)):
                raise EditError(f"'{_line(self._module, above, self._parents)}' changes the list")
            else:
                form = f"[{value}.item() for {value} in {name}]"
                self._changes[read] = expression(form)

    def _read_all(self, carrier: Carrier, regions: Sequence[cst.CSTNode]) -> None:
        if len(regions) != 1:
            raise EditError(f"'{carrier.name}' is read at {len(regions)} places")
        name, value = carrier.name, "value" if carrier.name != "value" else "one"
        form = f"{name} = [{value}.item() for {value} in {name}]\n"
        if carrier.kind == "dict":
            form = f"{name} = {{key: {value}.item() for key, {value} in {name}.items()}}\n"
        new = statements(form)
        if regions[0] is self._loop:
            self._changes[self._loop] = lambda loop: [loop, *new]
        else:
            self._changes[regions[0]] = lambda block: block.with_changes(body=[*new, *block.body])


def _read(call: cst.Call) -> cst.BaseExpression | None:
    """The tensor whose value a call reads; None for other calls."""
    if isinstance(call.func, cst.Attribute) and call.func.attr.value == "item" and not call.args:
        return call.func.value
    is_float = m.matches(call, m.Call(func=m.Name("float"), args=[m.Arg(keyword=None, star="")]))
    argument = call.args[0].value if is_float else None
    return None if isinstance(argument, (cst.BaseString, cst.BaseNumber, cst.FormattedString)) else argument


def _is_count(tensor: cst.BaseExpression) -> bool:
    """Whether a tensor counts: `(a == b).sum()`, `a.eq(b).sum()`."""
    if not m.matches(tensor, m.Call(func=m.Attribute(attr=m.Name("sum")))):
        return False
    summed = tensor.func.value  # type: ignore[attr-defined]
    return isinstance(summed, cst.Comparison) or (
        isinstance(summed, cst.Call) and code_of(summed.func).rpartition(".")[2] in _COUNTS
    )


def _sounds_real(reads: Mapping[cst.CSTNode, Change]) -> bool:
    """Whether what is read is named as a loss is, or is a mean or a norm."""
    word_set = ("loss", "error", "norm", "mean", "mse", "perplexity", "entropy")
    tensors = [t for r in reads if isinstance(r, cst.Call) and (t := _read(r)) is not None]
    return all(any(word in code_of(t).lower() for word in word_set) for t in tensors)


def _line(module: cst.Module, node: cst.CSTNode, parents: Parents) -> str:
    while node in parents and not isinstance(node, (cst.BaseSmallStatement, cst.BaseStatement)):
        node = parents[node]
    return module.code_for_node(node).strip().splitlines()[0]


LEVER = source_lever(
    __name__,
    edit,
    title="Values read when they are used",
    else_because="no line waits for the device to read a value",
)

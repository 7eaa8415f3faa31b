"""An update, from the forward to the optimizer's step, is replayed from one CUDA graph.

What        The statements of a loop, or of a function, from the model's call, or `zero_grad`, to `optimizer.step()` become a
            function before the loop, decorated with `@captured_update(optimizer)` (from flatout), which is called in their place.
            What changes from round to round is passed to it, what is read later comes back, and what the host reads in between
            it reads after it.
Guarantee   BOUNDED: the same kernels, with the optimizer's own that count its steps on the device.
Refuses     Processes without a CUDA device; devices that are busy all the time; shapes that change; scripts that compile; updates
            in a library; loops that read values in the midst of an update and go on by them; gradient scalers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError, LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters
from flatout.machine.cost.accounting import milliseconds
from flatout.tune.levers.waiting_device import check_device_waits
from flatout.tune.rewrite.calls import compiles_models
from flatout.tune.rewrite.enclosing_blocks import (
    Loop,
    calls_backward,
    changed_in_place,
    enclosing_loops,
    levels,
    only_small,
    parents_of,
    root_name,
    scope_of,
)
from flatout.tune.rewrite.imports import call_name, with_import
from flatout.tune.rewrite.models import names_of_models
from flatout.tune.rewrite.source import (
    Change,
    SourcePlace,
    assigned_in,
    bare_names,
    code_of,
    find,
    first_line,
    fresh_name,
    names_in,
    nodes_of,
    place_parameters,
    pull,
    statements,
    text_at,
    with_changes,
    with_expression,
)

_BLOCK: Final = "captured_update"
_LEAST: Final = 0.3
"""Of what the host takes for an update: a PPO's of 320 small updates went from 0.88 s to 0.11 s (H200, torch 2.11)."""
_EFFORT: Final = 1.0
"""A capture takes a fraction of a second."""
_HOST_READS: Final = frozenset({"item", "tolist", "cpu", "numpy"})
_OF_PYTHON: Final = frozenset({"print", "float", "int", "bool", "str", "input", "open", "next"})
_LIBRARIES: Final = ("numpy.", "random.", "time.")
"""Calls that a graph would make once, and never again."""
_DRAWS: Final = ("numpy.random.", "random.")
_CONTEXTS: Final = (
    "torch.no_grad",
    "torch.enable_grad",
    "torch.autocast",
    "torch.amp.autocast",
    "torch.cuda.amp.autocast",
)
_NO_FORWARD: Final = frozenset(
    {"train", "eval", "to", "cuda", "parameters", "named_parameters", "requires_grad_", "apply"}
)
"""Methods of a module with which no update begins."""
_CALLS: Final = frozenset({"backward", "zero_grad", "step", "clip_grad_norm_", "clip_grad_value_"})
"""What an update calls without an assignment."""
_MOST: Final = 3
_LONG: Final = 80
"""Characters of a call, above which its arguments get a line of their own."""


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it for the optimizers that step most, where a CUDA device waits for the launches of always the same kernels."""
    check_device_waits(evidence)
    if evidence.steps.kind != "training":
        raise LeverRefused("the loop trains nothing, or by hand")
    steps = evidence.steps
    idle_s = steps.step_s - (steps.device_s or 0.0)
    updating_s = sum(steps.phases.get(phase, 0.0) for phase in ("forward", "backward", "optimizer"))
    most_s = min(idle_s, updating_s)
    why = "no optimizer was seen to step"
    places: list[Parameters] = []
    for use in sorted(evidence.optimizers, key=lambda o: -o.calls)[:_MOST]:
        where = evidence.source_of(use.source)
        try:
            place = place_parameters(evidence, where) if where is not None else {}
            if not place or place in places:
                continue
            edit(text_at(evidence, place), place)
        except EditError as e:
            why = str(e)
            continue
        places.append(place)
        yield Candidate(
            parameters=place,
            saved_s=(_LEAST * most_s / len(evidence.optimizers), most_s / len(evidence.optimizers)),
            where=where,
            because=f"the device idles {milliseconds(idle_s)} of a step, while the host launches an update's kernels one by one",
        )
    if not places:
        raise LeverRefused(why)


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Change the text of the file before it runs."""
    pull(LEVER.id, hooks, parameters, edit)


class _Update(NamedTuple):
    """What a loop does in an update, in the order of the new text."""

    before: list[cst.BaseStatement]
    """What no graph can stand for, and needs nothing of it: NumPy's random numbers for a generator."""
    inside: list[cst.BaseStatement]
    """What is captured."""
    after: list[cst.BaseStatement]
    """What reads values on the host, and can wait."""
    first: int
    last: int
    """Indices of the block's statements that all this is in place of."""


def edit(text: str, parameters: Parameters) -> str:
    """Have the statements around the optimizer's step in a function that is captured.

    Raises EditError where it is not certain that the function does the same.
    """
    place = find(text, parameters)
    module, parents = place.module, parents_of(place.module)
    if compiles_models(module):
        raise EditError("the file compiles something already")
    loops = enclosing_loops(parents, place.statement)
    level = next(iter(levels(parents, place.statement)))
    if not loops and place.function is None:
        raise EditError("the optimizer steps in no loop, and in no function that one may call")
    small = only_small(place.statement)
    if not m.matches(small or place.statement, m.Expr(value=m.Call(func=m.Attribute(attr=m.Name("step")), args=[]))):
        raise EditError(f"'{first_line(module, place.statement)}' is no plain call of step()")
    around = loops[-1] if loops else place.function
    assert around is not None
    parameters_of_it = {one.name.value for one in m.findall(around, m.Param())} if not loops else set()  # type: ignore[attr-defined]
    found = _update(place, level.block, level.at, _bound(around) | parameters_of_it)
    steps = [
        c for s in found.inside for c in nodes_of(cst.Call, s) if m.matches(c.func, m.Attribute(attr=m.Name("step")))
    ]
    optimizers = list(dict.fromkeys(code_of(cst.ensure_type(c.func, cst.Attribute).value) for c in steps))
    changing = {
        code: fresh_name(module, code.rpartition(".")[2]) for code in _changing(module, around, found, optimizers)
    }
    found = found._replace(inside=[_with_names_for(one, changing) for one in found.inside])
    name = fresh_name(module, "update")
    passed_in = parameters_of_it - _not_passed(found.inside, optimizers, place.owner is not None, around)
    arguments = _arguments(found.inside, _bound(around) | passed_in)
    results = _results(place, found, level.block)
    passed = ", ".join([*arguments, *changing])
    arguments += changing.values()
    [function] = statements(f"@{_BLOCK}({', '.join(optimizers)})\ndef {name}({', '.join(arguments)}):\n    pass\n")
    inside = [found.inside[0].with_changes(leading_lines=()), *found.inside[1:]]
    if results:
        inside += statements(f"return {', '.join(results)}\n")
    function = cst.ensure_type(function, cst.FunctionDef).with_changes(body=cst.IndentedBlock(inside))
    target = f"{', '.join(results)} = " if results else ""
    is_long = len(target) + len(name) + len(passed) > _LONG
    [call] = statements(f"{target}{name}(\n    {passed}\n)\n" if is_long else f"{target}{name}({passed})\n")
    lines = found.inside[0].leading_lines  # type: ignore[attr-defined]
    changes: dict[cst.CSTNode, Change] = dict.fromkeys(level.block[found.first : found.last + 1], ())
    if isinstance(around, cst.FunctionDef):
        blank = [cst.EmptyLine(indent=False)]
        function = function.with_changes(leading_lines=[*blank, *(one for one in lines if one.comment is not None)])
        changes[level.block[found.first]] = [
            *found.before,
            function,
            call.with_changes(leading_lines=blank),
            *found.after,
        ]
        return with_import(with_changes(module, changes), "flatout", _BLOCK).code
    changes[level.block[found.first]] = [*found.before, call.with_changes(leading_lines=lines), *found.after]
    changed = with_changes(module, changes)
    at = _same_loop(changed, module, around)
    return with_import(_with_before(changed, at, function), "flatout", _BLOCK).code


def _with_names_for(statement: cst.BaseStatement, attributes: Mapping[str, str]) -> cst.BaseStatement:
    """A statement that reads these names in the place of attributes."""
    changes: dict[cst.CSTNode, Change] = {
        one: cst.Name(attributes[code])
        for one in nodes_of(cst.Attribute, statement)
        if (code := code_of(one)) in attributes
    }
    return with_changes(statement, changes) if changes else statement


def _not_passed(
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


def _with_before(module: cst.Module, loop: Loop, function: cst.FunctionDef) -> cst.Module:
    """The file with a function before a loop, which keeps its comments."""
    comments = list(loop.leading_lines)
    while comments and comments[0].comment is None:
        comments.pop(0)
    block = next((b for b in nodes_of(cst.IndentedBlock, module) if any(one is loop for one in b.body)), None)
    blank = [cst.EmptyLine(indent=False)] * (2 if block is None else 1)
    new = [function.with_changes(leading_lines=blank), loop.with_changes(leading_lines=[*blank, *comments])]
    body = [two for one in (block or module).body for two in (new if one is loop else [one])]
    if block is None:
        return module.with_changes(body=body)
    return with_expression(module, block, block.with_changes(body=body))


def _same_loop(changed: cst.Module, module: cst.Module, loop: Loop) -> Loop:
    """The loop in the changed tree: the one at the same place among the loops that begin before it."""
    number = next(i for i, one in enumerate(m.findall(module, m.For() | m.While())) if one is loop)
    found = m.findall(changed, m.For() | m.While())[number]
    assert isinstance(found, (cst.For, cst.While))
    return found


def _update(place: SourcePlace, block: Sequence[cst.BaseStatement], at: int, bound: set[str]) -> _Update:
    """The statements of an update, from its first to the step. Raises EditError where it cannot be told, or be captured."""
    module = place.module
    if not any(calls_backward(one) for one in block[:at]):
        raise EditError("the backward is not in the same block, ahead of the step")
    models = names_of_models(module) | {
        code_of(call.func.value)
        for call in nodes_of(cst.Call, module)
        if isinstance(call.func, cst.Attribute) and call.func.attr.value == "parameters"
    }
    starts: list[int] = []
    for known in (models, models | _called_objects(place)):  # a model that came as an argument is not known for one
        starts += [i for i, one in enumerate(block[:at]) if _begins(one, known)][:1]
    if not starts:
        raise EditError("neither the model's call nor zero_grad() is in the same block, ahead of the step")
    first = next((start for start in starts if _computes_loss(block[start:at])), None)
    if first is None:
        raise EditError("the loss is computed before the update")
    last = at
    while last + 1 < len(block) and _is_step(block[last + 1]):
        last += 1
    sorter = _Sorter(module, models, bound)
    before, rest = _before(module, block[first : last + 1], models)
    inside, after = sorter.sorted(rest)
    if not any(calls_backward(one) for one in inside):
        raise EditError("the backward comes before the model's call")
    return _Update(before, inside, after, first, last)


def _begins(statement: cst.BaseStatement, models: set[str]) -> bool:
    """Whether an update begins here: gradients are cleared, or a model or a method of it is called."""
    for call in nodes_of(cst.Call, statement):
        code = code_of(call.func)
        is_method = any(code.startswith(f"{name}.") for name in models) and code.rpartition(".")[2] not in _NO_FORWARD
        if code.endswith(".zero_grad") or code in models or is_method:
            return True
    return False


def _before(
    module: cst.Module, block: Sequence[cst.BaseStatement], models: set[str]
) -> tuple[list[cst.BaseStatement], list[cst.BaseStatement]]:
    """Random numbers of Python's or NumPy's that statements of a block draw and that may be drawn before it; and the rest."""
    first: list[cst.BaseStatement] = []
    rest: list[cst.BaseStatement] = []
    read, bound, has_drawn = set[str](), {name.partition(".")[0] for name in models}, False
    for statement in block:
        names = [call_name(module, call.func) for call in nodes_of(cst.Call, statement)]
        draws = any(name.startswith(_DRAWS) for name in names)
        mine = _bound(statement)
        is_free = not (names_in(statement) - mine) & bound and not mine & (read | bound) and not has_drawn
        if (
            draws
            and is_free
            and m.matches(only_small(statement) or statement, m.Assign())
            and not _reads_values(statement)
        ):
            first.append(statement)
            continue
        rest.append(statement)
        read |= names_in(statement)
        bound |= mine | changed_in_place(statement)
        has_drawn |= draws
    return first, rest


def _reads_values(statement: cst.CSTNode) -> bool:
    """Whether a statement reads tensors on the host."""
    return any(one.attr.value in _HOST_READS for one in nodes_of(cst.Attribute, statement))


def _computes_loss(block: Sequence[cst.BaseStatement]) -> bool:
    """Whether what a backward begins from is assigned in these statements, or computed in its line."""
    backward = m.Expr(value=m.Call(func=m.Attribute(value=m.SaveMatchedNode(m.DoNotCare(), "loss"))))
    for one in filter(calls_backward, block):
        found = m.extract(only_small(one) or one, backward)
        loss = found["loss"] if found is not None else None
        assert isinstance(loss, cst.BaseExpression)
        return bool(nodes_of(cst.Call, loss)) or root_name(loss) in _bound_in(block)
    return True


def _called_objects(place: SourcePlace) -> set[str]:
    """Attributes of `self` and parameters that a function calls and that are no functions of the file."""
    if place.function is None:
        return set()
    names = {one.name.value for one in m.findall(place.module, m.FunctionDef())}  # type: ignore[attr-defined]
    parameters = {one.name.value for one in m.findall(place.function.params, m.Param())}  # type: ignore[attr-defined]
    called = [call.func for call in nodes_of(cst.Call, place.function)]
    attributes = {code_of(one) for one in called if m.matches(one, m.Attribute(value=m.Name("self")))}
    return {one for one in attributes if one.rpartition(".")[2] not in names} | (
        parameters & {code_of(one) for one in called}
    )


def _is_step(statement: cst.BaseStatement) -> bool:
    small = only_small(statement)
    called = m.Call(func=m.Attribute(attr=m.Name("step") | m.Name("zero_grad")), args=[])
    is_schedule = "sched" in code_of(statement).lower()
    return small is not None and m.matches(small, m.Expr(value=called)) and not is_schedule


def _bound(node: cst.CSTNode) -> set[str]:
    """Names that a loop binds, its own counters among them."""
    targets = [one.target for one in m.findall(node, m.For() | m.CompFor())]  # type: ignore[attr-defined]
    return assigned_in(node) | {name for target in targets for name in names_in(target)}


def _bound_in(block: Sequence[cst.BaseStatement]) -> set[str]:
    return set().union(*(_bound(one) for one in block))


class _Sorter:
    """Tells statements that a graph can stand for from those that read values on the host and can wait until after it."""

    def __init__(self, module: cst.Module, models: set[str], bound: set[str]) -> None:
        self._module, self._models, self._bound = module, {m.partition(".")[0] for m in models}, bound
        self._read: set[str] = set()
        self._changed: set[str] = set()

    def sorted(self, block: Sequence[cst.BaseStatement]) -> tuple[list[cst.BaseStatement], list[cst.BaseStatement]]:
        """What is captured, and what comes after it. Raises EditError where something can be neither."""
        inside: list[cst.BaseStatement] = []
        after: list[cst.BaseStatement] = []
        own = {name for one in m.findall(cst.IndentedBlock(block), m.Assign()) for name in assigned_in(one)}
        for statement in reversed(block):
            if isinstance(statement, cst.With) and self._is_context(statement):
                body = [one for one in statement.body.body if isinstance(one, cst.BaseStatement)]
                here, later = self.sorted(body)
                if here:
                    inside.insert(0, statement.with_changes(body=cst.IndentedBlock(here)))
                if later:
                    after.insert(0, statement.with_changes(body=cst.IndentedBlock(later), leading_lines=()))
            elif self._can_be_captured(statement, own):
                inside.insert(0, statement)
                self._read |= names_in(statement)
                self._changed |= _bound(statement) | changed_in_place(statement)
            else:
                self._check_can_wait(statement)
                after.insert(0, statement)
        return inside, after

    def _check_can_wait(self, statement: cst.BaseStatement) -> None:
        line = first_line(self._module, statement)
        if m.findall(statement, m.Break() | m.Continue() | m.Return() | m.Raise() | m.Yield()):
            raise EditError(f"'{line}' leaves the update in the midst")
        written, read = _bound(statement) | changed_in_place(statement), names_in(statement)
        if bad := sorted((written & self._read) | (read & (self._changed | self._models))):
            raise EditError(f"'{line}' cannot wait until after the update, because of '{bad[0]}'")

    def _is_context(self, statement: cst.With) -> bool:
        return all(
            isinstance(item.item, cst.Call) and call_name(self._module, item.item.func) in _CONTEXTS
            for item in statement.items
        )

    def _can_be_captured(self, statement: cst.BaseStatement, own: set[str]) -> bool:
        if isinstance(statement, cst.If):
            branches: list[cst.CSTNode] = [statement.body]
            orelse = statement.orelse
            while isinstance(orelse, cst.If):
                if not self._is_constant(orelse.test):
                    return False
                branches.append(orelse.body)
                orelse = orelse.orelse
            branches += [orelse.body] if orelse is not None else []
            blocks = [b.body for b in branches if isinstance(b, cst.IndentedBlock)]
            return (
                self._is_constant(statement.test)
                and len(blocks) == len(branches)
                and all(
                    self._can_be_captured(one, own) for b in blocks for one in b if isinstance(one, cst.BaseStatement)
                )
            )
        if isinstance(statement, cst.With):
            body = [one for one in statement.body.body if isinstance(one, cst.BaseStatement)]
            return self._is_context(statement) and all(self._can_be_captured(one, own) for one in body)
        small = only_small(statement)
        if small is None or self._leaves_the_device(small):
            return False
        if isinstance(small, cst.Expr):
            return isinstance(small.value, cst.Call) and code_of(small.value.func).rpartition(".")[2] in _CALLS
        if isinstance(small, cst.AugAssign):
            return isinstance(small.target, cst.Name) and small.target.value in own
        targets = [t.target for t in small.targets] if isinstance(small, cst.Assign) else []
        names = m.Name() | m.Tuple(elements=[m.AtLeastN(m.Element(m.Name()), n=1)])
        return bool(targets) and all(m.matches(target, names) for target in targets)

    def _is_constant(self, test: cst.BaseExpression) -> bool:
        """Whether a condition is the same in every round, by its names."""
        return not names_in(test) & self._bound and not m.findall(test, m.Call())

    def _leaves_the_device(self, statement: cst.CSTNode) -> bool:
        if m.findall(statement, m.Await() | m.Yield() | m.NamedExpr() | m.Lambda()):
            return True
        for call in nodes_of(cst.Call, statement):
            name = call_name(self._module, call.func)
            attribute = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
            if attribute in _HOST_READS or name in _OF_PYTHON or name.startswith(_LIBRARIES):
                return True
        return False


def _changing(
    module: cst.Module, around: Loop | cst.FunctionDef, found: _Update, optimizers: Sequence[str]
) -> list[str]:
    """Attributes that the update reads and that are set elsewhere, as written: they are to be passed to it.

    Raises EditError where the loop, or the function, makes or changes what the update takes for constant.
    """
    bound, what = _bound(around), "function" if isinstance(around, cst.FunctionDef) else "loop"
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


def _is_read_whole(found: _Update, target: cst.Attribute, module: cst.Module) -> bool:
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


def _arguments(inside: Sequence[cst.BaseStatement], bound: set[str]) -> list[str]:
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
            known.update(_bound(statement))

    def read(nodes: Sequence[cst.CSTNode]) -> None:
        for node in nodes:
            inner = {n for comp in m.findall(node, m.CompFor()) for n in names_in(comp.target)}  # type: ignore[attr-defined]
            for one in bare_names(node):
                if one.value not in known | inner and one.value in bound:
                    found.setdefault(one.value)

    walk(inside)
    return list(found)


def _results(place: SourcePlace, found: _Update, block: Sequence[cst.BaseStatement]) -> list[str]:
    """Names that the update assigns and that are read elsewhere. Raises EditError where one may not be assigned."""
    replaced: dict[cst.CSTNode, Change] = dict.fromkeys(block[found.first : found.last + 1], ())
    scope = place.module if place.function is None else scope_of(place.module, place.function)
    rest = with_changes(scope, replaced)
    targets = [one.target for one in m.findall(rest, m.AssignTarget() | m.For() | m.CompFor())]  # type: ignore[attr-defined]
    stored = {id(one) for target in targets if isinstance(target, cst.Name) for one in [target]}
    wanted = {one.value for one in bare_names(rest) if id(one) not in stored} | names_in(found.after)
    assigned: dict[str, None] = {}
    for statement in found.inside:
        for name in sorted(_bound(statement) & wanted - {"_"}, key=lambda n: code_of(statement).find(n)):
            assigned.setdefault(name)
    certain = _certain(found.inside)
    if bad := [name for name in assigned if name not in certain]:
        raise EditError(f"'{bad[0]}' is assigned in some cases alone, and read after the update")
    return list(assigned)


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
            found |= _bound(statement)
    return found


LEVER = lever(
    __name__,
    propose,
    apply=apply,
    edit=edit,
    is_local=True,
    effort=_EFFORT,
    conflicts=("graph.compile", "graph.capture", "graph.compile-method"),
    title="Captured update",
    errors=("captur",),
)

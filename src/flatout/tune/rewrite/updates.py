"""The statements of an update in a training loop: those that a CUDA graph can stand for, and those before and after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError
from flatout.tune.rewrite.enclosing_blocks import calls_backward, changed_in_place, only_small, root_name
from flatout.tune.rewrite.imports import call_name
from flatout.tune.rewrite.models import names_of_models
from flatout.tune.rewrite.source import SourcePlace, assigned_in, code_of, first_line, names_in, nodes_of

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


class UpdateStatements(NamedTuple):
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


def update_around(place: SourcePlace, block: Sequence[cst.BaseStatement], at: int, bound: set[str]) -> UpdateStatements:
    """The statements of an update, from its first to the step, which is at `at` in `block`; `bound` changes from round to round.

    Raises EditError where it cannot be told, or be captured.
    """
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
    return UpdateStatements(before, inside, after, first, last)


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
        mine = names_bound(statement)
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


def names_bound(node: cst.CSTNode) -> set[str]:
    """Names that a loop, a function or a statement binds, counters of loops among them."""
    targets = [one.target for one in m.findall(node, m.For() | m.CompFor())]  # type: ignore[attr-defined]
    return assigned_in(node) | {name for target in targets for name in names_in(target)}


def _bound_in(block: Sequence[cst.BaseStatement]) -> set[str]:
    return set().union(*(names_bound(one) for one in block))


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
                self._changed |= names_bound(statement) | changed_in_place(statement)
            else:
                self._check_can_wait(statement)
                after.insert(0, statement)
        return inside, after

    def _check_can_wait(self, statement: cst.BaseStatement) -> None:
        line = first_line(self._module, statement)
        if m.findall(statement, m.Break() | m.Continue() | m.Return() | m.Raise() | m.Yield()):
            raise EditError(f"'{line}' leaves the update in the midst")
        written, read = names_bound(statement) | changed_in_place(statement), names_in(statement)
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

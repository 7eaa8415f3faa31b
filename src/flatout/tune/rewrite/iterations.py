"""The iterable of a Python loop: tensors whose first dimension torch.vmap would map over, and the names of their parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError
from flatout.tune.rewrite.enclosing_blocks import Parents, assignment, closed_over, levels, occurrences, rebinds
from flatout.tune.rewrite.loop_lifting import LiftedValue, is_spelt_mask
from flatout.tune.rewrite.operands import atom
from flatout.tune.rewrite.source import (
    SourcePlace,
    assigned_in,
    code_of,
    expression,
    free_name,
    names_in,
    nodes_of,
    statements,
    with_changes,
    word_set,
)

_NO_TENSOR: Final = word_set(
    "items keys values parameters modules children named_parameters named_modules named_children buffers "
    "named_buffers split chunk glob iterdir split_with_sizes"
)


class Iteration(NamedTuple):
    """The inputs of one iteration, and the tensors that they come from.

    `counter` is the name that counts from 0 where there is one; `length` how many iterations there are where that is written.
    """

    parameters: tuple[str, ...]
    inputs: tuple[cst.BaseExpression, ...]
    names: dict[str, LiftedValue]
    unpacking: tuple[cst.BaseStatement, ...] = ()
    counter: str = ""
    length: cst.BaseExpression | None = None


def iteration_of(target: cst.BaseExpression, over: cst.BaseExpression, *, torch: str, device: str = "") -> Iteration:
    """The iteration that `for target in over` describes.

    Raises EditError when that is not known to be numbers or parts of tensors.
    """
    if m.matches(over, m.Call(func=m.Name("range"))):
        return _numbers(target, over, torch, device)
    if m.matches(over, m.Call(func=m.Name("enumerate"))):
        return _enumerated(target, over, torch, device)
    if m.matches(over, m.Call(func=m.Name("zip"))):
        return _zipped(target, over, torch, device)
    return _parts(target, over)


def _numbers(target: cst.BaseExpression, over: cst.BaseExpression, torch: str, device: str) -> Iteration:
    assert isinstance(over, cst.Call)
    if not isinstance(target, cst.Name) or any(a.star or a.keyword for a in over.args):
        raise EditError(f"'{code_of(over)}' is not read")
    name, where = target.value, f", device={device}" if device else ""
    numbers = cst.parse_expression(f"{torch}.arange({', '.join(code_of(a.value) for a in over.args)}{where})")
    is_from_0 = len(over.args) == 1
    return Iteration(
        (name,),
        (numbers,),
        {name: LiftedValue(target, is_batched=True, is_number=True)},
        counter=name if is_from_0 else "",
        length=over.args[0].value if is_from_0 else None,
    )


def _enumerated(target: cst.BaseExpression, over: cst.BaseExpression, torch: str, device: str) -> Iteration:
    assert isinstance(over, cst.Call)
    if len(over.args) != 1 or not isinstance(target, cst.Tuple) or len(target.elements) != 2:
        raise EditError(f"'{code_of(over)}' is not read")
    inner = iteration_of(target.elements[1].value, over.args[0].value, torch=torch, device=device)
    length = inner.length or expression("len({x})", x=inner.inputs[0])
    number = _numbers(target.elements[0].value, expression("range({n})", n=length), torch, device)
    return inner._replace(
        parameters=number.parameters + inner.parameters,
        inputs=number.inputs + inner.inputs,
        names=number.names | inner.names,
        counter=number.counter,
        length=length,
    )


def _zipped(target: cst.BaseExpression, over: cst.BaseExpression, torch: str, device: str) -> Iteration:
    assert isinstance(over, cst.Call)
    args = [a for a in over.args if a.keyword is None]
    if not isinstance(target, cst.Tuple):
        raise EditError(f"'{code_of(over)}' is not read")
    names = [e.value for e in target.elements]
    if len(args) == 1 and args[0].star == "*" and all(isinstance(n, cst.Name) for n in names):
        parts = [expression(f"{{x}}[{n}]", x=atom(args[0].value)) for n in range(len(names))]
    elif len(args) == len(names) and not any(a.star for a in args):
        parts = [a.value for a in args]
    else:
        raise EditError(f"'{code_of(over)}' is not read")
    return joined([iteration_of(n, p, torch=torch, device=device) for n, p in zip(names, parts, strict=True)])


def joined(iterations: Sequence[Iteration]) -> Iteration:
    """The iteration over several things at once, as `zip` has it."""
    known: dict[str, LiftedValue] = {}
    for one in iterations:
        known |= one.names
    return Iteration(
        sum((o.parameters for o in iterations), ()),
        sum((o.inputs for o in iterations), ()),
        known,
        sum((o.unpacking for o in iterations), ()),
        next((o.counter for o in iterations if o.counter), ""),
        next((o.length for o in iterations if o.length is not None), None),
    )


def _parts(target: cst.BaseExpression, over: cst.BaseExpression) -> Iteration:
    is_number = m.matches(over, m.Call(func=m.Attribute(attr=m.Name("tolist")), args=[]))
    if is_number:
        over = over.func.value  # type: ignore[attr-defined]
    if m.matches(over, m.Call(func=m.Attribute(attr=m.Name("unbind")))):
        dims = [code_of(a.value) for a in over.args]  # type: ignore[attr-defined]
        over = over.func.value  # type: ignore[attr-defined]
        if dims and dims != ["0"]:
            over = expression(f"{{x}}.movedim({dims[0]}, 0)", x=atom(over))
    named = over.func if isinstance(over, cst.Call) else over
    if not isinstance(over, (cst.Name, cst.Attribute, cst.Call, cst.Subscript, cst.BinaryOperation)) or (
        isinstance(named, cst.Attribute) and named.attr.value in _NO_TENSOR
    ):
        raise EditError(f"'{code_of(over)}' is not known to be a tensor")
    length = expression("len({x})", x=over)
    if isinstance(target, cst.Name):
        is_mask = is_spelt_mask(f"{target.value} {code_of(over)}") and not is_number
        value = LiftedValue(target, is_batched=True, is_number=is_number, is_mask=is_mask)
        return Iteration((target.value,), (over,), {target.value: value}, length=length)
    names = [e.value for e in target.elements] if isinstance(target, cst.Tuple) else []
    if not names or not all(isinstance(n, cst.Name) for n in names):
        raise EditError(f"'{code_of(target)}' is not read")
    known = {code_of(n): LiftedValue(n, is_batched=True, is_number=is_number) for n in names}
    whole = free_name("parts", known)
    unpacking = statements("{target} = {whole}\n", target=target.with_changes(lpar=[], rpar=[]), whole=cst.Name(whole))
    return Iteration((whole,), (over,), known, tuple(unpacking), length=length)


def over_rows(iteration: Iteration, body: Sequence[cst.BaseStatement]) -> tuple[Iteration, list[cst.BaseStatement]]:
    """An iteration over rows, with its body, where the counter of `range(len(x))` only indexes: `x[i]`, `y[i]`."""
    counter, length = iteration.counter, iteration.length
    if iteration.parameters != (counter,) or length is None:
        return iteration, list(body)
    rows: dict[str, cst.BaseExpression] = {}
    picks: dict[cst.CSTNode, str] = {}
    picked = m.Subscript(slice=[m.SubscriptElement(m.Index(m.Name(counter)))])
    for node in (n for s in body for n in nodes_of(cst.Subscript, s) if m.matches(n, picked)):
        if isinstance(node.value, (cst.Name, cst.Attribute)) and not names_in(node.value) & assigned_in(body):
            picks[node] = code_of(node.value)
            rows[picks[node]] = node.value
    lengths = {f"len({r})" for r in rows} | {f"{r}.shape[0]" for r in rows} | {f"{r}.size(0)" for r in rows}
    writing = m.AssignTarget(m.Subscript()) | m.AugAssign(target=m.Subscript())
    is_written = any(m.findall(s, writing) for s in body)
    if code_of(length) not in lengths or is_written or len(picks) != len(occurrences(body, counter)):
        return iteration, list(body)
    names = {code: f"{code.rpartition('.')[2]}_{counter}" for code in rows}
    if set(names.values()) & names_in(body) or len(set(names.values())) < len(names):
        return iteration, list(body)
    known = {n: LiftedValue(cst.Name(n), is_batched=True, is_mask=is_spelt_mask(n)) for n in names.values()}
    changes = {node: cst.Name(names[code]) for node, code in picks.items()}
    changed = [with_changes(s, changes) for s in body]
    return Iteration(tuple(names.values()), tuple(rows.values()), known, length=length), changed


def initial(place: SourcePlace, name: str) -> tuple[cst.BaseStatement, cst.BaseExpression] | None:
    """The assignment to a name before the place, in its block, when nothing in between uses the name."""
    for statement in reversed(place.block[: place.index]):
        if occurrences(statement, name):
            found = assignment(statement)
            is_whole = found is not None and isinstance(found[0], cst.Name) and not occurrences(found[1], name)
            return (statement, found[1]) if is_whole and found is not None else None
    return None


def check_unread(parents: Parents, place: SourcePlace, names: set[str]) -> None:
    """Raise EditError when a name that the loop binds is read after it."""
    inside = closed_over(place.module, place.function)
    for name in sorted(names):
        if name in inside or _is_read_later(parents, place.statement, name):
            raise EditError(f"'{name}' is read after the loop")


def _is_read_later(parents: Parents, loop: cst.BaseStatement, name: str) -> bool:
    is_bound = False
    for level in levels(parents, loop):
        if not is_bound:
            first = next((s for s in level.block[level.at + 1 :] if occurrences(s, name)), None)
            if first is not None and not rebinds(first, name):
                return True
            is_bound = first is not None
        if isinstance(level.owner, (cst.For, cst.While)):
            if isinstance(level.owner, cst.While) and occurrences(level.owner.test, name):
                return True
            first = next((s for s in level.block[: level.at] if occurrences(s, name)), None)
            if first is not None and not rebinds(first, name):
                return True
    return False

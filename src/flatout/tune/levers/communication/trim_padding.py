"""Columns that are padding in every row of a batch are cut off before the model sees them.

What        Of a batch of tokens [rows, positions], and what goes with it, the positions after the last one that is not padding in
            all rows are left out, up to a multiple of a 16th of the width: each new shape has a price. In the text: a batch is
            made as wide as its longest row, or cut where the model is called.
Guarantee   BOUNDED: padding that a model masks adds zeros; without them sums come in another order.
Refuses     Batches that are full in their longest row. Models to which padding is not nothing are told by the proof.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError, LeverRefused, PlanError
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters, integer
from flatout.tune.levers.proposals import reads_padding
from flatout.tune.rewrite.enclosing_blocks import assignment, levels, parents_of
from flatout.tune.rewrite.imports import below_imports, call_name, with_torch
from flatout.tune.rewrite.source import (
    SourcePlace,
    code_of,
    find,
    first_line,
    fresh_name,
    names_in,
    nodes_of,
    readable_place,
    statements,
    with_expression,
)

if TYPE_CHECKING:
    from torch import Tensor

_LONGEST_FRACTION: Final = 0.94
"""Above, so little of the width is padding in all rows that rounding up and looking for it cost as much."""
_PARTS: Final = 16
"""A width is rounded up to this part of the whole one, or to a smaller power of two: there are 32 widths at most. Each new shape
has a price: cuDNN builds a plan for its attention (the default on Hopper from PyTorch 2.11 on), oneDNN a primitive, the allocator
a block; with hundreds of widths it outweighed what was cut."""
_FEWEST_ALIGNED: Final = 8
"""Tensor cores load 16 bytes at a time: 8 numbers of half precision (NVIDIA, Matrix Multiplication Background User's Guide)."""
_CUTTING: Final = '''
def {name}(batch):
    """The batch without the positions that are padding in all its rows."""
    if {torch}.is_tensor(batch):
        return {name}((batch,))[0]
    values = list(batch.values() if hasattr(batch, "values") else batch)
    tokens = next(v for v in values if {torch}.is_tensor(v) and v.dim() == 2 and v.dtype in ({torch}.int64, {torch}.int32))
    filled = (tokens != {pad}).any(0).nonzero()
    width = {width} if len(filled) else tokens.shape[1]
    is_cut = [{torch}.is_tensor(v) and v.dim() >= 2 and v.shape[:2] == tokens.shape for v in values]
    values = [v[:, :width].contiguous() if cut else v for v, cut in zip(values, is_cut)]
    return dict(zip(batch, values)) if hasattr(batch, "values") else tuple(values)
'''
_FULL: Final = ("torch.full", "torch.zeros", "torch.ones", "numpy.full", "numpy.zeros", "numpy.ones")


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it for tokens whose batches are wider than their longest rows."""
    tokens = [p for p in evidence.paddings if p.dtype in ("int64", "int32") and p.signs]
    able = [p for p in tokens if p.longest_fraction < _LONGEST_FRACTION]
    if not tokens:
        raise LeverRefused("no padded tokens")
    if not able:
        raise LeverRefused("each batch is as wide as its longest row")
    if not findings:
        raise LeverRefused("what is computed for padding takes too little of a step")
    padding = max(able, key=lambda p: p.padding_fraction)
    low, high = min(f.saved_s[0] for f in findings), max(f.saved_s[1] for f in findings)
    where = evidence.source_of(padding.source) or next((f.where for f in findings if f.where is not None), None)
    yield Candidate(
        # where the batch is made in a library, it is cut all the same
        parameters={"pad": int(padding.pad_value)}
        | ({"multiple": multiple} if (multiple := _multiple(evidence, padding.shape[1])) > 1 else {})
        | readable_place(evidence, where),
        saved_s=(0.5 * low, high),
        where=where,
        is_risky=reads_padding(evidence),
        because=f"the longest row of a batch fills {padding.longest_fraction:.0%} of '{padding.name}', {padding.shape[1]} wide",
    )


def _multiple(evidence: Evidence, width: int) -> int:
    """The power of two that widths are rounded up to: few enough shapes, and aligned for a GPU."""
    multiple = 1 << int(math.log2(max(1, width / _PARTS)))
    return multiple if evidence.steps.device_s is None else max(_FEWEST_ALIGNED, multiple)


def _multiple_of(parameters: Parameters) -> int:
    """What a plan rounds widths up to.

    Raises PlanError when that is no whole number above zero.
    """
    if "multiple" not in parameters:
        return 1
    if (multiple := integer(parameters, "multiple")) < 1:
        raise PlanError(f"parameter 'multiple' is {multiple} and must be at least 1")
    return multiple


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Crop the inputs of every call to the longest row of the batch, rounded up to the multiple."""
    from flatout.core.tensors.nests import map_tensors, tensors_in

    pad, multiple = integer(parameters, "pad"), _multiple_of(parameters)

    def cut(module: Any, inputs: Any) -> Any:
        tokens = next((t for t in tensors_in(inputs) if _is_tokens(t)), None)
        if tokens is None:
            return inputs
        length = -(-longest(tokens, pad) // multiple) * multiple
        if length >= tokens.shape[1]:
            return inputs
        hooks.note(LEVER.id)
        return map_tensors(inputs, lambda tensor: cropped(tensor, tokens.shape, length))

    hooks.on_inputs(cut)


def _is_tokens(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.dim() == 2 and value.dtype in (torch.int64, torch.int32)


def longest(tokens: Any, pad: int) -> int:
    """Number of positions up to the last one that some row fills; one at least."""
    filled = (tokens != pad).any(0).nonzero()
    return int(filled[-1]) + 1 if len(filled) else 1


def cropped(tensor: Tensor, shape: Sequence[int], length: int) -> Tensor:
    """The first positions of a tensor whose shape begins like this one; another as it is."""
    return tensor[:, :length].contiguous() if tensor.dim() >= 2 and tensor.shape[:2] == shape else tensor


def edit(text: str, parameters: Parameters) -> str:
    """Write `torch.full((len(rows), WIDTH), PAD)` only as wide as the longest row that is then written into it, rounded up.

    Where no such tensor is made, what the model is called with is cut. Raises EditError where the rows, or the call, cannot be
    decided from the text.
    """
    place = find(text, parameters)
    found = [c for c in nodes_of(cst.Call, place.function or place.statement) if _is_filled(place.module, c)]
    if not found:
        return _with_cut_inputs(place, parameters)
    if len(found) > 1:
        raise EditError(f"{len(found)} tensors are made for rows to be written into")
    [call] = found
    level = next(levels(parents_of(place.module), call))
    target, value = assignment(level.statement) or (call, None)
    if value is not call or not isinstance(target, cst.Name):
        raise EditError(f"'{code_of(call)}' is given no name of its own")
    width = _width(call)
    longest_row = _longest_row(target.value, level.block[level.at + 1 :])
    if code_of(width).startswith("max("):
        raise EditError("it is as wide as its longest row")
    if (multiple := _multiple_of(parameters)) > 1:
        longest_row = f"min({code_of(width)}, -(-{longest_row} // {multiple}) * {multiple})"
    return with_expression(place.module, width, cst.parse_expression(longest_row)).code


def _with_cut_inputs(place: SourcePlace, parameters: Parameters) -> str:
    """The text in which the one call of a model in this statement gets its inputs through a function that cuts them.

    Raises EditError where there is no such call, or more than one.
    """
    module = place.module
    own = {s.name.value for s in module.body if isinstance(s, (cst.FunctionDef, cst.ClassDef))} | set(dir(builtins))
    calls = [c for c in nodes_of(cst.Call, place.statement) if c.args and _may_be_model(module, c.func, own)]
    if len(calls) != 1:
        raise EditError(f"{len(calls)} calls of a model stand in '{first_line(module, place.statement)}'")
    [call] = calls
    name = fresh_name(module, "without_padding")
    if any(a.keyword is not None for a in call.args) or len({a.star for a in call.args}) > 1:
        raise EditError(f"'{code_of(call)}' names some of its inputs")
    [star] = {a.star for a in call.args}
    if star and len(call.args) > 1:
        raise EditError(f"'{code_of(call)}' unpacks more than one of its inputs")
    values = ", ".join(code_of(a.value) for a in call.args)
    inputs = values if len(call.args) == 1 else f"({values})"
    new = call.with_changes(
        args=[cst.Arg(cst.parse_expression(f"{name}({inputs})"), star=star or ("*" if len(call.args) > 1 else ""))]
    )
    module, torch = with_torch(with_expression(module, call, new))
    pad, multiple = integer(parameters, "pad"), _multiple_of(parameters)
    width = "int(filled[-1]) + 1" if multiple == 1 else f"-(-(int(filled[-1]) + 1) // {multiple}) * {multiple}"
    return below_imports(
        module, statements(_CUTTING.format(name=name, torch=torch, pad=pad, width=width)), num_after=2
    ).code


def _may_be_model(module: cst.Module, called: cst.BaseExpression, own: Collection[str]) -> bool:
    """Whether a callee is a name or an attribute of `self` that is no function, class or import of the file."""
    if isinstance(called, cst.Name):
        return called.value not in own and not call_name(module, called)
    return m.matches(called, m.Attribute(value=m.Name("self")))


def _is_filled(module: cst.Module, call: cst.Call) -> bool:
    if call_name(module, call.func) not in _FULL or not call.args:
        return False
    size = call.args[0].value
    is_pair = isinstance(size, (cst.Tuple, cst.List)) and len(size.elements) == 2
    return is_pair or (
        len(call.args) >= 2
        and all(a.keyword is None for a in call.args[:2])
        and not code_of(call.func).endswith("full")
    )


def _width(call: cst.Call) -> cst.BaseExpression:
    size = call.args[0].value
    if isinstance(size, (cst.Tuple, cst.List)):
        return size.elements[1].value
    return call.args[1].value


def _longest_row(name: str, after: Sequence[cst.CSTNode]) -> str:
    """The greatest length of what a loop right after writes into the rows."""
    for statement in after:
        if name not in names_in(statement):
            if not isinstance(statement, cst.SimpleStatementLine):
                raise EditError(f"'{name}' is not filled right after it is made")
            continue
        if not isinstance(statement, cst.For):
            break
        return _of_loop(name, statement)
    raise EditError(f"no loop writes rows into '{name}'")


def _of_loop(name: str, loop: cst.For) -> str:
    """`max(len(row) for row in rows)` of `for i, row in enumerate(rows): name[i, : len(row)] = row`."""
    body = loop.body.body
    assigned = assignment(body[0]) if len(body) == 1 else None
    if assigned is None:
        raise EditError(f"the loop that fills '{name}' does something else, too")
    length = _length_written(name, assigned[0])
    target: cst.BaseExpression = loop.target
    rows = loop.iter
    is_counted = m.matches(rows, m.Call(func=m.Name("enumerate"), args=[m.DoNotCare()]))
    if is_counted and isinstance(target, cst.Tuple) and len(target.elements) == 2:
        counter, item = (e.value for e in target.elements)
        if names_in(counter) & names_in(length):
            raise EditError(f"'{code_of(length)}' depends on the row's number")
        target, rows = item, cst.ensure_type(rows, cst.Call).args[0].value
    if not _is_unchanged(rows):
        raise EditError(f"'{code_of(rows)}' can perhaps be gone through only once")
    each = code_of(target)
    inner = length.args[0].value if isinstance(length, cst.Call) and code_of(length.func) == "len" else None
    if inner is not None and code_of(inner) == each:
        return f"max(map(len, {code_of(rows)}))"
    return f"max({code_of(length)} for {each} in {code_of(rows)})"


def _length_written(name: str, target: cst.BaseExpression) -> cst.BaseExpression:
    """L of `name[i, :L]` or `name[i][:L]`."""
    if isinstance(target, cst.Subscript):
        last = target.slice[-1].slice
        inside = code_of(target.value)
        is_pair = len(target.slice) == 2 and inside == name
        is_nested = len(target.slice) == 1 and isinstance(target.value, cst.Subscript) and inside.startswith(f"{name}[")
        is_start = isinstance(last, cst.Slice) and last.lower is None and last.step is None
        if is_start and (is_pair or is_nested) and isinstance(last, cst.Slice) and last.upper is not None:
            return last.upper
    raise EditError(f"'{code_of(target)}' is no row of '{name}' written from its start")


def _is_unchanged(rows: cst.BaseExpression) -> bool:
    """Whether rows can be gone through twice: names and attributes (a batch's), lists made anew each time."""
    if isinstance(rows, cst.Call):
        if isinstance(rows.func, cst.Name) and rows.func.value == "zip":
            return all(_is_unchanged(a.value) for a in rows.args)
        return m.matches(rows, m.Call(func=m.Attribute(attr=m.Name("tolist")), args=[]))
    return isinstance(rows, (cst.Name, cst.Attribute, cst.Subscript))


LEVER = lever(__name__, propose, apply=apply, edit=edit, title="Padding cut to the batch's longest row")

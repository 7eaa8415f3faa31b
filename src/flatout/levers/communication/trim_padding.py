"""Columns that are padding in every row of a batch are cut off before the model sees them.

What        Of a batch of tokens [rows, positions], and what goes with it, the positions after the last one that is not padding in
            all rows are left out. In the text: a batch is made as wide as its longest row.
Guarantee   BOUNDED: padding that a model masks adds zeros; without them sums come in another order.
Refuses     Batches that are full in their longest row. Models to which padding is not nothing are told by the proof.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

import libcst as cst
from libcst import matchers as m

from flatout.errors import EditError
from flatout.levers.syntax.imports import call_name
from flatout.levers.syntax.source import code_of, find, names_in, place_of, with_expression
from flatout.records.evidence import Evidence, Padding
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal, Seams, integer

_LONGEST_FRACTION: Final = 0.97
"""Above, so little of the width is padding in all rows that looking for it costs as much."""
_FULL: Final = ("torch.full", "torch.zeros", "torch.ones", "numpy.full", "numpy.zeros", "numpy.ones")


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """For tokens whose batches are wider than their longest rows."""
    tokens = [p for p in evidence.paddings if p.dtype in ("int64", "int32") and p.signs]
    able = [p for p in tokens if p.longest_fraction < _LONGEST_FRACTION]
    if not findings or not able:
        why = "each batch is as wide as its longest row" if tokens else "no padded tokens"
        yield Refusal(lever=LEVER.id, because=why)
        return
    padding = max(able, key=lambda p: p.padding_fraction)
    high = max(f.saved_s[1] for f in findings)
    low = min(f.saved_s[0] for f in findings)
    parameters: Parameters = {"pad": int(padding.pad_value)}
    where = _where(evidence, padding, findings)
    if where is not None:
        with suppress(EditError):  # where the batch is made in a library, it is cut all the same
            parameters |= place_of(evidence, where)
    yield Candidate(
        lever=LEVER.id,
        parameters=parameters,
        saved_s=(0.5 * low, high),
        where=where,
        because=f"the longest row of a batch fills {padding.longest_fraction:.0%} of '{padding.name}', {padding.shape[1]} wide",
    )


def _where(evidence: Evidence, padding: Padding, findings: Sequence[Finding]) -> Any:
    return evidence.source_of(padding.source) or next((f.where for f in findings if f.where is not None), None)


def apply(seams: Seams, parameters: Parameters) -> None:
    """Cut the inputs of every call."""
    pad = integer(parameters, "pad")

    def cut(module: Any, given: Any) -> Any:
        args, kwargs = given
        tokens = next((t for t in (*args, *kwargs.values()) if _is_tokens(t)), None)
        if tokens is None:
            return given
        length = longest(tokens, pad)
        if length == tokens.shape[1]:
            return given
        seams.note(LEVER.id)
        shape = tokens.shape[:2]
        return tuple(cropped(a, shape, length) for a in args), {k: cropped(v, shape, length) for k, v in kwargs.items()}

    seams.on_inputs(cut)


def _is_tokens(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.dim() == 2 and value.dtype in (torch.int64, torch.int32)


def longest(tokens: Any, pad: int) -> int:
    """The positions up to the last one that some row fills; one at least."""
    filled = (tokens != pad).any(0).nonzero()
    return int(filled[-1]) + 1 if len(filled) else 1


def cropped(value: Any, shape: Sequence[int], length: int) -> Any:
    """The first positions of a tensor that begins with this shape; anything else as it is."""
    import torch

    if isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[:2] == shape:
        return value[:, :length].contiguous()
    return value


def edit(text: str, parameters: Parameters) -> str:
    """`torch.full((len(rows), WIDTH), PAD)` -> as wide as the longest row that is then written into it.

    Raises EditError where the rows cannot be told from the text.
    """
    place = find(text, parameters)
    found = [c for c in m.findall(place.function or place.statement, m.Call()) if _is_filled(place.module, c)]
    if len(found) != 1:
        raise EditError(f"{len(found)} tensors are made for rows to be written into")
    call = cst.ensure_type(found[0], cst.Call)
    block, index, name = _statement_of(place.function or place.module, call)
    width = _width(call)
    longest_row = _longest_row(place.module, name, block[index + 1 :])
    if code_of(width).startswith("max("):
        raise EditError("it is as wide as its longest row")
    return with_expression(place.module, width, cst.parse_expression(longest_row)).code


def _is_filled(module: cst.Module, node: cst.CSTNode) -> bool:
    call = cst.ensure_type(node, cst.Call)
    if call_name(module, call.func) not in _FULL or not call.args:
        return False
    size = call.args[0].value
    is_pair = isinstance(size, (cst.Tuple, cst.List)) and len(size.elements) == 2
    return is_pair or (len(call.args) >= 2 and all(a.keyword is None for a in call.args[:2]) and not _takes_value(call))


def _takes_value(call: cst.Call) -> bool:
    return code_of(call.func).endswith("full")


def _width(call: cst.Call) -> cst.BaseExpression:
    size = call.args[0].value
    if isinstance(size, (cst.Tuple, cst.List)):
        return size.elements[1].value
    return call.args[1].value


def _statement_of(scope: cst.CSTNode, call: cst.Call) -> tuple[Sequence[cst.CSTNode], int, str]:
    """The block, the place in it and the name of `name = call`."""
    for block in m.findall(scope, m.IndentedBlock() | m.Module()):
        body: Sequence[cst.CSTNode] = block.body  # type: ignore[attr-defined]
        for index, line in enumerate(body):
            small = line.body[0] if isinstance(line, cst.SimpleStatementLine) else None
            if isinstance(small, cst.Assign) and small.value is call and len(small.targets) == 1:
                target = small.targets[0].target
                if isinstance(target, cst.Name):
                    return body, index, target.value
    raise EditError(f"'{code_of(call)}' is given no name of its own")


def _longest_row(module: cst.Module, name: str, after: Sequence[cst.CSTNode]) -> str:
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
    line = body[0] if len(body) == 1 else None
    small = line.body[0] if isinstance(line, cst.SimpleStatementLine) else None
    if not isinstance(small, cst.Assign) or len(small.targets) != 1:
        raise EditError(f"the loop that fills '{name}' does something else, too")
    length = _length_written(name, small.targets[0].target)
    target: cst.BaseExpression = loop.target
    rows = loop.iter
    is_counted = m.matches(rows, m.Call(func=m.Name("enumerate"), args=[m.DoNotCare()]))
    if is_counted and isinstance(target, cst.Tuple) and len(target.elements) == 2:
        counter, item = (e.value for e in target.elements)
        if names_in(counter) & names_in(length):
            raise EditError(f"'{code_of(length)}' depends on the row's number")
        target, rows = item, cst.ensure_type(rows, cst.Call).args[0].value
    if not _is_kept(rows):
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


def _is_kept(rows: cst.BaseExpression) -> bool:
    """Whether rows can be gone through twice: names and attributes (a batch's), lists made anew each time."""
    if isinstance(rows, cst.Call):
        if isinstance(rows.func, cst.Name) and rows.func.value == "zip":
            return all(_is_kept(a.value) for a in rows.args)
        return m.matches(rows, m.Call(func=m.Attribute(attr=m.Name("tolist")), args=[]))
    return isinstance(rows, (cst.Name, cst.Attribute, cst.Subscript))


LEVER = Lever(
    id="communication.trim-padding",
    title="Padding cut to the batch's longest row",
    guarantee="bounded",
    module=__name__,
    propose=propose,
    apply=apply,
    edit=edit,
)

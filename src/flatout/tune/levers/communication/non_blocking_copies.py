"""Copies to the device for which the host does not wait.

What        `x.to(device)` and `x.cuda()`, at all lines of a step where the host waits for copies of its own memory, get
            `non_blocking=True`. Tensors of more than 64 KiB are put into pinned memory first, since CUDA waits for larger copies
            from other memory in any case.
Guarantee   EXACT: the same numbers in the same order of the device's work. CUDA takes what is copied out of pageable memory
            before the call returns, and torch keeps a pinned copy until the device has read it.
Refuses     Copies from memory that the script pinned itself: it may write the next batch there while the device still reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError, LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Parameters
from flatout.machine.cost.uploads import by_line, uploads
from flatout.tune.rewrite.calls import keyword_argument, true_name, with_argument, with_calls
from flatout.tune.rewrite.imports import call_name, with_torch
from flatout.tune.rewrite.source import (
    code_of,
    expression,
    find,
    nodes_of,
    place_parameters,
    several_places,
    text_at,
)

_STAGED_BYTES: Final = 64 << 10
"""Copies to the device of up to this size are asynchronous to the host also from pageable memory (CUDA C++ Programming Guide,
"Asynchronous Concurrent Execution")."""
_COPY: Final = m.Call(func=m.Attribute(attr=m.Name("to") | m.Name("cuda")))
_HOST: Final = ("cpu", "meta")


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it at all lines where the host waits for small copies."""
    if not findings:
        raise LeverRefused("the host waits for no copy to the device")
    found = {evidence.source_of(u.source): u for u in by_line(uploads(evidence)) if not u.is_async}
    first, whys, places, is_large = findings[0], list[str](), list[Parameters](), False
    for where in dict.fromkeys((first.where, *first.also)):
        upload = found.get(where)
        if where is None or upload is None:
            continue
        if upload.is_pinned:
            whys.append(f"line {where.line} copies from memory that the script has pinned, and may write to again")
            continue
        try:
            place = place_parameters(evidence, where)
            edit(text_at(evidence, place), place)
        except EditError as e:
            whys.append(f"line {where.line}: {e}")
            continue
        places.append(place)
        is_large |= upload.bytes > _STAGED_BYTES * upload.num
    if not places:
        raise LeverRefused(whys[0] if whys else "no line of the script's makes the copies")
    yield Candidate(
        parameters=several_places(places) | ({"pinned": True} if is_large else {}),
        saved_s=first.saved_s,
        where=first.where,
        because=first.because,
    )


def edit(text: str, parameters: Parameters) -> str:
    """Write `non_blocking=True` into the copies of the statement that the parameters name."""
    place = find(text, parameters)
    if not isinstance(place.statement, cst.SimpleStatementLine):
        raise EditError("the copy is in the head of a block")
    copies = [call for call in nodes_of(cst.Call, place.statement) if _is_copy(place.module, call)]
    if not copies:
        raise EditError("no copy to a device is written there")
    module, torch_name = place.module, "torch"
    is_pinned = bool(parameters.get("pinned")) and any(_is_plain(_source(call)) for call in copies)
    if is_pinned:
        module, torch_name = with_torch(module)
        if module is not place.module:
            return edit(module.code, parameters)

    def changed(call: cst.Call) -> cst.Call:
        new = with_argument(call, "non_blocking", true_name())
        if not is_pinned or not _is_plain(source := _source(call)):
            return new
        pinned = expression(f"({{x}}.pin_memory() if {torch_name}.cuda.is_available() else {{x}})", x=source)
        return new.with_changes(func=cst.ensure_type(new.func, cst.Attribute).with_changes(value=pinned))

    return with_calls(module, copies, changed).code


def _source(call: cst.Call) -> cst.BaseExpression:
    return cst.ensure_type(call.func, cst.Attribute).value


def _is_plain(value: cst.BaseExpression) -> bool:
    """Whether it may be written twice: a name, or an attribute of one."""
    return isinstance(value, cst.Name) or (isinstance(value, cst.Attribute) and _is_plain(value.value))


def _is_copy(module: cst.Module, call: cst.Call) -> bool:
    """Whether a call copies to a device, as far as the text tells, and waits."""
    if not m.matches(call, _COPY) or len(call.args) > 1 or keyword_argument(call, "non_blocking") is not None:
        return False
    if not call.args:
        return code_of(call.func).endswith(".cuda")
    target = call.args[0]
    if target.star or (target.keyword is not None and target.keyword.value != "device"):
        return False
    is_host = isinstance(target.value, cst.SimpleString) and str(target.value.evaluated_value).startswith(_HOST)
    name = call_name(module, target.value)
    return not is_host and not (name.startswith("torch.") and name != "torch.device")


LEVER = lever(__name__, propose, edit=edit, is_local=True, title="Copies that the host does not wait for")

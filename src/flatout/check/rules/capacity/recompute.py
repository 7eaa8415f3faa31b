"""Activations are computed twice although the memory would hold them.

Costs        The forward of every module under torch.utils.checkpoint runs again in the backward.
Evidence     Lines that call torch.utils.checkpoint; the operators below them that run in the forward and once more in the
             backward, with their time; the peak of the step beside the memory there is.
Levers       memory.keep-activations
False alarm  A step near the end of its memory, or a batch about to be made larger: then recomputing pays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import prod

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, Operator
from flatout.core.records.finding import Finding, Note
from flatout.machine.cost.accounting import around, facts_named, group_by, operator_seconds
from flatout.machine.cost.memory import bytes_at_peak, main_memory, room

_ROOM = 0.4
"""Of the memory: this much must be left when everything is kept."""
_NEAR_FULL = 0.85
_ELEMENT_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "bool": 1}


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line that asks for recomputation."""
    memory = main_memory(evidence)
    free = room(memory) if memory is not None else None
    if memory is None or memory.total_bytes is None or free is None:
        return
    for fact in facts_named(evidence, "recompute"):
        rows, seconds, result_bytes = _recomputed(evidence, fact.source)
        if seconds <= 0 or free - result_bytes < _ROOM * memory.total_bytes:
            continue
        yield Finding(
            where=evidence.source_of(fact.source),
            cost_s=seconds,
            saved_s=around(seconds, 0.2),
            because=f"{len(rows)} operators of the forward run again in the backward, {seconds * 1e3:.2f} ms a step; "
            f"kept, their results take at most {result_bytes / 2**20:.0f} MiB, and {free / 2**30:.1f} GiB of "
            f"{memory.total_bytes / 2**30:.1f} GiB are free at the peak",
            edit="call the module directly; recompute when the memory is needed",
            module=fact.module,
            operators=rows,
        )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note where the memory is nearly full of activations and nothing is recomputed."""
    memory = main_memory(evidence)
    if memory is None or memory.total_bytes is None or facts_named(evidence, "recompute"):
        return
    used_bytes = memory.measured_peak_bytes or memory.peak_bytes
    activations = bytes_at_peak(memory, "activations")
    if used_bytes > _NEAR_FULL * memory.total_bytes and activations > used_bytes / 2:
        yield Note(
            where=None,
            text=f"{activations / 2**30:.1f} GiB of activations fill the memory; torch.utils.checkpoint around the blocks "
            "of the model would keep their inputs alone and compute the rest again",
        )


def _recomputed(evidence: Evidence, source: int) -> tuple[tuple[int, ...], float, int]:
    """Operators in the backward that repeat the forward at this line or below it: rows, seconds, bytes of their results.

    An operator is repeated at most as often as the forward ran it; more calls of the same kind are the backward's own.
    """
    line = _line(evidence, source)
    below = [
        i
        for i, o in enumerate(evidence.operators)
        if any(_line(evidence, s) == line for s in (o.source, *evidence.callers.get(o.source, ())))
    ]
    kinds = {i: _kind(evidence, evidence.operators[i]) for i in below}
    forward: dict[tuple[object, ...], float] = defaultdict(float)
    for i in below:
        if evidence.operators[i].phase == "forward":
            forward[kinds[i]] += evidence.operators[i].num_calls
    again = group_by(
        (i for i in below if evidence.operators[i].phase == "backward" and kinds[i] in forward),
        lambda i: kinds[i],
    )
    seconds, num_bytes = 0.0, 0.0
    for kind, rows in again.items():
        calls = sum(evidence.operators[i].num_calls for i in rows)
        share = min(1.0, forward[kind] / calls)
        seconds += share * operator_seconds(evidence, rows)
        num_bytes += share * sum(_result_bytes(evidence.operators[i]) for i in rows)
    return tuple(i for rows in again.values() for i in rows), seconds, round(num_bytes)


def _line(evidence: Evidence, source: int) -> tuple[str, int]:
    """File and line of a source; a library that calls torch.utils.checkpoint itself is reached from one line in several ways."""
    found = evidence.source_of(source)
    return (found.file, found.line) if found is not None else ("", 0)


def _kind(evidence: Evidence, operator: Operator) -> tuple[object, ...]:
    """What an operator and its repetition share: the way there through libraries is another in the backward."""
    where = evidence.source_of(operator.source)
    library = where.library if where is not None else ""
    return (
        operator.op,
        _line(evidence, operator.source),
        library,
        tuple(t.shape for t in operator.inputs),
        operator.scalars,
    )


def _result_bytes(operator: Operator) -> float:
    if operator.bytes == 0:  # a view
        return 0.0
    return operator.num_calls * sum(prod(t.shape) * _ELEMENT_BYTES.get(t.dtype, 4) for t in operator.outputs)


RULE = rule(__name__, check, note=note, title="Activations are recomputed although they would fit")

"""What the iterations of a Python loop have in common: the tensors they read, their shapes, and what goes through the host."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Final

from flatout.core.records.evidence import Evidence, Operator, TensorSpec
from flatout.machine.cost.accounting import group_by, loops_around, uses_by_line

READ: Final = "aten._local_scalar_dense"
"""The operator of `.item()`, `int(x)` and `if x:`."""
_READS_WITHOUT_OPERATOR: Final = ("numpy", "tolist")
_FROM_PYTHON: Final = ("torch.tensor", "torch.as_tensor", "torch.from_numpy")
_WEIGHTS_AT: Final = {"aten.mm": (1,), "aten.addmm": (0, 2), "aten.convolution": (1, 2)}
"""Which inputs of an operator are parameters, where they come from before the step and a submodule runs it."""
_A_PART: Final = 0.5
"""Of a tensor: an operator that returns more does not pick from it."""
_PARTS: Final = frozenset(
    f"aten.{name}" for name in ("slice", "select", "narrow", "split", "unbind", "as_strided", "chunk")
)
"""They take the step's part of what was there before, without reading it."""
_WEIGHTS_ALONE: Final = {
    "aten.embedding": (0,),
    "aten.mkldnn_rnn_layer": tuple(range(1, 7)),  # and the states, which begin as zeros in every step
    "aten._cudnn_rnn": tuple(range(1, 7)),
}
_COPIES: Final = frozenset(f"aten.{name}" for name in ("clone", "_to_copy", "contiguous"))
_MOST_ITERATIONS: Final = 0.9
"""A shape that so many of the iterations have is that of all: the last piece of a tensor may be shorter."""
_ONCE_AN_ITERATION: Final = 0.5
"""Operators that run less often than this share of the usual count run in some iterations only."""


def sources_inside(evidence: Evidence, loop: tuple[str, int]) -> set[int]:
    """The source lines that lie in this loop, or are reached from it."""
    return {source for source in range(len(evidence.sources)) if loop in loops_around(evidence, source)}


def steps_environment(evidence: Evidence, loop: tuple[str, int]) -> bool:
    """Whether an environment is stepped in this loop: the next observation is known after the action alone."""
    lines = {r.source for r in evidence.lines if r.phase == "environment"}
    return bool(lines & sources_inside(evidence, loop))


def feeds_itself_through_host(evidence: Evidence, loop: tuple[str, int]) -> bool:
    """Whether values read in this loop are followed by a tensor made from Python's or NumPy's, from which values are read again.

    What Python does between the read and the tensor is not known: it may be the game that answers the action. A tensor made from
    Python has no maker in the trace: it is known again by its size, dtype, and who wrote to its memory last (if anybody).
    """
    trace, operators = evidence.trace, evidence.operators
    inside = sources_inside(evidence, loop)
    conversions = inside & set(uses_by_line(evidence, _FROM_PYTHON))
    is_handed_out = any(r.source in inside and r.call in _READS_WITHOUT_OPERATOR for r in evidence.host_reads)
    handed_out = set(trace.escapes or ()) if is_handed_out else set()
    from_python: set[int] = set()
    known: set[tuple[int, int, str]] = set()
    is_read = False
    for call, row in enumerate(trace.operator):
        operator, producers = operators[row], trace.producers[call]
        is_inside = operator.source in inside and operator.phase != "backward"
        is_conversion = operator.op == "aten.lift_fresh" or operator.source in conversions
        tensors = [(p, t.num_elements, t.dtype) for t, p in zip(operator.inputs, producers, strict=False)]
        is_new = is_inside and is_read and is_conversion
        if is_new:
            known.update(tensors[:1])
        if is_new or any(t[0] in from_python or t in known for t in tensors):
            from_python.add(call)
        if is_inside and (operator.op == READ or call in handed_out):
            if call in from_python:
                return True
            is_read = True
    return False


def have_various_shapes(evidence: Evidence, rows: Collection[int]) -> bool:
    """Whether these operators meet other shapes from iteration to iteration in the step that was traced, so that they cannot be
    stacked.

    Rows that a mask picks out of one tensor do not count: sums over all of them at once (`index_add`) need no equal lengths.
    """
    operators, wanted = evidence.operators, set(rows)
    counts = Counter(row for row in evidence.trace.operator if row in wanted)
    by_place = group_by(counts, lambda i: (operators[i].op, operators[i].source, operators[i].module))
    totals = [sum(counts[i] for i in group) for group in by_place.values()]
    if not totals or any(_picks_by_mask(operators[i]) for i in counts):
        return False
    usual = Counter(totals).most_common(1)[0][0]
    iterations = min(total for total in totals if total >= _ONCE_AN_ITERATION * usual)
    for group in by_place.values():
        of_shape: Counter[tuple[tuple[int, ...], ...]] = Counter()
        for i in group:
            of_shape[tuple(t.shape for t in operators[i].inputs)] += counts[i]
        is_in_all = sum(of_shape.values()) >= iterations
        if is_in_all and max(of_shape.values()) < _MOST_ITERATIONS * iterations:
            return True
    return False


def _picks_by_mask(operator: Operator) -> bool:
    return operator.op == "aten.index" and any(t.dtype == "bool" for t in operator.inputs[1:])


def bytes_at_once(evidence: Evidence, rows: Collection[int], *, shared: Collection[tuple[int, ...]] = ()) -> float:
    """Bytes that equal calls move in a step when all iterations are one: what they share is read once, and its gradient is made
    once.

    `shared` has the shapes of what the iterations share: a backward operator that returns such a tensor fills a gradient with
    zeros, puts one iteration's rows into it, or adds it to those of the others.
    """
    operators = evidence.operators
    moved = sum(operators[i].bytes * operators[i].num_calls for i in rows)
    num_calls = sum(operators[i].num_calls for i in rows)
    if num_calls > 1 and all(_makes_gradient_of(operators[i], shared) for i in rows):
        return moved / num_calls
    inputs = _first_inputs(evidence, rows)
    read = sum(inputs[p].num_elements * element_bytes(inputs[p].dtype) for p in _shared_positions(evidence, rows))
    smallest = min((operators[i].bytes for i in rows), default=0)
    return moved - min(read, smallest) * max(0.0, num_calls - 1)


def shared_shapes(evidence: Evidence, groups: Iterable[Collection[int]]) -> set[tuple[int, ...]]:
    """The shapes, in all steps looked at, of what the calls of one of these groups share and take a part of each.

    Of tensors of two dimensions and more: only those have a size that few others have.
    """
    found: set[tuple[int, ...]] = set()
    for rows in groups:
        for position in _shared_positions(evidence, rows):
            for operator in (evidence.operators[i] for i in rows):
                if position < len(operator.inputs) and _takes_part(operator, operator.inputs[position]):
                    found.add(operator.inputs[position].shape)
    return {shape for shape in found if len(shape) > 1}


def _takes_part(operator: Operator, whole: TensorSpec) -> bool:
    return sum(t.num_elements for t in operator.outputs) <= _A_PART * whole.num_elements


def _makes_gradient_of(operator: Operator, shared: Collection[tuple[int, ...]]) -> bool:
    return operator.phase == "backward" and any(t.shape in shared for t in operator.outputs)


def reads_what_was_there_before(evidence: Evidence) -> bool:
    """Whether the first layer of the step traced reads a tensor from before the step: the same in each, as where all the data is
    one batch.

    Not where a loader hands batches out, an environment is stepped, or Python or NumPy makes tensors: those come from outside
    torch in every step.
    """
    if evidence.loaders or evidence.steps.phases.get("environment") or uses_by_line(evidence, _FROM_PYTHON):
        return False
    trace = evidence.trace
    parts: set[tuple[int, ...]] = set()
    for call, row in enumerate(trace.operator):
        operator = evidence.operators[row]
        if operator.op in _PARTS:
            parts.update(t.shape for t in operator.outputs)
        weights = _WEIGHTS_AT.get(operator.op) or _WEIGHTS_ALONE.get(operator.op)
        if weights is None or operator.phase != "forward":
            continue
        inputs = [p for p in range(len(operator.inputs)) if p not in weights and p < len(trace.producers[call])]
        is_part = any(operator.inputs[p].shape in parts for p in inputs)
        return bool(inputs) and not is_part and all(_is_from_before(evidence, trace.producers[call][p]) for p in inputs)
    return False


def _is_from_before(evidence: Evidence, producer: int) -> bool:
    """Whether a tensor, or what it is a plain copy of, was there before the step; `producer` made it, -1 for none."""
    trace = evidence.trace
    if producer == -1:
        return True
    is_copy = evidence.operators[trace.operator[producer]].op in _COPIES
    return is_copy and bool(trace.producers[producer]) and trace.producers[producer][0] == -1


def _calls_of(evidence: Evidence, rows: Collection[int]) -> list[int]:
    wanted = set(rows)
    return [call for call, row in enumerate(evidence.trace.operator) if row in wanted]


def _first_inputs(evidence: Evidence, rows: Collection[int]) -> tuple[TensorSpec, ...]:
    calls = _calls_of(evidence, rows)
    return evidence.operators[evidence.trace.operator[calls[0]]].inputs if calls else ()


def _shared_positions(evidence: Evidence, rows: Collection[int]) -> list[int]:
    """Which inputs all these calls read from one place: the whole result of one call of the step, or the parameters of one
    submodule.
    """
    trace, calls = evidence.trace, _calls_of(evidence, rows)
    if len(calls) < 2:
        return []
    shared = []
    for position in range(len(_first_inputs(evidence, rows))):
        producers = {trace.producers[c][position] for c in calls if position < len(trace.producers[c])}
        if len(producers) == 1 and _is_whole(evidence, trace.operator[calls[0]], position, producers.pop()):
            shared.append(position)
    return shared


def _is_whole(evidence: Evidence, row: int, position: int, producer: int) -> bool:
    """Whether calls with this producer in common read one tensor, and not each another part of one."""
    operator = evidence.operators[row]
    if producer < 0:
        return "." in operator.module and position in _WEIGHTS_AT.get(operator.op, ())
    outputs = evidence.operators[evidence.trace.operator[producer]].outputs
    return operator.inputs[position].num_elements >= max((t.num_elements for t in outputs), default=0)


def element_bytes(dtype: str) -> int:
    """Bytes of one element, from the number of bits in the name of the dtype.

    >>> element_bytes("bfloat16"), element_bytes("bool")
    (2, 1)
    """
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits.group()) // 8) if bits else 1

"""Arithmetic in float64 that nobody asked for.

Costs        Twice the bytes and half the vector width on a CPU; on most GPUs 2 to 64 times slower products.
Evidence     Operators with float64 operands, and the first line of the step that brought float64 in. Trial: the same operators
             at the same shapes in float32.
Levers       workload.float32
False alarm  float64 in a handful of scalars; a study that needs it, as its author knows.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, Operator
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeInDtype
from flatout.core.records.workload import Source
from flatout.machine.cost.accounting import around, remaining_fraction, result_of

_WORTH_A_TRIAL = 0.05
_COVERED = 0.95
_MOST = 40


def propose(evidence: Evidence) -> Iterator[TimeInDtype]:
    """Replay the operators that make up nearly all of the float64 time in float32."""
    rows = _rows(evidence)
    if sum(_seconds(evidence, i) for i in rows) > _WORTH_A_TRIAL * evidence.steps.step_s:
        yield _trial_of(evidence, rows)


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for all float64 work of the step."""
    rows = _rows(evidence)
    result = result_of(evidence, _trial_of(evidence, rows)) if rows else None
    if result is None:
        return
    cost_s = sum(_seconds(evidence, i) for i in rows)
    remaining = remaining_fraction(result)
    yield Finding(
        where=_entrance(evidence),
        cost_s=cost_s,
        saved_s=around(cost_s * (1 - remaining), 0.15),
        because=f"{cost_s * 1e3:.2f} ms of the step is float64 arithmetic; the same operators in float32 take "
        f"{remaining:.0%} of that (tried)",
        edit="make it float32 where it comes in: dtype=torch.float32 when the tensor is made, .float() on arrays from NumPy",
        operators=rows,
        basis="trial",
    )


def _seconds(evidence: Evidence, row: int) -> float:
    """What another dtype could save: the operator's own time, unless the host is what the step waits for."""
    operator = evidence.operators[row]
    return 0.0 if operator.bound == "host" else operator.op_s


def _is_float64(operator: Operator) -> bool:
    return any(t.dtype in ("float64", "complex128") for t in operator.inputs + operator.outputs)


def _rows(evidence: Evidence) -> tuple[int, ...]:
    return tuple(i for i, o in enumerate(evidence.operators) if _is_float64(o))


def _trial_of(evidence: Evidence, rows: tuple[int, ...]) -> TimeInDtype:
    ranked = sorted(rows, key=lambda i: -evidence.operators[i].op_s)
    total = sum(evidence.operators[i].op_s for i in rows)
    largest: list[int] = []
    covered = 0.0
    for row in ranked[:_MOST]:
        largest.append(row)
        covered += evidence.operators[row].op_s
        if covered >= _COVERED * total:
            break
    return TimeInDtype(operators=tuple(largest), old="float64", new="float32")


def _entrance(evidence: Evidence) -> Source | None:
    """The line that brought float64 in: a switch thrown before the steps, or the first operator of the step that made it."""
    settings = evidence.workload.settings
    for name in ("default_dtype", "module_dtype"):
        for setting in settings:
            if setting.name == name and "64" in setting.value and setting.source is not None:
                return setting.source
    for source in evidence.float64_sources:
        return evidence.source_of(source)
    calls = [o for o in map(evidence.operators.__getitem__, evidence.trace.operator) if o.source >= 0]
    for operator in calls:
        makes = any(t.dtype == "float64" for t in operator.outputs)
        takes = any(t.dtype == "float64" for t in operator.inputs)
        if makes and not takes and any(t.num_elements > 1 for t in operator.outputs):
            return evidence.source_of(operator.source)
    return next((evidence.source_of(o.source) for o in calls if _is_float64(o)), None)


RULE = rule(__name__, check, propose=propose, title="Accidental float64", rewrites_line=True)

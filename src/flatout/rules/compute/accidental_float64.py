"""Arithmetic in float64 that nobody asked for.

Costs        Twice the bytes and half the vector width on a CPU; on most GPUs 2 to 64 times slower products.
Evidence     Operators with float64 operands, and the first line of the step that brought float64 in. Trial: the same operators
             at the same shapes in float32.
Levers       workload.float32
False alarm  float64 in a handful of scalars; a study that needs it, as its author knows.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.cost.accounting import around, kept_fraction, result_of
from flatout.records.evidence import Evidence, Operator
from flatout.records.finding import Finding, Rule
from flatout.records.trial import TimeInDtype
from flatout.records.workload import Source

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
    if not rows:
        return
    result = result_of(evidence, _trial_of(evidence, rows))
    if result is None:
        return
    cost_s = sum(_seconds(evidence, i) for i in rows)
    kept = kept_fraction(result)
    where = _entrance(evidence)
    yield Finding(
        rule=RULE.id,
        regime="compute",
        where=where,
        cost_s=cost_s,
        saved_s=around(cost_s * (1 - kept), 0.15),
        because=f"{cost_s * 1e3:.2f} ms of the step is float64 arithmetic; the same operators in float32 take {kept:.0%} of that "
        "(tried)",
        edit="make it float32 where it comes in: dtype=torch.float32 when the tensor is made, .float() on arrays from NumPy",
        levers=RULE.levers,
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
    chosen: list[int] = []
    covered = 0.0
    for row in ranked[:_MOST]:
        chosen.append(row)
        covered += evidence.operators[row].op_s
        if covered >= _COVERED * total:
            break
    return TimeInDtype(operators=tuple(chosen), old="float64", new="float32")


def _entrance(evidence: Evidence) -> Source | None:
    """The line that brought float64 in: a switch thrown before the steps, or the first operator of the step that made it."""
    for name in ("default_dtype", "module_dtype"):
        for setting in evidence.workload.settings:
            if setting.name == name and "64" in setting.value and setting.source is not None:
                return setting.source
    for source in evidence.float64_sources:
        return evidence.source_of(source)
    for row in evidence.trace.operator:
        operator = evidence.operators[row]
        makes = any(t.dtype == "float64" for t in operator.outputs)
        takes = any(t.dtype == "float64" for t in operator.inputs)
        if makes and not takes and operator.source >= 0 and any(t.num_elements > 1 for t in operator.outputs):
            return evidence.source_of(operator.source)
    for row in evidence.trace.operator:
        if _is_float64(evidence.operators[row]) and evidence.operators[row].source >= 0:
            return evidence.source_of(evidence.operators[row].source)
    return None


RULE = Rule(
    id="compute.accidental-float64",
    title="Accidental float64",
    module=__name__,
    check=check,
    propose=propose,
    levers=("workload.float32",),
)

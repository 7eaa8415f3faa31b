"""Half precision on a CPU that has no units for it.

Costs        Every product converts its operands, or runs in a slow path; autocast adds its casts around them.
Evidence     Time in bfloat16 or float16 operators on a CPU. Trial: the module on the same inputs in float32, without autocast.
Levers       workload.float32
False alarm  A CPU with bfloat16 units (AMX, AVX512-BF16): the trial decides, not a list of processors.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeModel
from flatout.machine.cost.accounting import (
    around,
    call_of_model,
    model_seconds,
    model_trial,
    remaining_fraction,
    result_of,
)

_HALVES = ("bfloat16", "float16")
_WORTH_A_TRIAL = 0.05


def propose(evidence: Evidence) -> Iterator[TimeModel]:
    """Time the module in float32."""
    trial = model_trial(evidence, "float32")
    half_s = sum(evidence.operators[i].op_s for i in _rows(evidence))
    if trial is not None and half_s > _WORTH_A_TRIAL * evidence.steps.step_s:
        yield trial


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for the module."""
    rows = _rows(evidence)
    result = result_of(evidence, model_trial(evidence, "float32")) if rows else None
    if result is None:
        return
    remaining = remaining_fraction(result)
    saved_s = max(0.0, model_seconds(evidence) * (1 - remaining))
    half_s = sum(evidence.operators[i].total_s for i in rows)
    dtypes = sorted({t.dtype for i in rows for t in evidence.operators[i].inputs if t.dtype in _HALVES})
    yield Finding(
        where=call_of_model(evidence),
        cost_s=max(half_s, saved_s),
        saved_s=around(saved_s, 0.15),
        because=f"{half_s * 1e3:.2f} ms of the step work on {' and '.join(dtypes)} on a CPU; in float32, without autocast, "
        f"forward and backward take {remaining:.0%} (tried)",
        edit="leave autocast and .half()/.bfloat16() out on this machine: enabled=torch.cuda.is_available()",
        operators=rows,
        basis="trial",
    )


def _rows(evidence: Evidence) -> tuple[int, ...]:
    if evidence.workload.device != "cpu":
        return ()
    return tuple(i for i, o in enumerate(evidence.operators) if any(t.dtype in _HALVES for t in o.inputs))


RULE = rule(__name__, check, propose=propose, title="Half precision without units for it")

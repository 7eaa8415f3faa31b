"""Half precision on a CPU that has no units for it.

Costs        Every product converts its operands, or runs in a slow path; autocast adds its casts around them.
Evidence     Time in bfloat16 or float16 operators on a CPU. Trial: the module on the same inputs in float32, without autocast.
Levers       workload.float32
False alarm  A CPU with bfloat16 units (AMX, AVX512-BF16): the trial decides, not a list of processors.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.cost.accounting import around, kept_fraction, main_model, model_seconds, result_of
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding, Rule
from flatout.records.trial import TimeModel

_HALVES = ("bfloat16", "float16")
_WORTH_A_TRIAL = 0.05


def propose(evidence: Evidence) -> Iterator[TimeModel]:
    """Time the module in float32."""
    rows = _rows(evidence)
    if sum(evidence.operators[i].op_s for i in rows) > _WORTH_A_TRIAL * evidence.steps.step_s:
        trial = _trial_of(evidence)
        if trial is not None:
            yield trial


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for the module."""
    rows, trial = _rows(evidence), _trial_of(evidence)
    result = result_of(evidence, trial) if trial is not None and rows else None
    if result is None or trial is None:
        return
    kept = kept_fraction(result)
    saved_s = max(0.0, model_seconds(evidence) * (1 - kept))
    half_s = sum(evidence.operators[i].total_s for i in rows)
    dtypes = sorted({t.dtype for i in rows for t in evidence.operators[i].inputs if t.dtype in _HALVES})
    yield Finding(
        rule=RULE.id,
        regime="compute",
        where=evidence.source_of(evidence.models[trial.model].source),
        cost_s=max(half_s, saved_s),
        saved_s=around(saved_s, 0.15),
        because=f"{half_s * 1e3:.2f} ms of the step work on {' and '.join(dtypes)} on a CPU; in float32, without "
        "autocast, forward "
        f"and backward take {kept:.0%} (tried)",
        edit="leave autocast and .half()/.bfloat16() out on this machine: enabled=torch.cuda.is_available()",
        levers=RULE.levers,
        operators=rows,
        basis="trial",
    )


def _rows(evidence: Evidence) -> tuple[int, ...]:
    if evidence.workload.device != "cpu":
        return ()
    return tuple(i for i, o in enumerate(evidence.operators) if any(t.dtype in _HALVES for t in o.inputs))


def _trial_of(evidence: Evidence) -> TimeModel | None:
    model = main_model(evidence)
    if model is None:
        return None
    return TimeModel(model=model, variant="float32", backward=evidence.models[model].num_graphs_used > 0)


RULE = Rule(
    id="compute.unsupported-precision",
    title="Half precision without units for it",
    module=__name__,
    check=check,
    propose=propose,
    levers=("workload.float32",),
)

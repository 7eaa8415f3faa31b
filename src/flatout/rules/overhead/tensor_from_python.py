"""A tensor is built from Python numbers, or from a list of arrays, in every step.

Costs        Python visits every element: some ten nanoseconds each, where an array is copied as a whole.
Evidence     Calls of torch.tensor or torch.as_tensor on lists of many elements in a watched step, with their seconds.
Levers       graph.vectorise
False alarm  Short lists (a shape, some labels); arrays, which are copied as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.cost.accounting import PYTHON_CONVERSIONS, uses_by_line
from flatout.cost.feeding import with_pause
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding, Rule

_COSTLY: Final = {"list": "a list of numbers", "arrays": "a list of arrays"}
_NUMBER_BYTES: Final = 8


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line."""
    for source, uses in uses_by_line(evidence, PYTHON_CONVERSIONS).items():
        costly = [u for u in uses if u.detail in _COSTLY]
        if not costly:
            continue
        call_s = sum(u.seconds for u in costly)
        # The list itself is mostly built on the same line: the sampler knows what the line takes in all.
        sampled_s = sum(
            line.seconds
            for line in evidence.lines
            if line.source == source and line.process == "main" and line.num_samples > 4
        )
        call_s = min(call_s, evidence.steps.whole_s)
        cost_s = max(call_s, min(sampled_s, evidence.steps.whole_s))
        calls = sum(u.calls for u in costly)
        yield Finding(
            rule=RULE.id,
            regime="overhead",
            where=evidence.source_of(source),
            cost_s=cost_s,
            saved_s=with_pause(evidence, (max(0.7 * call_s, 0.5 * cost_s), 0.97 * cost_s)),
            because=f"{costly[0].name} of {_COSTLY[costly[0].detail]}, {calls:.0f} times a step, takes {call_s * 1e3:.2f} ms; "
            f"with what builds the list the line takes {cost_s * 1e3:.2f} ms",
            edit="keep the data in one array or tensor from the start and index it; torch.from_numpy(np.stack(arrays)) for a "
            "list of arrays",
            levers=RULE.levers,
            operators=tuple(
                i
                for i, o in enumerate(evidence.operators)
                if o.source == source and o.phase not in ("backward", "optimizer")
            ),
            measured=True,
        )


RULE = Rule(
    id="overhead.tensor-from-python",
    title="A tensor built from Python objects",
    module=__name__,
    check=check,
    levers=("graph.vectorise",),
)

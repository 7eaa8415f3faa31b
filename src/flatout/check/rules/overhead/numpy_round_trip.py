"""Values leave for NumPy and come back within the step.

Costs        NumPy's own passes over the data on one core, the way there and back, on a GPU a wait and two copies; and the graph
             is cut.
Evidence     A function that calls `.numpy()` and makes a tensor of an array again in each step; the sampler's seconds on the
             lines between, less their tensor operators.
Levers       graph.vectorise
False alarm  Values that only leave (metrics, logs); batches that only come in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.machine.cost.accounting import group_by, uses_by_line

_AWAY: Final = ("Tensor.numpy",)
_BACK: Final = ("torch.from_numpy", "torch.as_tensor", "torch.tensor")
_FROM: Final = ("array", "arrays")
_FEWEST_SAMPLES: Final = 8
_PHASES: Final = ("forward", "other", "backward")


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per function that goes there and back."""
    away = uses_by_line(evidence, _AWAY)
    back = {s: us for s, us in uses_by_line(evidence, _BACK).items() if any(u.detail in _FROM for u in us)}
    returning = group_by(back, evidence.function_of)
    for function, leaving in group_by(away, evidence.function_of).items():
        coming = returning.get(function, [])
        numbers = [line.line for s in (*leaving, *coming) if (line := evidence.source_of(s)) is not None]
        if not coming or not numbers:
            continue
        inside = {
            i
            for i, s in enumerate(evidence.sources)
            if (s.file, s.function) == function and min(numbers) <= s.line <= max(numbers)
        }
        samples = [x for x in evidence.lines if x.source in inside and x.process == "main" and x.phase in _PHASES]
        rows = tuple(
            i
            for i, o in enumerate(evidence.operators)
            if o.source in inside and o.phase not in ("backward", "optimizer")
        )
        sampled_s = sum(x.seconds for x in samples)
        cost_s = min(sampled_s - sum(evidence.operators[i].op_s for i in rows), evidence.steps.whole_s)
        if sum(x.num_samples for x in samples) < _FEWEST_SAMPLES or cost_s <= 0:
            continue
        per_line = group_by(samples, lambda x: x.source)
        yield Finding(
            where=evidence.source_of(max(per_line, key=lambda s: sum(x.seconds for x in per_line[s]))),
            cost_s=cost_s,
            saved_s=(0.4 * cost_s, 0.9 * cost_s),
            because=f"the step leaves for NumPy and comes back ({len(leaving)} and {len(coming)} line(s)); NumPy and Python take "
            f"{cost_s * 1e3:.2f} ms of it",
            edit="write the same with torch operators: most NumPy functions have one of the same name",
            also=evidence.sources_of((*leaving, *coming)),
            operators=rows,
        )


RULE = rule(__name__, check, title="A round trip through NumPy")

"""Tensors are searched for NaN or infinity in every step.

Costs        A pass over every tensor checked, several operators each, and a host read for every answer.
Evidence     Calls of isnan, isinf or isfinite whose answer the host reads nearby, with the time of the operators on those lines.
Levers       graph.check-the-norm
False alarm  isnan used to mask values (nobody reads it), a check of the loss alone (too small to matter).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.machine.cost.accounting import group_by, operator_seconds, rows_at, uses_by_line
from flatout.machine.cost.lines import function_finder

_NAMES: Final = ("torch.isnan", "torch.isinf", "torch.isfinite")
_NEARBY_LINES: Final = 3
"""The answer is read on the line of the check or at most so many lines below it."""


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per function that checks."""
    lines = uses_by_line(evidence, _NAMES)
    for sources in group_by(lines, function_finder(evidence)).values():
        reads = [r for r in evidence.host_reads if any(_is_near(evidence, r.source, s) for s in sources)]
        if not reads:
            continue
        places = dict.fromkeys([*sources, *(r.source for r in reads)])
        rows = tuple(i for i in rows_at(evidence, places) if evidence.operators[i].phase != "backward")
        wait_s = sum(r.wait_s for r in reads if r.on_device)
        cost_s = min(evidence.steps.whole_s, operator_seconds(evidence, rows) + wait_s)
        calls = sum(u.calls for s in sources for u in lines[s])
        num_reads = sum(r.calls for r in reads)
        yield Finding(
            where=evidence.source_of(sources[0]),
            cost_s=cost_s,
            saved_s=(0.9 * cost_s, cost_s),
            because=f"{calls:.0f} checks for NaN or infinity a step, whose answers are read {num_reads:.0f} times, take "
            f"{cost_s * 1e3:.2f} ms",
            edit="check the one number that turns NaN when any of them does (the loss, or the norm that clip_grad_norm_ "
            "returns), every some ten steps",
            also=evidence.sources_of(places),
            operators=rows,
            basis="timed",
        )


def _is_near(evidence: Evidence, read: int, check: int) -> bool:
    a, b = evidence.source_of(read), evidence.source_of(check)
    return a is not None and b is not None and a.file == b.file and 0 <= a.line - b.line <= _NEARBY_LINES


RULE = rule(__name__, check, title="A search for NaN in every step", rewrites_line=True)

"""A tensor is built from Python numbers, or from a list of arrays, in every step.

Costs        Python visits every element: some ten nanoseconds each, where an array is copied as a whole.
Evidence     Calls of torch.tensor or torch.as_tensor on lists of many elements in a watched step, with their seconds.
Levers       graph.vectorise, communication.tensors-once
False alarm  Short lists (a shape, some labels); arrays, which are copied as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.usage import CallUse
from flatout.machine.cost.accounting import PYTHON_CONVERSIONS, group_by, rows_at, uses_by_line
from flatout.machine.cost.feeding import of_pause, pause_s, with_pause
from flatout.machine.cost.lines import function_finder

_COSTLY: Final = {"list": "a list of numbers", "arrays": "a list of arrays"}


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per function: who keeps its data as tensors mends all its lines at once."""
    lines = {
        source: costly
        for source, uses in uses_by_line(evidence, PYTHON_CONVERSIONS).items()
        if (costly := [u for u in uses if u.detail in _COSTLY])
    }
    function_of = function_finder(evidence)
    for sources in group_by(
        lines, lambda s: function_of(s) if evidence.source_of(s) is not None else ("", str(s))
    ).values():
        times = {s: _seconds(evidence, s, lines[s]) for s in sources}
        hottest = max(times, key=lambda s: times[s][1])
        call_s, cost_s = (min(sum(t[i] for t in times.values()), evidence.steps.whole_s) for i in (0, 1))
        first, calls = lines[hottest][0], sum(u.calls for s in sources for u in lines[s])
        yield Finding(
            where=evidence.source_of(hottest),
            cost_s=cost_s + pause_s(evidence),
            saved_s=with_pause(evidence, (max(0.7 * call_s, 0.5 * cost_s), 0.97 * cost_s)),
            because=f"{first.name} of {_COSTLY[first.detail]}, {calls:.0f} times a step, takes {call_s * 1e3:.2f} ms"
            f"{_with_lists(call_s, cost_s, len(times))}{of_pause(evidence)}",
            edit="keep the data in one array or tensor from the start and index it; torch.from_numpy(np.stack(arrays)) for a "
            "list of arrays",
            also=evidence.sources_of(s for s in sources if s != hottest),
            operators=tuple(
                i for i in rows_at(evidence, times) if evidence.operators[i].phase not in ("backward", "optimizer")
            ),
            basis="timed",
        )


def _with_lists(call_s: float, cost_s: float, num_lines: int) -> str:
    """What the lines take with the lists that they build, where that is more."""
    if f"{call_s * 1e3:.2f}" == f"{cost_s * 1e3:.2f}":
        return ""
    return f"; with what builds the list the {'line takes' if num_lines == 1 else 'lines take'} {cost_s * 1e3:.2f} ms"


def _seconds(evidence: Evidence, source: int, uses: list[CallUse]) -> tuple[float, float]:
    """Seconds (of the calls, of the whole line): the list itself is mostly built on the same line, which the sampler
    knows in all.
    """
    call_s = sum(u.seconds for u in uses)
    sampled_s = sum(
        line.seconds
        for line in evidence.lines
        if line.source == source and line.process == "main" and line.num_samples > 4
    )
    return call_s, max(call_s, min(sampled_s, evidence.steps.whole_s))


RULE = rule(__name__, check, title="A tensor built from Python objects", rewrites_line=True)

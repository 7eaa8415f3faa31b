"""Values leave for NumPy and come back within the step.

Costs        NumPy's own passes over the data on one core, the way there and back, on a GPU a wait and two copies; and the graph
             is cut.
Evidence     A function whose source leads from a call of `.numpy()`, observed in a step, through functions of NumPy and of its
             own to a tensor again; the sampler's seconds on these very statements, less their tensor operators.
Levers       graph.vectorise
False alarm  Values that only leave (metrics, logs); batches that only come in; what a loader's fetch does; actions that go to an
             environment and observations that come back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.usage import RoundTrip
from flatout.machine.cost.accounting import group_by
from flatout.machine.cost.lines import line_finder, source_of_line

_FEWEST_SAMPLES: Final = 8
_PHASES: Final = ("forward", "other", "backward")


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per function that goes there and back."""
    line_of = line_finder(evidence)
    others = {
        *evidence.backward_sources,
        *(m.source for m in evidence.models),
        *(o.source for o in evidence.optimizers),
    }
    for trip in evidence.round_trips:
        lines = {i for i, s in enumerate(evidence.sources) if s.file == trip.file and _is_between(trip, s.line)}
        inside = lines - others
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
        per_line = group_by(samples, lambda x: line_of(x.source))
        hottest = max(per_line, key=lambda line: sum(x.seconds for x in per_line[line]))
        ends = [i for i in lines if evidence.sources[i].line in (*trip.away, *trip.back)]
        yield Finding(
            where=source_of_line(evidence, per_line[hottest][0].source, hottest) if hottest is not None else None,
            cost_s=cost_s,
            saved_s=(0.4 * cost_s, 0.9 * cost_s),
            because=f"the step leaves for NumPy and comes back ({len(trip.away)} and {len(trip.back)} line(s)); NumPy and Python "
            f"take {cost_s * 1e3:.2f} ms of it",
            edit="write the same with torch operators: most NumPy functions have one of the same name",
            also=evidence.sources_of(sorted(ends)),
            operators=rows,
        )


def _is_between(trip: RoundTrip, line: int) -> bool:
    return any(first <= line <= last for first, last in trip.spans)


RULE = rule(__name__, check, title="A round trip through NumPy", rewrites_line=True)

"""A line breaks the compiled graph in two.

Costs        Python between the pieces, the checks and wrappers of one graph more, forward and backward, and no fusion across the
             break.
Evidence     dynamo's reasons with the line. Trial: a chain of small operators compiled in two graphs against one, which gives
             what surrounds one graph more; the lost fusion is not in it.
Levers       graph.whole-graph
False alarm  Breaks between large pieces: their price is some tens of microseconds, and below the noise it is a note.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding, Note
from flatout.core.records.trial import TimeGraphBreak
from flatout.machine.cost.accounting import result_of
from flatout.machine.cost.families import COMPILED_GRAPH


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for all breaks of the step, at the first of them."""
    breaks, result = evidence.compile_events("graph-break"), result_of(evidence, _trial(evidence))
    if result is None or evidence.steps.is_device_bound or not _runs_compiled_code(evidence):
        return
    each_s = max(0.0, (result.now_s or 0.0) - (result.cured_s or 0.0))
    calls = max([1.0, *(m.calls for m in evidence.models if m.num_graphs_used)])
    cost_s = min(each_s * len(breaks) * calls, evidence.steps.whole_s)
    yield Finding(
        where=evidence.source_of(breaks[0].source),
        cost_s=cost_s,
        saved_s=(0.5 * cost_s, cost_s),
        because=f"{len(breaks)} line(s) break the graph, {len(breaks) * calls:.0f} times a step; one graph more costs "
        f"{each_s * 1e6:.0f} us here (tried), the lost fusion besides; torch's reason: {breaks[0].reason}",
        edit="move the line out of the compiled function (prints, host reads), or write the branch with torch.where",
        also=evidence.sources_of(b.source for b in breaks[1:]),
        basis="trial",
    )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note per line that breaks the graph."""
    for event in evidence.compile_events("graph-break"):
        yield Note(where=evidence.source_of(event.source), text=f"breaks the compiled graph: {event.reason}")


def _runs_compiled_code(evidence: Evidence) -> bool:
    """Whether steps call what was compiled; steps that replay a CUDA graph of it do not."""
    is_called = any(o.op == COMPILED_GRAPH for o in evidence.operators) or any(m.calls > 0 for m in evidence.models)
    return is_called or not evidence.operators


def _trial(evidence: Evidence) -> TimeGraphBreak | None:
    """One break."""
    is_broken = bool(evidence.compile_events("graph-break"))
    return TimeGraphBreak(backward=evidence.steps.phases.get("backward", 0.0) > 0) if is_broken else None


RULE = rule(__name__, check, trial=_trial, note=note, title="A line that breaks the compiled graph", rewrites_line=True)

"""Values are computed and read one by one in a loop: one tiny tensor, one operation, one read at a time.

Costs        Several operators and a host read for every sample, where one comparison of the whole batch would do, or, where each
             value needs the one before (a discounted return), plain arithmetic on Python numbers; on a GPU each read stalls.
Evidence     A line that reads values many times a step inside a loop of its own, on tensors that no backward goes through, with
             the time of the loop's operators and of the sampler's looks at its lines. Whether a value needs the one before
             is seen by what each operator of one step read.
Levers       graph.vectorise
False alarm  A loop over steps or micro-batches, one read per batch, a loop whose operators are trained through; a loop over the
             parameters (overhead.parameter-loop).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.machine.cost.accounting import group_by, idle_seconds, loops_around, operator_seconds, step_loops
from flatout.machine.cost.iterations import READ, steps_environment
from flatout.machine.cost.parameters import parameter_loops
from flatout.machine.cost.trace import dependences

_MANY: Final = 12
_FEWEST_SAMPLES: Final = 8
_SMALL: Final = 4096
"""Elements of a tensor that is one sample's."""
_RECURRENT: Final = 0.5
"""Share of the reads that one chain of operators must pass for the values to need one another."""
_AT_ONCE: Final = (
    "compare and sum the whole batch at once and keep the sums as tensors, to read once per epoch; values that the loop's Python "
    "needs, read all at once before it (.tolist())"
)
_AS_NUMBERS: Final = (
    "convert the inputs to Python numbers or NumPy once before the loop (.tolist()), and compute on those in it"
)
_EACH_NEEDS_THE_LAST: Final = "; each value needs the one before, so they cannot be computed all at once"


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per loop."""
    own = step_loops(evidence)
    over_parameters = {i for rows in parameter_loops(evidence).values() for i in rows}

    def loop_of(source: int) -> tuple[str, int] | None:
        return next((loop for loop in loops_around(evidence, source) if loop not in own), None)

    reads = [r for r in evidence.host_reads if r.calls >= _MANY and r.source >= 0]
    for loop, inside in group_by(reads, lambda r: loop_of(r.source)).items():
        if loop is None or steps_environment(evidence, loop):
            continue
        sources = [s for s in range(len(evidence.sources)) if loop_of(s) == loop]
        rows = tuple(i for i, o in enumerate(evidence.operators) if o.source in sources)
        operators = [evidence.operators[i] for i in rows]
        largest = max((t.num_elements for o in operators for t in o.outputs), default=0)
        if largest > _SMALL or any(o.phase == "backward" for o in operators) or over_parameters & set(rows):
            continue
        samples = [x for x in evidence.lines if x.source in sources and x.process == "main"]
        is_sampled = sum(x.num_samples for x in samples) >= _FEWEST_SAMPLES
        sampled_s = sum(x.seconds for x in samples) if is_sampled else 0.0
        cost_s = min(evidence.steps.whole_s, max(sampled_s, operator_seconds(evidence, rows)))
        calls = sum(r.calls for r in inside)
        is_recurrence = _longest_chain(evidence, rows) >= _RECURRENT * min(r.calls for r in inside)
        yield Finding(
            where=evidence.source_of(max(inside, key=lambda r: r.calls).source),
            cost_s=cost_s,
            saved_s=(0.75 * cost_s, 0.95 * cost_s),
            because=f"a loop reads {calls:.0f} values a step one by one ({', '.join(dict.fromkeys(r.call for r in inside))}), "
            f"{cost_s * 1e3:.2f} ms in all{_beside(evidence)}{_EACH_NEEDS_THE_LAST if is_recurrence else ''}",
            edit=_AS_NUMBERS if is_recurrence else _AT_ONCE,
            also=evidence.sources_of(dict.fromkeys(o.source for o in operators)),
            operators=rows,
            basis="timed",
        )


def _longest_chain(evidence: Evidence, rows: tuple[int, ...]) -> int:
    """How often one chain of the loop's operators, each on the result of the one before, comes by before a value is read."""
    trace, operators = evidence.trace, evidence.operators
    chains = dependences(trace, operators, set(rows))
    calls = [c for c, row in enumerate(trace.operator) if row in rows]
    reads = [c for c in calls if operators[trace.operator[c]].op == READ]
    return max((chains[c] for c in reads or calls), default=0)


def _beside(evidence: Evidence) -> str:
    """What of a step a device idles, which is all that waiting for it can cost."""
    if evidence.steps.device_s is None:
        return ""
    return f", waiting included; the device idles {idle_seconds(evidence) * 1e3:.2f} ms of the step"


RULE = rule(__name__, check, title="Values read one at a time from tiny tensors", rewrites_line=True)
